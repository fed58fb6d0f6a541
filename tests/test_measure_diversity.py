"""Disagreement, KL and the ensemble: by hand, against loops and torch's own, at exact 0 and 1."""

from __future__ import annotations

import math
from itertools import combinations, permutations

import pytest
import torch
from scipy.special import rel_entr
from torch import Tensor
from torch.distributions import Categorical, kl_divergence
from torchmetrics import KLDivergence

from suptickets.errors import SparsityError
from suptickets.measure.diversity import Diversity, DiversityScores, ensemble
from suptickets.measure.predictions import Tally


def diversity(logits: list[Tensor], batch: int | None = None) -> DiversityScores:
    found = Diversity(len(logits))
    for parts in zip(*(x.split(batch or max(len(x), 1)) for x in logits), strict=True):
        found.add(parts)
    return found.scores()


def logs(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64).log()


def test_by_hand() -> None:
    """Two samples; the predictors differ in the second."""
    p, q = logs([0.5, 0.5], [0.9, 0.1]), logs([0.75, 0.25], [0.2, 0.8])
    there = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    there += 0.9 * math.log(0.9 / 0.2) + 0.1 * math.log(0.1 / 0.8)
    back = 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)
    back += 0.2 * math.log(0.2 / 0.9) + 0.8 * math.log(0.8 / 0.1)
    assert diversity([p, q]).as_dict() == pytest.approx({"disagreement": 0.5, "kl": (there + back) / 4})


@pytest.mark.parametrize("predictors", [2, 3, 5])
@pytest.mark.parametrize("classes", [2, 10])
def test_all_pairs_of_any_number(predictors: int, classes: int) -> None:
    """Against torch.distributions, scipy and torchmetrics, pair by pair."""
    logits = [2 * torch.randn(203, classes, dtype=torch.float64) for _ in range(predictors)]
    found = diversity(logits, batch=50)
    pairs = list(combinations([x.argmax(1) for x in logits], 2))
    disagreement = sum(float((a != b).double().mean()) for a, b in pairs) / len(pairs)
    assert found.disagreement == pytest.approx(disagreement, abs=1e-12)
    ordered = list(permutations(logits, 2))
    kl = [kl_divergence(Categorical(logits=p), Categorical(logits=q)).mean() for p, q in ordered]
    assert found.kl == pytest.approx(float(sum(kl)) / len(ordered), rel=1e-12)
    scipy = [rel_entr(p.softmax(1).numpy(), q.softmax(1).numpy()).sum(1).mean() for p, q in ordered]
    assert found.kl == pytest.approx(float(sum(scipy)) / len(ordered), rel=1e-9)
    metric = [KLDivergence()(p.softmax(1), q.softmax(1)) for p, q in ordered]
    assert found.kl == pytest.approx(float(sum(metric)) / len(ordered), rel=1e-5)


def test_the_split_into_batches_does_not_matter() -> None:
    logits = [torch.randn(101, 7) for _ in range(3)]
    whole = diversity(logits)
    for batch in (1, 30, 100):
        assert diversity(logits, batch).as_dict() == pytest.approx(whole.as_dict(), rel=1e-12)


def test_processes_add_up_and_an_empty_batch_changes_nothing() -> None:
    logits = [torch.randn(31, 4) for _ in range(3)]
    parts = [Diversity(3) for _ in range(2)]
    for rank, part in enumerate(parts):
        part.add([x[rank::2] for x in logits])
        part.add([x[:0] for x in logits])
    for mine, theirs in zip(parts[0].tensors(), parts[1].tensors(), strict=True):
        mine += theirs
    assert parts[0].scores().as_dict() == pytest.approx(diversity(logits).as_dict(), rel=1e-12)


def test_equal_predictors_and_a_single_class() -> None:
    x = torch.randn(40, 5)
    assert diversity([x, x, x.clone()]) == DiversityScores(0.0, 0.0)
    assert diversity([torch.randn(9, 1), torch.randn(9, 1)]) == DiversityScores(0.0, 0.0)
    shifted = diversity([x, x + 3])  # the same distribution
    assert shifted.disagreement == 0 and shifted.kl == pytest.approx(0, abs=1e-12)


# ---- probabilities of exactly 0 and 1 ----


