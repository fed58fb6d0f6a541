"""The training loop."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from suptickets.data import Data
from suptickets.data.order import stable_seed
from suptickets.errors import SparsityError
from suptickets.measure.cost import TrainingCost
from suptickets.measure.flops import flops
from suptickets.measure.predictions import Scores, Tally
from suptickets.sparsify import sparsify
from suptickets.tickets import SupTickets, epochs_to_steps
from suptickets.training import build
from suptickets.training.folder import RunFolder, TrainingError
from suptickets.training.loggers import Logger
from suptickets.training.meter import Meter
from suptickets.training.processes import Processes
from suptickets.training.progress import Progress
from suptickets.training.settings import Settings
from suptickets.training.stop import Interrupted, asked_to_stop

TEST_BATCH = 1000
SAVE, STOP = 1, 2


class ScoredTickets(SupTickets):
    """Sup-tickets that tell when one is collected, before anything explores on."""

    told: Callable[[], None] | None = None

    def collect(self) -> None:
        """Take the network as a ticket."""
        super().collect()
        if self.told is not None:
            self.told()


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
        self.cost = TrainingCost(flops(self.model, self._example()), self.network.layers)
        self.forward = self._wrapped()
        self.meter = Meter()
        self.start: Scores | None = None
        self.scores: list[Scores] = []
        self.saved: int | None = None  # the step of the last checkpoint
        torch.manual_seed(stable_seed(settings.seed, processes.rank))  # what dropout and the like draw from

    def _tickets(self) -> ScoredTickets | None:
        s = self.settings
        if s.booster == "none":
            return None
        tickets = ScoredTickets(
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
        tickets.told = self._score_ticket
        return tickets

    def _wrapped(self) -> nn.Module:
        if self.settings.compile:
            self.model.compile()
        return DistributedDataParallel(self.model) if self.processes.world > 1 else self.model

    def _example(self) -> Tensor:
        return torch.zeros(1, *self.data.shape, device=self.processes.device, dtype=self.dtype)

    # ---- one step ----

    def step(self, x: Tensor, y: Tensor) -> None:
        """Forward, backward, optimizer, on this process's share of the batch."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(self.network.step + 1)
        self.cost.step(dense_gradient=any(w.canvas is not None for w in self.network.weights.values()))
        weight = self._weight(len(y))
        self.optimizer.zero_grad()
        with self.autocast():
            logits = self.forward(x)
        loss = build.loss(self.settings, logits, y)
        loss.backward(weight)
        self.optimizer.step()
        self.meter.add(loss, logits, y)

    def _weight(self, count: int) -> Tensor | None:
        """Of the mean over these samples, so that the mean over processes is that over all samples."""
        size, place = self.settings.batch_size, self.network.step % self.steps
        total = min(size, self.data.train_size - place * size)
        share = count * self.processes.world / total
        if share == 1:
            return None
        return torch.tensor(share, dtype=self.dtype, device=self.processes.device)

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """bf16 where it is asked for."""
        if self.precision != "bf16":
            return contextlib.nullcontext()
        return torch.autocast(self.processes.device.type, torch.bfloat16)

    # ---- the whole way ----

    def run(self, folder: RunFolder, progress: Progress, log: Logger) -> dict[str, Any]:
        """Train to the end, from the last checkpoint if there is one; returns the summary."""
        self.began = time.monotonic() - self._resume(folder)
        self.last_save = time.monotonic()
        progress.first = self.network.step / self.steps
        with asked_to_stop() as stop:
            for epoch in range(self.network.step // self.steps, self.settings.epochs):
                for x, y in self._batches(epoch):
                    self.step(x, y)
                    if self.tickets is not None and self.network.step == self.tickets.start:
                        self.start = self.evaluate(self.model)
                    if self.network.step % self.steps == 0:
                        self._end_epoch(folder, progress, log)
                    elif progress.due():
                        self._show(progress, self._line(self.meter.values()))
                    self._pause(folder, stop)
            return self._finish(folder)

    def _batches(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        s, p, done = self.settings, self.processes, self.network.step - epoch * self.steps
        if done == 0:
            self.meter.reset()
        self.model.train()
        return self.data.train_batches(
            s.batch_size,
            s.seed,
            epoch,
            device=p.device,
            dtype=self.dtype,
            rank=p.rank,
            world=p.world,
            skip=done,
        )

    def _score_ticket(self) -> None:
        """Evaluate a ticket when it is collected."""
        if self.tickets is not None and self.network.step > self.tickets.start:
            self.scores.append(self.evaluate(self.model))

    def _line(self, meter: Tensor) -> dict[str, Any]:
        """Where the run stands, and how the epoch goes."""
        epoch, step = (self.network.step - 1) // self.steps, self.network.step
        samples = min((step - epoch * self.steps) * self.settings.batch_size, self.data.train_size)
        loss, right, _ = meter.tolist()
        lr = float(self.optimizer.param_groups[0]["lr"]) if self.tickets is None else self.tickets.lr
        line = {"epoch": epoch + 1, "step": step, "phase": self.phase(), "lr": lr}
        return line | {
            "loss": loss / samples,
            "train_accuracy": right / samples,
            "sparsity": self.network.sparsity,
        }

    def _show(self, progress: Progress, line: dict[str, Any]) -> None:
        shown = {key: value for key, value in line.items() if key != "step"}
        part = ((self.network.step - 1) % self.steps + 1) / self.steps
        progress.show(**shown, part=part, samples=self.data.train_size)

    def _end_epoch(self, folder: RunFolder, progress: Progress, log: Logger) -> None:
        self._check_loss()
        meter = self.meter.values()
        self.processes.sum([meter])
        line, every = self._line(meter), self.settings.evaluate_every
        self._show(progress, line)
        if every and line["epoch"] % every == 0:
            line |= {f"test_{key}": value for key, value in self.evaluate(self.model).as_dict().items()}
        if self.processes.main:
            log(line)
        self.processes.first(lambda: folder.log(line))

    def _check_loss(self) -> None:
        """Stop when the loss is not finite, in whichever process."""
        step = self.network.step
        missed = self.processes.most((step - 1) % self.steps + 1 - int(self.meter.values()[2]))
        if missed:
            saved = self.saved
            kept = (
                "there is no checkpoint yet" if saved is None else f"the checkpoint of step {saved} is kept"
            )
            raise TrainingError(
                f"the loss is not finite at step {step - missed + 1} (epoch {(step - 1) // self.steps + 1}): "
                f"use a lower --lr; {kept}"
            )

    def phase(self) -> str:
        """normal, or which cycle."""
        phase = None if self.tickets is None else self.tickets.phase(self.network.step)
        return "normal" if phase is None else f"cycle {phase[0] + 1} of {self.settings.cycles}"

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> Scores:
        """On the whole test set, not augmented, over all processes."""
        p, training = self.processes, model.training
        tally = Tally(p.device)
        p.share_buffers(model)
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

    def _pause(self, folder: RunFolder, stop: list[int]) -> None:
        """Write a checkpoint when it is time to; stop when asked to."""
        due = time.monotonic() - self.last_save >= self.settings.checkpoint_every
        wanted = self.processes.most(STOP if stop else SAVE if due else 0)
        if wanted:
            self._check_loss()
            self._save(folder)
        if wanted == STOP:
            raise Interrupted(
                f"stopped after step {self.network.step}: suptickets train --resume {folder.path} goes on"
            )

    def state_dict(self) -> dict[str, Any]:
        """Everything that the rest of the run depends on; of what each process has its own, all of them."""
        p, cuda = self.processes, self.processes.device.type == "cuda"
        return {
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "tickets": None if self.tickets is None else self.tickets.state_dict(),
            "cost": [self.cost.steps, self.cost.spent],
            "start": None if self.start is None else self.start.as_dict(),
            "scores": [scores.as_dict() for scores in self.scores],
            "meter": p.gather(self.meter.values()),
            "rng": p.gather(torch.get_rng_state()),
            "cuda_rng": p.gather(torch.cuda.get_rng_state()) if cuda else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict()`; with another number of processes, the first has the old ones' sums."""
        self.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.tickets is not None:
            self.tickets.load_state_dict(state["tickets"])
        self.cost.steps, self.cost.spent = state["cost"]
        self.start = None if state["start"] is None else Scores(**state["start"])
        self.scores = [Scores(**scores) for scores in state["scores"]]
        rank, meters = self.processes.rank, state["meter"]
        if len(meters) == self.processes.world:
            self.meter.load(meters[rank])
        else:
            seen = torch.stack(meters)
            self.meter.load(torch.cat([seen[:, :2].sum(0) * (rank == 0), seen[:1, 2]]))
        torch.set_rng_state(state["rng"][rank % len(meters)])
        if state["cuda_rng"] is not None and self.processes.device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda_rng"][rank % len(meters)])

    def _save(self, folder: RunFolder) -> None:
        state = {**self.state_dict(), "seconds": time.monotonic() - self.began}
        self.processes.first(lambda: folder.save_checkpoint(state))
        self.saved, self.last_save = self.network.step, time.monotonic()

    def _resume(self, folder: RunFolder) -> float:
        """Load the last checkpoint, if there is one; the seconds that were spent before."""
        state = self.processes.first(folder.load_checkpoint)
        if state is not None:
            try:
                self.load_state_dict(state)
            except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
                raise SparsityError(
                    f"{folder.checkpoint} is no checkpoint of this run ({str(error).splitlines()[0]}): start "
                    "over with --force"
                ) from error
            self.saved = self.network.step
        self.processes.first(lambda: folder.forget_metrics_after(self.network.step // self.steps))
        return 0.0 if state is None else float(state["seconds"])

    def _finish(self, folder: RunFolder) -> dict[str, Any]:
        self._save(folder)
        final = self._final()
        scores = self.evaluate(final)
        summary = self._summary(folder, final, scores)
        about = {
            "settings": self.settings.as_dict(),
            **{k: summary[k] for k in ("nonzero", "parameters", "tickets")},
        }
        self.processes.first(lambda: folder.save_ticket(final.state_dict(), about))
        self.processes.first(lambda: folder.save_summary(summary))
        return summary

    def _final(self) -> nn.Module:
        if self.tickets is None:
            return self.network.densify()
        s, p = self.settings, self.processes
        loader = self.data.train_batches(s.batch_size, s.seed, s.epochs, device=p.device, dtype=self.dtype)
        return self.tickets.ticket(loader if s.batch_norm == "recompute" else None)

    def _summary(self, folder: RunFolder, final: nn.Module, scores: Scores) -> dict[str, Any]:
        s, total = self.settings, self.network.parameters_total
        nonzero = self.network.nonzero if self.tickets is None else int(self.tickets.summary()["nonzero"])
        names = ("data", "model", "method", "booster", "recipe", "seed", "epochs")
        return {
            "run": str(folder.path),
            **{key: getattr(s, key) for key in names},
            "target_sparsity": 0.0 if s.method == "dense" else s.sparsity,
            "sparsity": 1 - nonzero / total,
            "nonzero": nonzero,
            "parameters": total,
            **scores.as_dict(),
            "start": None if self.start is None else self.start.as_dict(),
            "tickets": [ticket.as_dict() for ticket in self.scores],
            "train_flops_ratio": self.cost.ratio,
            "test_flops_ratio": flops(final, self._example()).ratio,
            "seconds": round(time.monotonic() - self.began, 3),
        }
