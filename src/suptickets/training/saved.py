"""Networks that runs have left behind: final ones, single tickets, and what ensembles predict with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from suptickets.baselines import Ensemble
from suptickets.data import Data
from suptickets.errors import SparsityError
from suptickets.training import build
from suptickets.training.folder import RunFolder, read_ticket
from suptickets.training.settings import PREDICTION_ENSEMBLES, Settings
from suptickets.training.settings import build as settings_from


@dataclass(frozen=True)
class Saved:
    """A predictor in files: one network, or several whose predictions are averaged."""

    path: Path
    files: Sequence[Path]
    states: Sequence[dict[str, Tensor]]
    about: dict[str, Any]
    settings: Settings

    def load(self, data: Data, device: torch.device) -> nn.Module:
        """The network, for these data, in evaluation mode."""
        built = [self._load(n, data, device) for n in range(len(self.files))]
        return Ensemble(built) if self.together else built[0]

    def _load(self, number: int, data: Data, device: torch.device) -> nn.Module:
        precision = build.precision(self.settings, device)
        model = build.model(self.settings, data).to(device, build.DTYPES[precision]).eval()
        try:
            model.load_state_dict(self.states[number])
        except RuntimeError as error:
            reason = str(error).splitlines()[-1].strip()
            raise SparsityError(
                f"{self.files[number]} does not fit {self.settings.model} on {data.name}: {reason}"
            ) from error
        return model

    @property
    def together(self) -> bool:
        """Whether it is the several networks of a run."""
        return len(self.files) > 1


def result(path: Path) -> Saved:
    """What a run ends with: its final network, or the tickets whose predictions it averages; or a file."""
    if not path.is_dir():
        return _read(path, [path])
    folder = RunFolder(path)
    settings = folder.settings()
    together = settings is not None and settings.booster in PREDICTION_ENSEMBLES
    return _read(path, folder.singles() if together and folder.ticket.exists() else [folder.ticket])


def singles(path: Path) -> list[Saved]:
    """The single tickets of a run; or a file."""
    if not path.is_dir():
        return [_read(path, [path])]
    files = RunFolder(path).singles()
    if not files:
        raise SparsityError(f"{path} has no single tickets: train with --keep-tickets")
    return [_read(file, [file]) for file in files]


def _read(path: Path, files: Sequence[Path]) -> Saved:
    for file in files:
        if not file.exists():
            raise SparsityError(
                f"there is no ticket at {file}: give a finished run's folder, or a ticket file"
            )
    states, abouts = zip(*(read_ticket(file) for file in files), strict=True)
    about = abouts[0]
    if not {"settings", "nonzero", "parameters"} <= about.keys() or not isinstance(about["settings"], dict):
        raise SparsityError(
            f"{files[0]} does not say which model it is: it was not written by suptickets train"
        )
    return Saved(path, files, states, about, settings_from(about["settings"]))
