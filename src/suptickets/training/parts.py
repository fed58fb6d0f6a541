"""The parts of a run, and the one definition of a step that the fast and the plain way share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax
from torch.nn.parallel import DistributedDataParallel

from suptickets.baselines import Distillation
from suptickets.data import Data
from suptickets.data.order import stable_seed
from suptickets.errors import SparsityError, TrainingError
from suptickets.measure.cost import TrainingCost
from suptickets.measure.explored import Explored
from suptickets.measure.flops import flops
from suptickets.methods import GMP
from suptickets.methods.base import Dynamic
from suptickets.randomness import seed_all
from suptickets.sparsify import sparsify
from suptickets.tickets import SupTickets, epochs_to_steps
from suptickets.training import build
from suptickets.training.meter import Meter
from suptickets.training.processes import Processes
from suptickets.training.settings import Settings

TOO_LATE = "after the last step too"  # when connections change in vain


class ScoredTickets(SupTickets):
    """Sup-tickets that call `told` when a ticket is collected, before anything explores on."""

    told: Callable[[], None] | None = None

    def collect(self) -> None:
        """Take the network as a ticket."""
        try:
            super().collect()
        except SparsityError as error:
            rate = "--lr-high" if self.network.step > self.start else "--lr"
            raise TrainingError(f"after step {self.network.step} {error}: use a lower {rate}") from error
        if self.told is not None:
            self.told()


class Parts:
    """Model, optimizer, sparse network, booster, rates: everything that the settings decide."""

    def __init__(self, settings: Settings, data: Data, processes: Processes) -> None:
        """Build everything from the settings; nothing is written."""
        self.settings, self.data, self.processes = settings, data, processes
        device, self.precision = processes.device, build.precision(settings, processes.device)
        self.dtype = build.DTYPES[self.precision]
        build.check_members(settings, data, processes.world)
        self.steps = data.steps(settings.batch_size)
        self.model = build.model(settings, data).to(device, self.dtype)
        if ":" in settings.model:
            build.check_fit(self.model, data, self.dtype)
            build.check_trains(settings, self.model, data, processes.world)
        if processes.world == 1 or device.type != "cuda":  # otherwise batch norms see all samples
            build.check_batches(settings, data, processes.world, self.model)
        if device.type == "cuda":
            self.model = self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if processes.world > 1 and device.type == "cuda":
            self.model = nn.SyncBatchNorm.convert_sync_batchnorm(self.model)
        self.optimizer = build.optimizer(settings, self.model)
        first_batch = partial(build.first_batch, settings, data, device)
        method = build.method(settings, self.steps, first_batch)
        self.network = sparsify(self.model, method, self.optimizer, seed=settings.seed)
        self.tickets = self._tickets()
        self._tell_last_update()
        self.explored = Explored(self.network)
        self.rate = build.learning_rate(settings, self.steps)
        forward = flops(self.model, self.example())
        self.cost = TrainingCost(forward, self.network)
        self.relative = build.relative(settings, data, forward.dense)
        self.distillation: Distillation | None = None
        self.forward = DistributedDataParallel(self.model) if processes.world > 1 else self.model
        self.meter = Meter(device)
        self.seed()

    def seed(self) -> None:
        """Seed what dropout and the like draw from, and what a user's own model may."""
        seed_all(stable_seed(self.settings.seed, self.processes.rank))

    def _tell_last_update(self) -> None:
        """Warn of an exploration after the last step, which can only take trained weights away."""
        method, end = self.network.method, self.settings.epochs * self.steps
        if self.tickets is not None or not isinstance(method, Dynamic) or isinstance(method, GMP):
            return
        if method.sparsity and method.due(end) and method.rate_at(end):
            self.network.warn(
                f"{method.name} changes connections {TOO_LATE}, and what it grows then stays untrained: use "
                f"an --interval that does not divide {end} steps"
            )

    def _tickets(self) -> ScoredTickets | None:
        s = self.settings
        if not s.cyclic:
            return None
        if epochs_to_steps(s.cycle_epochs, self.steps) < 2:
            raise SparsityError(
                f"a cycle of {s.cycle_epochs:g} epochs has fewer than two steps: use a higher --cycle-epochs"
            )
        pairs = [(prune, grow) for prune, _, grow in (pair.partition(":") for pair in s.criteria)]
        return ScoredTickets(
            self.network,
            s.epochs * self.steps,
            epochs_to_steps(s.cycle_epochs, self.steps),
            s.cycles,
            (s.lr_low, s.lr_high),
            rate=s.explore_rate,
            rule=s.rule,
            beta=s.beta,
            prune=s.prune,
            prune_when=s.prune_when,
            batch_norm=s.batch_norm,
            explore_at=s.explore_at,
            include_start=s.include_start,
            schedule=s.schedule,
            criteria=(pairs * s.cycles)[: s.cycles] or None,
            keep=s.keeps,
        )

    def rate_at(self, step: int) -> float:
        """The learning rate of a step, in the normal phase or in a cycle."""
        cyclic = None if self.tickets is None else self.tickets.rate_at(step)
        return self.rate(step) if cyclic is None else cyclic

    def example(self) -> Tensor:
        """An input of the right shape and dtype, on the right device."""
        return torch.zeros(1, *self.data.shape, device=self.processes.device, dtype=self.dtype)

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """A context that computes in bf16, if that is the precision."""
        if self.precision != "bf16":
            return contextlib.nullcontext()
        return torch.autocast(self.processes.device.type, torch.bfloat16)

    # ---- a step: what all ways of doing it share ----

    def loss(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of a batch, and its logits; those of several members are combined (`_together`)."""
        with self.autocast():
            logits = self.forward(x)
            taught = None if self.distillation is None else self.distillation(logits, x, y)
        return build.loss(self.settings, logits, y) if taught is None else taught, _together(logits)

    def begin_step(self) -> None:
        """Set the rate; add the step to the cost of the training, and its connections to those that lived."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(self.network.step + 1)
        self.explored.update()
        self.cost.step(dense_gradient=self.network.collection.active)

    def weight(self, count: int) -> float:
        """The weight of a mean over `count` samples, so that the mean over processes is that over all."""
        size, place = self.settings.batch_size, self.network.step % self.steps
        total = min(size, self.data.train_size - place * size)
        return count * self.processes.world / total


def _together(logits: Tensor) -> Tensor:
    """From (members, batch, classes) to (batch, classes), which ranks classes as their mean probability."""
    return logits if logits.dim() == 2 else log_softmax(logits.detach(), -1, dtype=torch.float64).logsumexp(0)
