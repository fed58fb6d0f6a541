"""One exploration of RigL on a 95 % sparse VGG-16, against sorting over dense tensors with masks."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.timing import Row, ratio, take_turns
from benchmarks.training import Trainer
from suptickets import RigL
from suptickets.weight import SparseWeight

RATE = 0.5
REQUIRED = 3.0


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
        dense = sparse.build(sparse.values.detach(), sparse.values.dtype)
        mask = torch.zeros(sparse.size, dtype=torch.bool).index_fill_(0, sparse.positions.long(), True)
        gradient = sparse.gradient.clone().view(sparse.shape)
        return cls(dense, mask.view(sparse.shape), gradient, sparse.build(momentum, dense.dtype))

    def explore(self, rate: float) -> None:
        """Prune by sorted magnitude, grow by sorted gradient."""
        mask = self.mask.view(-1)
        alive = mask.nonzero().view(-1)
        count = int(rate * len(alive) + 0.5)
        weakest = self.weight.view(-1)[alive].abs().sort().indices[:count]
        mask[alive[weakest]] = False
        scores = self.gradient.view(-1).abs().masked_fill_(mask, -torch.inf)
        mask[scores.sort(descending=True).indices[:count]] = True
        self.weight *= self.mask
        self.momentum *= self.mask


class Contest:
    """Both contenders start each round from the same network, after one step with other data."""

    def __init__(self) -> None:
        self.trainer = Trainer("vgg16", RigL(0.95, interval=10**9), batch=32)
        self.masked: list[Masked] = []

    def plain(self) -> Callable[[], None]:
        """Takes the step and copies what it gives; to be prepared first."""
        network, state = self.trainer.network, self.trainer.optimizer.state
        assert network is not None
        network.request_gradient()
        self.trainer.step()
        self.masked = [Masked.of(w, state[w.values]["momentum_buffer"]) for w in network.weights.values()]
        return self._explore_masked

    @torch.no_grad()
    def _explore_masked(self) -> None:
        for weight in self.masked:
            weight.explore(RATE)

    def ours(self) -> Callable[[], bool]:
        """Explores the network itself."""
        network = self.trainer.network
        assert network is not None
        return lambda: network.explore(RATE)

    def agreement(self) -> float:
        """The share of the connections that both chose."""
        network = self.trainer.network
        assert network is not None
        pairs = zip(self.masked, network.weights.values(), strict=True)
        return sum(int(m.mask.view(-1)[w.rows().long()].sum()) for m, w in pairs) / network.nonzero


def run() -> list[Row]:
    """Milliseconds of both, and how many times faster ours is."""
    contest = Contest()
    times = take_turns({"plain": contest.plain, "ours": contest.ours}, rounds=5)
    assert contest.agreement() > 0.999
    speedup = ratio(times["plain"], times["ours"])
    plain, ours = (statistics.median(times[name]) for name in ("plain", "ours"))
    return [
        Row("vgg16", "sort, dense tensors and masks", plain, "speedup", 1.0),
        Row("vgg16", "suptickets", ours, "speedup", speedup, f">= {REQUIRED:.2f}", speedup >= REQUIRED),
    ]
