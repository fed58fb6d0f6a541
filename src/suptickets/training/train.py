"""`train`: from settings to a folder with a result."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from tempfile import TemporaryDirectory
from typing import Any

import torch

from suptickets.data import Data
from suptickets.data.base import ArrayData
from suptickets.errors import SparsityError, TrainingError
from suptickets.measure.predictions import SCORES
from suptickets.randomness import fork_random
from suptickets.training import build
from suptickets.training.fast import load_compiler
from suptickets.training.folder import RunFolder
from suptickets.training.jobs import refuse, run_together
from suptickets.training.loggers import check_logger, open_logger
from suptickets.training.loop import Trainer
from suptickets.training.processes import Processes, connect, is_main
from suptickets.training.progress import Progress, print_plain
from suptickets.training.settings import Settings
from suptickets.training.stop import Interrupted, unanswered

AT_A_TIME = 3  # runs on one GPU: a small network does not fill it (`suptickets bench together`)


def train(
    settings: Settings, out: str | Path | None = None, *, force: bool = False, moved: bool = False
) -> dict[str, Any]:
    """Train to the end, or go on where an interrupted run with the same settings was; returns the summary.

    A run that is done is not run again. `moved`: the data may be elsewhere than they were.
    """
    build.check_model(settings.model)
    check_logger(settings.log)
    processes = connect(settings.device)
    folder = RunFolder(out or default_folder(settings))
    progress = Progress(settings.epochs, quiet=not processes.main)

    def look() -> dict[str, Any] | None:
        return folder.look(settings, force=force, moved=moved)

    done = processes.first(look)
    if done is not None:
        if moved:
            _note_place(folder, settings, processes, progress)
        progress.say(f"{folder.path} is done already: --force starts over")
        return done
    if processes.device.type == "cuda" and build.compiles(settings, processes.device):
        load_compiler()
    with ExitStack() as stack:
        stack.enter_context(fork_random())  # everything is seeded, but for the run alone
        trainer = Trainer(settings, _data(settings, processes, progress), processes)
        processes.first(lambda: stack.enter_context(folder.held()))
        done = processes.first(look)  # another process may have trained there meanwhile
        if done is not None:
            progress.say(f"{folder.path} is done already, by another process")
            return done
        processes.first(lambda: folder.begin(settings, force=force))
        log = open_logger(settings if processes.main else replace(settings, log="none"), folder.path)
        stack.enter_context(progress)
        return trainer.run(folder, progress, log)


def _note_place(folder: RunFolder, settings: Settings, processes: Processes, progress: Progress) -> None:
    """Record where the data of a finished run are now, if they can be read there."""

    def note() -> None:
        with folder.held():
            folder.begin(settings)

    old = processes.first(folder.settings)
    if old is None or old.data_dir != settings.data_dir:
        _data(settings, processes, progress)
        processes.first(note)


def _data(settings: Settings, processes: Processes, progress: Progress) -> Data:
    """Read the data, rank 0 first, so that a download happens once, and what is missing is said once."""
    read: list[Data] = []
    if processes.world > 1:
        processes.first(lambda: read.append(build.data_of(settings)))
    data = read[0] if read else build.data_of(settings)
    if settings.holdout:
        progress.say(f"evaluated on {data.test_size:,} held-out training samples, not on the test data")
    if not isinstance(data, ArrayData):
        return data
    if not fits(data, processes.device):
        progress.say(f"{data.name} does not fit into the GPU's memory: batches are sent to it")
        return data
    return data.to(processes.device)


def fits(data: ArrayData, device: torch.device) -> bool:
    """Whether the data take at most half of the memory that is left on the device."""
    if device.type != "cuda":
        return True
    return 2 * sum(t.nbytes for t in (data.train_x, data.test_x)) <= torch.cuda.mem_get_info(device)[0]


def default_folder(settings: Settings) -> Path:
    """The default folder of a run with these settings, where it is found again."""
    name = f"{settings.data}-{settings.model.replace(':', '.')}-{settings.method}-{settings.booster}"
    sparsity = "" if settings.method == "dense" and not settings.target else f"-{settings.sparsity:g}"
    return Path("runs") / f"{name}{sparsity}-seed{settings.seed}-{settings.identity()}"


def train_seeds(
    settings: Settings,
    seeds: int,
    out: str | Path | None = None,
    *,
    force: bool = False,
    jobs: int | None = None,
) -> dict[str, Any]:
    """Train several seeds, each in a folder of its own; returns their summaries, means and deviations.

    `jobs` of them run at a time, by default three on a GPU and one elsewhere. One that fails does not stop
    the others.
    """
    each = [replace(settings, seed=seed) for seed in range(settings.seed, settings.seed + seeds)]
    folders = [default_folder(s) if out is None else Path(out) / f"seed{s.seed}" for s in each]
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world > 1 and (jobs or 1) > 1:
        raise SparsityError(f"{world} processes train one run together: leave out --jobs, or torchrun")
    if jobs is None:
        jobs = AT_A_TIME if world == 1 and torch.cuda.is_available() and settings.device != "cpu" else 1
    if min(jobs, seeds) > 1:
        runs = _at_a_time(each, folders, jobs, force=force)
    else:
        runs = _in_turn(each, folders, force=force)
    scores = {key: [float(run[key]) for run in runs] for key in SCORES}
    return {
        "runs": runs,
        "mean": {key: mean(values) for key, values in scores.items()},
        "deviation": {key: stdev(values) for key, values in scores.items()},
    }


def _in_turn(each: Sequence[Settings], folders: Sequence[Path], *, force: bool) -> list[dict[str, Any]]:
    """Train one after the other; a request to stop that came while one was finished stops before the next."""
    runs, failed = list[dict[str, Any]](), list[str]()
    unanswered()  # from before
    for settings, folder in zip(each, folders, strict=True):
        if connect(settings.device).most(unanswered()):
            raise Interrupted(f"stopped before seed {settings.seed}: the same command goes on")
        try:
            runs.append(train(settings, folder, force=force))
        except Interrupted:
            raise
        except TrainingError as error:
            failed.append(f"seed {settings.seed}")
            if is_main():
                print_plain(f"seed {settings.seed}: {error}")
    refuse(failed, len(each))
    return runs


def _at_a_time(
    each: Sequence[Settings], folders: Sequence[Path], jobs: int, *, force: bool
) -> list[dict[str, Any]]:
    """Train the runs in processes of their own; what is wrong with the settings is found out first."""
    build.check_model(each[0].model)
    check_logger(each[0].log)
    with TemporaryDirectory() as temporary:
        commands = {}
        for settings, folder in zip(each, folders, strict=True):
            config = Path(temporary) / f"{settings.seed}.json"
            config.write_text(json.dumps(settings.as_dict()))
            arguments = ["train", "--config", str(config), "--out", str(folder)]
            commands[f"seed {settings.seed}"] = arguments + (["--force"] if force else [])
        run_together(commands, jobs, each[0].device)
    pairs = zip(each, folders, strict=True)
    return [RunFolder(folder).look(settings) or train(settings, folder) for settings, folder in pairs]
