"""What a report is made of: a page of sections, each a list of blocks, in no particular format.

`html.py` makes one file of it, `text.py` Markdown and LaTeX of its tables, `write.py` a file of each plot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from suptickets.report.chart import Chart


@dataclass(frozen=True)
class Cell:
    """A cell of a table: what it shows, the number that it is sorted by, and a smaller line beneath."""

    text: str
    value: float | None = None
    strong: bool = False
    note: str = ""
    note_strong: bool = False


@dataclass(frozen=True)
class Table:
    """A table.

    `name` is its identifier in files, `folded` hides it until it is asked for, `notes` says what the smaller
    lines of its cells are.
    """

    name: str
    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    folded: bool = False
    notes: str = ""

    def numeric(self, column: int) -> bool:
        """Whether a column holds numbers, and is aligned and sorted as such."""
        return any(row[column].value is not None for row in self.rows)


@dataclass(frozen=True)
class Plot:
    """A plot, drawn when a format needs it."""

    name: str
    title: str
    draw: Callable[[Chart], None]
    text: str = ""
    height: int = 250


@dataclass(frozen=True)
class Number:
    """A number that is shown by itself."""

    label: str
    text: str
    note: str = ""


@dataclass(frozen=True)
class Listing:
    """Lines to copy."""

    title: str
    lines: Sequence[str]


@dataclass(frozen=True)
class Note:
    """A sentence that the reader must not miss; `more` is a place in `docs/` that tells all of it."""

    text: str
    more: str = ""

    def __str__(self) -> str:
        """The sentence without a link, and where to read more."""
        where = f" See docs/{self.more} in the sources of suptickets." if self.more else ""
        return self.text + where


Numbers: TypeAlias = tuple[Number, ...]
Block: TypeAlias = Table | Plot | Numbers | Listing | Note


@dataclass(frozen=True)
class Section:
    """Blocks that belong together; `folded` hides them until they are asked for."""

    title: str
    blocks: Sequence[Block]
    text: str = ""
    folded: bool = False


@dataclass(frozen=True)
class Page:
    """A report: the headline numbers first."""

    title: str
    about: str
    numbers: Numbers
    sections: Sequence[Section]

    def blocks(self) -> Iterator[Block]:
        """All blocks, in order."""
        for section in self.sections:
            yield from section.blocks

    def notes(self) -> list[Note]:
        """All that the reader must not miss."""
        return [block for block in self.blocks() if isinstance(block, Note)]

    def tables(self) -> list[Table]:
        """All tables, in order."""
        return [block for block in self.blocks() if isinstance(block, Table)]

    def plots(self) -> list[Plot]:
        """All plots, in order."""
        return [block for block in self.blocks() if isinstance(block, Plot)]

    def unfolded(self) -> list[Plot]:
        """The plots that are seen at once, in sections that are not folded."""
        shown = (section for section in self.sections if not section.folded)
        return [block for section in shown for block in section.blocks if isinstance(block, Plot)]
