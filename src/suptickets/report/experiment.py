"""The page of an experiment: the paper's table or figure, its numbers beside ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from suptickets.report.again import again, time_spent
from suptickets.report.cells import CellResult, Mark, Setting, best_among, telling
from suptickets.report.colours import MUTED, SERIES, SHADE
from suptickets.report.document import Block, Cell, Note, Number, Numbers, Page, Plot, Section, Table
from suptickets.report.measures import MEASURES, NO_BREAK, NOTHING, Measure, file_names, plain
from suptickets.report.panels import panel_sections
from suptickets.report.parted import parted
from suptickets.report.runs import Run, runs_name, sparsity_name

if TYPE_CHECKING:
    from suptickets.report.chart import Chart

Rows: TypeAlias = dict[tuple[str, ...], dict[tuple[str, ...], Cell]]  # by row and column
LEGEND = "Ours first; beneath, the paper's"
SIGMA = ", and the difference in units of σ, the joint deviation"
DIFFERENCE = "Ours less the paper's, in units of the joint deviation; the shade is one of these."
DEVIATIONS = Measure("Difference / σ", 1)


def experiment_page(
    title: str,
    reference: str,
    cells: Sequence[CellResult],
    *,
    runs: Sequence[Run] = (),
    figure: Callable[[Sequence[CellResult]], list[Plot]] | None = None,
    mark: Mark | None = None,
    notes: Sequence[str | Note] = (),
    commands: Sequence[str] = (),
    results: Sequence[Mapping[str, Any]] = (),
    seconds: float | None = None,
) -> Page:
    """The page of one table or figure of the paper.

    Args:
        title: what the experiment is about.
        reference: where in the paper it stands.
        cells: every number of it.
        runs: those that ours came from (`read_runs`, or `stored_runs` of a store): their results, cost and
            diversity follow and, folded, curves, layers and calibration.
        figure: draws it in the paper's own form (`figures.FIGURES` has them by the experiment's name).
        mark: which numbers are bold; by default the best of those that differ in booster and variation alone.
        notes: what the reader must know: a trial's scale, forks or separate runs, errata of the paper.
        commands: what computes all this again; by default those of the runs.
        results: those of a store that ours came from; their versions, hardware and revision are told.
        seconds: what all runs took, added up.
    """
    cells, chosen = [cell.sound() for cell in cells], mark or best_among("booster")
    blocks: list[Block] = [Note(note) if isinstance(note, str) else note for note in notes]
    blocks += [*(figure(cells) if figure else []), *_grids(cells, chosen), _list(cells, chosen)]
    sections = [
        Section(_title(cells), blocks, f"{chosen.text} {_legend(cells)}"),
        Section("Difference", _differences(cells)),
        *(panel_sections(runs) if runs else []),
        again(runs, commands, results),
    ]
    numbers = (*_headline(cells, chosen), *time_spent(seconds, results))
    return Page(title, reference, numbers, [part for part in sections if part.blocks])


def _title(cells: Sequence[CellResult]) -> str:
    return "Paper and ours" if any(cell.paper for cell in cells) else "Ours"


def _legend(cells: Sequence[CellResult]) -> str:
    """What the numbers of a table are."""
    if not any(cell.paper for cell in cells):
        return ""
    return LEGEND + (SIGMA if any(cell.deviations is not None for cell in cells) else "") + "."


def _seeds(cells: Sequence[CellResult]) -> Numbers:
    """How many runs a cell is the mean of."""
    counts = sorted({cell.ours.runs for cell in cells if cell.ours and cell.ours.runs})
    if not counts:
        return ()
    few = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    note = "of each cell; ± is their standard deviation" if counts[-1] > 1 else "of each cell"
    unsure = ". That of two is itself uncertain." if 2 in counts else ""
    return (Number("Seeds", few, note + unsure),)


def _headline(cells: Sequence[CellResult], mark: Mark) -> Numbers:
    done = sum(cell.ours is not None for cell in cells)
    numbers = [Number("Cells", f"{done} of {len(cells)}", "have a result of ours"), *_seeds(cells)]
    known = [abs(cell.deviations) for cell in cells if cell.deviations is not None]
    if known:
        near = sum(deviations <= 1 for deviations in known)
        numbers.append(Number("Within one deviation", f"{near} of {len(known)}", "of the paper's number"))
        numbers.append(Number("Largest difference", f"{max(known):.1f}", "joint deviations"))
    ours, paper = (_boosted(cells, mark, side) for side in ("ours", "paper"))
    if ours:
        numbers.append(Number("Bold with a booster", ours, f"(paper: {paper})" if paper else ""))
    return tuple(numbers)


def _boosted(cells: Sequence[CellResult], mark: Mark, side: str) -> str:
    """How many of the cells with a booster win, where they compete with others."""
    marks = mark.of(cells, side)
    boosted = {n for n, cell in enumerate(cells) if cell.settings.get("booster") not in (None, "none")}
    contenders = boosted & marks.contenders
    compared = contenders and marks.contenders - boosted
    return f"{len(contenders & marks.winners)} of {len(contenders)}" if compared else ""


# ---- tables ----


def _grids(cells: Sequence[CellResult], mark: Mark) -> list[Table]:
    """The tables as in the paper: one for each model that has numbers, with data and sparsity as columns.

    A table without a number of ours is folded if others have one.
    """
    bold = {side: mark.of(cells, side).winners for side in ("ours", "paper")}
    models, level = dict[Setting, Rows](), not _one_level(cells)
    known = {cell.settings.get("model") for cell in cells if cell.ours or cell.paper}
    done = {cell.settings.get("model") for cell in cells if cell.ours}
    most = max((cell.ours.runs for cell in cells if cell.ours), default=0)
    for n, cell in enumerate(cells):
        if cell.settings.get("model") not in known:
            continue
        name = cell.row() if level else (*cell.row(), sparsity_name(cell.settings))
        row = models.setdefault(cell.settings.get("model"), {}).setdefault(name, {})
        row[cell.column(level=level)] = _grid_cell(cell, most, n in bold["ours"], n in bold["paper"])
    return [
        _grid(n, model, rows, folded=bool(done) and model not in done)
        for n, (model, rows) in enumerate(models.items())
    ]


def _one_level(cells: Sequence[CellResult]) -> bool:
    """Whether each row has one sparsity, and not all the same: then it belongs to the row."""
    rows: dict[tuple[object, ...], set[str]] = {}
    for cell in cells:
        rows.setdefault((cell.settings.get("model"), cell.row()), set()).add(cell.column()[1])
    return all(len(levels) == 1 for levels in rows.values()) and len(set.union(*rows.values())) > 1


def _grid(n: int, model: Setting, rows: Rows, *, folded: bool) -> Table:
    found = dict.fromkeys(column for row in rows.values() for column in row)
    columns = sorted(found, key=lambda column: not column[1])  # dense networks come after the sparsities
    (names, shared), (header, common) = telling([*rows]), telling(columns)
    title = ", ".join(part for part in (plain(model or ""), shared, common) if part)
    body = [
        [Cell(name), *(row.get(column, Cell(NOTHING)) for column in columns)]
        for name, row in zip(names, rows.values(), strict=True)
    ]
    return Table(f"grid-{n}", title, ["Setting", *header], body, folded=folded, notes="paper")


def _grid_cell(cell: CellResult, most: int, best: bool, best_of_paper: bool) -> Cell:
    """A cell of a grid, with the number of runs if others have more."""
    value = cell.mean("ours") if cell.ours else cell.mean("paper")
    fewer = f" ({runs_name(cell.ours.runs)})" if cell.ours and 0 < cell.ours.runs < most else ""
    return Cell(_ours(cell) + fewer, value, best, _paper(cell), best_of_paper)


def _ours(cell: CellResult) -> str:
    return NOTHING if cell.ours is None else cell.kind.bare(cell.ours.mean, cell.ours.sd)


def _paper(cell: CellResult) -> str:
    """The paper's number, with the difference in joint deviations."""
    if cell.paper is None:
        return ""
    away = "" if cell.deviations is None else f"; {DEVIATIONS.change(cell.deviations)}{NO_BREAK}σ"
    return _quoted(cell) + away


