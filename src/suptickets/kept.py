"""Dense weights that are kept between steps: for steps that are compiled and captured once and then replayed.

The plain way builds every dense weight anew in each forward pass, and lets autograd carry the gradient back
to the values: several kernels per layer, with shapes that depend on the counts. Here the dense tensors stay,
side by side in one buffer, and a step rewrites their living positions only. What is compiled sees dense
tensors and nothing else, so that no change of connections or counts compiles anything again: the backward
pass hands each dense gradient to its `Slot`, which takes the living part at once and lets the rest go.

Values, positions and momentum of all weights lie side by side too, so that the optimizer's step and the
rewriting are one kernel for the whole network. A weight whose count shrinks leaves an inert tail behind it:
copies of its first connection, which evolve as that one does and are in no count, file or message.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from itertools import accumulate, count
from types import ModuleType
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, library
from torch.optim import Optimizer

from suptickets.layout import marks
from suptickets.weight import SparseWeight

ALIGNED = 64  # dense weights begin at multiples of it: kernels that use tensor cores want 16 bytes

_slots: WeakValueDictionary[int, Slot] = WeakValueDictionary()


class Slot:
    """The place of one weight in the buffers of `KeptWeights`; collects its dense gradient on request."""

    def __init__(self, weight: SparseWeight, dense: Tensor) -> None:
        """`dense` is the part of the buffer that holds the weight, flat in memory order."""
        self.weight, self.dense = weight, dense
        self.token = torch.zeros((), dtype=dense.dtype, device=dense.device, requires_grad=True)
        self.positions: Tensor | None = None
        self.gradient: Tensor | None = None
        self.delivered = self.collecting = self.arrived = self.stale = False
        self._total: Tensor | None = None
        self.key = next(key for key in count() if key not in _slots)  # compiled code knows the slot by this
        _slots[self.key] = self

    def read(self) -> Tensor:
        """The dense weight, flat: nothing is computed."""
        dense: Tensor = _Read.apply(self.token, self.dense, self.key)  # type: ignore[no-untyped-call]
        return dense

    def deliver(self, gradient: Tensor) -> None:
        """Take the living part of a dense gradient; a weight that is used twice gets two."""
        assert self.positions is not None and self.gradient is not None
        if self.delivered:
            self.gradient += gradient.gather(0, self.positions)
        else:
            take(gradient, self.positions, out=self.gradient)
        if self.collecting:
            assert self._total is not None
            self._total.add_(gradient) if self.delivered else self._total.copy_(gradient)
        self.delivered = self.arrived = True

    # ---- what `Collection` expects of a collector ----

    def collect(self) -> Slot:
        """Keep the whole gradient from the next backward pass on."""
        if self._total is None:
            self._total = torch.zeros_like(self.dense)
        self.collecting, self.arrived = True, self.arrived and self.collecting
        return self

    @property
    def total(self) -> Tensor | None:
        """The gradient of all positions, if it is being collected and has come."""
        return self._total if self.collecting and self.arrived else None

    def discard(self) -> None:
        """Forget what was collected; the next backward pass overwrites it."""
        self.arrived = False

    def close(self) -> None:
        """Stop collecting; the buffer stays, because a captured graph may write into it."""
        self.collecting = False


@library.custom_op("suptickets::deliver", mutates_args=())
def _deliver(gradient: Tensor, key: int) -> Tensor:
    _slots[key].deliver(gradient)
    return gradient.new_empty(())


@_deliver.register_fake
def _(gradient: Tensor, key: int) -> Tensor:
    return gradient.new_empty(())


class _Read(torch.autograd.Function):
    """The identity, whose gradient goes to a slot: the token makes autograd ask for it."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, dense: Tensor, key: int) -> Tensor:
        ctx.key = key
        return dense.view_as(dense)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return torch.ops.suptickets.deliver(gradient.contiguous(), ctx.key), None, None


