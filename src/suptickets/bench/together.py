"""Several runs at a time on one device, against one after another: small networks do not fill a GPU.

Each run is a process of its own (on a GPU they share it by MPS, where that can be started), and does the same
steps, explorations included: the first of them alone while the others wait, then all at once, in turns.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from multiprocessing import get_context
from threading import Barrier, BrokenBarrierError
from time import perf_counter

import torch

from suptickets.bench.contenders import Run, batches
from suptickets.bench.turns import Options, Row, judged, median, ratio
from suptickets.training.jobs import shared_gpu
from suptickets.training.settings import resolve

RUNS = 3
STEPS = {"cpu": 2, "cuda": 1000}  # of a measurement
REQUIRED = {"vgg16": {"throughput": 1.4}}
PATIENCE = 900.0  # seconds that processes wait for each other: some may still compile
Times = list[float]


def run(options: Options) -> list[Row]:
    """Milliseconds of a step of each, and how much more is done in the same time."""
    return [row for model in options.models for row in measure(model, options)]


def measure(model: str, options: Options) -> list[Row]:
    """One model."""
    options.say(f"{model}: making {RUNS} runs ready")
    alone, together = in_turns(RUNS, partial(stepping, model, options), options)
    rows = []
    for count, times in ((1, alone), (RUNS, together)):
        row: Row = {"model": model, "variant": "alone" if count == 1 else f"{count} at once"}
        rows.append(row | {"milliseconds": median(times), "throughput": count * ratio(alone, times)})
    return [judged(rows[0]), judged(rows[1], None, options.limits(model, REQUIRED if options.cuda else {}))]


def stepping(model: str, options: Options) -> Callable[[], float]:
    """A run that is ready; does its steps, and gives the milliseconds of one."""
    interval = resolve({"data": "cifar100"}).interval
    data, count = batches(model, options), STEPS[options.device.type]
    run = Run(model, "rigl", data, options, fast=options.cuda, booster="none", interval=interval)

    def steps() -> float:
        start = perf_counter()
        for _ in range(count):
            run.step()
        if options.cuda:
            torch.cuda.synchronize(options.device)
        return 1000 * (perf_counter() - start) / count

    steps()
    return steps


def in_turns(runs: int, make: Callable[[], Callable[[], float]], options: Options) -> tuple[Times, Times]:
    """What the first of so many processes measures alone, and the mean of what all measure at once."""
    context, sharing = get_context("spawn"), shared_gpu() if options.cuda else nullcontext(dict[str, str]())
    with (
        sharing as environment,
        context.Manager() as manager,
        ProcessPoolExecutor(runs, context, _set, (environment,)) as pool,
    ):
        barrier = manager.Barrier(runs, timeout=PATIENCE)
        jobs = [pool.submit(_process, number, make, options.rounds, barrier) for number in range(runs)]
        errors = [error for error in (job.exception() for job in jobs) if error is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, BrokenBarrierError)):
            raise error  # the cause, before those who waited for it
        measured = [job.result() for job in jobs]
    alone = measured[0][0]
    return alone, [sum(times) / runs for times in zip(*(own for _, own in measured), strict=True)]


def _set(environment: Mapping[str, str]) -> None:
    os.environ.update(environment)


def _process(
    number: int, make: Callable[[], Callable[[], float]], rounds: int, barrier: Barrier
) -> tuple[Times, Times]:
    """One of the runs: in each round a turn that the first has alone, and one that all have."""
    alone, together = Times(), Times()
    with _or_nobody(barrier):
        steps = make()
        for _ in range(rounds):
            barrier.wait()
            alone += [steps()] if number == 0 else []
            barrier.wait()
            together.append(steps())
    return alone, together


@contextmanager
def _or_nobody(barrier: Barrier) -> Iterator[None]:
    """If one fails, the others do not wait for it."""
    try:
        yield
    except BaseException:
        barrier.abort()
        raise
