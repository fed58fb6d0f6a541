"""The state of the optimizer follows the connections.

Connections that stay keep their state; new ones get the optimizer's own initial state, which is found by
asking the optimizer: one step on a stand-in parameter whose values and gradients are zero.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from suptickets.errors import SparsityError
from suptickets.weight import SparseWeight

_STAND_IN = 2**14  # connections of the stand-in: from some thousands on, optimizers may keep 8 bits of each
_REFUSED = ("LBFGS", "SparseAdam", "Muon", "Adafactor", "ZeroRedundancyOptimizer")


class OptimizerState:
    """What an optimizer keeps for each living connection."""

    def __init__(self, optimizer: Optimizer, weights: Iterable[SparseWeight]) -> None:
        """Check that the optimizer holds every weight, and that its state can follow the connections."""
        check_optimizer(optimizer)
        self.optimizer = optimizer
        self.decay: dict[str, Any] = {}
        self._fills: dict[Any, tuple[Any, dict[str, Tensor]]] = {}
        for weight in weights:
            self._check(weight)
            self.decay[weight.name] = self._decay(weight)
        self.loaded = False  # whether state was loaded since the last step
        self._hook = optimizer.register_load_state_dict_post_hook(self._was_loaded)

    def _was_loaded(self, _: Optimizer) -> None:
        self.loaded = True

    def leave(self) -> None:
        """Stop following the optimizer."""
        self._hook.remove()

    def group(self, weight: SparseWeight) -> dict[str, Any] | None:
        """The parameter group that holds the weight's values."""
        values, groups = weight.values, self.optimizer.param_groups
        return next((group for group in groups if any(p is values for p in group["params"])), None)

    def problem(self, weight: SparseWeight) -> str | None:
        """What is wrong with the optimizer's view of `weight`, if anything is."""
        if self.group(weight) is None:
            return f"the optimizer does not hold {weight.name}: build it from model.parameters()"
        for key, value in self.optimizer.state.get(weight.values, {}).items():
            if isinstance(value, Tensor) and value.dim() > 0 and value.shape != weight.values.shape:
                dense = value.shape == weight.shape
                advice = "pass it to sparsify" if dense else "load its state after sparsify, or attach"
                return f"the optimizer's {key} of {weight.name} has the shape {tuple(value.shape)}: {advice}"
        return None

    def begin(self, weights: Iterable[SparseWeight]) -> None:
        """A step begins: refuse it if the state that was loaded belongs to other connections."""
        wrong = [weight.name for weight in weights if self.problem(weight) is not None] if self.loaded else []
        self.loaded = bool(wrong)
        if wrong:
            raise SparsityError(
                f"the optimizer's state is that of other connections in {', '.join(wrong)}: load the "
                "network's state too (network.load_state_dict)"
            )

    def problems(self, weights: Iterable[SparseWeight]) -> Iterator[str]:
        """All that is wrong: weights that it does not hold, state of another shape, lost weight decay."""
        for weight in weights:
            problem = self.problem(weight)
            yield from [] if problem is None else [problem]
            before, now = self.decay[weight.name], self._decay(weight)
            if before and not now:
                yield (
                    f"the weight decay of {weight.name} was {before} and is {now} (if that is meant: "
                    "network.attach(optimizer) again)"
                )

    def _decay(self, weight: SparseWeight) -> Any:
        return (self.group(weight) or {}).get("weight_decay")

    def _check(self, weight: SparseWeight) -> None:
        problem = self.problem(weight)
        if problem is not None:
            raise SparsityError(problem)
        shape = (_STAND_IN, *weight.values.shape[1:])
        for key, value in self._initial(weight).items():
            scalar = (
                value is None
                or isinstance(value, int | float)
                or (isinstance(value, Tensor) and value.dim() == 0)
            )
            if not (scalar or (type(value) in (Tensor, nn.Parameter) and value.shape == shape)):
                raise SparsityError(
                    f"{type(self.optimizer).__name__}'s {key} belongs to no single connection: "
                    "use an optimizer whose state is scalars or parameter-shaped"
                )

    def moving(self, weight: SparseWeight) -> dict[str, Tensor]:
        """The state that belongs to single connections."""
        parameter = weight.values
        state = self.optimizer.state.get(parameter, {})
        return {k: v for k, v in state.items() if isinstance(v, Tensor) and v.shape == parameter.shape}

    def follow(
        self, weights: Sequence[SparseWeight], index: Tensor, stays: Tensor, counts: Sequence[int]
    ) -> None:
        """Move the state of weights of one group; `index`, `stays` and `counts` are as in `carried`.

        Called before the values move, so that their shape is still the old one.
        """
        states = [self.moving(weight) for weight in weights]
        fills = self._fill(weights[0]) if states[0] else {}
        for key in states[0]:
            old = [state[key] for state in states]
            new = carried(old, index, stays, fills.get(key, 0.0), counts)
            if [len(part) for part in old] == list(counts):
                overwrite(old, new)
                continue
            for weight, was, part in zip(weights, old, new, strict=True):
                state = self.optimizer.state[weight.values]
                state[key] = was.copy_(part) if len(was) == len(part) else part.clone()

    def _fill(self, weight: SparseWeight) -> dict[str, Tensor]:
        """The initial state as numbers; found anew only if the rate may have changed, as it takes a while."""
        group, like = self.group(weight), weight.values
        assert group is not None
        rate, key = group.get("lr"), (id(group), like.dtype, like.device)
        known, fills = self._fills.get(key, (None, {}))
        if known is None or isinstance(rate, Tensor) or known != rate:
            tensors = {k: v for k, v in self._initial(weight).items() if isinstance(v, Tensor) and v.dim()}
            fills = {k: v.flatten()[0].clone() for k, v in tensors.items()}
            self._fills[key] = rate, fills
        return fills

    def _initial(self, weight: SparseWeight) -> dict[str, Any]:
        """The state that the optimizer gives to a connection it has not seen."""
        group = self.group(weight)
        assert group is not None
        like = weight.values
        stand_in = nn.Parameter(like.new_zeros([_STAND_IN, *[1] * (like.dim() - 1)]))
        stand_in.grad = torch.zeros_like(stand_in)
        probe = _twin(self.optimizer, {**group, "params": [stand_in]})
        try:
            probe.step()
        except Exception as error:
            name = type(self.optimizer).__name__
            raise SparsityError(f"cannot read the initial state of {name}: {error}") from error
        return dict(probe.state[stand_in])


