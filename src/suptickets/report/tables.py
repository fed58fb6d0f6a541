"""Tables of several runs: a row for each setting, a row for each run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from suptickets.report.document import Cell, Table
from suptickets.report.measures import MEASURES, Measure, plain
from suptickets.report.runs import Group, Run, parts_name


class Column(NamedTuple):
    """A number of the summary, or of a part of it; `parts` is the mean of the tickets (heads, members)."""

    measure: str
    header: str = ""
    part: str | None = None

    @property
    def kind(self) -> Measure:
        """The measure, which knows how its numbers are written."""
        return MEASURES[self.measure]

    @property
    def name(self) -> str:
        """The header, with the unit."""
        unit = " (%)" if self.kind.percent else ""
        return f"{self.header}{unit}" if self.header else self.kind.header

    def of(self, one: Group) -> Cell:
        """The cell of a setting: mean and deviation."""
        if self.part == "parts":
            return self.kind.cell(one.of_parts(self.measure))
        deviation = one.deviation(self.measure, self.part) if self.kind.better or self.part else None
        return self.kind.cell(one.mean(self.measure, self.part), deviation)


COLUMNS = (
    *map(Column, ("accuracy", "nll", "ece", "sparsity", "train_flops_ratio", "test_flops_ratio")),
    Column("accuracy", "Before the cycles", "start"),
    Column("accuracy", "Mean of its tickets", "parts"),
    Column("accuracy", "Ensemble", "ensemble"),
    Column("disagreement", part="diversity"),
    Column("kl", part="diversity"),
    Column("explored"),
)


def result_tables(groups: Sequence[Group], *, fold: bool = False) -> list[Table]:
    """Mean and deviation by setting, and every run; `fold` hides the first too until it is asked for."""
    columns = [column for column in COLUMNS if any(column.of(one).value is not None for one in groups)]
    header = [_renamed(column, groups) for column in columns]
    rows = [[Cell(one.label), _runs(one), *(column.of(one) for column in columns)] for one in groups]
    title = "Mean and deviation by setting"
    by_setting = Table("settings", title, ["Setting", "Runs", *header], rows, folded=fold)
    each = [[Cell(one.label), *_run(run, columns)] for one in groups for run in one.runs]
    names = ["Setting", "Seed", *header, "Seconds", "Folder"]
    if not any(row[-1].text for row in each):
        each, names = [row[:-1] for row in each], names[:-1]
    return [by_setting, Table("runs", "Every run", names, each, folded=True)]


def _renamed(column: Column, groups: Sequence[Group]) -> str:
    """The header of a column: heads and members are not called tickets."""
    return column.name.replace("tickets", parts_name(one for one in groups if one.runs[0].parts))


def _runs(one: Group) -> Cell:
    done = len(one.values("accuracy"))
    return Cell(str(done), float(done))


def _run(run: Run, columns: Sequence[Column]) -> list[Cell]:
    alone = Group("", [run])
    folder = "" if run.path == Path() else plain(run.path)
    results = [column.of(alone) for column in (*columns, Column("seconds"))]
    return [Cell(run.seed, run.setting("seed")), *results, Cell(folder)]
