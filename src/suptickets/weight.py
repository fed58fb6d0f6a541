"""One sparse weight: the values of its living connections, their positions, dense on demand.

A module that owns a sparse weight keeps its class (`isinstance` holds, by a subclass made on the fly) and
its parameter keeps its name and its place, so that whatever selects parameters by name, by order or by
number of dimensions goes on working. What changes is what they mean:

- `module._parameters["weight"]`, which the optimizer sees, holds the values, shape (n, 1, ..., 1);
- `module.weight` reads as the dense tensor, built anew at every read, differentiable;
- `module.weight_connections` is the `SparseWeight` below, with the positions.

Connections are ordered by their row-major index, whatever the memory layout: the order of the values, and
of the optimizer's state, is the same for a contiguous and a channels_last weight, so files and checkpoints
do not depend on the layout. Positions are addresses in memory order: one fill and one scatter build the
dense tensor in the layout that the convolution wants.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from suptickets.errors import SparsityError
from suptickets.gradient import DenseGradient
from suptickets.layers import casts
from suptickets.layout import in_order, memory_order, remap
from suptickets.view import as_view

if TYPE_CHECKING:
    from suptickets.kept import Slot

SUFFIX = "_connections"
POSITIONS = f"{SUFFIX}.positions"  # what a state dict calls them


class SparseWeight(nn.Module):
    """The living connections of one weight, shared by all modules that own it."""

    positions: Tensor

    def __init__(self, name: str, dense: Tensor, owners: Sequence[tuple[nn.Module, str]]) -> None:
        """All connections of `dense` are alive at first; `store` moves the values into the parameter."""
        super().__init__()
        self.name = name
        self.shape = dense.shape
        self.size = dense.numel()
        self.owners = list(owners)
        self.order = memory_order(dense)
        self.casts = all(casts(module) for module, _ in owners)
        self.canvas: Tensor | None = None
        self.collector: DenseGradient | Slot | None = None
        self.slot: Slot | None = None
        self.momentum: Tensor | None = None
        self.moved = False  # whether loading has moved connections since the network last looked
        dtype = torch.int32 if self.size < 2**31 else torch.int64
        rows = torch.arange(self.size, device=dense.device)
        self.register_buffer("positions", self.addresses(rows).to(dtype))

    @property
    def values(self) -> nn.Parameter:
        """The parameter that the optimizer sees: the value of each living connection, in row-major order."""
        module, attribute = self.owners[0]
        parameter = module._parameters[attribute]
        assert parameter is not None
        return parameter

    @property
    def nonzero(self) -> int:
        """Number of living connections (one may hold the value 0: a newly grown one does)."""
        return self.values.shape[0]

    @property
    def density(self) -> float:
        """Share of the connections that are alive."""
        return self.nonzero / self.size

    @property
    def sparsity(self) -> float:
        """One minus the density."""
        return 1 - self.density

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        return f"shape={tuple(self.shape)}, nonzero={self.nonzero}, sparsity={self.sparsity:.4f}"

    # ---- the dense tensor, and the gradient of all its positions ----

    def forward(self, values: Tensor) -> Tensor:
        """The dense weight, in the dtype that autocast would ask for.

        With a canvas (`request_gradient`) the dense tensor is a sum, so that the canvas, a leaf that is all
        zeros, collects the gradient of every position, over as many backward passes as there are.
        """
        if self.slot is not None:
            return self.unflatten(self.slot.read())
        if len(values) != len(self.positions):
            raise SparsityError(
                f"{self.name} has {len(self.positions)} connections, but was given {len(values)} values: "
                "give as many, of the same connections; dense weights belong into network.densify()"
            )
        dtype = self._dtype(values)
        if self.canvas is None:
            return self.build(values, dtype)
        flat = self.canvas.to(values).scatter_add(0, self.positions, values.reshape(-1))
        return self.unflatten(flat.to(dtype))

    def build(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """`values` at the living positions, zeros elsewhere: one fill and one scatter."""
        flat = torch.zeros(self.size, dtype=dtype, device=values.device)
        return self.unflatten(flat.scatter_(0, self.positions, values.reshape(-1).to(dtype)))

    def _dtype(self, values: Tensor) -> torch.dtype:
        kind = values.device.type
        if self.casts and values.dtype != torch.float64 and torch.is_autocast_enabled(kind):
            return torch.get_autocast_dtype(kind)
        return values.dtype

    def request_gradient(self) -> None:
        """Collect the gradient of all positions from now on, until `release_gradient`."""
        if self.slot is not None:
            self.collector = self.slot.collect()
        elif self.collector is None and self.values.requires_grad:
            collector = DenseGradient(self.values, self.size)
            self.collector, self.canvas = collector, collector.canvas

    def release_gradient(self) -> None:
        """Forget the gradient of all positions and stop collecting it."""
        if self.collector is not None:
            self.collector.close()
            self.collector = None
            self.canvas = None

    @property
    def gradient(self) -> Tensor | None:
        """The gradient of all positions (flat, in memory order) since it was requested, if there is one."""
        return None if self.collector is None else self.collector.total

    # ---- positions: addresses in memory, rows in row-major order ----

    def unflatten(self, flat: Tensor) -> Tensor:
        """A flat tensor in memory order, viewed with the weight's shape."""
        if self._row_major:
            return flat.view(self.shape)
        return flat.view([self.shape[d] for d in self.order]).permute(self._inverse)

    def flatten(self, dense: Tensor) -> Tensor:
        """A tensor of the weight's shape, flat in memory order."""
        return dense.permute(self.order).reshape(-1)

    def addresses(self, rows: Tensor) -> Tensor:
        """Row-major indices as addresses in memory order."""
        return rows if self._row_major else remap(rows, self.shape, self.order)

    def rows(self, addresses: Tensor | None = None) -> Tensor:
        """Addresses in memory order as row-major indices; by default those of the living ones, sorted."""
        addresses = self.positions if addresses is None else addresses
        if self._row_major:
            return addresses
        return remap(addresses, [self.shape[d] for d in self.order], self._inverse)

    @property
    def _inverse(self) -> list[int]:
        return [self.order.index(d) for d in range(len(self.order))]

    @property
    def _row_major(self) -> bool:
        return self.order == tuple(range(len(self.shape)))

    def connect(self, rows: Tensor, values: Tensor) -> None:
        """Let the connections at the sorted `rows` live, with these `values`."""
        self.place(values, self.addresses(rows))

    @torch.no_grad()
    def place(self, values: Tensor, positions: Tensor) -> None:
        """Let the connections at `positions`, in the order of their rows, live with these `values`.

        While their number stays, contents change in place (so nothing is compiled or captured again);
        otherwise `set_` replaces the storage, which autograd allows while an old loss is alive.
        """
        parameter, positions = self.values, positions.to(self.positions)
        values = values.reshape(len(positions), *[1] * (len(self.shape) - 1))
        if len(positions) == self.nonzero:
            parameter.copy_(values)
            self.positions.copy_(positions)
        else:
            parameter.set_(values.to(parameter, copy=True))  # type: ignore[call-overload]
            self.positions = positions.clone()
        self.touched()

    @torch.no_grad()
    def assign(self, dense: Tensor) -> None:
        """Take the values of the living connections from a dense tensor."""
        if dense.shape != self.shape:
            raise SparsityError(f"{self.name} has the shape {tuple(self.shape)}, not {tuple(dense.shape)}")
        living = dense.detach().reshape(-1)[self.rows().long()]
        self.values.copy_(living.reshape(self.values.shape))
        self.touched()

    def touched(self) -> None:
        """Tell the slot, if there is one, that values or positions have changed other than by a step."""
        if self.slot is not None:
            self.slot.stale = True

    # ---- what torch.nn.Module does with modules ----

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SparseWeight:
        """Follow `.to(memory_format=...)`: read off a probe what `fn` does to the layout."""
        positions = self.positions
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if not positions.is_meta:  # they only move: `.type(torch.half)` would round them
            self.positions = positions.to(self.positions.device)
        probe = torch.empty([2] * len(self.shape), dtype=self.values.dtype, device=self.positions.device)
        order = memory_order(fn(probe.permute(self._inverse)))
        rows, momentum = self.rows(), None if self.momentum is None else self.unflatten(fn(self.momentum))
        self.order = order
        self.positions = self.addresses(rows).to(self.positions.dtype)
        self.momentum = None if momentum is None else self.flatten(momentum)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> SparseWeight:
        """A copy with connections of its own."""
        _refuse_averaged_model()
        twin = SparseWeight.__new__(SparseWeight)
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__getstate__(), memo))
        return twin

    def __getstate__(self) -> dict[str, Any]:
        """The request for a gradient stays with the original."""
        return {**self.__dict__, "canvas": None, "collector": None, "slot": None}

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Saved positions are row-major and sorted, whatever the memory layout."""
        destination[prefix + "positions"] = self.rows().detach()

    def _load_from_state_dict(self, state: Mapping[str, Any], prefix: str, *args: Any) -> None:
        """Load positions; the owner has checked them and made room (`accept`) before this is called."""
        rows, (_, strict, missing, *_) = state.get(prefix + "positions"), args
        missing += [prefix + "positions"] if rows is None and strict else []
        if isinstance(rows, Tensor) and len(rows) == self.nonzero:
            self.positions.copy_(self.addresses(rows.to(self.positions.device)))
        self.touched()

    def accept(self, values: Tensor | None, rows: Tensor | None) -> str | None:
        """Make room for saved `values` at saved `rows`; says what is wrong with them, if anything is."""
        problem = self.problem(values, rows)
        if problem is not None or values is None or rows is None:
            return problem
        self.moved |= len(rows) != self.nonzero or not torch.equal(rows.to(self.rows()), self.rows())
        if len(values) != self.nonzero:
            parameter = self.values
            with torch.no_grad():
                parameter.set_(parameter.new_zeros(values.shape))  # type: ignore[call-overload]
            self.positions = self.positions.new_zeros(len(values))
        return None

    def problem(self, values: Tensor | None, rows: Tensor | None) -> str | None:
        """What keeps `values` at `rows` from being connections of this weight, if anything does."""
        if not isinstance(values, Tensor):
            return f"{self.name}: the state has no values for it"
        if not isinstance(rows, Tensor):
            return f"{self.name}: the state has no positions, so it is not that of a sparse network"
        whole = rows.dim() == 1 and not rows.is_floating_point()
        if not whole or values.shape != (len(rows), *[1] * (len(self.shape) - 1)):
            return f"{self.name}: {tuple(values.shape)} values do not fit {tuple(rows.shape)} positions"
        if not in_order(rows, self.size):
            return f"{self.name}: the positions are not sorted, not unique, or not below {self.size}"
        return None


def _refuse_averaged_model() -> None:
    """`AveragedModel` would average values of different positions without an error, so it is refused."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is AveragedModel.__init__.__code__:
            raise SparsityError(
                "AveragedModel would average values of different connections: use SupTickets or superpose, "
                "or average network.densify()"
            )


# ---- the module that owns a sparse weight ----


class SparseModule(nn.Module):
    """Mixed into the class of a module that owns sparse weights."""

    _sparse_base: type[nn.Module]
    _sparse_names: tuple[str, ...]

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
