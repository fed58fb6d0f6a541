"""Sparse training and Sup-tickets in the trainers of others: Lightning's and Hugging Face's.

Their steps need no help: the optimizer's hooks see them, whatever wraps the optimizer. What a trainer must be
told is when the model becomes sparse (before its weights are loaded, wrapped or given to an optimizer), how
many steps there are, and what belongs in its checkpoints.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from suptickets.errors import SparsityError, reason, whole
from suptickets.integrations.settings import (
    check_cycles,
    check_method,
    check_same,
    check_steps,
    described,
    further,
)
from suptickets.layers import Patterns
from suptickets.methods import Method
from suptickets.network import SparseNetwork
from suptickets.sparsify import sparsify
from suptickets.tickets import SupTickets, epochs_to_steps
from suptickets.weight import SparseWeight


class Integration:
    """What the callbacks of all trainers share.

    Args:
        method: for instance `RigL(sparsity=0.95)`.
        cycles: cycles of Sup-tickets at the end of the training; 0: the method alone.
        cycle_epochs: length of a cycle, in epochs of the trainer.
        cycle_steps: the same in steps of the optimizer; one of the two is needed.
        total_steps: steps of the optimizer in the whole training, where the trainer cannot count them.
        lr: lowest and highest rate of a cycle, for the first parameter group that learns (rate above 0);
            others keep the proportion of their initial rates, and those at rate 0 stay there.
        include: names or patterns of the weights to make sparse instead of the default, as for `sparsify`.
        exclude: names or patterns to leave dense.
        seed: seed of all random choices of connections.
        settings: further settings of `SupTickets`, such as `rule` or `keep`.
    """

    def __init__(
        self,
        method: Method,
        *,
        cycles: int = 0,
        cycle_epochs: float | None = None,
        cycle_steps: int | None = None,
        total_steps: int | None = None,
        lr: tuple[float, float] | None = None,
        include: Patterns = None,
        exclude: Patterns = None,
        seed: int | None = None,
        **settings: Any,
    ) -> None:
        """See the class."""
        self.method, self.cycles = check_method(method), whole("cycles", cycles, 0)
        self.choice: dict[str, Any] = {"include": include, "exclude": exclude, "seed": seed}
        self.length, self.settings = (cycle_epochs, cycle_steps), {**settings, "lr": lr}
        self.total_steps = total_steps if total_steps is None else whole("total_steps", total_steps)
        self.planned = self.cycles  # 0 in a training that leaves them out
        self.network: SparseNetwork | None = None
        self.tickets: SupTickets | None = None
        self._check()

    def _check(self) -> None:
        given = sum(length is not None for length in self.length)
        if self.cycles and (given != 1 or self.settings["lr"] is None):
            raise SparsityError("cycles need lr=(low, high), and one of cycle_epochs and cycle_steps")
        if not self.cycles and (given or any(value is not None for value in self.settings.values())):
            raise SparsityError("without cycles there is nothing to set for them: give cycles=3, say")
        for name in self.settings.keys() - further().keys():
            raise SparsityError(f"SupTickets has no setting {name!r}: there are {', '.join(further())}")
        if self.cycles:
            check_cycles(self.cycles, self.length, self.settings, self.choice["seed"])

    # ---- called by the trainers, in this order ----

    def make_sparse(self, model: nn.Module, optimizer: Optimizer | None = None) -> None:
        """Make the model sparse, before its weights are loaded, wrapped or given to an optimizer."""
        if any(isinstance(module, SparseWeight) for module in model.modules()):
            raise SparsityError(
                "this model has had a trainer: build a new one (a checkpoint can go on in it)"
            )
        self.network, self.tickets = sparsify(model, self.method, optimizer, **self.choice), None
        self.planned = self.cycles
        try:
            self.network.densify()
        except Exception as error:
            why = f"{type(error).__name__}: {reason(error)}"
            raise SparsityError(
                f"ticket() could not copy this model, take out what it cannot ({why})"
            ) from error

    def follow(self, optimizer: Optimizer, total_steps: float, epoch_steps: int | None) -> None:
        """Follow the optimizer; numbers of steps that cannot be known are `inf` and None."""
        assert self.network is not None
        self.network.attach(optimizer)
        self.network.booster = None  # left by an attempt with larger batches, which took no step
        total = self.total_steps or total_steps
        check_steps(self.method, total, self.planned)
        if self.planned:
            steps = self._cycle_steps(epoch_steps)
            self.tickets = SupTickets(self.network, int(total), steps, self.cycles, **self.settings)

    def _cycle_steps(self, epoch_steps: int | None) -> int:
        epochs, steps = self.length
        if epochs is not None and epoch_steps is None:
            raise SparsityError("epochs have no known number of steps here: give cycle_steps")
        return steps or 0 if epochs is None else epochs_to_steps(epochs, epoch_steps or 0)

    def ended(self) -> None:
        """Called when the training ends: warn if that is not where the cycles end."""
        if self.tickets is not None and self.tickets.network.step != self.tickets.total_steps:
            warnings.warn(_missed(self.tickets), RuntimeWarning, stacklevel=2)

    def metrics(self) -> dict[str, float]:
        """What is worth logging: the sparsity and, in a cycle, the rate of the last step."""
        if self.network is None:
            return {}
        rate = None if self.tickets is None else self.tickets.rate_at(self.network.step)
        return {"sparsity": self.network.sparsity} | ({} if rate is None else {"cycle_lr": rate})

    # ---- checkpoints: beside the model and the optimizer, which the trainer saves ----

    def saved(self) -> dict[str, Any]:
        """What to save, as tensors and plain values, without the model."""
        if self.network is None:
            return {}
        network = {key: value for key, value in self.network.state_dict().items() if key != "model"}
        tickets = None if self.tickets is None else self.tickets.state_dict()
        return {"network": network, "tickets": tickets, "settings": self._settings()}

    def _settings(self) -> dict[str, str]:
        return described(self.method, self.tickets, self.settings)

    def go_on(self, state: Mapping[str, Any]) -> None:
        """Go on from `saved()`, after `follow`, when the model has been loaded."""
        assert self.network is not None
        if (state.get("tickets") is None) != (self.tickets is None):
            raise SparsityError("the checkpoint is of a training with other cycles: give the same settings")
        check_same(self._settings(), state["settings"])
        self.network.load_state_dict({**state["network"], "model": self.network.model.state_dict()})
        if self.tickets is not None:
            self.tickets.load_state_dict(state["tickets"])

    # ---- the result ----

    def ticket(self, loader: Iterable[Any] | None = None) -> nn.Module:
        """The superposed ticket or, without cycles, the network: a plain module of the original class."""
        if self.network is None:
            raise SparsityError("there is no network yet: give this callback to a trainer, and train")
        if self.planned and self.tickets is None:
            raise SparsityError("there is no ticket yet, for the training has not begun: train first")
        if self.tickets is None:
            return self.network.densify()
        if not self.tickets.collected:
            raise SparsityError(_missed(self.tickets))
        return self.tickets.ticket(loader)


def _missed(tickets: SupTickets) -> str:
    """What there is after a training that did not end where it was planned to."""
    there = "there is no ticket, and sparse.network.densify() is the network as it is"
    if tickets.collected:
        count = f"{len(tickets.collected)} of {tickets.cycles + tickets.include_start} tickets"
        there = f"ticket() is of {count}, the last of step {tickets.collected[-1]}"
    return (
        f"the training took {tickets.network.step} steps, and {tickets.total_steps} were planned: {there} "
        "(if the trainer counts the steps wrong, give total_steps)"
    )
