"""A page as one HTML file that needs nothing else: styles, script and plots are in it.

Its content security policy forbids every request, and every script but its own, whatever the names of runs,
layers or settings hold.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from importlib.resources import files

from suptickets.report.chart import drawn
from suptickets.report.colours import variables
from suptickets.report.document import Block, Cell, Listing, Note, Numbers, Page, Plot, Section, Table
from suptickets.report.markup import Html, element, join


def html(page: Page) -> str:
    """The page as the text of a file."""
    style, script = _asset("page.css"), _asset("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", page.title),
        element("style", Html(f":root{{{variables()}}}\n{style}")),
    )
    return f"<!doctype html>\n{element('html', head, _body(page, script), lang='en')}\n"


def _asset(name: str) -> Html:
    return Html((files("suptickets.report") / name).read_text(encoding="utf-8"))


def _body(page: Page, script: Html) -> Html:
    toggle = element(
        "button", "◐", id="theme", type="button", aria_label="Dark or light", title="Dark or light"
    )
    header = element("header", element("h1", page.title), element("p", page.about, class_="about"), toggle)
    main = element("main", _numbers(page.numbers), *(_section(section) for section in page.sections))
    tooltip = element("div", id="tooltip", role="status", hidden=True)
    return element("body", header, main, tooltip, element("script", script))


def _section(section: Section) -> Html:
    text = [element("p", section.text, class_="text")] if section.text else []
    blocks = element("div", *map(_block, _said_once(section.blocks)), class_="blocks")
    title = element("h2", section.title)
    if section.folded:
        hidden = element("details", element("summary", title), *text, blocks)
        return element("section", hidden, class_="folded")
    return element("section", title, *text, blocks)


def _said_once(blocks: Iterable[Block]) -> Iterator[Block]:
    """Keep a text that several plots share only at the first of them: they stand side by side."""
    said = ""
    for block in blocks:
        if isinstance(block, Plot):
            block, said = replace(block, text="" if block.text in said else block.text), said + block.text
        yield block


def _block(block: Block) -> Html:
    match block:
        case Table():
            return _table(block)
        case Plot():
            return _plot(block)
        case Listing():
            return _listing(block)
        case Note():
            return element("p", str(block), class_="note")
        case _:
            return _numbers(block)


def _numbers(numbers: Numbers) -> Html:
    return element(
        "dl",
        *(
            element("div", element("dt", n.label), element("dd", n.text, class_="big"), element("dd", n.note))
            for n in numbers
        ),
        class_="numbers",
    )


def _plot(plot: Plot) -> Html:
    with drawn(plot) as chart:
        picture = Html(chart.inline(plot))
    text = [element("span", plot.text)] if plot.text else []
    caption = element("figcaption", element("strong", plot.title), *text)
    return element("figure", caption, picture, class_="plot", id=plot.name)


def _listing(listing: Listing) -> Html:
    lines = element("pre", element("code", "\n".join(listing.lines)))
    copy = element("button", "Copy", type="button", class_="copy")
    return element("div", element("h3", listing.title), copy, lines, class_="listing")


def _table(table: Table) -> Html:
    head = element("tr", *(_head(table, place) for place in range(len(table.header))))
    body = [
        element("tr", *(_cell(cell, table.numeric(n)) for n, cell in enumerate(row))) for row in table.rows
    ]
    grid = element("table", element("thead", head), element("tbody", *body), id=f"table-{table.name}")
    hint = element("p", "Scroll sideways: there are more columns →", class_="hint")
    scroll = element("div", grid, class_="scroll", tabindex="0")
    if table.folded:
        title = f"{table.title} ({len(table.rows)} rows)"
        return element("details", element("summary", title), hint, scroll, class_="table")
    return element("div", element("h3", table.title), hint, scroll, class_="table")


def _head(table: Table, place: int) -> Html:
    button = element("button", table.header[place], type="button")
    return element("th", button, scope="col", class_="number" if table.numeric(place) else None)


def _cell(cell: Cell, numeric: bool) -> Html:
    value = None if cell.value is None else repr(cell.value)
    text = element("strong", cell.text) if cell.strong else join([cell.text])
    note = [element("small", _strong(cell))] if cell.note else []
    return element("td", text, *note, data_value=value, class_="number" if numeric else None)


def _strong(cell: Cell) -> Html:
    return element("strong", cell.note) if cell.note_strong else join([cell.note])
