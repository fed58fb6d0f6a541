"""Plots of results: tickets against the superposed one, cost, calibration, diversity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import mean
from typing import TYPE_CHECKING, Any

from suptickets.measure.predictions import SCORES
from suptickets.report.colours import INK, MUTED, SERIES, Colour
from suptickets.report.document import Plot
from suptickets.report.looks import (
    ENSEMBLE,
    MOST,
    START,
    SUPERPOSED,
    TICKET,
    Look,
    final_colour,
    first_of,
    looks,
)
from suptickets.report.measures import MEASURES, Measure, plain, reading
from suptickets.report.runs import Bin, Group, Run, method_name, parts_name, reliability, runs_name
from suptickets.training.boosters import part_names

if TYPE_CHECKING:
    from suptickets.report.chart import Chart

RELIABILITY = (
    "Bars: how often predictions are right; lines: how sure they are. If these agree, bars end at their "
    "lines. Paler: fewer predictions."
)


def score_rows(run: Run) -> list[tuple[str, Mapping[str, Any], Colour]]:
    """The network before the cycles, every ticket, their result, and their ensemble."""
    rows: list[tuple[str, object, Colour]] = [
        ("before pruning", run.summary.get("before_pruning"), START),
        ("before the cycles", run.summary.get("start"), START),
    ]
    rows += [(f"{run.part} {n}", scores, TICKET) for n, scores in enumerate(run.parts, 1)]
    single = run.summary if run.config.get("booster") != "free-tickets" else None
    final = run.summary.get("superposed") or single  # the summary of an ensemble has the ensemble's scores
    rows += [(_final_name(run), final, SUPERPOSED)]
    rows += [("ensemble of the tickets", run.summary.get("ensemble"), ENSEMBLE)]
    return [(name, scores, colour) for name, scores, colour in rows if isinstance(scores, Mapping) and scores]


def _final_name(run: Run) -> str:
    """The name of the result: heads and members answer together, tickets become one network."""
    if run.tickets:
        return part_names(plain(run.config.get("booster")))[1]
    return f"all {run.part}s together" if run.parts else "final network"


def part_plots(run: Run) -> list[Plot]:
    """Accuracy, NLL and ECE of the tickets (heads, members) and of their result; nothing without."""
    return [_parts(run, key) for key in SCORES if run.parts]


def _parts(run: Run, key: str) -> Plot:
    measure = MEASURES[key]
    found = [(name, reading(scores, key), colour) for name, scores, colour in score_rows(run)]
    rows = [(name, value, colour) for name, value, colour in found if value is not None]

    def draw(chart: Chart) -> None:
        _row_axes(chart, measure, [name for name, *_ in rows])
        own = [value for name, value, _ in rows if name.startswith(f"{run.part} ")]
        if own:
            chart.axes.axvline(mean(own), color=TICKET.light, linestyle=":", linewidth=1.2)
        for y, (name, value, colour) in enumerate(rows):
            tip, marker = f"{name}\n{measure.show(value)}", "D" if colour is SUPERPOSED else "o"
            chart.points([(value, y, tip)], colour, marker=marker, hollow=colour is START, size=8)
            chart.word(measure.bare(value), value, y, xytext=(9, 0), textcoords="offset points", va="center")

    title = f"{measure.label} of the {run.part}s"
    return Plot(f"{run.part}s-{key}", title, draw, height=70 + 27 * len(rows))


def _row_axes(chart: Chart, measure: Measure, names: Sequence[str]) -> None:
    chart.rows(names)
    chart.axis_names("", f"{measure.label}{measure.aim}")
    chart.axes.margins(x=0.12)
    chart.axes.locator_params(axis="x", nbins=4)
    if measure.percent:
        chart.percent("x")
    else:
        chart.axes.xaxis.set_major_formatter("{x:g}")


def setting_plots(groups: Sequence[Group]) -> list[Plot]:
    """Accuracy, NLL and ECE by setting: from the start over the tickets to the final network."""
    return [_settings(groups, key) for key in SCORES if any(one.values(key) for one in groups)]


def _settings(groups: Sequence[Group], key: str) -> Plot:
    found = zip(groups, looks(groups, across=True), strict=True)
    measure, known = MEASURES[key], [(one, look) for one, look in found if one.values(key)]

    def draw(chart: Chart) -> None:
        _row_axes(chart, measure, [one.label for one, _ in known])
        for y, (one, look) in enumerate(known):
            _setting(chart, measure, key, y, one, look.colour)

    spread = "; line: deviation of the seeds" if any(one.deviation(key) for one, _ in known) else ""
    text = f"Diamond: final network{_others([one for one, _ in known])}{spread}."
    return Plot(f"settings-{key}", measure.label, draw, text, height=70 + 26 * len(known))


def _others(groups: Sequence[Group]) -> str:
    """The marks that there are beside the diamond, in words."""
    parts = parts_name(one for one in groups if one.runs[0].parts)
    dot = f"; dot: mean of its {parts}" if parts else ""
    started = any(one.values("accuracy", "start") for one in groups)
    return dot + ("; ring: before the cycles" if started else "")


def _setting(chart: Chart, measure: Measure, key: str, y: int, one: Group, colour: Colour) -> None:
    """Draw the marks of a setting, the large one beneath the small ones, so that all are seen."""
    final, deviation = one.mean(key), one.deviation(key)
    if final is not None:
        chart.spread(final, y, deviation, colour)
        tip = f"{one.label}\n{measure.show(final, deviation)}, {runs_name(len(one.runs))}"
        chart.points([(final, y, tip)], colour, marker="D", size=8)
    for name, value, options in (
        ("before the cycles", one.mean(key, "start"), {"hollow": True}),
        (f"mean of the {one.runs[0].part}s", one.of_parts(key), {"size": 5.0}),
    ):
        if value is not None:
            chart.points([(value, y, f"{one.label}: {name}\n{measure.show(value)}")], colour, **options)


def cost_plots(groups: Sequence[Group]) -> list[Plot]:
    """Accuracy against FLOPs, in training and in use, where these tell the settings apart."""
    costs = [("train_flops_ratio", "training"), ("test_flops_ratio", "inference")]
    known = [(key, what) for key, what in costs if any(one.values(key) for one in groups)]
    return [_cost(groups, key, what) for key, what in known if not _all_one(groups, key)]


def _all_one(groups: Sequence[Group], key: str) -> bool:
    """Whether all settings cost the same, as they do where only the averaging or the cycles differ."""
    if len(groups) == 1:
        return True
    levels = [plain(one.config.get("sparsity")) for one in groups]
    costs = {(level, MEASURES[key].bare(one.mean(key))) for level, one in zip(levels, groups, strict=True)}
    same = len({method_name(one.config) for one in groups}) == 1
    return same and len(costs) == len(set(levels)) < len(groups)


def _cost(groups: Sequence[Group], key: str, what: str) -> Plot:
    accuracy, known = MEASURES["accuracy"], looks(groups, across=True)
    if len({look.family for look in known}) == len(groups):  # none is there twice
        known = looks(groups)
    families = {look.family: look.colour for look in known}
    named = {name: colour for name, colour in families.items() if colour is not MUTED}
    further = len(families) > len(named) + 1  # one grey setting has a name
    names = named if further else families

    def draw(chart: Chart) -> None:
        chart.axis_names("Accuracy", f"FLOPs of {what}, dense = 1")
        chart.percent()
        chart.axes.margins(0.1, 0.15)
        chart.axes.locator_params(axis="x", nbins=5)
        for one, look in zip(groups, known, strict=True):
            x, y = one.mean(key), one.mean("accuracy")
            if x is not None and y is not None:
                tip = f"{one.label}\n{accuracy.show(y, one.deviation('accuracy'))} at {x:.3f}"
                marker = "o" if one.config.get("booster") == "none" else "D"
                chart.points([(x, y, tip)], look.colour, marker=marker)
                name = look.family if len(families) == len(groups) else one.label
                chart.names += [(y, name, look.colour)] if _named(groups, look) else []
        chart.axes.set_xlim(left=0)
        if len(groups) > len(SERIES):
            chart.key(list(names), list(names.values()))

    boosters = {one.config.get("booster") == "none" for one in groups}
    texts = ["Diamond: with a booster; dot: without."] if len(boosters) > 1 else []
    texts += ["Grey: further settings."] if further else []
    return Plot(f"flops-{what}", f"Accuracy against FLOPs of {what}", draw, " ".join(texts))


def _named(groups: Sequence[Group], look: Look) -> bool:
    """Whether a setting is named: there is room for few names, and grey ones have none."""
    return len(groups) <= len(SERIES) and look.colour is not MUTED


def reliability_plots(groups: Sequence[Group]) -> list[Plot]:
    """How often a prediction is right, against how sure it is: a plot for each of the first settings."""
    found = zip(groups, looks(groups), strict=True)
    known = [(one, look, bins) for one, look in found if (bins := reliability(one.runs))]
    if len(groups) == 1:
        return [_reliability("", one, final_colour(one), bins, RELIABILITY) for one, _, bins in known]
    texts = [RELIABILITY + first_of(len(known)), *[RELIABILITY] * MOST]
    return [
        _reliability(f"-{n}", one, look.colour, bins, texts[n])
        for n, (one, look, bins) in enumerate(known[:MOST])
    ]


def _reliability(suffix: str, one: Group, colour: Colour, bins: Sequence[Bin], text: str) -> Plot:
    def draw(chart: Chart) -> None:
        chart.axis_names("Share that is right", "confidence")
        chart.percent()
        chart.percent("x")
        chart.axes.set(xlim=(0, 1), ylim=(0, 1))
        most = max(each.samples for each in bins)
        for each in bins:
            _bin(chart, each, colour, 0.15 + 0.85 * (each.samples / most) ** 0.5)

    title = f"Reliability: {one.label}" if suffix else "Reliability"
    return Plot(f"reliability{suffix}", title, draw, text, height=250)


def _bin(chart: Chart, each: Bin, colour: Colour, alpha: float) -> None:
    """A bar for how often predictions are right, a line for how sure they are."""
    width, percent = each.high - each.low, MEASURES["accuracy"].show
    samples = "1 prediction" if each.samples == 1 else f"{each.samples:,.0f} predictions"
    tip = f"{samples}\n{percent(each.accuracy)} right, {percent(each.confidence)} sure"
    middle, inside = (each.low + each.high) / 2, 0.9 * width
    chart.bar(middle, 0, each.accuracy, inside, colour, tip, alpha)
    ends = [middle - inside / 2, middle + inside / 2]
    chart.axes.plot(ends, [each.confidence] * 2, color=INK.light, alpha=max(alpha, 0.4), zorder=2.7)
    chart.points([(middle, each.confidence, tip)], INK, hidden=True)


def diversity_plots(groups: Sequence[Group]) -> list[Plot]:
    """How different the tickets (heads, members) of a run are, by setting: each run, and the mean."""
    found = zip(groups, looks(groups, across=True), strict=True)
    known = [(one, look) for one, look in found if one.values("disagreement", "diversity")]
    return [_diversity(known, key) for key in ("disagreement", "kl") if known]


def _diversity(known: Sequence[tuple[Group, Look]], key: str) -> Plot:
    """A plot that does not say what is better: more diversity is not better by itself."""
    measure = replace(MEASURES[key], better=0)

    def draw(chart: Chart) -> None:
        _row_axes(chart, measure, [one.label for one, _ in known])
        for y, (one, look) in enumerate(known):
            mean_, deviation = one.mean(key, "diversity"), one.deviation(key, "diversity")
            tip = f"{one.label}\n{measure.show(mean_, deviation)}, {runs_name(len(one.runs))}"
            chart.points([(mean_ or 0.0, y, tip)], look.colour, marker="D", size=8)
            chart.points(_each(one, key, y), look.colour, hollow=True, size=4.5)

    text = "Diamond: the mean; rings: each run." if any(len(one.runs) > 1 for one, _ in known) else ""
    title = f"{measure.label} of the {parts_name(one for one, _ in known)}"
    return Plot(f"diversity-{key}", title, draw, text, height=70 + 26 * len(known))


def _each(one: Group, key: str, y: int) -> list[tuple[float, float, str]]:
    """A point for each run, if there are several; its tooltip tells the accuracy too."""
    accuracy, points = MEASURES["accuracy"], []
    for run in one.runs if len(one.runs) > 1 else ():
        value = run.value(key, "diversity")
        if value is not None:
            told = f"{MEASURES[key].show(value)}, accuracy {accuracy.show(run.value('accuracy'))}"
            points.append((value, float(y), f"{one.label}, seed {run.seed}\n{told}"))
    return points
