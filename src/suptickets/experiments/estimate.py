"""What a plan will cost, and what cells about the model alone show: FLOPs by formula, hours by experience."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from math import prod
from statistics import median
from typing import Any

import torch
from rich.tree import Tree

from suptickets.baselines import TreeNet
from suptickets.data.order import steps
from suptickets.experiments.cells import Cell
from suptickets.experiments.plan import AVERAGING, Branch, Reading, Task, default_settings
from suptickets.measure.flops import Flops, flops
from suptickets.measure.sparsity import sparsity
from suptickets.models import MODELS, build_model
from suptickets.report.parted import parted
from suptickets.training import price
from suptickets.training.price import SIZES
from suptickets.training.settings import Settings

# Seconds of an epoch on an NVIDIA H200, one run at a time: steps as measured. ImageNet is a guess: 230 s by
# its FLOPs at the rate of ResNet-50 on CIFAR, and more for decoding images.
SECONDS = {"vgg16": 0.51, "resnet50": 2.7, "wrn28-10": 4.2, "resnet50-imagenet": 600.0}
MEASURED = "steps measured on an NVIDIA H200, one run at a time"
GUESSED = {"resnet50-imagenet": "a guess for an NVIDIA H200"}


@dataclass(frozen=True)
class Network:
    """A model for data of a known size: FLOPs of a forward pass, and the shapes of its layers."""

    forward: Flops
    shapes: Mapping[str, Sequence[int]]
    samples: int

    def steps(self, batch_size: int) -> int:
        """The number of steps in an epoch."""
        return steps(self.samples, batch_size)


@lru_cache
def network(data: str, model: str, heads: int = 1) -> Network:
    """The paper's model for the paper's data, or TreeNet with so many heads; no data are loaded."""
    samples, classes, _ = SIZES[data]
    size = MODELS[model].size
    with torch.random.fork_rng(devices=[]):
        networks = [build_model(model, classes, size=size) for _ in range(heads)]
        built = networks[0] if heads == 1 else TreeNet(networks)
    shapes = {name: layer.shape for name, layer in sparsity(built).layers.items()}
    return Network(flops(built, torch.zeros(1, 3, size, size)), shapes, samples)


def task_flops(task: Task) -> float:
    """FLOPs of a trunk, and of what its branches add; teachers add a forward pass each."""
    model = task.model
    trunk = 0.0 if task.trunk is None else run_flops(task.trunk, model)
    branches = 0.0
    for branch in task.branches:
        taught = branch.settings.cycles / 3 if branch.settings.booster == "distillation" else 0.0
        first = run_flops(branch.settings, model) if taught and branch.teacher is None else 0.0
        branches += first + run_flops(branch.settings, model) * (1 + taught) - trunk * branch.fork
    return trunk + branches


@cache
def run_flops(run: Settings, model: str) -> float:
    """FLOPs of a whole run of the paper's model, whatever stands in for it; members share a batch."""
    net = network(run.data, model, run.members if run.booster == "tree-net" else 1)
    spent = price.run_flops(run, net.forward, net.shapes, net.steps(run.batch_size), net.samples)
    return spent.sparse * ((1 - run.sparsity) if run.method == "small-dense" else 1.0)


def seconds_per_epoch(records: Sequence[Mapping[str, Any]], hardware: str) -> dict[str, tuple[float, str]]:
    """Seconds by model, and their basis: the median of the store's results on this hardware, if it has some.

    The time of runs that shared the hardware is divided by how many they were.
    """
    known: dict[str, list[float]] = {}
    for record in records:
        epochs, seconds = record["measures"].get("epochs"), record.get("seconds")
        if epochs and seconds and not record["changes"] and record.get("hardware") == hardware:
            shared = seconds / record.get("jobs", 1)
            known.setdefault(record["cell"]["model"], []).append(shared / epochs)
    own = {model: (median(v), f"the store's {len(v)} results on {hardware}") for model, v in known.items()}
    return {model: (value, GUESSED.get(model, MEASURED)) for model, value in SECONDS.items()} | own


def cost(
    tasks: Sequence[Task], records: Sequence[Mapping[str, Any]] = (), hardware: str = ""
) -> dict[str, Any]:
    """Runs, epochs, FLOPs and hours of a plan, and what the hours are based on."""
    seconds = seconds_per_epoch(records, hardware)
    models: dict[str, list[str]] = {}
    for model in dict.fromkeys(task.model for task in tasks):
        models.setdefault(seconds[model][1], []).append(model)
    return {
        "runs": sum(len(task.runs) for task in tasks),
        "epochs": sum(task.epochs for task in tasks),
        "flops": float(sum(map(task_flops, tasks))),
        "hours": sum(task.epochs * seconds[task.model][0] for task in tasks) / 3600,
        "hours_from": "; ".join(f"{', '.join(names)}: {basis}" for basis, names in models.items()),
    }


