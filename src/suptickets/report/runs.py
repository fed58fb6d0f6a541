"""Run folders as a report sees them: what they hold, and which of them differ in the seed alone."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cached_property
from itertools import chain
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple, TypeAlias

from suptickets.errors import SparsityError
from suptickets.methods import METHODS
from suptickets.report.measures import MEASURES, NO_BREAK, number, plain, reading
from suptickets.report.parted import parted
from suptickets.training.boosters import CYCLIC, part_names
from suptickets.training.folder import RunFolder
from suptickets.training.settings import UNSAID, Settings, read_config

# Settings that may differ between two runs that count as runs of the same settings.
INCIDENTAL = {"seed", "data_dir", *UNSAID, "evaluate_every", "keep_tickets"}
# Settings that name a run; others join the name only where these do not tell two runs apart.
TELLING = ("data", "model", "method", "booster", "sparsity", "recipe")
BOOSTED = {
    "none": "",
    "swa": " + SWA",
    "tree-net": " + TreeNet",
    "batch-ensemble": " + BatchEnsemble",
    "dense-ensemble": " ensemble",
}
SCHEDULES = {"fge": "FGE's", "swa": "SWA's", "triangle": "Sup-tickets'"}
# What the paper calls settings of the cycles. Where one of them is needed in a name, so are the others.
CYCLES = {"cycle_epochs": "C = {}", "cycles": "{} tickets", "epochs": "{} epochs"}
# The values of settings in runs that were made before these settings existed.
DEFAULTS = {field.name: field.default for field in fields(Settings)}
REPORTS = {".html", ".md", ".tex", ".png", ".svg"}  # what `report` writes, beside runs or among them

Curve: TypeAlias = list[tuple[float, float]]


@dataclass(frozen=True)
class Run:
    """One run folder; `summary` is empty while the run is not done."""

    path: Path
    config: Mapping[str, Any]
    summary: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]
    damaged: int = 0

    def value(self, key: str, part: str | None = None) -> float | None:
        """A number of the summary, or of a part of it (`start`, `ensemble`, `diversity`)."""
        holder = self.summary if part is None else self.summary.get(part)
        return reading(holder, key) if isinstance(holder, Mapping) else None

    def setting(self, key: str) -> float | None:
        """A setting that is a number."""
        return number(self.config.get(key))

    @property
    def seed(self) -> str:
        """The seed, as text."""
        return plain(self.config.get("seed", ""))

    @property
    def tickets(self) -> list[Mapping[str, Any]]:
        """The scores of the tickets."""
        return _mappings(self.summary.get("tickets"))

    @property
    def parts(self) -> list[Mapping[str, Any]]:
        """The scores of all that the result combines: tickets, heads or members."""
        return self.tickets or _mappings(self.summary.get("members"))

    @property
    def part(self) -> str:
        """What one of these parts is called."""
        return part_name(self.config)

    @cached_property
    def cycles(self) -> list[float]:
        """The epochs at which the cycles begin and end; none for a booster without cycles."""
        epochs, length, count = (self.setting(key) or 0.0 for key in ("epochs", "cycle_epochs", "cycles"))
        sensible = 0 < length * count <= epochs and 1 <= count <= 1000
        if self.config.get("booster") not in CYCLIC or not sensible:
            return []
        return [epochs - length * n for n in range(int(count), -1, -1)]

    def curve(self, key: str) -> Curve:
        """(epoch, value) for each epoch that has one."""
        pairs = ((number(line.get("epoch")), reading(line, key)) for line in self.metrics)
        return [(x, y) for x, y in pairs if x is not None and y is not None]

    def learning_rates(self) -> Curve:
        """The learning rates as logged: `lrs` are rates within an epoch, evenly spaced, up to its end."""
        return list(chain.from_iterable(_rates(line) for line in self.metrics))


def _rates(line: Mapping[str, Any]) -> Curve:
    end = number(line.get("epoch"))
    given = line.get("lrs")
    rates = [number(rate) for rate in (given if isinstance(given, list) and given else [line.get("lr")])]
    if end is None:
        return []
    return [(end - 1 + n / len(rates), rate) for n, rate in enumerate(rates, 1) if rate is not None]


def _mappings(value: object) -> list[Mapping[str, Any]]:
    return [entry for entry in value if isinstance(entry, Mapping)] if isinstance(value, list) else []


def common_cycles(runs: Sequence[Run]) -> list[float]:
    """Where the cycles begin and end, if all runs that have some agree."""
    borders = {tuple(run.cycles) for run in runs} - {()}
    return list(borders.pop()) if len(borders) == 1 else []


def narrow(borders: Sequence[float]) -> bool:
    """Whether the cycles are too short a part of the run to be seen."""
    return borders[0] > 0 and borders[-1] - borders[0] < borders[-1] / 3


def layers(run: Run) -> list[Mapping[str, Any]]:
    """The layers of the final network: name, shape, size, nonzero, sparsity."""
    return [layer for layer in _mappings(run.summary.get("layers")) if reading(layer, "sparsity") is not None]


def layer_curves(run: Run) -> dict[str, Curve]:
    """The sparsity of each layer over the epochs, from the first to the last layer."""
    curves: dict[str, Curve] = {}
    for line in run.metrics:
        epoch, sparsities = number(line.get("epoch")), line.get("layers")
        for name, sparsity in sparsities.items() if isinstance(sparsities, Mapping) else ():
            if epoch is not None and (value := reading({"sparsity": sparsity}, "sparsity")) is not None:
                curves.setdefault(name, []).append((epoch, value))
    return {plain(name): curve for name, curve in curves.items()}


class Bin(NamedTuple):
    """Predictions of about the same confidence; `low` and `high` are the borders of the bin."""

    low: float
    high: float
    samples: float
    confidence: float
    accuracy: float


def reliability(runs: Sequence[Run]) -> list[Bin]:
    """The bins that are not empty, all runs together; impossible ones are left out."""
    pooled: dict[tuple[float, float], list[tuple[float, ...]]] = {}
    for run in runs:
        entries = _mappings(run.summary.get("reliability"))
        for place, entry in enumerate(entries):
            samples, *shares = (number(entry.get(key)) for key in ("samples", "confidence", "accuracy"))
            if samples and samples > 0 and all(map(MEASURES["accuracy"].possible, shares)):
                borders = place / len(entries), (place + 1) / len(entries)
                pooled.setdefault(borders, []).append((samples, *(share or 0.0 for share in shares)))
    return [Bin(*borders, *_pooled(bins)) for borders, bins in sorted(pooled.items())]


def _pooled(bins: Sequence[tuple[float, ...]]) -> tuple[float, float, float]:
    total = sum(samples for samples, *_ in bins)
    confidence, right = (sum(one[0] * one[place] for one in bins) / total for place in (1, 2))
    return total, confidence, right


@dataclass(frozen=True)
class Group:
    """Runs of equal settings, with a name that tells them from the others."""

    label: str
    runs: Sequence[Run]

    def values(self, key: str, part: str | None = None) -> list[float]:
        """A number of each run that has it."""
        return [value for run in self.runs if (value := run.value(key, part)) is not None]

    def mean(self, key: str, part: str | None = None) -> float | None:
        """The mean over the runs."""
        return _mean(self.values(key, part))

    def deviation(self, key: str, part: str | None = None) -> float | None:
        """The standard deviation over the runs, if there are several."""
        values = self.values(key, part)
        return stdev(values) if len(values) > 1 else None

    def of_parts(self, key: str) -> float | None:
        """The mean over all tickets (heads, members) of all runs."""
        return _mean(reading(part, key) for run in self.runs for part in run.parts)

    def ticket(self, place: int, key: str) -> float | None:
        """The mean over the runs of one of their tickets, the first being 0."""
        return _mean(reading(run.tickets[place], key) for run in self.runs if place < len(run.tickets))

    @property
    def config(self) -> Mapping[str, Any]:
        """The settings of the first run; others differ in incidental ones alone."""
        return self.runs[0].config


# ---- reading ----


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """The runs in these folders, or in folders beneath them; reports among them are passed over."""
    chosen = [path for path in paths if not _is_report(path)]
    if not chosen:
        several = "only reports" if paths else "nothing to report on"
        told = f"{plain(paths[0])} is a report" if len(paths) == 1 else several
        raise SparsityError(f"{told}: give run folders, or folders that hold some")
    found = dict.fromkeys(chain.from_iterable(_run_folders(path) for path in chosen))
    return [read_run(path) for path in found]


def _is_report(path: Path) -> bool:
    """Whether it is a file that `report` wrote, or a folder of such files: `suptickets report runs/*`."""
    if path.is_dir():
        held = list(path.iterdir())
        return bool(held) and all(_is_report(one) for one in held)
    return path.is_file() and path.suffix in REPORTS


def _run_folders(path: Path) -> Iterator[Path]:
    if not path.is_dir():
        raise SparsityError(f"{path} is no folder: give run folders, or folders that hold some")
    below = [path] if (path / "config.json").exists() else sorted(p.parent for p in path.rglob("config.json"))
    if not below:
        raise SparsityError(f"there is no run in {path}: no config.json, there or in a folder beneath")
    return iter(below)


def read_run(path: Path) -> Run:
    """Read one folder; lines of metrics that cannot be read are counted."""
    folder = RunFolder(path)
    try:
        text = folder.metrics.read_text(errors="replace") if folder.metrics.exists() else ""
    except OSError as error:
        raise SparsityError(f"cannot read {folder.metrics}: {error.strerror}") from error
    lines = [_line(line) for line in text.splitlines() if line.strip()]
    metrics = [line for line in lines if line is not None]
    return Run(
        path, read_config(folder.config), folder.load_summary() or {}, metrics, len(lines) - len(metrics)
    )


def _line(text: str) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) else None


# ---- naming and grouping ----


def method_name(config: Mapping[str, Any]) -> str:
    """The name of method and booster, as in RigL + Sup-tickets."""
    method, booster = plain(config.get("method", "")), plain(config.get("booster", "none"))
    known = METHODS.get(method)
    return (known.__name__ if known else method) + BOOSTED.get(booster, f" + {booster.capitalize()}")


def _mean(values: Iterable[float | None]) -> float | None:
    """The mean of the values that are known, if there are any."""
    known = [value for value in values if value is not None]
    return mean(known) if known else None


def part_name(config: Mapping[str, Any]) -> str:
    """The name of what the result combines: ticket, cycle of SWA, head, member, network of a seed."""
    booster = plain(config.get("booster"))
    return "network" if booster == "dense-ensemble" else part_names(booster)[0]


def sparsity_name(config: Mapping[str, Any]) -> str:
    """The sparsity, as 90 %; nothing for a dense network that stays dense."""
    sparsity, dense = number(config.get("sparsity")), config.get("method") == "dense"
    stays = dense and config.get("booster") != "swa"
    return "" if sparsity is None or stays else f"{sparsity * 100:g}{NO_BREAK}%"


def parts_name(groups: Iterable[Group]) -> str:
    """What some settings combine, in words: heads, members or tickets."""
    names = [f"{name}s" for name in dict.fromkeys(run.part for one in groups for run in one.runs)]
    return " or ".join(filter(None, [", ".join(names[:-1]), names[-1]])) if names else ""


def runs_name(count: int) -> str:
    """The number of runs in words, as 1 run or 3 runs."""
    return "1 run" if count == 1 else f"{count} runs"


def setting_name(key: str, value: object) -> str:
    """A setting as the paper calls it, or else its name and value."""
    text = " ".join(map(plain, value)) if isinstance(value, list | tuple) else plain(value)
    text = f"{value:.12g}" if isinstance(value, float) else text
    shown = {"rule": text.upper(), "beta": f"β = {text}"}
    shown["batch_norm"] = {"average": "AV", "recompute": "BU"}.get(text, text)
    shown["schedule"] = f"{SCHEDULES.get(text, text)} cycles"
    shown |= {name: words.format(text) for name, words in CYCLES.items()}
    if text == "1" and key in CYCLES:
        return shown[key].removesuffix("s")
    return shown.get(key, f"{key.replace('_', ' ')} {text}")


def group(runs: Sequence[Run]) -> list[Group]:
    """Runs of equal settings together, the most accurate first."""
    return sorted(grouped(runs), key=lambda one: -(one.mean("accuracy") or 0.0))


def grouped(runs: Sequence[Run]) -> list[Group]:
    """Runs of equal settings together, in the order in which they come."""
    members = list(parted(runs, _identity).values())
    return [Group(*pair) for pair in zip(labels([own[0].config for own in members]), members, strict=True)]


def repeated(runs: Sequence[Run]) -> dict[Path, Path]:
    """The runs that have the settings and the seed of another run, each with that other run.

    Of several runs one counts: rather one that is done, then one that kept its tickets, then the last.
    """
    order = sorted(runs, key=lambda run: (bool(run.summary), bool(run.config.get("keep_tickets"))))
    counted = {(_identity(run), run.seed): run for run in order}
    others = {run.path: counted[_identity(run), run.seed].path for run in runs}
    return {path: other for path, other in others.items() if path != other}


def _identity(run: Run) -> str:
    keys = {**DEFAULTS, **run.config}.keys() - _incidental(run.config)
    return json.dumps({key: setting(run.config, key) for key in sorted(keys)})


def _incidental(config: Mapping[str, Any]) -> set[str]:
    """The settings that may differ; of images in folders, the place may not: it is their name."""
    return INCIDENTAL - {"data_dir"} if config.get("data") == "folder" else INCIDENTAL


def varying(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The settings in which these differ, except incidental ones."""
    ours = [[key for key in config if key not in _incidental(config)] for config in configs]
    keys = dict.fromkeys(chain.from_iterable(ours))
    return [key for key in keys if len({json.dumps(setting(config, key)) for config in configs}) > 1]


