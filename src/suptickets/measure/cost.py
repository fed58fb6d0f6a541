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

    def __init__(self, flops: Flops) -> None:
        """`flops` of a forward pass, with those of each layer."""
        self.flops = flops
        self.steps = 0
        self.spent = 0.0

    def forward(self, layers: Mapping[str, Layer]) -> float:
        """A forward pass with the living connections of `layers`, as a share of the dense one."""
        layers_flops = self.flops.layers
        saved = sum(
            layers_flops[n].dense * layer.sparsity for n, layer in layers.items() if n in layers_flops
        )
        return 1 - saved / self.flops.dense

    def step(self, layers: Mapping[str, Layer], *, dense_gradient: bool) -> None:
        """One training step."""
        sparse = self.forward(layers)
        self.spent += (2 * sparse + 1) / 3 if dense_gradient else sparse
        self.steps += 1

    @property
    def ratio(self) -> float:
        """All steps so far, as a share of dense training."""
        return self.spent / self.steps if self.steps else 1.0
