"""How tensors lie in memory: orders of dimensions, indices from one order to another, tensors in a row."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
CONNECTIONS = 2**22  # processed together at most: beyond this, launches no longer dominate
CACHED = 2**15  # the same on a CPU: more would leave its cache


def memory_order(tensor: Tensor) -> tuple[int, ...]:
    """Dimensions from the slowest to the fastest in memory; row-major if the tensor has gaps."""
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda d: (-strides[d], d))
    packed = tensor.permute(order).is_contiguous()
    return tuple(order) if packed else tuple(range(tensor.dim()))


def remap(index: Tensor, sizes: Sequence[Any], order: Sequence[int]) -> Tensor:
    """Flat indices over `sizes` (the last runs fastest) as flat indices over the dimensions in `order`.

    Sizes are numbers, or tensors with one size for each index. Dimensions that stay neighbours are handled as
    one, like the pixels of a channels_last convolution; a first one that stays first, like its outputs, is
    not taken apart.
    """
    groups: list[list[int]] = []
    for d in order:
        groups[-1].append(d) if groups and d == groups[-1][-1] + 1 else groups.append([d])
    strides: dict[int, Any] = {}
    stride: Any = 1
    for group in reversed(groups):
        strides[group[0]] = stride
        stride = stride * math.prod(sizes[d] for d in group)  # not in place: it may be a tensor
    groups.sort(reverse=True)
    result: Tensor | None = None
    for group in groups[:-1]:
        size = math.prod(sizes[d] for d in group)
        part: Tensor = index % size * strides[group[0]]
        result, index = part if result is None else result + part, index // size
    first: Tensor = index * strides[0]
    return first if result is None else result + first


def rows_of(
    addresses: Tensor,
    owner: Tensor,
    shapes: Sequence[Sequence[int]],
    order: Sequence[int],
    starts: Sequence[int],
) -> Tensor:
    """Row-major indices of addresses in several tensors of one memory order, added to each tensor's start.

    `owner` says which of the tensors an address belongs to.
    """
    table: Any = [starts, *[[shape[d] for shape in shapes] for d in order]]
    if len(shapes) > 1:
        table = sent(table, addresses.device).to(addresses.dtype).index_select(1, owner)
    else:  # plain numbers are faster
        table = [column[0] for column in table]
    if list(order) != sorted(order):
        addresses = remap(addresses, list(table[1:]), [order.index(d) for d in range(len(order))])
    rows: Tensor = addresses + table[0]
    return rows


def marks(sizes: Sequence[int], device: torch.device) -> Tensor:
    """`sizes[0]` zeros, `sizes[1]` ones, and so on, made without waiting for the device."""
    if device.type == "cpu":
        return torch.repeat_interleave(sent(sizes, device).int(), output_size=sum(sizes))
    ends = sent(list(accumulate(sizes)), device)  # repeat_interleave gives a long piece to few threads
    return torch.bucketize(torch.arange(sum(sizes), device=device), ends, right=True, out_int32=True)


def sent(numbers: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Numbers as a tensor on a device, sent without waiting for it."""
    tensor = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def at_once(device: torch.device) -> int:
    """How many connections are processed together on a device."""
    return CACHED if device.type == "cpu" else CONNECTIONS


def few(items: Sequence[T], sizes: Sequence[int], most: int) -> Iterator[list[T]]:
    """Cut a list of items where their `sizes` add up to more than `most`."""
    start = total = 0
    for end, size in enumerate(sizes):
        total += size
        if end > start and total > most:
            yield list(items[start:end])
            start, total = end, size
    yield list(items[start:])


def in_order(places: Tensor, size: int) -> bool:
    """Whether these are places in a tensor of this size, sorted and without repetition."""
    if not len(places):
        return True
    return bool(places[0] >= 0 and places[-1] < size and (places[1:] > places[:-1]).all())


def place_of(name: str, value: Any) -> Any:
    """A key that is equal for two names of one tensor (tied weights); the name, if there is no memory."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return name
    return value.data_ptr() or name, value.device, value.dtype, value.shape, value.stride()
