"""What pages of a store say: the same names everywhere, costs that tell something, what is not known yet."""

import re
from pathlib import Path

import pytest
from report_store import make_store

from suptickets.errors import SparsityError
from suptickets.experiments import EXPERIMENTS
from suptickets.experiments.plan import Mode
from suptickets.experiments.results import FEW, page, write_pages
from suptickets.experiments.store import Store
from suptickets.report.chart import drawn, shortened

RIGL = "data=cifar10,method=rigl,sparsity=0.9"


def pages(where: Path, name: str, mode: Mode | None = None):
    return page(name, Store(where).read(), mode or Mode(), where)


def names(one) -> set[str]:
    return {plot.name for plot in one.plots()}


@pytest.mark.parametrize(
    ("name", "cells"), [("cycle-length", "model=vgg16"), ("ticket-count-extended", "model=vgg16")]
)
def test_a_cell_has_the_same_name_in_every_plot_and_table(tmp_path, name, cells):
    make_store(tmp_path, name, cells=cells, seeds=(1,))
    one = pages(tmp_path, name)
    grid, *_ = one.tables()
    called = [row[0].text for row in grid.rows]
    assert {"C = 2, 12 tickets", "3 tickets, 250 epochs"} & {*called}
    (table,) = [t for t in one.tables() if t.name == "settings"]
    assert {row[0].text for row in table.rows} == {f"{n}\xa0%, {c}" for n in (95, 90, 80) for c in called[:4]}
    (plot,) = [p for p in one.plots() if p.name == "settings-accuracy-cifar100-vgg16"]
    with drawn(plot) as chart:
        rows = {label.get_text().replace("\n", " ") for label in chart.axes.get_yticklabels()}
    assert rows == {shortened(row[0].text).replace("\n", " ") for row in table.rows}


def test_costs_have_a_key_and_are_left_out_where_they_tell_nothing(tmp_path):
    make_store(tmp_path, "averaging", cells="model=vgg16", seeds=(1,))
    records = Store(tmp_path).read()
    assert not [name for name in names(pages(tmp_path, "averaging")) if name.startswith("flops")]
    for n, record in enumerate(records):  # unions of other sizes
        Store(tmp_path).add({**record, "measures": {**record["measures"], "test_flops_ratio": 0.1 + n / 100}})
    (plot,) = [p for p in pages(tmp_path, "averaging").plots() if p.name.startswith("flops")]
    with drawn(plot) as chart:
        (key,) = chart.figure.legends
        shown = [text.get_text() for text in key.get_texts()]
    assert plot.name.startswith("flops-inference") and len(records) == 21
    assert shown == ["CIA", "CAA", *(f"CIMA, β = 0.{n}" for n in (9, 8, 5, 2, 1))]


def test_tickets_are_no_more_diverse_for_being_averaged_in_seven_ways(tmp_path):
    make_store(tmp_path / "averaging", "averaging", cells="model=vgg16,sparsity=0.95", seeds=(1, 2))
    cells = "data=cifar100,model=vgg16,method=rigl"
    make_store(tmp_path / "ensemble", "ensemble", cells=cells, seeds=(1, 2))
    for name, rows in (("averaging", 1), ("ensemble", 3)):
        (plot,) = [p for p in pages(tmp_path / name, name).plots() if p.name.startswith("diversity-kl")]
        with drawn(plot) as chart:
            assert len(chart.axes.get_yticklabels()) == rows


def test_the_command_computes_the_cells_that_are_shown(tmp_path):
    cells = "data=cifar100,method=rigl,method=set,sparsity=0.95,sparsity=0.9"
    make_store(tmp_path, "vgg16", cells=cells, seeds=(1, 2))
    one = pages(tmp_path, "vgg16")
    ((command,),) = [block.lines for block in one.sections[-1].blocks if hasattr(block, "lines")]
    words = command.split()
    assert words[:3] == ["suptickets", "reproduce", "vgg16"] and words[-2:] == ["--out", "again"]
    assert words[words.index("--seeds") + 1] == "2"
    again = EXPERIMENTS["vgg16"].cells(words[words.index("--cells") + 1])
    assert set(again) == set(EXPERIMENTS["vgg16"].cells(cells))


def test_tickets_are_drawn_where_they_are_collected(tmp_path):
    (plot,) = pages(tmp_path, "schedule").plots()
    with drawn(plot) as chart:
        points = [line.get_xydata()[0] for line in chart.axes.get_lines() if len(line.get_xdata()) == 1]
    assert sorted(x for x, _ in points) == [4, 8, 12, 16, 20, 24]  # FGE's in the middle of a cycle
    assert all(rate == pytest.approx(0.001) for _, rate in points)


def test_what_became_of_all_tickets_has_a_name(tmp_path):
    make_store(tmp_path, "variance", cells="model=vgg16", seeds=(1,))
    grid = next(table for table in pages(tmp_path, "variance").tables() if not table.folded)
    names = [row[0].text for row in grid.rows]
    assert "superposed" in names and "ticket 3" in names and all(names)


