"""The page of an experiment: the paper's numbers beside ours, what wins, the paper's figures."""

import re
from dataclasses import replace
from math import hypot
from pathlib import Path
from statistics import mean, stdev

import pytest
from report_runs import figure_cells, make_cells, make_run
from scipy import stats

from suptickets.report import (
    FIGURES,
    CellResult,
    Ours,
    Paper,
    best_among,
    better_than,
    experiment_page,
    read_runs,
)
from suptickets.report.cells import telling
from suptickets.report.chart import drawn
from suptickets.report.html import html
from suptickets.report.text import latex, markdown

EVIL = "<script>alert(1)</script>"


def cell(
    mean: float | None, paper: float | None = None, variation: str = "", measure: str = "accuracy", **settings
):
    settings = {"data": "cifar10", "model": "vgg16", "method": "rigl", "sparsity": 0.9} | settings
    ours = None if mean is None else Ours(mean, 0.01, 3)
    return CellResult(settings, variation, measure, None if paper is None else Paper(paper, 0.02), ours)


def test_the_difference_is_in_joint_deviations():
    one = CellResult({}, paper=Paper(0.70, 0.003), ours=Ours(0.71, 0.004, 3))
    assert one.difference == pytest.approx(0.01)
    assert one.deviations == pytest.approx(0.01 / hypot(0.003, 0.004)) == pytest.approx(2)


def test_the_p_value_of_the_difference_is_welchs():
    ours, theirs = [0.701, 0.708, 0.712, 0.716], [0.690, 0.694, 0.701]
    paper = Paper(mean(theirs), stdev(theirs), 3)
    one = CellResult({}, paper=paper, ours=Ours(mean(ours), stdev(ours), 4))
    assert one.welch == pytest.approx(stats.ttest_ind(ours, theirs, equal_var=False).pvalue)
    assert replace(one, paper=paper._replace(runs=1)).welch is None  # of one run there is no deviation


@pytest.mark.parametrize(
    ("paper", "ours"),
    [
        (None, Ours(0.7, 0.1, 3)),
        (Paper(0.7, 0.1), None),
        (Paper(0.7), Ours(0.7, 0.1)),
        (Paper(0.7, 0.1), Ours(0.7)),
    ],
)
def test_without_a_deviation_there_is_no_such_difference(paper, ours):
    one = CellResult({}, paper=paper, ours=ours)
    assert one.deviations is None and one.welch is None


def test_two_runs_without_any_deviation_divide_by_nothing():
    assert CellResult({}, paper=Paper(0.7, 0.0), ours=Ours(0.8, 0.0, 3)).deviations is None


# ---- what wins ----


def test_the_best_of_each_setting_wins():
    cells = [
        cell(0.93, booster="none"),
        cell(0.94, booster="sup-tickets"),
        cell(0.95, method="set", booster="none"),
    ]
    marks = best_among("booster").of(cells, "ours")
    assert marks.contenders == {0, 1}  # SET has no rival
    assert marks.winners == {1}


def test_less_is_better_where_it_is():
    cells = [cell(0.3, booster="none", measure="nll"), cell(0.2, booster="sup-tickets", measure="nll")]
    assert best_among("booster").of(cells, "ours").winners == {1}
    cells = [cell(0.3, booster="none", measure="seconds"), cell(0.2, booster="swa", measure="seconds")]
    assert best_among("booster").of(cells, "ours").winners == set()


def test_what_looks_equal_wins_together():
    cells = [cell(0.77581, variation="C=2"), cell(0.77579, variation="C=8"), cell(0.7757, variation="C=12")]
    assert best_among().of(cells, "ours").winners == {0, 1}


