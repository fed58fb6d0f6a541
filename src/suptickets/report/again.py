"""How to run it again: the command, the versions, the settings; and what it takes."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from suptickets.report.document import Block, Cell, Listing, Number, Numbers, Section, Table
from suptickets.report.measures import NOTHING, duration, number, plain
from suptickets.report.runs import INCIDENTAL, Run, grouped, setting, varying


def again(
    runs: Sequence[Run], commands: Sequence[str] = (), results: Sequence[Mapping[str, Any]] = ()
) -> Section:
    """The commands that are given, or that of each run; `results` of a store tell what they were made by."""
    commands = [plain(line) for line in commands] or [*dict.fromkeys(_command(run) for run in runs)]
    machines = [line for line in dict.fromkeys(_machine(run.summary) for run in runs) if line]
    listings = [
        Listing("Command" if len(commands) == 1 else "Commands", [*commands]),
        Listing("Made with", [] if results else machines),
    ]
    blocks: list[Block] = [listing for listing in listings if listing.lines]
    blocks += [_made(results)] if results else []
    return Section("How to run this again", [*blocks, *(_settings(runs) if runs else [])])


def _made(results: Sequence[Mapping[str, Any]]) -> Table:
    """The commands of all results, and what they ran on."""
    counts = Counter((plain(one.get("command") or NOTHING), _machine(one)) for one in results)
    rows = [[Cell(c), Cell(made or NOTHING), Cell(str(n), float(n))] for (c, made), n in counts.items()]
    return Table("made", "Made by", ["Command", "With", "Results"], rows, folded=True)


def _command(run: Run) -> str:
    """The command of a run, as it was given; for a run that does not tell, one with its settings."""
    config = shlex.quote(plain(run.path / "config.json"))
    return plain(run.summary.get("command") or f"suptickets train --config {config} --out again")


def _machine(made: Mapping[str, Any]) -> str:
    """Versions, hardware and revision, in a line."""
    versions, revision = made.get("versions"), made.get("revision")
    named = (
        [f"{name} {version}" for name, version in versions.items()] if isinstance(versions, Mapping) else []
    )
    parts = (", ".join(named), str(made.get("hardware") or ""), f"revision {revision}" if revision else "")
    return plain("; ".join(filter(None, parts)))


def time_spent(seconds: float | None, results: Sequence[Mapping[str, Any]]) -> Numbers:
    """The time of all runs, with the hardware: hours say nothing without it."""
    machines = dict.fromkeys(plain(one["hardware"]) for one in results if one.get("hardware"))
    where = f", on {' and '.join(machines)}" if machines else ""
    jobs = max((number(one.get("jobs")) or 1 for one in results), default=1)
    several = f", up to {jobs:g} at a time" if jobs > 1 else ""
    note = f"added up{several}{where}"
    return () if seconds is None else (Number("Time of all runs", duration(seconds), note),)


def _settings(runs: Sequence[Run]) -> list[Table]:
    """The settings that all runs share, and those in which they differ."""
    configs = [run.config for run in runs]
    differing = varying(configs)
    shared = [key for key in configs[0] if key not in differing and (len(runs) == 1 or key not in INCIDENTAL)]
    rows = [[Cell(key.replace("_", "-")), _value(configs[0][key])] for key in shared]
    title = "Settings" if len(runs) == 1 else "Settings of all runs"
    tables = [Table("all-settings", title, ["Setting", "Value"], rows, folded=True)]
    if differing:
        header = ["Setting", *(key.replace("_", "-") for key in differing)]
        rows = [
            [Cell(one.label), *(_value(setting(one.config, key)) for key in differing)]
            for one in grouped(runs)
        ]
        tables.append(Table("differing-settings", "Settings that differ", header, rows, folded=True))
    return tables


def _value(value: Any) -> Cell:
    return Cell(plain(value if isinstance(value, str) else json.dumps(value)))
