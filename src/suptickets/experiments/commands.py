"""The commands that compute results anew: all that there are of a table, and nothing else."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from suptickets.experiments.cells import EXPERIMENTS, Cell, experiment, select
from suptickets.experiments.gains import BOTH, named, pairs
from suptickets.experiments.plan import KEY, Mode, readings, trains
from suptickets.experiments.store import Results

MAIN = ("vgg16", "resnet50", "wrn28-10", "imagenet")  # main tables, whose runs other experiments share
SPLIT = ("model", "method", "data", "sparsity")  # what a command that would train too much is split by


def command(names: Sequence[str], cells: str, seeds: int | None, mode: Mode, out: str | Path) -> str:
    """The command that makes results (again), to be copied; the place of the data and the jobs are open."""
    options = {"--cells": cells, "--seeds": seeds, "--scale": None if mode.scale == 1 else f"{mode.scale:g}"}
    given = [str(part) for pair in options.items() if pair[1] for part in pair]
    given += ["--separate"] * mode.separate
    for name, value in mode.changes + mode.unsaid:
        given += ["--set", f"{name}={_written(value)}"]
    parts = ["suptickets", "reproduce", *names, *given, "--data-dir", "DATA", "--out", str(out)]
    return shlex.join(parts)


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def commands(name: str, mode: Mode, done: Iterable[Cell], results: Results) -> list[str]:
    """The commands that compute these cells anew, up to the last of their seeds, and nothing else."""
    every = experiment(name).table
    if not trains(every):
        return [f"suptickets report STORE --experiment {name}"]
    seeds = {cell: max(_seeds(cell, results)) for cell in done if readings(cell)}
    if not seeds:
        return [command([name], "", None, mode, "again")]
    return [
        command([name], part, last, mode, "again")
        for last in sorted({*seeds.values()}, reverse=True)
        for part in _filters([cell for cell in seeds if seeds[cell] == last], every)
    ]


def commands_of_pairs(records: Sequence[Mapping[str, Any]], mode: Mode) -> list[str]:
    """The commands that train all pairs: each as a part of the first table that has it."""
    results, left, found = Results(records, mode), {pair.cell for pair in pairs(records, mode)}, list[str]()
    for name in dict.fromkeys((*MAIN, *EXPERIMENTS)):
        own = {cell: named(cell.as_dict()) for cell in experiment(name).table}
        done = [cell for cell in own if own[cell] in left and cell.booster in BOTH and not cell.variation]
        found += commands(name, mode, done, results) if done else []
        left -= {own[cell] for cell in done}
    return found


def _seeds(cell: Cell, results: Results) -> set[int]:
    return {seed for reading in readings(cell) for seed in results.measures(reading)}


def _filters(done: Sequence[Cell], cells: Sequence[Cell], keys: Sequence[str] = SPLIT) -> list[str]:
    """The narrowest filter that leaves these cells, or several filters if one would leave others too."""
    where = _filter(done, cells)
    needed = {reading for cell in done for reading in readings(cell)}
    more = any(not needed.issuperset(readings(cell)) for cell in select(cells, where))
    if not more or not keys:
        return [where]
    values = dict.fromkeys(getattr(cell, keys[0]) for cell in done)
    split = [[cell for cell in done if getattr(cell, keys[0]) == value] for value in values]
    return [where for part in split for where in _filters(part, cells, keys[1:])]


def _filter(done: Sequence[Cell], cells: Sequence[Cell]) -> str:
    """A filter by what these cells have, and not all have."""
    known, every = [cell.texts() for cell in done], [cell.texts() for cell in cells]
    terms = []
    for key in KEY:
        kept = {one.get(key) for one in known}
        if None not in kept and kept != {one.get(key) for one in every}:
            terms += [f"{key}={value}" for value in dict.fromkeys(one[key] for one in known)]
    return ",".join(terms)
