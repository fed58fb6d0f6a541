"""Scores to prune by and to grow by.

To prune, a criterion scores the living connections, and the lowest go; to grow, it scores all positions (in
memory order), and the highest of those not alive come. Growth uses the gradient of the step just taken,
summed over its backward passes and averaged over ranks; a loss scale or a clipping factor multiplies all
scores alike and changes no choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from suptickets.errors import SparsityError, choice
from suptickets.weight import SparseWeight

Score = Callable[[SparseWeight, torch.Generator], Tensor]


@dataclass(frozen=True)
class Criterion:
    """A way to score connections."""

    name: str
    summary: str
    score: Score
    needs_gradient: bool = False

    def scores(self, weight: SparseWeight, generator: torch.Generator) -> Tensor:
        """Scores that may be written into; those of a user's own function are copied, as it may keep them."""
        found = self.score(weight, generator)
        return found if self.score.__module__ == __name__ else found.clone()


def strongest(scores: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest scores: exactly so many, whatever the ties.

    On a CPU, a threshold from a sample first leaves out most of a large tensor: twice as fast.
    """
    if scores.device.type == "cpu" and len(scores) > 2**16 and count < len(scores) // 4:
        sample = scores[::61]
        likely = min(int(1.2 * count / len(scores) * len(sample)) + 50, len(sample))
        index = (scores >= torch.topk(sample, likely).values[-1]).nonzero().reshape(-1)
        if count <= len(index) < len(scores) // 2:
            return index[torch.topk(scores[index], count, sorted=False).indices]
    return torch.topk(scores, count, sorted=False).indices


def gradient_of(weight: SparseWeight) -> Tensor:
    """The gradient of all positions, or an error that says how to get it."""
    gradient = weight.gradient
    if gradient is None:
        raise SparsityError(
            f"there is no gradient of all positions for {weight.name}: call network.request_gradient() "
            "before the forward pass of the step, and backward() before this"
        )
    return gradient


def _magnitude(weight: SparseWeight, generator: torch.Generator) -> Tensor:
    return weight.values.detach().reshape(-1).abs()


def _largest(weight: SparseWeight, generator: torch.Generator) -> Tensor:
    return -_magnitude(weight, generator)


def _signed(weight: SparseWeight, generator: torch.Generator) -> Tensor:
    """SET: the same share of the smallest positive and of the largest negative values goes."""
    values = weight.values.detach().reshape(-1)
    order = values.abs().argsort()
    positive = values[order] > 0
    ranks = torch.where(positive, positive.cumsum(0), (~positive).cumsum(0))
    counts = torch.where(positive, positive.sum(), (~positive).sum())
    return torch.empty_like(ranks, dtype=torch.float64).scatter_(0, order, (ranks.double() - 0.5) / counts)


def _sensitivity(weight: SparseWeight, generator: torch.Generator) -> Tensor:
    values = weight.values.detach().reshape(-1)
    return (values * gradient_of(weight).gather(0, weight.positions)).abs()


def _random_living(weight: SparseWeight, generator: torch.Generator) -> Tensor:
    return _rand(weight, generator, weight.nonzero)


def _gradient(weight: SparseWeight, generator: torch.Generator) -> Tensor:
    return gradient_of(weight).abs()


def _momentum(weight: SparseWeight, generator: torch.Generator) -> Tensor:
    if weight.momentum is None:
        raise SparsityError("growing by momentum needs the momentum of all positions: use the method SNFS")
    return weight.momentum.abs()


def _random_all(weight: SparseWeight, generator: torch.Generator) -> Tensor:
    rows = _rand(weight, generator, weight.size)
    return weight.flatten(rows.view(weight.shape))


def _rand(weight: SparseWeight, generator: torch.Generator, count: int) -> Tensor:
    """Random numbers, made on the weight's device from the network's own stream."""
    seed = int(torch.randint(2**62, (), generator=generator, device="cpu"))
    stream = torch.Generator(weight.positions.device).manual_seed(seed)
    return torch.rand(count, generator=stream, dtype=torch.float32, device=weight.positions.device)


PRUNE = {
    c.name: c
    for c in (
        Criterion("magnitude", "the smallest magnitudes go", _magnitude),
        Criterion("largest", "the largest magnitudes go (the paper's variance experiment)", _largest),
        Criterion("signed", "the smallest positive and the largest negative values go (SET)", _signed),
        Criterion("sensitivity", "the smallest |weight x gradient| go (SNIP)", _sensitivity, True),
        Criterion("random", "any go", _random_living),
    )
}
GROW = {
    c.name: c
    for c in (
        Criterion("gradient", "the largest gradients come (RigL)", _gradient, True),
        Criterion("momentum", "the largest momenta come (SNFS)", _momentum),
        Criterion("random", "any come (SET)", _random_all),
    )
}


Pair = tuple[str | Criterion, str | Criterion]  # to prune by, to grow by
Criteria = Pair | Sequence[Pair] | None


def prune_criterion(name: str | Criterion) -> Criterion:
    """The pruning criterion of that name."""
    return _find("pruning criterion", name, PRUNE)


def grow_criterion(name: str | Criterion) -> Criterion:
    """The growing criterion of that name."""
    return _find("growing criterion", name, GROW)


def need_gradient(prune: str | Criterion, grow: str | Criterion) -> bool:
    """Whether one of the two scores by the gradient of all positions."""
    return prune_criterion(prune).needs_gradient or grow_criterion(grow).needs_gradient


def pairs_of(criteria: Pair | Sequence[Pair], cycles: int) -> list[Pair]:
    """One (prune, grow) pair for each cycle, from one for all of them or from as many as there are."""
    wrong = (
        f"criteria must be one (prune, grow) pair, or one for each of the {cycles} cycles, not {criteria!r}"
    )
    if not isinstance(criteria, list | tuple):
        raise SparsityError(wrong)
    one = len(criteria) == 2 and all(isinstance(name, str | Criterion) for name in criteria)
    pairs: list[Any] = [criteria] * cycles if one else list(criteria)
    if len(pairs) != cycles or not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
        raise SparsityError(wrong)
    for prune, grow in pairs:
        prune_criterion(prune), grow_criterion(grow)
    return [(prune, grow) for prune, grow in pairs]


def _find(kind: str, name: str | Criterion, known: dict[str, Criterion]) -> Criterion:
    if isinstance(name, Criterion):
        return name
    return known[choice(kind, name, known)]
