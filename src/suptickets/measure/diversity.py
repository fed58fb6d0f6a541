"""How different predictors are, and what they predict together.

Disagreement is the share of samples for which two predictors name different classes. KL is the divergence
between their predictive distributions, sum of p (log p - log q), in nats, averaged over the samples. Both are
averaged over all pairs of predictors; KL, which is not symmetric, over all ordered pairs (the paper's
diversity table).

A class to which p gives probability 0 adds nothing; one to which p gives something and q nothing makes the
divergence infinite, and with it the average.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import asdict, dataclass
from itertools import combinations, permutations
from math import log

import torch
from torch import Tensor

from suptickets.errors import SparsityError, whole
from suptickets.measure.predictions import log_probabilities

_TINY = torch.finfo(torch.float64).tiny


@dataclass(frozen=True)
class DiversityScores:
    """How different predictors are: a fraction between 0 and 1, and nats."""

    disagreement: float
    kl: float

    def as_dict(self) -> dict[str, float]:
        """The scores as a dict, for JSON."""
        return asdict(self)


class Diversity:
    """Running sums over batches, on the device of the predictions, in float64."""

    def __init__(self, predictors: int, device: torch.device | str = "cpu") -> None:
        """Compare so many `predictors`, two or more; nothing is counted yet."""
        self.predictors = whole("predictors", predictors, 2)
        self.samples, self.different, self.divergence = torch.zeros(3, dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, logits: Sequence[Tensor]) -> None:
        """Count a batch: each predictor's (samples, classes) logits or log-probabilities for it."""
        if not isinstance(logits, Sized) or len(logits) != self.predictors:
            given = len(logits) if isinstance(logits, Sized) else type(logits).__name__
            raise SparsityError(f"expected a list of the logits of {self.predictors} predictors, not {given}")
        known = _all_log_probabilities(logits)
        named = [p.argmax(dim=1) for p in known]
        self.samples += len(named[0])
        for one, other in combinations(named, 2):
            self.different += (one != other).sum()
        for log_p, log_q in permutations(known, 2):
            self.divergence += _kl(log_p, log_q)

    def tensors(self) -> list[Tensor]:
        """All sums, for adding up over processes."""
        return [self.samples, self.different, self.divergence]

    def scores(self) -> DiversityScores:
        """How different the predictors were so far."""
        ordered = self.samples * self.predictors * (self.predictors - 1)
        return DiversityScores(float(2 * self.different / ordered), float(self.divergence / ordered))


def ensemble(logits: Sequence[Tensor]) -> Tensor:
    """Log-probabilities, in float64, of the mean of the predictors' probabilities.

    Each of `logits` holds one predictor's (samples, classes) logits or log-probabilities. The mean is taken
    without leaving the logarithm, so that small probabilities do not vanish.
    """
    known = _all_log_probabilities(logits)
    return torch.logsumexp(torch.stack(known), dim=0) - log(len(known))


def _all_log_probabilities(logits: Sequence[Tensor]) -> list[Tensor]:
    shapes = [tuple(x.shape) for x in logits]
    if not shapes or len(shapes[0]) != 2 or any(shape != shapes[0] for shape in shapes):
        raise SparsityError(
            f"predictors must have logits of one shape (samples, classes), not {sorted(set(shapes))}"
        )
    return [log_probabilities(x) for x in logits]


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """The divergence, summed over the samples.

    A probability too small for float64 counts as its smallest number: times a finite difference it is
    nothing, times an infinite one infinite, where 0 would give no number.
    """
    terms = log_p.exp().clamp_min(_TINY) * (log_p - log_q)
    return terms.masked_fill(log_p == -torch.inf, 0.0).sum()
