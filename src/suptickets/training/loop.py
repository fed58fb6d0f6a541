"""The training loop."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from suptickets.data import Data
from suptickets.measure.cost import TrainingCost
from suptickets.measure.flops import flops
from suptickets.measure.predictions import Scores, Tally
from suptickets.sparsify import sparsify
from suptickets.tickets import SupTickets, epochs_to_steps
from suptickets.training import build
from suptickets.training.folder import RunFolder, TrainingError
from suptickets.training.processes import Processes
from suptickets.training.progress import Progress
from suptickets.training.settings import Settings

TEST_BATCH = 1000
CHECKPOINT_SECONDS = 60.0


class Interrupted(TrainingError):
    """The run was asked to stop, and has written a checkpoint."""


class Trainer:
    """One run: what it is made of, one step of it, and the way from the first to the last."""

    def __init__(self, settings: Settings, data: Data, processes: Processes) -> None:
        """Build everything from the settings; nothing is read or written."""
        self.settings, self.data, self.processes = settings, data, processes
        device, self.precision = processes.device, build.precision(settings, processes.device)
        self.dtype = build.DTYPES[self.precision]
        self.steps = data.steps(settings.batch_size)
        self.model = build.model(settings, data).to(device, self.dtype)
        if device.type == "cuda":
            self.model = self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if processes.world > 1 and device.type == "cuda":
            self.model = nn.SyncBatchNorm.convert_sync_batchnorm(self.model)
        self.optimizer = build.optimizer(settings, self.model)
        method = build.method(settings, data, device)
        self.network = sparsify(self.model, method, self.optimizer, seed=settings.seed)
        self.tickets = self._tickets()
        self.rate = build.learning_rate(settings, self.steps)
        example = torch.zeros(1, *data.shape, device=device, dtype=self.dtype)
        self.cost = TrainingCost(flops(self.model, example))
        self.forward = self._wrapped()
        self.meter = torch.zeros(
            4, dtype=torch.float64, device=device
        )  # loss, right, samples, first bad step
        self.start: Scores | None = None
        self.scores: list[Scores] = []

    def _tickets(self) -> SupTickets | None:
        s = self.settings
        if s.booster == "none":
            return None
        return SupTickets(
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
        )

    def _wrapped(self) -> nn.Module:
        if self.settings.compile:
            self.model.compile()
        return DistributedDataParallel(self.model) if self.processes.world > 1 else self.model

    # ---- one step ----

    def step(self, x: Tensor, y: Tensor, total: int) -> None:
        """Forward, backward, optimizer; `total` is the number of samples over all processes."""
        number = self.network.step + 1
        dense = any(weight.canvas is not None for weight in self.network.weights.values())
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(number)
        self.optimizer.zero_grad()
        with self.autocast():
            logits = self.forward(x)
        loss = build.loss(self.settings, logits, y)
        (
            loss * (self.processes.world / total)
        ).backward()  # so that the mean over processes is that over samples
        self.optimizer.step()
        self.cost.step(self.network.layers, dense_gradient=dense)
        with torch.no_grad():
            self.meter[0] += loss
            self.meter[1] += (logits.argmax(1) == y).sum()
            self.meter[2] += len(y)
            bad = torch.where(torch.isfinite(loss), torch.inf, float(number)).double()
            self.meter[3] = torch.where(self.meter[3] == 0, torch.inf, self.meter[3]).minimum(bad)

    def autocast(self) -> torch.autocast:
        """bf16 where it is asked for."""
        return torch.autocast(self.processes.device.type, torch.bfloat16, enabled=self.precision == "bf16")

    # ---- the whole way ----

    def run(self, folder: RunFolder, progress: Progress) -> dict[str, Any]:
        """Train to the end, from the last checkpoint if there is one; returns the summary."""
        began = time.monotonic() - self._resume(folder)
        progress.first = self.network.step // self.steps
        saved = time.monotonic()
        with asked_to_stop() as stop:
            while self.network.step < self.settings.epochs * self.steps:
                epoch = self.network.step // self.steps
                self._epoch(epoch, folder, stop, began)
                self._end_epoch(epoch, folder, progress)
                if time.monotonic() - saved > CHECKPOINT_SECONDS:
                    self._save(folder, began)
                    saved = time.monotonic()
            return self._finish(folder, began)

    def _epoch(self, epoch: int, folder: RunFolder, stop: list[int], began: float) -> None:
        s, p = self.settings, self.processes
        done = self.network.step - epoch * self.steps
        if done == 0:
            self.meter.zero_()
        batches = self.data.train_batches(
            s.batch_size,
            s.seed,
            epoch,
            device=p.device,
            dtype=self.dtype,
            rank=p.rank,
            world=p.world,
            skip=done,
        )
        self.model.train()
        for x, y in batches:
            self.step(x, y, self._total(done))
            done += 1
            self._score()
            if p.any(bool(stop)) if p.world > 1 else stop:
                self._save(folder, began)
                raise Interrupted(f"stopped after step {self.network.step}: run the same command to go on")

    def _total(self, batch: int) -> int:
        """Samples in that batch of an epoch, over all processes."""
        size = self.settings.batch_size
        return min(size, self.data.train_size - batch * size)

    def _score(self) -> None:
        """Evaluate the network before the cycles, and each ticket when it is collected."""
        if self.tickets is None:
            return
        if self.network.step == self.tickets.start:
            self.start = self.evaluate(self.model)
        if self.tickets.collected and self.tickets.collected[-1] == self.network.step > self.tickets.start:
            self.scores.append(self.evaluate(self.model))

    def _end_epoch(self, epoch: int, folder: RunFolder, progress: Progress) -> None:
        sums = self.meter[:3].clone()
        self.processes.sum([sums])
        if torch.isfinite(self.meter[3]):
            step = int(self.meter[3])
            raise TrainingError(
                f"the loss is not finite at step {step} (epoch {(step - 1) // self.steps + 1}): the last "
                "checkpoint is kept; try a lower --lr"
            )
        loss, right, samples = sums.tolist()
        every = self.settings.evaluate_every
        test = self.evaluate(self.model).as_dict() if every and (epoch + 1) % every == 0 else {}
        lr = float(self.optimizer.param_groups[0]["lr"]) if self.tickets is None else self.tickets.lr
        line = {"epoch": epoch + 1, "step": self.network.step, "phase": self.phase(), "lr": lr}
        line |= {"loss": loss / samples, "train_accuracy": right / samples, "sparsity": self.network.sparsity}
        line |= {f"test_{key}": value for key, value in test.items()}
        if self.processes.main:
            folder.log(line)
        progress.epoch(epoch + 1, self.phase(), lr, loss / samples, right / samples, self.network.sparsity)

    def phase(self) -> str:
        """normal, or which cycle."""
        phase = None if self.tickets is None else self.tickets.phase(self.network.step)
        return "normal" if phase is None else f"cycle {phase[0] + 1} of {self.settings.cycles}"

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> Scores:
        """On the whole test set, not augmented, over all processes."""
        p, training = self.processes, model.training
        tally = Tally(p.device)
        model.eval()
        for x, y in self.data.test_batches(
            TEST_BATCH, device=p.device, dtype=self.dtype, rank=p.rank, world=p.world
        ):
            with self.autocast():
                logits = model(x)
            tally.add(logits, y)
        model.train(training)
        p.sum(tally.tensors())
        return tally.scores()

    # ---- stopping, going on, finishing ----

    def state_dict(self) -> dict[str, Any]:
        """Everything that the rest of the run depends on."""
        return {
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "tickets": None if self.tickets is None else self.tickets.state_dict(),
            "cost": [self.cost.steps, self.cost.spent],
            "meter": self.meter,
            "start": None if self.start is None else self.start.as_dict(),
            "scores": [scores.as_dict() for scores in self.scores],
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state() if self.processes.device.type == "cuda" else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict()`."""
        self.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.tickets is not None:
            self.tickets.load_state_dict(state["tickets"])
        self.cost.steps, self.cost.spent = state["cost"]
        self.meter.copy_(state["meter"])
        self.start = None if state["start"] is None else Scores(**state["start"])
        self.scores = [Scores(**scores) for scores in state["scores"]]
        torch.set_rng_state(state["rng"])
        if state["cuda_rng"] is not None and self.processes.device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda_rng"])

    def _save(self, folder: RunFolder, began: float) -> None:
        if self.processes.main:
            folder.save_checkpoint({**self.state_dict(), "seconds": time.monotonic() - began})
        self.processes.wait()

    def _resume(self, folder: RunFolder) -> float:
        """Load the last checkpoint, if there is one; the seconds that were spent before."""
        state = folder.load_checkpoint()
        if state is None:
            if self.processes.main:
                folder.forget_metrics_after(0)
            return 0.0
        self.load_state_dict(state)
        if self.processes.main:
            folder.forget_metrics_after(self.network.step // self.steps)
        return float(state["seconds"])

    def _finish(self, folder: RunFolder, began: float) -> dict[str, Any]:
        final = self._final()
        scores, network = self.evaluate(final), self.network
        nonzero = network.nonzero if self.tickets is None else int(self.tickets.summary()["nonzero"])
        s = self.settings
        summary = {
            "run": str(folder.path),
            **{
                key: getattr(s, key)
                for key in ("data", "model", "method", "booster", "recipe", "seed", "epochs")
            },
            "target_sparsity": 0.0 if s.method == "dense" else s.sparsity,
            "sparsity": 1 - nonzero / network.parameters_total,
            "nonzero": nonzero,
            "parameters": network.parameters_total,
            **scores.as_dict(),
            "start": None if self.start is None else self.start.as_dict(),
            "tickets": [ticket.as_dict() for ticket in self.scores],
            "train_flops_ratio": self.cost.ratio,
            "test_flops_ratio": flops(
                final, torch.zeros(1, *self.data.shape, device=self.processes.device, dtype=self.dtype)
            ).ratio,
            "seconds": round(time.monotonic() - began, 3),
        }
        if self.processes.main:
            about = {"settings": s.as_dict(), "nonzero": nonzero, "parameters": network.parameters_total}
            folder.save_ticket(final.state_dict(), about)
            folder.save_summary(summary)
        self.processes.wait()
        return summary

    def _final(self) -> nn.Module:
        if self.tickets is None:
            return self.network.densify()
        s, p = self.settings, self.processes
        loader = self.data.train_batches(s.batch_size, s.seed, s.epochs, device=p.device, dtype=self.dtype)
        return self.tickets.ticket(loader if s.batch_norm == "recompute" else None)


@contextlib.contextmanager
def asked_to_stop() -> Iterator[list[int]]:
    """A list that gets the signal when Ctrl-C or SIGTERM asks to stop, so that the step can be finished."""
    asked: list[int] = []

    def ask(number: int, frame: FrameType | None) -> None:
        asked.append(number)

    signals = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, ask) for number in signals]
    try:
        yield asked
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)
