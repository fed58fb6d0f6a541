"""What every model checks of the shapes it is asked for."""

from __future__ import annotations

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
