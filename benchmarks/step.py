"""One training step of a 95 % sparse VGG-16, against the dense one: batch 128, float32."""

from __future__ import annotations

import statistics

from benchmarks.timing import Row, ratio, take_turns
from benchmarks.training import Trainer
from suptickets import Static

REQUIRED = 1.10


def run() -> list[Row]:
    """Milliseconds of both, and the share that ours takes of the dense step."""
    dense, sparse = Trainer("vgg16"), Trainer("vgg16", Static(0.95))
    times = take_turns({"dense": lambda: dense.step, "sparse": lambda: sparse.step}, rounds=7)
    share = ratio(times["sparse"], times["dense"])
    medians = {name: statistics.median(values) for name, values in times.items()}
    name = "ratio_to_dense"
    return [
        Row("vgg16", "dense", medians["dense"], name, 1.0),
        Row("vgg16", "95 % sparse", medians["sparse"], name, share, f"<= {REQUIRED:.2f}", share <= REQUIRED),
    ]
