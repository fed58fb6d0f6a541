"""Plots over the epochs: learning rate, loss, accuracy, sparsity; of one run, or of the means of several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import TYPE_CHECKING

from suptickets.report.colours import MUTED, SERIES, Colour, series
from suptickets.report.document import Plot
from suptickets.report.measures import MEASURES, Measure, number
from suptickets.report.runs import Curve, Group, Run, common_cycles

if TYPE_CHECKING:
    from suptickets.report.chart import Chart, Point

RATE, LOSS = Measure("Learning rate", 5), Measure("Loss")


@dataclass(frozen=True)
class Line:
    """A line of a plot: the mean of some curves, and their deviation."""

    name: str
    colour: Colour
    curves: Sequence[Curve]

    def draw(self, chart: Chart, measure: Measure) -> None:
        """With a tooltip for each epoch."""
        x, y, deviation = averaged(self.curves)

        def tip(epoch: float, value: float) -> str:
            return f"{self.name}, epoch {epoch:g}".lstrip(", ") + f"\n{measure.show(value)}"

        if x:
            chart.line(x, y, self.colour, name=self.name, deviation=deviation, tip=tip)


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

    def plot(self, borders: Sequence[float], run: Run | None) -> Plot:
        """With the cycles shaded; the tickets of a single run are marked."""

        def draw(chart: Chart) -> None:
            chart.axis_names(self.title, "epoch")
            self._axes(chart, borders)
            for line in self.lines:
                line.draw(chart, self.measure)
            if run is not None:
                _mark_tickets(chart, run, self)

        return Plot(self.name, self.title, draw)

    def _axes(self, chart: Chart, borders: Sequence[float]) -> None:
        last = max(x for x, _ in self.points())
        if borders and borders[-1] >= last:
            chart.cycles(borders)
            last = borders[-1]
        chart.epochs(last)
        if not self.measure.percent:
            return chart.logarithmic()
        chart.percent()
        # The first tenth of a training run would flatten all that follows.
        later = [y for x, y in self.points() if x > last / 10] or [y for _, y in self.points()]
        margin = 0.06 * (max(later) - min(later)) or 0.01
        chart.axes.set_ylim(min(later) - margin, max(later) + margin)


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
    """All of them that the runs have numbers for."""
    runs = [run for one in groups for run in one.runs]
    found = _one_setting(groups[0]) if len(groups) == 1 else _several_settings(groups)
    single = runs[0] if len(runs) == 1 else None
    return [lines.plot(common_cycles(runs), single) for lines in found if lines.points()]


def _one_setting(group: Group) -> list[Lines]:
    """Training and test in one plot."""

    def line(name: str, colour: Colour, key: str) -> Line:
        return Line(name, colour, [run.curve(key) for run in group.runs])

    rates = Line("", SERIES[0], [run.learning_rates() for run in group.runs])
    loss = [line("training", MUTED, "loss"), line("test (NLL)", SERIES[0], "test_nll")]
    accuracy = [line("training", MUTED, "train_accuracy"), line("test", SERIES[0], "test_accuracy")]
    return [
        Lines("learning-rate", "Learning rate", RATE, [rates], "lr"),
        Lines("loss", "Loss", LOSS, loss, "nll"),
        Lines("accuracy", "Accuracy", MEASURES["accuracy"], accuracy, "accuracy"),
        Lines("sparsity", "Sparsity", MEASURES["sparsity"], _moving([line("", SERIES[0], "sparsity")])),
    ]


def _several_settings(groups: Sequence[Group]) -> list[Lines]:
    """A line for each setting; those beyond the palette are grey and have no name."""

    def lines(curve: Callable[[Run], Curve]) -> list[Line]:
        return [
            Line(one.label if place < len(SERIES) else "", series(place), [curve(run) for run in one.runs])
            for place, one in enumerate(groups)
        ]

    accuracy, sparsity = MEASURES["accuracy"], MEASURES["sparsity"]
    return [
        Lines("learning-rate", "Learning rate", RATE, lines(Run.learning_rates)),
        Lines("loss", "Training loss", LOSS, lines(lambda run: run.curve("loss"))),
        Lines("test-nll", "Test NLL", MEASURES["nll"], lines(lambda run: run.curve("test_nll"))),
        Lines(
            "train-accuracy", "Training accuracy", accuracy, lines(lambda run: run.curve("train_accuracy"))
        ),
        Lines("test-accuracy", "Test accuracy", accuracy, lines(lambda run: run.curve("test_accuracy"))),
        Lines("sparsity", "Sparsity", sparsity, _moving(lines(lambda run: run.curve("sparsity")))),
    ]


def _moving(lines: list[Line]) -> list[Line]:
    """Nothing, if no line moves: a sparsity that stays needs no plot."""
    values = [{round(y, 3) for _, y in curve} for line in lines for curve in line.curves]
    return lines if any(len(each) > 1 for each in values) else []


def _mark_tickets(chart: Chart, run: Run, lines: Lines) -> None:
    """The network before the cycles (hollow), the tickets, and the superposed one (a diamond)."""

    def point(epoch: float, name: str, value: float | None) -> list[Point]:
        return [] if value is None else [(epoch, value, f"{name}\n{lines.measure.show(value)}")]

    if lines.score == "lr":
        for n, epoch in enumerate(run.cycles[1:], 1):
            rate = next((y for x, y in run.learning_rates() if abs(x - epoch) < 1e-6), None)
            chart.points(point(epoch, f"ticket {n}", rate), SERIES[1])
    elif lines.score and run.tickets and run.cycles:
        chart.points(
            point(run.cycles[0], "before the cycles", run.value(lines.score, "start")), SERIES[0], hollow=True
        )
        for n, (epoch, ticket) in enumerate(zip(run.cycles[1:], run.tickets, strict=False), 1):
            chart.points(point(epoch, f"ticket {n}", number(ticket.get(lines.score))), SERIES[0])
        chart.points(point(run.cycles[-1], "superposed", run.value(lines.score)), SERIES[1], marker="D")
