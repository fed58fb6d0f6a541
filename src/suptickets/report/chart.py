"""The one renderer of all plots: matplotlib, with a small vocabulary on top.

As a file (PNG, SVG) a chart is what matplotlib writes. On a page it is an inline SVG: text is text, colours
follow the page, points carry tooltips.
"""

from __future__ import annotations

import io
import re
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import compress, pairwise
from os.path import commonprefix
from pathlib import Path
from typing import Any, TypeAlias

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.ticker import LogLocator, MaxNLocator

from suptickets.report.colours import FAINT, INK, MUTED, PAPER, SHADE, Colour
from suptickets.report.document import Plot
from suptickets.report.runs import narrow
from suptickets.report.svg import inline

WIDTH = 380  # pixels, as wide as a phone: a page shows plots side by side, not larger
DOTS = 300  # per inch, in a PNG
TIPS = 120  # at most so many points of a line have a tooltip
DASHES = (0, (3, 1.6))
GAP = 14  # pixels between two names of lines
AROUND = 70  # pixels of a plot of rows that the rows do not take
CAPTION, LINE = 68, 14  # letters in a line beneath a plot, and its height in pixels
HALO = 3  # pixels around words, so that no line crosses them; on a page, its style sets it
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "suptickets",
    "text.parse_math": False,
    "font.size": 11.5,
    "text.color": INK.light,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "axes.edgecolor": FAINT.light,
    "axes.labelcolor": MUTED.light,
    "axes.titlecolor": MUTED.light,
    "axes.titlesize": 11.5,
    "axes.titlelocation": "left",
    "axes.titlepad": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": FAINT.light,
    "xtick.color": FAINT.light,
    "ytick.color": FAINT.light,
    "xtick.labelcolor": MUTED.light,
    "ytick.labelcolor": MUTED.light,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
    "lines.linewidth": 1.8,
}

Point: TypeAlias = tuple[float, float, str]