def test_means_of_fewer_runs_do_not_compete_and_say_so():
    one_run = replace(cell(0.99, 0.9, booster="swa"), ours=Ours(0.99, None, 1))
    cells = [cell(0.93, 0.95, booster="none"), cell(0.94, 0.92, booster="sup-tickets"), one_run]
    mark = best_among("booster")
    assert not mark.of(cells, "ours").contenders
    assert mark.of(cells, "paper").winners == {0}  # the paper does not tell how many
    (grid, *_) = experiment_page("a", "b", cells, mark=mark).tables()
    assert [row[1].text for row in grid.rows] == ["93.00 ± 1.00", "94.00 ± 1.00", "99.00 (1 run)"]
    assert not any(row[1].strong for row in grid.rows)


def test_tables_without_a_number_of_ours_are_folded_beside_others():
    cells = [cell(0.9, 0.9, model="vgg16"), cell(None, 0.9, model="resnet50")]
    grids = [table for table in experiment_page("a", "b", cells).tables() if table.name.startswith("grid")]
    assert [table.folded for table in grids] == [False, True]
    (alone, *_) = experiment_page("a", "b", cells[1:]).tables()
    assert not alone.folded


def test_boosters_are_counted_where_they_compete_with_others():
    among = [cell(0.9, booster="sup-tickets", variation=name) for name in ("AV", "BU")]
    plain = cell(0.8, booster="none", sparsity=0.5)  # with nobody to compete with
    labels = {number.label for number in experiment_page("a", "b", [*among, plain]).numbers}
    assert "Bold with a booster" not in labels


def test_paper_and_ours_win_each_on_their_own():
    cells = [
        cell(0.93, 0.95, booster="none"),
        cell(0.94, 0.92, booster="sup-tickets"),
        cell(None, 0.99, booster="swa"),
    ]
    mark = best_among("booster")
    assert mark.of(cells, "ours").winners == {1}
    assert mark.of(cells, "paper").winners == {2}


def test_better_than_dense_or_as_good():
    """VGG-16 of the paper's comparison of GraNet + Sup-tickets with dense: a tie is bold there."""
    dense = {"method": "dense", "sparsity": 0.0}
    cells = [
        cell(None, 0.7361, data="cifar100", **dense),
        *(
            cell(None, p, data="cifar100", sparsity=s)
            for p, s in ((0.7361, 0.95), (0.7387, 0.9), (0.7360, 0.8))
        ),
        cell(None, 0.9, data="cifar10"),  # no dense one to compare with
    ]
    marks = better_than(method="dense").of(cells, "paper")
    assert marks.contenders == {1, 2, 3}
    assert marks.winners == {1, 2}


# ---- the page ----


def test_the_page_of_a_table(tmp_path):
    cells = make_cells(0.8)
    runs = read_runs([make_run(tmp_path / "run")])
    page = experiment_page(
        "VGG-16", "Table 1", cells, runs=runs, notes=["a trial"], commands=["suptickets reproduce vgg16"]
    )
    shown = {number.label: number for number in page.numbers}
    done = [c for c in cells if c.ours]
    assert shown["Cells"].text == f"{len(done)} of 36"
    near = sum(abs(c.ours.mean - c.paper.mean) <= hypot(c.ours.sd, c.paper.deviation) for c in done)
    assert shown["Within one deviation"].text == f"{near} of {len(done)}"
    assert shown["Bold with a booster"].note == "(paper: 18 of 18)"
    assert [section.title for section in page.sections][-1] == "How to run this again"
    text = html(page)
    assert text.count("<figure") == len(page.plots())
    names = {plot.name for plot in page.plots()}
    assert {"difference-cifar10-vgg16", "difference-cifar100-vgg16"} <= names
    assert {"learning-rate-digits-vgg-small-90", "layers-0-digits-vgg-small-90"} <= names
    assert [section.folded for section in page.sections if section.title.startswith("Runs: ")] == [True]
    assert "a trial" in text
    assert "suptickets reproduce vgg16" in text


