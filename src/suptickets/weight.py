"""One sparse weight: the values of its living connections, their positions, dense on demand.

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

    @torch.inference_mode(False)  # what is made here is trained
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
        if dense.shape != self.shape and dense.shape == (len(self.positions), *[1] * (len(self.shape) - 1)):
            raise SparsityError(
                f"{self.name} was given its values where the dense weight belongs, as FSDP and spectral_norm "
                "do: they are not supported"
            )
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
        positions, momentum = self.positions, self.momentum
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if not positions.is_meta:  # these only move: `.half()` would round them
            self.positions = positions.to(self.positions.device)
        momentum = None if momentum is None or positions.is_meta else momentum.to(self.positions.device)
        probe = torch.empty([2] * len(self.shape), dtype=self.values.dtype, device=self.positions.device)
        order = memory_order(fn(probe.permute(self._inverse)))
        if order == self.order:
            self.momentum = momentum
            return self
        rows, dense = self.rows(), None if momentum is None else self.unflatten(momentum)
        self.order = order
        self.positions = self.addresses(rows).to(self.positions.dtype)
        self.momentum = None if dense is None else self.flatten(dense)
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

    @torch.inference_mode(False)
    @torch.no_grad()
    def accept(self, values: Tensor | None, rows: Tensor | None) -> str | None:
        """Make room for saved `values` at saved `rows`; says what is wrong with them, if anything is."""
        problem = self.problem(values, rows)
        if problem is not None or values is None or rows is None:
            return problem
        self.moved |= len(rows) != self.nonzero or not torch.equal(rows.to(self.rows()), self.rows())
        if len(values) != self.nonzero:
            parameter = self.values
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
