"""Distillation in a run: its teachers are trained first, in a folder inside its own, or given."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from suptickets.baselines import Distillation
from suptickets.errors import SparsityError
from suptickets.measure.flops import flops
from suptickets.training import build, saved
from suptickets.training.folder import RunFolder
from suptickets.training.processes import Processes
from suptickets.training.progress import Progress
from suptickets.training.saved import Saved
from suptickets.training.settings import Settings
from suptickets.training.stop import Interrupted, asked_to_stop

if TYPE_CHECKING:
    from suptickets.training.loop import Trainer


def given(settings: Settings, processes: Processes) -> list[Saved]:
    """The teachers that the settings name: single tickets of runs, final networks of runs without, files."""
    return processes.first(lambda: _found(settings, [Path(path) for path in settings.teachers]))


def trained(trainer: Trainer, folder: RunFolder, progress: Progress) -> tuple[list[Saved], float]:
    """The single tickets of a run that is trained first, and its FLOPs, as a share of the dense training.

    That run has its own folder inside the student's, with a checkpoint and a result: whichever of the two
    runs is interrupted, it can go on.
    """
    own = RunFolder(folder.teachers)
    settings = replace(trainer.settings, booster="sup-tickets", keep_tickets=True)
    first = trainer.processes.first
    done = first(lambda: own.look(settings, moved=True))  # its data are where the student's are
    if done is None:
        progress.say(f"the teachers first, in {own.path}")
        first(lambda: own.begin(settings))
        again = f"{trainer.processes.program} train --resume {folder.path} goes on"
        teacher = type(trainer)(settings, trainer.data, trainer.processes)
        with asked_to_stop() as stop:
            try:
                done = teacher.run(own, progress, lambda _: None)
            except Interrupted as error:
                raise Interrupted(f"stopped while the teachers were trained: {again}") from error
            if trainer.processes.most(len(stop)):
                raise Interrupted(f"stopped when the teachers were trained: {again}")
        progress.say("now the student")
    return first(lambda: _found(trainer.settings, [own.path])), float(done["train_flops_ratio"])


def distillation(trainer: Trainer, teachers: list[Saved]) -> tuple[Distillation, float]:
    """The student's loss, and what the teachers' passes cost, as a share of the dense training."""
    device, dtype = trainer.processes.device, trainer.dtype
    models = [one.load(trainer.data, device).to(dtype=dtype) for one in teachers]
    dense = trainer.cost.dense / trainer.relative
    costs = [
        flops(model, trainer.example()).living(one.living(model).densities).sparse
        for one, model in zip(teachers, models, strict=True)
    ]
    return Distillation(models, hard=partial(build.loss, trainer.settings)), sum(costs) / 3 / dense


def _found(settings: Settings, paths: list[Path]) -> list[Saved]:
    found: list[Saved] = []
    for path in paths:
        single = not path.is_dir() or bool(RunFolder(path).singles())
        found += saved.singles(path) if single else [saved.result(path)]
    others = {one.settings.model for one in found if ":" in one.settings.model} - {settings.model}
    if others:  # a function that a file names is not imported
        raise SparsityError(
            f"teachers made by {', '.join(sorted(others))} can only teach a student of the same --model: "
            "for others use suptickets.baselines.Distillation"
        )
    strangers = {one.settings.data for one in found} - {settings.data}
    if strangers:
        raise SparsityError(f"the teachers know {', '.join(sorted(strangers))}, not {settings.data}")
    if settings.holdout and any(one.settings.holdout != settings.holdout for one in found):
        raise SparsityError(
            f"the teachers were trained on images that are held out here: use teachers with --holdout "
            f"{settings.holdout:g}, or none"
        )
    return found
