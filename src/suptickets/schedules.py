"""How a rate changes with the step: learning rates, exploration and pruning rates.

A schedule is a function of the step (the first is 1). `Scheduler` makes a torch scheduler of any of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from suptickets.errors import SparsityError, choice, whole

Schedule = Callable[[int], float]
Shape = Callable[[float, float, float], float]


def cosine(step: float, total: float, high: float, low: float = 0.0) -> float:
    """From `high` at step 0 to `low` at `total`, along half a cosine."""
    progress = min(max(step / total, 0.0), 1.0)
    return low + (high - low) * (1 + math.cos(math.pi * progress)) / 2


def cubic(step: int, start: int, end: int, initial: float, final: float) -> float:
    """Gradual pruning (Zhu and Gupta): the sparsity from `initial` to `final`, fast at first."""
    if step >= end:
        return final
    left = 1 - max(step - start, 0) / (end - start)
    return final + (initial - final) * left**3


# ---- learning rates of a whole training ----


def step_drops(lr: float, milestones: Sequence[int], factor: float = 0.1) -> Schedule:
    """`lr`, multiplied by `factor` after each of the `milestones` (in steps)."""
    return lambda step: lr * factor ** sum(step > milestone for milestone in milestones)


def cosine_decay(lr: float, total: int, low: float = 0.0) -> Schedule:
    """From `lr` at the first step towards `low` after the last."""
    whole("the length of the training", total)
    return lambda step: cosine(step - 1, total, lr, low)


# ---- learning rates of a cycle, by the position t in it, 0 < t <= 1 ----


def triangle(t: float, low: float, high: float) -> float:
    """Sup-tickets (Eq. 3): up from `low` to `high` at the middle, down to exactly `low` at the end."""
    return (1 - 2 * t) * low + 2 * t * high if t <= 0.5 else (2 - 2 * t) * high + (2 * t - 1) * low


def swa(t: float, low: float, high: float) -> float:
    """SWA's saw-tooth: a jump to `high`, down to exactly `low` at the end."""
    return (1 - t) * high + t * low


def fge(t: float, low: float, high: float) -> float:
    """FGE: from `high` down to `low` at the middle, where the ticket is collected, and up again."""
    return triangle(t, high, low)


def steps(t: float, low: float, high: float) -> float:
    """FreeTickets: the first half of a cycle at `high`, the second at `low`."""
    return high if t <= 0.5 else low


@dataclass(frozen=True)
class Cycle:
    """The shape of a cycle, and where in it the ticket is collected."""

    shape: Shape
    collect: float = 1.0

    def collected_at(self, length: int) -> int:
        """The step of a cycle after which the ticket is collected."""
        return max(int(self.collect * length), 1)


CYCLES = {
    "triangle": Cycle(triangle),
    "swa": Cycle(swa),
    "fge": Cycle(fge, collect=0.5),
    "steps": Cycle(steps),
}


def cycle_of(schedule: str | Shape, length: int, low: float, high: float) -> Cycle:
    """The cycle of this name, or of a shape of the user's own, which must give a rate at every step."""
    if not callable(schedule):
        return CYCLES[choice("schedule", schedule, CYCLES)]
    cycle = Cycle(_checked(schedule))
    for step in range(1, length + 1):
        try:
            cycle.shape(step / length, low, high)
        except SparsityError:
            raise
        except Exception:  # it may ask for what is not there yet, such as the tickets
            break
    return cycle


def _checked(schedule: Shape) -> Shape:
    """The same shape, as long as it gives rates."""

    def shape(t: float, low: float, high: float) -> float:
        given: object = schedule(t, low, high)
        try:
            rate = float(given)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            rate = math.nan
        if isinstance(given, str) or not 0 <= rate < math.inf:
            raise SparsityError(f"the schedule must give rates, at least 0, but gives {given!r} at t = {t:g}")
        return rate

    return shape


def cycles(shape: str, length: int, low: float, high: float) -> Schedule:
    """The rate at each step of cycles of `length` steps: `triangle`, `swa`, `fge` or `steps`."""
    cycle = CYCLES[choice("schedule", shape, CYCLES)]
    whole("the length of a cycle", length)
    return lambda step: cycle.shape(((step - 1) % length + 1) / length, low, high)


def proportions(rates: Sequence[float]) -> list[float]:
    """Rates of parameter groups, relative to the first that learns (rate above 0); 1 if none does."""
    first = next(filter(None, rates), None)
    return [1.0 if first is None else rate / first for rate in rates]


class Scheduler(LRScheduler):
    """A torch scheduler that follows a schedule; groups keep their proportions to the first that learns."""

    def __init__(self, optimizer: Optimizer, schedule: Schedule, last_epoch: int = -1) -> None:
        """`schedule(i)` is the rate at the i-th step, of the first group that learns."""
        self.schedule = schedule
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | Tensor]:
        """The rates of the next step."""
        rate = self.schedule(self.last_epoch + 1)
        return [rate * proportion for proportion in proportions([float(base) for base in self.base_lrs])]

    def state_dict(self) -> dict[str, object]:
        """Everything but the schedule, which is a function."""
        return {key: value for key, value in super().state_dict().items() if key != "schedule"}
