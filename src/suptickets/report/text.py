"""A page as Markdown for a code host, and its tables as LaTeX."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path

from suptickets.report.document import Block, Listing, Note, Page, Plot, Section, Table
from suptickets.report.measures import NO_BREAK

FITTED = r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%"  # if it is too wide
LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': "''",
    **{letter: f"{{{letter}}}" for letter in "[*"},  # which mean something else after a line's end
    **{letter: "\\" + letter for letter in "&%$#_{}"},
    "±": r"$\pm$",
    "×": r"$\times$",
    "·": r"$\cdot$",
    "σ": r"$\sigma$",
    "β": r"$\beta$",
    "\N{MINUS SIGN}": "$-$",
    "\N{EN DASH}": "--",
    "\N{NO-BREAK SPACE}": "~",
}


def markdown(
    page: Page, pictures: Mapping[str, str] | None = None, level: int = 1, folder: Path | None = None
) -> str:
    """A title, what the reader must know, the headline numbers, then all tables, commands and pictures.

    Args:
        page: the page to write.
        pictures: for names of plots, where their files are; other plots are left out.
        level: of the title, where the page is a part of a longer text.
        folder: where the text will lie; documents that lie there too are linked.
    """
    about = [_markdown(page.about)] if page.about else []
    about += [_note(note, folder) for note in page.notes()]
    told = [f"- **{_markdown(n.label)}:** {_markdown(f'{n.text} {n.note}'.strip())}" for n in page.numbers]
    head = [f"{'#' * level} {_markdown(page.title)}", *about, *(["\n".join(told)] if told else [])]
    parts = [_markdown_section(section, pictures or {}, level + 1) for section in page.sections]
    return "\n\n".join([*head, *filter(None, parts)]) + "\n"


def _note(note: Note, folder: Path | None) -> str:
    """A note, with a link if that leads anywhere."""
    file, _, _ = note.more.partition("#")
    if not file or folder is None or not (folder / file).is_file():
        return _markdown(str(note))
    return f"{_markdown(note.text)} See the [{_markdown(Path(file).stem)}]({note.more})."


def contents(pages: Mapping[str, Page]) -> str:
    """The head of several pages in one file: a line for each, with a link to it."""
    lines = [f"- [{_markdown(page.title)}](#{name}): {_markdown(page.about)}" for name, page in pages.items()]
    return "\n".join(["# Results", "", *lines, ""])


def _markdown_section(section: Section, pictures: Mapping[str, str], level: int) -> str:
    """A section as Markdown; nothing if it has only plots that are not shown."""
    blocks = [_markdown_block(block, level + 1) for block in section.blocks]
    shown = [plot for plot in section.blocks if isinstance(plot, Plot) and plot.name in pictures]
    first = next((n for n, block in enumerate(section.blocks) if isinstance(block, Plot)), 0)
    blocks = list(filter(None, [*blocks[:first], _pictures(shown, pictures), *blocks[first:]]))
    title, text = f"{'#' * level} {_markdown(section.title)}", _markdown(section.text.strip())
    return "\n\n".join(filter(None, [title, text, *blocks])) if blocks else ""


def _markdown_block(block: Block, level: int) -> str:
    match block:
        case Table():
            return _titled_table(block, level)
        case Listing():
            return f"**{_markdown(block.title)}**\n\n{_fenced(block.lines)}"
        case _:
            return ""


def _pictures(plots: Sequence[Plot], places: Mapping[str, str]) -> str:
    """Plots side by side, as many as there is room for; titles and what marks mean are in the pictures."""
    width = "60%" if len(plots) == 1 else "48%"
    return "\n".join(
        f'<img src="{escape(places[plot.name])}" alt="{escape(plot.title)}" width="{width}">'
        for plot in plots
    )


def _titled_table(table: Table, level: int) -> str:
    """A table with its title; a folded one is folded on code hosts too."""
    rows = _markdown_table(table).rstrip("\n")
    if table.folded:
        return f"<details><summary>{escape(table.title)}</summary>\n\n{rows}\n\n</details>"
    return f"{'#' * level} {_markdown(table.title)}\n\n{rows}"


def _fenced(lines: Sequence[str]) -> str:
    """A block that shows lines as they are, whatever they hold."""
    longest = max((len(run) for line in lines for run in re.findall("`+", line)), default=0)
    fence = "`" * max(3, longest + 1)
    return "\n".join([f"{fence}text", *lines, fence])


def _markdown_table(table: Table) -> str:
    rule = ["---:" if table.numeric(place) else "---" for place in range(len(table.header))]
    rows = [[_markdown(name) for name in table.header], rule]
    rows += _rows(table, _markdown, "**{}**")
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _markdown(text: str) -> str:
    """Text with its marks escaped, for use within a line; deviations stay on the line of their numbers."""
    kept = re.sub(r"(?<=\d) ± (?=\d)", f"{NO_BREAK}±{NO_BREAK}", text)
    return re.sub(r"([\\`*_\[\]#|~<>&$])", r"\\\1", kept)


def latex(page: Page) -> str:
    """All tables, none wider than the text; captions of the main ones say what one must know."""
    head, label = "% \\usepackage{booktabs,graphicx}\n", _label(page.title)
    notes = [str(note) for note in page.notes()]
    tables = [_latex_table(table, [] if table.folded else notes, label) for table in page.tables()]
    return head + "".join(f"\n{table}" for table in tables)


def _label(title: str) -> str:
    """The label of a page, so that tables of several pages go into one document."""
    return "-".join(re.findall("[a-z0-9]+", title.lower())[:4])


def _latex_table(table: Table, notes: Sequence[str], page: str) -> str:
    caption = " ".join([f"{table.title}.", *notes]) if notes else table.title
    columns = "".join("r" if table.numeric(place) else "l" for place in range(len(table.header)))
    head = " & ".join(_latex(name) for name in table.header)
    rows = [" & ".join(row) for row in _rows(table, _latex, r"\textbf{{{}}}")]
    lines = [
        r"\begin{table}[htbp]",
        r"\centering",
        rf"\caption{{{_latex(caption)}}}",
        rf"\label{{tab:{page}-{table.name}}}",
        FITTED,
        rf"\begin{{tabular}}{{{columns}}}",
        r"\toprule",
        rf"{head} \\",
        r"\midrule",
        *(rf"{row} \\" for row in rows),
        r"\bottomrule",
        r"\end{tabular}}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def _latex(text: str) -> str:
    """Text in which nothing is a command; two hyphens stay two."""
    return "".join(LATEX.get(letter, letter) for letter in text).replace("--", "-{}-")


def _rows(table: Table, escaped: Callable[[str], str], strong: str) -> list[list[str]]:
    """The cells' texts; where a row has notes, they follow in a row of their own."""

    def marked(text: str, bold: bool) -> str:
        return strong.format(escaped(text)) if bold and text else escaped(text)

    rows = []
    for row in table.rows:
        rows.append([marked(cell.text, cell.strong) for cell in row])
        if any(cell.note for cell in row):
            notes = [marked(cell.note, cell.note_strong) for cell in row[1:]]
            rows.append([escaped(table.notes), *notes])
    return rows
