"""SNIP (Lee et al., ICLR 2019): prune before training, by the sensitivity of the loss."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from itertools import islice
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from suptickets.errors import SparsityError, whole
from suptickets.methods.base import Method
from suptickets.network import SparseNetwork
from suptickets.randomness import fork_random
from suptickets.weight import POSITIONS


@dataclass
class SNIP(Method):
    """The connections with the largest |weight x gradient| of the whole network live, and stay.

    The distribution over layers is its own. A layer may lose all its connections, or all but a few: a warning
    names it.

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
        """Refuse impossible settings."""
        super().__post_init__()
        if self.backward is None and (self.data is None or self.loss is None):
            raise SparsityError("SNIP needs data and loss, or backward (a function that calls backward())")
        if self.data is not None and not isinstance(self.data, Iterable):
            raise SparsityError(
                f"SNIP's data must be batches (x, y), for instance a loader, not {self.data!r}"
            )
        whole("batches", self.batches)

    def begin(self, network: SparseNetwork) -> None:
        """Measure on the dense network, keep the best; all else of the model stays as it was."""
        with _left_alone(network.model):
            network.request_gradient()
            self._backward(network.model)
            total = round((1 - self.sparsity) * network.parameters_total)
            self._refuse(network, total)
            counts = network.global_counts(total, by="sensitivity", at_least=0)
            network.prune(counts, by="sensitivity")
            network.release_gradient()
        _tell(network, counts)

    def _refuse(self, network: SparseNetwork, total: int) -> None:
        """Refuse gradients that cannot be scored, and a total that leaves nothing to choose."""
        if not any(weight.gradient is not None for weight in network.weights.values()):
            raise SparsityError("SNIP got no gradient: give at least one batch, and call backward()")
        unused = [name for name, weight in network.changing.items() if weight.gradient is None]
        if unused:
            raise SparsityError(f"the loss does not use {', '.join(unused)}: exclude what SNIP cannot score")
        if not network.gradients_finite():
            raise SparsityError("SNIP's gradients are not finite: check the data and the loss")
        if total == network.nonzero - sum(weight.nonzero for weight in network.changing.values()):
            raise SparsityError(f"at sparsity {self.sparsity:g} SNIP would have no connection to choose")

    def _backward(self, model: nn.Module) -> None:
        if self.backward is not None:
            self.backward(model)
            return
        assert self.data is not None and self.loss is not None
        device = next(model.parameters()).device
        taken = 0
        for batch in islice(self.data, self.batches):
            if not isinstance(batch, list | tuple) or len(batch) != 2:
                raise SparsityError("SNIP's data must give pairs (x, y); or use backward=")
            x, y = batch
            self.loss(model(x.to(device)), y.to(device)).backward()
            taken += 1
        if 0 < taken < self.batches:
            few = f"SNIP's data gave {taken} of {self.batches} batches"
            warnings.warn(few, RuntimeWarning, stacklevel=2)


def _tell(network: SparseNetwork, counts: Mapping[str, int]) -> None:
    """Warn of layers that have no connection, or too few."""
    empty = [name for name, count in counts.items() if count == 0]
    if empty:
        warnings.warn(f"SNIP left no connection in {', '.join(empty)}", RuntimeWarning, stacklevel=4)
    few = [f"{name} ({count})" for name, count in counts.items() if 0 < count < _width(network, name)]
    if few:
        text = f"SNIP left fewer connections than channels in {', '.join(few)}: little passes through"
        warnings.warn(text, RuntimeWarning, stacklevel=4)


def _width(network: SparseNetwork, name: str) -> int:
    """The channels of a layer, on the side that has fewer."""
    return min(network.weights[name].shape[:2])


@contextmanager
def _left_alone(model: nn.Module) -> Iterator[None]:
    """Put buffers, gradients and the random state back afterwards."""
    buffers = {name: b.clone() for name, b in model.named_buffers() if not name.endswith(POSITIONS)}
    gradients = {parameter: parameter.grad for parameter in model.parameters()}
    try:
        with fork_random(), torch.enable_grad():
            model.zero_grad()
            yield
    finally:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if name in buffers:
                    buffer.copy_(buffers[name])
        for parameter, gradient in gradients.items():
            fits = gradient is not None and gradient.shape == parameter.shape
            parameter.grad = gradient if fits else None
