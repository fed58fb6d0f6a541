"""What the library raises: `SparsityError` for what a user can put right, `TrainingError` for the rest."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from numbers import Integral, Real


class SparsityError(ValueError):
    """Bad input, or a request that cannot be met; the message is one line that says what to do."""


class TrainingError(RuntimeError):
    """A run that cannot go on, though nothing was wrong with what was asked for."""


def unknown(kind: str, name: object, known: Iterable[str]) -> SparsityError:
    """The error for a name that does not exist, with the nearest one that does."""
    names = sorted(known)
    nearest = difflib.get_close_matches(str(name), names, n=1)
    hint = f"did you mean {nearest[0]!r}?" if nearest else f"there are: {', '.join(names)}"
    return SparsityError(f"unknown {kind} {name!r}: {hint}")


def reason(error: BaseException) -> str:
    """The first line of somebody else's error, or of the one that it wraps as its reason (urllib's do)."""
    inner = getattr(error, "reason", None)
    error = inner if isinstance(inner, BaseException) else error
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def choice(kind: str, value: object, known: Iterable[str]) -> str:
    """`value`, if it is one of the known names."""
    names = list(known)
    if not isinstance(value, str) or value not in names:
        raise unknown(kind, value, names)
    return value


def whole(name: str, value: object, at_least: int = 1) -> int:
    """`value` as a whole number, or a `SparsityError`."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < at_least:
        raise SparsityError(f"{name} must be a whole number, at least {at_least}, not {value!r}")
    return int(value)


def fraction(name: str, value: object, *, zero: bool = True, one: bool = False) -> float:
    """`value` as a float between 0 and 1, or a `SparsityError`; a percentage gets a suggestion."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise SparsityError(f"{name} must be a number between 0 and 1, not {value!r}")
    number = float(value)
    if 2 <= number < 100:
        raise SparsityError(
            f"{name} is a fraction, not a percentage: {value!r}, did you mean {number / 100:g}?"
        )
    low, high = number > 0 or (zero and number == 0), number < 1 or (one and number == 1)
    if math.isnan(number) or not (low and high):
        bounds = f"{'at least' if zero else 'above'} 0 and {'at most' if one else 'below'} 1"
        raise SparsityError(f"{name} must be {bounds}, not {value!r}")
    return number
