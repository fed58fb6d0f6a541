"""What a network does, as a list of steps of a few kinds on planes of pixels.

Nearly everything is a sparse convolution: a linear layer is one whose kernel is as large as the image, a
batch norm one with a single weight per channel, a sum one that adds a residual. Strides are removed
beforehand: the image is split into images of every n-th pixel, over which the kernel goes pixel by pixel.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

Pair = tuple[int, int]
Whole = NDArray[np.int64]
Real = NDArray[np.float32]
Norm = nn.BatchNorm1d | nn.BatchNorm2d


@dataclass(eq=False)
class Planes:
    """A tensor of one image: planes of pixels, one per channel, with zeros around them.

    Attributes:
        channels: how many planes.
        height: their rows.
        width: the pixels of a row.
        pad: zeros that its readers need at each side.
        columns: pixels from row to row; the zeros behind a row are those before the next.
    """

    channels: int
    height: int = 1
    width: int = 1
    pad: int = 0
    columns: int = 0


@dataclass(eq=False)
class Taps:
    """The non-zero weights: the output of each, and where it reads, in pixels from the one it adds to."""

    output: Whole
    channel: Whole
    down: Whole
    right: Whole
    value: Real


@dataclass(eq=False)
class Step:
    """An operation that makes `y` of `x`."""

    x: Planes
    y: Planes

    def reads(self) -> list[Planes]:
        """The planes that it needs."""
        return [self.x]


@dataclass(eq=False)
class Sparse(Step):
    """A sparse convolution without strides, and what is done to its result before it is written."""

    taps: Taps
    bias: Real
    residual: Planes | None = None
    relu: bool = False

    def reads(self) -> list[Planes]:
        """The planes that it needs."""
        return [self.x, self.residual] if self.residual else [self.x]


@dataclass(eq=False)
class Split(Step):
    """Every n-th pixel from `first` on, into the channels of `y` from `channel` on."""

    stride: Pair
    first: Pair
    channel: int


@dataclass(eq=False)
class Pool(Step):
    """The greatest pixel of each window, or their mean."""

    kernel: Pair
    stride: Pair
    padding: Pair
    mean: bool = False
    relu: bool = False


def convolution(conv: nn.Conv2d, x: Planes, y: Planes) -> list[Step]:
    """A convolution as torch defines it."""
    dense, stride = _array(conv.weight), pair(conv.stride)
    output, channel, i, j = np.nonzero(dense)
    value = dense[output, channel, i, j]
    channel = channel + output // (len(dense) // conv.groups) * dense.shape[1]
    rows, columns = _reach(conv)
    phases = sorted({(int(a), int(b)) for a in rows % stride[0] for b in columns % stride[1]})
    number = np.zeros(stride, dtype=np.int64)
    number[tuple(zip(*phases, strict=True))] = np.arange(len(phases))
    channel = channel + x.channels * number[rows[i] % stride[0], columns[j] % stride[1]]
    splits = _splits(x, stride, phases)
    x = splits[-1].y if splits else x
    down, right = rows // stride[0], columns // stride[1]
    _make_room(x, y, down, right)
    return [*splits, Sparse(x, y, Taps(output, channel, down[i], right[j], value), _bias(conv))]


def _reach(conv: nn.Conv2d) -> tuple[Whole, Whole]:
    """The rows and columns that a kernel reads, counted from the first pixel."""
    sizes = zip(conv.kernel_size, conv.dilation, _padding(conv), strict=True)
    rows, columns = (np.arange(size) * dilation - padding for size, dilation, padding in sizes)
    return rows, columns


def _padding(conv: nn.Conv2d) -> tuple[int, ...]:
    """Zeros above and to the left; `same` has the odd one below and to the right."""
    if not isinstance(conv.padding, str):
        return conv.padding
    reach = zip(conv.kernel_size, conv.dilation, strict=True)
    return tuple(d * (k - 1) // 2 if conv.padding == "same" else 0 for k, d in reach)


def _splits(x: Planes, stride: Pair, phases: list[Pair]) -> list[Split]:
    """One split for each phase (the pixel to start from); none without a stride."""
    if stride == (1, 1):
        return []
    sizes = -(-x.height // stride[0]), -(-x.width // stride[1])
    y = Planes(len(phases) * x.channels, *sizes)
    return [Split(x, y, stride, phase, k * x.channels) for k, phase in enumerate(phases)]


def _make_room(x: Planes, y: Planes, down: Whole, right: Whole) -> None:
    """Give `x` as many zeros around it as a kernel reads beyond its sides."""
    before, behind = -down[0], down[-1] + y.height - x.height
    left, beside = -right[0], right[-1] + y.width - x.width
    x.pad = max(x.pad, *map(int, (before, behind, left, beside)))


def linear(layer: nn.Linear, x: Planes, y: Planes) -> list[Step]:
    """A linear layer; its inputs are the pixels of all channels."""
    dense = _array(layer.weight)
    output, place = np.nonzero(dense)
    channel, down, right = np.unravel_index(place, (x.channels, x.height, x.width))
    return [Sparse(x, y, Taps(output, channel, down, right, dense[output, place]), _bias(layer))]


def normalisation(norm: Norm, x: Planes, y: Planes) -> list[Step]:
    """A batch norm in evaluation mode: one factor and one shift per channel."""
    scale, shift = map(_array, _affine(norm))
    return [diagonal(x, y, scale, shift)]


def folded(layer: nn.Conv2d | nn.Linear, norm: Norm) -> nn.Conv2d | nn.Linear:
    """A copy of a layer that does the work of the batch norm behind it too."""
    scale, shift = _affine(norm)
    made, bias = copy.deepcopy(layer), shift if layer.bias is None else layer.bias * scale + shift
    made.weight.copy_((layer.weight.flatten(1) * scale[:, None]).view_as(layer.weight))
    made.bias = nn.Parameter(bias, requires_grad=False)
    return made


def _affine(norm: Norm) -> tuple[Tensor, Tensor]:
    """The factor and the shift of each channel; a norm may have weights, a bias, both or neither."""
    assert norm.running_mean is not None and norm.running_var is not None
    scale = (norm.running_var + norm.eps).rsqrt()
    scale = scale if norm.weight is None else scale * norm.weight
    shift = -norm.running_mean * scale
    return scale, shift if norm.bias is None else shift + norm.bias


def diagonal(x: Planes, y: Planes, scale: Real | None = None, shift: Real | None = None) -> Sparse:
    """Each channel by itself: times a factor, plus a shift."""
    channel, zero = np.arange(x.channels), np.zeros(x.channels, dtype=np.int64)
    value = np.ones(x.channels, dtype=np.float32) if scale is None else scale
    taps = Taps(channel, channel, zero, zero, value)
    return Sparse(x, y, taps, np.zeros_like(value) if shift is None else shift)


def flat(x: Planes, y: Planes) -> list[Step]:
    """All pixels as channels of one pixel."""
    channel, down, right = np.indices((x.channels, x.height, x.width)).reshape(3, -1)
    ones = np.ones(y.channels, dtype=np.float32)
    return [Sparse(x, y, Taps(np.arange(y.channels), channel, down, right, ones), np.zeros_like(ones))]


def _array(tensor: Tensor) -> Real:
    array: Real = tensor.detach().contiguous().numpy()
    return array


def _bias(layer: nn.Conv2d | nn.Linear) -> Real:
    return np.zeros(len(layer.weight), dtype=np.float32) if layer.bias is None else _array(layer.bias)


def pair(given: Any) -> Pair:
    """The size in each of the two directions, of which torch takes one for both too."""
    sizes = [*given] if isinstance(given, list | tuple) else [given]
    return sizes[0], sizes[-1]
