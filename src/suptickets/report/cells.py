"""The cells of an experiment: the paper's number beside ours, and which of them win."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from math import hypot
from typing import NamedTuple, TypeAlias

from suptickets.report.measures import Measure, measure, plain
from suptickets.report.runs import method_name, sparsity_name

SUPERPOSED = "superposed"  # in place of a ticket's number: all tickets together
Setting: TypeAlias = str | int | float | bool | None


class Paper(NamedTuple):
    """What the paper prints, for so many runs; percentages are given as fractions."""

    mean: float
    deviation: float | None = None
    runs: int = 0
    printed: str = ""


class Ours(NamedTuple):
    """Our result, of so many runs."""

    mean: float
    sd: float | None = None
    runs: int = 1


@dataclass(frozen=True)
class CellResult:
    """One number of a table or figure; `variation` names what the experiment varies beyond the settings.

    The number of a trial is not `comparable`: its difference to the paper's is not told.
    """

    settings: Mapping[str, Setting]
    variation: str = ""
    measure: str = "accuracy"
    paper: Paper | None = None
    ours: Ours | None = None
    comparable: bool = True

    @property
    def kind(self) -> Measure:
        """How the measure is written."""
        return measure(self.measure)

    def sound(self) -> CellResult:
        """The cell, without our result if it is impossible: a store may hold anything."""
        known = () if self.ours is None else (self.ours.mean, self.ours.sd or 0.0)
        return self if all(map(self.kind.possible, known)) else replace(self, ours=None)

    def mean(self, side: str) -> float | None:
        """The mean of one side, `paper` or `ours`."""
        known = self.paper if side == "paper" else self.ours
        return None if known is None else known.mean

    @property
    def difference(self) -> float | None:
        """Our mean minus the paper's, if they are of the same setting."""
        if self.paper is None or self.ours is None or not self.comparable:
            return None
        return self.ours.mean - self.paper.mean

    @property
    def deviations(self) -> float | None:
        """The difference in units of the joint deviation; None if a deviation is not known."""
        if self.difference is None or self.paper is None or self.ours is None:
            return None
        if self.paper.deviation is None or self.ours.sd is None:
            return None
        joint = hypot(self.paper.deviation, self.ours.sd)
        return self.difference / joint if joint else None

    @property
    def welch(self) -> float | None:
        """The p-value of the difference, by Welch's test; None if a deviation is not known."""
        if self.deviations is None or self.paper is None or self.ours is None or self.paper.runs < 2:
            return None
        from scipy import stats  # type: ignore[import-untyped]  # slow to import

        return float(stats.ttest_ind_from_stats(*self.ours, *self.paper[:3], equal_var=False).pvalue)

    def where(self) -> str:
        """Data and model, as in a title."""
        return " · ".join(plain(self.settings[key]) for key in ("data", "model") if key in self.settings)

    def column(self, *, level: bool = True) -> tuple[str, ...]:
        """The column that it has in the paper's tables: data, sparsity (if `level`) and measure."""
        sparsity = sparsity_name(self.settings) if level else ""
        return plain(self.settings.get("data", "")), sparsity, self.kind.header

    def row(self) -> tuple[str, ...]:
        """The row that it has there: all else but the model (method, booster, other settings, variation)."""
        placed = {"data", "sparsity", "model", "method", "booster"}
        method = method_name(self.settings) if "method" in self.settings else ""
        others = (
            value if value == SUPERPOSED else f"{key.replace('_', ' ')} {value}"
            for key, value in self.settings.items()
            if key not in placed
        )
        return method, plain(", ".join(others)), plain(self.variation)


def telling(names: Sequence[tuple[str, ...]]) -> tuple[list[str], str]:
    """Names without the parts that all share, and these parts."""
    shared = [len(set(parts)) == 1 for parts in zip(*names, strict=True)]
    if all(shared):
        shared = [False] * len(shared)
    differing = [not same for same in shared]
    return [_words(name, differing) for name in names], _words(names[0], shared)


def _words(name: tuple[str, ...], chosen: Sequence[bool]) -> str:
    return ", ".join(filter(None, compress(name, chosen)))


class Marks(NamedTuple):
    """Which cells could have won, and which did."""

    contenders: set[int]
    winners: set[int]


@dataclass(frozen=True)
class Mark:
    """What is set in bold: `of` gives the marks for the cells and a side (paper or ours), `text` says why."""

    of: Callable[[Sequence[CellResult], str], Marks]
    text: str


def best_among(*rivals: str) -> Mark:
    """The best of the cells that differ in the variation and these settings alone; ties win together.

    Our numbers compete only if they are means of equally many seeds.
    """

    def marks(cells: Sequence[CellResult], side: str) -> Marks:
        groups: dict[object, list[int]] = {}
        for place, cell in enumerate(cells):
            if cell.mean(side) is not None and cell.kind.better:
                kept = {key: value for key, value in cell.settings.items() if key not in rivals}
                groups.setdefault((cell.measure, *sorted(map(str, kept.items()))), []).append(place)
        contested = [group for group in groups.values() if len(group) > 1 and _fair(cells, group, side)]
        contenders = {place for group in contested for place in group}
        return Marks(contenders, {place for group in contested for place in _best(cells, group, side)})

    what = " and ".join([*rivals, "variation"])
    return Mark(marks, f"Bold: the best of those that differ in {what} alone, if they have as many runs.")


def better_than(**baseline: Setting) -> Mark:
    """The cells that are at least as good as the one of the same data and model with these settings."""

    def is_baseline(cell: CellResult) -> bool:
        return all(cell.settings.get(key) == value for key, value in baseline.items())

    def place(cell: CellResult) -> tuple[object, ...]:
        return cell.settings.get("data"), cell.settings.get("model"), cell.measure

    def marks(cells: Sequence[CellResult], side: str) -> Marks:
        bars = {place(cell): _goodness(cell, side) for cell in cells if is_baseline(cell)}
        known = {
            n
            for n, cell in enumerate(cells)
            if not is_baseline(cell) and cell.mean(side) is not None and bars.get(place(cell)) is not None
        }
        return Marks(known, {n for n in known if _goodness(cells[n], side) >= bars[place(cells[n])]})

    what = ", ".join(plain(value) for value in baseline.values())
    return Mark(marks, f"Bold: at least as good as {what}.")


def _fair(cells: Sequence[CellResult], places: Sequence[int], side: str) -> bool:
    found = (cells[place].ours for place in places)
    return side == "paper" or len({one.runs for one in found if one}) == 1


NOBODY = Mark(lambda cells, side: Marks(set(), set()), "")


def _goodness(cell: CellResult, side: str) -> float:
    """Higher is better; as shown, so that what looks equal is equal."""
    mean = cell.mean(side)
    return float("nan") if mean is None else cell.kind.better * cell.kind.rounded(mean)


def _best(cells: Sequence[CellResult], places: Sequence[int], side: str) -> set[int]:
    best = max(_goodness(cells[place], side) for place in places)
    return {place for place in places if _goodness(cells[place], side) == best}
