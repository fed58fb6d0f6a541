"""HTML by construction: whatever is not made here is text, and is escaped."""

from __future__ import annotations

from html import escape

VOID = {"meta", "br"}


class Html(str):
    """Text that is markup already."""


def element(tag: str, *content: str, **attributes: str | bool | None) -> Html:
    """<tag name="...">content</tag>; `class_` is class, `data_value` is data-value, True has no value."""
    named = "".join(
        _attribute(name.rstrip("_").replace("_", "-"), value) for name, value in attributes.items()
    )
    start = f"<{tag}{named}>"
    return Html(start if tag in VOID else f"{start}{join(content)}</{tag}>")


def join(parts: object) -> Html:
    """One piece of markup from several pieces of markup or text."""
    assert isinstance(parts, list | tuple)
    return Html("".join(part if isinstance(part, Html) else escape(part) for part in parts))


def _attribute(name: str, value: str | bool | None) -> str:
    if value is None or value is False:
        return ""
    return f" {name}" if value is True else f' {name}="{escape(value)}"'
