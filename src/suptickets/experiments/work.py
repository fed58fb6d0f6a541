"""What a process does at a time: grow a trunk with its branches, or compare the networks of several seeds.

The store alone tells what is done. Work is done under a lock, so that two runners on one store never do the
same; the kernel releases it when a process dies, however and wherever. A process whose runner is gone writes
a checkpoint and ends; the next one goes on from there.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event, Thread
from typing import Any

from suptickets.data import read_once
from suptickets.errors import SparsityError, TrainingError, reason
from suptickets.experiments.averages import TRUNK, Finished, located, together
from suptickets.experiments.estimate import SECONDS
from suptickets.experiments.plan import Branch, Mode, Reading, Task, pruned_at_fork, run_of, together_key
from suptickets.experiments.provenance import provenance, revision
from suptickets.experiments.store import Results, Store
from suptickets.randomness import fork_random
from suptickets.training.build import data_of
from suptickets.training.files import held, write
from suptickets.training.folder import RunFolder
from suptickets.training.loop import Trainer
from suptickets.training.parts import TOO_LATE
from suptickets.training.processes import connect
from suptickets.training.progress import print_plain
from suptickets.training.settings import Settings
from suptickets.training.stop import Interrupted, asked_to_stop
from suptickets.training.train import default_folder, train

LOOK = 0.25  # seconds between two looks at the runner
GRACE = 5.0  # seconds to write a checkpoint in, when the runner is gone

Pause = Callable[[], None]  # raises `Interrupted` if the process was asked to stop


@dataclass(frozen=True)
class Job:
    """Something to do once, where its runs and results go, and the command that asked; a process calls it.

    Attributes:
        jobs: how many jobs share the machine.
        runner: a lock that the runner holds while it lives.
    """

    mode: Mode
    out: str
    data_dir: str | None
    command: str
    jobs: int = field(default=1, kw_only=True)
    runner: str | None = field(default=None, kw_only=True)

    @property
    def name(self) -> str:
        """What it is called."""
        raise NotImplementedError

    @property
    def order(self) -> tuple[bool, float]:
        """The key that jobs are sorted by: what has begun comes first, then what takes longest."""
        raise NotImplementedError

    def missing(self, results: Results) -> int:
        """How many of its results are not there yet."""
        raise NotImplementedError

    def left(self) -> bool:
        """Whether one of its results is not in the store yet."""
        return self.missing(self.results()) > 0

    def do(self, pause: Pause) -> None:
        """Do what is left."""
        raise NotImplementedError

    @property
    def lock(self) -> Path:
        """The lock whose holder does the job."""
        return self.place / f"{self.name}.lock"

    @property
    def place(self) -> Path:
        """The folder of the runs; separate runs and forks have one each."""
        return Path(self.out) / "runs" / ("separate" if self.mode.separate else "forked")

    def __call__(self) -> str:
        """Do the job; returns `done`, `busy`, `stopped`, or what went wrong in one line."""
        with bound_to(self.runner), read_once(), asked_to_stop() as stop, held(self.lock) as mine:
            if not mine:
                return "busy"
            try:
                revision()  # remembers that of the code that is loaded now
                self.do(lambda: _pause(stop))
            except Interrupted:
                return "stopped"
            except Exception as error:
                traceback.print_exc()
                return f"failed: {reason(error)}"
        return "done"

    def checkpoint(self) -> Any:
        """What submitit submits again when Slurm takes the machine away."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)

    def results(self) -> Results:
        """The results that the store has, of this mode."""
        return Results(Store(self.out).read(), self.mode)

    def folder(self, settings: Settings) -> RunFolder:
        """The folder of a run: named by its settings, wherever the data are."""
        return RunFolder(self.place / default_folder(settings).name)

    def add(self, cell: dict[str, Any], seed: int, settings: Settings, measures: dict[str, Any]) -> None:
        """Add a result to the store."""
        own = ("run", "versions", "hardware", "command", "seconds")
        record = {
            "cell": cell,
            "seed": seed,
            **self.mode.as_dict(),
            "settings": {key: value for key, value in settings.as_dict().items() if key != "data_dir"},
            "measures": {key: value for key, value in measures.items() if key not in own},
            "seconds": measures.get("seconds"),
            "jobs": self.jobs,
            "command": self.command,
            **provenance(settings.device),
        }
        Store(self.out).add(record)


