"""matplotlib's SVG as a part of a page."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from xml.etree import ElementTree
from xml.etree.ElementTree import Element
from zlib import crc32

from suptickets.report.colours import ALL

VARIABLES = {colour.light: f"var(--{colour.name})" for colour in ALL}


def inline(text: str, name: str, tips: Mapping[str, Sequence[str]]) -> str:
    """The picture without a font, size or colours of its own, its identifiers made unique by `name`.

    `tips` holds, for a group's identifier, a tooltip for each thing that the group draws.
    """
    root = ElementTree.fromstring(text)
    for element in root.iter():
        element.tag = _local(element.tag)
        element.attrib = {_local(key): value for key, value in element.attrib.items()}
    for part in (root.find("metadata"), root.find("defs")):  # the first definitions are a style for all pages
        if part is not None:
            root.remove(part)
    for group in root.iter("g"):
        for element, tip in zip(_things(group), tips.get(group.get("id", ""), ()), strict=False):
            element.set("data-tip", tip)
        _share_style(group)
    short = f"p{crc32(name.encode()):x}"
    used = set(re.findall(r"(?:url\(|href=\")#([\w-]+)", text))
    for element in root.iter():
        _clean(element, short, used)
    for size in ("width", "height"):
        root.attrib.pop(size, None)
    return ElementTree.tostring(root, encoding="unicode")


def _rounded(found: re.Match[str]) -> str:
    """A number rounded to a tenth of a pixel."""
    return f"{float(found[0]):.1f}".removesuffix(".0")


def _local(name: str) -> str:
    return name.rpartition("}")[2]


def _things(group: Element) -> list[Element]:
    """What a group draws: a marker for each point, or one path."""
    return list(group.iter("use")) or list(group.iter("path"))


def _share_style(group: Element) -> None:
    """Say only once what all points of a group look like."""
    points = [child for child in group if child.tag == "use"]
    styles = {point.get("style") for point in points}
    style = styles.pop() if len(styles) == 1 and "style" not in group.attrib else None
    if style is not None:
        group.set("style", style)
        for point in points:
            del point.attrib["style"]


def _clean(element: Element, name: str, used: set[str]) -> None:
    attributes, identifier = element.attrib, element.attrib.pop("id", None)
    element.tail = None
    element.text = (element.text or "").strip() or None
    if identifier in used:
        attributes["id"] = f"{name}-{identifier}"
    for key in ("clip-path", "href"):
        if "#" in attributes.get(key, ""):
            attributes[key] = attributes[key].replace("#", f"#{name}-", 1)
    for key in ("d", "x", "y"):
        if key in attributes:
            attributes[key] = re.sub(r"\d+\.\d+", _rounded, " ".join(attributes[key].split()))
    if "style" in attributes:
        style = re.sub(r"font-family: [^;]+;?", "", attributes["style"])
        attributes["style"] = re.sub(r"#[0-9a-f]{6}", lambda c: VARIABLES.get(c[0], c[0]), style)
    if attributes.get("transform", "").startswith("rotate(-0 "):
        del attributes["transform"]
