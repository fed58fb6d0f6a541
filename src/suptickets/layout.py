"""How a tensor lies in memory: the order of its dimensions, and indices from one order to another."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor


def memory_order(tensor: Tensor) -> tuple[int, ...]:
    """Dimensions from the slowest to the fastest in memory; row-major if the tensor has gaps."""
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda d: (-strides[d], d))
    packed = tensor.permute(order).is_contiguous()
    return tuple(order) if packed else tuple(range(tensor.dim()))


def remap(index: Tensor, sizes: Sequence[int], order: Sequence[int]) -> Tensor:
    """Flat indices over `sizes` (the last runs fastest) as flat indices over the dimensions in `order`.

    Dimensions that stay neighbours go together, and a first one that stays first is not taken apart: the
    pixels of a channels_last convolution, and its outputs.
    """
    groups: list[list[int]] = []
    for d in order:
        groups[-1].append(d) if groups and d == groups[-1][-1] + 1 else groups.append([d])
    strides, stride = {}, 1
    for group in reversed(groups):
        strides[group[0]] = stride
        stride *= math.prod(sizes[d] for d in group)
    groups.sort(reverse=True)
    result = None
    for group in groups[:-1]:
        size = math.prod(sizes[d] for d in group)
        part = index % size * strides[group[0]]
        result, index = part if result is None else result + part, index // size
    return index * strides[0] if result is None else result + index * strides[0]
