"""Results of a store as runs: measures are in the store, curves in the folders of the runs, if they are kept.

A line of a store is one reading of a run; several may be read off the same run (rules to average its tickets,
the first three of nine tickets). So a run here has the settings of what was read, not of what was trained.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from suptickets.errors import SparsityError
from suptickets.report.runs import INCIDENTAL, Run, grouped, read_run
from suptickets.training.settings import Settings, read_config

ELSEWHERE = INCIDENTAL - {"seed"}  # settings in which two folders of the same run may differ
TRAINED = ("epochs", "cycle_epochs")  # what a trial shortens: as trained, not as in the paper


def stored_runs(records: Sequence[Mapping[str, Any]], folder: Path | None = None) -> list[Run]:
    """A run for each result; of two for the same cell and seed, the later one counts.

    Args:
        records: lines of a store.
        folder: where the folders of its runs are, or were.
    """
    latest = {_text([record["cell"], record["seed"]]): record for record in records}
    configs: dict[str, dict[str, Any]] = {}
    for record in latest.values():
        configs.setdefault(_text(record["cell"]), _config(record))
    places = _places(folder) if folder is not None else {}
    return [_run(record, configs[_text(record["cell"])], places) for record in latest.values()]


def _run(record: Mapping[str, Any], config: Mapping[str, Any], places: Mapping[str, Path]) -> Run:
    made = {key: record.get(key) for key in ("seconds", "hardware", "versions")}
    path = places.get(_identity(_settings(record)), Path())
    return Run(path, {**config, "seed": record["seed"]}, {**record["measures"], **made}, [])


def _config(record: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that are the same for all seeds: without teachers, which are the tickets of one seed."""
    settings, epochs = _settings(record), record["measures"].get("epochs")
    trained = {key: settings[key] for key in TRAINED if key in settings}
    whole = {} if epochs is None else {"epochs": epochs}
    config = {**settings, **record["cell"], **trained, **whole}
    order = [field.name for field in fields(Settings) if field.name != "teachers"]
    return {key: config[key] for key in (*order, "seeds") if key in config}


def _settings(record: Mapping[str, Any]) -> Mapping[str, Any]:
    settings = record.get("settings")
    return settings if isinstance(settings, Mapping) else {}


def _places(folder: Path) -> dict[str, Path]:
    """The run folders, by their settings."""
    found = {}
    for config in sorted(folder.glob("*/config.json")):
        with suppress(SparsityError):
            found[_identity(read_config(config))] = config.parent
    return found


def _identity(settings: Mapping[str, Any]) -> str:
    return _text({key: value for key, value in settings.items() if key not in ELSEWHERE})


def _text(value: object) -> str:
    return json.dumps(value, sort_keys=True)


def trained(runs: Sequence[Run]) -> list[Run]:
    """The runs that these were read off, one seed of each setting: from its folder, or else the store."""
    chosen: dict[str, Run] = {}
    for one in grouped(runs):
        run = next((run for run in one.runs if run.path != Path()), one.runs[0])
        known = str(run.path) if run.path != Path() else _text(run.summary.get("tickets") or one.label)
        chosen.setdefault(known, run)
    return [_read(run) for run in chosen.values()]


def _read(run: Run) -> Run:
    with suppress(SparsityError):
        return run if run.path == Path() else read_run(run.path)
    return run