def setting(config: Mapping[str, Any], key: str) -> Any:
    """The value of a setting; its default, if the run is older than the setting."""
    default = DEFAULTS.get(key)
    return config.get(key, None if default is MISSING else default)


def labels(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The shortest names that tell the settings apart."""
    differing = varying(configs)
    telling = [key for key in TELLING if key in differing] or ["method"]
    names = [_label(config, telling) for config in configs]
    for name in {name for name in names if names.count(name) > 1}:
        alike = [place for place, other in enumerate(names) if other == name]
        keys = _distinguishing([configs[place] for place in alike])
        for place in alike:
            names[place] = _label(configs[place], [*telling, *keys])
    return names


def _distinguishing(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """As few settings as tell these apart, taken one after the other; those of the cycles come together."""
    chosen, differing = list[str](), varying(configs)
    for key in differing:
        if len({_label(config, [*chosen, key]) for config in configs}) > len(
            {_label(config, chosen) for config in configs}
        ):
            chosen.append(key)
    if not CYCLES.keys() & chosen:
        return chosen
    return [key for key in chosen if key not in CYCLES] + [key for key in CYCLES if key in differing]


def _label(config: Mapping[str, Any], keys: Sequence[str]) -> str:
    parts = []
    for key in keys:
        if key in ("method", "booster"):
            parts.append(method_name(config))
        elif key == "sparsity":
            parts.append(sparsity_name(config))
        elif key in TELLING:
            parts.append(plain(config.get(key, "")))
        elif key != "beta" or config.get("rule") == "cima":  # other rules have no such weight
            parts.append(setting_name(key, config.get(key, "")))
    return ", ".join(dict.fromkeys(part for part in parts if part))
