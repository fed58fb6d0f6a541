"""The paper's tables and figures as data: 21 experiments, each a list of cells; and experiments of our own.

A `Cell` is one number that the paper prints (or, in a figure, draws): what is trained, what is read off the
result, and the paper's `Number`, which is None where the paper's source has none.

**What is trained** is `cell.settings()`, for `suptickets.training.settings.resolve`: data, model, method,
sparsity, booster, and the cell's `variation`, the settings that its experiment is about. The recipe gives all
else. Cells with the same resolved settings are the same run, whatever their experiments: `granet-vs-dense`
trains nothing of its own, nor do cells that repeat a default (`cycle_epochs` 8, `batch_norm` average). Runs
that are not the same share work in three places:

- *trunk*: the normal phase, for all runs with the same data, model, method, sparsity and distribution and the
  same `epochs - cycles * cycle_epochs` (which also places the drops of the learning rate);
- *branch*: from the end of a trunk the plain finish (`booster` none), or cycles (`cycles`, `cycle_epochs`,
  `lr_high`, `explore_rate`, `schedule`, `criteria`; the booster `swa` does not explore). A branch with fewer
  cycles is the beginning of one with more (`ticket-count-extended`);
- *average*: what only combines the tickets of a branch trains nothing: `rule`, `beta`, `batch_norm`, and the
  booster `ensemble` beside `sup-tickets`. `distillation` takes these tickets into a run of its own.

**What is read** is `cell.measure`, off what `cell.of` says:

- `network`: the network that the run ends with, with Sup-tickets the superposed one (`cell.layer` of it);
- `ticket`: the cheap ticket number `cell.ticket`, from 1;
- `tickets`: all tickets (heads, members) of the run together;
- `seeds`: the runs of all seeds together, which are the members of a `dense-ensemble`; a `p_value` compares
  them with those of the same cell without a booster;
- `model`: the model and the recipe alone, nothing is trained.

**A file of `paper/`**, or of `own/` for what is not in the paper, is one experiment. Its tables have
`shared` fields, `columns` (groups of fields; a list stands for each of its values in turn) and `rows`: the
fields of a row, then its numbers as printed, one for each column. Percentages are percentages in the files,
and fractions in `Number`; `report.measures` knows which they are.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from decimal import Decimal
from importlib.resources import files
from itertools import product
from typing import Any

from suptickets.data import DATA
from suptickets.errors import SparsityError, choice, unknown
from suptickets.methods import METHODS
from suptickets.models import MODELS
from suptickets.report.measures import measure

Value = str | int | float | tuple[str, ...]

NAMES = (
    *("averaging", "schedule", "vgg16", "resnet50", "wrn28-10", "imagenet", "granet-vs-dense"),
    *("cycle-length", "ticket-count-fixed", "ticket-count-extended", "diversity", "lr-schedules", "large-lr"),
    *("variance", "uncertainty", "batch-norm", "layer-sparsity", "ensemble", "distillation"),
    *("significance", "swa"),
)
OWN = ("earlier-cycles",)
BOOSTERS = (
    *("none", "sup-tickets", "swa", "ensemble", "distillation"),
    *("tree-net", "batch-ensemble", "dense-ensemble"),
)
VARIATIONS = (
    *("epochs", "cycles", "cycle_epochs", "lr_high", "explore_rate", "schedule", "criteria"),
    *("rule", "beta", "batch_norm", "distribution"),
)


@dataclass(frozen=True)
class Measure:
    """What a cell shows, and what it is read off (`of`, see the module)."""

    summary: str
    of: str = "network"


MEASURES = {
    "accuracy": Measure("share of the test set that is classified right"),
    "ece": Measure("expected calibration error"),
    "nll": Measure("negative log-likelihood"),
    "ticket_accuracy": Measure("mean accuracy of the tickets", "tickets"),
    "ticket_deviation": Measure("population deviation of the tickets' accuracies", "tickets"),
    "disagreement": Measure("share of the test set on which two members differ, mean of pairs", "tickets"),
    "kl": Measure("Kullback-Leibler divergence between two members, mean of ordered pairs", "tickets"),
    "p_value": Measure("Kolmogorov-Smirnov test against the same cell without a booster", "seeds"),
    "train_flops_ratio": Measure("FLOPs of the training, of those of the dense training"),
    "test_flops_ratio": Measure("FLOPs of a forward pass, of those of the dense network"),
    "train_flops": Measure("FLOPs of the dense training", "model"),
    "test_flops": Measure("FLOPs of a forward pass of the dense network", "model"),
    "layer_sparsity": Measure("sparsity of a layer, `overall`, or `backbone`: all but fc"),
    "layer_parameters": Measure("weights of a layer", "model"),
    "layer_flops": Measure("FLOPs of a layer in a forward pass of the dense network", "model"),
    "learning_rate": Measure("learning rate of each step: a drawing", "model"),
}


@dataclass(frozen=True)
class Number:
    """A number of the paper; fractions where it prints percentages."""

    mean: float
    deviation: float | None = None


@dataclass(frozen=True)
class Cell:
    """One number of a table or figure: what is trained, what is read off it, what the paper prints."""

    experiment: str
    data: str
    model: str
    method: str
    sparsity: float
    booster: str = "none"
    variation: tuple[tuple[str, Value], ...] = ()
    measure: str = "accuracy"
    ticket: int | None = None
    layer: str | None = None
    printed: str | None = None

    def __post_init__(self) -> None:
        """Refuse unknown names."""
        known: dict[str, Iterable[str]] = {"data": DATA, "model": MODELS, "method": METHODS}
        for name, names in {**known, "booster": BOOSTERS, "measure": MEASURES}.items():
            choice(name, getattr(self, name), names)
        for name, _ in self.variation:
            choice("variation", name, VARIATIONS)

    @property
    def of(self) -> str:
        """What the measure is read off: see the module."""
        if self.ticket is not None:
            return "ticket"
        return "seeds" if self.booster == "dense-ensemble" else MEASURES[self.measure].of

    @property
    def paper(self) -> Number | None:
        """The paper's number, if its source has one."""
        if self.printed is None:
            return None
        shift = -2 if measure(self.measure).percent else 0
        return Number(*(float(Decimal(part).scaleb(shift)) for part in self.printed.split("±")))

    def settings(self) -> dict[str, Any]:
        """The settings of the run that the cell is read off; the recipe gives all others."""
        booster = "none" if self.booster == "dense-ensemble" else self.booster
        what = {"data": self.data, "model": self.model, "method": self.method, "sparsity": self.sparsity}
        return {**what, "booster": booster, **dict(self.variation)}

    def as_dict(self) -> dict[str, Value]:
        """All that tells the cell from others: what a filter can ask for."""
        flat = {field.name: getattr(self, field.name) for field in fields(self)} | dict(self.variation)
        left_out = ("variation", "printed")
        return {key: value for key, value in flat.items() if value is not None and key not in left_out}

    def texts(self) -> dict[str, str]:
        """The same, with values written as in a filter."""
        return {key: _text(value) for key, value in self.as_dict().items()}


