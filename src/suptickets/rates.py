"""Put a cycle's rate into the optimizer for one step and all that it triggers, then restore the user's.

A scheduler that computes its rate from the last one would be led astray by a rate that is not its own. So
would a training that resumes from an optimizer that was saved during a step, or after a step that raised (no
hook reports that). Therefore the rates that are saved are always the user's. (One case is beyond this: a
scheduler that computes its rate from the last one, and is stepped after a step that raised.)
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.optim import Optimizer

from suptickets.schedules import proportions


class Replaced(NamedTuple):
    """The user's rates, what stands in their place, and the `Rates` that put it there."""

    owner: Rates
    rates: list[float | Tensor]
    given: list[float]


_REPLACED: WeakKeyDictionary[Optimizer, Replaced | None] = WeakKeyDictionary()  # None: not in a step


class Rates:
    """The rates of one booster; if several share an optimizer, the last to replace them restores them."""

    def __init__(self) -> None:
        """The groups keep the `proportions` of their initial rates to the first that learns."""
        self.proportions: list[float] | None = None
        self._whose: weakref.ref[Optimizer] | None = None  # unknown for proportions that were loaded

    def load(self, proportions: list[float] | None) -> None:
        """Go on with saved proportions; the optimizer may be a new one."""
        self.proportions, self._whose = proportions, None

    def put(self, optimizer: Optimizer, rate: float) -> None:
        """Put in the rates of a cycle: `rate` for the first group that learns, the others in proportion."""
        self._recover(optimizer)
        groups = optimizer.param_groups
        other = self._whose is not None and self._whose() is not optimizer
        if self.proportions is None or len(self.proportions) != len(groups) or other:
            self.proportions = proportions(_initial(groups))
        self._whose = weakref.ref(optimizer)
        if optimizer not in _REPLACED:
            optimizer.register_state_dict_post_hook(_saved)
            optimizer.register_load_state_dict_post_hook(_loaded)
        known, given = _REPLACED.get(optimizer), [rate * proportion for proportion in self.proportions]
        users = known.rates if known else [_read(group["lr"]) for group in groups]
        _REPLACED[optimizer] = Replaced(self, users, given)
        for group, own in zip(groups, given, strict=True):
            group["lr"] = _written(group["lr"], own)

    def _recover(self, optimizer: Optimizer) -> None:
        """Restore the user's rates if the last step was broken off, where no others have been set since."""
        users = self._forget(optimizer)
        for group, rate, given in zip(optimizer.param_groups, users.rates, users.given, strict=False):
            if float(group["lr"]) == float(_written(_read(group["lr"]), given)):
                group["lr"] = _written(group["lr"], rate)

    def put_back(self, optimizer: Optimizer) -> None:
        """Restore the user's rates, if it was this object that replaced them."""
        for group, rate in zip(optimizer.param_groups, self._forget(optimizer).rates, strict=False):
            group["lr"] = _written(group["lr"], rate)

    def _forget(self, optimizer: Optimizer) -> Replaced:
        """The step is over; gives what was replaced in it, which is nothing if others have done that."""
        users = _REPLACED.get(optimizer)
        if users is None or users.owner is not self:
            return Replaced(self, [], [])
        _REPLACED[optimizer] = None
        return users


def _saved(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Put the user's rates into a state dict of the optimizer."""
    users = _REPLACED.get(optimizer)
    for group, rate in zip(state["param_groups"], users.rates if users else (), strict=False):
        group["lr"] = _read(rate)


def _loaded(optimizer: Optimizer) -> None:
    """Forget the rates from before: those that were loaded are the user's."""
    _REPLACED[optimizer] = None


def _initial(groups: Sequence[Mapping[str, Any]]) -> list[float]:
    """Rates before any scheduler changed them, or present ones where those were 0.

    Groups whose present rate is 0 stay at rest, unless all are.
    """
    now = [float(group["lr"]) for group in groups]
    initial = [float(group.get("initial_lr", 0) or rate) for group, rate in zip(groups, now, strict=True)]
    return [start if rate or not any(now) else 0.0 for start, rate in zip(initial, now, strict=True)]


def _read(rate: float | Tensor) -> float | Tensor:
    return rate.clone() if isinstance(rate, Tensor) else rate


def _written(holder: float | Tensor, rate: float | Tensor) -> float | Tensor:
    """`rate` in the place of `holder`; a tensor is filled, because graphs and kernels hold on to it."""
    if isinstance(holder, Tensor):
        return holder.copy_(rate) if isinstance(rate, Tensor) else holder.fill_(rate)
    return rate
