"""The time to build all dense weights of a sparse network, as an eager step does, against that step."""

from __future__ import annotations

from statistics import median

from suptickets.bench.contenders import Run, batches, tidy
from suptickets.bench.turns import Contender, Options, Row, judged, ratio, take_turns

REQUIRED = {"vgg16": {"ratio_to_step": 0.05}}
PAGE = 1024  # numbers in a page of memory


def run(options: Options) -> list[Row]:
    """Milliseconds of the step and of building, and the share of the step that building takes."""
    return [row for model in options.models for row in measure(model, options)]


def measure(model: str, options: Options) -> list[Row]:
    """One model."""
    tidy(options)
    sparse = Run(model, "static", batches(model, options), options, fast=False, booster="none")
    weights = sparse.network.weights.values()

    def build() -> None:
        for weight in weights:
            dense = weight(weight.values).detach()
            dense.permute(weight.order).view(-1)[::PAGE].sum()  # zeros get memory only when they are read

    times = take_turns({"step": sparse.contender(), "build": Contender(lambda: build)}, options)
    rows = [
        {
            "model": model,
            "variant": name,
            "milliseconds": median(times[name]),
            "ratio_to_step": ratio(times[name], times["step"]),
        }
        for name in times
    ]
    return [judged(rows[0]), judged(rows[1], {} if options.cuda else options.limits(model, REQUIRED))]