class KeptWeights:
    """The dense tensors of a network's weights, and everything that belongs to them, side by side.

    Args:
        weights: the weights that are trained (`suitable`).
        optimizer: SGD, whose momentum is moved into one tensor (its own state then views it).
        dtype: of the dense tensors: what the layers compute in.
    """

    def __init__(self, weights: Iterable[SparseWeight], optimizer: Optimizer, dtype: torch.dtype) -> None:
        """Take the weights as they are."""
        self.weights, self.optimizer = list(weights), optimizer
        sizes = [weight.size for weight in self.weights]
        first, rooms = self.weights[0].values, [-(-size // ALIGNED) * ALIGNED for size in sizes]
        self.dense = torch.zeros(sum(rooms), dtype=dtype, device=first.device)
        starts = list(accumulate(rooms[:-1], initial=0))
        self.starts = torch.tensor(starts, device=first.device)
        parts = [room[:size] for room, size in zip(self.dense.split(rooms), sizes, strict=True)]
        self.slots = [Slot(weight, part) for weight, part in zip(self.weights, parts, strict=True)]
        self.capacities: list[int] = []
        self.values = self.momentum = first.new_empty(0)
        self.gradient = self.dense.new_empty(0)
        self.local = self.positions = torch.empty(0, dtype=torch.int64, device=first.device)
        for weight, slot in zip(self.weights, self.slots, strict=True):
            weight.release_gradient()
            weight.slot = slot
        self.take()

    @staticmethod
    def suitable(weights: Iterable[SparseWeight], *, cast: bool) -> list[SparseWeight]:
        """Weights that are trained and, with `cast`, belong to layers that compute in the autocast dtype."""
        return [weight for weight in weights if weight.values.requires_grad and (weight.casts or not cast)]

    @property
    def stale(self) -> bool:
        """Whether connections or values have changed other than by a step."""
        return any(slot.stale for slot in self.slots)

    @torch.no_grad()
    def take(self) -> bool:
        """Take connections, values and momentum as they are now; True if that needed other buffers.

        Buffers stay while every weight fits into its part and at most half of them is tail.
        """
        counts = [weight.nonzero for weight in self.weights]
        renew = not self._fit(counts)
        if renew:
            self._allocate(self._roomy(counts))
        start = 0
        for slot, capacity in zip(self.slots, self.capacities, strict=True):
            part = slice(start, start + capacity)
            if renew or not self._placed(slot, part):
                self._place(slot, part)
            slot.stale = False
            start += capacity
        starts = self.starts.to(self.local.dtype)
        shifts = starts.index_select(0, marks(self.capacities, starts.device))
        torch.add(self.local, shifts, out=self.positions)
        self.dense.zero_()
        self.push()
        return renew

    def _fit(self, counts: Sequence[int]) -> bool:
        if not self.capacities or sum(self.capacities) > 2 * sum(counts):
            return False
        return all(n == c or 0 < n < c for n, c in zip(counts, self.capacities, strict=True))

    def _roomy(self, counts: Sequence[int]) -> list[int]:
        """Capacities with an eighth to spare, as counts will change again; with half, if one was outgrown."""
        if not self.capacities:
            return list(counts)
        spare = [n // 2 if n > c else n // 8 for n, c in zip(counts, self.capacities, strict=True)]
        return [min(n + s, w.size) for n, s, w in zip(counts, spare, self.weights, strict=True)]

    def _allocate(self, capacities: Sequence[int]) -> None:
        self.capacities, total = list(capacities), sum(capacities)
        index = torch.int32 if len(self.dense) < 2**31 else torch.int64
        self.values, self.momentum = self.values.new_zeros(total), self.momentum.new_zeros(total)
        self.gradient = self.gradient.new_zeros(total)
        self.local = torch.zeros(total, dtype=index, device=self.dense.device)
        self.positions = torch.zeros_like(self.local)

    def _placed(self, slot: Slot, part: slice) -> bool:
        """Whether a weight fills its part, and all that belongs to it lies there."""
        weight, momentum = slot.weight, self.optimizer.state[slot.weight.values].get("momentum_buffer")
        own = [(weight.values, self.values), (weight.positions, self.local)]
        if momentum is not None:
            own.append((momentum, self.momentum))
        elif self.optimizer.defaults["momentum"]:
            return False
        full = weight.nonzero == part.stop - part.start
        return full and all(mine.data_ptr() == buffer[part].data_ptr() for mine, buffer in own)

    def _place(self, slot: Slot, part: slice) -> None:
        """Move one weight's values, positions and momentum into its part, and let their owners view it."""
        weight = slot.weight
        parameter, state = weight.values, self.optimizer.state[weight.values]
        shape = parameter.shape
        values = _adopted(self.values[part], parameter.detach().reshape(-1))
        weight.positions = _adopted(self.local[part], weight.positions.to(self.local.dtype))
        buffer = state.get("momentum_buffer")
        if buffer is None and self.optimizer.defaults["momentum"]:
            buffer = torch.zeros_like(parameter)
        if buffer is not None:
            state["momentum_buffer"] = _adopted(self.momentum[part], buffer.reshape(-1)).view(shape)
        parameter.set_(values.view(shape))  # type: ignore[call-overload]
        slot.positions, slot.gradient = self.local[part], self.gradient[part]

    def push(self) -> None:
        """Write the values into the dense tensors."""
        self.dense.scatter_(0, self.positions, self.values.to(self.dense.dtype))

    def begin(self) -> None:
        """Called before a backward pass: its gradients replace the old ones."""
        for slot in self.slots:
            slot.delivered, slot.token.grad = False, None

    def replayed(self) -> None:
        """Called after a captured step is replayed, of which the slots have seen nothing."""
        for slot in self.slots:
            slot.arrived = slot.delivered

    def delivered(self) -> Iterator[slice]:
        """The parts of the buffers whose weights the step has used, neighbours merged: usually one part."""
        parts: list[slice] = []
        start = 0
        for slot, capacity in zip(self.slots, self.capacities, strict=True):
            if slot.delivered and parts and parts[-1].stop == start:
                parts[-1] = slice(parts[-1].start, start + capacity)
            elif slot.delivered:
                parts.append(slice(start, start + capacity))
            start += capacity
        return iter(parts)

    @torch.no_grad()
    def release(self) -> None:
        """Give every weight its own tensors back, and free the keys of their slots for others."""
        for slot in self.slots:
            _slots.pop(slot.key, None)
        for weight in self.weights:
            parameter, state = weight.values, self.optimizer.state[weight.values]
            parameter.set_(parameter.detach().clone())  # type: ignore[call-overload]
            weight.positions = weight.positions.clone()
            if state.get("momentum_buffer") is not None:
                state["momentum_buffer"] = state["momentum_buffer"].clone()
            weight.release_gradient()
            weight.slot = None


def _adopted(part: Tensor, own: Tensor) -> Tensor:
    """Copy `own` to the head of `part`, repeat its first element in the tail; returns the head."""
    if own.data_ptr() != part.data_ptr():
        part[: len(own)] = own
    if len(own) < len(part):
        part[len(own) :] = part[0]
    return part[: len(own)]


@cache
def _kernels() -> ModuleType | None:
    """Triton kernels for a GPU, where Triton is installed."""
    return import_module("suptickets.kernels") if find_spec("triton") else None


def take(gradient: Tensor, positions: Tensor, out: Tensor) -> None:
    """`out = gradient[positions]`."""
    if gradient.is_cuda and (kernels := _kernels()):
        kernels.take(gradient, positions, out)
    else:
        torch.gather(gradient, 0, positions, out=out)


@torch.no_grad()
def sgd(kept: KeptWeights, rate: Tensor, momentum: float, weight_decay: float) -> None:
    """One step of SGD for the values of all weights that were used, written into the dense tensors."""
    for part in kept.delivered():
        values, buffer, gradient = kept.values[part], kept.momentum[part], kept.gradient[part]
        positions = kept.positions[part]
        if values.is_cuda and values.dtype == torch.float32 and (kernels := _kernels()):
            kernels.sgd(values, buffer, gradient, kept.dense, positions, rate, momentum, weight_decay)
        else:
            buffer.mul_(momentum).add_(torch.add(gradient.to(values.dtype), values, alpha=weight_decay))
            values.sub_(rate * buffer)
            kept.dense.scatter_(0, positions, values.to(kept.dense.dtype))
