"""Sparsity of a plain model or state dict: its exact zeros, layer by layer and in total.

For a network in training, `network.sparsity` and `network.layers` count living connections instead, of which
one may hold the value 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from suptickets.errors import SparsityError
from suptickets.layers import LayerSparsity
from suptickets.plain import densified
from suptickets.weight import SUFFIX


@dataclass(frozen=True)
class ModelSparsity:
    """The non-zero weights of all layers."""

    layers: Mapping[str, LayerSparsity]

    @property
    def parameters(self) -> int:
        """Number of weights."""
        return sum(layer.size for layer in self.layers.values())

    @property
    def nonzero(self) -> int:
        """Number of weights that are not zero."""
        return sum(layer.nonzero for layer in self.layers.values())

    @property
    def sparsity(self) -> float:
        """Share of the weights that are zero."""
        return 1 - self.nonzero / self.parameters if self.parameters else 0.0

    def as_list(self) -> list[dict[str, Any]]:
        """One dict for each layer, for JSON."""
        return [
            {"name": n, "shape": list(w.shape), "size": w.size, "nonzero": w.nonzero, "sparsity": w.sparsity}
            for n, w in self.layers.items()
        ]

    @property
    def densities(self) -> dict[str, float]:
        """Share of the weights of each layer that are not zero."""
        return {name: 1 - layer.sparsity for name, layer in self.layers.items()}


def sparsity(model: nn.Module | Mapping[str, Any]) -> ModelSparsity:
    """Count the zeros of a model (sparsified ones too) or of a state dict.

    Layers are the weights of two or more dimensions, so biases and batch norm do not count; they are named
    as in `network.layers`. A weight that several modules share counts once in a model, and in a state dict
    as often as it is there.
    """
    if isinstance(model, nn.Module):
        weights: dict[str, Tensor] = dict(densified(model).named_parameters())
    elif isinstance(model, Mapping):
        weights = {name: value for name, value in model.items() if isinstance(value, Tensor)}
    else:
        raise SparsityError(f"expected a torch.nn.Module or a state dict, not {type(model).__name__}")
    if any(f"{SUFFIX}." in name for name in weights):
        raise SparsityError("this is the state of a sparsified model: give the model, or network.densify()")
    counted = {n: w for n, w in weights.items() if w.dim() >= 2 and w.is_floating_point()}
    if not counted:
        raise SparsityError("there is no weight of two or more dimensions: give a model or its state dict")
    return ModelSparsity(
        {
            name.removesuffix(".weight"): LayerSparsity(tuple(w.shape), int(w.count_nonzero()))
            for name, w in counted.items()
        }
    )
