"""The paper's experiments at a size for tests: generated data, a network of three layers, a handful of steps.

Run as a program it is a runner: `python experiments_tiny.py DATA OUT EXECUTOR JOBS NAME FILTER`, at the scale
that `SCALE` says. It makes the file that `READY` names, if it does, and then waits for its removal.
"""

import os
import sys
import time
from pathlib import Path

import torch
from make_data import cifar_folder, image_folder
from torch import nn

from suptickets.data.cifar import CIFAR10, CIFAR100
from suptickets.experiments.reproduction import reproduce
from suptickets.models import build_model

SCALE = 0.01  # two epochs, then cycles of one
CHANGES = {
    "model": "experiments_tiny:network",
    "batch_size": 20,
    "interval": 2,
    "device": "cpu",
    "workers": 0,
}
SAID = {name: value for name, value in CHANGES.items() if name != "workers"}  # which changes no result


def network(classes, channels=3, size=32, width=1.0):
    a, b = max(round(16 * width), 1), max(round(16 * width), 1)
    return nn.Sequential(
        *(nn.Conv2d(channels, a, size // 4, size // 4), nn.BatchNorm2d(a), nn.ReLU()),
        *(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(b, classes)),
    )


class Whole(nn.Module):
    """A network that is no chain of modules: TreeNet refuses it."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


def unchained(classes, channels=3, size=32):
    return Whole(network(classes, channels, size))


def narrow_resnet50(classes, channels=3, size=224, width=1.0):
    """The layers of the layer table, with few channels, on few pixels."""
    built = build_model("resnet50-imagenet", classes, channels, size, width / 16)
    built.maxpool = nn.Sequential(built.maxpool, nn.AdaptiveAvgPool2d(4))
    return built


def data(where: Path) -> Path:
    """CIFAR-10, CIFAR-100 and ImageNet, 40 or so images each."""
    cifar_folder(where, CIFAR10, 8)
    cifar_folder(where, CIFAR100, 40)
    image_folder(where / "imagenet", train=12, val=3)
    return where


def run(names, where, out, cells="", seeds=1, executor="debug", jobs=1, **others):
    """`reproduce`, tiny."""
    others = {"scale": SCALE, "changes": CHANGES, **others}
    return reproduce(
        *(names.split(), str(where)),
        seeds=seeds,
        cells=cells,
        jobs=jobs,
        executor=executor,
        out=out,
        **others,
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    where, out, executor, jobs, names, cells = sys.argv[1:]
    if "READY" in os.environ:
        ready = Path(os.environ["READY"])
        ready.touch()
        while ready.exists():
            time.sleep(0.01)
    scale = float(os.environ.get("SCALE", SCALE))
    found = run(names, where, out, cells, executor=executor, jobs=int(jobs), scale=scale)
    sys.exit(bool(found["failed"]))
