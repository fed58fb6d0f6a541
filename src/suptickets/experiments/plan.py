"""From cells to runs: trunks, the branches that fork from them, and what is read off their tickets.

A `Reading` is all that decides a cell's number, except the seed; cells that show different measures of one
thing share it. A `Task` is one trunk with everything that grows from it, for one seed: what a process does at
a time. In a `Mode` with `separate` every reading is a run of its own instead, as in the paper.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from suptickets.errors import SparsityError
from suptickets.experiments.cells import VARIATIONS, Cell, experiment
from suptickets.tickets import epochs_to_steps
from suptickets.training.build import drop_epochs, method
from suptickets.training.settings import Settings, resolve

KEY = ("data", "model", "method", "sparsity", "booster", *VARIATIONS)
AVERAGING = ("rule", "beta", "batch_norm")  # settings that only combine tickets
CYCLES = ("cycles", "cycle_epochs", "lr_high", "explore_rate", "schedule", "criteria")  # those that make them
IN_CYCLES = ("lr_low", "explore_at", "prune", "prune_when")  # these make them too, but no cell varies them
LATER = ("explore_rate",)  # added after results were stored: part of a key only where it is not the default

FIXED = ("seed", "recipe", "milestones", "milestones_of", "keep_tickets", "teachers", "data_dir")  # set here

TOGETHER = "dense-ensemble"  # the booster of cells about the networks of all seeds


@dataclass(frozen=True)
class Mode:
    """How cells are computed; results of different modes never stand in one table.

    Attributes:
        scale: the length of the training, as a share of the paper's; below 1 it is a trial.
        separate: every reading is a run of its own.
        changes: settings other than the paper's, for all runs: a trial too.
        unsaid: settings that change no result, for all runs: such as `workers`.
    """

    scale: float = 1.0
    separate: bool = False
    changes: tuple[tuple[str, Any], ...] = ()
    unsaid: tuple[tuple[str, Any], ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        """Refuse what cannot be computed."""
        if isinstance(self.scale, bool) or not 0 < self.scale <= 1:
            raise SparsityError(f"--scale must be above 0 and at most 1, not {self.scale}")
        for name, _ in self.changes:
            if name in KEY and name not in ("model", *LATER):
                raise SparsityError(f"{name} belongs to the cells, which are the paper's: --cells picks some")
            if name in FIXED:
                raise SparsityError(f"{name} cannot be changed: it is how runs are told apart, or forked")
        changed = {} if self.separate else dict(self.changes)
        if changed.get("include_start"):
            raise SparsityError("include_start needs --separate: forks share the tickets of their cycles")
        if changed.get("decay") == "cosine":
            raise SparsityError("decay=cosine needs --separate: the rate of a fork falls over another time")

    @property
    def trial(self) -> bool:
        """Whether the setting is not the paper's."""
        return self.scale != 1 or bool(self.changes)

    def as_dict(self) -> dict[str, Any]:
        """The mode as plain values, for JSON."""
        return {"scale": self.scale, "separate": self.separate, "changes": dict(self.changes)}

    def __str__(self) -> str:
        """The mode in words."""
        changed = "".join(f", {name} {value}" for name, value in self.changes)
        return f"{'separate' if self.separate else 'forked'} at scale {self.scale:g}{changed}"


@dataclass(frozen=True)
class Reading:
    """What a number is read off: the paper's settings, for any seed; those without effect are the default."""

    settings: Settings

    @staticmethod
    def of(settings: Mapping[str, Any]) -> Reading:
        """The reading for a cell's settings."""
        full, default = resolve(settings), default_settings(settings["data"])
        forgotten: tuple[str, ...] = ()
        if full.booster in ("none", "tree-net", "batch-ensemble"):
            forgotten += CYCLES
        if full.booster not in ("sup-tickets", "swa"):
            forgotten += AVERAGING
        elif full.rule != "cima":
            forgotten += ("beta",)
        if full.method in ("dense", "small-dense"):
            forgotten += ("distribution",)
        kept = {name: getattr(default, name) for name in forgotten}
        return Reading(
            replace(full, **kept, sparsity=full.target if full.method == "dense" else full.sparsity)
        )

    @property
    def key(self) -> dict[str, Any]:
        """What identifies the reading in the store: a new setting of the library does not change it."""
        values, default = self.settings.as_dict(), default_settings(self.settings.data, self.settings.booster)
        return {n: values[n] for n in KEY if n not in LATER or values[n] != getattr(default, n)}