@dataclass(frozen=True)
class Experiment:
    """A table or figure of the paper, or one of ours.

    Attributes:
        name: what it is called.
        title: one line about it.
        place: where it is in the paper, or that it is not.
        seeds: how many runs the paper averages (on ImageNet always one).
        table: all cells, row by row.
    """

    name: str
    title: str
    place: str
    seeds: int
    table: tuple[Cell, ...]

    @property
    def source(self) -> str:
        """Where its numbers come from, in words."""
        return self.place if self.name in OWN else f"{self.place} of the paper"

    @property
    def summary(self) -> str:
        """The line for `suptickets list experiments`."""
        return f"{self.place}: {self.title}"

    def cells(self, where: str = "") -> tuple[Cell, ...]:
        """The cells that a filter such as `sparsity=0.95,method=rigl` leaves."""
        return select(self.table, where)


def select(cells: Iterable[Cell], where: str) -> tuple[Cell, ...]:
    """The cells that a filter such as `sparsity=0.95,method=rigl` leaves; a key given twice takes both."""
    texts = [(cell, cell.texts()) for cell in cells]
    if where and not where.strip(" ,"):
        raise SparsityError(f"{where!r} is no filter: write KEY=VALUE, as in sparsity=0.95,method=rigl")
    wanted: dict[str, set[str]] = {}
    for term in filter(None, where.replace(" ", "").split(",")):
        name, equals, value = term.partition("=")
        if not equals:
            raise SparsityError(f"{term!r} is no filter: write KEY=VALUE, as in sparsity=0.95,method=rigl")
        key = name.replace("-", "_")
        known = {text[key] for _, text in texts if key in text}
        if not known:
            raise unknown("key of a cell", key, {name for _, text in texts for name in text})
        wanted.setdefault(key, set()).add(choice(key, _text(value), known))
    left = tuple(cell for cell, text in texts if all(text.get(key) in some for key, some in wanted.items()))
    if not left:
        raise SparsityError(f"no cell has {where}: leave out a condition")
    return left


def _text(value: Value) -> str:
    """A value as a filter names it: 0.950 and 0.95 are the same."""
    if isinstance(value, tuple):
        return "+".join(value)
    try:
        return f"{float(value):g}"
    except ValueError:
        return str(value)


def experiment(name: str) -> Experiment:
    """The experiment of that name."""
    return EXPERIMENTS[choice("experiment", name, EXPERIMENTS)]


def _load(name: str) -> Experiment:
    folder = files("suptickets.experiments") / ("own" if name in OWN else "paper")
    raw = json.loads((folder / f"{name}.json").read_text("utf-8"))
    cells = tuple(cell for table in raw["tables"] for cell in _cells(name, table))
    if len({tuple(cell.as_dict().items()) for cell in cells}) < len(cells):
        raise SparsityError(f"{name}.json has a cell twice")
    return Experiment(name, raw["title"], raw["place"], raw["seeds"], cells)


def _cells(name: str, table: Mapping[str, Any]) -> Iterator[Cell]:
    columns = [column for group in table["columns"] for column in _each(group)]
    for row, *numbers in table["rows"]:
        for column, printed in zip(columns, numbers, strict=True):
            given = {**table["shared"], **row, **column, "printed": printed}
            own = {key: given.pop(key) for key in list(given) if key in Cell.__dataclass_fields__}
            varied = tuple((key, tuple(v) if isinstance(v, list) else v) for key, v in given.items())
            yield Cell(name, **own, variation=varied)


def _each(group: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The columns of a group: its lists' values in turn, those of the last list fastest."""
    for values in product(*(value if isinstance(value, list) else [value] for value in group.values())):
        yield dict(zip(group, values, strict=True))


EXPERIMENTS = {name: _load(name) for name in (*NAMES, *OWN)}
