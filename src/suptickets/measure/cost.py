"""FLOPs of a whole training: by formula before it begins, and step by step while it runs.

Forward is one pass, backward two. A step costs 3 passes with the living connections; a step that collects the
gradient of all positions pays the dense price for one of the two backward passes (RigL's own accounting).
Steps count alike, also the last of an epoch, whose batch may be smaller. Averaging tickets, the optimizer
and the choice of connections are not counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from suptickets.criteria import need_gradient
from suptickets.errors import SparsityError, choice, fraction, unknown, whole
from suptickets.measure.flops import Flops
from suptickets.methods.base import Dynamic, Method
from suptickets.methods.granet import GraNet
from suptickets.network import SparseNetwork
from suptickets.schedules import cubic

Shapes = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class TrainingFlops:
    """FLOPs of a training: `dense` if all connections lived, `sparse` for the living ones."""

    dense: int
    sparse: int

    @property
    def ratio(self) -> float:
        """Sparse over dense."""
        return self.sparse / self.dense if self.dense else 1.0


def training_flops(
    forward: Flops,
    shapes: Shapes,
    method: Method,
    steps: int,
    samples: int,
    *,
    cycles: int = 0,
    cycle_steps: int = 0,
    explore_at: str = "start",
    final: float | None = None,
) -> TrainingFlops:
    """FLOPs of a training that has not begun.

    Args:
        forward: `flops` of a forward pass with one sample.
        shapes: shapes of the weights that are made sparse, by name, in order (`layer.shape` of
            `network.layers`). All else in `forward` costs its dense price.
        method: the method, with its sparsity, distribution, interval and schedule.
        steps: optimizer steps of the whole training, the cycles included.
        samples: how many all steps together see: epochs times the size of the data.
        cycles: cycles of Sup-tickets, at the end; each explores once, and the method itself keeps still.
        cycle_steps: steps of a cycle.
        explore_at: the `start` or the `end` of a cycle (then not in the last), or `never` (SWA).
        final: forward cost of the trained network as a share of the dense one, for methods in which the
            weights decide how dense each layer ends (SNIP, GraNet, GMP, SNFS, DSR): `flops(trained, x).ratio`
            of an earlier run. Without it, the layers are taken to end at the method's distribution.
    """
    in_cycles = whole("cycles", cycles, 0) * whole("cycle_steps", cycle_steps, 0)
    normal = whole("steps", steps) - in_cycles
    if normal < 0:
        raise SparsityError(f"{cycles} cycles of {cycle_steps} steps do not fit into {steps} steps")
    choice("explore_at", explore_at, ("start", "end", "never"))
    explorations = 0 if explore_at == "never" else max(cycles - (explore_at == "end"), 0)
    for name in shapes:
        if name not in forward.layers:
            raise unknown("layer", name, forward.layers)
    known = final is not None
    end = fraction("final", final, one=True) if known else _share(forward, shapes, method, method.sparsity)
    start = _share(forward, shapes, method, method.initial) if isinstance(method, GraNet) else end
    spent = 0.0
    for stretch in (*_normal(method, normal), _cycles(method, normal, in_cycles, explorations)):
        share = start + (end - start) * _progress(method, stretch.update)
        spent += stretch.steps * share + stretch.gradients * (1 - share) / 3
    dense = 3 * forward.dense * whole("samples", samples)
    return TrainingFlops(dense, round(dense * spent / steps))


class _Stretch(NamedTuple):
    """Steps during which no count changes."""

    update: int  # the step after which connections changed last
    steps: int
    gradients: int  # how many of the steps collect the gradient of all positions


def _normal(method: Method, steps: int) -> Iterator[_Stretch]:
    interval = _interval(method, steps)
    for begin in range(0, steps, interval):
        length = min(interval, steps - begin)
        gradients = length if method.observes else int(method.needs_gradient(begin + length))
        yield _Stretch(begin, length, gradients)


def _cycles(method: Method, begin: int, steps: int, explorations: int) -> _Stretch:
    interval = _interval(method, begin)
    gradients = steps if method.observes else explorations * need_gradient(method.prune, method.grow)
    return _Stretch(begin // interval * interval, steps, gradients)


def _interval(method: Method, steps: int) -> int:
    return method.interval if isinstance(method, Dynamic) else max(steps, 1)


def _progress(method: Method, step: int) -> float:
    """How far the density has gone from its first to its last value, by the update after `step`."""
    return cubic(step, method.prune_start, method.prune_end, 0.0, 1.0) if isinstance(method, GraNet) else 1.0


def _share(forward: Flops, shapes: Shapes, method: Method, sparsity: float) -> float:
    """Forward cost at the method's distribution, as a share of the dense one."""
    if not method.sparse or not forward.dense:
        return 1.0
    missing = {n: 1 - count / prod(shapes[n]) for n, count in method.assigned(shapes, sparsity).items()}
    return 1 - sum(layer.dense * missing.get(n, 0.0) for n, layer in forward.layers.items()) / forward.dense


class TrainingCost:
    """Adds up the cost of steps, with falling densities (GraNet) and dense gradients as they come."""

    def __init__(self, flops: Flops, network: SparseNetwork) -> None:
        """`flops` of a forward pass; of the network, the living connections are counted."""
        counted = {name: layer for name, layer in network.layers.items() if name in flops.layers}
        self.network = network
        self._prices = [(flops.layers[name].dense / layer.size, layer) for name, layer in counted.items()]
        self._rest = flops.dense - sum(flops.layers[name].dense for name in counted)
        self.dense = flops.dense
        self.steps = 0
        self.spent = 0.0
        self._count()

    def _count(self) -> None:
        """The cost of a forward pass with the connections that live now, as a share of the dense one."""
        sparse = self._rest + sum(price * layer.nonzero for price, layer in self._prices)
        self._forward, self._counted = sparse / self.dense if self.dense else 1.0, self.network.changes

    def step(self, *, dense_gradient: bool) -> None:
        """Add one training step."""
        if self._counted != self.network.changes:
            self._count()
        self.spent += (2 * self._forward + 1) / 3 if dense_gradient else self._forward
        self.steps += 1

    @property
    def ratio(self) -> float:
        """The cost of all steps so far, as a share of dense training."""
        return self.spent / self.steps if self.steps else 1.0
