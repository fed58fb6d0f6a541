"""`reproduce`: from names of experiments to their tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from suptickets.errors import SparsityError, whole
from suptickets.experiments.averages import located
from suptickets.experiments.cells import Cell, experiment, select
from suptickets.experiments.commands import command
from suptickets.experiments.estimate import cost, tree
from suptickets.experiments.numbers import table
from suptickets.experiments.plan import (
    LATER,
    TOGETHER,
    Mode,
    Reading,
    Task,
    plan,
    readings,
    run_of,
    seeds_of,
    too_short,
    wanted,
)
from suptickets.experiments.provenance import TOLD, revision
from suptickets.experiments.results import notes
from suptickets.experiments.runner import Runner
from suptickets.experiments.store import Results, Store
from suptickets.experiments.work import Compare, Grow
from suptickets.report.measures import measure
from suptickets.report.parted import parted
from suptickets.training.build import check_model, data_of
from suptickets.training.processes import connect
from suptickets.training.progress import print_plain
from suptickets.training.result import hardware
from suptickets.training.settings import UNSAID, build, resolve
from suptickets.training.shown import grid

MOST_SEEDS = 1000  # of each cell


def reproduce(
    names: Sequence[str],
    data_dir: str | None = None,
    seeds: int | None = None,
    cells: str = "",
    jobs: int | None = None,
    executor: str = "local",
    scale: float = 1.0,
    dry_run: bool = False,
    separate: bool = False,
    out: str | Path = "results",
    changes: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Compute tables and figures of the paper; results that the store in `out` has are not computed again.

    Args:
        names: of experiments, see `suptickets list experiments`.
        data_dir: where the data are; ImageNet there, or in its folder `imagenet`.
        seeds: runs of each cell, from seed 1; by default as many as in the paper.
        cells: a filter, such as `sparsity=0.95,method=rigl`.
        jobs: how many processes work at a time; by default three on a GPU, and one elsewhere.
        executor: `local` processes, `slurm`, or `debug`: in this process.
        scale: shortens the training, for a trial.
        dry_run: only say what would be done, and what it costs.
        separate: every cell has runs of its own, as in the paper, instead of forks of common trunks.
        out: the folder of the results; runs are kept in its `runs`.
        changes: settings other than the paper's for all runs, for a trial.

    Returns:
        `experiment`, `mode`, and `cells`: settings, measure, the paper's number and ours (mean, sd, runs) of
        each; what a reader must know, and what is missing, failed or damaged. For a dry run, the cost.
    """
    names = list(dict.fromkeys(names))
    chosen = select([cell for name in names for cell in experiment(name).table], cells)
    mode = _mode(scale, separate, changes or {}, chosen)
    seeds = None if seeds is None else whole("--seeds", seeds)
    if seeds is not None and seeds > MOST_SEEDS:
        raise SparsityError(f"--seeds must be at most {MOST_SEEDS:,}")
    store, runner = Store(out), Runner(out, executor, jobs)
    records = store.read_aloud()
    about = {"experiment": " ".join(names), "mode": str(mode)}
    if dry_run:
        if "model" in dict(mode.changes):
            print_plain("FLOPs and hours are those of the paper's model")
        tasks = _counted(chosen, seeds, Results(records, mode), mode)
        Console(stderr=True).print(tree(tasks))
        return {**about, **cost(tasks, records, hardware(connect().device))}
    tasks = _tasks(chosen, seeds, Results(records, mode), mode)
    missing, steps = _data(tasks, data_dir)
    _refuse(chosen, missing)
    _check_scale(tasks, mode, steps)
    _tell_revision(mode, tasks)
    there = [cell for cell in chosen if cell.data not in missing]
    _tell_stored(wanted(there, seeds), Results(records, mode), store)
    job = (mode, str(out), data_dir, command(names, cells, seeds, mode, out))
    tasks = _tasks(there, seeds, Results(records, mode), mode)
    runner.run([Grow(*job, task, jobs=runner.jobs) for task in tasks])
    runner.run([Compare(*job, *pair) for pair in _together(there, seeds, store, mode)])
    found = table(chosen, Results(store.read(), mode), seeds)
    told = {"missing": list(missing.values()), "failed": runner.failed, "damaged": store.damaged}
    alone = seeds == 1 and any(cell.booster == TOGETHER or cell.measure == "p_value" for cell in chosen)
    few = ["A dense ensemble and a p-value need two seeds at least."] if alone else []
    return {**about, "cells": found, "notes": [*map(str, notes(mode, chosen)), *few], **told}


def _mode(scale: float, separate: bool, changes: Mapping[str, Any], cells: Iterable[Cell]) -> Mode:
    """How cells are computed; a change that leaves all runs the same does not count."""
    usual, cells = Mode(scale, separate), list(cells)
    for cell in cells:
        for name in changes.keys() & dict(cell.variation).keys() & {*LATER}:
            raise SparsityError(f"{name} is what {cell.experiment} varies: --cells picks some")
    Mode(scale, separate, tuple(changes.items()))  # refuses what cannot be changed, before values are checked
    changed = build({**resolve({}).as_dict(), **changes})
    if "model" in changes:
        check_model(changed.model)
    pairs = [(name, getattr(changed, name)) for name in sorted(changes)]
    found = {reading for cell in cells for reading in readings(cell)}

    def matters(pair: tuple[str, Any]) -> bool:
        mode = Mode(scale, separate, (pair,))
        return any(run_of(reading, 1, mode) != run_of(reading, 1, usual) for reading in found)

    others = [pair for pair in pairs if pair[0] not in UNSAID and matters(pair)]
    return Mode(scale, separate, tuple(others), tuple(pair for pair in pairs if pair[0] in UNSAID))


