"""The paper's figures of results, in its own form: averaging, number of tickets, uncertainty."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from suptickets.report.cells import CellResult
from suptickets.report.colours import INK, SERIES, series
from suptickets.report.document import Plot
from suptickets.report.measures import file_names, number, plain
from suptickets.report.parted import parted
from suptickets.report.runs import SCHEDULES, method_name, setting_name, sparsity_name
from suptickets.schedules import CYCLES, cycles
from suptickets.training.settings import resolve

if TYPE_CHECKING:
    from suptickets.report.chart import Chart

Bars = Mapping[str, Mapping[str, CellResult]]  # by where a group stands, and by what a bar shows


def averaging(cells: Sequence[CellResult]) -> list[Plot]:
    """Accuracy by sparsity, a bar for each rule."""
    return _bars(cells, ("accuracy",), lambda cell: plain(cell.variation))


def uncertainty(cells: Sequence[CellResult]) -> list[Plot]:
    """ECE and NLL by sparsity, with and without Sup-tickets."""
    return _bars(cells, ("ece", "nll"), lambda cell: method_name(cell.settings))


def ticket_count(cells: Sequence[CellResult]) -> list[Plot]:
    """The superposed ticket, and the mean of its tickets, by their number: a line for each sparsity."""
    known = {
        name: [c for c in cells if c.measure == name and c.ours] for name in ("accuracy", "ticket_accuracy")
    }
    ours = [cell.ours for own in known.values() for cell in own if cell.ours]
    lows, highs = ([one.mean + sign * (one.sd or 0) for one in ours] for sign in (-1, 1))
    limits = (min(lows), max(highs)) if ours else (0.0, 1.0)
    return [_lines(name, own, limits) for name, own in known.items() if own]


def schedule(cells: Sequence[CellResult]) -> list[Plot]:
    """The paper's drawing: the learning rate in the cycles, a line for each shape."""
    recipe = resolve({"data": "cifar100"})
    steps = 50  # drawn in an epoch
    length = round(recipe.cycle_epochs * steps)
    shapes = {setting_name("schedule", shape): shape for shape in SCHEDULES}

    def draw(chart: Chart) -> None:
        chart.axis_names("Learning rate", "epochs in the cycles")
        x = [n / steps for n in range(1, recipe.cycles * length + 1)]
        for place, cell in enumerate(cells):
            shape = shapes[cell.variation]
            rate = cycles(shape, length, recipe.lr_low, recipe.lr_high)
            chart.line(x, [rate(n) for n in range(1, len(x) + 1)], series(place), name=cell.variation)
            for n in range(CYCLES[shape].collected_at(length), len(x) + 1, length):
                tip = f"{cell.variation}: a ticket\n{rate(n):g}"
                chart.points([(n / steps, rate(n), tip)], SERIES[2])

    return [Plot("schedule", "Learning rate", draw, "Green: where a ticket is collected.")]


FIGURES: Mapping[str, Callable[[Sequence[CellResult]], list[Plot]]] = {
    "averaging": averaging,
    "ticket-count-fixed": ticket_count,
    "uncertainty": uncertainty,
}


def _bars(
    cells: Sequence[CellResult], measures: Sequence[str], bar: Callable[[CellResult], str]
) -> list[Plot]:
    """One plot for each measure, data set and model that has two bars to compare."""
    plots: dict[tuple[str, str], dict[str, dict[str, CellResult]]] = {}
    for measure in measures:
        for cell in cells:
            if cell.measure == measure and cell.ours is not None:
                groups = plots.setdefault((measure, cell.where()), {})
                groups.setdefault(sparsity_name(cell.settings), {})[bar(cell)] = cell
    plots = {place: groups for place, groups in plots.items() if sum(map(len, groups.values())) > 1}
    names = file_names([f"figure {measure} {where}" for measure, where in plots])
    return [_bar_plot(own, where, bars) for own, ((_, where), bars) in zip(names, plots.items(), strict=True)]


