"""Several processes: all ranks hold the same connections and the same values.

Sparse values stay out of DistributedDataParallel's buckets, which break when a parameter is resized. They are
averaged over ranks as soon as their gradient is complete, before anybody clips it, unless the wrapper is
inside `no_sync`. What travels in a step is one number per living connection.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from suptickets.errors import SparsityError
from suptickets.weight import SUFFIX, SparseWeight

_IGNORED = "_ddp_params_and_buffers_to_ignore"  # where DistributedDataParallel looks for it


class Ranks:
    """The other processes, from the first forward pass inside DistributedDataParallel on."""

    def __init__(self, model: nn.Module, weights: Iterable[SparseWeight]) -> None:
        """Ask DistributedDataParallel to leave the sparse weights to us."""
        self.ddp: DistributedDataParallel | None = None
        self.weights = list(weights)
        self._pending: list[Any] = []
        ignored = {p for p, v in model.named_parameters(remove_duplicate=False) if self._ours(v)}
        ignored |= {
            b for b, _ in model.named_buffers(remove_duplicate=False) if b.endswith(f"{SUFFIX}.positions")
        }
        setattr(model, _IGNORED, sorted({*ignored, *getattr(model, _IGNORED, [])}))
        for weight in self.weights:
            if weight.values.requires_grad:
                weight.values.register_post_accumulate_grad_hook(self._average_in_backward)

    def _ours(self, parameter: Tensor) -> bool:
        return any(parameter is weight.values for weight in self.weights)

    @property
    def active(self) -> bool:
        """Whether there are other ranks to agree with."""
        return self.ddp is not None and dist.get_world_size(self.ddp.process_group) > 1

    def meet(self, generator: torch.Generator) -> None:
        """In a forward pass: find the wrapper, and take over what rank 0 has, as the wrapper does."""
        ddp = DistributedDataParallel._active_ddp_module
        if ddp is None or ddp is self.ddp:
            return
        names = [name for name, p in ddp.module.named_parameters() if self._ours(p)]
        if not set(names) <= set(ddp.parameters_to_ignore):
            raise SparsityError(
                "DistributedDataParallel must wrap the sparse model itself: call sparsify(model) first, then "
                "DistributedDataParallel(model)"
            )
        self.ddp = ddp
        if self.active:
            self._follow_rank_0(generator)

    @torch.no_grad()
    def _follow_rank_0(self, generator: torch.Generator) -> None:
        state = generator.get_state()
        generator.set_state(self._broadcast(state.to(self._device)).cpu())
        for weight in self.weights:
            count = int(self._broadcast(torch.tensor(weight.nonzero, device=self._device)))
            mine = weight.nonzero == count
            rows = weight.rows().clone() if mine else weight.positions.new_empty(count)
            values = weight.values.detach().clone() if mine else weight.values.new_empty(count)
            weight.connect(self._broadcast(rows), self._broadcast(values.reshape(-1)))

    @property
    def _device(self) -> torch.device:
        return self.weights[0].positions.device

    def _broadcast(self, tensor: Tensor) -> Tensor:
        assert self.ddp is not None
        dist.broadcast(
            tensor, src=dist.get_global_rank(self.ddp.process_group, 0), group=self.ddp.process_group
        )
        return tensor

    def _average_in_backward(self, parameter: Tensor) -> None:
        """Start the averaging of one gradient; the end of the backward pass waits for all of them."""
        if not self.active or not self.ddp.require_backward_grad_sync:  # type: ignore[union-attr]
            return
        assert self.ddp is not None and parameter.grad is not None
        if not self._pending:
            torch.autograd.Variable._execution_engine.queue_callback(self._wait)
        group = self.ddp.process_group
        parameter.grad.div_(dist.get_world_size(group))
        self._pending.append(dist.all_reduce(parameter.grad, group=group, async_op=True))

    def _wait(self) -> None:
        for work in self._pending:
            work.wait()
        self._pending.clear()

    @torch.no_grad()
    def average(self, tensors: Iterable[Tensor]) -> None:
        """Average over ranks, in place."""
        if not self.active:
            return
        assert self.ddp is not None
        group = self.ddp.process_group
        for tensor in tensors:
            dist.all_reduce(tensor.div_(dist.get_world_size(group)), group=group)

    def agree(self) -> bool:
        """Whether all ranks hold the same connections and values, bit for bit."""
        if not self.active:
            return True
        assert self.ddp is not None
        digest = hashlib.sha256()
        for weight in self.weights:
            for tensor in (weight.rows(), weight.values):
                digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        mine = torch.tensor(list(digest.digest()), dtype=torch.uint8, device=self._device)
        theirs = [torch.empty_like(mine) for _ in range(dist.get_world_size(self.ddp.process_group))]
        dist.all_gather(theirs, mine, group=self.ddp.process_group)
        return all(bool((other == mine).all()) for other in theirs)


def forget(model: nn.Module) -> None:
    """Remove what `Ranks` left on a model."""
    if hasattr(model, _IGNORED):
        delattr(model, _IGNORED)
