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
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from suptickets.errors import SparsityError

SUFFIX = "_connections"
_CASTING = (nn.Linear, nn.RNNBase, nn.MultiheadAttention, nn.modules.conv._ConvNd)


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
        self.casts = all(isinstance(module, _CASTING) for module, _ in owners)
        self.canvas: Tensor | None = None
        self.momentum: Tensor | None = None
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
        dtype = self._dtype(values)
        if self.canvas is None:
            return self.build(values, dtype)
        return self.unflatten(self.canvas.scatter_add(0, self.positions, values.reshape(-1)).to(dtype))

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
        if self.canvas is None and self.values.requires_grad:
            values = self.values
            self.canvas = torch.zeros(self.size, dtype=values.dtype, device=values.device, requires_grad=True)

    def release_gradient(self) -> None:
        """Forget the gradient of all positions and stop collecting it."""
        self.canvas = None

    @property
    def gradient(self) -> Tensor | None:
        """The gradient of all positions (flat, in memory order) since it was requested, if there is one."""
        return None if self.canvas is None else self.canvas.grad

    # ---- positions: addresses in memory, rows in row-major order ----

    def unflatten(self, flat: Tensor) -> Tensor:
        """A flat tensor in memory order, viewed with the weight's shape."""
        inverse = [self.order.index(d) for d in range(len(self.order))]
        return flat.view([self.shape[d] for d in self.order]).permute(inverse)

    def flatten(self, dense: Tensor) -> Tensor:
        """A tensor of the weight's shape, flat in memory order."""
        return dense.permute(self.order).reshape(-1)

    def addresses(self, rows: Tensor) -> Tensor:
        """Row-major indices as addresses in memory order."""
        if self._row_major:
            return rows
        strides = torch.empty([self.shape[d] for d in self.order], device="meta").stride()
        return _remap(rows, self.shape, [strides[self.order.index(d)] for d in range(len(self.order))])

    def rows(self, addresses: Tensor | None = None) -> Tensor:
        """Addresses in memory order (by default the living ones, then sorted) as row-major indices."""
        addresses = self.positions if addresses is None else addresses
        if self._row_major:
            return addresses
        strides = torch.empty(self.shape, device="meta").stride()
        return _remap(addresses, [self.shape[d] for d in self.order], [strides[d] for d in self.order])

    @property
    def _row_major(self) -> bool:
        return self.order == tuple(range(len(self.shape)))

    @torch.no_grad()
    def connect(self, rows: Tensor, values: Tensor) -> None:
        """Let the connections at the sorted `rows` live, with these `values`.

        Contents change in place while their number stays (nothing is compiled or captured again);
        otherwise the storage is replaced, by `set_`, which autograd allows while an old loss is alive.
        """
        parameter, positions = self.values, self.addresses(rows).to(self.positions)
        values = values.reshape(len(rows), *[1] * (len(self.shape) - 1))
        if len(rows) == self.nonzero:
            parameter.copy_(values)
            self.positions.copy_(positions)
        else:
            parameter.set_(values.to(parameter, copy=True))  # type: ignore[call-overload]
            self.positions = positions.clone()

    @torch.no_grad()
    def assign(self, dense: Tensor) -> None:
        """Take the values of the living connections from a dense tensor."""
        if dense.shape != self.shape:
            raise SparsityError(f"{self.name} has the shape {tuple(self.shape)}, not {tuple(dense.shape)}")
        living = dense.detach().reshape(-1)[self.rows().long()]
        self.values.copy_(living.reshape(self.values.shape))

    # ---- what torch.nn.Module does with modules ----

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SparseWeight:
        """Follow `.to(memory_format=...)`: read off a probe what `fn` does to the layout."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        probe = torch.empty([2] * len(self.shape), dtype=self.values.dtype, device=self.positions.device)
        order = memory_order(fn(probe.permute([self.order.index(d) for d in range(len(self.order))])))
        if order != self.order:
            rows = self.rows()
            self.order = order
            self.positions = self.addresses(rows).to(self.positions.dtype)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> SparseWeight:
        """A copy with connections of its own; the request for a gradient stays with the original."""
        _refuse_averaged_model()
        twin = SparseWeight.__new__(SparseWeight)
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy({**self.__dict__, "canvas": None}, memo))
        return twin

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Saved positions are row-major and sorted, whatever the memory layout."""
        destination[prefix + "positions"] = self.rows().detach()

    def _load_from_state_dict(self, state: Mapping[str, Any], prefix: str, *args: Any) -> None:
        """Positions; the owner has checked them and made room (`accept`) before this is called."""
        rows = state.get(prefix + "positions")
        if isinstance(rows, Tensor) and len(rows) == self.nonzero:
            self.positions.copy_(self.addresses(rows.to(self.positions.device)))

    def accept(self, values: Tensor | None, rows: Tensor | None) -> str | None:
        """Make room for saved `values` at saved `rows`; says what is wrong with them, if anything is."""
        problem = self.problem(values, rows)
        if problem is None and values is not None and len(values) != self.nonzero:
            parameter = self.values
            with torch.no_grad():
                parameter.set_(parameter.new_zeros(values.shape))  # type: ignore[call-overload]
            self.positions = self.positions.new_zeros(len(values))
        return problem

    def problem(self, values: Tensor | None, rows: Tensor | None) -> str | None:
        """What keeps `values` at `rows` from being connections of this weight."""
        if values is None:
            return f"{self.name}: the state has no values for it"
        if rows is None:
            return f"{self.name}: the state has no positions, so it is not that of a sparse network"
        if rows.dim() != 1 or values.shape != (len(rows), *[1] * (len(self.shape) - 1)):
            return f"{self.name}: {tuple(values.shape)} values do not fit {tuple(rows.shape)} positions"
        if len(rows) and (rows[0] < 0 or rows[-1] >= self.size or (rows[1:] <= rows[:-1]).any()):
            return f"{self.name}: the positions are not sorted, not unique, or not below {self.size}"
        return None


