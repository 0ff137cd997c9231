"""Draws the distributions of signals over documents, as histograms with the thresholds of the steps. A signal is a
number that a step computed for each document.

All bars of a kind are one SVG path, because a report may have a hundred charts and must stay below 1 MB.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from pipeline.base.humanize import count, digits, percent, plural
from pipeline.base.svg import Element, tag
from pipeline.passes.tally import BINS, bin_edges, score_bin
from pipeline.report.charts import axis

#: size of a chart; most bars of it
WIDTH, HEIGHT, FOOT = 360, 118, 18
MOST_BARS = 48
#: most signals that the page shows of a dataset (report.json has more)
SHOWN = 48


def sections(document: Mapping[str, Any], scores: list[dict[str, Any]], rows: int = 100) -> dict[str, Any]:
    """Return the arguments of the template `signals.html.j2`: {signals, scores}. `signals` holds, by dataset, charts of
    the signals (numbers per document) whose histograms the report has. `scores` holds the given charts of all other
    signals.

    At most SHOWN signals of a dataset are drawn, and 2 · `rows` in all; signals with thresholds are chosen first.
    """
    reached = {(c["dataset"], c["signal"]): c["reached"] for c in scores}
    signals, with_histogram, room = [], set(), 2 * rows
    for name in document["names"]["datasets"]:
        section = document.get("signals", {}).get(name)
        if section is None or not section["signals"]:
            continue
        every = section["signals"]
        with_histogram |= {(name, row["signal"]) for row in every}
        first = sorted(range(len(every)), key=lambda i: not every[i]["bounds"])[:min(SHOWN, room)]
        drawn = [every[i] for i in sorted(first)]
        room -= len(drawn)
        signals.append({"dataset": name, "read": section["read"],
                        "left_out": section["left_out"] + len(every) - len(drawn),
                        "cards": [_card(row, reached.get((name, row["signal"]), [])) for row in drawn]})
    return {"signals": signals, "scores": [c for c in scores if (c["dataset"], c["signal"]) not in with_histogram]}


def _card(row: Mapping[str, Any], reached: list[tuple[float, float]]) -> dict[str, Any]:
    """Return a signal (a number per document) as the page shows it: its entry in the report, the histogram as SVG, and
    the formatted thresholds. `reached` lists pairs (share, value): this share of the documents has at least this value.
    It is added unchanged. `only` is a text with the approximate value of the signal if all documents fall into one bin
    of the histogram, else None."""
    bins = {*row["bins"]["kept"], *row["bins"]["dropped"]}
    return {**row, "svg": Markup(histogram(row)), "bounds": [_bound(row, b) for b in row["bounds"]], "reached": reached,
            "only": _only(int(min(bins))) if len(bins) == 1 else None}


def _only(number: int) -> str:
    """Return the values of a bin in words. If a bin holds several whole numbers, its lowest one alone would mislead."""
    if not number:
        return "0"
    low, high = _least(number), _most(number)
    text = _number_text(low)
    return f"{text} to {_number_text(high)}" if high - low > 1 else f"about {text}"


def _bound(row: Mapping[str, Any], bound: Mapping[str, Any]) -> dict[str, Any]:
    """Return a threshold as the page shows it, with other values that were tried for it. Each value has the share of
    all documents with the signal that would pass, and the share of the kept documents that would pass."""
    return {**bound, "now": _number_text(bound["value"]), "at": [
        {"value": _number_text(at["value"]), "set": at["value"] == bound["value"],
         "docs": percent(at["docs"] / row["docs"]), "kept": percent(at["kept"] / row["kept"]) if row["kept"] else "–"}
        for at in bound["at"]]}


def histogram(row: Mapping[str, Any]) -> Element:
    """Draw a histogram of a signal (a number per document). Bars of dropped documents stand on top of those of kept
    documents, and a dashed line marks each threshold."""
    kept, dropped = ({int(b): n for b, n in row["bins"][word].items()} for word in ("kept", "dropped"))
    low, high = min([*kept, *dropped]), max([*kept, *dropped])
    marks = [b for b in row["bounds"] if b["value"]]
    for bound in marks:                                        # a threshold near the values is drawn with them
        number = score_bin(bound["value"]) or 0
        if low - 32 <= number <= high + 32:
            low, high = min(low, number), max(high, number)
    # of the empty octaves between 0 and the smallest positive value, only one is drawn
    above = [b for b in (*kept, *dropped, *_numbers(marks)) if b > 0]
    skipped = max(0, min(above, default=0) - BINS - 1) if low <= 0 else 0
    kept, dropped = ({b - skipped if b > 0 else b: n for b, n in bins.items()} for bins in (kept, dropped))
    high -= skipped if high > 0 else 0
    width = 1
    while (high - low) // width >= MOST_BARS:
        width *= 2
    bars = (high - low) // width + 1
    heights = [[sum(bins.get(low + i * width + k, 0) for k in range(width)) for i in range(bars)]
               for bins in (kept, dropped)]
    step = (WIDTH - 10) / bars
    tall = (HEIGHT - FOOT - 8) / max(max(map(sum, zip(*heights, strict=True))), 1)
    base = [HEIGHT - FOOT - n * tall for n in heights[0]]
    used = [int(b) for by in row["bins"].values() for b in by]
    label = (f"{row['signal']}: {plural(row['docs'], 'document')} from {_number_text(_least(min(used)))} to "
             f"{_number_text(_most(max(used)))}, {plural(row['kept'], 'document')} kept")
    out = [tag("title", label),
           tag("path", class_="kept", d=bar_path(heights[0], [float(HEIGHT - FOOT)] * bars, step, tall)),
           tag("path", class_="gone", d=bar_path(heights[1], base, step, tall))]
    for bound in marks:
        place = (_position(bound["value"]) - (skipped if bound["value"] > 0 else 0) - low) / width
        if 0 <= place <= bars:
            x = 5 + place * step
            out.append(tag("line", class_="limit", x1=x, x2=x, y1=2, y2=HEIGHT - FOOT))
    names = [_name(low + i * width, skipped) for i in range(bars)]
    out += [tag("text", name, class_="axis", x=left + room / 2, y=HEIGHT - 4, text_anchor="middle")
            for name, left, room in axis(names, step, WIDTH)]
    return tag("svg", *out, class_="hist", viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=label)


def _number_text(value: float) -> str:
    return count(value) if abs(value) >= 1000 else digits(value)


def _numbers(bounds: Sequence[Mapping[str, Any]]) -> list[int]:
    return [score_bin(b["value"]) or 0 for b in bounds]


def _name(number: int, skipped: int) -> str:
    """Return the text below a bar of a histogram: the smallest value of the bin `number`, the first bin in the bar.
    `skipped` empty bins between 0 and the smallest positive value are not drawn. For the first bins after this gap, the
    text would mislead, and "" is returned."""
    if number <= 0:
        return _number_text(_least(number)) if number else "0"
    return "" if skipped and number <= BINS else _number_text(_least(number + skipped))


def bar_path(values: Sequence[float], feet: Sequence[float], step: float, tall: float) -> str:
    """Return the data of one SVG path with all bars of a histogram. `values` are the counts of documents, and `feet`
    the vertical positions at which the bars begin. `step` is the distance between bars, and `tall` the height per
    document. A bar with documents is at least 1.5 pixels high, so that it can be seen."""
    wide = max(step - 1, 0.8)
    return "".join(f"M{5 + i * step:.1f} {foot:.1f}v{-max(n * tall, 1.5):.1f}h{wide:.1f}v{max(n * tall, 1.5):.1f}z"
                   for i, (n, foot) in enumerate(zip(values, feet, strict=True)) if n)


def _least(number: int) -> float:
    """Return the smallest value that falls into the histogram bin with this number."""
    near, far = bin_edges(number)
    return near if number > 0 else -far if number < 0 else 0.0


def _most(number: int) -> float:
    return _least(number + 1)


def _position(value: float) -> float:
    """Return the position of a value on the axis, in units of bins. The whole part is the number of its bin. The
    fraction is the part of the bin that lies below the value."""
    number = score_bin(value) or 0
    near, far = _least(number), _most(number)
    return number + min(max((value - near) / (far - near), 0.0), 1.0)
