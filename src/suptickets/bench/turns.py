"""How things are measured: contenders take turns, medians count, and a row says what came out.

Only ratios from one run count: whatever else the machine does then hits all contenders alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from suptickets.training.progress import print_plain

Row = dict[str, Any]
Limits = Mapping[str, float]
Times = dict[str, list[float]]

PAPER = ("vgg16", "resnet50", "wrn28-10")
SPARSITY = 0.95  # what the requirements are stated for


@dataclass(frozen=True)
class Options:
    """The options of a measurement.

    Attributes:
        device: where to measure.
        model: the one model to measure; None for the paper's on a GPU, for the smallest of them on a CPU.
        sparsity: fraction of the weights that are zero.
        rounds: turns that each contender gets.
        compile: compile the fast step on a CPU too.
        largest: of the networks of `scale`, in millions of weights.
        say: where progress goes.
    """

    device: torch.device
    model: str | None = None
    sparsity: float = SPARSITY
    rounds: int = 5
    compile: bool = False
    largest: float | None = None
    say: Callable[[str], None] = print_plain

    @property
    def cuda(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.type == "cuda"

    @property
    def models(self) -> tuple[str, ...]:
        """The models to measure."""
        if self.model is not None:
            return (self.model,)
        return PAPER if self.cuda else PAPER[:1]

    def limits(self, model: str, stated: Mapping[str, Limits]) -> Limits:
        """The requirements on a model, where they apply: at the sparsity that they are stated for."""
        return stated.get(model, {}) if self.sparsity == SPARSITY else {}


@dataclass(frozen=True)
class Contender:
    """Something that takes turns with others in a measurement.

    Attributes:
        prepare: makes everything ready, untimed, and returns what is timed.
        repeats: how often that is called within one measurement.
    """

    prepare: Callable[[], Callable[[], object]]
    repeats: int = 1


def take_turns(contenders: Mapping[str, Contender], options: Options) -> Times:
    """Milliseconds of a call of each contender in each round, after one round that is not counted.

    The order is reversed after each round. On a GPU the clock is read when the device has nothing left to do.
    """
    times: Times = {name: [] for name in contenders}
    order = list(contenders.items())
    for _ in range(options.rounds + 1):
        for name, contender in order:
            times[name].append(_milliseconds(contender, options))
        order.reverse()
    return {name: values[1:] for name, values in times.items()}


def _milliseconds(contender: Contender, options: Options) -> float:
    run = contender.prepare()
    _wait(options)
    start = time.perf_counter()
    for _ in range(contender.repeats):
        run()
    _wait(options)
    return 1000 * (time.perf_counter() - start) / contender.repeats


def _wait(options: Options) -> None:
    if options.cuda:
        torch.cuda.synchronize(options.device)


def ratio(above: list[float], below: list[float]) -> float:
    """The median over the rounds of the ratio within a round."""
    return median(a / b for a, b in zip(above, below, strict=True))


def judged(row: Row, at_most: Limits | None = None, at_least: Limits | None = None) -> Row:
    """The row with the limits that its values have to keep, and whether they do (None without a limit)."""
    limits = [("<=", key, limit) for key, limit in (at_most or {}).items()]
    limits += [(">=", key, limit) for key, limit in (at_least or {}).items()]
    kept = [row[key] <= limit if sign == "<=" else row[key] >= limit for sign, key, limit in limits]
    requirement = ", ".join(f"{key} {sign} {limit:g}" for sign, key, limit in limits)
    return {**row, "requirement": requirement or None, "met": all(kept) if kept else None}
