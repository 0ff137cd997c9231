"""Small SVG charts for the report. Colours come from the page's CSS (classes c0…c7), so light and dark both work."""

from __future__ import annotations

from html import escape

#: number of categorical colours the style sheet defines
COLORS = 8


def number(n: float) -> str:
    """1,234 · 12.3k · 4.56M: for people."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e4)):
        if abs(n) >= size:
            value = n / (1e3 if unit == "k" else size)
            return f"{value:.3g}{unit}" if abs(value) < 1000 else f"{value:,.0f}{unit}"
    return f"{n:,.0f}" if float(n).is_integer() or abs(n) >= 100 else f"{n:.3g}"


def size(n: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(n) < 1000 or unit == "TB":
            return f"{n:.3g} {unit}" if abs(n) < 1000 else f"{n:,.0f} {unit}"
        n /= 1000
    raise AssertionError("unreachable")


def stacked(parts: list[tuple[str, float, int]], *, height: int = 22, label: str = "") -> str:
    """One horizontal bar of shares: (name, value, colour). Widths are percentages, so it fits any page."""
    total = sum(v for _, v, _ in parts) or 1.0
    x, out = 0.0, []
    for name, value, color in parts:
        width = 100 * value / total
        if width > 0:
            out.append(f'<rect class="c{color % COLORS}" x="{x:.3f}%" y="0" width="{width:.3f}%" height="{height}">'
                       f"<title>{escape(name)}: {number(value)} ({value / total:.1%})</title></rect>")
            if width > 9:
                out.append(f'<text class="on" x="{x + width / 2:.3f}%" y="{height / 2 + 4}" text-anchor="middle">'
                           f"{escape(name)}</text>")
        x += width
    return (f'<svg class="bar" width="100%" height="{height}" role="img" aria-label="{escape(label)}">'
            f"{''.join(out)}</svg>")


def meter(share: float, color: int = 0) -> str:
    """A thin bar for a table cell: `share` in [0, 1] of the cell's width."""
    return ('<svg class="meter" width="100%" height="8" aria-hidden="true">'
            '<rect class="track" width="100%" height="8" rx="2"/>'
            f'<rect class="c{color % COLORS}" width="{100 * min(max(share, 0.0), 1.0):.2f}%" height="8" rx="2"/></svg>')


def histogram(bins: dict[str, int], color: int, *, low: int, high: int, top: int) -> str:
    """Documents by log2 of their characters, bins `low`…`high`, bars scaled to `top` documents."""
    width, height, gap = 360, 110, 2
    n = high - low + 1
    step = (width - 10) / n
    out = []
    for i in range(n):
        value = bins.get(str(low + i), 0)
        tall = (height - 26) * value / top if top else 0
        if value:
            tall = max(tall, 1.5)
        x, y = 5 + i * step, height - 18 - tall
        said = f"{number(2 ** (low + i))}–{number(2 ** (low + i + 1))} characters: {value:,} documents"
        out.append(f'<rect class="c{color % COLORS}" x="{x:.1f}" y="{y:.1f}" width="{max(step - gap, 1):.1f}" '
                   f'height="{tall:.1f}" rx="1.5"><title>{said}</title></rect>')
    for i in range(0, n, max(1, n // 5)):
        out.append(f'<text class="axis" x="{5 + (i + 0.5) * step:.1f}" y="{height - 4}" text-anchor="middle">'
                   f"{number(2 ** (low + i))}</text>")
    return f'<svg class="hist" viewBox="0 0 {width} {height}" role="img">{"".join(out)}</svg>'
