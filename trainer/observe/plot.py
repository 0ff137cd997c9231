"""Loss and learning rate over tokens, phases marked, as one SVG file: our own writer, no plotting library.

The file carries its own light and dark colours (prefers-color-scheme) and no scripts, fonts or links.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from trainer.base.files import replace
from trainer.observe.metrics import parse

WIDTH, LEFT, RIGHT = 860, 64, 20
LOSS_TOP, LOSS_HEIGHT = 68, 250
RATE_TOP, RATE_HEIGHT = 354, 84
HEIGHT = RATE_TOP + RATE_HEIGHT + 44
#: at most so many points of a curve; beyond that, means of equal stretches
POINTS = 600
#: streams whose held-out loss has a curve of its own
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
    """(Re)write `out`/loss.svg from `out`/metrics.jsonl."""
    replace(out / "loss.svg", draw(story_of(out / "metrics.jsonl")))


class Story:
    """What the plot needs of a metrics.jsonl: a few numbers a step."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        #: of every step: number, tokens after it, loss (NaN: none), learning rate (NaN: skipped)
        self.number, self.tokens, self.loss, self.rate = (array("d") for _ in range(4))
        self.skips: list[tuple[float, float]] = []                   # (number, tokens) of steps that changed nothing
        self.passed: list[tuple[float, float]] = []                  # of steps that were not performed
        self.rewinds: list[float] = []                               # tokens it went back to
        self.evals: list[dict[str, Any]] = []
        self.phases: list[dict[str, Any]] = []

    def add(self, line: Mapping[str, Any]) -> None:
        event, number = line["event"], line["step"]
        if event == "start":
            self.begin()
        if event in ("resume", "rewind"):
            while self.number and self.number[-1] > number:
                for column in (self.number, self.tokens, self.loss, self.rate):
                    column.pop()
            self.evals = [e for e in self.evals if e["step"] <= number]
            self.skips, self.passed = ([at for at in marks if at[0] <= number] for marks in (self.skips, self.passed))
        if event == "rewind":
            self.rewinds.append(self.tokens[-1] if self.tokens else 0.0)
        if event in ("start", "resume"):
            self.phases = line.get("phases", [])
        if event == "eval":
            self.evals.append(dict(line))
        if event == "step":
            if line.get("skipped"):
                (self.skips if "lr" in line else self.passed).append((number, line["tokens"]))
            loss = None if line.get("skipped") else line["loss"]
            for column, value in ((self.number, number), (self.tokens, line["tokens"]), (self.loss, loss),
                                  (self.rate, line.get("lr"))):
                column.append(math.nan if value is None else value)


class StoryFile:
    """The story of a metrics.jsonl. The file is read on from where it was read last, so that a plot of a million steps
    does not take longer with every evaluation."""

    def __init__(self, path: Path) -> None:
        self.path, self.offset, self.story = path, 0, Story()

    def read(self) -> Story:
        if self.path.stat().st_size < self.offset:                   # another file
            self.offset, self.story = 0, Story()
        with open(self.path, "rb") as f:
            f.seek(self.offset)
            for text in f:
                if text.endswith(b"\n"):
                    self.offset += len(text)
                    if (line := parse(text.decode("utf-8", "replace"))) is not None:
                        self.story.add(line)
        return self.story


def story_of(path: Path) -> Story:
    """What a metrics.jsonl tells by now."""
    return _file(path).read()


@cache
def _file(path: Path) -> StoryFile:
    return StoryFile(path)


