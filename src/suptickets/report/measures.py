"""How the measures of a run are called and written."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from suptickets.report.document import Cell

MOST = 1e12  # no number of a run is beyond it
MINUS, NO_BREAK, NOTHING = "\N{MINUS SIGN}", "\N{NO-BREAK SPACE}", "\N{EN DASH}"


@dataclass(frozen=True)
class Measure:
    """A measure: its name, its digits, whether more (1) or less (-1) is better, and how large it can be.

    Digits are those after the point or, if `significant`, those from the first that is not 0.
    """

    label: str
    digits: int = 4
    better: int = 0
    percent: bool = False
    most: float = MOST
    scientific: bool = False
    significant: bool = False

    @property
    def header(self) -> str:
        """The name of a column of bare numbers."""
        return f"{self.label} (%)" if self.percent else self.label

    @property
    def aim(self) -> str:
        """What is better, to append to the name of an axis."""
        return {1: " (more is better)", -1: " (less is better)"}.get(self.better, "")

    def possible(self, value: float | None) -> bool:
        """Whether a value is possible: a share is between 0 and 1, and nothing is beyond `most`."""
        if value is None or not math.isfinite(value):
            return False
        return 0 <= value <= 1 if self.percent else abs(value) <= self.most

    def rounded(self, value: float) -> float:
        """A value rounded as it is shown: what looks equal is equal."""
        if self.scientific:
            return float(f"{value:.{self.digits}e}")
        if self.significant:
            return float(f"{value:.{self.digits}g}")
        return round(value * 100 if self.percent else value, self.digits)

    def bare(self, value: float | None, deviation: float | None = None) -> str:
        """A value without the unit, for a table."""
        if value is None:
            return NOTHING
        if self.scientific:
            return _signed(f"{value:.{self.digits}e}").replace("e+", "e")
        if self.significant:
            return _signed(re.sub(r"e([+-])0*", r"e\1", f"{value:#.{self.digits}g}"))
        shown = _signed(f"{self.rounded(value):.{self.digits}f}")
        return shown if deviation is None else f"{shown} ± {self.rounded(deviation):.{self.digits}f}"

    def quoted(self, printed: str, value: float | None, deviation: float | None = None) -> str:
        """Another's number as they print it, with their digits; if that is not known, as our own."""
        return printed.replace("±", " ± ").replace("-", MINUS) if printed else self.bare(value, deviation)

    def show(self, value: float | None, deviation: float | None = None) -> str:
        """A value with the unit, for a sentence."""
        unit = f"{NO_BREAK}%" if self.percent and value is not None else ""
        return self.bare(value, deviation) + unit

    def change(self, value: float) -> str:
        """A difference of two values: with a sign unless it is 0, in points if the measure is in per cent."""
        sign = "+" if self.rounded(value) > 0 else ""
        return sign + self.bare(value) + (f"{NO_BREAK}points" if self.percent else "")

    def cell(self, value: float | None, deviation: float | None = None) -> Cell:
        """A value in a table, sorted by its number."""
        return Cell(self.bare(value, deviation), value)


MEASURES = {
    "accuracy": Measure("Accuracy", 2, 1, percent=True),
    "nll": Measure("NLL", 4, -1),
    "ece": Measure("ECE", 2, -1, percent=True),
    "ticket_accuracy": Measure("Mean accuracy of the tickets", 2, 1, percent=True),
    "ensemble_accuracy": Measure("Accuracy of the ensemble", 2, 1, percent=True),
    "ticket_deviation": Measure("Deviation of the tickets", 2, percent=True),
    "sparsity": Measure("Sparsity", 2, percent=True),
    "layer_sparsity": Measure("Sparsity", 2, percent=True),
    "explored": Measure("Explored", 2, percent=True),
    "p_value": Measure("p-value", 2, significant=True),
    "train_flops": Measure("FLOPs of training", 3, most=1e24, scientific=True),
    "test_flops": Measure("FLOPs of a forward pass", 0, most=1e24),
    "layer_flops": Measure("FLOPs", 0, most=1e24),
    "layer_parameters": Measure("Parameters", 0),
    "train_flops_ratio": Measure("Training FLOPs", 3),
    "test_flops_ratio": Measure("Test FLOPs", 3),
    "disagreement": Measure("Disagreement", 3, 1),
    "kl": Measure("KL divergence", 3, 1),
    "seconds": Measure("Seconds", 1),
}


def measure(name: str) -> Measure:
    """The measure of that name; one that is not known is written with four digits."""
    return MEASURES.get(name) or Measure(name.replace("_", " ").capitalize())


def number(value: object) -> float | None:
    """`value`, if it is a number that a run can hold: files may hold anything."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if -MOST <= value <= MOST else None


def reading(holder: Mapping[str, object], key: str) -> float | None:
    """The value of a measure in a line or a summary, if it is possible: `test_accuracy` is a share."""
    value = number(holder.get(key))
    kind = MEASURES.get(key) or MEASURES.get(key.removeprefix("test_").removeprefix("train_"))
    return value if kind is None or kind.possible(value) else None


def duration(seconds: float | None) -> str:
    """A time in the unit that suits it."""
    if seconds is None:
        return NOTHING
    hours, minutes = seconds / 3600, seconds / 60
    shown = f"{hours:.1f} h" if hours >= 2 else f"{minutes:.0f} min" if minutes >= 2 else f"{seconds:.0f} s"
    return shown.replace(" ", NO_BREAK)


def file_names(titles: Sequence[str]) -> list[str]:
    """Names of files made from titles, none of them twice: settings-accuracy-cifar10-vgg16."""
    names: list[str] = []
    for title in titles:
        name = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")[:80]
        names.append(name if name not in names else f"{name}-{len(names)}")
    return names


def plain(value: object) -> str:
    """`value` as text that every format can hold: what cannot be printed is replaced."""
    text = " ".join(str(value).split())
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def _signed(text: str) -> str:
    return text.replace("-", MINUS) if float(text) else text.lstrip("-")
