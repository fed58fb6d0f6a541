"""Prune weights to one count and grow them to another, many weights at once.

An exploration is little arithmetic in many small pieces: on a GPU, launching them takes longer than running
them. So weights that are alike are processed together: their connections lie side by side, each marked with
its weight, and are sorted and moved in one go. Only scores are still computed weight by weight, and so is
growth where neighbours differ in size or count. On a CPU this gains nothing, and each weight goes by itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import torch
from torch import Tensor

from suptickets.criteria import GROW, Criterion, strongest
from suptickets.errors import SparsityError, choice, whole
from suptickets.layout import CONNECTIONS, few, marks, rows_of
from suptickets.optimizer_state import OptimizerState, carried, overwrite
from suptickets.weight import SparseWeight

ALONE = {"cpu"}  # devices on which each weight goes by itself
POSITIONS = 2**31 - 1  # the most that are processed together: 32 bits number them
SCORES = 2**24  # the most growth scores that are compared at once, for weights of one size


@dataclass(frozen=True)
class Change:
    """Prune `weight` to `kept` connections, then grow it to `final`."""

    weight: SparseWeight
    kept: int
    final: int

    def needs_gradient(self, prune: Criterion, grow: Criterion) -> bool:
        """Whether one of these criteria scores the layer by the gradient of all positions."""
        prunes, grows = self.kept < self.weight.nonzero, self.final > self.kept
        return (prunes and prune.needs_gradient) or (grows and grow.needs_gradient)


def check_counts(
    weights: Mapping[str, SparseWeight], kept: Mapping[str, int], final: Mapping[str, int]
) -> None:
    """Refuse layers that there are not, and counts that they cannot have."""
    if not isinstance(kept, Mapping) or not isinstance(final, Mapping):
        raise SparsityError(f"counts must be a mapping from layers to numbers, not {kept!r}")
    for name in {**kept, **final}:
        weight = weights[choice("layer", name, weights)]
        low, high = whole("a count", kept.get(name), 0), whole("a count", final.get(name), 0)
        if not low <= min(weight.nonzero, high) or high > weight.size:
            raise SparsityError(
                f"{name} cannot be pruned to {low} and grown to {high}: it has "
                f"{weight.nonzero} of {weight.size} connections"
            )


def rewire(
    changes: Iterable[Change],
    prune: Criterion,
    grow: Criterion,
    generator: torch.Generator,
    state: OptimizerState | None,
) -> None:
    """Carry the changes out; values, optimizer state and gradients follow."""
    for alike in _alike(changes, state):
        _Together(alike, state).rewire(prune, grow, generator)


def _alike(changes: Iterable[Change], state: OptimizerState | None) -> Iterator[list[Change]]:
    """Lists of changes that can go together: same device, types, memory order and kind of optimizer state.

    Criteria that draw at random then draw for one list after the other.
    """
    kinds = defaultdict(list)
    for number, change in enumerate(changes):
        weight, values = change.weight, change.weight.values
        alone = number if values.device.type in ALONE else None
        types = values.device, values.dtype, weight.positions.dtype, weight.order, values.grad is None
        followed = None if state is None else (id(state.group(weight)), *state.moving(weight))
        kinds[alone, types, followed].append(change)
    for kind in kinds.values():
        for part in few(kind, [max(c.weight.nonzero, c.final) for c in kind], CONNECTIONS):
            yield from few(part, [c.weight.size for c in part], POSITIONS)


class _Together:
    """Weights whose connections lie side by side: those of the first, those of the second, ..."""

    def __init__(self, changes: Sequence[Change], state: OptimizerState | None) -> None:
        self.weights = [change.weight for change in changes]
        self.kept, self.final = [c.kept for c in changes], [c.final for c in changes]
        self.before = [weight.nonzero for weight in self.weights]
        self.state, self.device = state, self.weights[0].positions.device
        self.positions = _joined([weight.positions for weight in self.weights])

    def rewire(self, prune: Criterion, grow: Criterion, generator: torch.Generator) -> None:
        """Choose the connections that live afterwards, sort them, and let everything else follow."""
        alive = self._pruned(prune, generator)
        alive = self._grown(alive, grow, generator)
        if len(self.weights) == 1:
            order = self.weights[0].rows(alive).argsort()
            positions = alive.index_select(0, order)
            self._connect(positions, *_matched(self.weights[0], positions))
        else:
            old, new = self._rows(alive)
            new, order = new.sort()
            self._connect(alive.index_select(0, order), *_found(old, new))

    def _pruned(self, prune: Criterion, generator: torch.Generator) -> Tensor:
        """The positions that are kept; all weights are scored if any is pruned."""
        if self.kept == self.before:
            return self.positions
        scores = [prune.score(weight, generator) for weight in self.weights]
        return self.positions.index_select(0, best(scores, self.kept))

    def _grown(self, alive: Tensor, grow: Criterion, generator: torch.Generator) -> Tensor:
        """The positions that live afterwards: for each weight, those that are kept and its best others."""
        if self.final == self.kept:
            return alive
        kept = alive.split(self.kept)
        grown = [new for same in self._alike() for new in self._best_others(*same, kept, grow, generator)]
        return torch.cat([part for pair in zip(kept, grown, strict=True) for part in pair])

    def _alike(self) -> Iterator[tuple[int, list[int]]]:
        """Neighbouring weights of one size that grow by the same count: this count, and their numbers."""
        sizes = [weight.size for weight in self.weights]
        counts = [final - kept for kept, final in zip(self.kept, self.final, strict=True)]
        for (size, count), same in groupby(range(len(sizes)), key=lambda n: (sizes[n], counts[n])):
            numbers = list(same)
            yield from ((count, some) for some in few(numbers, [size] * len(numbers), SCORES))

    def _best_others(
        self,
        count: int,
        numbers: Sequence[int],
        kept: Sequence[Tensor],
        grow: Criterion,
        generator: torch.Generator,
    ) -> list[Tensor]:
        """For each of these weights, its `count` best positions that are not kept."""
        if not count:
            return [kept[number][:0] for number in numbers]
        scores = [grow.scores(self.weights[number], generator) for number in numbers]
        if grow not in GROW.values():  # a user's own may exclude positions: kept ones rank even lower
            scores = [_wide(score) for score in scores]
            scores = [score.clamp_(min=torch.finfo(score.dtype).min) for score in scores]
        for score, number in zip(scores, numbers, strict=True):
            score.scatter_(0, kept[number], -torch.inf)
        if len(scores) == 1:
            return [strongest(scores[0], count).to(kept[0])]
        return list(torch.stack(scores).topk(count, sorted=False).indices.to(kept[0]).unbind())

    def _rows(self, alive: Tensor) -> tuple[Tensor, Tensor]:
        """Row-major indices of the old and of the new positions; each weight's follow those before it."""
        both, shapes = torch.cat([self.positions, alive]), [weight.shape for weight in self.weights]
        starts = list(accumulate((weight.size for weight in self.weights[:-1]), initial=0))
        owner = marks([*self.before, *self.final], self.device) % len(self.weights)
        rows = rows_of(both, owner, shapes, self.weights[0].order, starts)
        old, new = rows.split([sum(self.before), sum(self.final)])
        return old, new

    def _connect(self, positions: Tensor, index: Tensor, stays: Tensor) -> None:
        """Let the `positions` live; number i was number `index[i]` of the old ones if it `stays`."""
        parameters = [weight.values for weight in self.weights]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if self.state is not None:
            self.state.follow(self.weights, index, stays, self.final)
        for parameter in parameters:
            parameter.grad = None
        moved = carried(gradients, index, stays, 0.0, self.final) if gradients else [None] * len(parameters)
        values = carried(parameters, index, stays, 0.0, self.final)
        places, stay = positions.split(self.final), self.final == self.before
        if stay:
            overwrite(parameters, values)
            overwrite([weight.positions for weight in self.weights], places)
        for weight, value, place, gradient in zip(self.weights, values, places, moved, strict=True):
            if stay:
                weight.touched()
            else:
                weight.place(value, place)
            weight.values.grad = gradient


