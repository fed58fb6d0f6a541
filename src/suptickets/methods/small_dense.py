"""Small-Dense: a dense network with as many parameters as the sparse one (Evci et al., 2020)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar
from weakref import WeakSet

import torch
from torch import nn

from suptickets.errors import SparsityError, fraction
from suptickets.methods.dense import Dense
from suptickets.network import SparseNetwork

_NARROWED: WeakSet[nn.Module] = WeakSet()


@dataclass
class SmallDense(Dense):
    """A dense network narrowed to the parameter count of the sparse one.

    `narrow` finds the width; the network that it returns is trained like a dense one.
    """

    name: ClassVar[str] = "small-dense"
    summary: ClassVar[str] = "a dense network narrowed to the sparse one's parameter count"

    def begin(self, network: SparseNetwork) -> None:
        """Warn of a network that was not narrowed."""
        if self.sparsity and not any(module in _NARROWED for module in network.model.modules()):
            network.warn(
                "small-dense trains the model as it is, and this one was not narrowed: begin with "
                "model = method.narrow(build), where build(width) makes it"
            )

    def narrow(self, build: Callable[[float], nn.Module]) -> nn.Module:
        """The widest `build(width)`, 0 < width <= 1, with at most 1 - sparsity of the parameters."""
        fraction("sparsity", self.sparsity)
        with torch.device("meta"):
            budget = (1 - self.sparsity) * _parameters(build(1.0))
        low, high = 0.0, 1.0
        for _ in range(20):
            middle = (low + high) / 2
            low, high = (middle, high) if _fits(build, middle, budget) else (low, middle)
        width = 1.0 if self.sparsity == 0 else low
        if not _fits(build, width, budget):
            raise SparsityError(
                f"no width fits {1 - self.sparsity:.4f} of the parameters: use a lower sparsity"
            )
        model = build(width)
        _NARROWED.update(model.modules())  # TreeNet takes modules out of the model
        return model


def _fits(build: Callable[[float], nn.Module], width: float, budget: float) -> bool:
    try:
        with torch.device("meta"):
            return _parameters(build(width)) <= budget
    except ValueError:  # a width at which a layer has no channels
        return False


def _parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