def tree(tasks: Sequence[Task]) -> Tree:
    """The plan, to look at; seeds that have the same tree are shown as one."""
    trunks = sum(task.trunk is not None for task in tasks)
    others = sum(len(task.runs) for task in tasks) - trunks
    root = Tree(f"{trunks:,} trunks and {others:,} other runs, {sum(t.epochs for t in tasks):,} epochs")
    for (first, *rest), same in parted(tasks, _lines).items():
        node = root.add(f"{first}, {_seeds([task.seed for task in same])}")
        for line in rest:
            node.add(line)
    return root


def _seeds(seeds: Sequence[int]) -> str:
    """How many seeds, which if they are not the first, and how often if experiments repeat them."""
    once = sorted(set(seeds))
    first = once == list(range(1, len(once) + 1))
    which = "" if first else f" ({', '.join(map(str, once))})"
    several = f"seed {once[0]}" if len(once) == 1 else f"{len(once)} seeds{which}"
    return several + (f", {len(seeds) / len(once):g} times" if len(seeds) > len(once) else "")


def _lines(task: Task) -> tuple[str, ...]:
    """A line for the trunk, and one for each branch; or one for a run without a trunk."""
    epochs = [epochs for _, epochs in task.runs]
    branches = zip(task.branches, epochs[task.trunk is not None :], strict=True)
    if task.trunk is None:
        return tuple(f"{_name(b.settings)} {_branch(b, b.settings, n)}" for b, n in branches)
    grown = [_branch(branch, task.trunk, n) for branch, n in branches]
    return f"{_name(task.trunk)}: {epochs[0]} epochs", *grown


def _branch(branch: Branch, first: Settings, epochs: int) -> str:
    """How a branch differs from the trunk, how long it takes, how often it is read."""
    run = branch.settings
    booster = "plain finish" if run.booster == "none" else run.booster
    read = f", read {len(branch.readings)} times" if len(branch.readings) > 1 else ""
    return f"{booster}{_pruned(run, first)}{_cycles(run)}: {epochs} epochs{read}"


def _name(run: Settings) -> str:
    """What is trained, with the distribution if it is not the default."""
    name = f"{run.data} {run.model} {run.method} {run.sparsity:g}"
    return (
        name if run.distribution == default_settings(run.data).distribution else f"{name} {run.distribution}"
    )


def _pruned(run: Settings, first: Settings) -> str:
    """The sparsity of a run that is pruned when it forks."""
    return "" if run.sparsity == first.sparsity else f" at {run.sparsity:g}"


def _cycles(run: Settings) -> str:
    if not run.cyclic:
        return ""
    others = "".join(f", {part}" for part in [*run.criteria, *_otherwise(run)])
    return f" ({run.cycles} cycles of {run.cycle_epochs:g}, {run.schedule} to {run.lr_high:g}{others})"


def _otherwise(run: Settings) -> list[str]:
    """How a run explores, and how its tickets are combined, where that is not the default."""
    default = default_settings(run.data, run.booster)
    changed = [n for n in ("explore_rate", *AVERAGING) if getattr(run, n) != getattr(default, n)]
    return [f"{name.replace('_', ' ')} {getattr(run, name)}" for name in changed]


def about_model(cell: Cell) -> float | None:
    """What a cell that trains nothing shows; a drawing shows no number."""
    net = network(cell.data, cell.model)
    if cell.measure == "test_flops":
        return float(net.forward.dense)
    if cell.measure == "train_flops":
        return 3.0 * net.forward.dense * net.samples * Reading.of(cell.settings()).settings.epochs
    if cell.measure == "layer_parameters":
        return float(sum(prod(net.shapes[name]) for name in layers_of(cell.layer, net.shapes)))
    if cell.measure == "layer_flops":
        return float(sum(net.forward.layers[name].dense for name in layers_of(cell.layer, net.shapes)))
    return None


def layers_of(layer: str | None, names: Mapping[str, Any]) -> list[str]:
    """The layers that a row of the layer table stands for."""
    if layer in ("overall", "backbone"):
        return [name for name in names if layer == "overall" or name != "fc"]
    return [name for name in names if name == layer]
