"""Accuracy, NLL and ECE against cases worked out by hand, and against a plain loop."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from suptickets.measure.predictions import Scores, Tally


def scores(logits: Tensor, labels: Tensor, batch: int | None = None, bins: int = 15) -> Scores:
    tally = Tally(bins=bins)
    for x, y in zip(logits.split(batch or len(labels)), labels.split(batch or len(labels)), strict=True):
        tally.add(x, y)
    return tally.scores()


def brute_force(probabilities: list[list[float]], labels: list[int], bins: int = 15) -> Scores:
    """One sample at a time, in plain Python; bin i holds the confidences in (i / bins, (i + 1) / bins]."""
    right = [max(range(len(p)), key=p.__getitem__) == y for p, y in zip(probabilities, labels, strict=True)]
    nll = -sum(math.log(p[y]) for p, y in zip(probabilities, labels, strict=True)) / len(labels)
    ece = 0.0
    for i in range(bins):
        inside = [j for j, p in enumerate(probabilities) if i / bins < max(p) <= (i + 1) / bins]
        if inside:
            accuracy = sum(right[j] for j in inside) / len(inside)
            confidence = sum(max(probabilities[j]) for j in inside) / len(inside)
            ece += abs(accuracy - confidence) * len(inside) / len(labels)
    return Scores(sum(right) / len(right), nll, ece)


def assert_close(a: Scores, b: Scores, tolerance: float = 1e-12) -> None:
    assert a.as_dict() == pytest.approx(b.as_dict(), abs=tolerance)


def test_by_hand() -> None:
    """Confidences 0.8 (right), 0.8 (wrong), 0.6 (right): two bins."""
    probabilities = torch.tensor([[0.8, 0.2], [0.8, 0.2], [0.4, 0.6]], dtype=torch.float64)
    found = scores(probabilities.log(), torch.tensor([0, 1, 1]))
    assert found.accuracy == pytest.approx(2 / 3)
    assert found.nll == pytest.approx(-(math.log(0.8) + math.log(0.2) + math.log(0.6)) / 3)
    assert found.ece == pytest.approx(2 / 3 * abs(0.5 - 0.8) + 1 / 3 * abs(1 - 0.6))


@pytest.mark.parametrize("classes", [2, 3, 10])
def test_brute_force(classes: int) -> None:
    generator = torch.Generator().manual_seed(classes)
    logits = 3 * torch.randn(500, classes, generator=generator, dtype=torch.float64)
    labels = torch.randint(classes, (500,), generator=generator)
    for bins in (1, 5, 15):
        expected = brute_force(logits.softmax(1).tolist(), labels.tolist(), bins)
        assert_close(scores(logits, labels, bins=bins), expected)


def test_the_split_into_batches_does_not_matter() -> None:
    logits, labels = torch.randn(101, 7), torch.randint(7, (101,))
    whole = scores(logits, labels)
    for batch in (1, 2, 30, 100):
        assert_close(scores(logits, labels, batch), whole)


def test_processes_add_up() -> None:
    logits, labels = torch.randn(31, 4), torch.randint(4, (31,))
    parts = [Tally() for _ in range(2)]
    for rank, tally in enumerate(parts):
        tally.add(logits[rank::2], labels[rank::2])
    for mine, theirs in zip(parts[0].tensors(), parts[1].tensors(), strict=True):
        mine += theirs
    assert_close(parts[0].scores(), scores(logits, labels))


def test_an_empty_batch_changes_nothing() -> None:
    tally, logits, labels = Tally(), torch.randn(5, 3), torch.randint(3, (5,))
    tally.add(logits, labels)
    before = tally.scores()
    tally.add(logits[:0], labels[:0])
    assert tally.scores() == before


def test_one_class() -> None:
    assert scores(torch.randn(9, 1), torch.zeros(9, dtype=torch.long)) == Scores(1.0, 0.0, 0.0)


def test_probabilities_of_exactly_0_and_1() -> None:
    sure = torch.tensor([[0.0, -math.inf], [-math.inf, 0.0]])
    assert scores(sure, torch.tensor([0, 1])) == Scores(1.0, 0.0, 0.0)
    wrong = scores(sure, torch.tensor([1, 1]))
    assert (wrong.accuracy, wrong.nll, wrong.ece) == (0.5, math.inf, 0.5)
    assert scores(torch.tensor([[1000.0, -1000.0]]), torch.tensor([0])) == Scores(1.0, 0.0, 0.0)


def test_infinite_logits() -> None:
    """+inf takes all; shared by several classes, it is shared out evenly."""
    logits = torch.tensor([[math.inf, 0.0, 1.0], [math.inf, math.inf, 0.0]])
    found = scores(logits, torch.tensor([0, 0]))
    assert found.nll == pytest.approx(math.log(2) / 2)
    assert (found.accuracy, found.ece) == (1.0, pytest.approx(0.25))


def test_nan_is_not_hidden() -> None:
    assert math.isnan(scores(torch.tensor([[math.nan, 0.0]]), torch.tensor([0])).nll)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_is_widened_first(dtype: torch.dtype) -> None:
    logits, labels = torch.randn(300, 10).to(dtype), torch.randint(10, (300,))
    expected = brute_force(logits.double().softmax(1).tolist(), labels.tolist())
    found = scores(logits, labels)
    assert_close(Scores(found.accuracy, found.nll, 0), Scores(expected.accuracy, expected.nll, 0))
    assert found.ece == pytest.approx(expected.ece, abs=1e-9)
