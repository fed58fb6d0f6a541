"""One list as several."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


def parted(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """The items by their keys, both in the order in which they come."""
    parts: dict[K, list[T]] = {}
    for item in items:
        parts.setdefault(key(item), []).append(item)
    return parts
