"""Accuracy, negative log-likelihood and calibration of predictions, over as many batches as there are.

Accuracy is the share of samples whose most probable class is right. NLL is the mean over all samples, not
over batches. ECE (expected calibration error) sorts the samples into 15 bins of equal width by the
probability of the predicted class and averages |accuracy - confidence| over the bins, weighted by their
samples.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

BINS = 15


@dataclass(frozen=True)
class Scores:
    """What a set of predictions is worth: fractions between 0 and 1, and nats."""

    accuracy: float
    nll: float
    ece: float

    def as_dict(self) -> dict[str, float]:
        """For JSON."""
        return asdict(self)


class Tally:
    """Running sums over batches, on the device of the predictions, in float64."""

    def __init__(self, device: torch.device | str = "cpu", bins: int = BINS) -> None:
        """Nothing counted yet."""
        self.bins = bins
        self.nll = torch.zeros((), dtype=torch.float64, device=device)
        self.samples, self.confidence, self.correct = torch.zeros(3, bins, dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Count a batch of logits (log-probabilities will do); classes at +infinity share all there is."""
        finite = logits.double().nan_to_num(torch.nan, torch.finfo(torch.float64).max, -torch.inf)
        log_probabilities = log_softmax(finite, dim=1)
        confidence, predicted = log_probabilities.exp().max(dim=1)
        index = (confidence * self.bins).ceil().long().clamp_(1, self.bins) - 1
        self.nll -= log_probabilities.gather(1, labels[:, None]).sum()
        self.samples.index_add_(0, index, torch.ones_like(confidence))
        self.confidence.index_add_(0, index, confidence)
        self.correct.index_add_(0, index, (predicted == labels).double())

    def tensors(self) -> list[Tensor]:
        """All sums, for adding up over processes."""
        return [self.nll, self.samples, self.confidence, self.correct]

    def scores(self) -> Scores:
        """What the predictions counted so far are worth."""
        total = self.samples.sum()
        gaps = (self.correct - self.confidence).abs().sum()
        return Scores(float(self.correct.sum() / total), float(self.nll / total), float(gaps / total))
