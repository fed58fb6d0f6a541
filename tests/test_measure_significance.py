"""Tests over seeds: scipy's values, exact enumerations, and what the paper's printed p-values tell."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
from scipy import stats

from suptickets.errors import SparsityError
from suptickets.measure.significance import (
    Significance,
    kolmogorov_smirnov,
    paired_t,
    permutation,
    wilcoxon,
)

PAIRED = (permutation, wilcoxon, paired_t)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def samples(n: int, shift: float = 0.5) -> tuple[list[float], list[float]]:
    rng = np.random.default_rng(n)
    ours = rng.normal(shift, 1, n)
    return list(ours), list(0.5 * ours + rng.normal(0, 1, n))


# ---- Kolmogorov-Smirnov ----


@pytest.mark.parametrize("sizes", [(3, 3), (15, 15), (14, 14), (5, 9)])
def test_kolmogorov_smirnov_is_scipys(sizes: tuple[int, int], rng: np.random.Generator) -> None:
    ours, theirs = rng.normal(0.7, 1, sizes[0]), rng.normal(0, 1, sizes[1])
    expected = stats.ks_2samp(ours, theirs)
    found = kolmogorov_smirnov(list(ours), list(theirs))
    assert (found.statistic, found.p) == pytest.approx((expected.statistic, expected.pvalue))


def test_kolmogorov_smirnov_by_hand() -> None:
    """Of the 20 ways to mix 3 with 3, two have them apart, and all have a distance of at least 1/3."""
    assert kolmogorov_smirnov([1, 2, 3], [4, 5, 6]) == Significance(1.0, pytest.approx(2 / 20))
    assert kolmogorov_smirnov([1, 3, 5], [2, 4, 6]) == Significance(pytest.approx(1 / 3), 1.0)
    for n in range(2, 40):  # all ways to mix have at least this distance
        assert kolmogorov_smirnov(range(n), [i + 0.5 for i in range(n)]).p == pytest.approx(1.0, abs=1e-12)


#: The p-values that the paper prints for "15 runs" each.
PRINTED = {"5.90e-2", "1.87e-2", "1.02e-2", "1.88e-5", "1.63e-4", "1.02e-3", "1.4e-6"}


def possible(seeds: int) -> list[float]:
    """With as many runs each and no ties, the p-value depends on the distance k / seeds alone."""
    shifted = [[i + k - 0.5 for i in range(seeds)] for k in range(1, seeds + 1)]
    return [kolmogorov_smirnov(list(range(seeds)), theirs).p for theirs in shifted]


def among(printed: str, values: list[float]) -> bool:
    """Whether one of the values is printed so, rounded or cut to as many digits."""
    digits = len(printed.partition("e")[0].replace(".", ""))
    unit = 10.0 ** (int(printed.partition("e")[2]) - digits + 1)
    return any(abs(value - float(printed)) < unit for value in values)


def test_the_papers_p_values_are_those_of_14_runs() -> None:
    """All but one: 1.02e-2 is probably 1.02e-3."""
    assert {p for p in PRINTED if among(p, possible(14))} == PRINTED - {"1.02e-2"}
    expected = [0.0590, 0.0188, 0.0049, 1.02e-3, 1.63e-4, 1.88e-5, 1.4e-6]
    assert possible(14)[6:13] == pytest.approx(expected, rel=0.01)


def test_none_of_them_is_a_p_value_of_15_runs() -> None:
    assert not [p for p in PRINTED if among(p, possible(15))]


def test_ties_give_no_other_p_values(rng: np.random.Generator) -> None:
    """With n runs each, tied or not, the distance is a multiple of 1 / n."""
    known = np.array([1.0, *possible(14)])
    for ours, theirs in rng.integers(0, 6, (50, 2, 14)):
        assert np.isclose(kolmogorov_smirnov(ours, theirs).p, known, rtol=1e-9).any()


# ---- pairs ----


@pytest.mark.parametrize("n", [3, 6, 10, 15])
def test_paired_t_is_scipys(n: int) -> None:
    ours, theirs = samples(n)
    expected = stats.ttest_rel(ours, theirs)
    found = paired_t(ours, theirs)
    assert (found.statistic, found.p) == pytest.approx((expected.statistic, expected.pvalue))


@pytest.mark.parametrize("n", [3, 6, 12, 15])
def test_wilcoxon_is_scipys(n: int) -> None:
    ours, theirs = samples(n)
    assert wilcoxon(ours, theirs).p == pytest.approx(stats.wilcoxon(ours, theirs, method="exact").pvalue)


def enumerated(values: list[float]) -> float:
    """The share of all signs that give a sum at least as far from 0."""
    sums = [
        abs(sum(s * v for s, v in zip(signs, values, strict=True)))
        for signs in product((1, -1), repeat=len(values))
    ]
    return sum(s >= abs(sum(values)) - 1e-9 for s in sums) / len(sums)


@pytest.mark.parametrize("n", [2, 3, 5, 9, 14])
def test_permutation_takes_all_signs(n: int) -> None:
    ours, theirs = samples(n)
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    found = permutation(ours, theirs)
    assert (found.statistic, found.p) == pytest.approx((np.mean(differences), enumerated(differences)))


def test_ties_are_exact_too() -> None:
    differences = [1, 1, -1, 2, 2, 3, 0, -3, 4]
    ranks = [2, 2, -2, 4.5, 4.5, 6.5, -6.5, 8]
    assert wilcoxon(differences, [0] * 9).p == pytest.approx(enumerated(ranks))
    assert permutation(differences, [0] * 9).p == pytest.approx(enumerated(differences))


def test_accuracies_that_differ_alike_are_ties_though_fractions_are_rounded() -> None:
    """Counts of right samples, and the shares that they are: 0.0012 is not always 0.0012."""
    generator = np.random.default_rng(1)
    for n in (6, 9, 14):
        counts = generator.integers(9000, 9990, n)
        others = counts + generator.choice([-12, -7, -3, 0, 3, 7, 12], n)
        exact, found = wilcoxon(counts, others), wilcoxon(counts / 10_000, others / 10_000)
        assert (found.statistic, found.p) == pytest.approx((exact.statistic, exact.p))


def test_by_hand() -> None:
    """All five better: two of the 32 signs are as extreme. t = 3 / (sd / sqrt 5) with sd^2 = 2.5."""
    ours, theirs = [2, 4, 6, 8, 10], [1, 2, 3, 4, 5]
    assert permutation(ours, theirs) == Significance(3.0, pytest.approx(2 / 32))
    assert wilcoxon(ours, theirs) == Significance(3.0, pytest.approx(2 / 32))
    assert paired_t(ours, theirs).statistic == pytest.approx(3 / (2.5 / 5) ** 0.5)


def test_a_run_that_went_wrong_moves_wilcoxon_least() -> None:
    ours = [1.0, 1.1, 0.9, 1.2, 0.8, 1.3, 0.7, 1.05, 0.95, -50.0]
    zeros = [0.0] * 10
    assert wilcoxon(ours, zeros).p < 0.1 < min(permutation(ours, zeros).p, paired_t(ours, zeros).p)


@pytest.mark.parametrize("n", [18, 25, 40])
def test_many_pairs_are_exact(n: int) -> None:
    """Signed ranks have a distribution that is known otherwise; all better is one of two extremes."""
    ours, theirs = samples(n)
    expected = stats.wilcoxon(ours, theirs, method="exact").pvalue
    assert wilcoxon(ours, theirs).p == pytest.approx(expected, rel=1e-9)
    assert permutation([1.0 + k for k in range(n)], [0.0] * n).p == pytest.approx(2 / 2**n, rel=1e-9)


def test_more_pairs_than_can_be_enumerated() -> None:
    """Random signs, always the same ones."""
    ours, theirs = samples(41, shift=1.0)
    assert permutation(ours, theirs) == permutation(ours, theirs)
    assert permutation(ours, theirs).p == pytest.approx(paired_t(ours, theirs).p, abs=0.02)
    assert permutation(range(1, 61), [0] * 60).p == pytest.approx(2 / 100_000)


@pytest.mark.parametrize("test", [*PAIRED, kolmogorov_smirnov])
def test_what_holds_for_all(test: Callable[..., Significance]) -> None:
    ours, theirs = samples(8)
    found, swapped = test(ours, theirs), test(theirs, ours)
    assert found.p == pytest.approx(swapped.p) and 0 < found.p <= 1
    assert test(ours, ours) == Significance(0.0, 1.0)


@pytest.mark.parametrize("test", PAIRED)
def test_without_a_difference_one_in_twenty_is_significant(
    test: Callable[..., Significance], rng: np.random.Generator
) -> None:
    drawn = rng.normal(size=(400, 2, 8))
    assert np.mean([test(*pair).p <= 0.05 for pair in drawn]) == pytest.approx(0.05, abs=0.03)


@pytest.mark.parametrize("difference", [0.01, -0.3, 1.0, 1e-9])
@pytest.mark.parametrize("n", [2, 5])
def test_differences_that_are_all_the_same(difference: float, n: int) -> None:
    """But for rounding; they have no standard error, and scipy would warn."""
    theirs = [0.7 + 0.013 * i for i in range(n)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = paired_t([x + difference for x in theirs], theirs)
    assert found == Significance(np.copysign(np.inf, difference), 0.0)


def test_differences_that_are_nearly_the_same() -> None:
    ours = [0.01, 0.01 + 1e-12, 0.01 - 1e-12]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = paired_t(ours, [0.0] * 3)
    assert found.statistic == pytest.approx(stats.ttest_1samp(ours, 0).statistic) and 0 < found.p < 1e-9


# ---- bad input ----

WRONG: list[Any] = [
    *([], [1.0], [1.0, float("nan")], [1.0, float("inf")], [[1.0, 2.0], [3.0, 4.0]]),
    *(["0.5", "0.6"], [None, 1.0], [True, False], [1j, 2j], [[1.0], [2.0, 3.0]], "12", None, 3.0, {1.0, 2.0}),
]


def test_results_beyond_the_largest_number_are_refused() -> None:
    with pytest.raises(SparsityError, match="beyond the largest number"):
        paired_t([1.7e308, 1.7e308], [-1.7e308, 1.0])


@pytest.mark.parametrize("test", [*PAIRED, kolmogorov_smirnov])
@pytest.mark.parametrize("wrong", WRONG, ids=repr)
def test_lists_of_finite_numbers_are_needed(test: Callable[..., Significance], wrong: list[float]) -> None:
    with pytest.raises(SparsityError, match="two or more finite results"):
        test([1.0, 2.0], wrong)


@pytest.mark.parametrize("test", PAIRED)
def test_pairs_are_needed(test: Callable[..., Significance]) -> None:
    with pytest.raises(SparsityError, match="per seed, not 3 and 2"):
        test([1.0, 2.0, 3.0], [1.0, 2.0])


@pytest.mark.parametrize("test", [permutation, paired_t, wilcoxon])
def test_results_that_are_equal_but_for_rounding_do_not_differ(test):
    assert test([0.1 + 0.2, 0.3, 0.7], [0.3, 0.3, 0.7]).p == 1
    assert test([0.1 + 0.2] * 6, [0.3] * 6).p == 1