def test_the_grid_has_every_cell_with_the_papers_number_beneath():
    cells = make_cells(0.8)
    grid = experiment_page("VGG-16", "Table 1", cells).tables()[0]
    assert grid.title == "vgg16, Accuracy (%)"
    assert list(grid.header) == [
        "Setting",
        *(f"{d}, {s}\N{NO-BREAK SPACE}%" for d in ("cifar10", "cifar100") for s in (95, 90, 80)),
    ]
    assert [row[0].text for row in grid.rows][:3] == ["SET", "SET + Sup-tickets", "RigL"]
    boxes = [box for row in grid.rows for box in row[1:]]
    assert len(boxes) == 36
    assert sum(box.text == "\N{EN DASH}" for box in boxes) == sum(c.ours is None for c in cells)
    first = cells[0]
    expected = f"{100 * first.paper.mean:.2f} ± {100 * first.paper.deviation:.2f}"
    assert grid.rows[0][1].note.startswith(expected)
    assert sum(box.note_strong for box in boxes) == 18


def test_no_table_for_a_model_without_numbers():
    cells = [cell(0.7, 0.71), cell(None, None, model="resnet50"), cell(None, 0.8, model="wrn28-10")]
    *grids, _ = experiment_page("Some", "Table", cells).tables()
    assert [grid.title.split(",")[0] for grid in grids] == ["vgg16", "wrn28-10"]


def test_a_table_for_each_model_and_nothing_twice():
    cells = [cell(0.9, model=m, variation=f"C={c}") for m in ("vgg16", "resnet50") for c in (2, 4)]
    page = experiment_page("Cycle length", "Table", cells)
    assert [table.title for table in page.tables()[:2]] == ["vgg16, RigL", "resnet50, RigL"]
    assert [row[0].text for row in page.tables()[0].rows] == ["C=2", "C=4"]
    names = [block.name for block in (*page.tables(), *page.plots())]
    assert len(set(names)) == len(names)


def test_a_sparsity_for_each_row_belongs_to_the_row():
    """As in the paper's table of diversity: two columns, whatever the sparsity."""
    levels = {"tree-net": 0.0, "sup-tickets": 0.8}
    cells = [
        cell(0.1, booster=b, sparsity=s, method="dense" if not s else "set", measure=m)
        for b, s in levels.items()
        for m in ("disagreement", "kl")
    ]
    grid = experiment_page("Diversity", "Table 6", cells).tables()[0]
    assert list(grid.header) == ["Setting", "Disagreement", "KL divergence"]
    rows = [row[0].text for row in grid.rows]
    assert rows == ["Dense + TreeNet", "SET + Sup-tickets, 80\N{NO-BREAK SPACE}%"]


def test_a_dense_network_stands_beside_the_sparsities():
    cells = [cell(0.9, method="dense", sparsity=0.0), cell(0.8), cell(0.8, sparsity=0.95)]
    grid = experiment_page("a", "b", cells).tables()[0]
    assert [column.removesuffix("\N{NO-BREAK SPACE}%") for column in grid.header[1:3]] == ["90", "95"]


def test_names_without_what_all_share():
    assert telling([("RigL", "", "C=2"), ("RigL", "", "C=4")]) == (["C=2", "C=4"], "RigL")
    assert telling([("RigL", "a")]) == (["RigL, a"], "")


def test_notes_are_rows_of_their_own_in_text():
    page = experiment_page("VGG-16", "Table 1", make_cells())
    lines = markdown(page).splitlines()
    assert sum(line.startswith("| paper |") for line in lines) == 6
    assert sum(line.startswith("paper &") for line in latex(page).splitlines()) == 6
    assert r"$\sigma$" in latex(page)
    assert r"\textbf{" in latex(page)


