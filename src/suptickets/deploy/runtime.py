"""Modules that run recipes with the kernels."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Iterator, Sequence
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from suptickets.deploy import native
from suptickets.deploy.layout import LINE, Place, Program
from suptickets.deploy.recipe import Recipe
from suptickets.errors import SparsityError

Group = tuple[int, int, int]
UNSAVED = "an accelerated network cannot be saved: save the plain one and accelerate that"
NUMBERS: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}  # whatever torch's defaults are
LANES = (1, 2, 4, 8)  # images that may be computed at a time
NEAR = 2**20 + 2**18  # floats of the largest tensor that lies near enough to the cores


def groups(images: int, most: int) -> Iterator[Group]:
    """Groups of a batch: first image, images, and lanes for them, a power of two."""
    for first in range(0, images, most):
        some = min(most, images - first)
        yield first, some, 1 << (some - 1).bit_length()


def most_lanes(recipe: Recipe) -> int:
    """The most images at a time with which the largest tensor stays near the cores."""
    largest = max(Place(planes, 1).size for step in recipe.steps for planes in (step.x, step.y))
    return max(lanes for lanes in LANES if lanes == 1 or lanes * largest <= NEAR)


class Part(nn.Module):
    """A part of a network that the kernels run; calls from several threads wait for each other."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe, self._programs, self._lock = recipe, dict[int, Program](), Lock()
        self._arena, self._lanes = torch.empty(0, **NUMBERS), most_lanes(recipe)

    def __deepcopy__(self, memo: dict[int, Any]) -> Part:
        return Part(self.recipe)  # which nobody changes

    def forward(self, *given: Tensor) -> Tensor | tuple[Tensor, ...]:
        """What this part of the network makes of a batch."""
        inputs = [checked(x, shape) for x, shape in zip(given, self.recipe.takes, strict=True)]
        images = len(inputs[0])
        if any(len(x) != images for x in inputs):
            raise SparsityError("tensors of different numbers of images meet here: use the plain network")
        outputs = [torch.empty(images, *shape, **NUMBERS) for shape in self.recipe.makes]
        with self._lock:
            self._run(inputs, outputs, list(groups(images, self._lanes)))
        return outputs[0] if self.recipe.single else tuple(outputs)

    def _run(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], batch: Sequence[Group]) -> None:
        """Each thread runs as many whole groups as the others; all threads share each group that is left."""
        threads = torch.get_num_threads()
        calls = (native.Call * len(batch))()
        for call, (first, images, lanes) in zip(calls, batch, strict=True):
            program = self._program(lanes)
            call.steps, call.count, call.lanes, call.images = program.steps, len(program.steps), lanes, images
            call.inputs, call.outputs = _pointers(inputs, first), _pointers(outputs, first)
            call.threads = threads
        alone = len(batch) // threads * threads
        if alone:
            self._call(calls, 0, alone)
        for k in range(alone, len(batch)):
            self._call(calls, k, 1)

    def _call(self, calls: Any, first: int, count: int) -> None:
        size = LINE + max(program.floats for program in self._programs.values())
        arenas = min(count, calls[first].threads)
        if arenas * size > len(self._arena):
            self._arena = torch.zeros(arenas * size, **NUMBERS)
        for k in range(arenas):
            calls[first + k].arena = _aligned(self._arena.data_ptr() + 4 * k * size)
        these = ctypes.addressof(calls) + first * ctypes.sizeof(native.Call)
        native.kernels().suptickets_run(these, count, calls[first].threads)

    def _program(self, lanes: int) -> Program:
        if lanes not in self._programs:
            self._programs[lanes] = Program(self.recipe, lanes)
        return self._programs[lanes]


def checked(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A batch as the kernels take it, or an error that says what they take."""
    if x.shape == shape:
        raise SparsityError(
            "an accelerated network takes batches: x[None] is one of a single input, and where the network "
            "itself squeezes a batch of one, flatten(1) would keep it"
        )
    if x.shape[1:] != shape:
        wanted, given = (" x ".join(map(str, sizes)) for sizes in (shape, x.shape[1:]))
        raise SparsityError(f"accelerated for inputs of {wanted}, not of {given}: accelerate for these too")
    if x.dtype != torch.float32 or x.device.type != "cpu":
        raise SparsityError(f"an accelerated network takes float32 on a CPU, not {x.dtype} on {x.device}")
    return x.detach().contiguous()


def _aligned(address: int) -> int:
    return -(-address // (4 * LINE)) * 4 * LINE


def _pointers(tensors: Sequence[Tensor], first: int) -> Any:
    return (ctypes.c_void_p * len(tensors))(*(t.data_ptr() + 4 * first * t.stride(0) for t in tensors))


class Accelerated(nn.Module):
    """A network that predicts what the plain one does; the kernels run its sparse layers.

    Attributes:
        sparse: the layers that are computed sparsely, with the shares of their weights that are not zero.
        dense: the layers that are left to torch.
    """

    def __init__(self, network: nn.Module, sparse: dict[str, float], dense: list[str]) -> None:
        super().__init__()
        self.network, self.sparse, self.dense = network, sparse, dense
        self.eval()

    def __deepcopy__(self, memo: dict[int, Any]) -> Accelerated:
        return Accelerated(copy.deepcopy(self.network, memo), dict(self.sparse), list(self.dense))

    def __reduce__(self) -> Any:
        raise SparsityError(UNSAVED)

    def state_dict(self, *_: Any, **__: Any) -> Any:
        """Refused: what the kernels run has no parameters, so it would not be in the state."""
        raise SparsityError(UNSAVED)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Any:
        """What the plain network makes of a batch, without gradients."""
        if not isinstance(x, Tensor):
            raise SparsityError(f"an accelerated network takes a torch.Tensor, not {type(x).__name__}")
        return self.network(x)

    def train(self, mode: bool = True) -> Accelerated:
        """Stays in evaluation mode: an accelerated network cannot be trained."""
        return super().train(False)

    def extra_repr(self) -> str:
        """Which layers are sparse."""
        return f"sparse: {', '.join(self.sparse) or 'none'}; dense: {', '.join(self.dense) or 'none'}"
