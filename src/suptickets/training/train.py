"""`train`: from settings to a folder with a result."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from suptickets.data import Data, load_data
from suptickets.data.base import ArrayData
from suptickets.training import build
from suptickets.training.folder import RunFolder
from suptickets.training.loggers import check_logger, open_logger
from suptickets.training.loop import Trainer
from suptickets.training.processes import Processes, connect
from suptickets.training.progress import Progress
from suptickets.training.settings import Settings


def train(settings: Settings, out: str | Path | None = None, *, force: bool = False) -> dict[str, Any]:
    """Run to the end, or go on where an interrupted run with the same settings was; returns the summary.

    A run that is done is not run again.
    """
    build.check_model(settings.model)
    check_logger(settings.log)
    processes = connect(settings.device)
    folder = RunFolder(out or default_folder(settings))
    progress = Progress(settings.epochs, quiet=not processes.main)
    done = processes.first(lambda: folder.look(settings, force=force))
    if done is not None:
        progress.say(f"{folder.path} is done already: --force starts over")
        return done
    trainer = Trainer(settings, _data(settings, processes), processes)
    processes.first(lambda: folder.begin(settings, force=force))
    log = open_logger(settings if processes.main else replace(settings, log="none"), folder.path)
    with progress:
        return trainer.run(folder, progress, log)


def _data(settings: Settings, processes: Processes) -> Data:
    """Rank 0 reads first, so that a download happens once, and what is missing is said once."""

    def load() -> Data:
        return load_data(settings.data, settings.data_dir, settings.workers)

    if processes.world > 1:
        processes.first(lambda: load().classes)
    data = load()
    return data.to(processes.device) if isinstance(data, ArrayData) else data


def default_folder(settings: Settings) -> Path:
    """Where a run with these settings is found again."""
    name = f"{settings.data}-{settings.model.replace(':', '.')}-{settings.method}-{settings.booster}"
    return Path("runs") / f"{name}-{settings.sparsity:g}-seed{settings.seed}-{settings.identity()}"


def train_seeds(
    settings: Settings, seeds: int, out: str | Path | None = None, *, force: bool = False
) -> dict[str, Any]:
    """Several seeds, each in a folder of its own; their summaries, means and deviations."""
    runs = []
    for seed in range(settings.seed, settings.seed + seeds):
        one = replace(settings, seed=seed)
        runs.append(train(one, None if out is None else Path(out) / f"seed{seed}", force=force))
    scores = {key: [float(run[key]) for run in runs] for key in ("accuracy", "nll", "ece")}
    return {
        "runs": runs,
        "mean": {key: mean(values) for key, values in scores.items()},
        "deviation": {key: stdev(values) for key, values in scores.items()},
    }