@dataclass(frozen=True)
class Branch:
    """A run, and what is read off it.

    Attributes:
        settings: of the run, with its seed.
        readings: what is wanted of it.
        fork: whether it begins at the end of the task's trunk.
        teacher: the settings of the branch whose tickets teach it.
    """

    settings: Settings
    readings: tuple[Reading, ...]
    fork: bool = False
    teacher: Settings | None = None


@dataclass(frozen=True)
class Task:
    """A trunk, and the branches in the order in which they can be trained."""

    trunk: Settings | None
    branches: tuple[Branch, ...]

    @property
    def seed(self) -> int:
        """The seed, which is the same for all its runs."""
        return self.branches[0].settings.seed

    @property
    def model(self) -> str:
        """The paper's model, whatever stands in for it."""
        return next(reading.settings.model for branch in self.branches for reading in branch.readings)

    @property
    def runs(self) -> list[tuple[Settings, int]]:
        """Every run, and how many epochs it trains."""
        shared = 0 if self.trunk is None else self.trunk.epochs
        trunk = [] if self.trunk is None else [(self.trunk, shared)]
        return trunk + [(b.settings, _epochs(b) - shared * b.fork) for b in self.branches]

    @property
    def epochs(self) -> int:
        """The number of epochs that are trained."""
        return sum(epochs for _, epochs in self.runs)


def _epochs(branch: Branch) -> int:
    """The epochs of a branch: without teachers at hand, distillation trains them first."""
    twice = branch.settings.booster == "distillation" and branch.teacher is None
    return branch.settings.epochs * (1 + twice)


@cache
def readings(cell: Cell) -> tuple[Reading, ...]:
    """The readings that a cell needs: none if it is about the model alone; for a test, the baseline too."""
    if cell.of == "model":
        return ()
    own = Reading.of(cell.settings())
    return (own, Reading.of({**cell.settings(), "booster": "none"})) if cell.measure == "p_value" else (own,)


def trains(cells: Iterable[Cell]) -> bool:
    """Whether any of these cells needs a run."""
    return any(readings(cell) for cell in cells)


def together_key(reading: Reading, seeds: Sequence[int]) -> dict[str, Any]:
    """The name under which the networks of these seeds together are stored."""
    return {**reading.key, "booster": TOGETHER, "seeds": list(seeds)}


def seeds_of(cell: Cell, seeds: int | None = None) -> int:
    """How many runs are averaged: by default as many as in the paper."""
    if seeds is not None:
        return seeds
    return 1 if cell.data == "imagenet" else experiment(cell.experiment).seeds


def wanted(cells: Iterable[Cell], seeds: int | None = None) -> dict[tuple[int, Reading], None]:
    """Every seed and reading that these cells need, once, in order."""
    pairs = [(seed, cell) for cell in cells for seed in range(1, seeds_of(cell, seeds) + 1)]
    pairs.sort(key=lambda pair: pair[0])
    return {(seed, reading): None for seed, cell in pairs for reading in readings(cell)}


def plan(wanted: Iterable[tuple[int, Reading]], mode: Mode) -> list[Task]:
    """The tasks that give these readings."""
    tasks, trees = [], dict[Settings, _Tree]()
    for seed, reading in wanted:
        run = run_of(reading, seed, mode)
        if not mode.separate and run.booster == "distillation":
            first = run_of(_teacher(reading), seed, mode)
            trees.setdefault(trunk_of(first), _Tree()).teach(first, run, reading)
        elif mode.separate or not forks(run):
            tasks.append(Task(None, (Branch(run, (reading,)),)))
        else:
            trees.setdefault(trunk_of(run), _Tree()).read(run, reading)
    return [Task(trunk, tree.branches()) for trunk, tree in trees.items()] + tasks


class _Tree:
    """What grows from one trunk: of branches that differ only in the number of cycles, the longest stays."""

    def __init__(self) -> None:
        self.runs: dict[Settings, list[Settings]] = {}
        self.readings: dict[Settings, list[Reading]] = {}
        self.students: list[tuple[Settings, Settings, Reading]] = []

    def read(self, run: Settings, *readings: Reading) -> None:
        """Train `run`, or a longer one, and read these off it."""
        self.runs.setdefault(_any_length(run), []).append(run)
        self.readings.setdefault(_any_length(run), []).extend(readings)

    def teach(self, teacher: Settings, run: Settings, reading: Reading) -> None:
        """Train `run` with the tickets of `teacher`."""
        self.read(teacher)
        self.students.append((_any_length(teacher), run, reading))

    def branches(self) -> tuple[Branch, ...]:
        """The forks, then the runs that they teach."""
        longest = {key: max(runs, key=lambda run: run.epochs) for key, runs in self.runs.items()}
        grown = [Branch(run, tuple(self.readings[key]), fork=True) for key, run in longest.items()]
        taught = [Branch(run, (reading,), teacher=longest[key]) for key, run, reading in self.students]
        return (*grown, *taught)