def memory_order(tensor: Tensor) -> tuple[int, ...]:
    """Dimensions from the slowest to the fastest in memory; row-major if the tensor has gaps."""
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda d: (-strides[d], d))
    packed = tensor.permute(order).is_contiguous()
    return tuple(order) if packed else tuple(range(tensor.dim()))


def _remap(index: Tensor, sizes: Sequence[int], strides: Sequence[int]) -> Tensor:
    """Flat indices over `sizes` (the last runs fastest) as the sums of coordinate times stride."""
    result = torch.zeros_like(index)
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        result += index % size * stride
        index = index // size
    return result


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


class DenseView(Tensor):
    """What `module.weight` reads as; writing into it would be lost, so in-place methods are refused."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Saved and copied as the plain tensor that it is."""
        return self.detach().__reduce_ex__(protocol)


def _refusal(method: str) -> Callable[..., NoReturn]:
    def refuse(self: Tensor, *args: object, **kwargs: object) -> NoReturn:
        raise SparsityError(
            f"{method} on a sparse weight would be lost: initialise before sparsify, or assign a dense "
            "tensor (module.weight = tensor), whose values the living connections take"
        )

    return refuse


_HARMLESS = {"requires_grad_", "detach_", "share_memory_", "rename_"}
for _name in dir(Tensor):
    if (
        _name.endswith("_") and not _name.startswith("_") and _name not in _HARMLESS
    ) or _name == "__setitem__":
        setattr(DenseView, _name, _refusal(_name))


class SparseModule(nn.Module):
    """Mixed into the class of a module that owns sparse weights."""

    _sparse_base: type[nn.Module]
    _sparse_names: tuple[str, ...]

    def __setattr__(self, name: str, value: Any) -> None:
        """`module.weight = tensor` sets the values of the living connections."""
        if name in self._sparse_names and isinstance(value, Tensor):
            weight = self._modules[name + SUFFIX]
            assert isinstance(weight, SparseWeight)
            weight.assign(value)
        else:
            super().__setattr__(name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle, though the class is made on the fly."""
        state = super().__reduce_ex__(protocol)[2]
        return _rebuild, (self._sparse_base, self._sparse_names), state

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
        errors: list[str] = args[-1]
        for name in self._sparse_names:
            key, weight = prefix + name, self._modules[name + SUFFIX]
            assert isinstance(weight, SparseWeight)
            problem = weight.accept(state.get(key), state.get(f"{key}{SUFFIX}.positions"))
            errors += [] if problem is None else [problem]
        super()._load_from_state_dict(state, prefix, *args)


def _rebuild(base: type[nn.Module], names: tuple[str, ...]) -> nn.Module:
    cls = _sparse_class(base, names)
    module: nn.Module = cls.__new__(cls)
    return module


_classes: dict[Any, Any] = {}


def _sparse_class(base: type[nn.Module], names: tuple[str, ...]) -> Any:
    """`base` with each of the named parameters read as the dense tensor; made once."""
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
        return dense if torch.compiler.is_compiling() else dense.as_subclass(DenseView)

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
    values = parameter.detach().reshape(weight.size, *[1] * (parameter.dim() - 1)).clone()
    gradient = parameter.grad
    parameter.grad = None
    parameter.set_(values)  # type: ignore[call-overload]
    parameter.grad = None if gradient is None else gradient.reshape(values.shape)
    for module, attribute in owners:
        names = (*getattr(module, "_sparse_names", ()), attribute)
        module.add_module(attribute + SUFFIX, weight)
        base = module._sparse_base if isinstance(module, SparseModule) else type(module)
        module.__class__ = _sparse_class(base, names)
    return weight


def restore(weight: SparseWeight) -> None:
    """Undo `store`: the owners get their class and a plain dense parameter back, in its old place."""
    parameter = weight.values
    dense = weight.build(parameter.detach(), parameter.dtype)
    plain = nn.Parameter(dense, requires_grad=parameter.requires_grad)
    for module, attribute in weight.owners:
        assert isinstance(module, SparseModule)
        base, names = module._sparse_base, tuple(n for n in module._sparse_names if n != attribute)
        module.__class__ = _sparse_class(base, names) if names else base  # type: ignore[assignment]
        module._modules.pop(attribute + SUFFIX)
        module._parameters[attribute] = plain
