"""Sup-tickets (Algorithm 1): in the last part of the training, collect cheap tickets and superpose them.

The learning rate goes up and down in cycles. The connections change once in each, and the network at the end
of each is a cheap ticket. Their average, pruned back to the count, is the network that is used.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Mapping, Sized
from numbers import Integral, Real
from typing import Any

from torch import Tensor, nn

from suptickets.batch_norm import batch_norms, recompute
from suptickets.connections import Ticket
from suptickets.criteria import Criteria, Pair, grow_criterion, need_gradient, pairs_of
from suptickets.errors import SparsityError, choice, fraction, reason, whole
from suptickets.network import SparseNetwork
from suptickets.rates import Rates
from suptickets.saved import check_saved, keys, load, sparse_weights
from suptickets.schedules import cycle_of
from suptickets.superpose import Superposition, refuse_other


def epochs_to_steps(epochs: float, loader: Sized | int) -> int:
    """Optimizer steps in so many epochs of a loader, one per batch, or of so many steps per epoch.

    A loop that accumulates the gradients of 4 batches has `len(loader) // 4` steps per epoch.
    """
    if not isinstance(epochs, Real) or not 0 <= epochs < float("inf"):
        raise SparsityError(f"epochs must be a number, at least 0, not {epochs!r}")
    try:
        steps = whole("steps per epoch", loader, 0) if isinstance(loader, Integral) else len(loader)
    except TypeError:  # a DataLoader over an IterableDataset raises it too
        raise SparsityError("the loader has no length: give the number of batches of an epoch") from None
    return round(float(epochs) * steps)


class SupTickets:
    """Cycles in the last `cycles * cycle_steps` of `total_steps` steps of the optimizer.

    Args:
        network: a network of any method; its optimizer's steps drive the cycles.
        total_steps: optimizer steps of the whole training (`epochs_to_steps` converts).
        cycle_steps: steps of a cycle.
        cycles: number of cycles, and so of tickets.
        lr: lowest and highest rate of a cycle, for the first parameter group that learns (rate above 0);
            others keep the proportion of their initial rates, and those at rate 0 stay there.
        rate: the share of the connections that the exploration of a cycle prunes and grows; 0: none explores.
        rule: `cia`, `caa` or `cima`.
        beta: weight of the old average in `cima`.
        prune: how the average is pruned: `global` or `layer`.
        prune_when: `each` (after each ticket) or `end` (once; needs the memory of the union of the tickets).
        batch_norm: `average` (means and standard deviations) or `recompute` (`ticket(loader)`).
        explore_at: `start` (after the first step of each cycle, as in the paper's text) or `end` (after a
            ticket is collected, as in its Algorithm 1, so not in the first cycle).
        include_start: take the network before the cycles as a ticket too, as the published code does.
        schedule: `triangle` (Eq. 3), `swa`, `fge`, `steps`, or a function of (t, low, high) with 0 < t <= 1;
            it is also called when this object is made, to check what it gives, so a call must change nothing.
        criteria: (prune, grow) criteria to use instead of the method's: one pair, or one for each cycle.
        keep: keep the single tickets too (`tickets.tickets`).
    """

    def __init__(
        self,
        network: SparseNetwork,
        total_steps: int,
        cycle_steps: int,
        cycles: int,
        lr: tuple[float, float],
        *,
        rate: float = 0.5,
        rule: str = "cia",
        beta: float = 0.8,
        prune: str = "global",
        prune_when: str = "each",
        batch_norm: str = "average",
        explore_at: str = "start",
        include_start: bool = False,
        schedule: str | Callable[[float, float, float], float] = "triangle",
        criteria: Criteria = None,
        keep: bool = False,
    ) -> None:
        """See the class."""
        if not isinstance(network, SparseNetwork):
            raise SparsityError(f"SupTickets takes what sparsify returns, not a {type(network).__name__}")
        self.network = network
        self.total_steps, self.cycles = whole("total_steps", total_steps), whole("cycles", cycles)
        self.cycle_steps = whole("cycle_steps", cycle_steps, 2)
        self.low, self.high = _rates(lr)
        self.rate = fraction("rate", rate, one=True)
        self.superposition = Superposition(rule, beta, prune, prune_when)
        self.batch_norm = choice("batch_norm", batch_norm, ("average", "recompute"))
        self.explore_at = choice("explore_at", explore_at, ("start", "end"))
        self.include_start = include_start
        self.schedule = schedule if isinstance(schedule, str) else "own"
        self.cycle = cycle_of(schedule, self.cycle_steps, self.low, self.high)
        self.criteria = None if criteria is None else pairs_of(criteria, cycles)
        self.keep = keep
        self.explored: list[int] = []
        self.collected: list[int] = []
        self._kept: list[Ticket] = []
        self._rates = Rates()
        self._rate: float | None = None
        self._loaded_at: int | None = None  # the step of a state that was loaded since the last step
        self._check()
        network.booster = self
        network.prepare()
        if self.include_start and network.step == self.start:
            self.collect()

    @property
    def start(self) -> int:
        """The number of steps before the first cycle."""
        return self.total_steps - self.cycles * self.cycle_steps

    def _check(self) -> None:
        network, method = self.network, self.network.method
        steps, left = self.cycles * self.cycle_steps, max(self.total_steps - network.step, 0)
        if steps > left:
            raise SparsityError(
                f"{self.cycles} cycles of {self.cycle_steps} steps do not fit into the {left} steps left: "
                f"at most {left // self.cycle_steps} do"
                + (" (from a checkpoint: build SupTickets, then load it)" if network.step else "")
            )
        norms = batch_norms(network.model)
        if method.ready > self.start:
            raise SparsityError(
                f"{method.name} reaches its sparsity after {method.ready} steps, but the cycles begin "
                f"after {self.start}: use at least {method.ready + steps} total steps, or let it prune faster"
            )
        if self.batch_norm == "average" and any(norm.running_var is None for norm in norms):
            raise SparsityError("there are no batch-norm statistics to average: set track_running_stats=True")
        if self.batch_norm == "recompute" and not norms:
            raise SparsityError("the model has no batch norm to recompute: choose 'average' for batch_norm")
        growing = [grow_criterion(grow).name for _, grow in self.criteria or ()]
        if "momentum" in growing and not method.observes:
            raise SparsityError("growing by momentum needs that of all positions: use the method SNFS")
        if network.booster is not None:
            raise SparsityError("the network has its SupTickets already")
        check_saved(network)
        if (interval := getattr(method, "interval", 0)) > self.start > 0:
            network.warn(
                f"{method.name} changes connections every {interval} steps, and the cycles begin after "
                f"{self.start}: it does not explore before them (a smaller interval does)"
            )

    # ---- what happens at which step ----

    def phase(self, step: int) -> tuple[int, int] | None:
        """Cycle (from 0) and step in it (from 1) of step number `step`; None outside the cycles."""
        i = step - self.start
        if not 1 <= i <= self.cycles * self.cycle_steps:
            return None
        return (i - 1) // self.cycle_steps, (i - 1) % self.cycle_steps + 1

    def rate_at(self, step: int) -> float | None:
        """The learning rate of the first group at step number `step`; None outside the cycles."""
        phase = self.phase(step)
        return None if phase is None else self.cycle.shape(phase[1] / self.cycle_steps, self.low, self.high)

    @property
    def lr(self) -> float:
        """The rate in force, of the first group that learns: the cycle's, outside of them the optimizer's."""
        rate = self.rate_at(self.network.step) if self._rate is None else self._rate
        if rate is not None:
            return rate
        if self.network.state is None:
            raise SparsityError("no optimizer is attached: call network.attach(optimizer)")
        rates = [float(group["lr"]) for group in self.network.state.optimizer.param_groups]
        return next(filter(None, rates), 0.0)

    def needs_gradient(self, step: int) -> bool:
        """Whether an exploration after step number `step` chooses by gradient."""
        criteria = self._exploration(step)
        return criteria is not None and need_gradient(*criteria)

    def _exploration(self, step: int) -> Pair | None:
        """The criteria to explore with after this step; None if it is not the time."""
        phase, method = self.phase(step), self.network.method
        if phase is None or not method.sparse or not self.rate:
            return None
        cycle, i = phase
        if self.explore_at == "end":
            due, cycle = i == self.cycle_steps and cycle + 1 < self.cycles, cycle + 1
        else:
            due = i == 1
        if not due:
            return None
        return (method.prune, method.grow) if self.criteria is None else self.criteria[cycle]

    # ---- steps of the optimizer: called by the network ----

    def before_step(self) -> None:
        """Put the cycle's rate into the optimizer."""
        if self._loaded_at not in (None, self.network.step):
            raise SparsityError(
                f"the state of SupTickets was saved at step {self._loaded_at}, but the network is at step "
                f"{self.network.step}: load the network's state of the same time (network.load_state_dict)"
            )
        self._loaded_at = None
        self._rate = self.rate_at(self.network.step + 1)
        if self._rate is not None and self.network.optimizer is not None:
            self._rates.put(self.network.optimizer, self._rate)

    def put_back(self) -> None:
        """Put the user's rate back, where their scheduler expects it."""
        if self.network.optimizer is not None:
            self._rates.put_back(self.network.optimizer)

    def holds(self, step: int) -> bool:
        """From the first cycle on, the method makes no updates of its own."""
        return step > self.start

    def after_step(self) -> None:
        """Collect at the end of a cycle, explore once a cycle."""
        step, phase = self.network.step, self.phase(self.network.step)
        if self.include_start and step == self.start:
            self.collect()
        if phase is not None and phase[1] == self.cycle.collected_at(self.cycle_steps):
            self.collect()
        criteria = self._exploration(step)
        if criteria is not None and self.network.explore(self.rate, *criteria):
            self.explored.append(step)

    def collect(self) -> None:
        """Collect the network as it is now as a ticket, without changing it."""
        model, ranks, ticket = self.network.model, self.network.ranks, self._taken()
        for name, _ in model.named_buffers():  # batch-norm statistics differ between ranks
            if isinstance(ticket.dense.get(name), Tensor):
                ticket.dense[name] = ranks.of_rank_0(ticket.dense[name])
        self.superposition.fixed = self._fixed()
        self.superposition.add(ticket)
        self.collected.append(self.network.step)
        if self.keep:
            self._kept.append(ticket.clone())

    def _taken(self) -> Ticket:
        """The network as it is now, as a ticket that shares its tensors."""
        return Ticket.of(self.network.model.state_dict(), **keys(self.network.model))

    def _fixed(self) -> set[str]:
        """The weights that keep their counts when the average is pruned."""
        changing = self.network.changing.values()
        return {key for key, weight in sparse_weights(self.network.model) if weight not in changing}

    # ---- results ----

    def ticket(self, loader: Iterable[Any] | None = None) -> nn.Module:
        """The superposed ticket so far: a plain module of the original class, with exact zeros.

        `loader` gives the training inputs when batch-norm statistics are to be recomputed.
        """
        if not self.collected:
            first = self.start + self.cycle.collected_at(self.cycle_steps)
            raise SparsityError(
                f"there is no ticket yet: the first is collected after step {first}, and {self._seen()}"
            )
        if self.superposition.count < self.cycles + self.include_start:
            warnings.warn(
                f"{self.superposition.count} of {self.cycles + self.include_start} tickets are there: the "
                f"training has {self.total_steps} steps, and {self._seen()}",
                RuntimeWarning,
                stacklevel=2,
            )
        if self.batch_norm == "recompute" and loader is None:
            raise SparsityError("batch_norm='recompute' needs data: call ticket(loader)")
        if self.batch_norm == "average" and loader is not None and batch_norms(self.network.model):
            unused = "the loader is not used: batch-norm statistics are averaged (batch_norm='average')"
            warnings.warn(unused, RuntimeWarning, stacklevel=2)
        plain = self._plain(self.superposition.result())
        if self.batch_norm == "recompute" and loader is not None:
            recompute(plain, loader)
        return plain

    def _seen(self) -> str:
        """How far the network has come, and what may have kept it from getting further."""
        step = self.network.step
        usual = (
            "did it end early? total_steps counts steps, not batches, GradScaler may skip some, and resuming "
            "takes tickets.load_state_dict too"
        )
        other = "is the one that trains it attached (network.attach)?"
        return f"the network has seen {step} steps of its optimizer: {usual if step else other}"

    @property
    def tickets(self) -> list[nn.Module]:
        """The single tickets, as plain modules."""
        if not self.keep:
            raise SparsityError("the single tickets were not kept: use SupTickets(..., keep=True)")
        return [self._plain(ticket) for ticket in self._kept]

    def counts(self) -> dict[str, int]:
        """Living connections of each sparse layer of the superposed ticket."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # `ticket()` gives these warnings
            counts = self.superposition.result().counts()
        return {key.removesuffix(".weight"): count for key, count in counts.items()}

    def _plain(self, ticket: Ticket) -> nn.Module:
        plain = self.network.densify()
        load(plain, ticket.state_dict())
        return plain

    def summary(self) -> dict[str, Any]:
        """What happened: plain values, fit for JSON."""
        network = self.network
        nonzero = None
        if self.collected:
            nonzero = self.superposition.nonzero if network.weights else network.nonzero
        return {
            "method": network.method.name,
            "rule": self.superposition.rule,
            "start": self.start,
            "total_steps": self.total_steps,
            "cycle_steps": self.cycle_steps,
            "cycles": self.cycles,
            "lr": [self.low, self.high],
            "step": network.step,
            "collected": list(self.collected),
            "explored": list(self.explored),
            "nonzero": nonzero,
            "sparsity": None if nonzero is None else 1 - nonzero / network.parameters_total,
        }

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on in the middle of a cycle: tensors and plain values."""
        return {
            "settings": self._settings(),
            "step": self.network.step,
            **self.superposition.state_dict(),
            "collected": list(self.collected),
            "explored": list(self.explored),
            "kept": [ticket.pack() for ticket in self._kept],
            "proportions": self._rates.proportions,
        }

    def _settings(self) -> dict[str, Any]:
        """The settings that must be the same for a saved state to be loaded."""
        names = ("total_steps", "cycle_steps", "cycles", "schedule", "explore_at", "include_start", "keep")
        averaging = ("rule", "beta", "prune", "prune_when")
        return {n: getattr(self, n) for n in names} | {n: getattr(self.superposition, n) for n in averaging}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict()`; build everything first, then load network, optimizer and this."""
        parts = {"settings", "average", "total", "targets", "fixed"}
        parts |= {"collected", "explored", "kept", "proportions"}
        if not isinstance(state, Mapping) or not parts <= set(state):
            raise SparsityError("this is not the state of SupTickets: save tickets.state_dict()")
        try:
            self._load(state)
        except SparsityError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise SparsityError(f"the state of SupTickets is damaged: {reason(error)}") from error

    def _load(self, state: Mapping[str, Any]) -> None:
        ours, theirs = self._settings(), state["settings"]
        differing = [f"{k}: {theirs.get(k)} -> {own}" for k, own in ours.items() if own != theirs.get(k)]
        if differing:
            raise SparsityError(f"the state is that of other SupTickets: {', '.join(differing)}")
        now = self._taken()
        collected, explored = list(state["collected"]), list(state["explored"])
        kept = [Ticket.unpack(ticket).to(now.device) for ticket in state["kept"]]
        shares = None if state["proportions"] is None else [float(share) for share in state["proportions"]]
        step = whole("step", state["step"], 0) if "step" in state else None
        for ticket in kept:
            refuse_other(ticket, now)
        self.superposition.load_state_dict(state, len(collected), now)
        self.collected, self.explored, self._kept = collected, explored, kept
        self._rates.load(shares)
        self._rate, self._loaded_at = None, step

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of a model that holds this and its network has None in place of both."""
        copy.deepcopy(self.network, memo)


def _rates(lr: tuple[float, float]) -> tuple[float, float]:
    numbers = isinstance(lr, tuple | list) and all(isinstance(rate, Real) for rate in lr)
    low, high = map(float, lr) if numbers and len(lr) == 2 else (1.0, 0.0)
    if not 0 <= low <= high < float("inf"):
        raise SparsityError(f"lr must be (low, high) with 0 <= low <= high, not {lr!r}")
    return low, high
