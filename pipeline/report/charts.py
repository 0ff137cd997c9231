"""Draws the small SVG charts of the report. Their colours come from the page's CSS (classes c0…c9), which has a light
and a dark mode.

Most charts also give their numbers as text: each bar has a `title`, and each chart has a label for screen readers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from pipeline.base.humanize import count, digits, percent, plural
from pipeline.base.svg import Element, tag

#: number of colours in the style sheet that distinguish categories
COLORS = 10
#: in pixels: the width of a digit on the axis (11 px text, in the widest of the possible fonts), and the least space
#: between two labels
DIGIT, SPACE = 7.2, 8


def stacked(parts: Sequence[tuple[str, float, int]], *, height: int = 22, label: str = "") -> Element:
    """Draw a horizontal bar, divided among `parts` in proportion to their values. Each part is (name, value, number of
    its colour). Widths are percentages, so the bar fits any page. A name is written inside its part if the name fits on
    a phone's screen."""
    total = sum(v for _, v, _ in parts) or 1.0
    x, out = 0.0, []
    for name, value, color in parts:
        width = 100 * value / total
        if width > 0:
            title = tag("title", f"{name}: {count(value)} ({percent(value / total)})")
            out.append(tag("rect", title, class_=f"c{color % COLORS}", x=f"{x:.3f}%", y=0, width=f"{width:.3f}%",
                           height=height))
            if width > 2.1 * len(name) + 2:
                out.append(tag("text", name, class_="on", x=f"{x + width / 2:.3f}%", y=height / 2 + 4,
                               text_anchor="middle"))
        x += width
    shares = ", ".join(f"{name} {percent(value / total)}" for name, value, _ in parts)
    return tag("svg", *out, class_="bar", width="100%", height=height, role="img", aria_label=f"{label}: {shares}")


def meter(share: float, color: int = 0) -> Element:
    """Draw a thin bar for a table cell. The bar fills the fraction `share` (0 to 1) of the cell's width. It has no
    text, because the neighbouring cell states the number."""
    width = max(100 * min(share, 1.0), 0.6)
    bars = [tag("rect", class_="track", width="100%", height=8, rx=2)]
    if share > 0:
        bars.append(tag("rect", class_=f"c{color % COLORS}", width=f"{width:.2f}%", height=8, rx=2))
    return tag("svg", *bars, class_="meter", width="100%", height=8, aria_hidden="true")


def bars(values: Sequence[tuple[str, int, str]], color: int, *, label: str) -> Element:
    """Draw a chart of vertical bars in the colour number `color`. Each bar is (label below the bar, value, text of its
    title). Labels that would not fit are left out. `label` is the text for screen readers."""
    width, height, gap = 360, 110, 2
    step = (width - 10) / max(1, len(values))
    top = max((v for _, v, _ in values), default=0)
    written = axis([name for name, _, _ in values], step, width)
    out = []
    for i, (_, value, title) in enumerate(values):
        if value:
            tall = max((height - 26) * value / top, 1.5)
            out.append(tag("rect", tag("title", title), class_=f"c{color % COLORS}", x=5 + i * step,
                           y=height - 18 - tall, width=max(step - gap, 1.0), height=tall, rx=1.5))
    out += [tag("text", name, class_="axis", x=left + room / 2, y=height - 4, text_anchor="middle")
            for name, left, room in written]
    return tag("svg", *out, class_="hist", viewBox=f"0 0 {width} {height}", role="img", aria_label=label)


def axis(names: Sequence[str], step: float, width: float) -> list[tuple[str, float, float]]:
    """Choose which of the labels `names` of a bar chart are written: every n-th, with the smallest n for which no two
    labels touch. Returns (label, left edge, width) for each of them. A label is centred under its bar, but moved if it
    would leave the picture. `step` is the distance between bars, and `width` the width of the picture."""
    boxes = []
    for i, name in enumerate(names):
        room = DIGIT * len(name)
        boxes.append((name, min(max(5 + (i + 0.5) * step - room / 2, 0.0), max(width - room, 0.0)), room))
    for every in range(1, len(boxes)):
        chosen = boxes[::every]
        if all(left + room + SPACE <= after for (_, left, room), (_, after, _) in pairwise(chosen)):
            return chosen
    return boxes[:1]


def lengths(bins: dict[str, int], color: int, *, low: int, high: int, label: str) -> Element:
    """Draw a chart of the lengths of documents. Bin b counts documents with 2^b to 2^(b+1) characters; the bins from
    `low` to `high` are shown."""
    values = [(count(2 ** b), bins.get(str(b), 0),
               f"{count(2 ** b)} to {count(2 ** (b + 1))} characters: {plural(bins.get(str(b), 0), 'document')}")
              for b in range(low, high + 1)]
    return bars(values, color, label=label)


def similarities(bins: dict[str, int], color: int, *, of: int, label: str) -> Element:
    """Draw a chart of removed documents by their similarity to the document that was kept instead. `of` is the number
    of bins over [0, 1]. The chart begins at the lowest bin with documents."""
    low = min(map(int, bins), default=of - 1)
    values = [(f"{b / of:.2f}", bins.get(str(b), 0),
               f"similarity {b / of:.2f} to {(b + 1) / of:.2f}: {plural(bins.get(str(b), 0), 'document')}")
              for b in range(low, of)]
    return bars(values, color, label=label)


def scores(values: Sequence[tuple[float, float, int]], color: int, *, label: str) -> Element:
    """Draw a chart of documents by score. Each value is (lowest score, highest score, documents), in ascending
    order."""
    bar_values = [(digits(low) if low else "0", docs, f"{digits(low)} to {digits(high)}: {plural(docs, 'document')}")
             for low, high, docs in values]
    return bars(bar_values, color, label=label)
