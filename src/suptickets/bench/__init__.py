"""The project's own measurements: `suptickets bench NAME`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console

from suptickets.bench import (
    build,
    explore,
    inference,
    loop,
    memory,
    peers,
    profile,
    scale,
    step,
    superpose,
    together,
)
from suptickets.bench.contenders import try_out
from suptickets.bench.turns import SPARSITY, Options, Row
from suptickets.errors import SparsityError, choice, fraction, whole
from suptickets.randomness import fork_random
from suptickets.training.build import check_model
from suptickets.training.processes import connect
from suptickets.training.shown import grid


@dataclass(frozen=True)
class Benchmark:
    """Something that can be measured.

    Attributes:
        run: measures it.
        summary: one line about it.
    """

    run: Callable[[Options], list[Row]]
    summary: str


BENCHMARKS: dict[str, Benchmark] = {
    "step": Benchmark(step.run, "a training step: dense, masks, ours; eager and fast"),
    "explore": Benchmark(explore.run, "an exploration, against sorting dense tensors"),
    "superpose": Benchmark(superpose.run, "an exploration and a collection, in steps and of a whole run"),
    "memory": Benchmark(memory.run, "memory of a training step over that of the dense one"),
    "scale": Benchmark(scale.run, "growth from 1 to 500 million weights, from 50 to 99 % sparsity"),
    "peers": Benchmark(peers.run, "step, exploration and epoch against what one would use instead"),
    "profile": Benchmark(profile.run, "where the time of a step goes, by kind of kernel, and the floor"),
    "together": Benchmark(together.run, "several runs at a time on one device, against one after another"),
    "loop": Benchmark(loop.run, "the training loop against a bare one, on a CPU"),
    "build": Benchmark(build.run, "building the dense weights, against an eager step"),
    "inference": Benchmark(inference.run, "predictions on a CPU, 1 and 16 images: ours and dense networks"),
}
OTHERS = ("scale", "loop", "inference")  # what they measure is not what is trained on noise
COMMON = {"device": "{}", "torch": "torch {}", "counted": "counted: {}"}  # the same in all rows


def bench(
    name: str,
    *,
    model: str | None = None,
    device: str = "auto",
    sparsity: float = SPARSITY,
    rounds: int = 5,
    compile: bool = False,
    largest: float | None = None,
) -> dict[str, Any]:
    """Measure `name`: {"name": ..., "rows": [...]}; all rows of a name have the same keys.

    Args:
        name: one of `BENCHMARKS`.
        model: the one model to measure; by default those of the paper on a GPU, VGG-16 on a CPU (`inference`:
            and ResNet-50).
        device: `cpu`, `cuda` or `auto`.
        sparsity: fraction of the weights that are zero.
        rounds: turns that each contender gets.
        compile: measure what torch.compile makes of it on a CPU too (`step`, `inference`).
        largest: the largest network of `scale`, in millions of weights.
    """
    choice("benchmark", name, BENCHMARKS)
    if model is not None:
        if name == "scale":
            raise SparsityError("scale has networks of its own: leave out --model")
        check_model(model)
    compiled = ("step", "inference")
    for flag, given, of in (("--largest", largest is not None, ("scale",)), ("--compile", compile, compiled)):
        if given and name not in of:
            raise SparsityError(f"{flag} is for {' and '.join(of)}: leave it out")
    fraction("--sparsity", sparsity)
    if name in ("loop", "inference"):
        if device == "cuda":
            raise SparsityError(f"{name} is measured on a CPU: leave out --device")
        device = "cpu"
    options = Options(
        connect(device).device, model, sparsity, whole("--rounds", rounds), compile, largest=largest
    )
    with fork_random():
        if name not in OTHERS and (model is not None or sparsity != SPARSITY):
            for each in options.models:
                try_out(each, options)  # what is wrong with it is said before anything else
        rows = BENCHMARKS[name].run(options)
    common = {"device": _device(options), "torch": torch.__version__}
    return {"name": name, "rows": [{**row, **common} for row in rows]}


def _device(options: Options) -> str:
    if options.cuda:
        return torch.cuda.get_device_name(options.device)
    return f"CPU, {torch.get_num_threads()} threads"


def show(result: dict[str, Any], console: Console) -> None:
    """Print the rows as a table; columns that no row fills are left out, what all rows share is said once."""
    rows: list[Row] = result["rows"]
    columns = [key for key in rows[0] if key not in COMMON and any(row[key] is not None for row in rows)]
    numbers = {column: any(isinstance(row[column], float) for row in rows) for column in columns}
    console.print(grid(numbers, ([_text(row[column]) for column in columns] for row in rows)))
    common = [text.format(rows[0][key]) for key, text in COMMON.items() if key in rows[0]]
    console.out("; ".join(common))


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "met" if value else "MISSED"
    if isinstance(value, float):
        return f"{value:,.3f}" if abs(value) >= 0.1 else f"{value:.3g}"
    return "" if value is None else str(value)