def test_text_says_what_the_reader_must_know():
    page = experiment_page("VGG-16", "Table 1", make_cells(), notes=["A trial (100 %).", "Forked."])
    head, *_ = markdown(page).partition("\n## ")
    assert "\n\nA trial (100 %).\n\nForked.\n" in head
    captions = [line for line in latex(page).splitlines() if line.startswith(r"\caption")]
    assert len(captions) == len(page.tables())
    told = [line.endswith(r". A trial (100 \%). Forked.}") for line in captions]
    assert told == [not table.folded for table in page.tables()] and {*told} == {True, False}


def test_how_to_run_an_experiment_again():
    made = {"versions": {"torch": "2.13"}, "hardware": "CPU", "revision": "abc", "command": "first"}
    page = experiment_page(
        "a", "b", make_cells(), commands=["now"], results=[made, {**made, "command": "second"}, made]
    )
    command, by = page.sections[-1].blocks
    assert (command.title, list(command.lines)) == ("Command", ["now"])
    assert by.folded and [[cell.text for cell in row] for row in by.rows] == [
        ["first", "torch 2.13; CPU; revision abc", "2"],
        ["second", "torch 2.13; CPU; revision abc", "1"],
    ]


def test_two_seeds_hardly_tell_a_deviation():
    for runs, unsure in ((1, False), (2, True), (3, False)):
        ours = Ours(0.7, None if runs == 1 else 0.01, runs)
        (seeds,) = [
            n for n in experiment_page("a", "b", [CellResult({}, ours=ours)]).numbers if n.label == "Seeds"
        ]
        assert ("That of two is itself uncertain." in seeds.note) == unsure


@pytest.mark.parametrize("differences", [[0.1], [-0.9, 0.2], [1.0], [-4.2, 0.5], [3.0, -12.0]])
def test_differences_lie_around_zero_with_room_for_dots_and_shade(differences):
    cells = [
        CellResult(
            {"data": f"d{n}"[:1], "method": f"m{n}"},
            paper=Paper(0.5, 0.003),
            ours=Ours(0.5 + 0.005 * d, 0.004, 3),
        )
        for n, d in enumerate(differences)
    ]
    (plot,) = [p for p in experiment_page("a", "b", cells).plots() if p.name.startswith("difference")]
    with drawn(plot) as chart:
        low, high = chart.axes.get_xlim()
    assert low == -high and high > 1.1 * max(1.0, *map(abs, differences))


@pytest.mark.parametrize("sd", [None, 0.0, 0.05])
@pytest.mark.parametrize("mean", [0.0, 0.5, 1.0])
def test_bars_of_equal_height_are_seen_and_deviations_whole(mean, sd):
    rules = [f"rule cima, beta 0.{n}" for n in range(7)]
    cells = [
        CellResult({"data": "cifar100", "sparsity": 0.9}, rule, "accuracy", None, Ours(mean, sd, 3))
        for rule in rules
    ]
    (plot,) = FIGURES["averaging"](cells)
    with drawn(plot) as chart:
        bottom, top = chart.axes.get_ylim()
        bars = [bar.get_height() for bar in chart.axes.patches]
        assert len(bars) == 7 and all(height > 0 for height in bars) or mean == 0
        assert bottom >= 0 and (mean == 0 or bottom < mean - (sd or 0)) and top >= mean + (sd or 0)


def test_one_bar_is_no_figure_and_one_run_has_no_deviation():
    one = cell(0.9, variation="rule cia")
    assert FIGURES["averaging"]([one]) == []
    few = [replace(one, ours=Ours(0.9, None, 1)), replace(one, variation="rule caa", ours=Ours(0.8, 0.01, 3))]
    (plot,) = FIGURES["averaging"](few)
    with drawn(plot) as chart:
        assert len(chart.axes.lines) == 1


@pytest.mark.parametrize("length", [1, 8, 12, 19, 26, 60])
def test_names_of_colours_lie_within_the_plot(length):
    names = [f"{n}" + "m" * (length - 1) for n in range(7)]
    cells = [cell(0.9, variation=name) for name in names]
    (plot,) = FIGURES["averaging"](cells)
    with drawn(plot) as chart:
        chart.figure.draw_without_rendering()
        (legend,) = chart.figure.legends
        assert legend.get_window_extent().width <= chart.figure.bbox.width
        assert len(legend.texts) == 7


