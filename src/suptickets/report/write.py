"""A report as files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from suptickets.errors import SparsityError, choice
from suptickets.report.document import Page, Plot
from suptickets.report.run_page import run_page
from suptickets.report.runs import read_runs
from suptickets.report.text import contents, latex, markdown
from suptickets.training.files import write
from suptickets.training.folder import refuse_own

FORMATS = ("html", "md", "tex", "png", "svg")


def write_report(
    paths: Sequence[str | Path], out: str | Path | None = None, *, format: str = "html"
) -> list[Path]:
    """Report on the runs in these folders, or in folders beneath them; gives the files that were written.

    Args:
        paths: run folders, or folders that hold some.
        out: the file, or for plots the folder; by default `report.FORMAT`, or the folder `plots`, in the one
            folder that was given, or in that which holds all that were given, else in the working directory.
        format: html is one page of everything; md and tex are its tables; png and svg its plots, a file each.
    """
    choice("format", format, FORMATS)
    runs = read_runs([Path(path) for path in paths])
    return write_page(run_page(runs), out or _place(paths, format), format=format)


def _place(paths: Sequence[str | Path], format: str) -> Path:
    holders = {Path(path).parent for path in paths}
    folder = Path(paths[0]) if len(paths) == 1 else holders.pop() if len(holders) == 1 else Path()
    return folder / ("plots" if format in ("png", "svg") else f"report.{format}")


def write_page(page: Page, out: str | Path, *, format: str = "html") -> list[Path]:
    """Write any page: of runs, or of an experiment."""
    choice("format", format, FORMATS)
    if format in ("png", "svg"):
        return list(_draw(page.plots(), Path(out), format).values())
    file = Path(out) / f"report.{format}" if Path(out).is_dir() else Path(out)
    _prepare(file)
    return [_save(file, _text(format)(page))]


def write_book(pages: Mapping[str, Page], file: Path) -> list[Path]:
    """Pages as one Markdown file with pictures, for a code host; gives that file, then those of the pictures.

    The plots that a page does not fold lie beside it, as `plots/NAME-PLOT.svg`.
    """
    _prepare(file)
    parts, several = [], len(pages) > 1
    drawn: list[Path] = []
    for name, page in pages.items():
        files = _draw(page.unfolded(), file.parent / "plots", "svg", f"{name}-")
        places = {plot: f"plots/{path.name}" for plot, path in files.items()}
        drawn += files.values()
        parts.append(f'<a id="{name}"></a>\n\n' * several + markdown(page, places, 1 + several, file.parent))
    return [_save(file, "\n".join([*([contents(pages)] if several else []), *parts])), *drawn]


def _prepare(file: Path) -> None:
    refuse_own(file)
    _make(file.parent)


def _save(file: Path, text: str) -> Path:
    write(file, lambda path: path.write_text(text, encoding="utf-8"))
    return file


def _text(format: str) -> Callable[[Page], str]:
    if format == "html":  # draws: imports matplotlib
        from suptickets.report.html import html

        return html
    return {"md": markdown, "tex": latex}[format]


def _draw(plots: Sequence[Plot], folder: Path, kind: str, prefix: str = "") -> dict[str, Path]:
    """Draw each plot into a file; gives the files by the names of the plots."""
    from suptickets.report.chart import drawn

    _make(folder)
    files = {plot.name: folder / f"{prefix}{plot.name}.{kind}" for plot in plots}
    for plot in plots:
        with drawn(plot) as chart:
            write(files[plot.name], partial(chart.save, kind=kind, title=plot.title, text=plot.text))
    return files


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SparsityError(f"cannot make the folder {folder}: {error.strerror}") from error
