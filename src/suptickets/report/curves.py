"""Plots over the epochs: learning rate, loss, accuracy, sparsity; of one run, or of the means of several.

Ring, dots and diamond are scores on the test data: of the network before the cycles, of the tickets, and of
the superposed one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import mean, stdev
from typing import TYPE_CHECKING

from suptickets.report.colours import MUTED, Colour
from suptickets.report.document import Plot
from suptickets.report.looks import ENSEMBLE, START, SUPERPOSED, TICKET, Look, looks
from suptickets.report.measures import MEASURES, Measure, reading
from suptickets.report.runs import Curve, Group, Run, common_cycles
from suptickets.training.boosters import PREDICTION_ENSEMBLES

if TYPE_CHECKING:
    from suptickets.report.chart import Chart, Point

TIPS = 180  # tooltips along all lines of a plot
RATE, LOSS = Measure("Learning rate", 5), Measure("Loss")


@dataclass(frozen=True)
class Line:
    """A line of a plot: the mean of some curves, and their deviation."""

    name: str
    colour: Colour
    curves: Sequence[Curve]
    dashed: bool = False

    @property
    def seen(self) -> bool:
        """Whether it has more than one point."""
        return len(averaged(self.curves)[0]) > 1

    def draw(self, chart: Chart, measure: Measure, tips: int) -> None:
        """Draw the line, with a tooltip for each epoch, or for at most `tips` of them."""
        x, y, deviation = averaged(self.curves)

        def tip(epoch: float, value: float) -> str:
            return f"{self.name}, epoch {epoch:g}".lstrip(", ") + f"\n{measure.show(value)}"

        if x:
            draw = partial(chart.line, x, y, self.colour, name=self.name, dashed=self.dashed)
            draw(deviation=deviation, tip=tip, tips=tips)


@dataclass(frozen=True)
class Lines:
    """The lines of one plot; `score` names what the test data say of the tickets on the same axis."""

    name: str
    title: str
    measure: Measure
    lines: Sequence[Line]
    score: str = ""

    def points(self) -> list[tuple[float, float]]:
        """All points of all curves."""
        return [point for line in self.lines for curve in line.curves for point in curve]

    def plot(self, borders: Sequence[float], marked: Sequence[tuple[Group, Look]]) -> Plot:
        """The plot of these lines, with the cycles shaded and the tickets marked."""

        def draw(chart: Chart) -> None:
            chart.axis_names(self.title, "epoch")
            last = self._across(chart, borders)
            if not self.measure.percent:
                chart.logarithmic()
            for line in self.lines:
                line.draw(chart, self.measure, TIPS // len(self.lines))
            for one, look in marked:
                _mark_tickets(chart, one, look.colour, self, several=len(marked) > 1)
            if self.measure.percent:
                self._upwards(chart, last)

        dashed = "Dashed: without a booster." if any(line.dashed and line.seen for line in self.lines) else ""
        beyond = any(look.colour is MUTED for _, look in marked)
        text = f"{dashed}{' Grey: further settings.' if beyond else ''}".strip()
        return Plot(self.name, self.title, draw, text)

    def _across(self, chart: Chart, borders: Sequence[float]) -> float:
        """Let the horizontal axis show the epochs; returns the last."""
        first, last = (pick(x for x, _ in self.points()) for pick in (min, max))
        within = bool(borders) and borders[0] <= first  # only the cycles are known
        if borders and borders[-1] >= last:
            chart.cycles(borders, stretch=not within)
            last = borders[-1]
        chart.epochs(last, borders[0] if within else 0)
        return last

    def _upwards(self, chart: Chart, last: float) -> None:
        """Let the vertical axis show all marks, and the curves but for their first tenth.

        The first tenth of a training run would flatten all that follows.
        """
        chart.percent()
        later = [y for x, y in self.points() if x > last / 10] or [y for _, y in self.points()]
        shown = [*later, *chart.marked]
        margin = 0.06 * (max(shown) - min(shown)) or 0.01
        chart.axes.set_ylim(min(shown) - margin, max(shown) + margin)


def averaged(curves: Sequence[Curve]) -> tuple[list[float], list[float], list[float]]:
    """Epochs, mean and standard deviation over the curves that reach them."""
    values: dict[float, list[float]] = {}
    for curve in curves:
        for x, y in curve:
            values.setdefault(x, []).append(y)
    ordered = sorted(values.items())
    deviations = [stdev(y) if len(y) > 1 else 0.0 for _, y in ordered]
    return [x for x, _ in ordered], [mean(y) for _, y in ordered], deviations


def curve_plots(groups: Sequence[Group]) -> list[Plot]:
    """All plots for which the runs have numbers."""
    borders = common_cycles([run for one in groups for run in one.runs])
    found = _one_setting(groups[0]) if len(groups) == 1 else _several_settings(groups)
    marked = list(zip(groups, looks(groups), strict=True))
    return [lines.plot(borders, marked) for lines in found if lines.points()]


def _one_setting(group: Group) -> list[Lines]:
    """The lines of one setting: training and test in one plot."""

    def line(name: str, colour: Colour, key: str) -> Line:
        return Line(name, colour, [run.curve(key) for run in group.runs])

    def test(name: str, key: str) -> Line:
        return Line(name, TICKET, [_tested(run, key) for run in group.runs])

    rates = Line("", TICKET, [run.learning_rates() for run in group.runs])
    loss = [line("training", MUTED, "loss"), test("test (NLL)", "nll")]
    accuracy = [line("training", MUTED, "train_accuracy"), test("test", "accuracy")]
    return [
        Lines("learning-rate", "Learning rate", RATE, [rates], "lr"),
        Lines("loss", "Loss", LOSS, loss, "nll"),
        Lines("accuracy", "Accuracy", MEASURES["accuracy"], accuracy, "accuracy"),
        Lines("sparsity", "Sparsity", MEASURES["sparsity"], _moving([line("", TICKET, "sparsity")])),
    ]


def _several_settings(groups: Sequence[Group]) -> list[Lines]:
    """A line for each setting; those beyond the palette are grey and have no name."""

    def lines(curve: Callable[[Run], Curve]) -> list[Line]:
        return [
            Line("" if colour is MUTED else one.label, colour, [curve(run) for run in one.runs], plain)
            for one, (colour, plain, _) in zip(groups, looks(groups), strict=True)
        ]

    accuracy, sparsity = MEASURES["accuracy"], MEASURES["sparsity"]
    tested = partial(_tested, key="accuracy")
    return [
        Lines("learning-rate", "Learning rate", RATE, lines(Run.learning_rates), "lr"),
        Lines("loss", "Training loss", LOSS, lines(lambda run: run.curve("loss"))),
        Lines("test-nll", "Test NLL", MEASURES["nll"], lines(partial(_tested, key="nll")), "nll"),
        Lines(
            "train-accuracy", "Training accuracy", accuracy, lines(lambda run: run.curve("train_accuracy"))
        ),
        Lines("test-accuracy", "Test accuracy", accuracy, lines(tested), "accuracy"),
        Lines("sparsity", "Sparsity", sparsity, _moving(lines(lambda run: run.curve("sparsity")))),
    ]


def _tested(run: Run, key: str) -> Curve:
    """Test scores as evaluated during training, or else before the cycles and after each of them."""
    curve = run.curve(f"test_{key}")
    if len(curve) > 1 or not run.tickets:
        return curve
    scores = [run.summary.get("start"), *run.tickets]
    values = [reading(score, key) if isinstance(score, Mapping) else None for score in scores]
    return [(x, y) for x, y in zip(run.cycles, values, strict=False) if y is not None]


def _moving(lines: list[Line]) -> list[Line]:
    """The lines, or nothing if none of them moves: a sparsity that stays needs no plot."""
    values = [{round(y, 3) for _, y in curve} for line in lines for curve in line.curves]
    return lines if any(len(each) > 1 for each in values) else []


def _mark_tickets(chart: Chart, one: Group, colour: Colour, lines: Lines, *, several: bool) -> None:
    """Mark the network before the cycles (hollow), the tickets, and the superposed one (a diamond)."""
    cycles, key, single = common_cycles(one.runs), lines.score, not several and len(one.runs) == 1
    label, size = (f"{one.label}: ", 5.0) if several else ("", 7.0)

    def point(epoch: float, name: str, value: float | None) -> list[Point]:
        return [] if value is None else [(epoch, value, f"{label}{name}\n{lines.measure.show(value)}")]

    if key == "lr":
        for n, epoch in enumerate(cycles[1:], 1):
            rates = one.runs[0].learning_rates()
            rate = next((y for x, y in rates if abs(x - epoch) < 1e-6), None)
            chart.points(point(epoch, f"ticket {n}", rate), colour, size=size)
    elif key and cycles and one.runs[0].tickets:
        start = point(cycles[0], "before the cycles", one.mean(key, "start"))
        chart.points(start, START if single else colour, hollow=True, size=size)
        for n, epoch in enumerate(cycles[1:]):
            chart.points(point(epoch, f"ticket {n + 1}", one.ticket(n, key)), colour, size=size)
        name, value = _result(one, key)
        final = SUPERPOSED if name == "superposed" else ENSEMBLE
        chart.points(point(cycles[-1], name, value), final if single else colour, marker="D", size=size)


def _result(one: Group, key: str) -> tuple[str, float | None]:
    """The superposed ticket; where there is none, the tickets together."""
    known = one.mean(key, "superposed")
    alone = known is not None or one.config.get("booster") not in PREDICTION_ENSEMBLES
    return "superposed" if alone else "ensemble of the tickets", one.mean(key) if known is None else known