def best(scores: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
    """Indices of the `counts[i]` largest scores of each tensor, counted through all tensors."""
    if len(scores) == 1:
        return strongest(scores[0], counts[0])
    sizes = [len(part) for part in scores]
    order = torch.cat(list(scores)).argsort(descending=True)
    of = marks(sizes, order.device).to(torch.int16)
    order = order.index_select(0, of.index_select(0, order).argsort(stable=True))
    return torch.cat([part[:count] for part, count in zip(order.split(sizes), counts, strict=True)])


def _found(old: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """For each of the sorted `new` rows, which of the sorted `old` ones it is, and whether it is one."""
    if not len(old):
        return torch.zeros_like(new), torch.zeros_like(new, dtype=torch.bool)
    index = torch.searchsorted(old, new, out_int32=len(old) < 2**31).clamp_(max=len(old) - 1)
    return index, old.index_select(0, index) == new


def _matched(weight: SparseWeight, positions: Tensor) -> tuple[Tensor, Tensor]:
    """The same as `_found`, for one weight: by a table of all its positions, which is faster."""
    places = torch.full((weight.size,), -1, dtype=torch.int32, device=positions.device)
    numbers = torch.arange(weight.nonzero, dtype=torch.int32, device=positions.device)
    index = places.scatter_(0, weight.positions, numbers).index_select(0, positions)
    return index.clamp(min=0), index >= 0


def _wide(score: Tensor) -> Tensor:
    """A user's scores as numbers that have a lowest finite one, and in which no two become equal."""
    return score.float() if score.dtype in (torch.float16, torch.bfloat16, torch.float32) else score.double()


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
