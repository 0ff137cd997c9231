"""Writes SVG elements as plain strings. All our SVG is made here, so that text and attributes are always escaped and
coordinates rounded.

`tag("text", "a & b", class_="axis", x=3.14159, text_anchor="end")` is

    <text class="axis" x="3.1" text-anchor="end">a &amp; b</text>
"""

from __future__ import annotations

from html import escape


class Element(str):
    """Text of finished elements, which `tag` does not escape again."""

    __slots__ = ()


def tag(name: str, *content: str, **attributes: str | float) -> Element:
    """Return an element. `content`: elements, and plain text, which is escaped. In attribute names an underscore
    becomes a hyphen, and a trailing one is dropped (`class_`). Floats are written with one decimal."""
    attribute_text = "".join(f' {key.rstrip("_").replace("_", "-")}="{_value(value)}"'
                             for key, value in attributes.items())
    inner = "".join(part if isinstance(part, Element) else escape(part, quote=False) for part in content)
    return Element(f"<{name}{attribute_text}>{inner}</{name}>" if content else f"<{name}{attribute_text}/>")


def polyline(points: list[tuple[float, float]], **attributes: str | float) -> Element:
    return tag("polyline", **attributes, points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points))


def _value(value: str | float) -> str:
    return f"{value:.1f}" if isinstance(value, float) else escape(str(value))
