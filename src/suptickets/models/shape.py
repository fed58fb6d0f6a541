"""What models share: checks of the shapes they are asked for, and the chain of their parts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from torch import nn

from suptickets.errors import SparsityError


def narrowed(channels: int, width: float) -> int:
    """`channels` times `width`, rounded; an error if none would be left."""
    if not 0 < width < float("inf"):
        raise SparsityError(f"width must be a number above 0, not {width!r}")
    result = round(channels * width)
    if result < 1:
        raise SparsityError(
            f"at width {width:g} a layer of {channels} channels would have none: use a wider one"
        )
    return result


def check_size(model: str, size: int, least: int) -> None:
    """Refuse images of which pooling would leave nothing."""
    if size < least:
        raise SparsityError(f"{model} needs images of at least {least}x{least} pixels, not {size}x{size}")


def linked(*parts: Mapping[str, nn.Module | None]) -> nn.Sequential:
    """Named modules, one after the other."""
    named = [(name, module) for part in parts for name, module in part.items() if module is not None]
    return nn.Sequential(OrderedDict(named))
