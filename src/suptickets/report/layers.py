"""Plots and the table of the layers: sparsity over time and at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import mean
from typing import TYPE_CHECKING, TypeAlias

from suptickets.report.colours import MUTED
from suptickets.report.document import Cell, Plot, Table
from suptickets.report.looks import MOST, Look, final_colour, first_of, looks
from suptickets.report.measures import MEASURES, number, plain, reading
from suptickets.report.parted import parted
from suptickets.report.runs import Curve, Group, Run, layer_curves, layers

if TYPE_CHECKING:
    from suptickets.report.chart import Chart

Ended: TypeAlias = tuple[Group, Look, dict[str, float]]  # a setting, and its layers' sparsities at the end
SPARSITY = MEASURES["sparsity"]
SHOWN = 3  # settings whose layers are shown over time
SCALE = ("#dde5f3", "#1d4fa8", "#0b2250")  # from sparse to dense; told apart by lightness alone


def layer_plots(groups: Sequence[Group]) -> list[Plot]:
    """Layers over time for a run of each of the first settings, and at the end for all; none if dense."""
    over_time = [(one, layer_curves(one.runs[0])) for one in groups[:SHOWN]]
    sparse = [(one, curves) for one, curves in over_time if any(y for c in curves.values() for _, y in c)]
    return [_over_time(place, *each) for place, each in enumerate(sparse)] + end_plots(groups)


def moving_plots(groups: Sequence[Group]) -> list[Plot]:
    """Layers over time, for the first methods whose layers change: a setting each, rather with a booster."""
    chosen: dict[object, tuple[Group, dict[str, Curve]]] = {}
    for one in sorted(groups, key=lambda one: one.config.get("booster") == "none"):
        curves = layer_curves(one.runs[0])
        if any(map(_moves, curves.values())):
            chosen.setdefault(str(one.config.get("method")), (one, curves))
    return [_over_time(place, *each) for place, each in enumerate([*chosen.values()][:SHOWN])]


def _moves(curve: Curve) -> bool:
    return len({round(sparsity, 3) for _, sparsity in curve}) > 1


def _height(rows: float) -> int:
    return round(85 + 15 * rows)


def _over_time(place: int, one: Group, curves: Mapping[str, Curve]) -> Plot:
    def draw(chart: Chart) -> None:
        chart.rows(list(curves))
        chart.axis_names("", "epoch")
        _heat(chart, one.runs[0], list(curves.values()))
        for y, (name, curve) in enumerate(curves.items()):
            first, last = SPARSITY.show(curve[0][1]), SPARSITY.show(curve[-1][1])
            chart.row(y, 0, curve[-1][0], f"{name}\n{first} after epoch {curve[0][0]:g}, {last} at the end")
            side = {
                "xycoords": chart.axes.get_yaxis_transform(),
                "xytext": (6, 0),
                "textcoords": "offset points",
            }
            chart.word(last, 1, y, MUTED, va="center", **side)

    end = "after the last epoch" if one.runs[0].parts else "at the end"
    text = f"The darker, the denser; at the right the sparsity {end}."
    return Plot(f"layers-{place}", f"Layers over time: {one.label}", draw, text, _height(len(curves)))


def _heat(chart: Chart, run: Run, curves: Sequence[Curve]) -> None:
    """A row for each layer, a column for each epoch."""
    from matplotlib.colors import LinearSegmentedColormap

    epochs = sorted({epoch for curve in curves for epoch, _ in curve})
    density = [[1 - dict(curve).get(epoch, 1.0) for epoch in epochs] for curve in curves]
    chart.axes.grid(visible=False)
    if run.cycles and run.cycles[-1] >= epochs[-1]:
        chart.cycles(run.cycles)
    edges, rows = [0.0, *epochs], [n - 0.5 for n in range(len(curves) + 1)]
    colours = LinearSegmentedColormap.from_list("density", SCALE)
    chart.axes.pcolormesh(edges, rows, density, cmap=colours, rasterized=True)
    chart.epochs(max(epochs[-1], *run.cycles, 0))


def end_plots(groups: Sequence[Group]) -> list[Plot]:
    """Layers at the end: a plot for the first settings that have the same layers; none if these are dense."""
    found = [(one, look, _sparsities(one)) for one, look in zip(groups, looks(groups), strict=True)]
    alike = parted(found, lambda each: tuple(each[2]))
    shown = [same for same in alike.values() if any(any(each.values()) for *_, each in same)]
    plots = [_end(same, alone=len(groups) == 1) for same in shown]
    models = [plain(same[0][0].config.get("model", "")) for same in shown]
    return plots[:1] + [
        replace(plot, name=f"{plot.name}-{place}", title=f"{plot.title}: {model}")
        for place, (plot, model) in enumerate(zip(plots[1:], models[1:], strict=True), 1)
    ]


def _end(same: Sequence[Ended], *, alone: bool) -> Plot:
    """The plot of settings that have the same layers."""
    shown, names = same[:MOST], list(same[0][2])

    def draw(chart: Chart) -> None:
        chart.rows(names)
        chart.axis_names("", "sparsity")
        chart.percent("x")
        chart.axes.locator_params(axis="x", nbins=5)
        if alone:
            return _at_end(chart, "", shown[0][2], Look(final_colour(shown[0][0])))
        for place, (one, look, each) in enumerate(shown, 1):
            _at_end(chart, f"{one.label}: ", each, look, place / (len(shown) + 1) - 0.5)
        looked = [look for _, look, _ in shown]
        labels, colours = [one.label for one, *_ in shown], [look.colour for look in looked]
        chart.key(labels, colours, [look.plain for look in looked])

    rings = "Rings: without a booster." if any(look.plain for _, look, _ in shown) else ""
    text, rows = f"{rings}{first_of(len(same))}".strip(), len(names) * (1 if alone else 1.6)
    return Plot("layers-end", "Layers at the end", draw, text, _height(rows))


def _at_end(chart: Chart, label: str, sparsities: Mapping[str, float], look: Look, aside: float = 0) -> None:
    """Draw the layers of one setting, a little aside in their rows if there are several."""
    tips = [f"{label}{name}\n{SPARSITY.show(value)}" for name, value in sparsities.items()]
    points = [(x, y + aside, tip) for y, (x, tip) in enumerate(zip(sparsities.values(), tips, strict=True))]
    chart.points(points, look.colour, hollow=look.plain, size=5.5 if label else 7)


def _sparsities(one: Group) -> dict[str, float]:
    """The sparsity of each layer of the final network, the mean over the runs."""
    values: dict[str, list[float]] = {}
    for run in one.runs:
        for layer in layers(run):
            values.setdefault(plain(layer.get("name", "")), []).append(reading(layer, "sparsity") or 0.0)
    return {name: mean(sparsities) for name, sparsities in values.items()}


def layer_table(run: Run) -> list[Table]:
    """Every layer of the final network."""
    rows = [
        [
            Cell(plain(layer.get("name", ""))),
            _shape(layer.get("shape")),
            _count(layer.get("size")),
            _count(layer.get("nonzero")),
            SPARSITY.cell(reading(layer, "sparsity")),
        ]
        for layer in layers(run)
    ]
    header = ["Layer", "Shape", "Weights", "Living", SPARSITY.header]
    return [Table("layers", "Every layer", header, rows, folded=True)] if rows else []


def _shape(value: object) -> Cell:
    return Cell(" × ".join(plain(size) for size in value) if isinstance(value, list) else "")


def _count(value: object) -> Cell:
    count = number(value)
    return Cell("" if count is None else f"{count:,.0f}", count)
