"""An epoch through the training loop, against a bare loop over the same batches and the same sparse model."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F

from suptickets.bench.contenders import BATCH, NEVER, noise
from suptickets.bench.turns import Options, Row, judged, ratio
from suptickets.data import Data, load_data
from suptickets.training.folder import RunFolder
from suptickets.training.loop import Trainer
from suptickets.training.processes import Processes
from suptickets.training.progress import Progress
from suptickets.training.settings import resolve

REQUIRED = {"ratio_to_bare": 1.05}
EPOCHS = {"mlp": 15, "lenet5": 7, "vgg-small": 3}  # of each, in a round


def run(options: Options) -> list[Row]:
    """The MLP and lenet5 on digits, vgg-small on images of CIFAR's size; on a CPU."""
    rows = []
    for model in EPOCHS if options.model is None else (options.model,):
        options.say(f"{model}: epochs in turns")
        digits = model in ("mlp", "lenet5")
        data: Data = load_data("digits") if digits else noise(4 * BATCH, Options(torch.device("cpu")))
        rows += measure(model, data, options.rounds * EPOCHS.get(model, 1), options.sparsity)
    return rows


class Turns(Progress):
    """Notes when each epoch of a run ends, and lets another contender have its epoch in between.

    Attributes:
        ours: milliseconds of the run's epochs.
        theirs: milliseconds of the other's.
    """

    def __init__(self, epochs: int, other: Callable[[int], None]) -> None:
        super().__init__(epochs, quiet=True)
        self.other = other
        self.ours: list[float] = []
        self.theirs: list[float] = []
        self.last = time.perf_counter()

    def show(self, **line: object) -> None:
        """Note the end of an epoch, and let the other contender have one."""
        ended = time.perf_counter()
        self.ours.append(1000 * (ended - self.last))
        self.other(len(self.ours))
        self.last = time.perf_counter()
        self.theirs.append(1000 * (self.last - ended))


def epochs_in_turn(trainer: Trainer, other: Callable[[int], None]) -> tuple[list[float], list[float]]:
    """Milliseconds of the epochs of a whole run, and of as many of another; the first is not counted."""
    turns = Turns(trainer.settings.epochs, other)
    with tempfile.TemporaryDirectory() as path:
        folder = RunFolder(Path(path))
        folder.begin(trainer.settings)
        trainer.run(folder, turns, lambda line: None)
    return turns.ours[1:], turns.theirs[1:]


def make(model: str, data: Data, epochs: int, sparsity: float) -> Trainer:
    """A run as `suptickets train` would make it."""
    given = {"model": model, "sparsity": sparsity, "booster": "none", "epochs": epochs}
    settings = resolve(given | {"batch_size": 64, "interval": NEVER})
    return Trainer(settings, data, Processes(0, 1, torch.device("cpu")))


def bare_epoch(of: Trainer, epoch: int) -> None:
    """An epoch as one would write it by hand."""
    for x, y in of.data.train_batches(of.settings.batch_size, 1, epoch):
        of.optimizer.zero_grad()
        F.cross_entropy(of.model(x), y).backward()
        of.optimizer.step()


def measure(model: str, data: Data, epochs: int, sparsity: float) -> list[Row]:
    """Epochs of both, in turns."""
    bare, run = (make(model, data, count, sparsity) for count in (1, epochs + 1))
    ours, theirs = epochs_in_turn(run, lambda epoch: bare_epoch(bare, epoch))
    rows = [
        {
            "model": model,
            "variant": name,
            "milliseconds": median(times),
            "ratio_to_bare": ratio(times, theirs),
        }
        for name, times in {"bare loop": theirs, "train": ours}.items()
    ]
    return [judged(rows[0]), judged(rows[1], REQUIRED)]
