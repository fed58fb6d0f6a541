"""The training loop."""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from suptickets.data import Data
from suptickets.errors import SparsityError
from suptickets.measure.flops import flops
from suptickets.measure.predictions import Scores, Tally
from suptickets.training.fast import FastStep
from suptickets.training.folder import RunFolder, TrainingError
from suptickets.training.loggers import Logger
from suptickets.training.parts import Parts
from suptickets.training.plain import PlainStep
from suptickets.training.processes import Processes
from suptickets.training.progress import Progress
from suptickets.training.settings import Settings
from suptickets.training.stop import Interrupted, asked_to_stop

TEST_BATCH = 1000
SAVE, STOP = 1, 2


class Trainer(Parts):
    """One run: the way from its first step to its last."""

    def __init__(self, settings: Settings, data: Data, processes: Processes) -> None:
        """Build everything from the settings; nothing is read or written."""
        super().__init__(settings, data, processes)
        if self.tickets is not None:
            self.tickets.told = self._score_ticket
        self.start: Scores | None = None
        self.scores: list[Scores] = []
        self.saved: int | None = None  # the step of the last checkpoint
        self.last = math.nan, math.nan  # loss and accuracy of training when they were last read
        self.on_gpu = processes.device.type == "cuda"

    def stepper(self) -> PlainStep | FastStep:
        """How the steps are done: fast on a GPU, unless `--no-compile` or float32 is asked for."""
        wanted, device = self.settings.compile, self.processes.device
        default = device.type == "cuda" and self.precision == "bf16"
        fast = (default if wanted is None else wanted) and self.processes.world == 1
        return FastStep(self, compile=True) if fast else PlainStep(self)

    # ---- the whole way ----

    def run(self, folder: RunFolder, progress: Progress, log: Logger) -> dict[str, Any]:
        """Train to the end, from the last checkpoint if there is one; returns the summary."""
        self.began = time.monotonic() - self._resume(folder)
        self.last_save = time.monotonic()
        progress.first = self.network.step / self.steps
        with asked_to_stop() as stop:
            stepper = self.stepper()
            for epoch in range(self.network.step // self.steps, self.settings.epochs):
                for _ in stepper.epoch(epoch, self._enter(epoch)):
                    if self.tickets is not None and self.network.step == self.tickets.start:
                        self.start = self.evaluate(self.model)
                    if self.network.step % self.steps == 0:
                        self._end_epoch(folder, progress, log)
                    elif progress.due():
                        self._show(progress, self._line(None if self.on_gpu else self.meter.values()))
                    self._pause(folder, stop)
            stepper.close()
            return self._finish(folder)

    def _enter(self, epoch: int) -> int:
        """Begin an epoch, or go on in the middle of it; the steps of it that are done."""
        done = self.network.step - epoch * self.steps
        if done == 0:
            self.meter.reset()
        self.model.train()
        return done

    def _score_ticket(self) -> None:
        """Evaluate a ticket when it is collected."""
        if self.tickets is not None and self.network.step > self.tickets.start:
            self.scores.append(self.evaluate(self.model))

    def _line(self, meter: Tensor | None) -> dict[str, Any]:
        """Where the run stands, and how the epoch goes (or how the last one went)."""
        epoch, step = (self.network.step - 1) // self.steps, self.network.step
        if meter is not None:
            samples = min((step - epoch * self.steps) * self.settings.batch_size, self.data.train_size)
            loss, right, _ = meter.tolist()
            self.last = loss / samples, right / samples
        lr = float(self.optimizer.param_groups[0]["lr"]) if self.tickets is None else self.tickets.lr
        line = {"epoch": epoch + 1, "step": step, "phase": self.phase(), "lr": lr}
        return line | {
            "loss": self.last[0],
            "train_accuracy": self.last[1],
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
            "network": _compact(self.network.state_dict()),
            "optimizer": _compact(self.optimizer.state_dict()),
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
            "test_flops_ratio": flops(final, self.example()).ratio,
            "seconds": round(time.monotonic() - self.began, 3),
        }


def _compact(state: dict[str, Any]) -> dict[str, Any]:
    """Without what a tensor's storage holds beside it: `torch.save` would write that too."""

    def compact(tensor: Tensor) -> Tensor:
        return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()

    compacted: dict[str, Any] = tree_map_only(Tensor, compact, state)
    return compacted
