"""The runner: tasks go to processes here or to Slurm, through submitit, and what they find to the store.

What is done is known from the store alone. A task is worked on under a lock, so that two runners on one store
never do the same; a process that dies leaves its checkpoint and no lock, and the next one goes on from there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import torch

from suptickets.errors import SparsityError, choice, reason, whole
from suptickets.experiments.averages import Finished, located, together
from suptickets.experiments.plan import Branch, Mode, Reading, Task, run_of, together_key
from suptickets.experiments.store import Results, Store, held
from suptickets.training.folder import RunFolder, write
from suptickets.training.jobs import shared_gpu
from suptickets.training.processes import connect
from suptickets.training.progress import print_plain
from suptickets.training.result import hardware, versions
from suptickets.training.settings import Settings
from suptickets.training.stop import Interrupted
from suptickets.training.train import default_folder, train

EXECUTORS = ("local", "slurm", "debug")  # debug: in this process, one after the other
LONGEST = 7 * 24 * 60  # minutes of a job; on Slurm SBATCH_TIMELIMIT says otherwise
POLL = 0.2  # seconds between two looks at the jobs
ATTEMPTS = 3  # of a task whose process died without a word


@dataclass(frozen=True)
class Job:
    """Something to do once, where runs and results go, and the command that asked; called in a process."""

    mode: Mode
    out: str
    data_dir: str | None
    command: str

    @property
    def name(self) -> str:
        """What it is called."""
        raise NotImplementedError

    def left(self) -> bool:
        """Whether something of it is not in the store yet."""
        raise NotImplementedError

    def do(self) -> None:
        """Do what is left."""
        raise NotImplementedError

    @property
    def lock(self) -> Path:
        """Who holds it does the job."""
        return self.place / f"{self.name}.lock"

    @property
    def place(self) -> Path:
        """Where the runs are: those of their own apart from forks."""
        return Path(self.out) / "runs" / ("separate" if self.mode.separate else "forked")

    def __call__(self) -> str:
        """Do it; says `done`, `busy`, or what went wrong in one line."""
        with held(self.lock) as mine:
            if not mine:
                return "busy"
            try:
                self.do()
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
        """What there is."""
        return Results(Store(self.out).read(), self.mode)

    def folder(self, settings: Settings) -> RunFolder:
        """Of a run: by its settings, wherever the data are."""
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
            "command": self.command,
            **provenance(settings),
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
        """Of the trunk, or of the run."""
        return default_folder(self.task.trunk or self.task.branches[0].settings).name

    def left(self) -> bool:
        """Whether a reading is missing."""
        return bool(self._left())

    def _left(self) -> list[Branch]:
        """The branches that are needed, with the readings that are missing."""
        results, seed = self.results(), self.task.seed
        missing = {b: tuple(r for r in b.readings if (seed, r) not in results) for b in self.task.branches}
        teachers = {b.teacher for b, readings in missing.items() if readings}
        return [replace(b, readings=r) for b, r in missing.items() if r or b.settings in teachers]

    def do(self) -> None:
        """One branch after the other; one that fails does not stop the others."""
        failed: list[Exception] = []
        for branch in self._left():
            try:
                self._branch(branch)
            except Interrupted:
                raise
            except Exception as error:
                failed.append(error)
        if failed:
            raise failed[0]

    def _branch(self, branch: Branch) -> None:
        settings, folder, trunk = self._placed(branch), self.folder(branch.settings), None
        if branch.fork and self.task.trunk is not None:
            trunk = self._trunk(self.task.trunk)
            fork(trunk, folder)
        train(settings, folder.path)
        folder.checkpoint.unlink(missing_ok=True)
        finished = Finished(folder, settings, None if trunk is None else trunk.load_summary())
        for reading in branch.readings:
            self.add(reading.key, settings.seed, settings, finished.read(reading))

    def _trunk(self, settings: Settings) -> RunFolder:
        """Train it, if it is not there; somebody may have removed its checkpoint."""
        folder = self.folder(settings)
        done = folder.load_summary() is not None
        if not done or not folder.checkpoint.exists():
            train(located(settings, self.data_dir), folder.path, force=done)
        return folder

    def _placed(self, branch: Branch) -> Settings:
        settings = located(branch.settings, self.data_dir)
        if branch.teacher is None:
            return settings
        tickets = self.folder(branch.teacher).singles()[: settings.cycles]
        return replace(settings, teachers=tuple(str(file.absolute()) for file in tickets))


@dataclass(frozen=True)
class Compare(Job):
    """The networks of several seeds together; their runs are done."""

    reading: Reading
    seeds: tuple[int, ...]

    @property
    def name(self) -> str:
        """Of the first run."""
        return f"together-{default_folder(self._run(self.seeds[0])).name}"

    def _run(self, seed: int) -> Settings:
        return run_of(self.reading, seed, self.mode)

    @property
    def key(self) -> dict[str, Any]:
        """The name under which the result is stored."""
        return together_key(self.reading, self.seeds)

    def left(self) -> bool:
        """Whether it is missing."""
        return self.results().find(self.key, 0) is None

    def do(self) -> None:
        """Evaluate them."""
        runs = [self._run(seed) for seed in self.seeds]
        settings = located(runs[0], self.data_dir)
        if self.left():
            self.add(self.key, 0, settings, together([self.folder(run).path for run in runs], settings))


def fork(trunk: RunFolder, branch: RunFolder) -> None:
    """Let a run begin where its trunk ended, unless it has begun; its metrics are those of the whole way."""
    if branch.checkpoint.exists() or branch.load_summary() is not None:
        return
    branch.checkpoint.parent.mkdir(parents=True, exist_ok=True)
    write(branch.metrics, lambda path: shutil.copyfile(trunk.metrics, path))
    write(branch.checkpoint, lambda path: shutil.copyfile(trunk.checkpoint, path))


def provenance(settings: Settings) -> dict[str, Any]:
    """What else a result depends on, and when it was."""
    return {
        "versions": versions(),
        "hardware": hardware(connect(settings.device).device),
        "revision": revision(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


@cache
def revision() -> str:
    """The git revision of the library, `-dirty` with changes; `unknown` if it is no checkout."""
    here = Path(__file__)
    git = ("git", "-C", str(here.parent))
    try:
        subprocess.run([*git, "ls-files", "--error-unmatch", here.name], check=True, capture_output=True)
        asked = [*git, "describe", "--always", "--dirty", "--exclude=*", "--abbrev=40"]
        return subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


class Runner:
    """Works through tasks, `jobs` at a time."""

    def __init__(self, out: str | Path, executor: str = "local", jobs: int = 1) -> None:
        """Nothing is written before `run`."""
        self.out, self.jobs = Path(out), whole("--jobs", jobs)
        self.kind = choice("executor", executor, EXECUTORS)
        self.failed: list[str] = []
        self.attempts: dict[str, int] = {}

    def run(self, works: Sequence[Job]) -> None:
        """To the end, however often it begins; `failed` tells what could not be done."""
        waiting, running = list(works), dict[int, tuple[Job, Any]]()
        with self._executor() as executor:
            try:
                while waiting or running:
                    self._submit(executor, waiting, running)
                    done = [slot for slot, (_, job) in running.items() if job.done()]
                    for slot in done:
                        waiting += self._finished(*running.pop(slot), left=len(waiting) + len(running))
                    time.sleep(0 if done else POLL)
            finally:
                for _, job in running.values():
                    job.cancel(check=False)

    def _submit(self, executor: Any, waiting: list[Job], running: dict[int, tuple[Job, Any]]) -> None:
        """Give work to the free slots; what another runner does is left waiting."""
        for work in list(waiting):
            free = next((slot for slot in range(self.jobs) if slot not in running), None)
            if free is None:
                return
            with held(work.lock) as mine:
                ready, needed = mine, mine and work.left()
            if ready:
                waiting.remove(work)
            if needed:
                running[free] = work, self._start(executor, work, free)

    def _start(self, executor: Any, work: Job, slot: int) -> Any:
        gpus = visible_gpus() if self.kind == "local" else []
        if gpus:
            executor.update_parameters(gpus_per_node=1, visible_gpus=[gpus[slot % len(gpus)]])
        return executor.submit(work)

    def _finished(self, work: Job, job: Any, *, left: int) -> list[Job]:
        """What is to be tried again."""
        try:
            outcome = str(job.result())
        except Exception:
            self.attempts[work.name] = self.attempts.get(work.name, 0) + 1
            again = self.attempts[work.name] < ATTEMPTS
            outcome = (
                "died" if again else f"failed: its process died {ATTEMPTS} times, see {job.paths.stderr}"
            )
        print_plain(f"{work.name}: {outcome} ({left} left)")
        if outcome == "stopped":
            raise Interrupted("stopped: the same command goes on")
        if outcome.startswith("failed"):
            self.failed.append(f"{work.name}: {outcome.removeprefix('failed: ')}")
        return [work] if outcome in ("busy", "died") else []

    @contextmanager
    def _executor(self) -> Iterator[Any]:
        try:
            import submitit
        except ImportError as error:
            raise SparsityError("running experiments needs submitit: pip install submitit") from error
        if self.kind == "slurm" and shutil.which("srun") is None:
            raise SparsityError("there is no Slurm here (no srun): use --executor local")
        self._make()
        executor = submitit.AutoExecutor(self.out / "runs" / "jobs", cluster=self.kind)
        executor.update_parameters(timeout_min=LONGEST)
        with self._sharing():
            yield executor

    def _make(self) -> None:
        try:
            (self.out / "runs").mkdir(parents=True, exist_ok=True)
            (self.out / ".gitignore").write_text("runs/\n")
        except OSError as error:
            raise SparsityError(
                f"cannot make the folder {self.out} ({error.strerror}): choose another --out"
            ) from error

    @contextmanager
    def _sharing(self) -> Iterator[None]:
        """Several local processes share a GPU better with NVIDIA's MPS."""
        if self.kind != "local" or self.jobs == 1:
            yield
            return
        with shared_gpu() as environment:
            os.environ.update(environment)
            try:
                yield
            finally:
                for name in environment:
                    del os.environ[name]


def visible_gpus() -> list[int]:
    """The numbers of the GPUs that may be used."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    listed = range(torch.cuda.device_count()) if named is None else named.split(",")
    return [int(gpu) for gpu in listed if str(gpu).isdigit()] if torch.cuda.is_available() else []
