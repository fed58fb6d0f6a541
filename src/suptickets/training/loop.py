"""The training loop."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from suptickets.baselines import Members
from suptickets.data import Data
from suptickets.errors import SparsityError, TrainingError, reason
from suptickets.measure.predictions import Scores, Tally
from suptickets.randomness import python_state, set_python_state
from suptickets.training import build, teaching
from suptickets.training.evaluate import TEST_BATCH
from suptickets.training.fast import FastStep
from suptickets.training.folder import RunFolder
from suptickets.training.loggers import Logger
from suptickets.training.panel import Panel
from suptickets.training.parts import Parts
from suptickets.training.plain import PlainStep
from suptickets.training.processes import Processes
from suptickets.training.progress import Progress
from suptickets.training.result import finish
from suptickets.training.saved import Saved
from suptickets.training.settings import Settings
from suptickets.training.stop import Interrupted, asked_to_stop

SAVE, STOP = 1, 2
RATES = 8  # learning rates that are logged for an epoch


class Trainer(Parts):
    """One run, from its first step to its last."""

    def __init__(self, settings: Settings, data: Data, processes: Processes) -> None:
        """Build everything from the settings; teachers that these name are read, and nothing is written."""
        super().__init__(settings, data, processes)
        if self.tickets is not None:
            self.tickets.told = self._score_ticket
        self.teaching = 0.0  # what teachers cost, as a share of the dense training
        if settings.teachers:
            self._learn_from(teaching.given(settings, processes), 0.0)
        self.start: Scores | None = None
        self.before_pruning: Scores | None = None  # scores of a network that is pruned before the cycles
        if isinstance(self.network.method, build.PrunedOnce):
            self.network.method.told = self._score_dense
        self.scores: list[Scores] = []
        self.saved: int | None = None  # the step of the last checkpoint
        self.had = processes.world  # the number of processes that wrote it
        self.last: tuple[float, float] | None = None  # loss and accuracy of training when last read
        self.on_gpu = processes.device.type == "cuda"

    def stepper(self, say: Callable[[str], None]) -> PlainStep | FastStep:
        """How steps are done: the fast way if they are compiled (`build.compiles`) and it suits the run."""
        if not build.compiles(self.settings, self.processes.device):
            return PlainStep(self)
        if not FastStep.suits(self):
            say("steps are not captured: several processes, or weights of several decays or dtypes")
            return PlainStep(self)
        return FastStep(self, compile=True)

    # ---- the whole way ----

    def run(self, folder: RunFolder, progress: Progress, log: Logger) -> dict[str, Any]:
        """Train to the end, from the last checkpoint if there is one; returns the summary."""
        if self.settings.booster == "distillation" and self.distillation is None:
            self._learn_from(*teaching.trained(self, folder, progress))
        self.began = time.monotonic() - self._resume(folder)
        if self.had != (now := self.processes.world):
            progress.say(
                f"the run was one of {self.had} processes and goes on with {now}: not as it would have"
            )
        if self.tickets is not None and self.start is None and self.network.step == self.tickets.start:
            self.start = self.evaluate(self.model)
        self.last_save = time.monotonic()
        progress.first, progress.began = self.network.step / self.steps, time.monotonic()
        with asked_to_stop() as stop:
            with closing(self.stepper(progress.say)) as stepper:
                for epoch in range(self.network.step // self.steps, self.settings.epochs):
                    for _ in stepper.epoch(epoch, self._enter(epoch)):
                        self._after_step(folder, progress, log)
                        self._pause(folder, stop)
            return self._finish(folder)

    def _after_step(self, folder: RunFolder, progress: Progress, log: Logger) -> None:
        """Log an epoch that has ended, show how far the run is, score the network before the cycles."""
        if self.network.step % self.steps == 0:
            self._end_epoch(folder, progress, log)
        elif progress.due():
            self._show(progress, self._line(None if self.on_gpu else self._so_far()))
        if self.tickets is not None and self.network.step == self.tickets.start:
            self._keep(folder)  # evaluating may find that the test data are damaged
            self.start = self.evaluate(self.model)

    def _learn_from(self, teachers: list[Saved], spent: float) -> None:
        """Take the teachers' loss; they cost what was `spent` on them, and a pass of each at every step."""
        self.distillation, passes = teaching.distillation(self, teachers)
        self.teaching = spent + passes
        self.seed()  # building networks draws from the same generator

    def _so_far(self) -> Tensor:
        """The meter within an epoch, as if every process had seen what this one has."""
        return self.meter.values() * self.processes.world

    def _enter(self, epoch: int) -> int:
        """Begin an epoch, or go on in the middle of it; returns how many of its steps are done."""
        done = self.network.step - epoch * self.steps
        if done == 0:
            self.meter.reset()
        self.model.train()
        return done

    def _score_dense(self) -> None:
        """Evaluate the network before it is pruned."""
        self.before_pruning = self.evaluate(self.model)

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
        read = {} if self.last is None else {"loss": self.last[0], "train_accuracy": self.last[1]}
        return line | read | {"sparsity": self.network.sparsity}

    def _show(self, progress: Progress, line: dict[str, Any]) -> None:
        shown = {key: value for key, value in line.items() if key not in ("step", "layers", "lrs")}
        part = ((self.network.step - 1) % self.steps + 1) / self.steps
        progress.show(**shown, part=part, samples=self.data.train_size)

    def _end_epoch(self, folder: RunFolder, progress: Progress, log: Logger) -> None:
        meter = self.meter.values()
        self._check_loss(meter)
        self.processes.sum([meter])
        line, every = self._line(meter), self.settings.evaluate_every
        self._show(progress, line)
        line |= {"layers": {name: layer.sparsity for name, layer in self.network.layers.items()}}
        line |= {"lrs": self._rates(line["epoch"])}
        if every and line["epoch"] % every == 0:
            line |= {f"test_{key}": value for key, value in self.evaluate(self.model).as_dict().items()}
        if self.processes.main:
            log(line)
        self.processes.first(lambda: folder.log(line))

    def _rates(self, epoch: int) -> list[float]:
        """Learning rates within an epoch, evenly spaced; the last is that of its last step."""
        count = min(self.steps, RATES)
        return [self.rate_at((epoch - 1) * self.steps + self.steps * n // count) for n in range(1, count + 1)]

    def _check_loss(self, meter: Tensor) -> None:
        """Stop when the loss is not finite, in whichever process."""
        step = self.network.step
        missed = self.processes.most((step - 1) % self.steps + 1 - int(meter[2]))
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
        """The phase of the run: `normal`, or which cycle."""
        phase = None if self.tickets is None else self.tickets.phase(self.network.step)
        return "normal" if phase is None else f"cycle {phase[0] + 1} of {self.settings.cycles}"

    def evaluate(self, model: nn.Module) -> Scores:
        """The scores of a network on the whole test set, not augmented, over all processes."""
        return self.tally(model).scores()

    def tally(self, model: nn.Module) -> Tally:
        """All that is counted of a network's predictions on the test set."""
        tally = Tally(self.processes.device)
        self._test(model, lambda x, y: tally.add(self._predict(model, x), y))
        self.processes.sum(tally.tensors())
        return tally

    def panel(self, model: Members) -> Panel:
        """What `tally` counts, for each member of a network and for all together."""
        panel = Panel(model.size, self.processes.device)
        self._test(model, lambda x, y: panel.add(self._predict(model.members, x).unbind(), y))
        self.processes.sum(panel.tensors())
        return panel

    @torch.no_grad()
    def _test(self, model: nn.Module, add: Callable[[Tensor, Tensor], None]) -> None:
        p, training = self.processes, model.training
        p.share_buffers(model)
        model.eval()
        for x, y in self.data.test_batches(
            TEST_BATCH, device=p.device, dtype=self.dtype, rank=p.rank, world=p.world
        ):
            add(x, y)
        model.train(training)

    def _predict(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        with self.autocast():
            return function(x)

    # ---- stopping, going on, finishing ----

    def _pause(self, folder: RunFolder, stop: list[int]) -> None:
        """Write a checkpoint when one is due; stop when asked to."""
        due = time.monotonic() - self.last_save >= self.settings.checkpoint_every
        wanted = self.processes.most(STOP if stop else SAVE if due else 0)
        if wanted:
            self._keep(folder)
        if wanted == STOP:
            again = f"{self.processes.program} train --resume {folder.path}"
            raise Interrupted(f"stopped after step {self.network.step}: {again} goes on")

    def _keep(self, folder: RunFolder) -> None:
        """Write a checkpoint, unless the loss has ceased to be finite."""
        self._check_loss(self.meter.values())
        self._save(folder)

    def state_dict(self) -> dict[str, Any]:
        """All that the rest of the run depends on; where each process has its own value, those of all."""
        p = self.processes
        self.explored.update()
        alive = self.network.weights
        return {
            "network": _compact(self.network.state_dict()),
            "optimizer": _compact(self.optimizer.state_dict()),
            "tickets": None if self.tickets is None else self.tickets.state_dict(),
            "data": self._sizes(),
            "cost": [self.cost.steps, self.cost.spent],
            "explored": {
                n: _packed(lived, alive[n].rows()) for n, lived in self.explored.state_dict().items()
            },
            "start": self.start and self.start.as_dict(),
            "before_pruning": self.before_pruning and self.before_pruning.as_dict(),
            "scores": [scores.as_dict() for scores in self.scores],
            "meter": p.gather(self.meter.values()),
            "rng": p.gather(torch.get_rng_state()),
            "python_rng": p.gather(python_state()),
            "cuda_rng": p.gather(torch.cuda.get_rng_state()) if self.on_gpu else None,
        }

    def _sizes(self) -> list[int]:
        """What the order of the data depends on, and what is learned."""
        return [self.data.train_size, self.data.test_size, self.data.classes]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict()`; with another number of processes, the first takes the sums of all."""
        if (then := state["data"]) != (now := self._sizes()):  # their order would be another
            counts = " -> ".join(f"{a} and {b} images in {c} classes" for a, b, c in (then, now))
            raise SparsityError(f"the data have changed: {counts}")
        self.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.tickets is not None and state["tickets"] is not None:
            self.tickets.load_state_dict(state["tickets"])
        self.cost.steps, self.cost.spent = state["cost"]
        lived = {name: _unpacked(bits) for name, bits in state["explored"].items()}
        self.explored.load_state_dict(lived)
        self.start, self.before_pruning = (
            scores and Scores(**scores) for scores in (state["start"], state["before_pruning"])
        )
        self.scores = [Scores(**scores) for scores in state["scores"]]
        rank, meters = self.processes.rank, state["meter"]
        self.had = len(meters)
        if len(meters) == self.processes.world:
            self.meter.load(meters[rank])
        else:
            seen = torch.stack(meters)
            self.meter.load(torch.cat([seen[:, :2].sum(0) * (rank == 0), seen[:1, 2]]))
        torch.set_rng_state(state["rng"][rank % len(meters)])
        set_python_state(state["python_rng"][rank % len(meters)])
        if state["cuda_rng"] is not None and self.on_gpu:
            torch.cuda.set_rng_state(state["cuda_rng"][rank % len(meters)])

    def _finish(self, folder: RunFolder) -> dict[str, Any]:
        self._save(folder)
        return finish(self, folder)

    def _save(self, folder: RunFolder) -> None:
        state = {**self.state_dict(), "seconds": time.monotonic() - self.began}
        self.processes.first(lambda: folder.save_checkpoint(state, self.settings))
        self.saved, self.last_save = self.network.step, time.monotonic()

    def _resume(self, folder: RunFolder) -> float:
        """Load the last checkpoint, if there is one; returns the seconds that were spent before it."""
        state = self.processes.first(folder.load_checkpoint)
        if state is not None:
            try:
                self.load_state_dict(state)
            except (KeyError, TypeError, ValueError, RuntimeError, AttributeError, zlib.error) as error:
                raise SparsityError(
                    f"{folder.checkpoint} is no checkpoint of this run ({reason(error)}): start over with "
                    "--force"
                ) from error
            self.saved = self.network.step
        self.processes.first(lambda: folder.forget_metrics_after(self.network.step // self.steps))
        return 0.0 if state is None else float(state["seconds"])


def _compact(state: dict[str, Any]) -> dict[str, Any]:
    """Clone tensors whose storage holds more than they do: `torch.save` would write all of it."""

    def compact(tensor: Tensor) -> Tensor:
        return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()

    compacted: dict[str, Any] = tree_map_only(Tensor, compact, state)
    return compacted


def _packed(lived: Tensor, alive: Tensor) -> Tensor:
    """The bits, compressed, without those that are `alive`: the network knows these."""
    bits = np.unpackbits(lived.cpu().numpy())
    bits[alive.cpu().numpy()] = 0
    packed = zlib.compress(np.packbits(bits).tobytes(), level=1)
    return torch.frombuffer(bytearray(packed), dtype=torch.uint8)


def _unpacked(packed: Tensor) -> Tensor:
    return torch.frombuffer(bytearray(zlib.decompress(packed.numpy().tobytes())), dtype=torch.uint8)
