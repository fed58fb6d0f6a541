"""The colours of a report, each for a light and a dark page.

The series are told apart with any of the common kinds of colour blindness (`tests/test_report_plots.py`
simulates them), and stand out from the page by a contrast of 3 or more.
"""

from __future__ import annotations

from typing import NamedTuple


class Colour(NamedTuple):
    """One colour: plots are drawn in its light form; on a page it becomes the variable `--name`."""

    name: str
    light: str
    dark: str


PAPER = Colour("paper", "#fcfcfa", "#15181c")
INK = Colour("ink", "#1f2328", "#e4e6e9")
MUTED = Colour("muted", "#646c76", "#98a1ab")
FAINT = Colour("faint", "#e4e5e3", "#2b3036")
SHADE = Colour("shade", "#f3f2ee", "#1d2126")
SERIES = (
    Colour("series-0", "#1d4fa8", "#6a8ff0"),
    Colour("series-1", "#b03c0b", "#e8743b"),
    Colour("series-2", "#00805a", "#35cf98"),
    Colour("series-3", "#b2609f", "#c785c4"),
    Colour("series-4", "#cd7d00", "#f2d24b"),
    Colour("series-5", "#4795e8", "#b9e4f2"),
)
ALL = (PAPER, INK, MUTED, FAINT, SHADE, *SERIES)


def series(place: int) -> Colour:
    """The colour of a series; those beyond the palette are grey."""
    return SERIES[place] if place < len(SERIES) else MUTED


def variables() -> str:
    """All colours as CSS variables that follow the page's colour scheme."""
    return "".join(f"--{c.name}:light-dark({c.light},{c.dark});" for c in ALL)