def _bar_plot(name: str, where: str, groups: Bars) -> Plot:
    kinds = list(dict.fromkeys(kind for bars in groups.values() for kind in bars))
    measure = next(cell.kind for bars in groups.values() for cell in bars.values())
    low = _foot(groups) if measure.better > 0 else 0.0

    def draw(chart: Chart) -> None:
        chart.axis_names(measure.label, "sparsity")
        chart.axes.set_xticks(range(len(groups)), list(groups))
        for x, bars in enumerate(groups.values()):
            for kind, cell in bars.items():
                _bar(chart, x, kinds.index(kind), len(kinds), low, kind, cell)
        chart.axes.set_ylim(bottom=low)
        if measure.percent:
            chart.percent()
        chart.key(kinds, [series(place) for place in range(len(kinds))])

    spread = any(cell.ours and cell.ours.sd for bars in groups.values() for cell in bars.values())
    texts = ["Lines: the deviation of the seeds."] * spread + ["The axis does not start at 0."] * bool(low)
    return Plot(name, f"{measure.label}, {where}", draw, " ".join(texts), height=290)


def _foot(groups: Bars) -> float:
    """Where bars begin: below the lowest deviation, so that each is seen even if all are equal."""
    ours = [cell.ours for bars in groups.values() for cell in bars.values() if cell.ours]
    lows, highs = ([one.mean + sign * (one.sd or 0) for one in ours] for sign in (-1, 1))
    spread = max(highs) - min(lows) or 0.1 * max(highs) or 1.0
    return max(min(lows) - 0.4 * spread, 0.0)


def _bar(chart: Chart, x: int, place: int, count: int, low: float, kind: str, cell: CellResult) -> None:
    assert cell.ours is not None
    width, mean = 0.8 / count, cell.ours.mean
    middle = x + width * (place - (count - 1) / 2)
    tip = f"{kind}, {sparsity_name(cell.settings)}\n{cell.kind.show(mean, cell.ours.sd)}"
    chart.bar(middle, low, mean, width * 0.88, series(place), tip)
    chart.spread(middle, mean, cell.ours.sd, INK, upright=True)


def _lines(measure: str, cells: Sequence[CellResult], limits: tuple[float, float]) -> Plot:
    """A plot within `limits`, the same for both, so that the superposed ticket compares with its tickets."""
    margin = 0.08 * (limits[1] - limits[0]) or 0.01
    lines = parted(cells, lambda cell: sparsity_name(cell.settings))

    def draw(chart: Chart) -> None:
        chart.axis_names(cells[0].kind.label, "number of tickets")
        chart.percent()
        chart.axes.set_xticks(sorted(set(map(_tickets, cells))))
        chart.axes.set_ylim(limits[0] - margin, limits[1] + margin)
        for place, (name, line) in enumerate(lines.items()):
            aside = 0.07 * (place - (len(lines) - 1) / 2)
            _line(chart, place, name, aside, sorted(line, key=_tickets))

    title = "Accuracy of the superposed ticket" if measure == "accuracy" else cells[0].kind.label
    return Plot(f"figure-{measure.replace('_', '-')}", title, draw)


def _line(chart: Chart, place: int, name: str, aside: float, line: Sequence[CellResult]) -> None:
    """Draw a line, moved aside a little, so that the deviations of several lines are seen."""
    known = [(_tickets(cell), cell.ours, cell.kind) for cell in line if cell.ours]
    chart.line([x + aside for x, *_ in known], [ours.mean for _, ours, _ in known], series(place), name=name)
    for x, ours, kind in known:
        tip = f"{name}, {x:g} tickets\n{kind.show(ours.mean, ours.sd)}"
        chart.spread(x + aside, ours.mean, ours.sd, series(place), upright=True)
        chart.points([(x + aside, ours.mean, tip)], series(place))


def _tickets(cell: CellResult) -> float:
    """The number of tickets: a setting, or a part of the variation's name."""
    count = number(cell.settings.get("cycles"))
    found = re.search(r"\d+", cell.variation)
    return count if count is not None else float(found[0]) if found else 0.0
