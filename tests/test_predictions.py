"""Accuracy, NLL, ECE and reliability against cases worked out by hand, a plain loop, and torchmetrics."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torchmetrics.classification import MulticlassAccuracy, MulticlassCalibrationError
from torchmetrics.text import Perplexity

from suptickets.errors import SparsityError
from suptickets.measure.predictions import Bin, Scores, Tally, log_probabilities


def counted(logits: Tensor, labels: Tensor, batch: int | None = None, bins: int = 15) -> Tally:
    tally = Tally(bins=bins)
    for x, y in zip(logits.split(batch or len(labels)), labels.split(batch or len(labels)), strict=True):
        tally.add(x, y)
    return tally


def scores(logits: Tensor, labels: Tensor, batch: int | None = None, bins: int = 15) -> Scores:
    return counted(logits, labels, batch, bins).scores()


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


RIGHT = torch.tensor([0, 2, 1])
WRONG = {
    "a class too many": torch.tensor([0, 3, 1]),
    "below 0": torch.tensor([0, -1, 1]),
    "floats": torch.tensor([0.0, 2.0, 1.0]),
    "booleans": torch.tensor([True, False, True]),
    "a column": RIGHT[:, None],
    "one-hot": torch.eye(3, dtype=torch.long),
    "too few": RIGHT[:2],
    "too many": torch.cat([RIGHT, RIGHT]),
    "a number": torch.tensor(1),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_labels_that_do_not_fit_are_refused(wrong: str) -> None:
    tally = counted(torch.zeros(3, 3), RIGHT)
    with pytest.raises(SparsityError, match="labels"):
        tally.add(torch.zeros(3, 3), WRONG[wrong])
    assert tally.scores() == scores(torch.zeros(3, 3), RIGHT)  # nothing of them was counted


@pytest.mark.parametrize("shape", [(3,), (3, 0), (3, 3, 1), ()])
def test_logits_that_are_none_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(SparsityError, match="logits must be"):
        Tally().add(torch.zeros(shape), RIGHT)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32])
def test_labels_of_any_whole_type(dtype: torch.dtype) -> None:
    logits = torch.randn(3, 3)
    assert scores(logits, RIGHT.to(dtype)) == scores(logits, RIGHT)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_labels_are_refused_without_waiting() -> None:
    tally = Tally("cuda")
    logits, labels = torch.zeros(3, 3, device="cuda"), WRONG["a class too many"].cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        tally.add(logits, labels)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with pytest.raises(SparsityError, match="1 labels name a class"):
        tally.scores()


def test_nan_is_not_hidden() -> None:
    found = scores(torch.tensor([[math.nan, 0.0], [2.0, 1.0]]), torch.tensor([0, 0]))
    assert math.isnan(found.nll) and found.accuracy == 0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_is_widened_first(dtype: torch.dtype) -> None:
    logits, labels = torch.randn(300, 10).to(dtype), torch.randint(10, (300,))
    expected = brute_force(logits.double().softmax(1).tolist(), labels.tolist())
    found = scores(logits, labels)
    assert_close(Scores(found.accuracy, found.nll, 0), Scores(expected.accuracy, expected.nll, 0))
    assert found.ece == pytest.approx(expected.ece, abs=1e-9)


@pytest.mark.parametrize("classes", [2, 3, 5, 6, 10, 100])
@pytest.mark.parametrize("scale", [0.5, 3.0, 30.0])
def test_torchmetrics(classes: int, scale: float) -> None:
    """Over batches of unequal size; its bins hold their lower edges, which random numbers do not meet."""
    logits = scale * torch.randn(503, classes, dtype=torch.float64)
    labels = torch.randint(classes, (503,))
    tally = counted(logits, labels, batch=100)
    oracles = {
        "accuracy": MulticlassAccuracy(classes, top_k=1, average="micro"),
        "top5": MulticlassAccuracy(classes, top_k=min(5, classes), average="micro"),
        "ece": MulticlassCalibrationError(classes, n_bins=15, norm="l1"),
    }
    for oracle in oracles.values():
        for x, y in zip(logits.split(100), labels.split(100), strict=True):
            oracle.update(x.softmax(1), y)
    expected = {name: float(oracle.compute()) for name, oracle in oracles.items()}
    found = tally.scores()
    ours = {"accuracy": found.accuracy, "top5": tally.top5(), "ece": found.ece}
    assert ours == pytest.approx(expected, abs=1e-6)
    assert found.nll == pytest.approx(float(Perplexity()(logits[None], labels[None]).log()), rel=1e-6)


# ---- top-5 ----


def test_top5_by_hand() -> None:
    """The class in place 1, 5 and 6 of seven."""
    logits = torch.arange(7.0).flip(0).expand(3, 7)
    assert counted(logits, torch.tensor([0, 4, 5])).top5() == pytest.approx(2 / 3)
    assert counted(logits, torch.tensor([0, 4, 5]), batch=2).top5() == pytest.approx(2 / 3)


@pytest.mark.parametrize("classes", [1, 2, 5])
def test_with_five_classes_or_fewer_one_of_them_is_right(classes: int) -> None:
    assert counted(torch.randn(20, classes), torch.randint(classes, (20,))).top5() == 1


def test_of_equally_probable_classes_the_first_come_first() -> None:
    labels = torch.arange(10)
    tally = counted(torch.zeros(10, 10), labels)
    assert (tally.scores().accuracy, tally.top5()) == (0.1, 0.5)


def test_top5_is_no_less_than_top1_and_does_not_take_what_is_no_number() -> None:
    for classes in (3, 10):
        logits, labels = torch.randn(50, classes), torch.randint(classes, (50,))
        assert counted(logits, labels).top5() >= scores(logits, labels).accuracy
        assert counted(torch.full((4, classes), math.nan), labels[:4]).top5() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_top5_against_sorting(dtype: torch.dtype) -> None:
    """A stable sort puts the first of equals first; in bf16 there are many."""
    logits, labels = torch.randn(400, 30).to(dtype), torch.randint(30, (400,))
    places = logits.double().sort(dim=1, descending=True, stable=True).indices[:, :5]
    expected = (places == labels[:, None]).any(dim=1).double().mean()
    assert counted(logits, labels, batch=150).top5() == pytest.approx(float(expected))


# ---- reliability diagram ----


def test_reliability_by_hand() -> None:
    """Four bins; confidences 0.5 (right: the lower of two edges), 0.75 and 0.7 (one right), 1 (wrong)."""
    rows = [[0.5, 0.5], [0.75, 0.25], [0.3, 0.7], [1.0, 0.0]]
    probabilities = torch.tensor(rows, dtype=torch.float64)
    bins = counted(probabilities.log(), torch.tensor([0, 0, 0, 1]), bins=4).reliability()
    assert bins[0] == Bin(0.0, 0.25, 0, None, None)
    assert bins[1] == Bin(0.25, 0.5, 1, 0.5, 1.0)
    assert bins[2].as_dict() == pytest.approx(
        {"low": 0.5, "high": 0.75, "samples": 2, "confidence": 0.725, "accuracy": 0.5}
    )
    assert bins[3] == Bin(0.75, 1.0, 1, 1.0, 0.0)


@pytest.mark.parametrize("bins", [1, 7, 15])
def test_reliability_holds_what_the_scores_are_made_of(bins: int) -> None:
    logits, labels = 2 * torch.randn(211, 6), torch.randint(6, (211,))
    tally = counted(logits, labels, batch=50, bins=bins)
    full = [b for b in tally.reliability() if b.confidence is not None and b.accuracy is not None]
    assert len(tally.reliability()) == bins and sum(b.samples for b in full) == 211
    assert all(b.low < b.confidence <= b.high for b in full)
    ece = sum(b.samples * abs(b.confidence - b.accuracy) for b in full) / 211
    accuracy = sum(b.samples * b.accuracy for b in full) / 211
    assert (accuracy, ece) == pytest.approx((tally.scores().accuracy, tally.scores().ece))


# ---- log-probabilities ----


def test_log_probabilities_stay_what_they_are() -> None:
    probabilities = torch.tensor([[0.25, 0.75, 0.0], [1.0, 0.0, 0.0]], dtype=torch.float64)
    assert torch.allclose(log_probabilities(probabilities.log()).exp(), probabilities, atol=1e-15)
    assert torch.equal(log_probabilities(probabilities.log()).isinf(), probabilities == 0)
    found = counted(probabilities.log(), torch.tensor([1, 0]))
    assert found.scores().nll == pytest.approx(-math.log(0.75) / 2)


def test_old_scores_still_load_and_the_keys_stay() -> None:
    saved = {"accuracy": 0.5, "nll": 1.0, "ece": 0.1}
    assert Scores(**saved).as_dict() == saved


def test_beside_a_class_that_is_certain_others_are_impossible():
    inf = math.inf
    logits = torch.tensor([[inf, 0.0, 1.0], [0.0, inf, -inf], [inf, inf, 5.0], [0.0, 1.0, 2.0]])
    found = log_probabilities(logits).exp()
    expected = [[1, 0, 0], [0, 1, 0], [0.5, 0.5, 0], torch.tensor([0.0, 1.0, 2.0]).softmax(0).tolist()]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=1e-12)
    tally = Tally()
    tally.add(logits[:2], torch.tensor([0, 0]))
    assert tally.nll == math.inf


@pytest.mark.parametrize(
    ("dtype", "classes"),
    [(torch.uint8, 256), (torch.uint8, 300), (torch.int8, 128), (torch.int16, 50_000), (torch.uint16, 10)],
)
def test_labels_of_a_type_that_does_not_hold_the_number_of_classes(dtype: torch.dtype, classes: int) -> None:
    logits, labels = torch.randn(8, classes), torch.arange(8)
    assert scores(logits, labels.to(dtype)) == scores(logits, labels)
