"""A step, an exploration and an epoch of ours against what one would use instead.

- `torch.ao.pruning`: masks as parametrizations.
- `sparsimony`: RigL with masks as parametrizations, where it is installed.
- the published way: masks multiplied in after each step, float32, eager, numbers read back at every step; in
  an epoch, data from a loader whose worker processes transform single images.

Their batches are made before a step is measured; ours are part of it. Ours is what `suptickets train` does:
the fast step on a GPU, the plain one on a CPU.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import Any

from suptickets.bench.contenders import BATCH, NEVER, Run, batches, images_of, noise, tidy
from suptickets.bench.loop import epochs_in_turn
from suptickets.bench.rivals import WORKERS, AoPruning, Published, Rival, Sparsimony, Transformed
from suptickets.bench.turns import Contender, Options, Row, judged, ratio, take_turns
from suptickets.data.base import ArrayData
from suptickets.errors import reason
from suptickets.training.loop import Trainer
from suptickets.training.processes import connect
from suptickets.training.settings import resolve

STEP, EXPLORATION, EPOCH = "step", "exploration", "epoch"
OURS, PUBLISHED = "ours", "the published way"
RIVALS: dict[str, type[Rival]] = {
    "torch.ao.pruning": AoPruning,
    "sparsimony": Sparsimony,
    PUBLISHED: Published,
}
TESTED = 10_000
IMAGES = {"cpu": 2 * BATCH + 80, "cuda": 50_000}  # of an epoch; a last batch of 80, as CIFAR has
SECONDS, FASTER = {"vgg16": {"seconds": 0.65}}, {"vgg16": {"ratio_to_ours": 10.0}}  # of an epoch on a GPU


def run(options: Options) -> list[Row]:
    """Steps and explorations of all models, and epochs of the first."""
    whats = (STEP, EXPLORATION)
    rows = [row for model in options.models for what in whats for row in contest(model, what, options)]
    return [*rows, *epochs(options.models[0], options)]


def contest(model: str, what: str, options: Options) -> list[Row]:
    """Ours and all rivals that can take part."""
    tidy(options)
    options.say(f"{model}, {what}: making all ready")
    data = batches(model, options)
    entries = ours(model, what, data, options)
    notes: dict[str, str | None] = dict.fromkeys(entries)
    for name, kind in RIVALS.items():
        entry, notes[name] = entered(kind, model, what, data, options)
        entries |= {} if entry is None else {name: entry}
    times = take_turns(entries, options)
    rows = []
    for name, note in notes.items():
        row = _row(model, what, name, note)
        if name in times:
            row |= {"milliseconds": median(times[name]), "ratio_to_ours": ratio(times[name], times[OURS])}
        rows.append(judged(row))
    return rows


def ours(model: str, what: str, data: ArrayData, options: Options) -> dict[str, Contender]:
    """As in `suptickets train`; on a GPU an eager step too, since the rivals' steps are eager."""
    if what == EXPLORATION:
        return {OURS: Run(model, "rigl", data, options, fast=options.cuda, booster="none").exploration()}
    names = {OURS: True, "ours, eager": False} if options.cuda else {OURS: False}
    return {
        name: Run(model, "static", data, options, fast=fast, booster="none").contender()
        for name, fast in names.items()
    }


def entered(
    kind: type[Rival], model: str, what: str, data: ArrayData, options: Options
) -> tuple[Contender | None, str | None]:
    """A rival that has shown that it runs, with a note; or why it does not take part."""
    try:
        rival = kind(model, data, options, interval=2 if what == EXPLORATION else NEVER)
        contender = rival.exploring() if what == EXPLORATION else rival.stepping()
        contender.prepare()()
    except ImportError as error:
        return None, f"not installed: {reason(error)}"
    except Exception as error:  # somebody else's code
        return None, f"failed: {reason(error)}"
    return contender, kind.note if what == EXPLORATION else None


def epochs(model: str, options: Options) -> list[Row]:
    """Whole epochs with an evaluation each: ours in `suptickets train`'s loop, theirs through loaders."""
    tidy(options)
    data = noise(IMAGES[options.device.type], options, images_of(model))
    tested = min(data.train_size, TESTED)
    data = replace(data, test_x=data.train_x[:tested], test_y=data.train_y[:tested])
    note = f"{data.train_size:,} images and {tested:,} to evaluate"
    options.say(f"{model}: {options.rounds + 1} epochs of {note}, both ways")
    given = {"data": "cifar100", "model": model, "sparsity": options.sparsity, "booster": "none", "lr": 0.001}
    often = {"epochs": options.rounds + 1, "evaluate_every": 1, "checkpoint_every": 1e9}
    published = Published(model, data, options)
    images = [Transformed(data, augment=augment) for augment in (True, False)]
    loaders, by = [one.loader() for one in images], images[0].by
    trainer = Trainer(resolve({**given, **often}), data, connect(str(options.device)))
    mine, theirs = epochs_in_turn(trainer, lambda _: published.epoch(*loaders))
    rows = []
    for name, times in {OURS: mine, PUBLISHED: theirs}.items():
        row = _row(model, EPOCH, name, note if name == OURS else f"{note}, {WORKERS} workers, {by}")
        row |= {"milliseconds": median(times), "seconds": median(times) / 1000}
        rows.append(row | {"ratio_to_ours": ratio(times, mine)})
    if not options.cuda:
        return [*map(judged, rows)]
    at_most, at_least = options.limits(model, SECONDS), options.limits(model, FASTER)
    return [judged(rows[0], at_most), judged(rows[1], None, at_least)]


def _row(model: str, what: str, name: str, note: str | None) -> dict[str, Any]:
    empty = dict.fromkeys(("milliseconds", "seconds", "ratio_to_ours"))
    return {"model": model, "what": what, "variant": name, **empty, "note": note}