def svg(lines: Iterable[Mapping[str, Any]]) -> str:
    """The plot of the lines of a metrics.jsonl."""
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
    held = curves(evals)
    entropy = evals[-1]["unigram_entropy"] if evals else None
    low, high = span([*([losses.min(), losses.max()] if losses.size else []), *([entropy] if entropy else []),
                      *(v for curve in held.values() for _, v in curve)])
    known = np.flatnonzero(~np.isnan(rate))
    # the schedule has corners: thinned by picking, not by averaging
    rates = [(tokens[i], rate[i]) for i in pick(known.tolist())]
    top_rate = float(rate[known].max(initial=0.0)) or 1.0

    def x(tokens: float) -> float:
        return LEFT + tokens / total * (WIDTH - LEFT - RIGHT)

    def y(loss: float) -> float:
        return LOSS_TOP + (high - loss) / (high - low) * LOSS_HEIGHT

    def r(rate: float) -> float:
        return RATE_TOP + (1 - rate / (top_rate * 1.08)) * RATE_HEIGHT

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
             f'height="{HEIGHT}" role="img" aria-label="Loss and learning rate over tokens"><style>{STYLE}</style>',
             f'<rect class="bg" width="{WIDTH}" height="{HEIGHT}"/>']
    at = 0
    for i, phase in enumerate(phases):
        a, b = x(at), x(at + phase["tokens"])
        parts.append(f'<rect class="{"phase" if i % 2 else "band"}" x="{a:.1f}" y="{LOSS_TOP - 24}" '
                     f'width="{b - a:.1f}" height="{RATE_TOP + RATE_HEIGHT - LOSS_TOP + 24}"/>')
        label = phase["name"] + (" ↘" if phase["lr"] == "decay" else "")
        if b - a > 7 * len(label):
            parts.append(f'<text class="name" x="{a + 6:.1f}" y="{LOSS_TOP - 9}">{escape(label)}</text>')
        at += phase["tokens"]
    for first, last in stretches(story.passed):
        a = x(max((t for n, t in zip(story.number, story.tokens) if n < first[0]), default=0.0))
        parts.append(f'<rect class="passed" x="{a:.1f}" y="{LOSS_TOP}" width="{max(1.0, x(last[1]) - a):.1f}" '
                     f'height="{LOSS_HEIGHT}"><title>steps {first[0]:.0f} to {last[0]:.0f} skipped</title></rect>')
    parts += [gridline(y(v), f"{v:g}") for v in ticks(low, high, 6)]
    parts += [gridline(r(v), f"{v:.2g}") for v in (0.0, top_rate)]
    for v in ticks(0, total, 8):
        parts.append(f'<text class="axis" x="{x(v):.1f}" y="{HEIGHT - 24}" text-anchor="middle">{short(v)}</text>')
    parts.append(f'<text class="axis" x="{WIDTH - RIGHT}" y="{HEIGHT - 8}" text-anchor="end">tokens</text>')
    parts.append(f'<text class="title" x="{LEFT}" y="17">Loss (nats/token)</text>'
                 f'<text class="title" x="{LEFT}" y="{RATE_TOP - 8}">Learning rate</text>')
    parts.append(line("raw", points, x, y))
    parts.append(line("loss", smooth(points), x, y))
    streams = [name for name in held if name]
    for i, name in enumerate(streams):
        parts.append(line(f"stream s{i}", held[name], x, y))
    parts.append(line("held", held[""], x, y))
    parts += [f'<circle class="dot" cx="{x(t):.1f}" cy="{y(v):.1f}" r="3"/>' for t, v in held[""]]
    if entropy is not None:
        level = y(entropy)
        parts.append(f'<line class="entropy" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{level:.1f}" y2="{level:.1f}"/>')
    for number, spot in pick(story.skips):
        parts.append(f'<line class="skip" x1="{x(spot):.1f}" x2="{x(spot):.1f}" y1="{LOSS_TOP + LOSS_HEIGHT - 9}" '
                     f'y2="{LOSS_TOP + LOSS_HEIGHT}"><title>step {number:.0f} left out</title></line>')
    for spot in story.rewinds:
        parts.append(f'<line class="rewind" x1="{x(spot):.1f}" x2="{x(spot):.1f}" y1="{LOSS_TOP}" '
                     f'y2="{LOSS_TOP + LOSS_HEIGHT}"><title>went back to here</title></line>')
    parts.append(line("rate", rates, x, r))
    marks = [("skip", "left out", story.skips), ("passed-key", "skipped", story.passed),
             ("rewind", "went back", story.rewinds)]
    parts.append(legend([("loss", "training"), ("held", "held-out"), ("entropy", "unigram entropy of held-out")], 17))
    parts.append(legend([*((kind, label) for kind, label, there in marks if there),
                         *((f"stream s{i}", escape(name[:16])) for i, name in enumerate(streams))], 33))
    return "\n".join(parts) + "\n</svg>\n"


