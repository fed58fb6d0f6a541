"""Where everything lies in memory for a number of lanes: the recipe as the kernels take it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from suptickets.deploy import native
from suptickets.deploy.recipe import Recipe
from suptickets.deploy.steps import Planes, Pool, Sparse, Split, Step, Whole

LINE = 16  # floats of a cache line
NEAREST = 6144  # floats of the nearest cache that the tiles of a block of input channels may take
FEWEST = 14  # least taps of a block per output, on average: with fewer, sums come and go too often
PACK, SPARSE, SPLIT, MAX, MEAN, UNPACK = range(6)


def lines(floats: int) -> int:
    """So many floats, rounded up to whole cache lines."""
    return -(-floats // LINE) * LINE


@dataclass(frozen=True)
class Place:
    """The memory of planes, in floats: see `Planes` of the kernels.

    Neighbouring channels are an odd number of lines apart, so that they do not share places in a cache.
    """

    planes: Planes
    lanes: int

    @property
    def row(self) -> int:
        """Floats from row to row."""
        return self.planes.columns * self.lanes

    @property
    def lead(self) -> int:
        """Zeros before the first pixel."""
        return lines(self.planes.pad * (self.planes.columns + 1) * self.lanes)

    @property
    def run(self) -> int:
        """Floats from the first pixel to the last."""
        return (self.planes.height - 1) * self.row + self.planes.width * self.lanes

    @property
    def step(self) -> int:
        """Floats from channel to channel."""
        return ((2 * self.lead + lines(self.run)) // LINE | 1) * LINE

    @property
    def size(self) -> int:
        """Floats of all channels, and of one more if their number is odd: they are computed in pairs."""
        return (self.planes.channels + self.planes.channels % 2) * self.step

    def native(self, start: int) -> native.Planes:
        """The place as the kernels take it, in memory from `start` on."""
        p = self.planes
        return native.Planes(start + self.lead, p.channels, p.height, p.width, self.row, self.step, self.lead)


def arrange(recipe: Recipe, lanes: int) -> tuple[dict[Planes, int], int]:
    """Where planes start, and how much memory they take; those that are not used at one time may share it."""
    born = dict.fromkeys(recipe.inputs, -1)
    dies = dict.fromkeys(recipe.inputs, -1)
    for k, step in enumerate(recipe.steps):
        born.setdefault(step.y, k)
        dies.update(dict.fromkeys([*step.reads(), step.y], k))
    dies.update(dict.fromkeys(recipe.outputs, len(recipe.steps)))
    taken: dict[Planes, tuple[int, int]] = {}
    for planes in born:
        alive = [place for other, place in taken.items() if dies[other] >= born[planes]]
        size = Place(planes, lanes).size
        start = _gap(alive, size)
        taken[planes] = start, start + size
    return {planes: start for planes, (start, _) in taken.items()}, max(end for _, end in taken.values())


def _gap(taken: Iterable[tuple[int, int]], size: int) -> int:
    """The first place where `size` floats are free."""
    start = 0
    for begin, end in sorted(taken):
        if start + size <= begin:
            break
        start = max(start, end)
    return start


class Program:
    """A recipe for a number of lanes.

    Attributes:
        steps: the steps as the kernels take them.
        floats: the memory that a call needs.
    """

    def __init__(self, recipe: Recipe, lanes: int) -> None:
        self.lanes, self._kept = lanes, list[NDArray[Any]]()
        self._starts, floats = arrange(recipe, lanes)
        self.floats = floats + 64 * LINE  # tiles at the end read beyond their run
        packs = [native.Step(PACK, y=self._place(p), port=k) for k, p in enumerate(recipe.inputs)]
        unpacks = [native.Step(UNPACK, x=self._place(p), port=k) for k, p in enumerate(recipe.outputs)]
        steps = [*packs, *map(self._lower, recipe.steps), *unpacks]
        self.steps = (native.Step * len(steps))(*steps)

    def _place(self, planes: Planes) -> native.Planes:
        return Place(planes, self.lanes).native(self._starts[planes])

    def _lower(self, step: Step) -> native.Step:
        made = native.Step(x=self._place(step.x), y=self._place(step.y), residual=-1)
        if isinstance(step, Sparse):
            self._sparse(made, step)
        elif isinstance(step, Split):
            made.kind, made.kernel, made.stride = SPLIT, (1, 1), step.stride
            made.padding = -step.first[0], -step.first[1]
            made.y.at += step.channel * made.y.step
            made.y.channels = step.x.channels
        elif isinstance(step, Pool):
            made.kind, made.relu = MEAN if step.mean else MAX, step.relu
            made.kernel, made.stride, made.padding = step.kernel, step.stride, step.padding
        return made

    def _sparse(self, made: native.Step, step: Sparse) -> None:
        x, y = Place(step.x, self.lanes), Place(step.y, self.lanes)
        taps, starts = blocked(step, x, y)
        made.kind, made.relu, made.blocks = SPARSE, step.relu, len(starts)
        made.taps, made.starts = self._keep(taps), self._keep(starts)
        made.bias, made.mask = self._keep(np.append(step.bias, np.float32(0))), self._keep(mask(y))
        if step.residual:
            made.residual = self._place(step.residual).at

    def _keep(self, array: NDArray[Any]) -> int:
        """The address of an array, which stays there as long as the program."""
        self._kept.append(array)
        return array.ctypes.data


def mask(y: Place) -> NDArray[np.int32]:
    """-1 for the pixels of a run, 0 for what is between its rows."""
    place = np.arange(lines(y.run))
    there = (place < y.run) & (place % y.row < y.planes.width * y.lanes)
    return -there.astype(np.int32)


def blocked(step: Sparse, x: Place, y: Place) -> tuple[NDArray[Any], NDArray[np.int32]]:
    """The taps by block of input channels, then by pair of outputs: of both, of the first, of the second.

    Returns:
        The taps, and where they start: for each block a row, of three starts for each pair and an end.
    """
    taps, size = step.taps, block_size(step, x, y)
    blocks, pairs = -(-x.planes.channels // size), -(-y.planes.channels // 2)
    offset = taps.channel * x.step + taps.down * x.row + taps.right * x.lanes
    order = np.lexsort((taps.output, offset, taps.output // 2))
    output, offset, value = taps.output[order], offset[order], taps.value[order]
    owner = np.where(shared(output, offset), 0, 1 + output % 2)
    key = (taps.channel[order] // size * pairs + output // 2) * 3 + owner
    order = np.argsort(key, kind="stable")
    made = np.empty(len(order), dtype=[("value", np.float32), ("offset", np.int32)])
    made["value"], made["offset"] = value[order], offset[order]
    firsts = np.searchsorted(key[order], np.arange(3 * pairs * blocks + 1))
    starts = np.stack([firsts[3 * pairs * b : 3 * pairs * (b + 1) + 1] for b in range(blocks)])
    return made, starts.astype(np.int32)


def shared(output: Whole, offset: Whole) -> NDArray[np.bool_]:
    """Which taps, sorted by pair, offset and output, the other output of the pair has too."""
    after = (output[1:] == output[:-1] + 1) & (output[1:] % 2 == 1) & (offset[1:] == offset[:-1])
    both: NDArray[np.bool_] = np.append(after, False) | np.insert(after, 0, False)
    return both


def block_size(step: Sparse, x: Place, y: Place) -> int:
    """The input channels of a block: as many as fit the nearest cache, more if that leaves too few taps."""
    taps, channels = step.taps, x.planes.channels
    if not len(taps.value):
        return channels
    tile = min(y.run, int(native.kernels().suptickets_tile()))
    down, right = (int(np.ptp(where)) for where in (taps.down, taps.right))
    separate = (down + 1) * (tile + right * x.lanes)
    together = tile + down * x.row + right * x.lanes
    per_channel = len(taps.value) / channels / y.planes.channels
    most = max(NEAREST // min(separate, together), int(FEWEST / per_channel), 1)
    return -(-channels // -(-channels // most))  # all blocks alike
