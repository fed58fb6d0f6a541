"""FLOPs of a whole training, as a share of dense training.

Forward is one pass, backward two. A step costs 3 passes with the living connections; a step that collects the
gradient of all positions pays the dense price for one of the two backward passes (RigL's own accounting).
"""

from __future__ import annotations

from collections.abc import Mapping

from suptickets.layers import Layer
from suptickets.measure.flops import Flops


class TrainingCost:
    """Adds up steps; falling densities (GraNet) and dense gradients are seen as they come."""

    def __init__(self, flops: Flops, layers: Mapping[str, Layer]) -> None:
        """`flops` of a forward pass; `layers` of the network, whose living connections are counted."""
        counted = {name: layer for name, layer in layers.items() if name in flops.layers}
        self._prices = [(flops.layers[name].dense / layer.size, layer) for name, layer in counted.items()]
        self._rest = flops.dense - sum(flops.layers[name].dense for name in counted)
        self.dense = flops.dense
        self.steps = 0
        self.spent = 0.0

    def forward(self) -> float:
        """A forward pass with the connections that live now, as a share of the dense one."""
        if not self.dense:
            return 1.0
        return (self._rest + sum(price * layer.nonzero for price, layer in self._prices)) / self.dense

    def step(self, *, dense_gradient: bool) -> None:
        """One training step."""
        sparse = self.forward()
        self.spent += (2 * sparse + 1) / 3 if dense_gradient else sparse
        self.steps += 1

    @property
    def ratio(self) -> float:
        """All steps so far, as a share of dense training."""
        return self.spent / self.steps if self.steps else 1.0
