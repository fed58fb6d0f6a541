"""The module that owns a sparse weight: `store` makes it one, `restore` undoes that.

It keeps its class (`isinstance` holds, by a subclass made on the fly), and its parameter keeps its name and
its place, so that whatever selects parameters by name, by order or by number of dimensions goes on working.
What changes is what they mean:

- `module._parameters["weight"]`, which the optimizer sees, holds the values, shape (n, 1, ..., 1);
- `module.weight` reads as the dense tensor, built anew at every read, differentiable;
- `module.weight_connections` is the `SparseWeight`, with the positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from suptickets.errors import SparsityError
from suptickets.view import as_view
from suptickets.weight import POSITIONS, SUFFIX, SparseWeight


class SparseModule(nn.Module):
    """Mixed into the class of a module that owns sparse weights."""

    _sparse_base: type[nn.Module]
    _sparse_names: tuple[str, ...]

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        """`type(layer)(...)` makes another layer of the original class."""
        base = self._sparse_base
        if "_sparse_base" not in vars(type(self)):
            raise SparsityError(f"inherit from {base.__name__}, not from the class of a layer that is sparse")
        object.__setattr__(self, "__class__", base)
        base.__init__(self, *arguments, **settings)

    def __init_subclass__(cls, **_: Any) -> None:
        """Keep what a user's class does for its subclasses, such as registering them, from seeing ours."""

    def __setattr__(self, name: str, value: Any) -> None:
        """`module.weight = tensor` sets the values of the living connections."""
        if name in self._sparse_names and isinstance(value, Tensor):
            weight = self._modules[name + SUFFIX]
            assert isinstance(weight, SparseWeight)
            weight.assign(value)
        else:
            super().__setattr__(name, value)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Refuse `torch.nn.utils.prune`, which would mask the dense weight, and None in place of it."""
        if name in self._sparse_names and param is None:
            raise SparsityError(f"{name} is stored sparse and cannot be taken away: use network.densify()")
        if name.removesuffix("_orig") in self._sparse_names and not isinstance(param, nn.Parameter):
            raise SparsityError("torch.nn.utils.prune does not work on sparse weights: use network.prune")
        super().register_parameter(name, param)

    def _replicate_for_data_parallel(self) -> Any:
        raise SparsityError("DataParallel is not supported: use DistributedDataParallel")

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Make copying and pickling work, though the class is made on the fly."""
        state: Any = super().__reduce_ex__(protocol)[2]
        if "_flat_weights" in state:  # recurrent layers: dense weights, which must not be copied
            state["_flat_weights"] = [torch.empty(0) for _ in state["_flat_weights"]]
        return _rebuild, (self._sparse_base, self._sparse_names), state

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, metadata: Any, *args: Any) -> None:
        """Make room first; what is loaded is copied, even where torch is asked to assign it."""
        errors: list[str] = args[-1]
        metadata = {**metadata, "assign_to_params_buffers": False}
        for name in self._sparse_names:
            key, weight = prefix + name, self._modules[name + SUFFIX]
            assert isinstance(weight, SparseWeight)
            given = state.get(key), state.get(key + POSITIONS)
            problem = weight.accept(*given) if any(part is not None for part in given) else None
            errors += filter(None, [problem])
        super()._load_from_state_dict(state, prefix, metadata, *args)


def _rebuild(base: type[nn.Module], names: tuple[str, ...]) -> nn.Module:
    cls = _sparse_class(base, names)
    module: nn.Module = cls.__new__(cls)
    return module


_classes: dict[Any, Any] = {}


def _sparse_class(base: type[nn.Module], names: tuple[str, ...]) -> Any:
    """A subclass of `base` whose named parameters read as dense tensors; made once."""
    key = (base, names)
    if key not in _classes:
        attributes: dict[str, Any] = {name: _dense_property(name) for name in names}
        attributes |= {"_sparse_base": base, "_sparse_names": names, "__doc__": base.__doc__}
        _classes[key] = type(f"Sparse{base.__name__}", (SparseModule, base), attributes)
    return _classes[key]


def _dense_property(name: str) -> property:
    connections = name + SUFFIX

    def read(module: nn.Module) -> Tensor:
        weight = module._modules[connections]
        assert weight is not None
        dense: Tensor = weight(module._parameters[name])
        return dense if torch.compiler.is_compiling() else as_view(dense)

    return property(read)


@torch.no_grad()
def store(name: str, owners: Sequence[tuple[nn.Module, str]]) -> SparseWeight:
    """Turn the dense parameter that `owners` share into a sparse weight with all connections alive.

    The parameter object stays the same, so that an optimizer that holds it need not be told.
    """
    module, attribute = owners[0]
    parameter = module._parameters[attribute]
    assert parameter is not None
    weight = SparseWeight(name, parameter, owners)
    _replace(parameter, parameter.detach().reshape(weight.size, *[1] * (parameter.dim() - 1)).clone())
    for module, attribute in owners:
        names = (*getattr(module, "_sparse_names", ()), attribute)
        base = module._sparse_base if isinstance(module, SparseModule) else type(module)
        module.add_module(attribute + SUFFIX, weight)
        module.__class__ = _sparse_class(base, names)
        if isinstance(module, nn.RNNBase) and len(names) == 1:
            module.register_forward_hook(_drop_flat_weights)
    return weight


@torch.no_grad()
def restore(weight: SparseWeight, dense: Tensor | None = None) -> None:
    """Undo `store`: the owners get their class back, the parameter object its dense shape."""
    parameter = weight.values
    dense = weight.build(parameter.detach(), parameter.dtype) if dense is None else dense
    _replace(parameter, dense)
    for module, attribute in weight.owners:
        assert isinstance(module, SparseModule)
        base, names = module._sparse_base, tuple(n for n in module._sparse_names if n != attribute)
        module.__class__ = _sparse_class(base, names) if names else base  # type: ignore[assignment]
        module._modules.pop(attribute + SUFFIX)
        if isinstance(module, nn.RNNBase) and not names:
            for key in [key for key, hook in module._forward_hooks.items() if hook is _drop_flat_weights]:
                del module._forward_hooks[key]
            module._init_flat_weights()


def _drop_flat_weights(module: nn.RNNBase, *_: object) -> None:
    """Recurrent layers keep the dense weights of their last pass; empty stand-ins make them read anew."""
    module._flat_weights = [torch.empty(0) for _ in module._flat_weights_names]


def _replace(parameter: nn.Parameter, tensor: Tensor) -> None:
    """Give a parameter another tensor; its gradient stays, reshaped, only if it has as many elements."""
    gradient, parameter.grad = parameter.grad, None
    parameter.set_(tensor)  # type: ignore[call-overload]
    if gradient is not None and gradient.numel() == tensor.numel():
        parameter.grad = gradient.reshape(tensor.shape)
