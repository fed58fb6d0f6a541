"""The one exception that the library raises for what a user can put right."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable


class SparsityError(ValueError):
    """Bad input, or a request that cannot be met; the message is one line that says what to do."""


def unknown(kind: str, name: object, known: Iterable[str]) -> SparsityError:
    """The error for a name that does not exist, with the nearest one that does."""
    names = sorted(known)
    nearest = difflib.get_close_matches(str(name), names, n=1)
    hint = f"did you mean {nearest[0]!r}?" if nearest else f"there are: {', '.join(names)}"
    return SparsityError(f"unknown {kind} {name!r}: {hint}")


def reason(error: BaseException) -> str:
    """The first line of somebody else's error."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def fraction(name: str, value: object, *, zero: bool = True, one: bool = False) -> float:
    """`value` as a float between 0 and 1, or a `SparsityError`; a percentage gets a suggestion."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SparsityError(f"{name} must be a number between 0 and 1, not {value!r}")
    if 1 < value <= 100:
        raise SparsityError(
            f"{name} is a fraction, not a percentage: {value!r}, did you mean {value / 100:g}?"
        )
    low, high = value > 0 or (zero and value == 0), value < 1 or (one and value == 1)
    if math.isnan(value) or not (low and high):
        bounds = f"{'at least' if zero else 'above'} 0 and {'at most' if one else 'below'} 1"
        raise SparsityError(f"{name} must be {bounds}, not {value!r}")
    return float(value)
