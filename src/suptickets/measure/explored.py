"""In-time over-parameterisation (Liu et al., ICML 2021): the share of the weights that ever lived.

A sparse network trains few weights at a time, but over the training it may have tried many. The rate is the
number of connections that were alive at any time over the number of possible ones; a static network's is its
density, a dense network's is 1.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from suptickets.errors import SparsityError
from suptickets.network import SparseNetwork


class Explored:
    """Remembers, by one byte per possible connection, which have lived; the connections of now have.

    Call `update` after the optimizer's step: while no connection changes it costs nothing.
    """

    def __init__(self, network: SparseNetwork) -> None:
        """`network` is only looked at."""
        self.network = network
        weights = network.weights.items()
        self._lived = {
            n: torch.zeros(w.size, dtype=torch.bool, device=w.positions.device) for n, w in weights
        }
        self._seen: dict[str, tuple[Tensor, int]] = {}
        self.update()

    @torch.no_grad()
    def update(self) -> None:
        """Take the connections that live now for some that have lived."""
        for name, weight in self.network.weights.items():
            positions, version = weight.positions, weight.positions._version
            known = self._seen.get(name)
            if known is None or known[0] is not positions or known[1] != version:
                self._lived[name] = self._lived[name].to(positions.device)
                self._lived[name][weight.rows().long()] = True
                self._seen[name] = (positions, version)

    @property
    def rate(self) -> float:
        """The share of all possible connections that have lived."""
        dense = sum(layer.size for name, layer in self.network.layers.items() if name not in self._lived)
        lived = sum(int(mask.sum()) for mask in self._lived.values())
        return (dense + lived) / self.network.parameters_total

    @property
    def layers(self) -> dict[str, float]:
        """The same for each layer; 1 for a layer that is not sparse."""
        rates = {name: int(lived.sum()) / len(lived) for name, lived in self._lived.items()}
        return {name: rates.get(name, 1.0) for name in self.network.layers}

    def state_dict(self) -> dict[str, Tensor]:
        """Which connections have lived, in row-major order, layer by layer."""
        return {name: lived.clone() for name, lived in self._lived.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from `state_dict()`; load the network first, for what lives now has lived too."""
        ours = {name: lived.shape for name, lived in self._lived.items()}
        if {name: getattr(lived, "shape", None) for name, lived in state.items()} != ours:
            raise SparsityError("this is not the state of Explored for this network: save state_dict()")
        self._lived = {name: state[name].to(lived, copy=True) for name, lived in self._lived.items()}
        self._seen = {}
        self.update()