@pytest.mark.parametrize("name", FIGURES)
def test_the_papers_figures_in_its_own_form(name):
    cells = figure_cells(name)
    page = experiment_page(name, "Figure", cells, figure=FIGURES[name])
    text = html(page)
    plots = [plot for plot in page.plots() if plot.name.startswith("figure-")]
    assert len(plots) == {"averaging": 1, "ticket-count-fixed": 2, "uncertainty": 2}[name]
    for one in cells:
        assert one.kind.show(one.ours.mean, one.ours.sd) in text  # each has a tooltip
    assert not any("paper" in number.note for number in page.numbers)


def test_the_superposed_ticket_and_its_tickets_are_drawn_on_one_scale():
    plots = FIGURES["ticket-count-fixed"](figure_cells("ticket-count-fixed"))
    limits = []
    for plot in plots:
        with drawn(plot) as chart:
            limits.append(chart.axes.get_ylim())
    assert len(plots) == 2 and limits[0] == limits[1]
    ours = [one.ours for one in figure_cells("ticket-count-fixed")]
    assert limits[0][0] < min(o.mean - o.sd for o in ours) < max(o.mean + o.sd for o in ours) < limits[0][1]


def test_hours_tell_the_hardware():
    made = [{"hardware": "NVIDIA H200"}, {"hardware": "CPU"}, {"hardware": "CPU"}, {}]
    page = experiment_page("a", "b", make_cells(), results=made, seconds=7200.0)
    (time,) = [number for number in page.numbers if number.label == "Time of all runs"]
    assert (time.text, time.note) == ("2.0\N{NO-BREAK SPACE}h", "added up, on NVIDIA H200 and CPU")
    page = experiment_page("a", "b", make_cells(), results=[{"jobs": 3}, {"jobs": 1}], seconds=7200.0)
    assert "added up, up to 3 at a time" in [number.note for number in page.numbers]


def test_a_figure_with_some_cells_missing_has_the_others():
    cells = [
        CellResult(c.settings, c.variation, c.measure) if n % 2 else c
        for n, c in enumerate(figure_cells("averaging"))
    ]
    assert len(experiment_page("a", "b", cells, figure=FIGURES["averaging"]).plots()) == 1
    none = [CellResult(c.settings, c.variation, c.measure) for c in cells]
    for name, figure in FIGURES.items():
        assert experiment_page(name, "b", none, figure=figure).plots() == []
        assert figure([]) == []


def test_the_example_in_the_documents(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parent.parent / "docs" / "report.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(code)
    page = (tmp_path / "vgg16.html").read_text()
    assert "<strong>93.30 ± 0.10</strong>" in page
    assert "93.20 ± 0.20; +0.4\N{NO-BREAK SPACE}σ" in page


def test_names_stay_text():
    cells = [cell(0.9, 0.8, variation=EVIL, booster=b, data=EVIL, **{EVIL: EVIL}) for b in ("none", EVIL)]
    text = html(
        experiment_page(EVIL, EVIL, cells, notes=[EVIL], commands=[EVIL], figure=FIGURES["averaging"])
    )
    assert text.count("<script>") == text.count("</script>") == 1
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text


@pytest.mark.parametrize("ours", [Ours(-1e308), Ours(1.01), Ours(0.0, 1e308, 2), Ours(float("nan"))])
def test_a_result_that_cannot_be_is_missing(ours):
    for name, figure in FIGURES.items():
        first, *cells = figure_cells(name)
        page = experiment_page(
            name, "Figure", [replace(first, measure="accuracy", ours=ours), *cells], figure=figure
        )
        assert page.numbers[0].text == f"{len(cells)} of {len(cells) + 1}"
        assert "<svg" in html(page)