def _any_length(run: Settings) -> Settings:
    """Settings that are the same for two runs if one is the beginning of the other."""
    if run.booster != "sup-tickets" or run.criteria:
        return run
    return replace(run, cycles=1, epochs=start_of(run) + math.ceil(run.cycle_epochs))


@cache
def default_settings(data: str, booster: str = "sup-tickets") -> Settings:
    """The settings that the recipe for these data and the booster give."""
    return resolve({"data": data, "booster": booster})


def _teacher(student: Reading) -> Reading:
    """The run whose tickets teach: Sup-tickets of the same settings."""
    return Reading.of({**student.key, "booster": "sup-tickets"})


def forks(run: Settings) -> bool:
    """Whether a run can begin at the end of a trunk: other boosters shape the whole training."""
    return run.booster in ("none", "sup-tickets", "swa")


def pruned_at_fork(run: Settings) -> bool:
    """Whether the last step of the normal phase prunes, as in SWA of a dense network."""
    return run.booster == "swa" and run.method == "dense"


def run_of(reading: Reading, seed: int, mode: Mode) -> Settings:
    """The run that a reading is read off; if forked, all ways to combine its tickets are read off one run."""
    run = _scaled(reading.settings, mode.scale)
    if not mode.separate and run.booster == "none":
        shares = tuple(drop / run.epochs for drop in drops(run))
        run = replace(run, milestones=shares, milestones_of="training")
    elif not mode.separate and run.booster in ("sup-tickets", "ensemble"):
        default = default_settings(run.data)
        kept = {name: getattr(default, name) for name in AVERAGING}
        run = replace(run, **kept, booster="sup-tickets")
    return replace(run, seed=seed, keep_tickets=run.cyclic, **dict(mode.changes + mode.unsaid))


def trunk_of(run: Settings) -> Settings:
    """The normal phase of a run, as a run of its own: it ends where the cycles begin, or would begin.

    Runs that are pruned there, to whatever sparsity, grow from one trunk that never prunes. It is not that of
    the dense network: all connections live in both, but they are stored, and on a GPU updated, differently.
    """
    default, epochs = default_settings(run.data), start_of(run)
    forgotten = (*CYCLES, *AVERAGING, *IN_CYCLES, "keep_tickets")
    kept = {name: getattr(default, name) for name in forgotten}
    milestones = tuple(drop / epochs for drop in drops(run) if drop <= epochs)
    unpruned: dict[str, Any] = {"method": "gmp", "sparsity": 0.0} if pruned_at_fork(run) else {}
    plain = replace(run, **kept, **unpruned, booster="none", epochs=epochs)
    return replace(plain, milestones=milestones, milestones_of="training")


def start_of(run: Settings) -> int:
    """The epochs before the cycles; without cycles, before those that a booster would have."""
    return run.epochs - math.ceil(run.cycles * run.cycle_epochs)


def drops(run: Settings) -> list[int]:
    """The epochs after which the rate drops; in a run without cycles those of its twin with cycles."""
    base = run.epochs if run.milestones_of == "training" else start_of(run)
    return drop_epochs(run, base)


def too_short(run: Settings, steps: int) -> bool:
    """Whether epochs of so many steps leave a cycle fewer than two, or no time to reach the sparsity."""
    if run.cyclic and epochs_to_steps(run.cycle_epochs, steps) < 2:
        return True
    try:
        method(run, steps, lambda _: None)
    except SparsityError:
        return True
    return False


def _scaled(settings: Settings, scale: float) -> Settings:
    """A shorter training with as many cycles, of one epoch at least, after two epochs at least."""
    if scale == 1:
        return settings
    cycle = max(round(settings.cycle_epochs * scale), 1)
    start = max(round(start_of(settings) * scale), 2)
    return replace(
        settings,
        epochs=start + settings.cycles * cycle,
        cycle_epochs=float(cycle),
        warmup_epochs=settings.warmup_epochs * scale,
        prune_epochs=settings.prune_epochs * scale,
        interval=max(round(settings.interval * scale), 1),
    )
