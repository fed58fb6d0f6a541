"""FLOPs of a forward pass, dense and by living connections.

Convolutions and matrix products count, 2 per multiply-add, by the formulas of `torch.utils.flop_counter`. An
operation with a sparse weight costs the share of its connections that live. The numbers are no measure of
time, and nothing but these operations is counted (no batch norm, pooling, activations).
"""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from suptickets.errors import SparsityError, reason
from suptickets.plain import densified
from suptickets.randomness import fork_random
from suptickets.weight import SparseWeight

_COPIES = (torch.ops.aten._to_copy, torch.ops.aten.clone)  # a weight that autocast has cast is that weight
FORMULAS = {
    **flop_registry,
    torch.ops.aten.mv: lambda matrix, vector, **_: 2 * matrix.numel(),
    torch.ops.aten.addmv: lambda added, matrix, vector, **_: 2 * matrix.numel(),
    torch.ops.aten.dot: lambda one, other, **_: 2 * one.numel(),
    torch.ops.aten._trilinear: lambda x, weight, *_, **__: 2 * len(x) * weight.numel(),  # nn.Bilinear
}


@dataclass(frozen=True)
class LayerFlops:
    """FLOPs of the operations with one weight."""

    dense: int
    sparse: int


@dataclass(frozen=True)
class Flops:
    """FLOPs of one forward pass: `dense` if all connections lived, `sparse` for the living ones.

    `layers` has every weight of two or more dimensions; one that the pass does not use costs nothing.
    """

    dense: int
    sparse: int
    layers: Mapping[str, LayerFlops]

    @property
    def ratio(self) -> float:
        """Sparse over dense."""
        return self.sparse / self.dense if self.dense else 1.0

    def living(self, shares: Mapping[str, float]) -> Flops:
        """The same pass, with these `shares` of the layers' connections alive."""
        known = {n: layer for n, layer in self.layers.items() if n in shares}
        changed = {n: LayerFlops(layer.dense, round(layer.dense * shares[n])) for n, layer in known.items()}
        more = sum(changed[n].sparse - layer.sparse for n, layer in known.items())
        return Flops(self.dense, self.sparse + more, {**self.layers, **changed})


class _Counter(TorchDispatchMode):
    """Counts every operation that has a formula, and finds the weight in it by its storage."""

    def __init__(self, weights: dict[int, tuple[str, float]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.weights = weights
        self.copies: list[Tensor] = []
        self.dense: dict[str, int] = defaultdict(int)
        self.sparse: dict[str, float] = defaultdict(float)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        formula = FORMULAS.get(func.overloadpacket)
        if formula is None and func._can_decompose():
            with self:
                decomposed = func.decompose(*args, **kwargs)
            if decomposed is not NotImplemented:
                return decomposed
        out = func(*args, **kwargs)
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        keys = [_storage(t) for t in tensors]
        found = next((self.weights[k] for k in keys if k in self.weights), None)
        if found is not None and func.overloadpacket in _COPIES:
            self.weights[_storage(out)] = found
            self.copies.append(out)  # kept alive, so that no other tensor gets its place
        if formula is not None:
            name, density = found or ("", 1.0)
            count = formula(*args, **kwargs, out_val=out)
            self.dense[name] += count
            self.sparse[name] += count * density
        return out


def flops(model: nn.Module, example_input: Any) -> Flops:
    """FLOPs of `model(example_input)`; divide by the batch size for those of one sample.

    `model` may be sparsified (living connections count) or plain (non-zero weights count); a copy of it is
    run, in evaluation mode, and it is not changed. A tuple is taken as several inputs.
    """
    if not isinstance(model, nn.Module):
        raise SparsityError(f"expected a torch.nn.Module, not {type(model).__name__}")
    plain = densified(model).eval()
    living = {w.name: w.density for w in model.modules() if isinstance(w, SparseWeight)}
    found: dict[str, tuple[str, float]] = {}
    first: dict[int, str] = {}  # the first name of each weight, which may be tied
    for name, parameter in plain.named_parameters(remove_duplicate=False):
        if parameter.dim() >= 2:
            layer = first.setdefault(id(parameter), name.removesuffix(".weight"))
            nonzero = float((parameter != 0).double().mean()) if layer not in living else living[layer]
            found[name] = (layer, nonzero)
    inputs = example_input if isinstance(example_input, tuple) else (example_input,)
    try:  # shapes are enough, unless the model looks at values
        counter = _count(copy.deepcopy(plain).to("meta"), found, tree_map_only(Tensor, _meta, inputs))
    except Exception:
        counter = _count(plain, found, copy.deepcopy(inputs))
    names = dict.fromkeys([*filter(None, counter.dense), *first.values()])  # as they run; then the unused
    layers = {n: LayerFlops(counter.dense.get(n, 0), round(counter.sparse.get(n, 0.0))) for n in names}
    return Flops(sum(counter.dense.values()), round(sum(counter.sparse.values())), layers)


def _count(model: nn.Module, found: Mapping[str, tuple[str, float]], inputs: Any) -> _Counter:
    """Run the model once, with `found` (layer, density) of each parameter by name."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    counter = _Counter({_storage(parameters[name]): value for name, value in found.items()})
    try:
        with torch.no_grad(), fork_random(), _plain_kernels(), counter:
            model(*inputs)
    except NotImplementedError as error:
        if _Counter.__name__ not in str(error):
            raise
        raise SparsityError(f"an operation of the model cannot be counted: {reason(error)}") from error
    return counter


def _storage(tensor: Tensor) -> int:
    """A number that is equal for tensors that share memory, on the meta device too."""
    return int(tensor.untyped_storage()._cdata)


def _meta(tensor: Tensor) -> Tensor:
    return tensor.to("meta")


@contextmanager
def _plain_kernels() -> Iterator[None]:
    """Keep recurrent and attention layers from running as one kernel that no formula knows."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with warnings.catch_warnings(), sdpa_kernel(SDPBackend.MATH):
            warnings.simplefilter("ignore")  # from the flags, about TF32 on other devices
            with torch.backends.mkldnn.flags(enabled=False), torch.backends.cudnn.flags(enabled=False):
                yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
