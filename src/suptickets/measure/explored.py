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
    """Remembers, by one bit per possible connection, which have lived; the connections of now have.

    Call `update` after the optimizer's step: while no connection changes it costs nothing.
    """

    def __init__(self, network: SparseNetwork) -> None:
        """`network` is only looked at."""
        self.network = network
        weights = network.weights.items()
        self._lived = {
            n: torch.zeros(-(-w.size // 8), dtype=torch.uint8, device=w.positions.device) for n, w in weights
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
                _mark(self._lived[name], weight.rows())
                self._seen[name] = (positions, version)

    @property
    def rate(self) -> float:
        """The share of all possible connections that have lived."""
        dense = sum(layer.size for name, layer in self.network.layers.items() if name not in self._lived)
        return (dense + sum(map(_count, self._lived.values()))) / self.network.parameters_total

    @property
    def layers(self) -> dict[str, float]:
        """The same for each layer; 1 for a layer that is not sparse."""
        weights = self.network.weights
        rates = {name: _count(lived) / weights[name].size for name, lived in self._lived.items()}
        return {name: rates.get(name, 1.0) for name in self.network.layers}

    def state_dict(self) -> dict[str, Tensor]:
        """Which connections have lived, layer by layer: bits in row-major order, eight to a byte."""
        return {name: lived.clone() for name, lived in self._lived.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from `state_dict()`; load the network first, for what lives now has lived too."""
        ours = {name: lived.shape for name, lived in self._lived.items()}
        if {name: getattr(lived, "shape", None) for name, lived in state.items()} != ours:
            raise SparsityError("this is not the state of Explored for this network: save state_dict()")
        self._lived = {name: state[name].to(lived, copy=True) for name, lived in self._lived.items()}
        self._seen = {}
        self.update()


def _mark(lived: Tensor, rows: Tensor) -> None:
    """Set the bits of `rows`, of which no two are the same: then adding those that are not set sets them."""
    byte, bit = rows >> 3, (1 << (rows & 7)).to(torch.uint8)
    lived.index_add_(0, byte, bit & ~lived.index_select(0, byte))


def _count(lived: Tensor) -> int:
    """The number of bits that are set."""
    return sum(int((lived >> bit & 1).sum()) for bit in range(8))
