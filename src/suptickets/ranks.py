"""Several processes: all ranks hold the same connections and the same values.

Sparse values stay out of DistributedDataParallel's buckets, which break when a parameter is resized. They are
averaged over ranks as soon as their gradient is complete, before anybody clips it, unless the wrapper is
inside `no_sync`. What travels in a step is one number per living connection.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.nn.parallel import DistributedDataParallel

from suptickets.errors import SparsityError
from suptickets.gradient import when_complete
from suptickets.weight import POSITIONS, SparseWeight

_IGNORED = "_ddp_params_and_buffers_to_ignore"  # where DistributedDataParallel looks for names


class Ranks:
    """The other processes, known from the first forward pass inside DistributedDataParallel on."""

    def __init__(self, model: nn.Module, weights: Iterable[SparseWeight]) -> None:
        """Ask DistributedDataParallel to leave the sparse weights to us."""
        self.ddp: DistributedDataParallel | None = None
        self.weights = list(weights)
        self._pending: dict[int, list[tuple[Tensor, Any]]] = {}  # by the backward pass: they may be nested
        ignored = set(self._names(model))
        ignored |= {b for b, _ in model.named_buffers(remove_duplicate=False) if b.endswith(POSITIONS)}
        compiled = {f"_orig_mod.{name}" for name in ignored}  # what torch.compile(model) calls them
        setattr(model, _IGNORED, _Ignored({*ignored, *compiled}, getattr(model, _IGNORED, ())))
        self._hooks = [self._watch(weight.values) for weight in self.weights]

    def _watch(self, parameter: nn.Parameter) -> Any:
        """Average the gradients of a parameter, even if it is frozen now: it may be trained later."""
        trained = parameter.requires_grad
        hook = when_complete(parameter.requires_grad_(), self._average_in_backward)
        parameter.requires_grad_(trained)
        return hook

    def leave(self, model: nn.Module) -> None:
        """Undo what `__init__` did."""
        forget(model)
        for hook in self._hooks:
            hook.remove()

    def _names(self, model: nn.Module) -> list[str]:
        """The names of the sparse weights in this model."""
        ours = {id(weight.values) for weight in self.weights}
        return [name for name, p in model.named_parameters(remove_duplicate=False) if id(p) in ours]

    @property
    def active(self) -> bool:
        """Whether there are other ranks to agree with."""
        return self.ddp is not None and dist.get_world_size(self.ddp.process_group) > 1

    @property
    def apart(self) -> bool:
        """Whether there are other processes, and no wrapper connects us with them."""
        return (
            self.ddp is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        )

    @_disable_dynamo  # imports dynamo only when it is called
    def meet(self, generator: torch.Generator, step: int) -> bool:
        """Called in a forward pass: find the wrapper, and take over what rank 0 has, as the wrapper does.

        Gives whether something was taken over.
        """
        self._pending.clear()  # left by a backward pass that failed
        ddp = DistributedDataParallel._active_ddp_module
        if ddp is not None and ddp._join_config.enable and self.weights:
            raise SparsityError("join() is not supported: give every rank as many batches")
        if ddp is None or ddp is self.ddp:
            return False
        if not set(self._names(ddp.module)) <= set(ddp.parameters_to_ignore):
            raise SparsityError(
                "DistributedDataParallel must wrap the sparse model itself: call sparsify(model) first, then "
                "DistributedDataParallel(model)"
            )
        if ddp.find_unused_parameters and self.weights:
            raise SparsityError(
                "find_unused_parameters=True is not supported: every rank must use every sparse layer"
            )
        self.ddp = ddp
        if not self.active or not self.weights:
            return False
        if int(self._broadcast(torch.tensor(step, device=self._device))) != step:
            raise SparsityError("the ranks are at different steps: load the checkpoint on every rank")
        self._follow_rank_0(generator)
        return True

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
        backward = torch._C._current_graph_task_id()
        if backward not in self._pending:
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._wait, backward))
        work = dist.all_reduce(parameter.grad, group=self.ddp.process_group, async_op=True)
        self._pending.setdefault(backward, []).append((parameter.grad, work))

    @torch.no_grad()
    def _wait(self, backward: int) -> None:
        assert self.ddp is not None
        for gradient, work in self._pending.pop(backward, ()):
            work.wait()
            gradient.div_(dist.get_world_size(self.ddp.process_group))

    @torch.no_grad()
    def average(self, tensors: Iterable[Tensor]) -> None:
        """Average over ranks, in place."""
        if not self.active:
            return
        assert self.ddp is not None
        group = self.ddp.process_group
        for tensor in tensors:
            dist.all_reduce(tensor.div_(dist.get_world_size(group)), group=group)

    @torch.no_grad()
    def of_rank_0(self, tensor: Tensor) -> Tensor:
        """What rank 0 has in the place of `tensor`, which is not changed."""
        return self._broadcast(tensor.clone()) if self.active else tensor

    def agree(self) -> bool:
        """Whether all ranks hold the same connections and values, bit for bit."""
        if not self.active or not self.weights:
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


class _Ignored(list[str]):
    """Names for DistributedDataParallel; a copy of the model has no network, so it keeps only the user's."""

    def __init__(self, ours: Iterable[str], users: Iterable[str]) -> None:
        self.users = list(users)
        super().__init__([*ours, *self.users])

    def __deepcopy__(self, memo: dict[int, Any]) -> list[str]:
        return list(self.users)

    def __reduce__(self) -> Any:
        return list, (self.users,)


def forget(model: nn.Module) -> None:
    """Remove what `Ranks` left on a model."""
    ignored = model.__dict__.pop(_IGNORED, None)
    users = ignored.users if isinstance(ignored, _Ignored) else ignored
    if users:
        setattr(model, _IGNORED, users)
