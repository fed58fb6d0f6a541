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
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from suptickets.errors import SparsityError

FLIPS = 99_999  # permutations are exact up to so many, that is up to 16 pairs
ROUNDING = 40 * np.finfo(np.float64).eps  # of results, by which their differences may differ

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Significance:
    """The test's statistic, and how probable one at least as extreme is if there is no difference."""

    statistic: float
    p: float

    def as_dict(self) -> dict[str, float]:
        """For JSON."""
        return asdict(self)


def kolmogorov_smirnov(ours: Sequence[float], theirs: Sequence[float]) -> Significance:
    """The largest distance between the two empirical distributions; exact up to 10,000 results."""
    from scipy import stats  # type: ignore[import-untyped]  # slow to import

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # at the least distance its sum is rounded to above 1
        found = stats.ks_2samp(_sample(ours), _sample(theirs))
    return Significance(float(found.statistic), float(found.pvalue))


def permutation(ours: Sequence[float], theirs: Sequence[float]) -> Significance:
    """The mean difference, against all ways to swap the two results of a pair.

    With more than 16 pairs, against 99,999 random ones, always the same.
    """
    return _flipped(_differences(ours, theirs))


def wilcoxon(ours: Sequence[float], theirs: Sequence[float]) -> Significance:
    """The mean signed rank of the differences, against all their signs: exact with ties too.

    Pairs without a difference are left out, as Wilcoxon did.
    """
    from scipy import stats

    differences = _differences(ours, theirs)
    differences = differences[differences != 0]
    return _flipped(np.sign(differences) * stats.rankdata(np.abs(differences)))


def paired_t(ours: Sequence[float], theirs: Sequence[float]) -> Significance:
    """The mean difference over its standard error, against Student's distribution.

    Differences that are all the same, but for rounding, have no standard error: the statistic is infinite,
    with the sign of the differences, and p is 0.
    """
    from scipy import stats

    differences = _differences(ours, theirs)
    if not differences.any():
        return Significance(0.0, 1.0)
    if np.ptp(differences) <= ROUNDING * np.abs([*_sample(ours), *_sample(theirs)]).max():
        return Significance(float(np.copysign(np.inf, differences[0])), 0.0)
    found = stats.ttest_1samp(differences, 0.0)
    return Significance(float(found.statistic), float(found.pvalue))


def _flipped(differences: Array) -> Significance:
    """The mean, against the means under all signs."""
    from scipy import stats

    if not differences.any():
        return Significance(0.0, 1.0)
    found = stats.permutation_test(
        (differences,),
        lambda x, axis: np.mean(x, axis=axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=FLIPS,
        batch=4096,
        rng=np.random.default_rng(0),
    )
    return Significance(float(found.statistic), float(found.pvalue))


def _sample(values: Sequence[float]) -> Array:
    try:
        sample = np.asarray(values)
    except (ValueError, TypeError, RuntimeError):  # lists of unequal length, tensors elsewhere
        sample = np.empty(0)
    if sample.ndim != 1 or len(sample) < 2 or sample.dtype.kind not in "iuf" or not np.isfinite(sample).all():
        given = " ".join(reprlib.repr(values).split())
        raise SparsityError(f"a test needs a list of two or more finite results, not {given}")
    return sample.astype(np.float64)


def _differences(ours: Sequence[float], theirs: Sequence[float]) -> Array:
    a, b = _sample(ours), _sample(theirs)
    if len(a) != len(b):
        raise SparsityError(f"a paired test needs one result of each per seed, not {len(a)} and {len(b)}")
    with np.errstate(over="ignore"):
        difference: Array = a - b
    if not np.isfinite(difference).all():
        raise SparsityError("the differences of these results are beyond the largest number")
    return difference
