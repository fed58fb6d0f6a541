"""The store of results: JSON lines in a folder, one for each finished reading of each seed.

There is a file for each data set and model. Lines are only ever added, under a lock that the kernel releases
when a process dies, and flushed to the disk: several writers are safe, and two stores are merged by joining
their files. A line that cannot be read is skipped and reported, never removed; a line that was cut off does
not spoil the next one.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from suptickets.errors import SparsityError
from suptickets.experiments.plan import Mode, Reading
from suptickets.training.files import append, to_json
from suptickets.training.folder import RunFolder
from suptickets.training.progress import print_plain

Kind = type | tuple[type, ...]
NUMBER = (int, float)
# Types of the parts of a line and of its cell; then of other parts and of measures, which may be missing.
LINE: dict[str, Kind] = {"cell": dict, "seed": int, "scale": NUMBER, "separate": bool, "changes": dict}
CELL: dict[str, Kind] = {"data": str, "model": str, "method": str, "sparsity": NUMBER, "booster": str}
OTHERS: dict[str, Kind] = {"settings": dict, "seconds": NUMBER}
MEASURED: dict[str, Kind] = {
    **dict.fromkeys(("tickets", "members", "layers", "reliability"), list),
    **dict.fromkeys(("diversity", "superposed", "ensemble", "start"), dict),
    **dict.fromkeys(("accuracy", "nll", "ece", "train_flops_ratio", "test_flops_ratio"), NUMBER),
}


class Store:
    """Reads and adds results."""

    def __init__(self, folder: str | Path) -> None:
        """Nothing is created before the first result."""
        self.folder = Path(folder)
        self.damaged: list[str] = []

    def read(self) -> list[dict[str, Any]]:
        """All results; `damaged` tells which lines could not be read."""
        self.damaged = []
        files = sorted(self.folder.glob("*.jsonl")) if self.folder.is_dir() else []
        metrics = RunFolder(self.folder).metrics  # the folder may be a run, which is no store
        return [record for file in files if file != metrics for record in self._read(file)]

    def read_aloud(self) -> list[dict[str, Any]]:
        """All results; prints which lines could not be read."""
        records = self.read()
        for line in self.damaged:
            print_plain(f"{line} is damaged: skipped, and left as it is")
        return records

    def _read(self, file: Path) -> Iterator[dict[str, Any]]:
        for number, line in enumerate(_lines(file), 1):
            record = _record(line)
            if record is not None:
                yield record
            elif line.strip():
                self.damaged.append(f"{file}, line {number}")

    def add(self, record: Mapping[str, Any]) -> None:
        """Add a result; it is on the disk when this returns."""
        cell = record["cell"]
        file = self.folder / f"{cell['data']}-{cell['model']}.jsonl"
        text = to_json(dict(sorted(record.items()))).encode() + b"\n"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with file.open("ab+") as stream:
                with contextlib.suppress(OSError):  # where there are no locks
                    fcntl.flock(stream, fcntl.LOCK_EX)
                append(stream.fileno(), text)
                os.fsync(stream.fileno())
        except OSError as error:
            raise SparsityError(f"cannot write {file} ({error.strerror}): choose another --out") from error


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        raise SparsityError(f"cannot read {file}: {error.strerror}") from error


def _record(line: str) -> dict[str, Any] | None:
    with contextlib.suppress(ValueError):
        record = json.loads(line, parse_constant=lambda name: None)
        if _is(record, {**LINE, "measures": dict}) and _sound(record):
            return dict(record)
    return None


def _sound(record: Mapping[str, Any]) -> bool:
    """Whether everything in a line has the form in which it is written."""
    measures = _there(record["measures"])
    if isinstance(record["seed"], bool) or not 0 < record["scale"] <= 1:
        return False
    if not (_is(record["cell"], CELL) and _is(_there(record), OTHERS, part=True)):
        return False
    if not _is(measures, MEASURED, part=True):
        return False
    rows = [row for name, kind in MEASURED.items() if kind is list for row in measures.get(name, ())]
    scored = all(_is(one, {"accuracy": NUMBER}) for one in measures.get("tickets", ()))
    return scored and all(isinstance(row, dict) for row in rows)


def _is(value: Any, form: Mapping[str, Kind], *, part: bool = False) -> bool:
    """Whether a value is a mapping of this form: with all of its names, or with a `part` of them."""
    if not isinstance(value, dict) or not (part or value.keys() >= form.keys()):
        return False
    return all(isinstance(value[name], kind) for name, kind in form.items() if name in value)


def _there(value: Mapping[str, Any]) -> dict[str, Any]:
    """The mapping without the values that are null."""
    return {name: one for name, one in value.items() if one is not None}


class Results:
    """What a store holds for one mode: the measures of a reading, by seed."""

    def __init__(self, records: Iterable[Mapping[str, Any]], mode: Mode) -> None:
        """Of two results for the same reading and seed, the later one counts."""
        self.records: dict[str, dict[int, Mapping[str, Any]]] = {}
        for record in records:
            if mode_of(record) == mode:
                self.records.setdefault(_text(record["cell"]), {})[record["seed"]] = record["measures"]

    def __contains__(self, wanted: tuple[int, Reading]) -> bool:
        """Whether the reading is there for the seed."""
        seed, reading = wanted
        return self.find(reading.key, seed) is not None

    def find(self, key: Mapping[str, Any], seed: int) -> Mapping[str, Any] | None:
        """The measures of a key and a seed, if there are any."""
        return self.records.get(_text(key), {}).get(seed)

    def measures(self, reading: Reading) -> dict[int, Mapping[str, Any]]:
        """The measures of a reading by seed, from the first."""
        return dict(sorted(self.records.get(_text(reading.key), {}).items()))


def mode_of(record: Mapping[str, Any]) -> Mode:
    """How a result was computed."""
    return Mode(record["scale"], record["separate"], tuple(sorted(record["changes"].items())))


def only_mode(records: Sequence[Mapping[str, Any]]) -> Mode:
    """The mode of all these results; refuses a mixture."""
    modes = sorted({str(mode_of(record)) for record in records})
    if len(modes) > 1:
        found = "; ".join(modes)
        kinds = {(record["scale"], record["separate"]) for record in records}
        help = "say which with --scale, --separate or --no-separate"
        if len(kinds) == 1:
            help = "give each trial (--set) an --out of its own, or move their lines to stores of their own"
        raise SparsityError(f"these do not go into one table ({found}): {help}")
    if not records:
        raise SparsityError("there are no results yet: run suptickets reproduce")
    return mode_of(records[0])


def _text(key: Mapping[str, Any]) -> str:
    return json.dumps(key, sort_keys=True)
