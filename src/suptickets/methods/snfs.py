"""SNFS, sparse networks from scratch (Dettmers and Zettlemoyer, 2019): growth by momentum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from suptickets.distribution import apportion
from suptickets.errors import SparsityError, fraction
from suptickets.methods.base import Dynamic
from suptickets.network import SparseNetwork


@dataclass
class SNFS(Dynamic):
    """Pruned connections go to the layers in proportion to mean momentum, and are grown by momentum.

    By definition it needs the momentum of all positions, so it alone keeps one dense tensor per weight and
    collects the dense gradient at every step.

    Args:
        momentum: decay of the momentum of all positions.
    """

    name: ClassVar[str] = "snfs"
    summary: ClassVar[str] = "grow by momentum, layer counts by mean momentum (keeps a dense momentum)"
    grow: ClassVar[str] = "momentum"
    observes: ClassVar[bool] = True

    _: KW_ONLY
    momentum: float = 0.9

    def __post_init__(self) -> None:
        """Refuse impossible settings."""
        super().__post_init__()
        fraction("momentum", self.momentum)

    @torch.no_grad()
    def observe(self, network: SparseNetwork) -> None:
        """Add this step's gradient to the momentum of all positions."""
        if not network.changing or not network.gradients_ready():
            return
        for weight in network.weights.values():
            if weight.gradient is not None:
                # in half precision the sum of a few gradients may be infinite
                wide = torch.promote_types(weight.values.dtype, torch.float32)
                known = weight.momentum
                old = torch.zeros_like(weight.gradient, dtype=wide) if known is None else known.to(wide)
                weight.momentum = old.mul_(self.momentum).add_(weight.gradient)

    def update(self, network: SparseNetwork, step: int) -> None:
        """Prune a share of each layer, and grow as many in total, where the momentum is."""
        if not self.due(step) or not network.changing or not network.gradients_ready():
            return
        weights = {name: w for name, w in network.changing.items() if w.momentum is not None and w.nonzero}
        rate = self.rate_at(step)
        kept = {name: max(w.nonzero - int(rate * w.nonzero + 0.5), 1) for name, w in weights.items()}
        shares = [float(w.momentum.gather(0, w.positions).abs().mean()) for w in weights.values()]  # type: ignore[union-attr]
        freed = sum(w.nonzero - kept[name] for name, w in weights.items())
        grown = apportion(freed, shares, [w.size - kept[name] for name, w in weights.items()])
        network.rewire(kept, {name: kept[name] + n for name, n in zip(kept, grown, strict=True)})

    def state_dict(self, network: SparseNetwork) -> dict[str, Any]:
        """The momenta, with the shapes of the weights."""
        weights = network.weights.items()
        return {name: w.unflatten(w.momentum).clone() for name, w in weights if w.momentum is not None}

    def load_state_dict(self, network: SparseNetwork, state: Mapping[str, Any]) -> None:
        """Load the momenta, all or none."""
        weights = network.weights
        found = {name: state[name] for name in weights if state.get(name) is not None}
        for name, momentum in found.items():
            if not isinstance(momentum, Tensor) or momentum.shape != weights[name].shape:
                raise SparsityError(f"the state is damaged: SNFS's momentum of {name} has another shape")
        for weight in weights.values():
            weight.momentum = None
        for name, momentum in found.items():
            weight = weights[name]
            weight.momentum = weight.flatten(momentum.to(weight.positions.device)).clone()
