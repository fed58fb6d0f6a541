"""The gradients of all positions of a network, for the steps that need them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

from suptickets.errors import SparsityError
from suptickets.gradient import scale_like
from suptickets.ranks import Ranks
from suptickets.weight import SparseWeight


class Collection:
    """Collects over the backward passes of a step, and then settles: one gradient, the same on all ranks."""

    def __init__(self, weights: Iterable[SparseWeight], ranks: Ranks) -> None:
        """Nothing is collected yet."""
        self.weights, self.ranks = list(weights), ranks
        self.wanted = False
        self._settled = False
        self.skipped = False  # whether the last step was not done

    @property
    def active(self) -> bool:
        """Whether gradients of all positions are being collected."""
        return any(weight.collector is not None for weight in self.weights)

    @property
    def late(self) -> bool:
        """Whether a weight that was frozen when collecting started is trained now, and could not join."""
        trained = (w for w in self.weights if w.values.requires_grad and w.values.grad is not None)
        return self.wanted and any(weight.collector is None for weight in trained)

    def start(self) -> None:
        """Collect from the next forward pass on, from nothing."""
        self.wanted = True
        self.discard()
        for weight in self.weights:
            weight.request_gradient()

    def join(self) -> None:
        """Collect also from weights that were frozen when collecting started."""
        for weight in self.weights:
            if weight.collector is None:
                weight.request_gradient()

    def stop(self) -> None:
        """Forget everything and collect no more."""
        self.wanted = False
        for weight in self.weights:
            weight.release_gradient()

    def discard(self) -> None:
        """Forget what was collected."""
        self._settled = False
        for weight in self.weights:
            if weight.collector is not None:
                weight.collector.discard()

    def begin(self) -> None:
        """A step begins: its gradients have yet to settle, even if those of the last step were kept."""
        self._settled = self.skipped = False

    def settle(self, optimizer: Optimizer | None) -> list[Tensor]:
        """The gradients of the step: averaged over ranks, unscaled and clipped like the optimizer's own."""
        if not self.wanted:
            return []
        kept = [w.slot.total for w in self.weights if w.slot is not None]
        found = [(w, w.gradient, w.values.grad) for w in self.weights if w.slot is None]
        ready = [(w, mine, living) for w, mine, living in found if mine is not None and living is not None]
        gradients = [mine for _, mine, _ in ready]
        if ready and not self._settled:
            self._settled = True
            self.ranks.average(gradients)
            parts = [mine.gather(0, weight.positions) for weight, mine, _ in ready]
            scale_like(gradients, parts, [living.reshape(-1) for _, _, living in ready])
            scale = getattr(optimizer, "grad_scale", None)
            if scale is not None:  # a fused optimizer unscales inside its step
                torch._foreach_div_(gradients, scale)
        return gradients + [gradient for gradient in kept if gradient is not None]

    def nothing(self, optimizer: Optimizer | None, step: int) -> str:
        """Why nothing was collected, if the exploration may be skipped for that reason; otherwise raises."""
        if self.skipped:
            return "the optimizer did no step"
        groups = getattr(optimizer, "param_groups", [])
        trained = {id(p) for g in groups for p in g["params"] if p.grad is not None and bool(p.grad.any())}
        own = [w for w in self.weights if w.slot is not None or id(w.values) in trained]
        if trained and not own:  # a head may be trained alone for a while
            return "no gradient reached the sparse weights"
        if own and self.wanted and not self.active:
            return "the sparse weights were frozen when the step began"
        part = (
            "backward(inputs=...) and torch.autograd.grad compute that of the living ones alone, and so does "
            "backward() for a loss from before the last step, "
        )
        raise SparsityError(
            f"step {step} needs the gradient of all positions and there is none: "
            f"{part if own and self.wanted else ''}call backward() before it, skip no batch there (to "
            "explore yourself, first network.request_gradient())"
        )
