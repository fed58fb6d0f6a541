"""Plots of results: tickets against the superposed one, cost, calibration, diversity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import TYPE_CHECKING, Any

from suptickets.report.colours import MUTED, SERIES, Colour, series
from suptickets.report.document import Plot
from suptickets.report.measures import MEASURES, Measure, number
from suptickets.report.runs import Group, Run, reliability

if TYPE_CHECKING:
    from suptickets.report.chart import Chart

SCORES = ("accuracy", "nll", "ece")


def score_rows(run: Run) -> list[tuple[str, Mapping[str, Any], Colour]]:
    """The network before the cycles, every ticket, what came of them, and their ensemble."""
    rows: list[tuple[str, object, Colour]] = [("before the cycles", run.summary.get("start"), MUTED)]
    rows += [(f"ticket {n}", ticket, SERIES[0]) for n, ticket in enumerate(run.tickets, 1)]
    single = run.summary if run.config.get("booster") != "free-tickets" else None
    final = run.summary.get("superposed") or single  # the summary of an ensemble has the ensemble's scores
    rows += [("superposed" if run.tickets else "final network", final, SERIES[1])]
    rows += [("ensemble of the tickets", run.summary.get("ensemble"), SERIES[2])]
    return [(name, scores, colour) for name, scores, colour in rows if isinstance(scores, Mapping) and scores]


def ticket_plots(run: Run) -> list[Plot]:
    """Accuracy, NLL and ECE of the tickets and of what came of them; nothing without tickets."""
    return [_tickets(run, key) for key in SCORES if run.tickets]


def _tickets(run: Run, key: str) -> Plot:
    measure = MEASURES[key]
    found = [(name, number(scores.get(key)), colour) for name, scores, colour in score_rows(run)]
    rows = [(name, value, colour) for name, value, colour in found if value is not None]

    def draw(chart: Chart) -> None:
        _row_axes(chart, measure, [name for name, *_ in rows])
        own = [value for name, value, _ in rows if name.startswith("ticket")]
        if own:
            chart.axes.axvline(mean(own), color=SERIES[0].light, linestyle=":", linewidth=1.2)
        for y, (name, value, colour) in enumerate(rows):
            chart.points([(value, y, f"{name}\n{measure.show(value)}")], colour, size=9)
            chart.word(measure.bare(value), value, y, xytext=(9, 0), textcoords="offset points", va="center")

    title = f"{measure.label} of the tickets"
    return Plot(f"tickets-{key}", title, draw, _direction(measure), height=70 + 27 * len(rows))


def _direction(measure: Measure) -> str:
    return {1: "More is better.", -1: "Less is better."}.get(measure.better, "")


def _row_axes(chart: Chart, measure: Measure, names: Sequence[str]) -> None:
    chart.rows(names)
    chart.axis_names("", measure.label)
    chart.axes.margins(x=0.12)
    chart.axes.locator_params(axis="x", nbins=4)
    if measure.percent:
        chart.percent("x")


def setting_plots(groups: Sequence[Group]) -> list[Plot]:
    """Accuracy, NLL and ECE by setting: from the start over the tickets to the final network."""
    return [_settings(groups, key) for key in SCORES if any(one.values(key) for one in groups)]


def _settings(groups: Sequence[Group], key: str) -> Plot:
    measure = MEASURES[key]

    def draw(chart: Chart) -> None:
        _row_axes(chart, measure, [one.label for one in groups])
        for y, one in enumerate(groups):
            _setting(chart, measure, key, y, one)

    text = f"Diamond: final network; dot: mean of its tickets; ring: before the cycles. {_direction(measure)}"
    return Plot(f"settings-{key}", measure.label, draw, text, height=70 + 30 * len(groups))


def _setting(chart: Chart, measure: Measure, key: str, y: int, one: Group) -> None:
    colour, final, deviation = series(y), one.mean(key), one.deviation(key)
    for name, value, options in (
        ("before the cycles", one.mean(key, "start"), {"hollow": True}),
        ("mean of the tickets", one.of_tickets(key), {"size": 5.0}),
    ):
        if value is not None:
            chart.points([(value, y, f"{one.label}: {name}\n{measure.show(value)}")], colour, **options)
    if final is not None:
        chart.spread(final, y, deviation, colour)
        tip = f"{one.label}\n{measure.show(final, deviation)}, {_runs(one)}"
        chart.points([(final, y, tip)], colour, marker="D", size=8)


def _runs(one: Group) -> str:
    return "1 run" if len(one.runs) == 1 else f"{len(one.runs)} runs"


def cost_plots(groups: Sequence[Group]) -> list[Plot]:
    """Accuracy against FLOPs, in training and in use."""
    costs = [("train_flops_ratio", "training"), ("test_flops_ratio", "inference")]
    several = len(groups) > 1
    return [_cost(groups, *cost) for cost in costs if several and any(one.values(cost[0]) for one in groups)]


def _cost(groups: Sequence[Group], key: str, what: str) -> Plot:
    accuracy = MEASURES["accuracy"]

    def draw(chart: Chart) -> None:
        chart.axis_names("Accuracy", f"FLOPs of {what}, dense = 1")
        chart.percent()
        chart.axes.margins(0.1, 0.15)
        for place, one in enumerate(groups):
            x, y = one.mean(key), one.mean("accuracy")
            if x is not None and y is not None:
                tip = f"{one.label}\n{accuracy.show(y, one.deviation('accuracy'))} at {x:.3f}"
                chart.points([(x, y, tip)], series(place), size=9)
                chart.names += [(y, one.label, series(place))] if place < len(SERIES) else []
        chart.axes.set_xlim(left=0)

    return Plot(f"flops-{what}", f"Accuracy against FLOPs of {what}", draw)


def reliability_plots(groups: Sequence[Group]) -> list[Plot]:
    """How often a prediction is right, against how sure it is: bars for one setting, lines for several."""
    bins = [(one, reliability(one.runs)) for one in groups]
    known = [(place, one, found) for place, (one, found) in enumerate(bins) if found]
    if not known:
        return []

    def draw(chart: Chart) -> None:
        chart.axis_names("Accuracy", "confidence")
        chart.percent()
        chart.percent("x")
        chart.axes.set(xlim=(0, 1), ylim=(0, 1))
        chart.axes.plot([0, 1], [0, 1], color=MUTED.light, linestyle=":", linewidth=1.2, zorder=2.6)
        for place, one, found in known:
            (_bars if len(groups) == 1 else _line)(chart, place, one, found)

    text = "On the dotted line, predictions are right as often as they say."
    text += "" if len(groups) == 1 else " Larger: more of the test data."
    return [Plot("reliability", "Reliability", draw, text, height=300)]


def _tip(label: str, samples: float, confidence: float, right: float) -> str:
    percent = MEASURES["accuracy"].show
    return f"{label}: {samples:g} samples\n{percent(right)} right, {percent(confidence)} sure"


def _bars(chart: Chart, _: int, one: Group, bins: Sequence[tuple[float, float, float]]) -> None:
    for samples, confidence, right in bins:
        low, high = sorted((confidence, right))
        chart.bar(confidence, 0, right, 0.05, SERIES[0], _tip(one.label, samples, confidence, right), 0.75)
        chart.bar(confidence, low, high, 0.05, SERIES[1], _tip("gap", samples, confidence, right), 0.35)


def _line(chart: Chart, place: int, one: Group, bins: Sequence[tuple[float, float, float]]) -> None:
    total, colour = sum(samples for samples, *_ in bins), series(place)
    chart.axes.plot([c for _, c, _ in bins], [r for *_, r in bins], color=colour.light, linewidth=1.2)
    for samples, confidence, right in bins:
        size = 4 + 8 * (samples / total) ** 0.5
        chart.points([(confidence, right, _tip(one.label, samples, confidence, right))], colour, size=size)
    chart.names += [(bins[-1][2], one.label, colour)] if place < len(SERIES) else []


def diversity_plots(groups: Sequence[Group]) -> list[Plot]:
    """How different the tickets of a run are, by setting."""
    known = [one for one in groups if one.values("disagreement", "diversity")]
    return [_diversity(groups, known, key) for key in ("disagreement", "kl") if len(known) > 1]


def _diversity(groups: Sequence[Group], known: Sequence[Group], key: str) -> Plot:
    measure = MEASURES[key]

    def draw(chart: Chart) -> None:
        _row_axes(chart, measure, [one.label for one in known])
        for y, one in enumerate(known):
            value, deviation = one.mean(key, "diversity"), one.deviation(key, "diversity")
            if value is not None:
                colour = series(list(groups).index(one))
                chart.spread(value, y, deviation, colour)
                chart.points([(value, y, f"{one.label}\n{measure.show(value, deviation)}")], colour, size=8)

    return Plot(f"diversity-{key}", f"{measure.label} of the tickets", draw, height=70 + 30 * len(known))
