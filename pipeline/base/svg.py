"""Writes SVG elements as plain strings. All SVG of Tokenmill is made by this module, so that text and attributes are
always escaped and coordinates rounded.

`tag("text", "a & b", class_="axis", x=3.14159, text_anchor="end")` is

    <text class="axis" x="3.1" text-anchor="end">a &amp; b</text>
"""

from __future__ import annotations

from html import escape


class Element(str):
    """The text of finished SVG elements. `tag` does not escape it again."""

    __slots__ = ()


def tag(name: str, *content: str, **attributes: str | float) -> Element:
    """Returns an SVG element. `content` may hold elements and plain text; plain text is escaped. In the names of
    attributes, an underscore becomes a hyphen, and an underscore at the end is dropped (`class_`). Floats are written
    with one decimal."""
    attribute_text = "".join(f' {key.rstrip("_").replace("_", "-")}="{_value(value)}"'
                             for key, value in attributes.items())
    inner = "".join(part if isinstance(part, Element) else escape(part, quote=False) for part in content)
    return Element(f"<{name}{attribute_text}>{inner}</{name}>" if content else f"<{name}{attribute_text}/>")


def polyline(points: list[tuple[float, float]], **attributes: str | float) -> Element:
    return tag("polyline", **attributes, points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points))


def _value(value: str | float) -> str:
    return f"{value:.1f}" if isinstance(value, float) else escape(str(value))
