"""Building all dense weights of a 95 % sparse VGG-16, against its whole training step of batch 128."""

from __future__ import annotations

import statistics

from benchmarks.timing import Row, ratio, take_turns
from benchmarks.training import Trainer
from suptickets import Static

REQUIRED = 0.05
PAGE = 1024  # numbers in a page of memory


def run() -> list[Row]:
    """Milliseconds of both, and the share that building takes of the step."""
    trainer = Trainer("vgg16", Static(0.95))
    assert trainer.network is not None
    weights = trainer.network.weights.values()

    def build() -> None:
        for weight in weights:
            dense = weight(weight.values).detach()
            dense.view(-1)[::PAGE].sum()  # zeros are only there once they are read

    times = take_turns({"step": lambda: trainer.step, "build": lambda: build}, rounds=5)
    share = ratio(times["build"], times["step"])
    step, building = (statistics.median(times[name]) for name in ("step", "build"))
    name = "ratio_to_step"
    return [
        Row("vgg16", "step", step, name, 1.0),
        Row(
            "vgg16", "build the dense weights", building, name, share, f"<= {REQUIRED:.2f}", share <= REQUIRED
        ),
    ]
