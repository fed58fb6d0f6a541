"""Tickets: networks as the positions and values of their living connections, and all that is not sparse."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, TypeGuard

import torch
from torch import Tensor

from suptickets.errors import SparsityError
from suptickets.layout import at_once, few, in_order, marks, place_of, sent
from suptickets.weight import POSITIONS


@dataclass
class Connections:
    """Living connections of one weight: sorted row-major positions, values, and CAA's counters."""

    rows: Tensor
    values: Tensor
    times: Tensor | None = None

    def select(self, index: Tensor) -> Connections:
        """Some of the connections; `index` is a mask, or sorted indices."""
        times = None if self.times is None else self.times[index]
        return Connections(self.rows[index], self.values[index], times)


@dataclass
class Ticket:
    """One network: its sparse weights as connections, everything else as it is.

    `aliases` are further names of tied weights: name -> the name under which the weight is kept.
    """

    shapes: dict[str, torch.Size]
    sparse: dict[str, Connections]
    dense: dict[str, Any]
    aliases: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def of(
        state: Mapping[str, Any],
        shapes: Mapping[str, Iterable[int]],
        aliases: Mapping[str, str] | None = None,
    ) -> Ticket:
        """The ticket in a sparse model's state dict; `shapes` are the dense shapes of its sparse weights."""
        aliases = dict(aliases or {})
        sparse = {key: Connections(state[key + POSITIONS], state[key].detach().reshape(-1)) for key in shapes}
        taken = {name for key in (*sparse, *aliases) for name in (key, key + POSITIONS)}
        dense = {key: value for key, value in state.items() if key not in taken}
        return Ticket({key: torch.Size(shape) for key, shape in shapes.items()}, sparse, dense, aliases)

    @staticmethod
    def of_dense(state: Mapping[str, Tensor], layers: Iterable[str]) -> Ticket:
        """The ticket in a plain model's state dict: zeros in the named weights are inactive connections."""
        first: dict[Any, str] = {}
        sparse, aliases = {}, {}
        for key in layers:
            place = place_of(key, state[key])
            if first.setdefault(place, key) != key:
                aliases[key] = first[place]
                continue
            flat = state[key].detach().reshape(-1)
            rows = flat.nonzero().reshape(-1)
            sparse[key] = Connections(rows, flat[rows])
        dense = {key: value for key, value in state.items() if key not in sparse and key not in aliases}
        for key, value in dense.items():
            other = first.get(place_of(key, value))
            if other is not None:
                raise SparsityError(f"{key} and {other} are one tensor: name both in layers, or neither")
        return Ticket({key: state[key].shape for key in sparse}, sparse, dense, aliases)

    def counts(self) -> dict[str, int]:
        """Living connections of each sparse weight."""
        return {key: len(connections.rows) for key, connections in self.sparse.items()}

    def types(self) -> dict[str, torch.dtype]:
        """The dtype of every tensor that can be averaged."""
        dense = {key: value.dtype for key, value in self.dense.items() if is_number(value)}
        return dense | {key: connections.values.dtype for key, connections in self.sparse.items()}

    def cast(self, types: Mapping[str, torch.dtype]) -> Ticket:
        """The same ticket in these types; tensors that have them already are shared."""
        sparse = {key: replace(c, values=c.values.to(types[key])) for key, c in self.sparse.items()}
        dense = {key: value.to(types[key]) if key in types else value for key, value in self.dense.items()}
        return Ticket(self.shapes, sparse, dense, self.aliases)

    def wide(self) -> Ticket:
        """The same ticket in single precision at least: sums are not rounded to the types of their terms."""
        types = {key: torch.promote_types(kind, torch.float32) for key, kind in self.types().items()}
        return self.cast(types)

    def clone(self) -> Ticket:
        """A copy that shares nothing."""
        sparse = {
            key: Connections(c.rows.clone(), c.values.clone(), None if c.times is None else c.times.clone())
            for key, c in self.sparse.items()
        }
        dense = {key: v.detach().clone() if isinstance(v, Tensor) else v for key, v in self.dense.items()}
        return Ticket(self.shapes, sparse, dense, self.aliases)

    def pack(self) -> dict[str, Any]:
        """The ticket as tensors and plain values, for a file; a copy, because averages change in place."""
        copied = self.clone()
        sparse = {key: dict(vars(connections)) for key, connections in copied.sparse.items()}
        shapes = {key: list(shape) for key, shape in self.shapes.items()}
        return {"shapes": shapes, "sparse": sparse, "dense": copied.dense, "aliases": dict(self.aliases)}

    @staticmethod
    def unpack(packed: Mapping[str, Any]) -> Ticket:
        """Undo `pack`; the ticket is a copy."""
        shapes = {key: torch.Size(shape) for key, shape in packed["shapes"].items()}
        sparse = {key: Connections(**packed["sparse"][key]) for key in shapes}
        for key, connections in sparse.items():
            lengths = {part.shape for part in vars(connections).values() if part is not None}
            if not fits(connections.values, connections.rows, shapes[key]) or len(lengths) > 1:
                raise SparsityError(f"the positions of {key} do not fit its values")
        return Ticket(shapes, sparse, dict(packed["dense"]), dict(packed["aliases"])).clone()

    @property
    def device(self) -> torch.device:
        """Where the ticket is, by its first tensor."""
        values = [c.values for c in self.sparse.values()] + [*self.dense.values()]
        return next(value.device for value in values if isinstance(value, Tensor))

    def to(self, device: torch.device) -> Ticket:
        """Move the ticket to a device, in place; returns it."""
        for connections in self.sparse.values():
            connections.rows, connections.values = connections.rows.to(device), connections.values.to(device)
            connections.times = None if connections.times is None else connections.times.to(device)
        self.dense = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in self.dense.items()}
        return self

    def state_dict(self) -> dict[str, Any]:
        """The state dict of the plain model, with exact zeros."""
        state = dict(self.dense)
        for key, connections in self.sparse.items():
            flat = connections.values.new_zeros(math.prod(self.shapes[key]))
            state[key] = flat.scatter_(0, connections.rows, connections.values).view(self.shapes[key])
        return state | {alias: state[key] for alias, key in self.aliases.items()}


