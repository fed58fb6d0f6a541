"""Several runs at a time on one device, against one after another: small networks do not fill a GPU.

Each run is a process of its own (on a GPU they share it by MPS, where that can be started). A run begins
slowly, and several can do so at once too: so the start is measured, of one process and of several at once,
with nothing compiled before; then epochs, explorations included, in turns: of the first alone while the
others wait, and of all at once. From both follows what a whole run takes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from statistics import median
from tempfile import TemporaryDirectory
from threading import Barrier, BrokenBarrierError

import torch

from suptickets.bench.contenders import BATCH, Run, images_of, noise
from suptickets.bench.turns import Options, Row, judged, ratio
from suptickets.training.jobs import shared_gpu
from suptickets.training.settings import resolve

RUNS = 3
IMAGES = {"cpu": BATCH + 80, "cuda": 50_000}  # of an epoch
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
REQUIRED = {"vgg16": {"throughput": 1.4}}
PATIENCE = 900.0  # seconds that processes wait for each other: some may still compile
Times = list[float]


@dataclass(frozen=True)
class Shared:
    """What processes that shared a device have measured, in seconds.

    Attributes:
        ready: from their start until all had trained one epoch.
        alone: an epoch of the first while the others waited, in each round.
        at_once: an epoch of each while all trained, their mean.
    """

    ready: float
    alone: Times
    at_once: Times


def run(options: Options) -> list[Row]:
    """Seconds of start, epoch and run of each, and how much more is done in the same time."""
    return [row for model in options.models for row in measure(model, options)]


def measure(model: str, options: Options) -> list[Row]:
    """One model."""
    make = partial(training, model, options)
    options.say(f"{model}: starting one run")
    one = in_turns(1, make, options, rounds=1)
    options.say(f"{model}: starting {RUNS} runs, then epochs in turns")
    several = in_turns(RUNS, make, options, rounds=options.rounds)
    epochs, rows = resolve({"data": "cifar100"}).epochs, list[Row]()
    for count, ready, times in ((1, one.ready, several.alone), (RUNS, several.ready, several.at_once)):
        row: Row = {"model": model, "variant": "alone" if count == 1 else f"{count} at once"}
        row |= {"start_seconds": ready - median(times), "epoch_seconds": median(times)}
        row["seconds"] = ready + (epochs - 1) * median(times)
        row["throughput_of_epochs"] = count * ratio(several.alone, times)
        row["throughput"] = count * [*rows, row][0]["seconds"] / row["seconds"]
        rows.append(row)
    return [judged(rows[0]), judged(rows[1], None, options.limits(model, REQUIRED if options.cuda else {}))]


def training(model: str, options: Options) -> Callable[[], float]:
    """Start a run and train one epoch; gives a function that trains another and returns its seconds."""
    interval = resolve({"data": "cifar100"}).interval
    data = noise(IMAGES[options.device.type], options, images_of(model))
    run = Run(model, "rigl", data, options, fast=options.cuda, booster="none", interval=interval)

    def epoch() -> float:
        start = time.perf_counter()
        run.epoch()
        if options.cuda:
            torch.cuda.synchronize(options.device)
        return time.perf_counter() - start

    epoch()
    return epoch


def in_turns(runs: int, make: Callable[[], Callable[[], float]], options: Options, rounds: int) -> Shared:
    """Start so many processes at once, then let them take turns."""
    context = get_context("spawn")
    with ExitStack() as stack:
        environment = dict.fromkeys(CACHES, stack.enter_context(TemporaryDirectory(prefix="cold-")))
        if options.cuda and runs > 1:
            environment |= stack.enter_context(shared_gpu())
        barrier = stack.enter_context(context.Manager()).Barrier(runs, timeout=PATIENCE)
        begin = time.time()
        pool = stack.enter_context(ProcessPoolExecutor(runs, context, _set, (environment,)))
        jobs = [pool.submit(_process, number, make, rounds, barrier) for number in range(runs)]
        errors = [error for error in (job.exception() for job in jobs) if error is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, BrokenBarrierError)):
            raise error  # the cause, rather than those that waited
        measured = [job.result() for job in jobs]
    ready = max(when for when, _, _ in measured) - begin
    own = zip(*(times for _, _, times in measured), strict=True)
    return Shared(ready, measured[0][1], [sum(times) / runs for times in own])


def _set(environment: Mapping[str, str]) -> None:
    os.environ.update(environment)


def _process(
    number: int, make: Callable[[], Callable[[], float]], rounds: int, barrier: Barrier
) -> tuple[float, Times, Times]:
    """One of the runs: when it was ready, and in each round an epoch of the first alone, and one of all."""
    alone, at_once = Times(), Times()
    with _or_nobody(barrier):
        epoch = make()
        ready = time.time()
        for _ in range(rounds):
            barrier.wait()
            alone += [epoch()] if number == 0 else []
            barrier.wait()
            at_once.append(epoch())
    return ready, alone, at_once


@contextmanager
def _or_nobody(barrier: Barrier) -> Iterator[None]:
    """If this process fails, the others do not wait for it."""
    try:
        yield
    except BaseException:
        barrier.abort()
        raise
