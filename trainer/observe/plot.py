"""Draws loss and learning rate over tokens, with the phases (stretches of the training) marked, as one SVG file.

The file carries its own light and dark colours (prefers-color-scheme) and no scripts, fonts or links.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.base.humanize import count
from pipeline.base.svg import Element, polyline, tag
from trainer.base.files import replace
from trainer.observe.story import Story, story_of

WIDTH, LEFT, RIGHT = 860, 64, 20
LOSS_TOP, LOSS_HEIGHT = 68, 250
RATE_TOP, RATE_HEIGHT = 354, 84
HEIGHT = RATE_TOP + RATE_HEIGHT + 44
#: largest number of points in a curve. A longer curve is divided into this many equal stretches, and shows their means
POINTS = 600
#: largest number of streams (sources, languages or buckets) whose held-out loss has a curve of its own
STREAMS = 6

STYLE = """
.bg{fill:#fff}.grid{stroke:#e3e6ea;stroke-width:1}.axis{fill:#5b6470;font-size:11px}.phase{fill:#eef2f7}.band{fill:#f8fafc}
.name{fill:#38414c;font-size:12px;font-weight:600}.title{fill:#1c2430;font-size:13px;font-weight:600}
.raw{fill:none;stroke:#9db7dd;stroke-width:1}.loss{fill:none;stroke:#1f5fbf;stroke-width:2}
.held{fill:none;stroke:#c2410c;stroke-width:2}.dot{fill:#c2410c}.rate{fill:none;stroke:#0f766e;stroke-width:2}
.entropy{stroke:#7c8794;stroke-width:1.2;stroke-dasharray:5 4}
.stream{fill:none;stroke-width:1.2}.s0{stroke:#7c3aed}.s1{stroke:#0891b2}.s2{stroke:#65a30d}.s3{stroke:#be185d}
.s4{stroke:#a16207}.s5{stroke:#4b5563}
.skip{stroke:#dc2626;stroke-width:1.5}.rewind{stroke:#dc2626;stroke-width:1.2;stroke-dasharray:2 3}
.passed{fill:#dc2626;opacity:.12}.passed-key{stroke:#dc2626;stroke-width:8;opacity:.25}
text{font-family:ui-sans-serif,system-ui,-apple-system,'Segoe UI',Roboto,sans-serif}
@media (prefers-color-scheme:dark){.bg{fill:#14181d}.grid{stroke:#2a313a}.axis{fill:#98a3b0}.phase{fill:#1b222b}
.band{fill:#171c22}.name{fill:#c9d2dc}.title{fill:#e6ebf1}.raw{stroke:#2f4d78}.loss{stroke:#6ea8fe}.held{stroke:#fb923c}
.dot{fill:#fb923c}.rate{stroke:#2dd4bf}.entropy{stroke:#8693a1}.s0{stroke:#a78bfa}.s1{stroke:#22d3ee}.s2{stroke:#a3e635}
.s3{stroke:#f472b6}.s4{stroke:#facc15}.s5{stroke:#9ca3af}.skip,.rewind,.passed-key{stroke:#f87171}.passed{fill:#f87171}}
""".strip()


def write_plot(out: Path) -> None:
    """Draw the plot of a training: write `out`/loss.svg from `out`/metrics.jsonl. An existing plot is replaced."""
    replace(out / "loss.svg", draw(story_of(out / "metrics.jsonl")))


def svg(lines: Iterable[Mapping[str, Any]]) -> str:
    """Return the plot of a training as SVG. `lines` are the lines of its metrics.jsonl."""
    story = Story()
    for line in lines:
        story.add(line)
    return draw(story)


def draw(story: Story) -> str:
    evals, phases = story.evals, story.phases
    total = max(1, sum(p["tokens"] for p in phases) or max(story.tokens, default=1))
    tokens, loss, rate = (np.array(column) for column in (story.tokens, story.loss, story.rate))
    there = ~np.isnan(loss)
    points, losses = thin(tokens[there], loss[there]), loss[there]
    heldout = curves(evals)
    entropy = [e["unigram_entropy"] for e in evals[-1:] if e["unigram_entropy"]]
    low, high = span([*([losses.min(), losses.max()] if losses.size else []), *entropy,
                      *(v for curve in heldout.values() for _, v in curve)])
    with_rate = np.flatnonzero(~np.isnan(rate))
    # points are picked, because averaging would round off the corners of the schedule
    rates = [(tokens[i], rate[i]) for i in pick(with_rate.tolist())]
    top_rate = float(rate[with_rate].max(initial=0.0)) or 1.0

    def x(tokens: float) -> float:
        return LEFT + tokens / total * (WIDTH - LEFT - RIGHT)

    def y(loss: float) -> float:
        return LOSS_TOP + (high - loss) / (high - low) * LOSS_HEIGHT

    def r(rate: float) -> float:
        return RATE_TOP + (1 - rate / (top_rate * 1.08)) * RATE_HEIGHT

    streams = [name for name in heldout if name]
    parts = [
        tag("rect", class_="bg", width=WIDTH, height=HEIGHT),
        *phase_bands(phases, x),
        *skipped_bands(story, x),
        *(gridline(y(v), f"{v:g}") for v in ticks(low, high, 6)),
        *(gridline(r(v), f"{v:.2g}") for v in (0.0, top_rate)),
        *(label("axis", x(v), HEIGHT - 24, count(v), text_anchor="middle") for v in ticks(0, total, 8)),
        label("axis", WIDTH - RIGHT, HEIGHT - 8, "tokens", text_anchor="end"),
        label("title", LEFT, 17, "Loss (nats/token)"), label("title", LEFT, RATE_TOP - 8, "Learning rate"),
        curve("raw", points, x, y), curve("loss", smooth(points), x, y),
        *(curve(f"stream s{i}", heldout[name], x, y) for i, name in enumerate(streams)),
        curve("held", heldout[""], x, y),
        *(tag("circle", class_="dot", cx=x(t), cy=y(v), r=3) for t, v in heldout[""]),
        *(tag("line", class_="entropy", x1=LEFT, x2=WIDTH - RIGHT, y1=y(v), y2=y(v)) for v in entropy),
        *(upright("skip", x(at), LOSS_TOP + LOSS_HEIGHT - 9, f"update of step {number:.0f} skipped")
          for number, at in pick(story.skips)),
        *(upright("rewind", x(at), LOSS_TOP, "went back to here") for at in story.rewinds),
        curve("rate", rates, x, r),
        *legend([("loss", "training"), ("held", "held-out"), ("entropy", "unigram entropy of held-out")], 17),
        *legend([*((kind, text) for kind, text, marks in (
            ("skip", "update skipped", story.skips), ("passed-key", "steps skipped", story.passed),
            ("rewind", "went back", story.rewinds)) if marks),
            *((f"stream s{i}", name[:16]) for i, name in enumerate(streams))], 33)]
    return tag("svg", tag("style", Element(STYLE)), *(Element(f"\n{part}") for part in parts), Element("\n"),
               xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {WIDTH} {HEIGHT}", width=WIDTH, height=HEIGHT,
               role="img", aria_label="Loss and learning rate over tokens") + "\n"


def phase_bands(phases: Sequence[Mapping[str, Any]], x: Callable[[float], float]) -> Iterator[Element]:
    """Draw a band behind each phase (stretch of the training with its own data mixture), and its name if there is room.
    `x` maps tokens to the x coordinate."""
    tokens = 0
    for i, phase in enumerate(phases):
        x_left, width = x(tokens), x(tokens + phase["tokens"]) - x(tokens)
        yield tag("rect", class_="phase" if i % 2 else "band", x=x_left, y=LOSS_TOP - 24, width=width,
                  height=RATE_TOP + RATE_HEIGHT - LOSS_TOP + 24)
        name = phase["name"] + (" ↘" if phase["lr"] == "decay" else "")
        if width > 7 * len(name):
            yield label("name", x_left + 6, LOSS_TOP - 9, name)
        tokens += phase["tokens"]


def skipped_bands(story: Story, x: Callable[[float], float]) -> Iterator[Element]:
    """Draw a band over each range of consecutive steps that were skipped without being computed. A band reaches from
    the end of the step before the range to the end of its last step. `x` maps tokens to the x coordinate."""
    for (first, _), (last, tokens) in stretches(story.passed):
        x_left = x(max((t for n, t in zip(story.number, story.tokens) if n < first), default=0.0))
        yield tag("rect", tag("title", f"steps {first:.0f} to {last:.0f} skipped"), class_="passed", x=x_left,
                  y=LOSS_TOP, width=max(1.0, x(tokens) - x_left), height=LOSS_HEIGHT)


def curves(evals: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """Return the curves of held-out loss as {stream: [(tokens, loss), …]}. The key "" is the curve for all streams
    (data sources) together. If there are several streams, the curves of up to STREAMS single streams follow, beginning
    with the streams that have the most targets."""
    result = {"": [(e["tokens"], e["loss"]) for e in evals]}
    sizes = {name: v["targets"] for e in evals[-1:] for name, v in e.get("streams", {}).items()}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name))[:STREAMS] if len(sizes) > 1 else ():
        result[name] = [(e["tokens"], e["streams"][name]["loss"]) for e in evals if name in e["streams"]]
    return result


def stretches(marks: Sequence[tuple[float, float]]) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    """Group `marks`, pairs (step number, tokens), into ranges of consecutive steps. Returns the first and the last mark
    of each range."""
    result: list[list[tuple[float, float]]] = []
    for mark in marks:
        if result and mark[0] == result[-1][1][0] + 1:
            result[-1][1] = mark
        else:
            result.append([mark, mark])
    return [(first, last) for first, last in result]


def span(values: Sequence[float]) -> tuple[float, float]:
    """Return the range of an axis for `values`: from the lowest to the highest finite value, with a margin on both
    sides. The margin is 5 % of their difference, but at least 0.005. If no value is finite, 0 and 1 are used
    instead."""
    finite = [v for v in values if math.isfinite(v)] or [0.0, 1.0]
    low, high = min(finite), max(finite)
    air = max(high - low, 0.1) * 0.05
    return low - air, high + air


def ticks(low: float, high: float, most: int) -> list[float]:
    """Return round numbers in [low, high] for the labels of an axis, at most about `most` of them."""
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw)
    first = math.ceil(low / step)
    return [round(i * step, 12) for i in range(first, math.floor(high / step) + 1)]


def thin(tokens: np.ndarray, values: np.ndarray) -> list[tuple[float, float]]:
    """Reduce a curve of pairs (tokens, value) to at most POINTS points. A longer curve is divided into equal stretches.
    Each stretch becomes one point: its last number of tokens, and the mean of its values."""
    count = min(POINTS, len(tokens))
    edges = np.arange(count + 1) * len(tokens) // max(1, count)
    return [(float(tokens[b - 1]), float(values[a:b].mean())) for a, b in pairwise(edges)]


def pick(items: Sequence[Any]) -> list[Any]:
    if len(items) <= POINTS:
        return list(items)
    return [items[i * (len(items) - 1) // (POINTS - 1)] for i in range(POINTS)]


def smooth(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Smooth a curve by an exponential mean over about 2 % of its points, without bias towards the first value."""
    keep = 1 - 1 / max(1.0, len(points) / 50)
    mean = weight = 0.0
    out = []
    for t, v in points:
        if not math.isfinite(v):
            continue
        mean, weight = keep * mean + (1 - keep) * v, keep * weight + (1 - keep)
        out.append((t, mean / weight))
    return out


def curve(kind: str, points: Sequence[tuple[float, float]], x: Callable[[float], float],
          y: Callable[[float], float]) -> Element:
    return polyline([(x(t), y(v)) for t, v in points if math.isfinite(v)], class_=kind)


def label(kind: str, x: float, y: float, text: str, **attributes: str) -> Element:
    return tag("text", text, class_=kind, x=x, y=y, **attributes)


def upright(kind: str, x: float, top: float, title: str) -> Element:
    """Draw a vertical line at `x`, from `top` down to the bottom of the loss curves, with a tooltip `title`."""
    return tag("line", tag("title", title), class_=kind, x1=x, x2=x, y1=top, y2=LOSS_TOP + LOSS_HEIGHT)


def gridline(y: float, text: str) -> Element:
    return Element(tag("line", class_="grid", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y)
                   + label("axis", LEFT - 6, y + 4, text, text_anchor="end"))


def legend(items: Sequence[tuple[str, str]], y: int) -> Iterator[Element]:
    """Draw the legend entries `items`, pairs (CSS class, text), on one line at height `y`, aligned to the right."""
    x = float(WIDTH - RIGHT)
    for kind, text in reversed(items):
        x -= 6.2 * len(text) + 4
        yield label("axis", x, y, text)
        yield tag("line", class_=kind, x1=x - 26, x2=x - 6, y1=y - 4, y2=y - 4)
        x -= 40
