"""Pages of results: every cell of the paper's tables and figures, its number and ours."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from suptickets.errors import SparsityError, choice
from suptickets.experiments.cells import EXPERIMENTS, VARIATIONS, Cell, Experiment, experiment
from suptickets.experiments.commands import MAIN, commands, commands_of_pairs
from suptickets.experiments.errata import ERRATA
from suptickets.experiments.gains import GAINS, gains_page, pairs
from suptickets.experiments.numbers import ours, spent
from suptickets.experiments.plan import TOGETHER, Mode, readings, trains
from suptickets.experiments.store import Results, Store, mode_of, only_mode
from suptickets.report import (
    FIGURES,
    FORMATS,
    CellResult,
    Ours,
    Paper,
    best_among,
    better_than,
    experiment_page,
    stored_runs,
    write_book,
    write_page,
)
from suptickets.report.cells import NOBODY, SUPERPOSED
from suptickets.report.document import Note, Page
from suptickets.report.figures import schedule
from suptickets.report.runs import setting_name
from suptickets.training.progress import print_plain

# What is bold in the paper, where that is not the best of the cells that differ in the booster.
MARKS = {
    "granet-vs-dense": better_than(method="dense"),
    "swa": best_among("booster", "method"),
    **dict.fromkeys(("large-lr", "variance", "diversity"), NOBODY),
}
UNSHOWN = ("experiment", "measure", *VARIATIONS)

FORKED = (
    "Forked: runs share their training until the cycles begin, so plain runs drop the rate where those with "
    "cycles do."
)
DRAWN = "Nothing is trained for this: suptickets report STORE --experiment NAME makes its page."
SEPARATE = "Separate: every cell has runs of its own, as in the paper."
LEAST = 4  # seeds a side, below which a p-value says nothing
FEW = f"A p-value needs {LEAST} seeds a side: from three against three the test gives none below 0.1."


def page(
    name: str,
    records: Sequence[Mapping[str, Any]],
    mode: Mode,
    store: str | Path | None = None,
    beside: Sequence[str] = (),
) -> Page:
    """The page of an experiment, from the results of one mode.

    Curves come from runs that `store` still has. Runs that pages of main tables `beside` this one show are
    not shown again, unless this experiment has others with the same data and model.
    """
    own, results = experiment(name), Results(records, mode)
    cells = [(cell, ours(cell, results)) for cell in own.table]
    known = [(cell, None if _too_few(cell, found) else found) for cell, found in cells]
    few = [Note(FEW)] if known != cells else []
    used = _used([cell for cell, _ in cells], records, mode)
    folder = None if store is None else Path(store) / "runs" / ("separate" if mode.separate else "forked")
    shown = _own(used, [main for main in MAIN if main in beside and main != name])
    return experiment_page(
        own.title,
        own.source,
        [_shown(cell, found, mode, own) for cell, found in known],
        runs=stored_runs(shown, folder),
        figure=schedule if name == "schedule" else FIGURES.get(name),
        mark=MARKS.get(name, best_among("booster")),
        notes=[*_left_out(used, shown), *notes(mode, own.table), *few],
        commands=commands(name, mode, [cell for cell, found in known if found], results),
        results=used,
        seconds=spent(used),
    )


def _too_few(cell: Cell, found: Ours | None) -> bool:
    return cell.measure == "p_value" and found is not None and found.runs < LEAST


def _own(used: Sequence[Mapping[str, Any]], tables: Iterable[str]) -> list[Mapping[str, Any]]:
    """All results with data and model of which at least one result is in none of these tables."""
    known = _keys_of(tables)
    places = {_place(one) for one in used if _key(one["cell"]) not in known}
    return [one for one in used if _place(one) in places]


def _left_out(used: Sequence[Mapping[str, Any]], shown: Sequence[Mapping[str, Any]]) -> list[Note]:
    left = sorted({_place(one) for one in used} - {_place(one) for one in shown})
    where = ", ".join(" ".join(place) for place in left)
    return [Note(f"Runs of the main tables are shown there: {where}.")] if left else []


def _place(one: Mapping[str, Any]) -> tuple[str, str]:
    return one["cell"]["data"], one["cell"]["model"]


def _keys_of(tables: Iterable[str]) -> set[str]:
    return {key for name in tables for cell in experiment(name).table for key in _keys(cell)}


def _used(cells: Iterable[Cell], records: Sequence[Mapping[str, Any]], mode: Mode) -> list[Mapping[str, Any]]:
    """The results that these cells are read off, cell after cell."""
    found: dict[str, list[Mapping[str, Any]]] = {key: [] for cell in cells for key in _keys(cell)}
    for one in records:
        if mode_of(one) == mode:
            found.get(_key(one["cell"]), []).append(one)
    return [one for some in found.values() for one in some]


def _keys(cell: Cell) -> list[str]:
    """The keys of what a cell needs; networks of several seeds together are a result of their own."""
    own = [reading.key for reading in readings(cell)]
    together = [{**key, "booster": TOGETHER} for key in own if cell.booster == TOGETHER]
    return [_key(key) for key in [*own, *together]]


def _key(cell: Mapping[str, Any]) -> str:
    """The key of a result, as text; it leaves out which seeds are together."""
    return json.dumps({key: value for key, value in cell.items() if key != "seeds"}, sort_keys=True)


def write_pages(
    store: str | Path,
    names: Sequence[str] = (),
    out: str | Path | None = None,
    *,
    format: str = "html",
    scale: float | None = None,
    separate: bool | None = None,
) -> list[Path]:
    """Report on a store, by default on each experiment that has a result of ours; gives the files written.

    Results of different modes do not go into one table: `scale` and `separate` say which are meant.

    Args:
        store: the folder of the results.
        names: of experiments, or `gains`: whether Sup-tickets helps, over all of them.
        out: the folder for `NAME.html`, `NAME.tex` or `NAME.md` (its plots in `plots/NAME-PLOT.svg` there),
            by default the store; or the file of one experiment, and a file `....md` takes all. Plots alone go
            into a folder `NAME` for each experiment, by default in the store's `plots`.
        format: as for `write_report`.
        scale: that of the results that are meant.
        separate: whether separate or forked results are meant.
    """
    choice("format", format, FORMATS)
    for name in names:
        choice("experiment", name, (GAINS, *EXPERIMENTS))
    records = _chosen(Store(store), scale, separate)
    drawn = bool(names) and not any(name == GAINS or trains(experiment(name).table) for name in names)
    mode = Mode() if drawn else only_mode(records)
    chosen = names or _with_results(records, mode)
    pages = {name: _page(name, records, mode, store, chosen) for name in chosen}
    if format == "md":
        return _write_markdown(pages, Path(out or store))
    if format in ("png", "svg"):
        return _write_plots(pages, Path(out or Path(store) / "plots"), format)
    return _write_files(pages, Path(out or store), format)


def _page(
    name: str, records: Sequence[Mapping[str, Any]], mode: Mode, store: str | Path, beside: Sequence[str]
) -> Page:
    if name != GAINS:
        return page(name, records, mode, store, beside)
    shown = f"suptickets report again --experiment {GAINS}"
    return gains_page(records, mode, _made(mode), [*commands_of_pairs(records, mode), shown])


def _write_markdown(pages: Mapping[str, Page], out: Path) -> list[Path]:
    """Write one file of all pages, or a file for each; gives these, then their plots."""
    if out.suffix == ".md" and not out.is_dir():
        return write_book(pages, out)
    written = [write_book({name: one}, out / f"{name}.md") for name, one in pages.items()]
    return [files[0] for files in written] + [plot for files in written for plot in files[1:]]


def _write_files(pages: Mapping[str, Page], out: Path, format: str) -> list[Path]:
    """Write a file for each page, or the one that was asked for."""
    file = out.suffix == f".{format}" and not out.is_dir()
    if file and len(pages) > 1:
        raise SparsityError(f"{out} is one file for {len(pages)} pages: give a folder, or one --experiment")
    places = {name: out if file else out / f"{name}.{format}" for name in pages}
    return [path for name, one in pages.items() for path in write_page(one, places[name], format=format)]


def _write_plots(pages: Mapping[str, Page], out: Path, format: str) -> list[Path]:
    """Write the plots of each experiment into a folder, and say into which."""
    written = []
    for name, one in pages.items():
        files = write_page(one, out / name, format=format)
        print_plain(f"{name}: {len(files)} plots in {out / name}")
        written += files
    return written


def _chosen(store: Store, scale: float | None, separate: bool | None) -> list[dict[str, Any]]:
    """The results that are meant; if there are none, the error says which there are."""
    records = store.read()
    left = [r for r in records if scale in (None, r["scale"]) and separate in (None, r["separate"])]
    if records and not left:
        asked = {None: "", True: " separate", False: " forked"}[separate]
        asked += "" if scale is None else f" at scale {scale:g}"
        found = "; ".join(sorted({str(mode_of(record)) for record in records}))
        raise SparsityError(f"there are no results yet{asked}: those in {store.folder} are {found}")
    # Results of other settings than the paper's are used only if there are no others.
    return [r for r in left if not r["changes"]] or left


def _with_results(records: Sequence[Mapping[str, Any]], mode: Mode) -> list[str]:
    """The experiments that say something: not if they need more than main tables, and have no more."""
    results, main = Results(records, mode), _keys_of(MAIN)
    found = []
    for name, own in EXPERIMENTS.items():
        cells = [cell for cell in own.table if cell.of != "model"]
        done = [cell for cell in cells if ours(cell, results)]
        more = [cell for cell in cells if not main.issuperset(_keys(cell))]
        if done and (name in MAIN or not more or set(more) & set(done)):
            found.append(name)
    found.sort(key=lambda name: name not in MAIN)
    return [*([GAINS] if pairs(records, mode) else []), *found]


def notes(mode: Mode, cells: Iterable[Cell]) -> list[Note]:
    """What a reader of the numbers of these cells must know."""
    cells = list(cells)
    names = list(dict.fromkeys(cell.experiment for cell in cells))
    wrong = {name: ERRATA[name] for name in names if name in ERRATA}
    if len(names) > 1:
        wrong = {name: replace(note, text=f"{name}: {note.text}") for name, note in wrong.items()}
    return [*map(Note, _made(mode) if trains(cells) else [DRAWN]), *wrong.values()]


def _made(mode: Mode) -> list[str]:
    """How results of a mode were made, in words."""
    trial = f"A trial ({mode}): not the paper's training or test, so no differences from it are shown."
    model = dict(mode.changes).get("model")
    other = f"All runs are of the model {model}, whichever is named."
    made = [SEPARATE if mode.separate else FORKED]
    return [*made, *([trial] if mode.trial else []), *([other] if model else [])]


def _shown(cell: Cell, found: Ours | None, mode: Mode, own: Experiment) -> CellResult:
    """A cell as the report takes it, with what the experiment varies in words."""
    what = {key: value for key, value in cell.as_dict().items() if key not in UNSHOWN}
    if cell.ticket is None and any(other.ticket for other in own.table):
        what["ticket"] = SUPERPOSED
    variation = ", ".join(setting_name(key, value) for key, value in cell.variation)
    paper = None
    if cell.paper is not None:
        paper = Paper(cell.paper.mean, cell.paper.deviation, own.seeds, cell.printed or "")
    return CellResult(
        {key: " ".join(v) if isinstance(v, tuple) else v for key, v in what.items()},
        variation,
        cell.measure,
        paper,
        found,
        comparable=not mode.trial,
    )
