"""Networks that runs have left behind: final ones, single tickets, and what ensembles predict with.

A file may come from anywhere: what it says is checked before it is used, and code that it names is not run.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from suptickets.baselines import Ensemble
from suptickets.data import Data
from suptickets.errors import SparsityError, fraction, whole
from suptickets.layers import choose
from suptickets.measure.sparsity import ModelSparsity, sparsity
from suptickets.randomness import fork_random
from suptickets.training import build
from suptickets.training.boosters import PREDICTION_ENSEMBLES
from suptickets.training.folder import RunFolder, read_ticket
from suptickets.training.settings import Settings, settings_from


@dataclass(frozen=True)
class Saved:
    """A predictor in files: one network, or several whose predictions are averaged.

    Attributes:
        path: the run's folder, or the file.
        files: of the networks.
        states: their tensors.
        about: what the first file says of itself.
        settings: of the run that wrote it.
        explored: the share of the weights that ever lived, where the run's folder knows it.
    """

    path: Path
    files: Sequence[Path]
    states: Sequence[dict[str, Tensor]]
    about: dict[str, Any]
    settings: Settings
    explored: float | None = None

    def named(self, model: str | None) -> Saved:
        """The same with the user's `package.module:function` in place of the file's, which is not imported.

        A model of the library, which needs no more than its name, stays as it is.
        """
        if ":" not in self.settings.model:
            return self
        if model is None or ":" not in model:
            raise SparsityError(
                f"{self.path} asks to import and call {self.settings.model!r}: if you trust that code, say "
                "--model package.module:function"
            )
        return replace(self, settings=replace(self.settings, model=model))

    def load(self, data: Data, device: torch.device) -> nn.Module:
        """The network, for these data, in evaluation mode."""
        built = [self._load(n, data, device) for n in range(len(self.files))]
        return Ensemble(built) if self.together else built[0]

    def _load(self, number: int, data: Data, device: torch.device) -> nn.Module:
        precision = build.precision(self.settings, device)
        try:
            with fork_random():
                model = build.model(self.settings, data)
            model = model.to(device, build.DTYPES[precision]).eval()
            model.load_state_dict(self.states[number])
        except SparsityError:
            raise
        except Exception as error:
            reason = (str(error).splitlines() or [type(error).__name__])[-1].strip()
            raise SparsityError(
                f"{self.files[number]} does not fit {self.settings.model} on {data.name}: {reason}"
            ) from error
        return model

    def living(self, model: nn.Module) -> ModelSparsity:
        """The living connections of the loaded network."""
        told = self.about.get("living")
        if self.together and isinstance(told, dict):
            told = {f"networks.{n}.{name}": c for n in range(len(self.files)) for name, c in told.items()}
        return living(model, told)

    @property
    def together(self) -> bool:
        """Whether it consists of several networks."""
        return len(self.files) > 1

    @property
    def tickets(self) -> list[dict[str, float]]:
        """The scores of the tickets that were superposed; empty if a number is missing."""
        scores = self.about.get("tickets", [])
        return scores if all(value is not None for one in scores for value in one.values()) else []


def living(model: nn.Module, told: Any) -> ModelSparsity:
    """The living connections of a plain network: the counts that are `told`, or else its non-zeros.

    New connections hold 0, so the counts that a file states are preferred, if they are possible.
    """
    trained = {candidate.name for candidate in choose(model)}
    counted = {name: layer for name, layer in sparsity(model).layers.items() if name in trained}
    if not isinstance(told, dict) or told.keys() != counted.keys():
        return ModelSparsity(counted)
    if not all(isinstance(n, int) and counted[k].nonzero <= n <= counted[k].size for k, n in told.items()):
        return ModelSparsity(counted)
    return ModelSparsity({name: replace(layer, nonzero=told[name]) for name, layer in counted.items()})


def result(path: Path) -> Saved:
    """Read what a run ends with: its final network, or the tickets that predict together; or read a file."""
    if not path.is_dir():
        return _file(path)
    folder = RunFolder(path)
    final = _read(path, [folder.ticket])
    if final.settings.booster in PREDICTION_ENSEMBLES:
        final = _read(path, folder.all_singles(final.settings.cycles))
    return replace(_placed(final, folder), explored=_explored(folder))


def singles(path: Path) -> list[Saved]:
    """Read the single tickets of a run, or a file."""
    if not path.is_dir():
        return [_file(path)]
    folder = RunFolder(path)
    settings = folder.settings()
    files = folder.singles() if settings is None else folder.all_singles(settings.cycles * settings.keeps)
    if not files:
        raise SparsityError(f"{path} has no single tickets: {_without(settings, folder)}")
    return [_placed(_read(file, [file]), folder) for file in files]


def _without(settings: Settings | None, folder: RunFolder) -> str:
    """Where single tickets could come from."""
    if settings is None or settings.cyclic:
        return "train with --keep-tickets"
    if RunFolder(folder.teachers).singles():
        return f"its teachers', in {folder.teachers}, are the only ones"
    return f"--booster {settings.booster} makes none, sup-tickets with --keep-tickets does"


def _file(path: Path) -> Saved:
    """Read a ticket file, which may lie in the folder of its run, or anywhere."""
    inside = path.absolute().parent
    return _placed(_read(path, [path]), RunFolder(inside.parent if inside.name == "tickets" else inside))


def _placed(one: Saved, folder: RunFolder) -> Saved:
    """The same with the folder's place of the data: they may have moved since the network was written."""
    try:
        run = folder.settings()
    except SparsityError:
        return one
    settings = one.settings if run is None else replace(one.settings, data_dir=run.data_dir)
    return one if run is None or run.differences(settings) else replace(one, settings=settings)


