"""In-time over-parameterisation (Liu et al., ICML 2021): the share of the weights that ever lived.

A sparse network trains few weights at a time, but over the training it may have tried many. The rate is the
number of connections that were alive at any time over the number of possible ones; a static network's is its
density, a dense network's is 1.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from suptickets.errors import SparsityError
from suptickets.layout import at_once, few, marks, rows_of
from suptickets.network import SparseNetwork


class Explored:
    """Remembers, by one bit per possible connection, which have lived, those that live now included.

    Call `update` at every step: while no connection changes it costs nothing.
    """

    def __init__(self, network: SparseNetwork) -> None:
        """`network` is not changed."""
        self.network = network
        self._begin({})

    def _begin(self, state: Mapping[str, Tensor]) -> None:
        """Lay out the bits of all weights, side by side on their device; each weight's begin a new byte."""
        weights, ends = self.network.weights, defaultdict[torch.device, int](int)
        self._home, self._starts = {name: w.positions.device for name, w in weights.items()}, {}
        for name, device in self._home.items():
            self._starts[name] = ends[device]
            ends[device] += -(-weights[name].size // 8)
        self._bits = {d: torch.zeros(end, dtype=torch.uint8, device=d) for d, end in ends.items()}
        for name, lived in state.items():
            self._lived(name).copy_(lived)
        self._mark_living()

    def _lived(self, name: str) -> Tensor:
        start, size = self._starts[name], self.network.weights[name].size
        return self._bits[self._home[name]][start : start + -(-size // 8)]

    def update(self) -> None:
        """Mark the connections that live now as having lived."""
        if self._marked == self.network.changes:
            return
        if any(w.positions.device != self._home[name] for name, w in self.network.weights.items()):
            self._begin(self.state_dict())  # the network has been moved
        else:
            self._mark_living()

    @torch.no_grad()
    def _mark_living(self) -> None:
        self._marked = self.network.changes
        alike: dict[object, list[str]] = defaultdict(list)
        for name, weight in self.network.weights.items():
            alike[weight.positions.device, weight.order].append(name)
        for names in alike.values():
            counts = [self.network.weights[name].nonzero for name in names]
            for part in few(names, counts, at_once(self._home[names[0]])):
                self._mark(part)

    def _mark(self, names: Sequence[str]) -> None:
        """Set the bits of these weights' connections; no two are the same, so adding unset bits sets them."""
        weights = [self.network.weights[name] for name in names]
        positions = torch.cat([weight.positions for weight in weights]).long()
        owner = marks([weight.nonzero for weight in weights], positions.device)
        starts = [8 * self._starts[name] for name in names]
        rows = rows_of(positions, owner, [weight.shape for weight in weights], weights[0].order, starts)
        bits = self._bits[positions.device]
        byte, bit = rows >> 3, (128 >> (rows & 7)).to(torch.uint8)
        bits.index_add_(0, byte, bit & ~bits.index_select(0, byte))

    @property
    def rate(self) -> float:
        """The share of all possible connections that have lived."""
        self.update()
        dense = sum(layer.size for name, layer in self.network.layers.items() if name not in self._starts)
        return (dense + sum(map(_count, self._bits.values()))) / self.network.parameters_total

    @property
    def layers(self) -> dict[str, float]:
        """The same for each layer; 1 for a layer that is not sparse."""
        self.update()
        rates = {name: _count(self._lived(name)) / w.size for name, w in self.network.weights.items()}
        return {name: rates.get(name, 1.0) for name in self.network.layers}

    def state_dict(self) -> dict[str, Tensor]:
        """Which connections have lived, layer by layer: bits in row-major order, eight to a byte."""
        return {name: self._lived(name).clone() for name in self._starts}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from `state_dict()`; load the network first, for what lives now has lived too."""
        ours = {name: (torch.uint8, self._lived(name).shape) for name in self._starts}
        found = {n: (getattr(x, "dtype", None), getattr(x, "shape", None)) for n, x in state.items()}
        if found != ours:
            raise SparsityError("this is not the state of Explored for this network: save state_dict()")
        self._begin(state)


def _count(bits: Tensor) -> int:
    """The number of bits that are set."""
    return int(sum((bits >> place & 1).sum() for place in range(8)))
