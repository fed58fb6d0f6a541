"""One training step of batch 128: dense, masks, ours; eager and fast.

Eager is what `--no-compile` does, the making of the batch included. Fast is compiled, and on a GPU captured
with its data as one graph; all three have the same forward pass, loss, feed and fused SGD.
"""

from __future__ import annotations

from statistics import median

from suptickets.bench.contenders import VARIANTS, batches, tidy, variant
from suptickets.bench.turns import Limits, Options, Row, judged, ratio, take_turns

CPU = {"vgg16": {"ratio_to_dense": 1.10}}
GPU = {
    "vgg16": {"ratio_to_dense": 0.95, "ratio_to_masks": 0.95, "milliseconds": 1.65},
    "resnet50": {"ratio_to_dense": 1.00, "ratio_to_masks": 1.00},
    "wrn28-10": {"ratio_to_dense": 1.00, "ratio_to_masks": 1.00},
}


def run(options: Options) -> list[Row]:
    """Milliseconds of each, and the ratio to the dense step and to the one with masks."""
    modes = (False, True) if options.cuda or options.compile else (False,)
    return [row for model in options.models for fast in modes for row in measure(model, options, fast=fast)]


def measure(model: str, options: Options, *, fast: bool) -> list[Row]:
    """The three variants of one model, in turns."""
    tidy(options)
    mode, data, contenders = "fast" if fast else "eager", batches(model, options), {}
    for name in VARIANTS:
        options.say(f"{model}, {mode}: making {name} ready")
        run = variant(name, model, data, options, fast=fast)
        contenders[name] = run.contender()
    times = take_turns(contenders, options)
    rows = [
        {
            "model": model,
            "mode": mode,
            "precision": run.parts.precision,
            "variant": name,
            "milliseconds": median(times[name]),
            "ratio_to_dense": ratio(times[name], times["dense"]),
            "ratio_to_masks": ratio(times[name], times["masks"]),
        }
        for name in VARIANTS
    ]
    return [judged(row, _limits(row, options)) for row in rows]


def _limits(row: Row, options: Options) -> Limits:
    if row["variant"] != "ours" or options.cuda != (row["mode"] == "fast"):
        return {}
    return options.limits(row["model"], GPU if options.cuda else CPU)