def test_zeros_in_the_same_places_are_finite() -> None:
    p, q = logs([0.5, 0.5, 0.0]), logs([0.25, 0.75, 0.0])
    expected = (0.5 * math.log(2) + 0.5 * math.log(0.5 / 0.75)) / 2
    expected += (0.25 * math.log(0.5) + 0.75 * math.log(1.5)) / 2
    assert diversity([p, q]).kl == pytest.approx(expected)
    sure = logs([1.0, 0.0], [0.0, 1.0])
    assert diversity([sure, sure]) == DiversityScores(0.0, 0.0)


def test_where_one_gives_nothing_and_the_other_something_it_is_infinite() -> None:
    assert diversity([logs([1.0, 0.0]), logs([0.5, 0.5])]).kl == math.inf
    assert diversity([logs([1.0, 0.0]), logs([0.0, 1.0])]) == DiversityScores(1.0, math.inf)


def test_a_probability_too_small_for_float64_is_no_zero() -> None:
    nearly = torch.tensor([[0.0, -2000.0]], dtype=torch.float64)  # e^-2000
    assert diversity([nearly, logs([1.0, 0.0])]).kl == math.inf
    assert diversity([nearly, logs([0.5, 0.5])]).kl == pytest.approx((math.log(2) + 1000 - math.log(2)) / 2)


def test_nan_is_not_hidden() -> None:
    assert math.isnan(diversity([torch.tensor([[math.nan, 0.0]]), torch.zeros(1, 2)]).kl)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_is_widened_first(dtype: torch.dtype) -> None:
    logits = [torch.randn(300, 10).to(dtype) for _ in range(2)]
    wide = diversity([x.double() for x in logits])
    assert diversity(logits) == wide
    assert torch.equal(ensemble(logits), ensemble([x.double() for x in logits]))


# ---- ensemble ----


@pytest.mark.parametrize("predictors", [1, 2, 7])
def test_the_ensemble_is_the_mean_of_the_probabilities(predictors: int) -> None:
    logits = [3 * torch.randn(60, 8) for _ in range(predictors)]
    together = ensemble(logits)
    assert together.dtype == torch.float64
    expected = torch.stack([x.double().softmax(1) for x in logits]).mean(0)
    assert torch.allclose(together.exp(), expected, rtol=1e-12)
    assert torch.allclose(together.exp().sum(1), torch.ones(60, dtype=torch.float64))


def test_the_ensemble_of_sure_predictors() -> None:
    together = ensemble([logs([1.0, 0.0, 0.0]), logs([0.0, 1.0, 0.0])])
    assert together.exp().tolist() == [pytest.approx([0.5, 0.5, 0.0])]
    assert together[0, 2] == -math.inf


def test_small_probabilities_do_not_vanish() -> None:
    x = torch.tensor([[0.0, -2000.0]], dtype=torch.float64)
    assert ensemble([x, x])[0, 1] == pytest.approx(-2000)


def test_its_scores_are_those_of_the_mean() -> None:
    logits, labels = [torch.randn(50, 6) for _ in range(3)], torch.randint(6, (50,))
    mean = torch.stack([x.double().softmax(1) for x in logits]).mean(0)
    tally = Tally()
    tally.add(ensemble(logits), labels)
    assert tally.scores().nll == pytest.approx(float(-mean.gather(1, labels[:, None]).log().mean()))
    assert tally.scores().accuracy == pytest.approx(float((mean.argmax(1) == labels).double().mean()))
    single = [Tally() for _ in logits]
    for one, x in zip(single, logits, strict=True):
        one.add(x, labels)
    assert tally.scores().nll < sum(one.scores().nll for one in single) / 3  # Jensen's inequality


# ---- bad input ----


def test_bad_input_is_refused() -> None:
    with pytest.raises(SparsityError, match="predictors must be a whole number, at least 2"):
        Diversity(1)
    with pytest.raises(SparsityError, match="of 3 predictors, not 2"):
        Diversity(3).add([torch.zeros(2, 2)] * 2)
    with pytest.raises(SparsityError, match="of 2 predictors, not NoneType"):
        Diversity(2).add(None)  # type: ignore[arg-type]
    for wrong in ([torch.zeros(2, 3), torch.zeros(2, 4)], [torch.zeros(3)] * 2):
        with pytest.raises(SparsityError, match="one shape"):
            Diversity(2).add(wrong)
    with pytest.raises(SparsityError, match="one shape"):
        ensemble([])
