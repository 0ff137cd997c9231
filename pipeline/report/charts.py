"""Numbers for people, and small SVG charts. Colours come from the page's CSS (classes c0…c9), for light and dark both.

Every chart carries its numbers as text too: a `title` on each mark, a label for screen readers.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import pairwise

#: number of categorical colours the style sheet defines
COLORS = 10
#: width of a digit of the axis' type (11 px) in the widest of its fonts, and the room between two labels
DIGIT, SPACE = 7.2, 8


def digits(value: float) -> str:
    """Three significant digits, never as 1e+03: 0.012, 1.23, 45.6, 789, 1,234."""
    return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:.3g}"


def number(n: float) -> str:
    """1,234 · 12.3k · 4.56M."""
    for unit, one, least in (("T", 1e12, 1e12), ("B", 1e9, 1e9), ("M", 1e6, 999.5e3), ("k", 1e3, 1e4)):
        if abs(n) >= least:
            return digits(n / one) + unit
    return f"{n:,.0f}" if float(n).is_integer() or abs(n) >= 100 else digits(n)


def size(n: float) -> str:
    """Bytes in decimal units: 512 B, 12.3 kB, 4.56 GB."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(n) < 999.5 or unit == "TB":
            return f"{digits(n)} {unit}"
        n /= 1000
    raise AssertionError("unreachable")


def seconds(s: float) -> str:
    """0 s · 12 ms · 3.4 s · 56 s · 7.8 min · 9.1 h."""
    if s < 1:
        return "0 s" if s == 0 else f"{s * 1000:.0f} ms" if s >= 0.0005 else "<1 ms"
    if s < 120:
        return f"{s:.1f} s" if s < 9.95 else f"{s:.0f} s"
    return f"{s / 60:.1f} min" if s < 7200 else f"{s / 3600:,.1f} h"


def percent(share: float) -> str:
    """0% · <0.01% · 0.04% · 12.3% · 99.98% · >99.99% · 100%: never 0% or 100% for what is not."""
    if share in (0, 1):
        return f"{share:.0%}"
    if 0 < share < 0.0001:
        return "<0.01%"
    if 0.9999 < share < 1:
        return ">99.99%"
    return f"{share:.2%}" if share < 0.0095 or 0.9995 <= share < 1 else f"{share:.1%}"


def plural(n: int, one: str, more: str = "") -> str:
    """'1 document', '1,234 documents', '2 copies'."""
    return f"{n:,} {one if n == 1 else more or one + 's'}"


def stacked(parts: Sequence[tuple[str, float, int]], *, height: int = 22, label: str = "") -> str:
    """One horizontal bar of shares: (name, value, colour). Widths are percentages, so it fits any page; a name stands
    inside its part where it fits on a phone."""
    total = sum(v for _, v, _ in parts) or 1.0
    x, out = 0.0, []
    for name, value, color in parts:
        width = 100 * value / total
        if width > 0:
            out.append(f'<rect class="c{color % COLORS}" x="{x:.3f}%" y="0" width="{width:.3f}%" height="{height}">'
                       f"<title>{escape(name)}: {number(value)} ({percent(value / total)})</title></rect>")
            if width > 2.1 * len(name) + 2:
                out.append(f'<text class="on" x="{x + width / 2:.3f}%" y="{height / 2 + 4}" text-anchor="middle">'
                           f"{escape(name)}</text>")
        x += width
    said = ", ".join(f"{name} {percent(value / total)}" for name, value, _ in parts)
    return (f'<svg class="bar" width="100%" height="{height}" role="img" aria-label="{escape(label)}: {escape(said)}">'
            f"{''.join(out)}</svg>")


def meter(share: float, color: int = 0) -> str:
    """A thin bar for a table cell: `share` in [0, 1] of the cell's width. The cell beside it says the number."""
    width = max(100 * min(share, 1.0), 0.6)
    filled = f'<rect class="c{color % COLORS}" width="{width:.2f}%" height="8" rx="2"/>' if share > 0 else ""
    return ('<svg class="meter" width="100%" height="8" aria-hidden="true">'
            f'<rect class="track" width="100%" height="8" rx="2"/>{filled}</svg>')


def bars(values: Sequence[tuple[str, int, str]], color: int, *, label: str) -> str:
    """Upright bars: (label under it, value, what it says in full); so many labels are written as fit side by side."""
    width, height, gap = 360, 110, 2
    step = (width - 10) / max(1, len(values))
    top = max((v for _, v, _ in values), default=0)
    written = axis([name for name, _, _ in values], step, width)
    out = []
    for i, (_, value, said) in enumerate(values):
        tall = max((height - 26) * value / top, 1.5) if value else 0
        if value:
            out.append(f'<rect class="c{color % COLORS}" x="{5 + i * step:.1f}" y="{height - 18 - tall:.1f}" '
                       f'width="{max(step - gap, 1):.1f}" height="{tall:.1f}" rx="1.5">'
                       f"<title>{escape(said)}</title></rect>")
    out += [f'<text class="axis" x="{left + room / 2:.1f}" y="{height - 4}" text-anchor="middle">{escape(name)}</text>'
            for name, left, room in written]
    return (f'<svg class="hist" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}">{"".join(out)}'
            f"</svg>")


def axis(names: Sequence[str], step: float, width: float) -> list[tuple[str, float, float]]:
    """(label, left edge, width) of every n-th label, centred under its bar as far as the picture goes. n is the
    smallest for which no two labels touch."""
    boxes = []
    for i, name in enumerate(names):
        room = DIGIT * len(name)
        boxes.append((name, min(max(5 + (i + 0.5) * step - room / 2, 0.0), max(width - room, 0.0)), room))
    for every in range(1, len(boxes)):
        chosen = boxes[::every]
        if all(left + room + SPACE <= after for (_, left, room), (_, after, _) in pairwise(chosen)):
            return chosen
    return boxes[:1]


def lengths(bins: dict[str, int], color: int, *, low: int, high: int, label: str) -> str:
    """Documents by log2 of their characters, bins `low`…`high`."""
    values = [(number(2 ** b), bins.get(str(b), 0),
               f"{number(2 ** b)} to {number(2 ** (b + 1))} characters: {plural(bins.get(str(b), 0), 'document')}")
              for b in range(low, high + 1)]
    return bars(values, color, label=label)


def similarities(bins: dict[str, int], color: int, *, of: int, label: str) -> str:
    """Removed documents by similarity to the kept one, from the lowest bin used to 1; `of` bins over [0, 1]."""
    low = min(map(int, bins), default=of - 1)
    values = [(f"{b / of:.2f}", bins.get(str(b), 0),
               f"similarity {b / of:.2f} to {(b + 1) / of:.2f}: {plural(bins.get(str(b), 0), 'document')}")
              for b in range(low, of)]
    return bars(values, color, label=label)


def scores(values: Sequence[tuple[float, float, int]], color: int, *, label: str) -> str:
    """Documents by score: (from, to, documents) of each bar, in order."""
    named = [(digits(low) if low else "0", docs, f"{digits(low)} to {digits(high)}: {plural(docs, 'document')}")
             for low, high, docs in values]
    return bars(named, color, label=label)
