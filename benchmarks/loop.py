"""An epoch through the training loop, against a bare loop over the same batches and the same sparse model."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.timing import Row
from suptickets.data import Data, load_data
from suptickets.data.base import ArrayData
from suptickets.training.folder import RunFolder
from suptickets.training.loop import Trainer
from suptickets.training.processes import Processes
from suptickets.training.progress import Progress
from suptickets.training.settings import resolve

REQUIRED = 1.05
EPOCHS = 12


def run() -> list[Row]:
    """digits with the MLP and with lenet5, and vgg-small on images of CIFAR's size."""
    digits = load_data("digits")
    rows = [*measure("mlp", digits, 64, 6 * EPOCHS), *measure("lenet5", digits, 64, 3 * EPOCHS)]
    return rows + measure("vgg-small", images(512), 64, EPOCHS)


def images(count: int) -> Data:
    """Noise of CIFAR's shape, augmented as CIFAR is."""
    x, y = torch.randint(256, (count, 3, 32, 32), dtype=torch.uint8), torch.randint(10, (count,))
    half = (0.5,) * 3
    return ArrayData("images", 10, x, y, x[:64], y[:64], half, half, padding=4, flip=True)


class Epochs(Progress):
    """Notes when each epoch ends, and lets the other contender run one in between."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer.settings.epochs, quiet=True)
        self.ours: list[float] = []
        self.bare: list[float] = []
        self.other = make(trainer.settings.model, trainer.data, trainer.settings.batch_size, 1)
        self.last = time.perf_counter()

    def show(self, **line: object) -> None:  # type: ignore[override]
        """At the end of an epoch."""
        self.ours.append(1000 * (time.perf_counter() - self.last))
        start = time.perf_counter()
        bare_epoch(self.other, len(self.ours))
        self.last = time.perf_counter()
        self.bare.append(1000 * (self.last - start))


def make(model: str, data: Data, batch: int, epochs: int) -> Trainer:
    given = {"model": model, "booster": "none", "epochs": epochs, "batch_size": batch}
    return Trainer(resolve({**given, "interval": 1000}), data, Processes(0, 1, torch.device("cpu")))


def bare_epoch(of: Trainer, epoch: int) -> None:
    """What one would write by hand."""
    for x, y in of.data.train_batches(of.settings.batch_size, 1, epoch):
        of.optimizer.zero_grad()
        F.cross_entropy(of.model(x), y).backward()
        of.optimizer.step()


def measure(model: str, data: Data, batch: int, epochs: int) -> list[Row]:
    """Epochs of both in turn; the first is not counted."""
    trainer = make(model, data, batch, epochs)
    turns = Epochs(trainer)
    with tempfile.TemporaryDirectory() as path:
        folder = RunFolder(Path(path))
        folder.begin(trainer.settings)
        trainer.run(folder, turns, lambda line: None)
    ours, bare = turns.ours[1:], turns.bare[1:]
    share = statistics.median(a / b for a, b in zip(ours, bare, strict=True))
    name = "ratio_to_bare"
    return [
        Row(model, "bare loop", statistics.median(bare), name, 1.0),
        Row(model, "train", statistics.median(ours), name, share, f"<= {REQUIRED:.2f}", share <= REQUIRED),
    ]
