"""Superposing tickets: CIA, CAA, CIMA over connections at different positions, then pruning to a count.

The average is a running one (Eq. 4) and holds one extra sparse copy of the network: after every ticket it is
pruned back to the count. With `prune_when="end"` it holds the union of all tickets' connections until then.

It is computed in single precision at least, and rounded to the tickets' types once, at the end. What is the
same in all tickets is the same in their average.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard

import torch
from torch import Tensor

from suptickets.connections import Joined, Ticket, alike, is_number
from suptickets.criteria import strongest
from suptickets.distribution import apportion
from suptickets.errors import SparsityError, choice, fraction
from suptickets.given import layer_names, read_ticket

RULES = {
    "cia": "connection independent averaging: divide by the number of tickets",
    "caa": "connection aware averaging: divide by the number of tickets in which the connection is alive",
    "cima": "connection independent moving averaging: beta x old + (1 - beta) x new",
}
_DEVIATION = "running_var"  # variances are averaged as standard deviations (the paper's AV)
_STATE = ("bias", "running_mean", _DEVIATION)  # names of what must be finite


@dataclass
class Superposition:
    """A running average of tickets, pruned to a count.

    Args:
        rule: `cia`, `caa` or `cima`.
        beta: weight of the old average in `cima`.
        prune: `global` (the smallest magnitudes of the whole network go) or `layer` (each keeps its count).
        prune_when: `each` (after every ticket, as in Eq. 4) or `end` (once; needs the memory of the union).
        total: connections to keep; the first ticket's number by default.
        targets: connections that each layer keeps with `layer`; the first ticket's shares by default.
    """

    rule: str = "cia"
    beta: float = 0.8
    prune: str = "global"
    prune_when: str = "each"
    total: int | None = None
    targets: dict[str, int] = field(default_factory=dict)
    count: int = field(default=0, init=False)
    average: Ticket | None = field(default=None, init=False)
    types: dict[str, torch.dtype] = field(default_factory=dict, init=False)  # of the result
    fixed: set[str] = field(default_factory=set, init=False)  # frozen or kept dense: they keep their counts

    def __post_init__(self) -> None:
        """Refuse impossible settings."""
        for option, known in (
            ("rule", RULES),
            ("prune", ("global", "layer")),
            ("prune_when", ("each", "end")),
        ):
            choice(option, getattr(self, option), known)
        fraction("beta", self.beta, zero=False)

    @torch.no_grad()
    def add(self, ticket: Ticket) -> None:
        """Add one more ticket to the average; it is not changed, and nothing of it is kept."""
        types, ticket = ticket.types(), ticket.wide()
        average, numbers = self.average, _numbers(ticket)
        if average is not None:
            _same(average, ticket)
        _refuse_diverged(self.count + 1, ticket, numbers)
        if self.rule == "caa" and self.count == torch.iinfo(torch.int16).max:
            raise SparsityError(f"caa counts up to {self.count} tickets: use cia or cima for more")
        self.count += 1
        self.types = {
            key: torch.promote_types(kind, self.types.get(key, kind)) for key, kind in types.items()
        }
        if average is None:
            self.average = average = self._start(ticket)
        else:
            for keys in alike(average):
                old, new = (Joined.of(t, keys) for t in (average, ticket))
                average.sparse |= self._merge(old, new).parted()
            self._average(average, ticket, numbers)
        if self.prune_when == "each":
            self._prune(average)

    def _start(self, ticket: Ticket) -> Ticket:
        counts = ticket.counts()
        self.total = sum(counts.values()) if self.total is None else self.total
        sizes = [math.prod(ticket.shapes[key]) for key in counts]
        shares = [float(count) for count in counts.values()]
        self.targets = self.targets or dict(zip(counts, apportion(self.total, shares, sizes), strict=True))
        average = ticket.clone()
        if self.rule == "caa":
            for connections in average.sparse.values():
                connections.times = torch.ones_like(connections.rows, dtype=torch.int16)
        return average

    @property
    def _new_weight(self) -> float:
        """Weight of the newest ticket in what is averaged independently of connections."""
        return 1 - self.beta if self.rule == "cima" else 1 / self.count

    def _average(self, average: Ticket, ticket: Ticket, numbers: Mapping[str, Tensor]) -> None:
        """Average everything that is not sparse; of integers (counters of batches), keep the newest."""
        for key, value in ticket.dense.items():
            if key not in numbers:
                average.dense[key] = value.clone() if isinstance(value, Tensor) else value
        old, places = _numbers(average), list(numbers)
        if not places:
            return
        means = torch._foreach_mul([old[key] for key in places], 1 - self._new_weight)
        torch._foreach_add_(means, [numbers[key].to(old[key]) for key in places], alpha=self._new_weight)
        for key, mean in zip(places, means, strict=True):
            mine, theirs = average.dense[key], ticket.dense[key].to(average.dense[key])
            found = mean.square() if _is_variance(key, mean) else mean
            if mean.layout is torch.strided:  # others cannot be compared
                found = torch.where(mine == theirs, mine, found)
            average.dense[key] = found

    def _merge(self, old: Joined, new: Joined) -> Joined:
        """The average over the union of their positions."""
        rows, where = torch.cat([old.rows, new.rows]).unique(return_inverse=True)
        in_old, in_new = where.split([len(old.rows), len(new.rows)])
        values = torch.zeros(len(rows), dtype=old.values.dtype, device=rows.device)
        values[in_old] = old.values
        if old.times is None:
            others = torch.zeros_like(values).index_put_((in_new,), new.values.to(values))
            return replace(old, rows=rows, values=_mean(values, others, self._new_weight))
        times = torch.zeros(len(rows), dtype=old.times.dtype, device=rows.device)
        times[in_old] = old.times
        times[in_new] += 1
        values[in_new] = _mean(values[in_new], new.values.to(values), 1 / times[in_new].to(values))
        return replace(old, rows=rows, values=values, times=times)

    def _prune(self, ticket: Ticket) -> None:
        """Magnitude pruning to exactly the count, in total or in each layer."""
        scores = {key: connections.values.abs() for key, connections in ticket.sparse.items()}
        alone = self.fixed if self.prune == "global" else set(scores)
        masks = {key: _top(scores[key], self.targets[key]) for key in scores if key in alone}
        shared = [key for key in scores if key not in alone]
        if shared:
            total = (self.total or 0) - sum(self.targets[key] for key in masks)
            mask = _top(torch.cat([scores[key] for key in shared]), total)
            masks |= dict(zip(shared, mask.split([len(scores[key]) for key in shared]), strict=True))
        for keys in alike(ticket):
            joined = Joined.of(ticket, keys).select(torch.cat([masks[key] for key in keys]))
            ticket.sparse |= joined.parted()

    def state_dict(self) -> dict[str, Any]:
        """The average so far: tensors and plain values."""
        average = None if self.average is None else self.average.pack()
        targets, fixed = dict(self.targets), sorted(self.fixed)
        return {"average": average, "total": self.total, "targets": targets, "fixed": fixed}

    def load_state_dict(self, state: Mapping[str, Any], count: int, like: Ticket) -> None:
        """Go on from `state_dict()` with the average of `count` tickets of the same model as `like`."""
        average = None if state["average"] is None else Ticket.unpack(state["average"])
        if average is not None:
            refuse_other(average, like)
        total, targets, fixed = state["total"], dict(state["targets"]), set(state["fixed"])
        known, began = set(() if average is None else average.sparse), average is not None
        numbers = [*targets.values(), total if began else 0]
        if began != bool(count) or targets.keys() != known or not all(isinstance(n, int) for n in numbers):
            raise SparsityError("the state of SupTickets is damaged: average, total, targets, collected")
        self.average = None if average is None else average.to(like.device).wide()
        self.types, self.count = like.types(), count
        self.total, self.targets, self.fixed = total, targets, fixed

    @property
    def nonzero(self) -> int:
        """Connections of the superposed ticket."""
        counts = {} if self.average is None else self.average.counts()
        return min(sum(counts.values()), self.total or 0)

    @torch.no_grad()
    def result(self) -> Ticket:
        """The superposed ticket."""
        if self.average is None:
            raise SparsityError("there is no ticket to superpose yet")
        ticket = self.average.clone()
        if self.prune_when == "end":
            self._prune(ticket)
        ticket = ticket.cast(self.types)
        empty = [key for key, connections in ticket.sparse.items() if not len(connections.rows)]
        if empty:
            warnings.warn(f"pruning left no connection in {', '.join(empty)}", RuntimeWarning, stacklevel=3)
        alive = sum(int(c.values.count_nonzero()) for c in ticket.sparse.values())
        if alive < (self.total or 0):
            warnings.warn(
                f"the average has {alive} non-zero connections, fewer than its target of {self.total}",
                RuntimeWarning,
                stacklevel=3,
            )
        return ticket


def _mean(old: Tensor, new: Tensor, weight: float | Tensor) -> Tensor:
    """The mean in which `new` has this weight; what is the same in both stays as it is."""
    return torch.where(old == new, old, old * (1 - weight) + new * weight)


def _top(scores: Tensor, count: int) -> Tensor:
    """A mask of the `count` largest scores."""
    if count >= len(scores):
        return torch.ones_like(scores, dtype=torch.bool)
    return torch.zeros_like(scores, dtype=torch.bool).index_fill_(0, strongest(scores, count), True)


def _is_variance(key: str, value: Any) -> TypeGuard[Tensor]:
    return str(key).endswith(_DEVIATION) and is_number(value)


def _is_weight(key: str) -> bool:
    """By its name, in any kind of layer, because not all that has two dimensions is a weight."""
    name = str(key).rpartition(".")[2]
    return name in _STATE or "weight" in name


def _is_bias(key: str) -> bool:
    """By its name, which some give to an attention mask: so it may be infinite."""
    return "bias" in str(key).rpartition(".")[2]


def _numbers(ticket: Ticket) -> dict[str, Tensor]:
    """The numbers that are averaged and not sparse; variances as standard deviations."""
    dense = {key: value for key, value in ticket.dense.items() if is_number(value)}
    return {key: value.sqrt() if _is_variance(key, value) else value for key, value in dense.items()}


def _refuse_diverged(number: int, ticket: Ticket, numbers: Mapping[str, Tensor]) -> None:
    """Refuse a ticket of a training that diverged; buffers of other names, such as masks, may be anything.

    One look at the device tells whether all norms are finite; only if not, the values are looked at.
    """
    found = {key: connections.values for key, connections in ticket.sparse.items()}
    named = {key: value for key, value in numbers.items() if _is_weight(key) or _is_bias(key)}
    found |= {key: value for key, value in named.items() if value.layout is torch.strided}
    norms = torch._foreach_norm([*found.values()]) if found else []
    if not norms or bool(torch.stack([n.to(norms[0]) for n in norms]).isfinite().all()):
        return
    wrong = [key for key, value in found.items() if (value.isnan() | (_is_weight(key) & value.isinf())).any()]
    if wrong:
        raise SparsityError(
            f"ticket {number} has NaN, infinities or negative variances in {', '.join(wrong)}: its training "
            "diverged, leave it out"
        )


def _same(ours: Ticket, theirs: Ticket) -> None:
    """Refuse a ticket with other names, shapes or sorts of numbers, and list them."""
    kinds = "types or devices, which tensor.to changes"
    for what, read in (("names or shapes", _shapes), (kinds, _kinds)):
        differing = _differing(read(ours), read(theirs))
        if differing:
            raise SparsityError(f"the tickets differ in {what}: {', '.join(differing)}")
    disputed = sorted(ours.sparse.keys() ^ theirs.sparse.keys())
    if disputed:
        raise SparsityError(
            f"sparse in one ticket, dense in another: {', '.join(disputed)} (say which: layers=)"
        )


def refuse_other(ticket: Ticket, like: Ticket) -> None:
    """Refuse a ticket from a saved state that is not of the same model as `like`."""
    differing = _differing(_shapes(like), _shapes(ticket))
    if differing:
        raise SparsityError(f"the state is that of another model: {', '.join(differing)}")


def _differing(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """Where two descriptions of tickets differ, a line each."""
    keys = [key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)]
    return [f"{key} ({ours.get(key, 'missing')} and {theirs.get(key, 'missing')})" for key in keys]


def _shapes(ticket: Ticket) -> dict[str, str]:
    shapes = {**ticket.shapes, **{key: getattr(v, "shape", None) for key, v in ticket.dense.items()}}
    return {k: "no tensor" if s is None else "x".join(map(str, s)) or "scalar" for k, s in shapes.items()}


def _kinds(ticket: Ticket) -> dict[str, str]:
    """The kind of each tensor: only equal kinds are averaged, integers never."""
    values = {**ticket.dense, **{key: connections.values for key, connections in ticket.sparse.items()}}
    return {key: _kind(value) if is_number(value) else "integer" for key, value in values.items()}


def _kind(value: Tensor) -> str:
    place = f" on {value.device}" if value.dim() else ""  # a scalar goes anywhere
    return ("complex" if value.is_complex() else "floating-point") + place


def superpose(
    tickets: Iterable[Mapping[str, Any] | str | os.PathLike[str]],
    rule: str = "cia",
    *,
    sparsity: float | None = None,
    beta: float = 0.8,
    prune: str = "global",
    prune_when: str = "each",
    layers: str | Iterable[str] | None = None,
) -> dict[str, Tensor]:
    """Superpose tickets into one network: the state dict of a plain model, pruned to an exact count.

    Args:
        tickets: state dicts of plain models (zeros are inactive connections), `network.state_dict()`s, or
            files of them (safetensors, or torch's); taken one at a time, so that memory holds two.
        rule: `cia`, `caa` or `cima`.
        sparsity: of the weights of the layers together; by default the first ticket's count is kept.
        beta: weight of the old average in `cima`.
        prune: `global` or `layer`.
        prune_when: `each` or `end`.
        layers: names of the sparse weights in plain state dicts, or of their modules. By default those that
            the first file states, if `suptickets train` wrote it; otherwise all tensors of two or more
            dimensions, because buffers, and layers that were left dense, cannot be told from them.
    """
    superposition = Superposition(rule, beta, prune, prune_when)
    if isinstance(tickets, Mapping | str | os.PathLike) or not isinstance(tickets, Iterable):
        raise SparsityError("superpose takes a list of tickets: state dicts, network.state_dict()s or files")
    chosen = None if layers is None else layer_names(layers)
    for item in tickets:
        ticket = read_ticket(item, chosen, superposition.average)
        if superposition.average is None and sparsity is not None:
            size = sum(math.prod(shape) for shape in ticket.shapes.values())
            superposition.total = round((1 - fraction("sparsity", sparsity)) * size)
        superposition.add(ticket)
        del item, ticket  # before the next one is made
    if superposition.average is None:
        raise SparsityError("there are no tickets to superpose: the list is empty")
    return superposition.result().state_dict()
