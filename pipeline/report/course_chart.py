"""Draws the course of a training over its tokens. At the top are the losses and the learning rate, and below them the
mixture of token streams as areas."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pipeline.base.humanize import count, digits, percent
from pipeline.base.svg import Element, polyline, tag
from pipeline.report.charts import COLORS

WIDTH, LEFT, RIGHT, TOP = 880, 52, 14, 22
#: heights of the panels, and the room between them
LOSS, RATE, AREA, GAP = 150, 46, 150, 26
#: most streams with an area of their own; the others are combined
STREAMS = 9
OTHERS = COLORS - 1
#: least number of evaluations for which the chart draws the held-out losses of streams as lines
EVALUATIONS = 8


def draw(course: Mapping[str, Any], losses: Mapping[str, Any] | None, color: Mapping[str, int]) -> Element:
    """Draw the course of a training as SVG: losses, learning rate and mixture. `course` and `losses` are the sections
    of report.json with these names. `color` maps each token stream to the number of its colour."""
    total = course["at"][-1]
    panels: list[Element] = []
    y = TOP

    def x(tokens: float) -> float:
        return LEFT + min(tokens / total, 1.0) * (WIDTH - LEFT - RIGHT)

    if losses:
        panels += _losses(losses, lines(course, losses)[0], x, y, color)
        y += LOSS + GAP
        if any("lr" in p for p in losses["steps"]):
            panels += _rate(losses["steps"], x, y)
            y += RATE + GAP
    areas, label = _areas(course, x, y, color)
    bottom = y + AREA
    bands = [tag("rect", tag("title", f"phase {p['name']}: {count(p['to'] - p['from'])} tokens"), class_="t-phase",
                 x=x(p["from"]), y=TOP - 18, width=x(p["to"]) - x(p["from"]), height=bottom - TOP + 18)
             for i, p in enumerate(course["phases"]) if i % 2]
    names = [tag("text", p["name"][:24], class_="t-name", x=(x(p["from"]) + x(p["to"])) / 2, y=TOP - 6,
                 text_anchor="middle")
             for p in course["phases"] if x(p["to"]) - x(p["from"]) > 7 * min(len(p["name"]), 24)]
    ticks = [tag("text", count(total * i / 4), class_="axis", x=x(total * i / 4), y=bottom + 16,
                 text_anchor="end" if i == 4 else "middle") for i in range(5)]
    return tag("svg", *bands, *panels, *areas, *names, *ticks,
               tag("text", "tokens", class_="axis", x=LEFT, y=bottom + 30, text_anchor="middle"), role="img",
               class_="course", viewBox=f"0 0 {WIDTH} {bottom + 36}", aria_label=label)


def _losses(losses: Mapping[str, Any], names: Sequence[str], x: Callable[[float], float], top: float,
            color: Mapping[str, int]) -> list[Element]:
    """Draw the loss of the steps, the held-out loss, and the loss of each token stream in `names`. The line of a stream
    is its held-out loss if there are at least EVALUATIONS evaluations, and otherwise its loss in the steps."""
    steps, evals, points = losses["steps"], losses["evals"], _points(losses)
    values = [p["loss"] for p in (*steps, *evals)] + [v for p in points for v in p["streams"].values()]
    low, high = min(values), max(values)
    high += (high == low) or 0.04 * (high - low)

    def y(loss: float) -> float:
        return top + (high - loss) / (high - low) * LOSS

    out = [tag("text", "loss", class_="axis", x=LEFT - 6, y=top - 9, text_anchor="end")]
    for i in range(4):
        value = low + (high - low) * i / 3
        out += [tag("line", class_="t-grid", x1=LEFT, x2=WIDTH - RIGHT, y1=y(value), y2=y(value)),
                tag("text", digits(value), class_="axis", x=LEFT - 6, y=y(value) + 4, text_anchor="end")]
    if steps:
        out.append(polyline([(x(p["tokens"]), y(p["loss"])) for p in steps], class_="t-raw"))
    for name in names:
        line = [(x(p["tokens"]), y(p["streams"][name])) for p in points if name in p["streams"]]
        if len(line) > 1:
            out.append(tag("g", tag("title", f"loss of {name}"),
                           polyline(line, class_=f"course-line l{color.get(name, OTHERS)}")))
    if evals:
        line = [(x(p["tokens"]), y(p["loss"])) for p in evals]
        out += [polyline(line, class_="t-held"),
                *(tag("circle", tag("title", f"held-out loss {digits(p['loss'])} after {count(p['tokens'])} tokens"),
                      class_="t-dot", cx=at, cy=place, r=2.5) for p, (at, place) in zip(evals, line, strict=True))]
    return out


def _rate(steps: Sequence[Mapping[str, Any]], x: Callable[[float], float], top: float) -> list[Element]:
    rates = [(p["tokens"], p["lr"]) for p in steps if "lr" in p]
    most = max(rate for _, rate in rates) or 1.0
    line = [(x(tokens), top + RATE * (1 - rate / most)) for tokens, rate in rates]
    return [tag("text", f"{most:.2g}", class_="axis", x=LEFT - 6, y=top + 8, text_anchor="end"),
            tag("text", "rate", class_="axis", x=LEFT - 6, y=top + RATE, text_anchor="end"),
            polyline(line, class_="t-rate")]


def _areas(course: Mapping[str, Any], x: Callable[[float], float], top: float,
           color: Mapping[str, int]) -> tuple[list[Element], str]:
    """Draw the realised mixture as areas that fill a panel, one for each token stream, and the planned borders between
    the areas as dashed lines. `x` maps tokens to a horizontal position, and `top` is the upper edge of the panel.
    Returns the elements and a label for screen readers."""
    ends = course["at"]
    streams = course["streams"]
    totals = {name: sum(s["realised"]) for name, s in streams.items()}
    ordered = _by_tokens(course)
    groups = [(n, [n], color.get(n, OTHERS)) for n in ordered[:STREAMS]]
    if others := ordered[STREAMS:]:
        groups.append((f"{len(others)} others", others, OTHERS))
    stretches = range(len(ends) - 1)

    def shares(kind: str, members: Sequence[str]) -> list[float]:
        return [sum(streams[n][kind][i] for n in members) / (sum(s[kind][i] for s in streams.values()) or 1.0)
                for i in stretches]

    out, dashed = [], []
    below, planned = [0.0] * len(stretches), [0.0] * len(stretches)
    all_tokens = sum(totals.values()) or 1
    for number, (name, members, shade) in enumerate(groups):
        above = [a + b for a, b in zip(below, shares("realised", members), strict=True)]
        upper, lower = (_steps(edge, ends, x, top) for edge in (above, below))
        title = f"{name}: {percent(sum(totals[n] for n in members) / all_tokens)} of the tokens"
        out.append(tag("path", tag("title", title),
                       class_=f"c{shade}", d="M" + "L".join([*upper, *lower[::-1]]) + "Z"))
        planned = [a + b for a, b in zip(planned, shares("planned", members), strict=True)]
        if number < len(groups) - 1:
            dashed.append(tag("path", class_="course-plan", d="M" + "L".join(_steps(planned, ends, x, top))))
        below = above
    marks = [tag("text", text, class_="axis", x=LEFT - 6, y=top + AREA * (1 - share) + 4, text_anchor="end")
             for text, share in (("100%", 1.0), ("50%", 0.5), ("0%", 0.0))]
    words = ", ".join(f"{n} {percent(sum(totals[m] for m in members) / all_tokens)}" for n, members, _ in groups)
    return [*out, *dashed, *marks], f"Mixture over {count(ends[-1])} tokens, realised and planned: {words}"


def _steps(edge: Sequence[float], ends: Sequence[float], x: Callable[[float], float], top: float) -> list[str]:
    """Return the corners of a stepped line as text for an SVG path. The line is level in each stretch of the training:
    `edge` is its height in each stretch (0 to 1), and `ends` are the boundaries of the stretches in tokens. `x` maps
    tokens to a horizontal position, and `top` is the upper edge of the panel."""
    return [f"{x(tokens):.1f} {top + AREA * (1 - min(share, 1.0)):.1f}" for i, share in enumerate(edge)
            for tokens in (ends[i], ends[i + 1])]


def keys(course: Mapping[str, Any], color: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return the legend of the chart: a pair (token stream, number of its colour) for each stream."""
    ordered = _by_tokens(course)
    return [*((n, color.get(n, OTHERS)) for n in ordered[:STREAMS]),
            *([(f"{len(ordered) - STREAMS} others", OTHERS)] if len(ordered) > STREAMS else [])]


def lines(course: Mapping[str, Any], losses: Mapping[str, Any]) -> tuple[list[str], int]:
    """Return the token streams whose losses are drawn, those with the most tokens first, and the number of streams that
    have losses."""
    measured = {stream: None for point in _points(losses) for stream in point["streams"]}
    ordered = [*(name for name in _by_tokens(course) if name in measured),
               *(name for name in measured if name not in course["streams"])]
    return ordered[:STREAMS], len(measured)


def _points(losses: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the measurements from which the losses of the streams are drawn: the evaluations, or the steps if there
    are few evaluations."""
    steps, evals = losses["steps"], losses["evals"]
    points: Sequence[Mapping[str, Any]] = evals if len(evals) >= EVALUATIONS or not steps else steps
    return points


def _by_tokens(course: Mapping[str, Any]) -> list[str]:
    """Return the token streams that are read, those with the most tokens first."""
    totals = {name: sum(s["realised"]) for name, s in course["streams"].items()}
    return sorted((n for n in totals if totals[n]), key=lambda n: (-totals[n], n))
