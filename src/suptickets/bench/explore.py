"""One exploration of RigL: ours against sorting over dense tensors with masks, in milliseconds and steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor

from suptickets.bench.contenders import NEVER, RATE, Run, batches, tidy
from suptickets.bench.turns import Contender, Options, Row, judged, ratio, take_turns
from suptickets.data.base import ArrayData
from suptickets.training.settings import resolve
from suptickets.weight import SparseWeight

SORT, ADDED = "sort, dense tensors and masks", "all explorations of an epoch"
CPU, GPU = {"vgg16": {"speedup": 3.0}}, {"vgg16": {"steps": 10.0}}
STEPS, EVERY = 400, 20  # steps in a measurement of what explorations add, and between two of these
CIFAR = 391  # steps of an epoch


@dataclass
class Masked:
    """A dense weight with its mask, gradient and momentum: what most libraries keep."""

    weight: Tensor
    mask: Tensor
    gradient: Tensor
    momentum: Tensor

    @classmethod
    def of(cls, sparse: SparseWeight, momentum: Tensor) -> Masked:
        """A dense copy of a sparse weight that has the gradient of all positions."""
        assert sparse.gradient is not None
        values = sparse.values.detach()
        dense = (values, torch.ones_like(values), momentum)
        weight, mask, moving = (sparse.build(part, values.dtype).contiguous() for part in dense)
        gradient = sparse.unflatten(sparse.gradient).clone(memory_format=torch.contiguous_format)
        return cls(weight, mask, gradient, moving)

    def explore(self, rate: float) -> None:
        """Prune by sorted magnitude, grow by sorted gradient."""
        mask = self.mask.view(-1)
        alive = mask.nonzero().view(-1)
        count = int(rate * len(alive) + 0.5)
        weakest = self.weight.view(-1)[alive].abs().sort().indices[:count]
        mask[alive[weakest]] = 0
        scores = self.gradient.view(-1).abs().masked_fill_(mask.bool(), -torch.inf)
        mask[scores.sort(descending=True).indices[:count]] = 1
        self.weight *= self.mask
        self.momentum *= self.mask


class Contest:
    """A network that explores, and the same kept as dense tensors with masks."""

    def __init__(self, model: str, data: ArrayData, options: Options) -> None:
        self.run = Run(model, "rigl", data, options, fast=options.cuda, booster="none")
        self.masked: list[Masked] = []

    def copy(self) -> None:
        """Take a step that collects the gradient of all positions, and copy what it gives."""
        network, state = self.run.network, self.run.parts.optimizer.state
        network.request_gradient()
        self.run.step()
        self.masked = [Masked.of(w, state[w.values]["momentum_buffer"]) for w in network.weights.values()]

    def sort(self) -> Contender:
        """An exploration of the copy, as a contender."""

        def prepare() -> Callable[[], object]:
            self.copy()
            self.run.network.release_gradient()
            return self.explore_copy

        return Contender(prepare)

    @torch.no_grad()
    def explore_copy(self) -> None:
        """Explore all layers of the copy."""
        for weight in self.masked:
            weight.explore(RATE)


def run(options: Options) -> list[Row]:
    """Milliseconds, the number of steps that take as long, and how many times faster ours is."""
    rows = []
    for model in options.models:
        rows += measure(model, options)
        if options.cuda:
            options.say(f"{model}: steps with and without explorations")
            rows.append(judged({**added(model, options), "speedup": None}))
    return rows


def measure(model: str, options: Options) -> list[Row]:
    """A step, and an exploration both ways."""
    tidy(options)
    options.say(f"{model}: making an exploration ready")
    contest = Contest(model, batches(model, options), options)
    contenders = {"step": contest.run.contender(), SORT: contest.sort(), "ours": contest.run.exploration()}
    times = take_turns(contenders, options)
    rows = []
    for name in contenders:
        row = {"model": model, "variant": name, "milliseconds": median(times[name])}
        row["steps"] = ratio(times[name], times["step"])
        row["speedup"] = None if name == "step" else ratio(times[SORT], times[name])
        rows.append(row)
    *others, ours = rows
    at_most, at_least = options.limits(model, GPU), options.limits(model, CPU)
    ours = judged(ours, at_most) if options.cuda else judged(ours, None, at_least)
    return [*map(judged, others), ours]


def added(model: str, options: Options) -> Row:
    """What explorations add to an epoch at the recipe's interval."""
    one, step = in_a_run(model, options)
    epoch = one * CIFAR / resolve({"data": "cifar100"}).interval
    return {"model": model, "variant": ADDED, "milliseconds": epoch, "steps": epoch / step}


def in_a_run(model: str, options: Options, every: int = EVERY, steps: int = STEPS) -> tuple[float, float]:
    """Milliseconds that an exploration adds to a run, with collecting and taking over, and those of a step.

    Steps of which each `every`-th explores take turns with as many that do not. Work that is issued while the
    device is still busy with earlier steps costs nothing here, as in a run.
    """
    tidy(options)
    data, intervals = batches(model, options), {"static": NEVER, "rigl": every}
    runs = {
        method: Run(model, method, data, options, fast=options.cuda, booster="none", interval=interval)
        for method, interval in intervals.items()
    }
    times = take_turns(
        {method: Contender(partial(_step, run), steps) for method, run in runs.items()}, options
    )
    one = every * median([a - b for a, b in zip(times["rigl"], times["static"], strict=True)])
    return one, median(times["static"])


def _step(run: Run) -> Callable[[], object]:
    return run.step
