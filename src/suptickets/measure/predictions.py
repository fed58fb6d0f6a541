"""Accuracy, negative log-likelihood and calibration of predictions, over as many batches as there are.

Accuracy is the share of samples whose most probable class is right, top-5 accuracy that of those whose class
is among the five most probable; of classes that are equally probable, the first comes first; a prediction
that is not a number is wrong. NLL is the mean over all samples, not over batches. ECE (expected calibration
error, Guo et al. 2017) sorts the samples into 15 bins of equal width by the probability of the predicted
class and averages |accuracy - confidence| over the bins, weighted by their samples; a bin holds its upper
edge.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from suptickets.errors import SparsityError, whole

BINS = 15
TOP = 5


@dataclass(frozen=True)
class Scores:
    """What a set of predictions is worth: fractions between 0 and 1, and nats."""

    accuracy: float
    nll: float
    ece: float

    def as_dict(self) -> dict[str, float]:
        """The scores as a dict, for JSON."""
        return asdict(self)


SCORES = tuple(Scores.__dataclass_fields__)  # accuracy, nll, ece


@dataclass(frozen=True)
class Bin:
    """One bar of a reliability diagram: the samples whose confidence is in (`low`, `high`].

    The mean confidence and the accuracy of an empty bin are None.
    """

    low: float
    high: float
    samples: int
    confidence: float | None
    accuracy: float | None

    def as_dict(self) -> dict[str, float | None]:
        """The bin as a dict, for JSON."""
        return asdict(self)


class Tally:
    """Running sums over batches, on the device of the predictions, in float64."""

    def __init__(self, device: torch.device | str = "cpu", bins: int = BINS) -> None:
        """Nothing counted yet."""
        self.bins = whole("bins", bins)
        self.nll, self.among_top, self.strangers = torch.zeros(3, dtype=torch.float64, device=device)
        self.samples, self.confidence, self.correct = torch.zeros(3, bins, dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Count a batch: (samples, classes) logits, or log-probabilities such as those of an ensemble.

        `labels` are whole numbers below the number of classes. Those that are not are refused here on a CPU;
        on another device, which is not waited for, by `scores`.
        """
        _check(logits, labels)
        labels = labels.long()  # a small type may not have the number of classes
        strange = (labels < 0) | (labels >= logits.shape[1])
        if labels.device.type == "cpu":
            _refuse(int(strange.sum()))
        self.strangers += strange.sum()
        known, labels = log_probabilities(logits), labels.masked_fill(strange, 0)
        own = known.gather(1, labels[:, None])
        confidence, predicted = known.exp().max(dim=1)
        index = (confidence * self.bins).ceil().long().clamp_(1, self.bins) - 1
        self.nll -= own.sum()
        self.among_top += (_rank(known, own, labels) < min(TOP, known.shape[1])).sum()
        self.samples.index_add_(0, index, torch.ones_like(confidence))
        self.confidence.index_add_(0, index, confidence)
        right = (predicted == labels) & ~own.isnan().squeeze(1)
        self.correct.index_add_(0, index, right.double())

    def tensors(self) -> list[Tensor]:
        """All sums, for adding up over processes."""
        return [self.nll, self.among_top, self.strangers, self.samples, self.confidence, self.correct]

    def scores(self) -> Scores:
        """What the predictions counted so far are worth."""
        _refuse(int(self.strangers))
        total = self.samples.sum()
        gaps = (self.correct - self.confidence).abs().sum()
        return Scores(float(self.correct.sum() / total), float(self.nll / total), float(gaps / total))

    def top5(self) -> float:
        """The share of samples whose class is among the five most probable (all, with up to five classes)."""
        return float(self.among_top / self.samples.sum())

    def reliability(self) -> list[Bin]:
        """The data of a reliability diagram, bin by bin from the lowest confidence."""
        columns = (self.samples.tolist(), self.confidence.tolist(), self.correct.tolist())
        return [
            Bin(i / self.bins, (i + 1) / self.bins, int(n), c / n if n else None, a / n if n else None)
            for i, (n, c, a) in enumerate(zip(*columns, strict=True))
        ]


def log_probabilities(logits: Tensor) -> Tensor:
    """Log-probabilities of (samples, classes) logits, in float64; classes at +infinity share all there is.

    Logits that are log-probabilities stay as they are, minus infinity (a probability of 0) included.
    """
    known, top = logits.double(), logits == torch.inf
    certain = torch.where(top, 0.0, known - torch.inf)
    return log_softmax(torch.where(top.any(dim=1, keepdim=True), certain, known), dim=1)


def _check(logits: Tensor, labels: Tensor) -> None:
    """Check shapes and types, which are known without looking at values."""
    if logits.dim() != 2 or not logits.shape[1] or logits.is_complex():
        raise SparsityError(
            f"logits must be real, of shape (samples, classes), not {logits.dtype} of {tuple(logits.shape)}"
        )
    counted = not (labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool)
    if labels.shape != logits.shape[:1] or not counted:
        raise SparsityError(
            f"labels must be whole numbers, one for each of {len(logits)} samples, not {labels.dtype} of "
            f"{tuple(labels.shape)}"
        )


def _refuse(strangers: int) -> None:
    if strangers:
        raise SparsityError(
            f"{strangers} labels name a class that the logits do not have: labels run from 0 to one less "
            "than the number of classes"
        )


def _rank(known: Tensor, own: Tensor, labels: Tensor) -> Tensor:
    """How many classes come before a sample's own; all, if they are not numbers."""
    before = torch.arange(known.shape[1], device=known.device) < labels[:, None]
    return (~(known <= own) | ((known == own) & before)).sum(dim=1)