def fits(values: Any, rows: Any, shape: Any) -> bool:
    """Whether these are the values and positions of a weight: one each, inside it, sorted and unique."""
    if not isinstance(shape, list | tuple) or not all(isinstance(side, int) for side in shape):
        return False
    if not is_number(values) or not isinstance(rows, Tensor) or rows.shape != (values.numel(),):
        return False
    return not len(rows) or (not is_number(rows) and in_order(rows, math.prod(shape)))


@dataclass
class Joined(Connections):
    """Connections of several weights (`sizes` by name), side by side as if they belonged to one weight.

    On a GPU, many small pieces would take longer to start than to compute.
    """

    sizes: dict[str, int] = field(default_factory=dict)

    @staticmethod
    def of(ticket: Ticket, keys: Sequence[str]) -> Joined:
        """Join weights of a ticket; the positions of each begin where those of the one before end."""
        parts, sizes = [ticket.sparse[key] for key in keys], {k: math.prod(ticket.shapes[k]) for k in keys}
        index = torch.int32 if sum(sizes.values()) < 2**31 else torch.int64
        times = [part.times for part in parts if part.times is not None]
        joined = Joined(
            torch.cat([part.rows.to(index) for part in parts]),
            torch.cat([part.values for part in parts]),
            torch.cat(times) if times else None,
            sizes,
        )
        joined.rows += joined._starts([len(part.rows) for part in parts])
        return joined

    def _starts(self, counts: Sequence[int]) -> Tensor:
        """For each connection, where its weight's positions begin."""
        starts = list(accumulate(list(self.sizes.values())[:-1], initial=0))
        return sent(starts, self.rows.device).to(self.rows).index_select(0, marks(counts, self.rows.device))

    def select(self, index: Tensor) -> Joined:
        """Some of the connections; `index` is a mask, or sorted indices."""
        return Joined(**vars(super().select(index)), sizes=self.sizes)

    def parted(self) -> dict[str, Connections]:
        """The connections of each weight, separated again."""
        ends = sent(list(accumulate(self.sizes.values())), self.rows.device).to(self.rows)
        places = [0, *torch.searchsorted(self.rows, ends).tolist()]
        counts = [b - a for a, b in pairwise(places)]
        columns = [self.rows - self._starts(counts), self.values, self.times]
        parts = [[None] * len(counts) if c is None else c.split(counts) for c in columns]
        return {key: Connections(*part) for key, *part in zip(self.sizes, *parts, strict=True)}


def alike(ticket: Ticket) -> list[list[str]]:
    """Groups of weights (by name) whose connections can be joined: same device, same types."""
    kinds = defaultdict(list)
    for key, connections in ticket.sparse.items():
        kinds[connections.values.device, connections.values.dtype].append(key)
    counts = ticket.counts()
    return [
        part
        for (device, _), keys in kinds.items()
        for part in few(keys, [counts[key] for key in keys], at_once(device))
    ]


def is_number(value: Any) -> TypeGuard[Tensor]:
    """Whether a value can be averaged: a tensor, and not of integers."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