def _twin(optimizer: Optimizer, group: dict[str, Any]) -> Optimizer:
    """An optimizer of the same kind and settings for another parameter group, with a state of its own."""
    kind = type(optimizer)
    accepted = inspect.signature(kind.__init__).parameters
    try:  # some optimizers make their state here
        twin = kind([group], **{k: v for k, v in optimizer.defaults.items() if k in accepted})
        state = twin.state
    except Exception:
        twin, state = object.__new__(kind), defaultdict(dict)
        state.update({k: copy.deepcopy(v) for k, v in optimizer.state.items() if not isinstance(k, Tensor)})
    hooks: dict[str, Any] = {
        "_optimizer_step_pre_hooks": OrderedDict(),
        "_optimizer_step_post_hooks": OrderedDict(),
    }
    own = {key: _copied(value) for key, value in vars(optimizer).items()}
    twin.__dict__.update({**own, **hooks, "state": state, "param_groups": [group]})
    twin.__dict__.pop("step", None)  # schedulers wrap the method on the instance
    return twin


def _copied(value: Any) -> Any:
    """A shallow copy of a container, to which a step may add; anything else as it is."""
    return value.copy() if type(value) in (dict, list, set) else value


def check_optimizer(optimizer: object) -> None:
    """Refuse what is no optimizer, and optimizers that are known not to treat connections one by one."""
    if not isinstance(optimizer, Optimizer):
        kind = optimizer.__name__ if isinstance(optimizer, type) else type(optimizer).__name__
        raise SparsityError(f"expected a torch.optim.Optimizer, not {kind}")
    if any(isinstance(part, Optimizer) and part is not optimizer for part in vars(optimizer).values()):
        raise SparsityError(
            f"{type(optimizer).__name__} wraps another optimizer, whose state would not follow: give that one"
        )
    if any(cls.__name__ in _REFUSED for cls in type(optimizer).__mro__):
        raise SparsityError(
            f"{type(optimizer).__name__} keeps state that does not belong to single connections: "
            "use an optimizer whose state is scalars or parameter-shaped (SGD, Adam, RMSprop, ...)"
        )


def store_state(optimizer: Optimizer, weight: SparseWeight) -> None:
    """Bring state of the dense shape into the order of the values, when a dense weight is stored sparse."""
    state = optimizer.state.get(weight.values, {})
    for key, value in state.items():
        if isinstance(value, Tensor) and value.shape == weight.shape:
            state[key] = value.reshape(weight.values.shape).clone()


def carried(
    old: Sequence[Tensor], index: Tensor, stays: Tensor, fill: float | Tensor, counts: Sequence[int]
) -> list[Tensor]:
    """Numbers that belong to single connections, after these have changed: views of one new tensor.

    Args:
        old: the numbers of each weight, connections along the first dimension.
        index: for each connection there is now, its place among all the old ones.
        stays: whether it was one of them.
        fill: what it gets if it was not.
        counts: how many connections each weight has now.
    """
    parts = [part.detach().reshape(-1) for part in old]
    flat = parts[0] if len(parts) == 1 else torch.cat(parts)
    if len(flat):
        new = torch.where(stays, flat.index_select(0, index), fill)
    else:
        new = flat.new_zeros(len(index)) + fill
    return [part.view(-1, *[1] * (old[0].dim() - 1)) for part in new.split(list(counts))]


def overwrite(old: Sequence[Tensor], new: Sequence[Tensor]) -> None:
    """Copy `new` into `old`, in place: captured graphs know tensors by their address."""
    torch._foreach_copy_(list(old), list(new))
