"""The runner: work goes to processes here or to Slurm, through submitit, some at a time.

Local processes end with their runner: it holds a lock that they watch.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

from suptickets.errors import SparsityError, choice, whole
from suptickets.experiments.work import GRACE, Job
from suptickets.training.files import held
from suptickets.training.jobs import VISIBLE, shared_machine, visible_gpus
from suptickets.training.progress import print_plain
from suptickets.training.stop import Interrupted, asked_to_stop
from suptickets.training.train import AT_A_TIME

EXECUTORS = ("local", "slurm", "debug")  # debug: in this process, one after the other
LONGEST = 7 * 24 * 60  # minutes of a job; on Slurm SBATCH_TIMELIMIT says otherwise
POLL = 0.2  # seconds between two looks at the jobs
TELL = 30.0  # seconds between two looks at the store
ATTEMPTS = 3  # at a job whose process dies without a word


class Runner:
    """Works through jobs, so many at a time: by default three if local on a GPU, and one elsewhere."""

    def __init__(self, out: str | Path, executor: str = "local", jobs: int | None = None) -> None:
        """Nothing is written before `run`."""
        self.out, self.kind = Path(out), choice("executor", executor, EXECUTORS)
        several = self.kind == "local" and torch.cuda.is_available()
        self.jobs = (AT_A_TIME if several else 1) if jobs is None else whole("--jobs", jobs)
        self.alive = self.out / "runs" / "jobs" / f"runner-{uuid4().hex}.lock"
        self.failed: list[str] = []
        self.attempts: dict[str, int] = {}

    def run(self, works: Sequence[Job]) -> None:
        """Do all jobs, some of them in several attempts; `failed` tells which could not be done."""
        if not works:
            return
        waiting, running = self._sorted(works), dict[int, tuple[Job, Any]]()
        told = Told(works)
        with self._executor() as executor, asked_to_stop() as stop:
            try:
                with self._alive():
                    while (waiting or running) and not stop:
                        self._turn(executor, waiting, running)
                        told.tell()
            finally:
                self._leave([job for _, job in running.values()])
        if stop:
            raise Interrupted("stopped: the same command goes on")

    def _sorted(self, works: Sequence[Job]) -> list[Job]:
        """Jobs that have begun come first; then, with several processes, the longest, to end sooner."""
        return sorted(works, key=lambda work: work.order[: 1 + (self.jobs > 1)])

    def _turn(self, executor: Any, waiting: list[Job], running: dict[int, tuple[Job, Any]]) -> None:
        self._submit(executor, waiting, running)
        done = [slot for slot, (_, job) in running.items() if job.done()]
        for slot in done:
            waiting += self._finished(*running.pop(slot), left=len(waiting) + len(running))
        time.sleep(0 if done else POLL)

    def _submit(self, executor: Any, waiting: list[Job], running: dict[int, tuple[Job, Any]]) -> None:
        """Give jobs to the free slots; those that another runner does are left waiting."""
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
        if self.kind != "local":
            return _submitted(executor, work)
        gpus = numbered_gpus()
        if gpus:
            executor.update_parameters(gpus_per_node=1, visible_gpus=[gpus[slot % len(gpus)]])
        with _deaf():
            return executor.submit(replace(work, runner=str(self.alive)))

    def _finished(self, work: Job, job: Any, *, left: int) -> list[Job]:
        """Tell the outcome of a job; gives what is to be tried again."""
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

    def _leave(self, jobs: Sequence[Any]) -> None:
        """Cancel the jobs that still run; local ones see that the runner is gone, and get the time to end."""
        if self.kind == "slurm":
            for job in jobs:
                job.cancel(check=False)
        until = time.monotonic() + GRACE + 1
        while self.kind == "local" and time.monotonic() < until and not all(job.done() for job in jobs):
            time.sleep(POLL)

    # ---- where it happens ----

    @contextmanager
    def _alive(self) -> Iterator[None]:
        """Hold the lock that says that this runner is alive."""
        try:
            with held(self.alive):
                yield
        finally:
            self.alive.unlink(missing_ok=True)

    @contextmanager
    def _executor(self) -> Iterator[Any]:
        try:
            import submitit
        except ImportError as error:
            raise SparsityError("running experiments needs submitit: pip install submitit") from error
        if self.kind == "slurm" and shutil.which("srun") is None:
            raise SparsityError("there is no Slurm here (no srun): use --executor local")
        self._make()
        folder = self.out / "runs" / "jobs"
        local = self.kind == "local"  # AutoExecutor does not know its parameters
        executor: Any = submitit.LocalExecutor(folder) if local else submitit.AutoExecutor(folder, self.kind)
        executor.update_parameters(timeout_min=LONGEST)
        with self._sharing():
            yield executor

    def _make(self) -> None:
        """Make the folder of the results; its runs are ignored by git."""
        ignored = self.out / ".gitignore"
        try:
            (self.out / "runs").mkdir(parents=True, exist_ok=True)
            if not ignored.exists():
                ignored.write_text("runs/\n")
        except OSError as error:
            raise SparsityError(
                f"cannot make the folder {self.out} ({error.strerror}): choose another --out"
            ) from error

    @contextmanager
    def _sharing(self) -> Iterator[None]:
        """Let several local processes share the machine."""
        if self.kind != "local":
            yield
            return
        with shared_machine(self.jobs) as added:
            os.environ.update(added)
            try:
                yield
            finally:
                for name in added:
                    del os.environ[name]


class Told:
    """Says now and then how many of the results are there, if there are more than before."""

    def __init__(self, works: Sequence[Job]) -> None:
        """Look at the store for the first time."""
        self.works, self.looked = works, time.monotonic()
        self.left = self.total = self._missing()

    def _missing(self) -> int:
        results = self.works[0].results()
        return sum(work.missing(results) for work in self.works)

    def tell(self) -> None:
        """Look at the store when it is time to, and say how many results there are, if there are new ones."""
        if time.monotonic() - self.looked < TELL:
            return
        before, self.left, self.looked = self.left, self._missing(), time.monotonic()
        if self.left < before:
            print_plain(f"{self.total - self.left:,} of {self.total:,} results")


@contextmanager
def _deaf() -> Iterator[None]:
    """Start processes that ignore Ctrl-C: submitit's controller would kill a job that writes a checkpoint."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def numbered_gpus() -> list[int]:
    """The numbers of the GPUs that may be used, which is what submitit takes."""
    named = visible_gpus()
    try:
        return [int(gpu) for gpu in named]
    except ValueError as error:
        raise SparsityError(
            f"{VISIBLE}={','.join(named)} names no numbers: use those that nvidia-smi -L lists"
        ) from error


def _submitted(executor: Any, work: Job) -> Any:
    """Submit a job; refuses if Slurm does not take it."""
    from submitit.core.utils import FailedJobError

    try:
        return executor.submit(work)
    except FailedJobError as error:
        told = str(error).strip().splitlines()[-1:] or [type(error).__name__]
        raise SparsityError(f"Slurm does not take the job: {told[0]}") from error
