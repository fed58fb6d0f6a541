"""From results to numbers: our number for a cell of the paper's tables, and the time that it took."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from statistics import mean, pstdev, stdev
from typing import Any

from suptickets.errors import SparsityError
from suptickets.experiments.cells import Cell
from suptickets.experiments.estimate import about_model, layers_of
from suptickets.experiments.plan import TOGETHER, Reading, forks, readings, start_of, together_key, trunk_of
from suptickets.experiments.store import Results
from suptickets.measure.significance import kolmogorov_smirnov
from suptickets.report import Ours
from suptickets.training.settings import Settings, build


def table(cells: Iterable[Cell], results: Results, seeds: int | None = None) -> list[dict[str, Any]]:
    """Each cell: settings, measure, the paper's number, and ours (none where there is no result yet)."""
    return [_row(cell, ours(cell, results, seeds)) for cell in cells]


def _row(cell: Cell, found: Ours | None) -> dict[str, Any]:
    what = {key: value for key, value in cell.as_dict().items() if key not in ("experiment", "measure")}
    paper = None if cell.paper is None else {**asdict(cell.paper), "printed": cell.printed}
    return {
        "experiment": cell.experiment,
        "settings": {key: list(value) if isinstance(value, tuple) else value for key, value in what.items()},
        "measure": cell.measure,
        "paper": paper,
        "ours": None if found is None else found._asdict(),
    }


def ours(cell: Cell, results: Results, seeds: int | None = None) -> Ours | None:
    """Mean, deviation and number of our runs; of the first `seeds` seeds, if given."""
    if cell.of == "model":
        value = about_model(cell)
        return None if value is None else Ours(value, None, 0)
    found = [_by_seed(results, reading, seeds) for reading in readings(cell)]
    if cell.measure == "p_value":
        return _p_value(*found)
    if cell.booster == TOGETHER:
        return _together(cell, results, found[0])
    values = [value for value in (measured(cell, one) for one in found[0].values()) if value is not None]
    return Ours(mean(values), stdev(values) if len(values) > 1 else None, len(values)) if values else None


def _by_seed(results: Results, reading: Reading, seeds: int | None) -> dict[int, Mapping[str, Any]]:
    return {s: one for s, one in results.measures(reading).items() if seeds is None or s <= seeds}


def measured(cell: Cell, measures: Mapping[str, Any]) -> float | None:
    """The cell's number in the measures of one run."""
    tickets = [ticket["accuracy"] for ticket in measures.get("tickets") or []]
    if cell.ticket is not None:
        return (
            float(measures["tickets"][cell.ticket - 1][cell.measure]) if len(tickets) >= cell.ticket else None
        )
    if cell.measure in ("ticket_accuracy", "ticket_deviation"):
        return (mean if cell.measure == "ticket_accuracy" else pstdev)(tickets) if tickets else None
    if cell.measure in ("disagreement", "kl"):
        value = (measures.get("diversity") or {}).get(cell.measure)
    elif cell.measure == "layer_sparsity":
        value = _layer_sparsity(cell, measures)
    else:
        value = measures.get(cell.measure)
    return None if value is None else float(value)


def _layer_sparsity(cell: Cell, measures: Mapping[str, Any]) -> float | None:
    layers = {layer["name"]: layer for layer in measures.get("layers") or []}
    chosen = [layers[name] for name in layers_of(cell.layer, layers)]
    size = sum(layer["size"] for layer in chosen)
    return 1 - sum(layer["nonzero"] for layer in chosen) / size if size else None


def _p_value(with_booster: Mapping[int, Any], without: Mapping[int, Any]) -> Ours | None:
    a, b = ([one["accuracy"] for one in side.values()] for side in (with_booster, without))
    return Ours(kolmogorov_smirnov(a, b).p, None, min(len(a), len(b))) if min(len(a), len(b)) > 1 else None


def _together(cell: Cell, results: Results, found: Mapping[int, Any]) -> Ours | None:
    """The number for the networks of several seeds: as many, from the first, as were compared."""
    for count in range(len(found), 1, -1):
        measures = results.find(together_key(readings(cell)[0], range(1, count + 1)), 0)
        value = None if measures is None else measured(cell, measures)
        if value is not None:
            return Ours(value, None, count)
    return None


# ---- the time that they took ----


def spent(records: Iterable[Mapping[str, Any]]) -> float | None:
    """Seconds of all runs that these results were read off, added up: each run once, and each trunk once.

    The time of a branch includes that of its trunk, which is estimated by its share of the epochs. It is
    assumed that two revisions have not shared a trunk.
    """
    runs: dict[str, tuple[Mapping[str, Any], float]] = {}
    for one in records:
        if one["seed"] and one.get("seconds"):
            key = json.dumps([one.get("settings") or one["cell"], one["seed"]], sort_keys=True)
            known = runs.get(key)
            runs[key] = one, max(one["seconds"], known[1] if known else 0.0)
    trunks: dict[tuple[Settings, str], list[float]] = {}
    total = sum(seconds - _shared(one, seconds, trunks) for one, seconds in runs.values())
    return total + sum(map(mean, trunks.values())) if runs else None


def _shared(one: Mapping[str, Any], seconds: float, trunks: dict[tuple[Settings, str], list[float]]) -> float:
    """The seconds of a run that its trunk took, which are noted in `trunks`."""
    try:
        run = build(one.get("settings") or {})
    except (SparsityError, TypeError):  # settings of another version
        return 0.0
    if one["separate"] or not forks(run):
        return 0.0
    part = seconds * start_of(run) / run.epochs
    trunks.setdefault((trunk_of(run), str(one.get("revision"))), []).append(part)
    return part
