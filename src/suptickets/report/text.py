"""The tables of a page as Markdown, and as LaTeX."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from suptickets.report.document import Page, Table

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
    "\N{MINUS SIGN}": "$-$",
    "\N{EN DASH}": "--",
    "\N{NO-BREAK SPACE}": "~",
}


def markdown(page: Page) -> str:
    """A title, what the reader must know, and all tables."""
    head = f"# {_markdown(page.title)}\n\n{_markdown(page.about)}\n"
    head += "".join(f"\n{_markdown(note)}\n" for note in page.notes())
    return head + "".join(
        f"\n## {_markdown(table.title)}\n\n{_markdown_table(table)}" for table in page.tables()
    )


def _markdown_table(table: Table) -> str:
    rule = ["---:" if table.numeric(place) else "---" for place in range(len(table.header))]
    rows = [[_markdown(name) for name in table.header], rule]
    rows += _rows(table, _markdown, "**{}**")
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _markdown(text: str) -> str:
    """Nothing in it is a mark; what starts a line elsewhere is none within one."""
    return re.sub(r"([\\`*_\[\]#|~<>&$])", r"\\\1", text)


def latex(page: Page) -> str:
    """All tables, for a document that uses booktabs; captions say what the reader must know."""
    head = "% \\usepackage{booktabs}\n"
    return head + "".join(f"\n{_latex_table(table, page.notes())}" for table in page.tables())


def _latex_table(table: Table, notes: Sequence[str]) -> str:
    caption = " ".join([f"{table.title}.", *notes]) if notes else table.title
    columns = "".join("r" if table.numeric(place) else "l" for place in range(len(table.header)))
    head = " & ".join(_latex(name) for name in table.header)
    rows = [" & ".join(row) for row in _rows(table, _latex, r"\textbf{{{}}}")]
    lines = [
        r"\begin{table}[htbp]",
        r"\centering",
        rf"\caption{{{_latex(caption)}}}",
        rf"\label{{tab:{table.name}}}",
        rf"\begin{{tabular}}{{{columns}}}",
        r"\toprule",
        rf"{head} \\",
        r"\midrule",
        *(rf"{row} \\" for row in rows),
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def _latex(text: str) -> str:
    return "".join(LATEX.get(letter, letter) for letter in text)


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