def curves(evals: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """Held-out loss over tokens: all together under "", and where there are several streams, of at most STREAMS (those
    with the most targets) each under its name."""
    found = {"": [(e["tokens"], e["loss"]) for e in evals]}
    sizes = {name: v["targets"] for e in evals[-1:] for name, v in e.get("streams", {}).items()}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name))[:STREAMS] if len(sizes) > 1 else ():
        found[name] = [(e["tokens"], e["streams"][name]["loss"]) for e in evals if name in e["streams"]]
    return found


def stretches(marks: Sequence[tuple[float, float]]) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    """(first, last) of runs of consecutive step numbers."""
    found: list[list[tuple[float, float]]] = []
    for mark in marks:
        if found and mark[0] == found[-1][1][0] + 1:
            found[-1][1] = mark
        else:
            found.append([mark, mark])
    return [(first, last) for first, last in found]


def span(values: Sequence[float]) -> tuple[float, float]:
    """A range with some air around the finite values."""
    finite = [v for v in values if math.isfinite(v)] or [0.0, 1.0]
    low, high = min(finite), max(finite)
    air = max(high - low, 0.1) * 0.05
    return low - air, high + air


def ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers in [low, high], about `most` or fewer."""
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw)
    first = math.ceil(low / step)
    return [round(i * step, 12) for i in range(first, math.floor(high / step) + 1)]


def thin(tokens: np.ndarray, values: np.ndarray) -> list[tuple[float, float]]:
    """At most POINTS points: means of equal stretches."""
    count = min(POINTS, len(tokens))
    edges = np.arange(count + 1) * len(tokens) // max(1, count)
    return [(float(tokens[b - 1]), float(values[a:b].mean())) for a, b in pairwise(edges)]


def pick(items: Sequence[Any]) -> list[Any]:
    if len(items) <= POINTS:
        return list(items)
    return [items[i * (len(items) - 1) // (POINTS - 1)] for i in range(POINTS)]


def smooth(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Exponential mean over about 2 % of the curve, without the bias towards the first value."""
    keep = 1 - 1 / max(1.0, len(points) / 50)
    mean = weight = 0.0
    out = []
    for t, v in points:
        if not math.isfinite(v):
            continue
        mean, weight = keep * mean + (1 - keep) * v, keep * weight + (1 - keep)
        out.append((t, mean / weight))
    return out


def line(kind: str, points: Sequence[tuple[float, float]], x: Callable[[float], float],
         y: Callable[[float], float]) -> str:
    text = " ".join(f"{x(t):.1f},{y(v):.1f}" for t, v in points if math.isfinite(v))
    return f'<polyline class="{kind}" points="{text}"/>'


def gridline(y: float, label: str) -> str:
    return (f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="axis" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')


def legend(items: Sequence[tuple[str, str]], y: int) -> str:
    """(class, label) from the right, on one line at `y`."""
    parts, x = [], float(WIDTH - RIGHT)
    for kind, label in reversed(items):
        x -= 6.2 * len(label) + 4
        parts.append(f'<text class="axis" x="{x:.0f}" y="{y}">{label}</text>')
        parts.append(f'<line class="{kind}" x1="{x - 26:.0f}" x2="{x - 6:.0f}" y1="{y - 4}" y2="{y - 4}"/>')
        x -= 40
    return "".join(parts)


def short(tokens: float) -> str:
    """1500000 → '1.5M'."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if tokens >= size:
            return f"{tokens / size:g}{unit}"
    return f"{tokens:g}"
