"""The folder of a run: settings, metrics, checkpoint, tickets, summary, report.

Every file but the metrics, to which lines are added, is written beside its place and moved there, so that a
crash, a kill or a full disk leaves the last good one. Nothing in the folder is pickled code.
"""

from __future__ import annotations

import json
import os
import pickle
import time
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from suptickets.compact import unpacked
from suptickets.errors import SparsityError, TrainingError, reason
from suptickets.measure.predictions import SCORES
from suptickets.training.files import append, locked, read_mapping, save_tensors, to_json, write
from suptickets.training.progress import print_plain
from suptickets.training.settings import Settings, read_config, settings_from

EXPORTED = (".dense.safetensors", ".compact.safetensors", ".onnx")  # endings of what `export` writes
PATIENCE = 8.0  # seconds to wait for another process to leave a folder
# What a summary must have to be shown as the result of a run.
SHOWN = {"booster", "tickets", "start", "superposed", "ensemble", "sparsity", "explored", "train_flops_ratio"}


class RunFolder:
    """Reads and writes the files of one run."""

    def __init__(self, path: str | Path) -> None:
        """Nothing is created before `held` or `begin`."""
        self.path = Path(path)
        self.config = self.path / "config.json"
        self.metrics = self.path / "metrics.jsonl"
        self.summary = self.path / "summary.json"
        self.ticket = self.path / "ticket.safetensors"
        self.report = self.path / "report.html"
        self.checkpoint = self.path / "checkpoint" / "last.pt"
        self.teachers = self.path / "teachers"  # the folder of the run that makes them

    def single(self, number: int) -> Path:
        """The file of a single ticket, the first being 1."""
        return self.path / "tickets" / f"ticket-{number}.safetensors"

    def singles(self) -> list[Path]:
        """The files of the single tickets that were kept, in order."""
        return list(takewhile(Path.exists, map(self.single, count(1))))

    def all_singles(self, expected: int) -> list[Path]:
        """The files of all single tickets of a run that kept `expected` of them; refuses if some are gone."""
        found = self.singles()[:expected]
        if len(found) < expected:
            there = len(list(self.single(1).parent.glob("ticket-*.safetensors")))
            raise SparsityError(
                f"{self.path} kept {expected} tickets, of which {min(there, expected - 1)} are there: bring "
                "back the others, or train again with --force"
            )
        return found

    def settings(self) -> Settings | None:
        """The settings of the run that the folder holds, if it holds one."""
        if not self.config.exists():
            return None
        try:
            return settings_from(read_config(self.config), self.config)
        except SparsityError as error:
            raise SparsityError(
                f"{error}: delete it, and the command that began the run goes on (with --out {self.path})"
            ) from error

    def look(self, settings: Settings, *, force: bool = False, moved: bool = False) -> dict[str, Any] | None:
        """The result of this run, if it is done; refuses a folder that holds another run.

        If the summary is damaged or its network is missing, but there is a checkpoint, the run is not done:
        it is finished again from there. `moved`: its data may be elsewhere now.
        """
        if force:
            return None
        self._refuse_another(settings, moved=moved)
        with suppress(SparsityError):
            summary = self.load_summary() or {}
            if _whole(summary) and (_readable(self.ticket) or not self.checkpoint.exists()):
                return {**summary, "run": str(self.path)}  # the folder may have been moved
        if self.summary.exists() and not self.checkpoint.exists():
            raise SparsityError(
                f"{self.summary} is damaged, and there is no checkpoint to write it again from: start over "
                "with --force"
            )
        return None

    def _refuse_another(self, settings: Settings, *, moved: bool) -> None:
        """Refuse settings other than those of the config, or those that the run was trained with."""
        old, trained = self.settings(), self._trained_with()
        if old is not None and trained is not None:  # the config knows where data are now
            trained = replace(trained, data_dir=settings.data_dir)
        if old is not None and moved:
            old = replace(old, data_dir=settings.data_dir)
        known = [one for one in (trained, old) if one is not None]
        differences = dict.fromkeys(d for one in known for d in settings.differences(one))
        if differences:
            raise SparsityError(
                f"{self.path} holds a run with other settings ({'; '.join(differences)}): choose another "
                "--out, or start over with --force"
            )

    def _trained_with(self) -> Settings | None:
        """The settings that the network or, if there is none, the checkpoint was made with."""
        wrong = (OSError, SafetensorError, ValueError, TypeError, KeyError, SparsityError)
        with suppress(*wrong), safe_open(self.ticket, "pt") as file:
            return settings_from(json.loads(file.metadata()["suptickets"])["settings"], self.ticket)
        with suppress(*wrong):
            return settings_from((self.load_checkpoint() or {})["settings"], self.checkpoint)
        return None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Lock the folder against others; the kernel releases it when the process ends, however it ends.

        Workers of a process that was killed hold the lock for a few seconds more.
        """
        self._make()
        holder, patience = os.open(self.path, os.O_RDONLY), time.monotonic() + PATIENCE
        try:
            while not locked(holder):
                if time.monotonic() > patience:
                    raise SparsityError(
                        f"another process trains in {self.path}: wait, or choose another --out"
                    )
                time.sleep(0.2)
            yield
        finally:
            os.close(holder)

    def _make(self) -> None:
        try:
            self.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SparsityError(f"cannot make the folder {self.path}: {error.strerror}") from error

    def begin(self, settings: Settings, *, force: bool = False) -> None:
        """Make this the folder of a run; with `force`, remove what an earlier run left."""
        self._make()
        try:
            if force:
                self._forget()
                RunFolder(self.teachers)._forget()
        except OSError as error:
            raise SparsityError(f"cannot start over in {self.path}: {error.strerror}") from error
        write(self.config, lambda path: path.write_text(to_json(settings.as_dict(), indent=2) + "\n"))

    def _forget(self) -> None:
        own = (self.summary, self.checkpoint, self.metrics, self.config, self.report)
        exported = [self.path / f"ticket{ending}" for ending in EXPORTED]
        tickets = (self.ticket, *exported, *self.path.glob("tickets/ticket-*.safetensors"))
        curves = self.path.glob("tensorboard/events.out.tfevents.*")
        for path in (*own, *tickets, *curves):
            path.unlink(missing_ok=True)

    def save_checkpoint(self, state: Mapping[str, Any], settings: Settings) -> None:
        """Write a checkpoint of a run with these settings; if that fails, the old one is still there."""
        known = {**state, "settings": json.loads(to_json(settings.mattering()))}
        write(self.checkpoint, lambda path: _save(known, path))

    def load_checkpoint(self) -> dict[str, Any] | None:
        """The last checkpoint, if there is one."""
        if not self.checkpoint.exists():
            return None
        try:
            with zipfile.ZipFile(self.checkpoint) as file:  # torch does not check its sums
                if (damaged := file.testzip()) is not None:
                    raise zipfile.BadZipFile(f"{damaged} is damaged")
            state: dict[str, Any] = torch.load(self.checkpoint, map_location="cpu", weights_only=True)
        except Exception as error:
            code = isinstance(error, pickle.UnpicklingError)
            why = "it is damaged, or holds more than tensors and plain values" if code else reason(error)
            raise SparsityError(f"cannot read {self.checkpoint} ({why}): start over with --force") from error
        return state

    def log(self, line: Mapping[str, Any]) -> None:
        """Add a line to the metrics."""
        try:
            with self.metrics.open("ab+") as file:
                append(file.fileno(), f"{to_json(line)}\n".encode())
        except OSError as error:
            raise TrainingError(f"cannot write {self.metrics} ({error.strerror})") from error

    def forget_metrics_after(self, epoch: int) -> None:
        """Drop lines of epochs that a run from an older checkpoint will go through again."""
        if not self.metrics.exists():
            return
        lines = self.metrics.read_bytes().splitlines()
        kept = [line for line in lines if _epoch(line) <= epoch]
        if damaged := sum(_epoch(line) == float("inf") for line in lines):
            print_plain(f"{self.metrics}: {damaged} damaged lines are dropped, their epochs are not shown")
        write(self.metrics, lambda path: path.write_bytes(b"".join(line + b"\n" for line in kept)))

    def save_ticket(
        self, state: Mapping[str, Tensor], about: Mapping[str, Any], number: int | None = None
    ) -> None:
        """Write the final network (or a single ticket), dense with exact zeros, and what its use needs."""
        file = self.ticket if number is None else self.single(number)
        file.parent.mkdir(exist_ok=True)
        tensors = {key: value.detach().cpu().contiguous() for key, value in state.items()}
        write(file, lambda path: save_tensors(unshared(tensors), path, {"suptickets": to_json(about)}))

    def save_summary(self, summary: Mapping[str, Any]) -> None:
        """Write the result; a run whose folder has one is done."""
        write(self.summary, lambda path: path.write_text(to_json(summary, indent=2) + "\n"))

    def load_summary(self) -> dict[str, Any] | None:
        """The result, if the run is done."""
        if not self.summary.exists():
            return None
        try:
            return read_mapping(self.summary)
        except SparsityError as error:
            again = f"suptickets train --resume {self.path}"
            raise SparsityError(f"{error}: {again} writes it again, from its checkpoint") from error


def _whole(summary: Mapping[str, Any]) -> bool:
    """Whether a summary has all that is shown of it, in the form in which it is written."""
    parts = [summary.get(key) for key in ("start", "superposed", "ensemble")]
    tickets = summary.get("tickets")
    numbers = all(isinstance(summary.get(key), float | int) for key in (*SCORES, "sparsity", "explored"))
    scored = isinstance(tickets, list) and all(isinstance(one, dict) for one in tickets)
    return numbers and scored and summary.keys() >= SHOWN and all(isinstance(p, dict | None) for p in parts)


def _readable(ticket: Path) -> bool:
    """Whether a ticket is there and, as far as its header tells, whole."""
    with suppress(OSError, SafetensorError), safe_open(ticket, "pt"):
        return True
    return False


def unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, with copies of those that are tied: the file format knows no sharing."""
    seen: set[int] = set()
    result = {}
    for key, tensor in tensors.items():
        shared = tensor.data_ptr() in seen
        seen.add(tensor.data_ptr())
        result[key] = tensor.clone() if shared else tensor
    return result