class Chart:
    """One plot: axes, and what the pointer finds in them."""

    def __init__(self, height: int) -> None:
        """Empty axes; sizes are pixels of a page."""
        self.height = height
        self.figure = Figure(figsize=(WIDTH / 72, height / 72))
        self.axes: Axes = self.figure.subplots()
        self.tips: dict[str, Sequence[str]] = {}
        self.names: list[tuple[float, str, Colour]] = []
        self.hidden: list[Line2D] = []
        self.marked: list[float] = []  # how high the points are that are not hidden
        self.crowned = False  # whether numbers stand above the axes

    # ---- what is drawn ----

    def line(
        self,
        x: Sequence[float],
        y: Sequence[float],
        colour: Colour,
        *,
        name: str = "",
        tip: Callable[[float, float], str] | None = None,
        deviation: Sequence[float] = (),
        dashed: bool = False,
        tips: int = TIPS,
    ) -> None:
        """A line, named at its end, with a band of one deviation, and at most so many tooltips along it.

        Grey ones lie beneath the others.
        """
        level = 2.4 if colour is MUTED else 2.5
        self.axes.plot(x, y, color=colour.light, linestyle=DASHES if dashed else "-", zorder=level)
        if any(deviation):
            low, high = (np.add(y, np.multiply(sign, deviation)) for sign in (-1, 1))
            self.axes.fill_between(x, low, high, color=colour.light, alpha=0.15, linewidth=0)
        if tip is not None:
            every = range(len(x) - 1, -1, -max(1, -(-len(x) // min(tips, TIPS))))
            self.points([(x[n], y[n], tip(x[n], y[n])) for n in every], colour, hidden=True)
        if name:
            self.names.append((y[-1], name, colour))

    def points(
        self,
        points: Sequence[Point],
        colour: Colour,
        *,
        marker: str = "o",
        size: float = 7,
        hollow: bool = False,
        hidden: bool = False,
    ) -> None:
        """Points with tooltips; hidden ones show when the pointer is near."""
        x, y, tips = zip(*points, strict=True) if points else ((), (), ())
        edge, face = (colour, PAPER) if hollow else (PAPER, colour)
        (drawn,) = self.axes.plot(x, y, marker, markersize=size, clip_on=hidden, zorder=3)
        drawn.set(markerfacecolor=face.light, markeredgecolor=edge.light, alpha=0 if hidden else 1)
        drawn.set_gid(self._tip(tips))
        if hidden:
            self.hidden.append(drawn)
        else:
            self.marked += y

    def spread(
        self, x: float, y: float, deviation: float | None, colour: Colour, *, upright: bool = False
    ) -> None:
        """One deviation to either side, if there is one."""
        if not deviation:
            return
        across, along = (0, deviation) if upright else (deviation, 0)
        ends = [x - across, x + across], [y - along, y + along]
        self.axes.plot(*ends, color=colour.light, linewidth=1.2, alpha=0.6)

    def bar(
        self, x: float, low: float, high: float, width: float, colour: Colour, tip: str, alpha: float = 1
    ) -> None:
        """An upright bar, with its middle at `x`."""
        (drawn,) = self.axes.bar(x, high - low, width, low, color=colour.light, alpha=alpha, linewidth=0)
        drawn.set_gid(self._tip([tip]))

    def row(self, y: float, left: float, right: float, tip: str) -> None:
        """An invisible row, one high, that has a tooltip."""
        (drawn,) = self.axes.barh(y, right - left, 1, left, color=INK.light, alpha=0)
        drawn.set_gid(self._tip([tip]))

    def word(self, text: str, x: float, y: float, colour: Colour = MUTED, **place: Any) -> None:
        """Words; `place` as for matplotlib's `annotate`."""
        self.axes.annotate(text, (x, y), color=colour.light, **({"fontsize": 10.5} | place))

    def key(self, names: Sequence[str], colours: Sequence[Colour], hollow: Sequence[bool] = ()) -> None:
        """Names of colours, above the axes, in as many columns as there is room for; the plot grows by them.

        For plots in which nothing ends where a name could stand.
        """
        marks = [Line2D([], [], marker="o", linestyle="", color=colour.light) for colour in colours]
        for mark in compress(marks, hollow):
            mark.set_markerfacecolor(PAPER.light)
        shown = [name.lstrip("_") for name in told_apart(names)]  # matplotlib leaves such names out
        look: dict[str, Any] = {
            "frameon": False,
            "handlelength": 0.6,
            "labelcolor": [c.light for c in colours],
        }
        for columns in range(3 if len(names) > 4 else 2, 0, -1):
            legend = self.figure.legend(marks, shown, loc="outside upper left", ncols=columns, **look)
            extent = legend.get_window_extent()
            if columns == 1 or extent.width <= 0.96 * self.figure.bbox.width:
                break
            legend.remove()
        self.figure.set_figheight(self.height / 72 + extent.height / self.figure.dpi)

    def cycles(self, borders: Sequence[float], *, stretch: bool = True) -> None:
        """The phase of the cycles, shaded, with the number of each ticket above the end of its cycle.

        The cycles are a tenth of a run and all that matters: the axis gives them a third.
        """
        self.crowned, start, end = True, borders[0], borders[-1]
        if stretch and narrow(borders):
            self.axes.set_xscale("function", functions=_stretched(start, end))
            self.axes.set_xticks([0, start / 2, start, end])
            self.axes.xaxis.set_major_formatter("{x:g}")
        self.axes.axvspan(start, end, color=SHADE.light, zorder=0, linewidth=0)
        for place, border in enumerate(borders[1:], 1):
            self.axes.axvline(border, color=FAINT.light, linewidth=1, zorder=1)
            above = self.axes.get_xaxis_transform()
            self.word(str(place), border, 1.01, xycoords=above, ha="center", va="bottom")

    # ---- axes ----

    def axis_names(self, y: str = "", x: str = "") -> None:
        """Name the axes; the vertical one has its name above it, where it need not be turned."""
        self.axes.set_title(y)
        self.axes.set_xlabel(x, loc="right")

    def epochs(self, last: float, first: float = 0) -> None:
        """Let the horizontal axis show epochs, by default from the start."""
        self.axes.set_xlim(first, last)
        if self.axes.get_xscale() == "linear":
            self.axes.locator_params(axis="x", integer=True, nbins=5)

    def percent(self, axis: str = "y") -> None:
        """Show fractions as percentages; ticks beyond 0 and 100 %, which a margin brings, have no name."""

        def name(value: float, _: object) -> str:
            return f"{round(value * 100, 6):g} %" if -1e-9 <= value <= 1 + 1e-9 else ""

        which = self.axes.yaxis if axis == "y" else self.axes.xaxis
        which.set_major_formatter(name)

    def logarithmic(self) -> None:
        """Make the vertical axis logarithmic, with plain numbers."""
        self.axes.set_yscale("log")
        self.axes.yaxis.set_major_formatter("{x:g}")
        self.axes.yaxis.set_minor_formatter("")

    def rows(self, names: Sequence[str]) -> None:
        """Name rows at the left, from the top down; the grid turns, and the plot grows with long names."""
        shown = told_apart(names)
        lines = max((1 + name.count("\n") for name in shown), default=1)
        self.height = max(self.height, AROUND + len(names) * (GAP * lines + 4))
        self.figure.set_figheight(self.height / 72)
        self.axes.set_yticks(range(len(names)), shown)
        self.axes.set_ylim(len(names) - 0.5, -0.5)
        self.axes.tick_params(axis="y", labelcolor=INK.light)
        self.axes.grid(visible=False, axis="y")
        self.axes.grid(visible=True, axis="x")

    # ---- what comes of it ----

    def finish(self) -> None:
        """Name the lines at their ends, pushed apart where the names would overlap."""
        scale, limits = self.axes.yaxis.get_transform().transform, self.axes.get_ylim()
        if self.axes.get_yscale() == "log" and limits[1] < 100 * limits[0]:
            self.axes.yaxis.set_major_locator(LogLocator(subs=[1, 2, 5]))
        bottom, top = scale(np.array(limits))
        ends = sorted(((scale(np.array([y]))[0] - bottom) / (top - bottom), n, c) for y, n, c in self.names)
        shown = told_apart([name for _, name, _ in ends], 18)
        gap = GAP * max((1 + name.count("\n") for name in shown), default=1) / (0.78 * self.height)
        places = apart([float(y) for y, *_ in ends], gap)
        for y, name, (*_, colour) in zip(places, shown, ends, strict=True):
            aside = {"xycoords": "axes fraction", "xytext": (7, 0), "textcoords": "offset points"}
            self.word(name, 1, y, colour, va="center", fontsize=11.5, **aside)

    def save(self, path: Path, kind: str, title: str, text: str = "") -> None:
        """Write a file for a paper, with a title and what its marks mean; always with the same bytes."""
        for points in self.hidden:
            points.set_visible(False)
        if text:
            self._caption(text)
        heading = self.axes.set_title(shortened(title, 50), pad=20 if self.crowned else None)
        self._lay_out()
        beyond = heading.get_window_extent().x1 - 0.98 * self.figure.bbox.width
        heading.set_x(-max(0.0, beyond) / self.axes.bbox.width)  # over the names of rows, if it is long
        if kind == "svg":
            return self._save_svg(path, title)
        for word in self.axes.texts:
            word.set_path_effects([withStroke(linewidth=HALO, foreground="white")])
        self.figure.savefig(path, format=kind, dpi=DOTS, facecolor="white", metadata={"Title": title})

    def _caption(self, text: str) -> None:
        """Write a text beneath the axes, which keep their size."""
        lines = textwrap.wrap(text, CAPTION)
        self.figure.set_figheight(self.figure.get_figheight() + LINE * len(lines) / 72)
        self.figure.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize=10, color=MUTED.light)

    def _save_svg(self, path: Path, title: str) -> None:
        """Write an SVG in which words are text, on a halo: a copy below them, which all programs can draw."""
        for number, word in enumerate(self.axes.texts):
            word.set_gid(f"word-{number}")
        text, halo = io.StringIO(), f'<text aria-hidden="true" style="stroke: white; stroke-width: {HALO}px; '
        self.figure.savefig(text, format="svg", facecolor="white", metadata={"Title": title, "Date": None})
        words = re.compile(r'(?<=<g id="word-)(\d+">)(.*?)(?=</g>)', re.DOTALL)
        copied = words.sub(lambda g: g[1] + g[2].replace('<text style="', halo) + g[2], text.getvalue())
        path.write_text(copied, encoding="utf-8")

    def inline(self, plot: Plot) -> str:
        """The plot as a part of a page, which need not say twice what is shown."""
        if plot.title.startswith(self.axes.get_title("left")):
            self.axes.set_title("")
        self._lay_out()
        text = io.StringIO()
        self.figure.savefig(text, format="svg", dpi=144)
        return inline(text.getvalue(), plot.name, self.tips)

    def _lay_out(self) -> None:
        """Lay out once (a figure's own layout would draw it twice), then drop ticks until no names touch."""
        ConstrainedLayoutEngine().execute(self.figure)
        for most in range(8, 0, -1):
            if not isinstance(self.axes.xaxis.get_major_locator(), MaxNLocator) or not self._crowded():
                break
            self.axes.locator_params(axis="x", nbins=most)

    def _crowded(self) -> bool:
        """Whether names of the horizontal axis touch, or nearly."""
        low, high = sorted(self.axes.get_xlim())
        names = [
            n for n in self.axes.get_xticklabels() if n.get_text() and low <= n.get_position()[0] <= high
        ]
        boxes = [name.get_window_extent() for name in names]
        return any(b.x0 - a.x1 < 0.5 * a.height for a, b in pairwise(boxes))

    def _tip(self, tips: Sequence[str]) -> str:
        name = f"tip-{len(self.tips)}"
        self.tips[name] = tips
        return name


@contextmanager
def drawn(plot: Plot) -> Iterator[Chart]:
    """The plot, in our style alone, whatever the user's matplotlib looks like.

    Warnings, as of letters that the font lacks, are suppressed.
    """
    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        chart = Chart(plot.height)
        plot.draw(chart)
        chart.finish()
        yield chart


def shortened(text: str, width: int = 26) -> str:
    """A name in at most two lines."""
    return "\n".join(textwrap.wrap(text, width, max_lines=2, placeholder=" …", break_on_hyphens=False))


def told_apart(names: Sequence[str], width: int = 26) -> list[str]:
    """All names shortened; those that would look the same lose the words that they all begin with."""
    alike: dict[str, set[str]] = {}
    for name in names:
        alike.setdefault(shortened(name, width), set()).add(name)
    shown: dict[str, str] = {}
    for short, own in alike.items():
        lead = "".join(commonprefix([*own]).rpartition(", ")[:2]) if len(own) > 1 else ""
        shown |= {n: shortened(f"… {n.removeprefix(lead)}", width) if lead else short for n in own}
    return [shown[name] for name in names]


def apart(places: Sequence[float], gap: float) -> list[float]:
    """Rising places between 0 and 1, moved no more than is needed to lie `gap` apart.

    Neighbours that are too close make a cluster around the mean of where its members wanted to be.
    """
    clusters: list[tuple[float, int]] = []  # the lowest place of each, and its members
    for place in places:
        low, count = place, 1
        while clusters and clusters[-1][0] + gap * clusters[-1][1] > low:
            other, members = clusters.pop()
            low = (other * members + (low - gap * members) * count) / (members + count)
            count += members
        clusters.append((low, count))
    spread = [low + gap * n for low, count in clusters for n in range(count)]
    below = [min(place, 1 - gap * n) for n, place in enumerate(reversed(spread))][::-1]
    return [max(place, gap * n) for n, place in enumerate(below)]


def _stretched(start: float, end: float) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """An axis of two straight pieces, and its inverse: two thirds until `start`, one third from there on."""
    return (
        lambda x: np.where(x < start, 2 * x / start, 2 + (x - start) / (end - start)),
        lambda share: np.where(share < 2, share * start / 2, start + (share - 2) * (end - start)),
    )
