"""Whether two lists of results differ by more than chance: one result per seed, two-sided tests.

- `kolmogorov_smirnov`, the paper's, for lists that need not belong together: any difference of the two
  distributions, not only of their means.
- `permutation`, for results in pairs (the same seed with and without): exact, and assumes nothing but that
  without a difference the two results of a pair could be swapped. Below six pairs it cannot reach 0.05.
- `paired_t`, for few pairs, if the differences are about normal.
- `wilcoxon`, for pairs, when one run that went wrong should not decide.

A small p-value says that chance alone would rarely give this; it does not say how large the difference is. A
large one does not say that there is none.
"""

from __future__ import annotations

import reprlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from suptickets.errors import SparsityError

EXACT = 40  # up to so many pairs, all signs are taken; beyond, random ones, so many:
DRAWS = 99_999
SAME = 1e-9  # of the largest difference: sums that are nearer to each other are equal, up to rounding
ROUNDING = 40 * np.finfo(np.float64).eps  # of results: differences nearer to each other are equal

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Significance:
    """The test's statistic, and how probable one at least as extreme is if there is no difference."""

    statistic: float
    p: float


def kolmogorov_smirnov(ours: Sequence[float], theirs: Sequence[float]) -> Significance:
    """The largest distance between the two empirical distributions; exact up to 10,000 results."""
    from scipy import stats  # type: ignore[import-untyped]  # slow to import

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", RuntimeWarning)
        found = stats.ks_2samp(_sample(ours), _sample(theirs))
    certain = told and found.pvalue > 0.999  # the exact sum was rounded to above 1, and not used
    return Significance(float(found.statistic), 1.0 if certain else float(found.pvalue))


def permutation(ours: Sequence[float], theirs: Sequence[float]) -> Significance:
    """The mean difference, against all ways to swap the two results of a pair.

    With more than 40 pairs, against 99,999 random ways to swap, the same in every call.
    """
    return _flipped(_differences(ours, theirs))


def wilcoxon(ours: Sequence[float], theirs: Sequence[float]) -> Significance:
    """The mean signed rank of the differences, against all their signs: exact with ties too.

    Pairs without a difference are left out, as Wilcoxon did. Differences equal up to rounding are ties.
    """
    from scipy import stats

    differences, same = _differences(ours, theirs), _rounding(ours, theirs)
    differences = differences[differences != 0]
    order = np.argsort(sizes := np.abs(differences))
    sizes[order] = np.cumsum(np.diff(sizes[order], prepend=0) > same)
    return _flipped(np.sign(differences) * stats.rankdata(sizes))


def paired_t(ours: Sequence[float], theirs: Sequence[float]) -> Significance:
    """The mean difference over its standard error, against Student's distribution.

    Differences that are all equal, up to rounding, have no standard error: the statistic is infinite,
    with the sign of the differences, and p is 0.
    """
    from scipy import stats

    differences = _differences(ours, theirs)
    if not differences.any():
        return Significance(0.0, 1.0)
    if np.ptp(differences) <= _rounding(ours, theirs):
        return Significance(float(np.copysign(np.inf, differences[0])), 0.0)
    found = stats.ttest_1samp(differences, 0.0)
    return Significance(float(found.statistic), float(found.pvalue))


def _flipped(differences: Array) -> Significance:
    """The mean, against the means under all signs, which are symmetric: one side is counted, and doubled."""
    if not differences.any():
        return Significance(0.0, 1.0)
    largest = np.abs(differences).max()
    scaled = differences / largest  # their sum is finite
    share = _of_all if len(scaled) <= EXACT else _of_random
    p = 2 * share(scaled, abs(scaled.sum()) - SAME)
    return Significance(float(largest * scaled.mean()), min(p, 1.0))


def _of_all(values: Array, least: float) -> float:
    """The share of all choices of signs for which the sum is not below `least`.

    Each sum is one over the first half of the values plus one over the second half, and those are few.
    """
    half = len(values) // 2
    first, second = _sums(values[:half]), np.sort(_sums(values[half:]))
    not_below = len(second) - np.searchsorted(second, least - first)
    return float(not_below.mean() / len(second))


def _sums(values: Array) -> Array:
    """The sums of the values under all choices of signs."""
    sums = np.zeros(1)
    for value in values:
        sums = np.concatenate([sums - value, sums + value])
    return sums


def _of_random(values: Array, least: float) -> float:
    """The same share among random choices of signs, to which the actual one is added."""
    rng, count = np.random.default_rng(0), 1
    for draws in np.array_split(np.arange(DRAWS), 100):  # memory
        signs = rng.choice([-1.0, 1.0], (len(draws), len(values)))
        count += int(np.count_nonzero(signs @ values >= least))
    return count / (1 + DRAWS)


def _sample(values: Sequence[float]) -> Array:
    try:
        sample = np.asarray(values)
    except (ValueError, TypeError, RuntimeError):  # lists of unequal length, tensors on other devices
        sample = np.empty(0)
    if sample.ndim != 1 or len(sample) < 2 or sample.dtype.kind not in "iuf" or not np.isfinite(sample).all():
        given = " ".join(reprlib.repr(values).split())
        raise SparsityError(f"a test needs a list of two or more finite results, not {given}")
    return sample.astype(np.float64)


def _rounding(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """How much differences of these results may differ by rounding alone."""
    return float(ROUNDING * np.abs([*_sample(ours), *_sample(theirs)]).max())


def _differences(ours: Sequence[float], theirs: Sequence[float]) -> Array:
    a, b = _sample(ours), _sample(theirs)
    if len(a) != len(b):
        raise SparsityError(f"a paired test needs one result of each per seed, not {len(a)} and {len(b)}")
    with np.errstate(over="ignore"):
        difference: Array = a - b
    if not np.isfinite(difference).all():
        raise SparsityError("the differences of these results are beyond the largest number")
    return np.where(np.abs(difference) > _rounding(ours, theirs), difference, 0.0)