def read_ticket(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a ticket file, compact or not: its tensors, and what was saved about them."""
    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get("suptickets", "{}")
            about = dict(json.loads(text, parse_constant=lambda name: None))  # NaN, by older versions
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            return unpacked(tensors, file.metadata() or {}), about
    except Exception as error:
        again = "the command that trained a run writes its ticket again"
        raise SparsityError(f"cannot read a ticket from {path} ({reason(error)}): {again}") from error


def refuse_own(file: Path) -> None:
    """Refuse to write over what a run is made of; its report and exports may be written again."""
    place = file.resolve()
    for run in map(RunFolder, place.parents[:2]):  # checkpoints and tickets are in folders of their own
        own = (run.config, run.metrics, run.summary, run.ticket, run.checkpoint, *run.singles())
        if place in own and place.exists() and (run.config.exists() or run.summary.exists()):
            raise SparsityError(f"{file} belongs to the run in {run.path}: choose another --out")


def _save(state: dict[str, Any], path: Path) -> None:
    """Save through a file of Python's, whose error says why it cannot be written; torch's would hide it."""
    try:
        with path.open("wb") as file:
            torch.save(state, file)
    except RuntimeError as error:
        raise error.__context__ or error from None


def _epoch(line: bytes) -> float:
    """The epoch of a line of metrics; a damaged line counts as one to be dropped."""
    try:
        return float(json.loads(line)["epoch"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return float("inf")
