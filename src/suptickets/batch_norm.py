"""Recompute batch-norm statistics by a pass over data (the paper's BU)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from suptickets.errors import SparsityError
from suptickets.randomness import fork_random


def batch_norms(model: nn.Module) -> list[nn.modules.batchnorm._BatchNorm]:
    """The batch-norm layers of a model."""
    return [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]


@torch.no_grad()
def recompute(model: nn.Module, loader: Iterable[Any]) -> None:
    """Set the statistics to their mean over `loader`, each batch weighted by its size.

    `loader` yields inputs, tuples that begin with them, or the model's arguments by name; an empty batch
    counts for nothing. Modes, all other buffers and the global random state stay as they were; if a batch is
    refused, so do the statistics.
    """
    if not isinstance(loader, Iterable):
        raise SparsityError(f"the loader must give batches of inputs, but is a {type(loader).__name__}")
    total, device = 0, next(model.parameters()).device
    with _weighing(model) as weigh, fork_random():
        for batch in loader:
            inputs, named = _inputs(model, batch)
            size = len(next(iter((*inputs, *named.values()))))
            total += size
            if size:
                weigh(size)
                model(*(x.to(device) for x in inputs), **{k: x.to(device) for k, x in named.items()})
    if total == 0:
        raise SparsityError(
            "the loader gave no batch of inputs to recompute batch-norm statistics with: give training data"
        )


@contextmanager
def _weighing(model: nn.Module) -> Iterator[Callable[[int], None]]:
    """Let batch norms keep running means over all calls; gives a function that tells the size of the next."""
    layers = batch_norms(model)
    momenta, others = {layer: layer.momentum for layer in layers}, list(_others(model))
    modes = {module: module.training for module in model.modules()}
    held = (one for layer in layers for one in (layer.running_mean, layer.running_var) if one is not None)
    known = [(one, one.clone()) for one in held]
    size, seen = 0, dict.fromkeys(layers, 0)

    def tell(batch: int) -> None:
        nonlocal size
        size = batch

    def weigh(layer: nn.Module, _: Any) -> None:
        """Weigh the call by its size (a pass may have several calls): (1 - m) old + m new."""
        seen[layer] += size  # type: ignore[index]
        layer.momentum = size / seen[layer]  # type: ignore[index,assignment]

    hooks = [layer.register_forward_pre_hook(weigh) for layer in layers]
    try:
        model.train()
        yield tell
    except BaseException:
        for one, before in known:
            one.copy_(before)
        raise
    finally:
        for hook in hooks:
            hook.remove()
        for module, training in modes.items():
            module.training = training
        for layer, momentum in momenta.items():
            layer.momentum = momentum
        for other in others:
            _restore(*other)


def _inputs(model: nn.Module, batch: Any) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The arguments of the model in a batch, by place or by name."""
    if isinstance(batch, Mapping):
        sizes = {len(x) if isinstance(x, Tensor) and x.dim() else None for x in batch.values()}
        if len(sizes) != 1 or None in sizes:
            raise SparsityError("the loader's dicts must have tensors alone, all of as many samples")
        try:
            inspect.signature(model.forward).bind(**batch)
        except TypeError as error:
            raise SparsityError(f"the loader's dicts do not fit the model's forward(): {error}") from error
        return [], {**batch}
    x = batch[0] if isinstance(batch, list | tuple) and len(batch) else batch
    if isinstance(x, Tensor) and x.dim():
        return [x], {}
    given = "a scalar" if isinstance(x, Tensor) else type(x).__name__
    raise SparsityError(f"the loader must give tensors, or tuples or dicts of tensors, not {given}")


def _others(model: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor, Tensor]]:
    """Each buffer that shares nothing with the statistics of batch norm: module, name, itself, a copy."""
    norms = [(layer, name) for layer in batch_norms(model) for name in ("running_mean", "running_var")]
    statistics = {_memory(layer._buffers.get(name)) for layer, name in norms} - {None}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and _memory(buffer) not in statistics:
                yield module, name, buffer, buffer.clone()


def _restore(module: nn.Module, name: str, buffer: Tensor, before: Tensor) -> None:
    """Undo what a pass did to a buffer; one of another size may be a cache that has grown, and stays."""
    now = module._buffers.get(name)
    if now is None or now.shape != before.shape:
        return
    module._buffers[name] = buffer
    if buffer.layout is not torch.strided or not torch.equal(buffer, before):
        buffer.copy_(before)


def _memory(buffer: Tensor | None) -> int | None:
    """Where the memory of a tensor begins; views of one another have the same."""
    return (
        None if buffer is None or buffer.layout is not torch.strided else buffer.untyped_storage().data_ptr()
    )
