"""Optional loggers beside `metrics.jsonl`: TensorBoard and Weights & Biases, if they are installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from suptickets.errors import SparsityError
from suptickets.training.settings import Settings

#: Takes a line of `metrics.jsonl`.
Logger = Callable[[Mapping[str, Any]], None]


def check_logger(kind: str) -> None:
    """Refuse a logger that is not installed, before anything is done."""
    if kind != "none":
        _module(kind)


def open_logger(settings: Settings, folder: Path) -> Logger:
    """The logger that the settings ask for; one that does nothing for `none`."""
    opened: Mapping[str, Callable[[Settings, Path], Logger]] = {"tensorboard": _tensorboard, "wandb": _wandb}
    return opened[settings.log](settings, folder) if settings.log != "none" else lambda line: None


def _tensorboard(settings: Settings, folder: Path) -> Logger:
    writer = _module("tensorboard").SummaryWriter(str(folder / "tensorboard"))

    def log(line: Mapping[str, Any]) -> None:
        for key, value in _numbers(line).items():
            writer.add_scalar(key, value, line["step"])
        writer.flush()

    return log


def _wandb(settings: Settings, folder: Path) -> Logger:
    name = folder.resolve().name
    run = _module("wandb").init(
        project="suptickets",
        name=name,
        id=f"{name}-{settings.identity()}",
        resume="allow",
        reinit="finish_previous",  # of several seeds, one after the other in this process
        config=settings.as_dict(),
    )
    return lambda line: run.log(_numbers(line), step=line["step"])


def _module(kind: str) -> Any:
    try:
        return importlib.import_module({"tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}[kind])
    except ImportError as error:
        raise SparsityError(f"{kind} is not installed: pip install 'suptickets[{kind}]'") from error


def _numbers(line: Mapping[str, Any]) -> dict[str, float]:
    return {key: value for key, value in line.items() if isinstance(value, int | float) and key != "step"}
