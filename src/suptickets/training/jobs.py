"""Several runs at a time, each in a process of its own: small networks do not fill a GPU."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from threading import Thread
from typing import IO, TypeAlias

import torch

from suptickets.errors import TrainingError
from suptickets.training.progress import print_plain
from suptickets.training.stop import Interrupted, asked_to_stop

CONTROL = "nvidia-cuda-mps-control"
PROBE = "import ctypes, sys; sys.exit(ctypes.CDLL('libcuda.so.1').cuInit(0) != 0)"
VISIBLE = "CUDA_VISIBLE_DEVICES"  # for the runs only: the daemon would number devices anew, and they again
THREADS = "OMP_NUM_THREADS"
Run: TypeAlias = tuple[subprocess.Popen[str], Thread]  # a process, and the thread that passes its messages on


@contextlib.contextmanager
def shared_gpu() -> Iterator[dict[str, str]]:
    """Environment variables by which processes share a GPU: those of NVIDIA's MPS, if it can be started."""
    if shutil.which(CONTROL) is None or "CUDA_MPS_PIPE_DIRECTORY" in os.environ:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        environment = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        both = {key: value for key, value in os.environ.items() if key != VISIBLE} | environment
        started = subprocess.run([CONTROL, "-d"], env=both, capture_output=True).returncode == 0
        try:
            yield environment if started and _reached(environment) else {}
        finally:
            if started:
                subprocess.run([CONTROL], input=b"quit\n", env=both, capture_output=True)


def _reached(environment: Mapping[str, str]) -> bool:
    """Whether a process finds a GPU through MPS: the daemon may start where its server cannot."""
    command = [sys.executable, "-c", PROBE]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True).returncode == 0


@contextlib.contextmanager
def shared_machine(jobs: int, *, gpu: bool = True) -> Iterator[dict[str, str]]:
    """Environment variables by which `jobs` processes share the cores of the CPU evenly, and a GPU by MPS."""
    if jobs == 1:
        yield {}
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = {} if THREADS in os.environ else {THREADS: str(max(cores // jobs, 1))}
    with shared_gpu() if gpu else contextlib.nullcontext(dict[str, str]()) as sharing:
        yield sharing | threads


def visible_gpus() -> list[str]:
    """The GPUs that may be used, as CUDA_VISIBLE_DEVICES names them."""
    if not torch.cuda.is_available():
        return []
    named, count = os.environ.get(VISIBLE), torch.cuda.device_count()  # CUDA ends at a name that is none
    return list(map(str, range(count))) if named is None else named.split(",")[:count]


def run_together(commands: Mapping[str, Sequence[str]], jobs: int, device: str = "cpu") -> None:
    """Run `suptickets` with each of the named arguments, at most `jobs` at a time.

    Unless the device has a number, they take turns on all GPUs. Messages begin with the name. A run that
    fails does not stop the others. A request to stop is passed on.
    """
    waiting, running = list(commands), dict[int, tuple[str, Run]]()
    failed: list[str] = []
    told, gpus = False, visible_gpus() if device in ("auto", "cuda") else []
    with shared_machine(min(jobs, len(commands)), gpu=device != "cpu") as sharing, asked_to_stop() as stop:
        while running or (waiting and not stop):
            while waiting and len(running) < jobs and not stop:
                name, slot = waiting.pop(0), next(slot for slot in range(jobs) if slot not in running)
                own = {VISIBLE: gpus[slot % len(gpus)]} if gpus else {}
                running[slot] = name, _start(name, commands[name], sharing | own)
            if stop and not told:
                told = True
                for _, (process, _) in running.values():
                    process.terminate()  # Ctrl-C while Python starts would end in a traceback
            for slot in [slot for slot, (_, (process, _)) in running.items() if process.poll() is not None]:
                name, (process, messages) = running.pop(slot)
                messages.join()
                failed += [name] if process.returncode else []
            time.sleep(0.05)
        if stop:
            raise Interrupted("stopped: the same command goes on")
    refuse(failed, len(commands))


def refuse(failed: Sequence[str], runs: int) -> None:
    """Raise an error that names the runs that failed, if there are any."""
    if failed:
        raise TrainingError(f"{len(failed)} of {runs} runs failed: {', '.join(failed)} (see above)")


def _start(name: str, arguments: Sequence[str], environment: Mapping[str, str]) -> Run:
    process = subprocess.Popen(
        [sys.executable, "-m", "suptickets", *arguments],
        env={**os.environ, **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stderr is not None
    messages = Thread(target=_pass_on, args=(name, process.stderr), daemon=True)
    messages.start()
    return process, messages


def _pass_on(name: str, lines: IO[str]) -> None:
    for line in lines:
        print_plain(f"{name}: {line.rstrip()}")
