"""Whether two networks do the same, by what they make of an example."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

TOLERANCE = 1e-3  # of the largest output; rounding moves outputs by some 1e-6 of it


def same(expected: list[Any], made: list[Any]) -> bool:
    """Whether outputs agree up to rounding; what a trace does not see, such as conditions, changes them."""
    return len(expected) == len(made) and all(map(_alike, expected, made))


def _alike(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not one.is_floating_point():
        return True
    bound = TOLERANCE * float(one.nan_to_num().abs().max()) if one.numel() else 0.0
    alike = one.shape == other.shape and one.dtype == other.dtype
    return alike and torch.allclose(one, other, rtol=0, atol=bound, equal_nan=True)
