"""Plots: names that do not overlap, colours that are told apart, pictures that belong to the page."""

import io
import json
from dataclasses import replace
from itertools import combinations, pairwise
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.colors import to_hex
from report_runs import make_run
from scipy.optimize import minimize

from suptickets.report import read_runs, run_page
from suptickets.report.chart import apart, drawn
from suptickets.report.colours import ALL, MUTED, PAPER, SERIES
from suptickets.report.curves import averaged
from suptickets.report.document import Plot
from suptickets.report.runs import reliability

# ---- names at the ends of lines ----


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.floats(0.01, 0.12))
def test_names_lie_apart_in_order_and_inside(places, gap):
    moved = apart(sorted(places), gap)
    assert all(b - a >= gap - 1e-9 for a, b in pairwise(moved))
    assert min(moved) >= 0
    assert max(moved) <= 1 + 1e-9


@pytest.mark.parametrize("seed", range(8))
def test_names_move_as_little_as_possible(seed):
    """Least squares, as a solver finds it, where no border interferes."""
    rng = np.random.default_rng(seed)
    places, gap = sorted(rng.uniform(0.35, 0.65, 5)), 0.05
    apart_enough = [{"type": "ineq", "fun": lambda x, n=n: x[n + 1] - x[n] - gap} for n in range(4)]
    start = np.linspace(0.2, 0.8, 5)
    best = minimize(lambda x: ((x - places) ** 2).sum(), start, constraints=apart_enough, tol=1e-12)
    assert apart(places, gap) == pytest.approx(best.x, abs=1e-4)


@pytest.mark.parametrize("words", [1, 4, 9])
@pytest.mark.parametrize("count", [1, 5, 20])
def test_names_of_rows_do_not_touch(words, count):
    """Nor does a title leave the plot, however much room they take."""
    names = [", ".join(f"part {n}{word}" for word in range(words)) for n in range(count)]
    title = "Disagreement of the tickets, cifar100 · resnet50, ten seeds"
    plot = Plot("rows", title, lambda chart: chart.rows(names), height=70 + 20 * count)
    with drawn(plot) as chart:
        chart.save(io.BytesIO(), "png", title)
        chart.figure.draw_without_rendering()
        boxes = [name.get_window_extent() for name in chart.axes.get_yticklabels()]
        assert all(a.y0 >= b.y1 for a, b in pairwise(boxes))
        (heading,) = (
            t for t in chart.axes.get_children() if getattr(t, "get_text", str)().startswith("Disag")
        )
        box = heading.get_window_extent()
        assert box.x0 >= 0 and box.x1 <= chart.figure.bbox.width


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("score", [0.02, 0.5, 0.99])
def test_every_mark_lies_within_the_axes(tmp_path, several, score):
    """Also where the last network is far from all that was evaluated on the way."""
    folders = [make_run(tmp_path / f"{n}", seed=n, cycles=2 + n) for n in range(1 + several)]
    summary = json.loads((folders[0] / "summary.json").read_text())
    (folders[0] / "summary.json").write_text(json.dumps({**summary, "accuracy": score}))
    for plot in run_page(read_runs(folders)).plots():
        if plot.name not in ("accuracy", "test-accuracy", "train-accuracy"):
            continue
        with drawn(plot) as chart:
            chart.save(io.BytesIO(), "png", plot.title)
            chart.figure.draw_without_rendering()
            low, high = chart.axes.get_ylim()
            drawn_marks = [m for m in chart.axes.lines if m.get_marker() in "oD" and m not in chart.hidden]
            assert all(low < y < high for mark in drawn_marks for y in mark.get_ydata())
            frame = chart.figure.bbox
            names = [n for n in chart.axes.get_yticklabels() if low <= n.get_position()[1] <= high]
            assert names and all(name.get_window_extent().x0 >= frame.x0 for name in names)
            diamonds = [mark.get_ydata()[0] for mark in drawn_marks if mark.get_marker() == "D"]
            assert "train" in plot.name or score in diamonds