# ---- what there is no run for ----


def chosen(where: Path) -> set[str]:
    """Which experiments a report of all has."""
    return {file.stem for file in write_pages(where, out=where / "pages", format="tex")}


@pytest.mark.parametrize("name", ["large-lr", "variance", "lr-schedules", "batch-norm", "distillation"])
def test_an_experiment_is_reported_once_it_has_a_result_of_its_own(tmp_path, name):
    make_store(tmp_path, "vgg16", cells="data=cifar100,method=rigl,sparsity=0.95", seeds=(1, 2))
    assert chosen(tmp_path) == {"gains", "vgg16", "uncertainty", "significance"}
    assert pages(tmp_path, name).numbers[0].text.split()[0] != "0"  # there, if one asks for it
    make_store(tmp_path, name, cells="model=vgg16", seeds=(1,))
    assert name in chosen(tmp_path)


def test_one_page_may_have_a_file_of_its_own(tmp_path):
    make_store(tmp_path, "vgg16", cells="method=rigl,sparsity=0.9", seeds=(1,))
    file = tmp_path / "new" / "page.tex"
    assert write_pages(tmp_path, ["vgg16"], file, format="tex") == [file] and "93.48" in file.read_text()
    with pytest.raises(SparsityError, match="one file for 4 pages: give a folder, or one --experiment"):
        write_pages(tmp_path, out=file, format="tex")
    folder = tmp_path / "a.tex"
    folder.mkdir()
    assert write_pages(tmp_path, ["vgg16"], folder, format="tex") == [folder / "vgg16.tex"]


def test_runs_are_shown_once(tmp_path):
    """By the main table, and by others on the data on which they have more."""
    make_store(tmp_path, "vgg16", cells="method=rigl,sparsity=0.9", seeds=(1,))
    make_store(tmp_path, "ensemble", cells="method=rigl,sparsity=0.9,data=cifar10,model=vgg16", seeds=(1,))
    both = "settings-accuracy-cifar10-vgg16", "settings-accuracy-cifar100-vgg16"
    said = "Runs of the main tables are shown there: cifar100 vgg16."
    for beside, shown, notes in ((), 2, False), (("gains", "vgg16"), 1, True), (("resnet50",), 2, False):
        one = page("ensemble", Store(tmp_path).read(), Mode(), tmp_path, beside)
        assert names(one) & {*both} == {*both[:shown]}
        assert (said in map(str, one.notes())) == notes
    assert names(page("vgg16", Store(tmp_path).read(), Mode(), beside=("vgg16", "ensemble"))) >= {*both}


@pytest.mark.parametrize("seeds", [2, 3, 4])
def test_p_values_need_seeds(tmp_path, seeds):
    make_store(tmp_path, "significance", cells=f"{RIGL},booster=sup-tickets", seeds=range(1, seeds + 1))
    one = pages(tmp_path, "significance")
    every = next(table for table in one.tables() if table.name == "cells")
    rows = [dict(zip(every.header, cells, strict=True)) for cells in every.rows]
    wanted = {"Data": "cifar10", "Method": "rigl", "Sparsity": "0.9", "Measure": "p-value"}
    (row,) = [row for row in rows if wanted.items() <= {key: cell.text for key, cell in row.items()}.items()]
    assert (FEW in map(str, one.notes())) == (seeds < 4)
    assert row["Paper"].text == "1.88e\N{MINUS SIGN}05"  # as printed
    if seeds < 4:
        assert row["Ours"].text == row["Difference"].text == "\N{EN DASH}"
    else:
        assert re.fullmatch(r"[01]\.\d{1,3}", row["Ours"].text) and row["Difference"].text.startswith("+")


# ---- trials ----


def test_a_trial_shows_no_difference_and_names_its_model(tmp_path):
    mode = Mode(changes=(("model", "vgg-small"),))
    make_store(tmp_path, "vgg16", cells=RIGL, mode=mode)
    one = pages(tmp_path, "vgg16", mode=mode)
    assert "All runs are of the model vgg-small, whichever is named." in map(str, one.notes())
    assert "σ" not in "".join(section.text for section in one.sections)
    assert not [name for name in names(one) if name.startswith("difference")]
    assert not {"Within one deviation", "Largest difference"} & {number.label for number in one.numbers}
    grid, every, *_ = one.tables()
    assert not [cell for row in grid.rows for cell in row if "σ" in cell.note]
    assert {row[every.header.index("Difference")].text for row in every.rows} == {"\N{EN DASH}"}
    make_store(tmp_path, "vgg16", cells=RIGL)
    full = pages(tmp_path, "vgg16")
    assert "difference-cifar10-vgg16" in names(full) and "whichever" not in str(full.notes())


def test_the_names_of_pages_have_gains_among_them(tmp_path):
    make_store(tmp_path, "vgg16", cells=RIGL, seeds=(1,))
    with pytest.raises(SparsityError, match="unknown experiment 'nope'.* ensemble, gains, granet-vs-dense,"):
        write_pages(tmp_path, ["nope"])