def _explored(folder: RunFolder) -> float | None:
    """The share of explored weights in the run's summary, if it has one."""
    rate = (folder.load_summary() or {}).get("explored")
    return None if rate is None else fraction(f"explored in {folder.summary}", rate, one=True)


def _read(path: Path, files: Sequence[Path]) -> Saved:
    for file in files:
        if not file.exists():
            runs = sorted(str(ticket.parent) for ticket in file.parent.glob(f"*/{file.name}"))
            which = f" ({', '.join(runs)})" if runs else ""
            raise SparsityError(
                f"there is no ticket at {file}: give a finished run's folder{which}, or a ticket file"
            )
    states, abouts = zip(*(read_ticket(file) for file in files), strict=True)
    settings = _settings(files[0], abouts[0])
    for file, state in zip(files, states, strict=True):
        _check(file, state, settings)
    return Saved(path, files, states, abouts[0], settings)


def _settings(file: Path, about: Mapping[str, Any]) -> Settings:
    """The settings that a file states; refuses it if what else it states makes no sense."""
    if not {"settings", "nonzero", "parameters"} <= about.keys() or not isinstance(about["settings"], dict):
        raise SparsityError(f"{file} does not say which model it is: it was not written by suptickets train")
    total = whole(f"parameters in {file}", about["parameters"])
    if whole(f"nonzero in {file}", about["nonzero"], 0) > total:
        raise SparsityError(f"{file} says that more weights are not zero than there are: it is damaged")
    tickets = about.get("tickets", [])
    if not isinstance(tickets, list) or not all(_scores(one) for one in tickets):
        raise SparsityError(f"{file} has no scores where those of its tickets should be: it is damaged")
    return settings_from(about["settings"], file)


def _scores(value: Any) -> bool:
    """Whether these are scores: numbers, or None for those that do not exist."""
    known = isinstance(value, dict) and {"accuracy", "nll"} <= value.keys()
    return known and all(one is None or _number(one) for one in value.values())


def _number(value: Any) -> bool:
    return isinstance(value, float | int) and abs(value) < sys.float_info.max


def _check(file: Path, state: Mapping[str, Tensor], settings: Settings) -> None:
    """Refuse tensors that cannot predict anything, and settings that they cannot come from."""
    for name, tensor in state.items():
        if tensor.is_complex() or not bool(torch.isfinite(tensor.double()).all()):
            raise SparsityError(f"{name} in {file} has numbers that are not finite: the network is no good")
    most = max([len(state), *(len(tensor) for tensor in state.values() if tensor.dim())])
    if settings.members > most:
        raise SparsityError(f"{file} says that it has {settings.members} members, but is too small for that")
