"""Draws the scores of a training's checkpoints on benchmark tasks over tokens, as one SVG file: a chart for each form
of each task (the first MOST of them, by name), with standard errors, and with chance as a dashed line."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.base.humanize import count
from pipeline.base.svg import Element, polyline, tag
from trainer.base.files import replace
from trainer.observe.plot import STYLE, WIDTH, label, pick, ticks

#: measures that are drawn → class of their line; the other norms of the cloze form lie close to these
LINES = {"bpb": "loss", "cf.raw": "raw", "cf.per_char": "loss", "cf.per_token": "rate", "cf.prior": "held",
         "mcf": "loss", "pairs": "loss", "word": "loss", "fg": "loss", "code": "loss"}
#: size of a chart, the room around its axes, and the largest number of charts
CHART_WIDTH, CHART_HEIGHT, LEFT, TOP, BOTTOM, MOST = WIDTH // 2, 196, 58, 44, 28, 40


def write_task_plot(out: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write `out`/tasks.svg, the plot of scores on benchmark tasks. `rows` are the lines of tasks.jsonl."""
    replace(out / "tasks.svg", draw(rows))


def draw(rows: Sequence[Mapping[str, Any]]) -> str:
    charts: dict[tuple[str, str], dict[str, list[Mapping[str, Any]]]] = {}
    for row in rows:
        if row["measure"] in LINES:
            charts.setdefault((row["task"], row["form"]), {}).setdefault(row["measure"], []).append(row)
    shown = sorted(charts.items())[:MOST]
    height = CHART_HEIGHT * max(1, math.ceil(len(shown) / 2))
    parts = [tag("rect", class_="bg", width=WIDTH, height=height)]
    for i, ((task, form), measures) in enumerate(shown):
        parts += chart(f"{task}: {'bits per byte, less is better' if form == 'bpb' else form}", measures,
                       i % 2 * CHART_WIDTH, i // 2 * CHART_HEIGHT)
    return tag("svg", tag("style", Element(STYLE)), *(Element(f"\n{part}") for part in parts), Element("\n"),
               xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {WIDTH} {height}", width=WIDTH, height=height,
               role="img", aria_label="Scores of checkpoints on tasks over tokens") + "\n"


def chart(title: str, measures: Mapping[str, Sequence[Mapping[str, Any]]], left: float, top: float) -> list[Element]:
    """Draw a chart of one form of a task, with a curve for each of its measures. `left` and `top` are the position of
    the chart's upper left corner."""
    everything = [row for rows in measures.values() for row in rows]
    most = max(row["tokens"] for row in everything) or 1
    chance = next((row["chance"] for row in everything if row.get("chance") is not None), None)
    edges = [row["value"] + sign * (row["stderr"] or 0.0) for row in everything for sign in (-1, 1)]
    low, high = min([*edges, *([chance] if chance is not None else [])]), max([*edges, chance or -math.inf])
    low, high = low - 0.05 * (high - low or 0.1), high + 0.05 * (high - low or 0.1)
    x0, x1, y0, y1 = left + LEFT, left + CHART_WIDTH - 14, top + TOP, top + CHART_HEIGHT - BOTTOM

    def x(tokens: float) -> float:
        return x0 + tokens / most * (x1 - x0)

    def y(value: float) -> float:
        return y0 + (high - value) / (high - low) * (y1 - y0)

    parts = [label("title", left + 12, top + 18, title)]
    for value in ticks(low, high, 6):
        parts += [tag("line", class_="grid", x1=x0, x2=x1, y1=y(value), y2=y(value)),
                  label("axis", x0 - 6, y(value) + 4, f"{value:g}", text_anchor="end")]
    for value in ticks(0, most, 4):
        parts.append(label("axis", x(value), y1 + 15, count(value), text_anchor="middle"))
    if chance is not None:
        parts.append(tag("line", tag("title", f"chance: {chance:.4f}"), class_="entropy", x1=x0, x2=x1, y1=y(chance),
                         y2=y(chance)))
    for i, (name, rows) in enumerate(measures.items()):
        kind, points = LINES[name], pick(sorted(rows, key=lambda row: row["step"]))
        parts.append(polyline([(x(row["tokens"]), y(row["value"])) for row in points], class_=kind))
        for row in points:
            error = row["stderr"] or 0.0
            parts.append(tag("line", tag("title", f"step {row['step']:,}: {name} {row['value']:.4f} ± {error:.4f}"),
                             class_=kind, x1=x(row["tokens"]), x2=x(row["tokens"]), y1=y(row["value"] - error),
                             y2=y(row["value"] + error)))
        if len(measures) > 1:
            at = x0 + i * (x1 - x0) / len(measures)
            parts += [tag("line", class_=kind, x1=at, x2=at + 16, y1=top + 31.0, y2=top + 31.0),
                      label("axis", at + 20, top + 35, name.partition(".")[2])]
    return parts
