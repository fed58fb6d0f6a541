"""How many connections each layer gets: uniform, ER, ERK; exact in every layer and in total."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Sequence

from suptickets.errors import SparsityError, choice, fraction, whole

Shape = Sequence[int]

#: Density of a weight of some shape, up to the factor that makes the total right.
DISTRIBUTIONS: dict[str, Callable[[Shape], float]] = {
    "uniform": lambda shape: 1.0,
    "er": lambda shape: sum(shape[:2]) / math.prod(shape[:2]),
    "erk": lambda shape: sum(shape) / math.prod(shape),
}


def densities(
    shapes: Iterable[Shape], sparsity: float, distribution: str = "erk", dense: Collection[int] = ()
) -> list[float]:
    """Density of each layer: epsilon times its raw density, epsilon such that the total is right.

    A layer that would exceed 1, or is named in `dense`, keeps all its connections. They come out of the
    budget, which changes epsilon for the others, so the step is repeated until no layer exceeds 1.
    """
    fraction("sparsity", sparsity)
    choice("distribution", distribution, DISTRIBUTIONS)
    shapes = [*shapes]
    for shape in shapes:
        if not isinstance(shape, Sequence) or not shape:
            raise SparsityError(f"shapes must be a list of shapes, each with a size or more, not {shapes!r}")
        for size in shape:
            whole("a size", size)
    if sparsity == 0:
        return [1.0] * len(shapes)
    sizes = [math.prod(shape) for shape in shapes]
    raw = [DISTRIBUTIONS[distribution](shape) for shape in shapes]
    full = set(dense)
    while True:
        rest = [i for i in range(len(sizes)) if i not in full]
        budget = (1 - sparsity) * sum(sizes) - sum(sizes[i] for i in full)
        if not rest and round((1 - sparsity) * sum(sizes)) == sum(sizes):  # a sparsity next to nothing
            return [1.0] * len(sizes)
        if not rest or budget <= 0:
            limit = 1 - sum(sizes[i] for i in full) / sum(sizes)
            raise SparsityError(f"with these layers kept dense the sparsity must be below {limit:.6f}")
        epsilon = budget / sum(raw[i] * sizes[i] for i in rest)
        highest = max(raw[i] for i in rest)
        if epsilon * highest <= 1:
            return [1.0 if i in full else epsilon * raw[i] for i in range(len(sizes))]
        full |= {i for i in rest if raw[i] == highest}


def erk(shapes: Iterable[Shape], sparsity: float) -> list[float]:
    """Erdős-Rényi-Kernel (RigL): density in proportion to the sum of a weight's sizes over their product.

    The shapes are those of the weights: (out, in / groups, height, width) for a grouped convolution.
    `"er"` (SET) is the same without the kernel's sizes, `"uniform"` the same density everywhere.
    """
    return densities(shapes, sparsity, "erk")


def apportion(total: int, shares: Sequence[float], caps: Sequence[int]) -> list[int]:
    """`total` split in proportion to `shares`, in whole numbers of at most `caps`, by largest remainder.

    What a cap cuts off goes to the others in proportion. The sum is `total`, or that of the caps if less.
    """
    result = [0] * len(caps)
    room = list(range(len(caps)))
    while room:
        left, weight = min(total, sum(caps)) - sum(result), sum(shares[i] for i in room)
        quota = {i: left * (shares[i] / weight if weight > 0 else 1 / len(room)) for i in room}
        full = [i for i in room if quota[i] >= caps[i]]
        if not full:
            # rounded: shares that are as near to a whole number go by their order, not by their last bit
            by_remainder = sorted(room, key=lambda i: (round(math.floor(quota[i]) - quota[i], 9), i))
            extra = by_remainder[: left - sum(math.floor(q) for q in quota.values())]
            for i in room:
                result[i] = math.floor(quota[i]) + (i in extra)
            break
        for i in full:
            result[i] = caps[i]
        room = [i for i in room if i not in full]
    return result


def counts(
    shapes: Sequence[Shape],
    sparsity: float,
    distribution: str = "erk",
    *,
    dense: Collection[int] = (),
    names: Sequence[str] = (),
) -> list[int]:
    """Living connections per layer; their sum is the target, rounded to a whole number.

    `dense` are the layers that keep all connections; the others make up for them, so that the total holds.
    """
    result = _counts(shapes, sparsity, distribution, dense)
    if 0 in result:
        empty = result.index(0)
        raise SparsityError(
            f"at sparsity {sparsity} the layer {names[empty] if names else empty} would lose all its "
            f"connections: use at most {_limit(shapes, sparsity, distribution, dense):.6f}"
        )
    return result


def _counts(shapes: Sequence[Shape], sparsity: float, distribution: str, dense: Collection[int]) -> list[int]:
    sizes = [math.prod(shape) for shape in shapes]
    shares = densities(shapes, sparsity, distribution, dense)
    result = [size if share == 1 else 0 for size, share in zip(sizes, shares, strict=True)]
    rest = [i for i, share in enumerate(shares) if share < 1]
    left = round((1 - sparsity) * sum(sizes)) - sum(result)
    split = apportion(left, [shares[i] * sizes[i] for i in rest], [sizes[i] for i in rest])
    for i, count in zip(rest, split, strict=True):
        result[i] = count
    return result


def _limit(shapes: Sequence[Shape], sparsity: float, distribution: str, dense: Collection[int]) -> float:
    """The highest sparsity, to six digits, at which every layer keeps a connection (by bisection)."""

    def empties(millionths: int) -> bool:
        return 0 in _counts(shapes, millionths / 1e6, distribution, dense)

    return bisect_left(range(1, math.ceil(sparsity * 1e6)), True, key=empties) / 1e6
