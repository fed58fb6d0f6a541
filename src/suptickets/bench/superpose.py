"""What a cycle of Sup-tickets adds: one exploration and one collection, in steps and as shares of a run.

Measured alone, each is waited for. In a run on a GPU an exploration is issued while the device still works on
earlier steps: its share of a run is measured there.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from suptickets.bench.contenders import Run, batches, tidy
from suptickets.bench.explore import CIFAR, in_a_run
from suptickets.bench.turns import Contender, Options, Row, Times, judged, ratio, take_turns
from suptickets.training.build import normal
from suptickets.training.settings import Settings, resolve

CPU = {"exploration": {"vgg16": {"steps": 2.0}}, "collection": {"vgg16": {"steps": 1.0}}}
GPU = dict.fromkeys(CPU, {"vgg16": {"steps": 10.0}})
BOTH = {"vgg16": {"share_of_run": 0.002}}


def run(options: Options) -> list[Row]:
    """Milliseconds of a step, an exploration and a collection; and their shares of a whole run."""
    return [row for model in options.models for row in measure(model, options)]


def measure(model: str, options: Options) -> list[Row]:
    """One model."""
    times = alone(model, options)
    steps = {name: ratio(times[name], times["step"]) for name in times}
    shares = share_of_run(steps | in_run(model, options), resolve({"data": "cifar100"}))
    limits = GPU if options.cuda else CPU
    rows = []
    for name in times:
        row = {"model": model, "variant": name, "milliseconds": median(times[name]), "steps": steps[name]}
        row["share_of_run"] = shares.get(name)
        rows.append(judged(row, options.limits(model, limits.get(name, {}))))
    both = {**rows[0], "variant": "all of a run", "milliseconds": None, "steps": None}
    both["share_of_run"] = sum(shares.values())
    return [*rows, judged(both, options.limits(model, BOTH))]


def alone(model: str, options: Options) -> Times:
    """Each by itself; the network's connections differ from those of the tickets collected before."""
    tidy(options)
    options.say(f"{model}: making a cycle ready")
    run = Run(model, "rigl", batches(model, options), options, fast=options.cuda)
    contenders = {"step": run.contender(), "exploration": run.exploration(), "collection": collection(run)}
    return take_turns(contenders, options)


def in_run(model: str, options: Options) -> dict[str, float]:
    """What an exploration adds to a run, in steps, if it is not what it takes alone: on a GPU."""
    if not options.cuda:
        return {}
    options.say(f"{model}: steps with and without explorations")
    added, step = in_a_run(model, options)
    return {"exploration": added / step}


def collection(run: Run) -> Contender:
    """Average one more ticket in, and prune the average."""
    tickets = run.parts.tickets
    assert tickets is not None
    collect: Callable[[], object] = tickets.collect
    collect()
    return Contender(lambda: collect)


def share_of_run(steps: dict[str, float], recipe: Settings) -> dict[str, float]:
    """The time of all explorations, and of all collections, over that of all steps of a run on CIFAR."""
    explorations = normal(recipe, CIFAR) // recipe.interval + recipe.cycles
    times = {"exploration": explorations, "collection": recipe.cycles}
    return {name: count * steps[name] / (recipe.epochs * CIFAR) for name, count in times.items()}