def _tasks(cells: Sequence[Cell], seeds: int | None, results: Results, mode: Mode) -> list[Task]:
    """The plan for results that are not in the store."""
    return plan([pair for pair in wanted(cells, seeds) if pair not in results], mode)


def _counted(cells: Sequence[Cell], seeds: int | None, results: Results, mode: Mode) -> list[Task]:
    """The plan to show; if separate, each experiment is counted on its own, as the paper ran it."""
    once = _tasks(cells, seeds, results, mode)
    if not mode.separate:
        return once
    groups = parted(cells, lambda cell: cell.experiment).values()
    tasks = [task for group in groups for task in _tasks(group, seeds, results, mode)]
    if len(tasks) > len(once):
        epochs = sum(task.epochs for task in once)
        print_plain(
            f"counted by experiment; runs that several share are trained once: {len(once):,} runs, "
            f"{epochs:,} epochs"
        )
    return tasks


def _data(tasks: Iterable[Task], data_dir: str | None) -> tuple[dict[str, str], dict[str, int]]:
    """Data that are needed and not there, with the reason; and the steps of an epoch of those that are."""
    runs = {branch.settings.data: branch.settings for task in tasks for branch in task.branches}
    missing, steps = {}, {}
    for name, run in runs.items():
        try:
            steps[name] = data_of(located(run, data_dir)).steps(run.batch_size)
        except SparsityError as error:
            missing[name] = f"without {name}: {error}"
    return missing, steps


def _refuse(cells: Iterable[Cell], missing: Mapping[str, str]) -> None:
    """Say which data are missing; refuse if no cell can be trained without them."""
    if missing and missing.keys() == {cell.data for cell in cells if readings(cell)}:
        raise SparsityError("; ".join(missing.values()))
    for line in missing.values():
        print_plain(line)


def _check_scale(tasks: Iterable[Task], mode: Mode, steps: Mapping[str, int]) -> None:
    """Refuse a scale that leaves too few steps, and say which one does not."""
    found = {reading for task in tasks for branch in task.branches for reading in branch.readings}
    known = [reading for reading in found if reading.settings.data in steps]

    def short(scale: float) -> bool:
        runs = (run_of(reading, 1, replace(mode, scale=scale)) for reading in known)
        return any(too_short(run, steps[run.data]) for run in runs)

    if mode.scale == 1 or not short(mode.scale):
        return
    enough = next((n / 100 for n in range(int(mode.scale * 100) + 1, 101) if not short(n / 100)), None)
    what = f"--scale {mode.scale:g} leaves too few steps of training"
    raise SparsityError(f"{what}: " + (f"use at least {enough:g}" if enough else "use more training data"))


def _tell_revision(mode: Mode, tasks: Sequence[Task]) -> None:
    """Say so if results will not name a revision that others can look at, as they must to be believed."""
    if tasks and not mode.trial and not re.fullmatch("[0-9a-f]{40}", revision()):
        todo = "commit first" if revision().endswith("-dirty") else f"set {TOLD}"
        print_plain(f"results will name the revision {revision()}: {todo}")


def _tell_stored(asked: Iterable[tuple[int, Reading]], results: Results, store: Store) -> None:
    """Say how many results are taken from the store instead of being computed."""
    there = [pair in results for pair in asked]
    if any(there):
        print_plain(f"{sum(there)} of {len(there)} results are in {store.folder} already (--out: elsewhere)")


def _together(
    cells: Sequence[Cell], seeds: int | None, store: Store, mode: Mode
) -> list[tuple[Reading, tuple[int, ...]]]:
    """The readings of several seeds at once, with these seeds, if all their runs are there."""
    results, pairs = Results(store.read(), mode), {}
    for cell in (cell for cell in cells if cell.booster == TOGETHER):
        reading, count = readings(cell)[0], seeds_of(cell, seeds)
        if count > 1 and all((seed, reading) in results for seed in range(1, count + 1)):
            pairs[reading] = tuple(range(1, count + 1))
    return list(pairs.items())


def show(result: Mapping[str, Any], console: Console) -> None:
    """Print every cell in a row, or what a dry run found."""
    if "cells" not in result:
        return console.out(_costs(result))
    columns = {"cell": False, "measure": False, "paper": True, "ours": True, "runs": True}
    console.print(grid(columns, map(_shown, result["cells"])))
    for line in [*result["notes"], *(f"failed: {line}" for line in result["failed"])]:
        console.out(line)


def _shown(cell: Mapping[str, Any]) -> list[str]:
    """The row of a cell."""
    paper, ours, kind = cell["paper"] or {}, cell["ours"] or {}, measure(cell["measure"])
    what = " ".join(str(value) for value in cell["settings"].values())
    theirs = kind.quoted(paper.get("printed", ""), paper.get("mean"), paper.get("deviation"))
    own = kind.bare(ours.get("mean"), ours.get("sd"))
    return [what, cell["measure"], theirs, own, str(ours.get("runs", ""))]


def _costs(found: Mapping[str, Any]) -> str:
    """What a dry run found."""
    if not found["runs"]:
        return "nothing is left to train"
    what = f"{found['runs']:,} runs, {found['epochs']:,} epochs, {found['flops']:.3g} FLOPs"
    return f"{what}, about {found['hours']:.3g} hours ({found['hours_from']})"