@dataclass(frozen=True)
class Grow(Job):
    """Train a task's trunk and branches, and read off them what is wanted.

    Jobs with the same trunk have the same lock.
    """

    task: Task

    @property
    def name(self) -> str:
        """The name of the trunk or, without one, of the run."""
        return default_folder(self.task.trunk or self.task.branches[0].settings).name

    @property
    def order(self) -> tuple[bool, float]:
        """What has begun, then by the length of the training."""
        begun = any(self.folder(run).checkpoint.exists() for run, _ in self.task.runs)
        return not begun, -self.task.epochs * SECONDS[self.task.model]

    def missing(self, results: Results) -> int:
        """How many readings are not there yet."""
        return sum(len(branch.readings) for branch in self._left(results))

    def _left(self, results: Results) -> list[Branch]:
        """The branches that are needed, with the readings that are missing."""
        seed = self.task.seed
        missing = {b: tuple(r for r in b.readings if (seed, r) not in results) for b in self.task.branches}
        teachers = {b.teacher for b, readings in missing.items() if readings}
        return [replace(b, readings=r) for b, r in missing.items() if r or b.settings in teachers]

    def do(self, pause: Pause) -> None:
        """Train one branch after the other; one that fails does not stop the others."""
        failed: list[str] = []  # in words: an error would keep the network that it left in memory
        for branch in self._left(self.results()):
            try:
                self._branch(branch, pause)
            except Interrupted:
                raise
            except Exception as error:
                traceback.print_exc()
                failed.append(reason(error))
        if failed:
            raise TrainingError("; ".join(dict.fromkeys(failed)))

    def _branch(self, branch: Branch, pause: Pause) -> None:
        """Train a branch, and store each of its readings as soon as it is there."""
        pause()
        settings, folder = self._placed(branch), self.folder(branch.settings)
        _forget_damaged(folder)
        if branch.fork and self.task.trunk is not None and not _begun(folder):
            fork(self._trunk(self.task.trunk), folder, settings)
        train(settings, folder.path)
        folder.checkpoint.unlink(missing_ok=True)
        finished = Finished(folder, settings)
        for reading in branch.readings:
            pause()
            self.add(reading.key, settings.seed, settings, finished.read(reading))

    def _trunk(self, settings: Settings) -> RunFolder:
        """The folder of the trunk, which is trained if it is not there, or if its checkpoint was removed."""
        folder = self.folder(settings)
        _forget_damaged(folder)
        done = folder.load_summary() is not None
        if not done or not folder.checkpoint.exists():
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", f".*{TOO_LATE}")  # its branches go on
                train(located(settings, self.data_dir), folder.path, force=done)
        return folder

    def _placed(self, branch: Branch) -> Settings:
        """The settings with the places of data and teachers; the latter as --out is given, which may move."""
        settings = located(branch.settings, self.data_dir)
        if branch.teacher is None:
            return settings
        tickets = self.folder(branch.teacher).singles()[: settings.cycles]
        return replace(settings, teachers=tuple(map(str, tickets)))


@dataclass(frozen=True)
class Compare(Job):
    """Evaluate the networks of several seeds together; their runs are done."""

    reading: Reading
    seeds: tuple[int, ...]

    @property
    def name(self) -> str:
        """A name made of that of the first run."""
        return f"together-{default_folder(self._run(self.seeds[0])).name}"

    @property
    def order(self) -> tuple[bool, float]:
        """The same for all: any order will do."""
        return False, 0.0

    def _run(self, seed: int) -> Settings:
        return run_of(self.reading, seed, self.mode)

    @property
    def key(self) -> dict[str, Any]:
        """The name under which the result is stored."""
        return together_key(self.reading, self.seeds)

    def missing(self, results: Results) -> int:
        """1 if the result is not there yet, or 0."""
        return int(results.find(self.key, 0) is None)

    def do(self, pause: Pause) -> None:
        """Evaluate the networks."""
        runs = [self._run(seed) for seed in self.seeds]
        folders = [self.folder(run) for run in runs]
        gone = [str(folder.path) for folder in folders if not folder.ticket.exists()]
        if gone:
            raise SparsityError(f"networks are compared that are gone: bring back {', '.join(gone)}")
        settings = located(runs[0], self.data_dir)
        if self.left():
            self.add(self.key, 0, settings, together([folder.path for folder in folders], settings))


# ---- forks ----


def fork(trunk: RunFolder, branch: RunFolder, settings: Settings) -> None:
    """Let a run begin where its trunk ended; its metrics are those of the whole way, its settings its own."""
    branch.begin(settings)
    if trunk.metrics.exists():
        write(branch.metrics, lambda path: shutil.copyfile(trunk.metrics, path))
    write(branch.path / TRUNK, lambda path: path.write_text(json.dumps(trunk.load_summary())))
    state = trunk.load_checkpoint() or {}
    state = _pruned(state, settings) if pruned_at_fork(settings) else state
    branch.save_checkpoint(state, settings)


def _pruned(state: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """The trunk's last state, pruned as its last step would have done it in this run."""
    processes = connect(settings.device)
    with fork_random():
        trainer = Trainer(settings, data_of(settings), processes)
        trainer.load_state_dict(state)
        trainer.network.method.update(trainer.network, trainer.network.step)
        return {**trainer.state_dict(), "seconds": state["seconds"]}


def _begun(folder: RunFolder) -> bool:
    return folder.checkpoint.exists() or folder.load_summary() is not None


def _forget_damaged(folder: RunFolder) -> None:
    """Remove a damaged checkpoint: one that was cut off when it was copied is no reason to stop."""
    try:
        folder.load_checkpoint()
    except SparsityError:
        print_plain(f"{folder.checkpoint} is damaged: the run starts over")
        folder.checkpoint.unlink()


# ---- stopping ----


def _pause(stop: Sequence[int]) -> None:
    if stop:
        raise Interrupted("stopped between two runs")


@contextmanager
def bound_to(runner: str | None) -> Iterator[None]:
    """While this lasts, end the process when its runner is gone: killed, or asked to stop."""
    if runner is None:
        yield
        return
    over = Event()
    Thread(target=_watch, args=(Path(runner), over), daemon=True).start()
    try:
        yield
    finally:
        over.set()
        if _gone(Path(runner)):  # nobody waits for an answer, and taking libraries down takes seconds
            os._exit(1)


def _watch(runner: Path, over: Event) -> None:
    """When the runner is gone, ask for a checkpoint; leave if it takes too long, as when code is compiled."""
    while not over.is_set() and not _gone(runner):
        over.wait(LOOK)
    until = time.monotonic() + GRACE
    while not over.is_set() and time.monotonic() < until:
        os.kill(os.getpid(), signal.SIGTERM)
        over.wait(1)
    if not over.is_set():
        os._exit(1)


def _gone(runner: Path) -> bool:
    with held(runner) as free:
        if free:
            runner.unlink(missing_ok=True)
        return free