# ---- colours ----

# Machado, Oliveira and Fernandes (2009), severity 1, on linear RGB.
SIGHT = {
    "normal": np.eye(3),
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.01182, 0.04294, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.3039],
    ],
}
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def linear(colour: str) -> np.ndarray:
    parts = np.array([int(colour[n : n + 2], 16) for n in (1, 3, 5)]) / 255
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    ratio = XYZ @ rgb / [0.9505, 1, 1.089]
    f = np.where(ratio > 0.008856, np.cbrt(ratio), 7.787 * ratio + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def luminance(colour: str) -> float:
    return float(XYZ[1] @ linear(colour))


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_series_are_told_apart(theme, sight):
    colours = [getattr(colour, theme) for colour in SERIES]
    seen = [lab(np.clip(SIGHT[sight] @ linear(colour), 0, 1)) for colour in colours]
    assert min(np.linalg.norm(a - b) for a, b in combinations(seen, 2)) > 18


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_series_stand_out_from_the_page(theme):
    page = luminance(getattr(PAPER, theme)) + 0.05
    for colour in SERIES:
        own = luminance(getattr(colour, theme)) + 0.05
        assert max(page / own, own / page) >= 3


def test_no_two_colours_become_one_variable():
    assert len({colour.light for colour in ALL}) == len({colour.name for colour in ALL}) == len(ALL)


# ---- on a page ----


def picture(draw, name: str = "plot") -> ElementTree.Element:
    with drawn(Plot(name, "", draw)) as chart:
        return ElementTree.fromstring(chart.inline(Plot(name, "title", draw)))


def test_points_have_their_own_tooltips():
    points = [(n, n**2, f"<{n}>") for n in range(5)]
    root = picture(lambda chart: chart.points(points, SERIES[0]))
    targets = [element for element in root.iter() if "data-tip" in element.attrib]
    assert [element.get("data-tip") for element in targets] == [f"<{n}>" for n in range(5)]
    x, y = ([float(element.get(key)) for element in targets] for key in ("x", "y"))
    assert x == sorted(x)
    assert y == sorted(y, reverse=True)


@pytest.mark.parametrize("length", [1, 2, 120, 121, 1000])
def test_a_line_has_tooltips_along_it_but_not_too_many(length):
    values = [float(n) for n in range(length)]
    root = picture(lambda chart: chart.line(values, values, SERIES[0], tip=lambda x, y: f"{x:g}"))
    tips = [element.get("data-tip") for element in root.iter() if "data-tip" in element.attrib]
    assert f"{length - 1}" in tips
    assert min(length, 60) <= len(tips) <= 120


def test_colours_are_the_pages_and_text_is_text():
    name = "$x_1$ #1d4fa8 <i>"
    root = picture(lambda chart: chart.line([0, 1], [0, 1], SERIES[0], name=name))
    styles = " ".join(element.get("style", "") for element in root.iter())
    assert "var(--series-0)" in styles
    assert not [colour.light for colour in ALL if colour.light in styles]
    assert "font-family" not in styles
    assert name in [element.text for element in root.iter("text")]
    assert root.get("viewBox")
    assert "width" not in root.attrib


def test_pictures_on_one_page_share_no_identifiers():
    def draw(chart):
        chart.line([0, 1], [0, 1], SERIES[0], tip=lambda x, y: "")

    ids = [[e.get("id") for e in picture(draw, name).iter() if "id" in e.attrib] for name in ("a", "b")]
    assert ids[0]
    assert not set(ids[0]) & set(ids[1])
    used = {e.get(key)[1:] for e in picture(draw, "a").iter() for key in ("href",) if key in e.attrib}
    assert used <= set(ids[0])


def test_the_users_matplotlib_is_left_alone(tmp_path):
    matplotlib.rcParams["text.usetex"] = True  # would need TeX
    matplotlib.rcParams["font.size"] = 31
    try:
        root = picture(lambda chart: chart.axis_names("50 % of $x"))
        assert "31px" not in ElementTree.tostring(root, encoding="unicode")
        assert matplotlib.rcParams["font.size"] == 31
        assert matplotlib.rcParams["text.usetex"]
    finally:
        matplotlib.rcdefaults()


def test_letters_that_the_font_lacks_are_no_trouble(recwarn):
    root = picture(lambda chart: chart.word("漢字 🎫", 0, 0))
    assert "漢字 🎫" in [element.text for element in root.iter("text")]
    assert not recwarn.list


def test_a_file_for_a_paper_has_no_invisible_points(tmp_path):
    def draw(chart):
        chart.line([0, 1, 2], [0, 1, 2], SERIES[0], tip=lambda x, y: "tip")

    with drawn(Plot("plot", "", draw)) as chart:
        chart.save(tmp_path / "plot.svg", "svg", "A & B")
    root = ElementTree.parse(tmp_path / "plot.svg").getroot()
    assert "opacity: 0" not in ElementTree.tostring(root, encoding="unicode")
    assert "tip-0" not in [element.get("id") for element in root.iter()]


@pytest.mark.parametrize("keys", [0, 8])
def test_a_file_says_what_its_marks_mean(tmp_path, keys):
    """Beneath axes of the same size; long texts take several lines, none of which is cut off."""
    sizes, text = [], "Diamond: the final network; dot: the mean of its tickets; " * 3

    def draw(chart):
        chart.line([0, 1], [0, 1], SERIES[0])
        if keys:
            chart.key([f"name {n}" for n in range(keys)], [SERIES[0]] * keys)

    for said in ("", text):
        with drawn(Plot("plot", "", draw)) as chart:
            chart.save(tmp_path / "plot.svg", "svg", "title", said)
            sizes.append(chart.axes.bbox.height)
            frame, words = chart.figure.bbox, [w for w in chart.figure.texts if w.get_text()]
            assert all(frame.contains(*point) for w in words for point in w.get_window_extent().corners())
    assert sizes[1] == pytest.approx(sizes[0], abs=8)
    shown = " ".join(e.text or "" for e in ElementTree.parse(tmp_path / "plot.svg").getroot().iter())
    assert text.strip() in " ".join(shown.split())


@pytest.mark.parametrize("kind", ["svg", "png"])
def test_words_have_a_halo_and_are_text(tmp_path, kind):
    def draw(chart):
        chart.axes.axvline(0.5)
        chart.word("value", 0.5, 0.5)

    with drawn(Plot("plot", "", draw)) as chart:
        chart.save(tmp_path / f"plot.{kind}", kind, "title")
        if kind == "png":
            assert all(word.get_path_effects() for word in chart.axes.texts)
        else:
            root = ElementTree.parse(tmp_path / "plot.svg").getroot()
            below, above = (e.get("style", "") for e in root.iter() if e.text == "value")
            assert "stroke: white" in below and "stroke" not in above  # also without SVG 2's paint-order


@pytest.mark.parametrize("names", [3, 30])
@pytest.mark.parametrize("high", [0.125, 0.00012345, 1.0, 123456.0, 98765432.1])
def test_names_of_ticks_do_not_touch(high, names):
    def draw(chart):
        chart.rows(["a name " * names])
        chart.points([(-high, 0, "")], SERIES[0])
        chart.axes.axvline(0)
        chart.axes.xaxis.set_major_formatter("{x:.9g}")

    plot = Plot("plot", "", draw, height=90)
    with drawn(plot) as chart:
        chart.inline(plot)
        chart.figure.draw_without_rendering()
        low, end = chart.axes.get_xlim()
        shown = [n for n in chart.axes.get_xticklabels() if low <= n.get_position()[0] <= end]
        boxes = [name.get_window_extent() for name in shown]
    assert len(boxes) >= 1
    assert all(b.x0 - a.x1 > 3 for a, b in pairwise(boxes))


# ---- what is drawn ----


def test_the_mean_of_curves_counts_those_that_reach_an_epoch():
    x, y, deviation = averaged([[(1, 1.0), (2, 3.0)], [(1, 3.0)], []])
    assert x == [1, 2]
    assert y == [2.0, 3.0]
    assert deviation == [pytest.approx(2**0.5), 0.0]


def test_reliability_of_several_runs_is_that_of_all_their_predictions(tmp_path):
    runs = read_runs([make_run(tmp_path / str(seed), seed=seed) for seed in (1, 2)])
    pooled = reliability(runs)
    assert len(pooled) == 13  # two bins are empty
    bins = [run.summary["reliability"][-1] for run in runs]
    samples = sum(entry["samples"] for entry in bins)
    right = sum(entry["samples"] * entry["accuracy"] for entry in bins)
    assert pooled[-1][2:] == (samples, pytest.approx(bins[0]["confidence"]), pytest.approx(right / samples))
    assert all(each.low <= each.confidence <= each.high for each in pooled)
    assert [each.low for each in pooled[1:]] == [each.high for each in pooled[:-1]]


@pytest.mark.parametrize(
    "bad", [{"samples": -3}, {"samples": 1e13}, {"accuracy": 1.5}, {"confidence": -1e308}, {"accuracy": None}]
)
def test_bins_that_cannot_be_are_left_out(tmp_path, bad):
    (run,) = read_runs([make_run(tmp_path / "run")])
    bins = list(run.summary["reliability"])
    bins[-1] = bins[-1] | bad
    changed = replace(run, summary={**run.summary, "reliability": bins})
    assert reliability([changed]) == reliability([run])[:-1]


def reliability_bars(run) -> list:
    """The bars of the diagram, and its tooltips."""
    (plot,) = [p for p in run_page([run]).plots() if p.name == "reliability"]
    with drawn(plot) as chart:
        return list(chart.axes.patches), [tips[0] for tips in chart.tips.values()], plot.text


def test_bars_of_reliability_lie_apart_are_paler_with_fewer_samples_and_tell_how_many(tmp_path):
    (run,) = read_runs([make_run(tmp_path / "run")])
    few = [dict(entry) for entry in run.summary["reliability"]]
    few[2]["samples"] = 1
    bars, tips, text = reliability_bars(replace(run, summary={**run.summary, "reliability": few}))
    assert len(bars) == 13
    assert all(a.get_x() + a.get_width() < b.get_x() for a, b in pairwise(bars))
    opacity = [bar.get_alpha() for bar in bars]
    assert opacity == sorted(opacity) and opacity[0] < 0.25 and opacity[-1] == 1
    assert tips[0].startswith("1 prediction\n") and tips[-1].startswith("588 predictions\n")
    assert "Bars: how often" in text and "Paler: fewer" in text


def colours_of(chart, words: str) -> set[str]:
    """Of the points whose tooltip has these words."""
    marked = [gid for gid, tips in chart.tips.items() if any(tip.startswith(words) for tip in tips)]
    found = [line for line in chart.axes.lines if line.get_gid() in marked]
    return {
        (line.get_markeredgecolor(), line.get_markerfacecolor())[line.get_markerfacecolor() != PAPER.light]
        for line in found
    }


def test_tickets_and_the_superposed_one_have_one_colour_in_all_plots_of_a_run(tmp_path):
    (run,) = read_runs([make_run(tmp_path / "run")])
    found = {"before": set(), "ticket": set(), "superposed": set()}
    for plot in run_page([run]).plots():
        with drawn(plot) as chart:
            for words, colours in found.items():
                colours |= colours_of(chart, words)
    assert found == {"before": {MUTED.light}, "ticket": {SERIES[0].light}, "superposed": {SERIES[1].light}}
    bars, *_ = reliability_bars(run)
    assert {to_hex(bar.get_facecolor()) for bar in bars} == {SERIES[1].light}


def test_runs_of_different_models_are_all_there_and_called_the_same(tmp_path):
    models = {"mlp": ("a", "b"), "lenet5": ("c", "d", "e"), "vgg-small": ("a", "b")}
    runs = [
        make_run(tmp_path / name, layers=layers, model=name, epochs=20 + n, cycle_epochs=1)
        for n, (name, layers) in enumerate(models.items())
    ]
    for n, run in enumerate(runs):
        summary = json.loads((run / "summary.json").read_text())
        (run / "summary.json").write_text(json.dumps({**summary, "train_flops_ratio": 0.1 * (n + 1)}))
    plots = {plot.name: plot for plot in run_page(read_runs(runs)).plots()}
    assert plots["layers-end"].title == "Layers at the end"
    assert plots["layers-end-1"].title == "Layers at the end: lenet5"
    words, colours = {}, {}
    for name in ("layers-end", "layers-end-1", "flops-training"):
        with drawn(plots[name]) as chart:
            chart.inline(plots[name])
            texts = [text for legend in chart.figure.legends for text in legend.get_texts()]
            told = [(text.get_text(), to_hex(text.get_color())) for text in (*texts, *chart.axes.texts)]
            words[name] = {text for text, _ in told if text in models}
            colours |= {(name, text): colour for text, colour in told if text in models}
    assert words == {
        "layers-end": {"mlp", "vgg-small"},
        "layers-end-1": {"lenet5"},
        "flops-training": {*models},
    }
    assert all(colours["flops-training", text] == colour for (_, text), colour in colours.items())


@pytest.mark.parametrize("settings", [2, 6, 12])
def test_names_of_settings_do_not_lie_over_the_layers(tmp_path, settings):
    flags = [{"lr": 0.1 + n / 100, "label_smoothing": n / 100} for n in range(settings)]
    runs = read_runs([make_run(tmp_path / str(n), layers=("a", "b"), **f) for n, f in enumerate(flags)])
    (plot,) = [p for p in run_page(runs).plots() if p.name == "layers-end"]
    with drawn(plot) as chart:
        chart.inline(plot)
        (legend,) = chart.figure.legends
        words = legend.get_texts()
        axes = chart.axes.get_tightbbox()
        assert legend.get_window_extent().y0 >= axes.y1 - 1
        assert axes.height > 60
        assert len(words) == min(settings, 6)
        assert MUTED.light not in {to_hex(word.get_color()) for word in words}


def test_the_cycles_get_a_third_of_the_axis_and_the_tickets_their_places(tmp_path):
    (run,) = read_runs([make_run(tmp_path / "run", data="cifar100")])
    assert run.cycles == [226, 234, 242, 250]
    (plot,) = [p for p in run_page([run]).plots() if p.name == "learning-rate"]
    with drawn(plot) as chart:
        chart.figure.savefig(io.BytesIO(), format="svg")
        place = chart.axes.transData + chart.axes.transAxes.inverted()
        shown = [float(place.transform((epoch, 0.01))[0]) for epoch in (0, 113, 226, 250)]
    assert shown == pytest.approx([0, 1 / 3, 2 / 3, 1])
    tickets = [tip for tips in chart.tips.values() for tip in tips if "ticket" in tip]
    assert tickets == [f"ticket {n}\n0.00100" for n in (1, 2, 3)]


def test_learning_rates_within_an_epoch_end_with_it(tmp_path):
    (run,) = read_runs([make_run(tmp_path / "run")])
    rates = run.learning_rates()
    assert len(rates) == 20 * 8
    assert rates[-1] == (20, run.metrics[-1]["lr"])
    assert rates[0][0] == pytest.approx(1 / 8)
    (old,) = read_runs([make_run(tmp_path / "old", old=True)])
    assert old.learning_rates() == old.curve("lr")
