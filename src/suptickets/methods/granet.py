"""GraNet: gradual pruning with zero-cost neuroregeneration (Liu et al., NeurIPS 2021)."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

from suptickets.errors import SparsityError, fraction, whole
from suptickets.methods.base import Dynamic
from suptickets.network import SparseNetwork
from suptickets.schedules import cubic


@dataclass
class GraNet(Dynamic):
    """From a half-dense (or dense) start, prune globally by magnitude, each time followed by prune-and-grow.

    Args:
        initial_sparsity: the sparsity at the start; 0 starts dense.
        prune_start: the step at which the cubic pruning schedule begins.
        prune_end: the step at which it reaches `sparsity`: 110 epochs of CIFAR at batch 128 by default.
    """

    name: ClassVar[str] = "granet"
    summary: ClassVar[str] = "gradual global magnitude pruning, each time followed by prune-and-grow"

    _: KW_ONLY
    initial_sparsity: float = 0.5
    prune_start: int = 0
    prune_end: int = 110 * 391

    def __post_init__(self) -> None:
        """Refuse impossible settings."""
        super().__post_init__()
        fraction("initial_sparsity", self.initial_sparsity)
        if self.initial_sparsity > self.sparsity:
            raise SparsityError(
                f"initial_sparsity {self.initial_sparsity:g} is above the target {self.sparsity:g}"
            )
        if not whole("prune_start", self.prune_start, 0) < whole("prune_end", self.prune_end):
            raise SparsityError("prune_end must come after prune_start")

    @property
    def initial(self) -> float:
        """The sparsity at the start."""
        return self.initial_sparsity

    @property
    def ready(self) -> int:
        """The first update at or after the end of the schedule; 0 if the start is at the target."""
        return -(-self.prune_end // self.interval) * self.interval if self.sparsity > self.initial else 0

    def begin(self, network: SparseNetwork) -> None:
        """Draw connections at `initial_sparsity`; refuse a target that empties a layer, or is not reached."""
        if self.total_steps is not None and self.ready > self.total_steps:
            raise SparsityError(
                f"{self.name} reaches its sparsity after {self.ready} steps (prune_end, at a multiple of the "
                f"interval), and the training has {self.total_steps}: set a smaller prune_end or interval"
            )
        total, free = network.parameters_total, network.changing
        needed = sum(w.size for name, w in network.weights.items() if name not in free) + len(free)
        if round((1 - self.sparsity) * total) < needed:
            raise SparsityError(
                f"at sparsity {self.sparsity:g} one of the {len(network.weights)} layers would lose all its "
                f"connections: use at most {math.floor((1 - needed / total) * 1e6) / 1e6:.6f}"
            )
        super().begin(network)

    def due(self, step: int) -> bool:
        """Whether this step is due: from `prune_start` on; until the target is reached, no `stop` applies."""
        pruning = step % self.interval == 0 and step <= self.ready
        return step >= self.prune_start and (super().due(step) or pruning)

    def update(self, network: SparseNetwork, step: int) -> None:
        """Prune to the schedule, then explore."""
        if self.due(step):
            self._prune(network, step)
            self._explore(network, step)

    def _prune(self, network: SparseNetwork, step: int) -> None:
        sparsity = cubic(step, self.prune_start, self.prune_end, self.initial_sparsity, self.sparsity)
        total, changing = round((1 - sparsity) * network.parameters_total), network.changing
        least = network.nonzero - sum(weight.nonzero - 1 for weight in changing.values())
        if total < least:
            network.warn("layers that are frozen keep their connections: the sparsity stays below the target")
        if max(total, least) < network.nonzero:
            network.prune(network.global_counts(max(total, least)), by="magnitude")

    def _explore(self, network: SparseNetwork, step: int) -> None:
        network.explore(self.rate_at(step))