def _quoted(cell: CellResult) -> str:
    return NOTHING if cell.paper is None else cell.kind.quoted(cell.paper.printed, *cell.paper[:2])


def _list(cells: Sequence[CellResult], mark: Mark) -> Table:
    """Every cell in a row of its own."""
    keys = list(dict.fromkeys(key for cell in cells for key in cell.settings))
    wins = mark.of(cells, "ours").winners
    header = [*(key.replace("_", " ").capitalize() for key in keys), "Variation", "Measure"]
    header += ["Paper", "Ours", "Runs", "Difference", DEVIATIONS.label, "Welch's p"]
    rows = [[*_names(cell, keys), *_results(cell, n in wins)] for n, cell in enumerate(cells)]
    return Table("cells", "Every cell", header, rows, folded=True)


def _names(cell: CellResult, keys: Sequence[str]) -> list[Cell]:
    values = [cell.settings.get(key) for key in keys]
    texts = [plain("" if value is None else value) for value in [*values, cell.variation, cell.kind.header]]
    return [Cell(text) for text in texts]


def _results(cell: CellResult, best: bool) -> list[Cell]:
    runs, difference = cell.ours.runs if cell.ours else 0, cell.difference
    paper = Cell(_quoted(cell), cell.mean("paper"))
    changed = NOTHING if difference is None else cell.kind.change(difference)
    return [
        paper,
        Cell(_ours(cell), cell.mean("ours"), best),
        Cell(str(runs), float(runs)),
        Cell(changed, difference),
        DEVIATIONS.cell(cell.deviations),
        MEASURES["p_value"].cell(cell.welch),
    ]


# ---- plots ----


def _differences(cells: Sequence[CellResult]) -> list[Plot]:
    """Ours minus the paper's, cell by cell, in joint deviations; a plot for each data set and model."""
    parts = parted((cell for cell in cells if cell.deviations is not None), CellResult.where)
    names = file_names([f"difference {where}" for where in parts])
    return [_difference(name, *part) for name, part in zip(names, parts.items(), strict=True)]


def _difference(file: str, where: str, cells: Sequence[CellResult]) -> Plot:
    names, _ = telling([(*cell.row(), *cell.column()[1:]) for cell in cells])  # their data are in the title
    widest = 1.2 * max(1.0, *(abs(cell.deviations or 0.0) for cell in cells))

    def draw(chart: Chart) -> None:
        chart.rows(names)
        chart.axis_names("", "σ")
        chart.axes.set_xlim(-widest, widest)
        chart.axes.axvspan(-1, 1, color=SHADE.light, zorder=0, linewidth=0)
        chart.axes.axvline(0, color=MUTED.light, linewidth=1)
        for y, (name, cell) in enumerate(zip(names, cells, strict=True)):
            tip = f"{name}\nours {_ours(cell)}, paper {_paper(cell)}"
            chart.points([(cell.deviations or 0.0, float(y), tip)], SERIES[0])

    return Plot(file, where or "All cells", draw, DIFFERENCE, height=70 + 20 * len(cells))
