"""SNIP (Lee et al., ICLR 2019): prune before training, by the sensitivity of the loss."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass
from itertools import islice
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from suptickets.errors import SparsityError
from suptickets.methods.base import Method
from suptickets.network import SparseNetwork


@dataclass
class SNIP(Method):
    """The connections with the largest |weight x gradient| of the whole network live; they stay.

    The distribution is the method's own. A layer may lose all its connections: a warning names it.

    Args:
        sparsity: the fraction of the connections that are not alive, in total.
        data: batches (x, y) to measure the sensitivity on, for instance a loader.
        loss: `loss(model(x), y)`.
        batches: how many batches to take; their gradients add up.
        backward: instead of data and loss, a function that is given the model and calls `backward()`.
    """

    name: ClassVar[str] = "snip"
    summary: ClassVar[str] = "pruned before training by |weight x gradient|, then static"

    _: KW_ONLY
    data: Iterable[Any] | None = None
    loss: Callable[[Any, Any], Tensor] | None = None
    batches: int = 1
    backward: Callable[[nn.Module], None] | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        super().__post_init__()
        if self.backward is None and (self.data is None or self.loss is None):
            raise SparsityError("SNIP needs data and loss, or backward (a function that calls backward())")

    def begin(self, network: SparseNetwork) -> None:
        """Measure on the dense network, keep the best; buffers and random state stay as they were."""
        model = network.model
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
        network.request_gradient()
        with torch.random.fork_rng(devices=sorted(devices, key=str)), torch.enable_grad():
            self._backward(model)
        total = round((1 - self.sparsity) * network.parameters_total)
        if not network.gradients_ready():
            raise SparsityError("SNIP's gradients are not finite: check the data and the loss")
        counts = network.global_counts(total, by="sensitivity", at_least=0)
        network.prune(counts, by="sensitivity")
        network.release_gradient()
        model.zero_grad()
        for name, buffer in model.named_buffers():
            if buffer.shape == buffers[name].shape and not name.endswith("positions"):
                buffer.copy_(buffers[name])
        empty = [name for name, count in counts.items() if count == 0]
        if empty:
            warnings.warn(f"SNIP left no connection in {', '.join(empty)}", RuntimeWarning, stacklevel=3)

    def _backward(self, model: nn.Module) -> None:
        if self.backward is not None:
            self.backward(model)
            return
        assert self.data is not None and self.loss is not None
        device = next(model.parameters()).device
        for x, y in islice(self.data, self.batches):
            self.loss(model(x.to(device)), y.to(device)).backward()
