"""Draws the results of a study, in which several trainings (arms) are compared, as two SVG files. intervals.svg shows
the difference in loss between each arm and the first one, with its confidence interval. curves.svg shows the held-out
losses of the arms over tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.base.humanize import count
from pipeline.base.svg import Element, tag
from trainer.base.files import replace
from trainer.observe.metrics import read
from trainer.observe.plot import STREAMS, STYLE, WIDTH, curve, label, legend, ticks
from trainer.tools.arm_table import Sources, loss_of

#: distance between two arms, places of the axes, and height of the curves
ROW, TOP, LEFT, RIGHT, HEIGHT = 28, 52, 160, 40, 300


def write_plots(folder: Path, result: Mapping[str, Any], outs: Mapping[str, Sequence[Path]], sources: Sources,
                unit: str) -> None:
    """Write the plots of a study to `folder`. `result` is the content of table.json. `outs` has the folders of the
    trainings of each arm, one for each seed. The plots show the losses on the first of `sources` (named groups of
    streams), by which the arms are judged."""
    source, streams = next(iter(sources.items()))
    replace(folder / "intervals.svg", intervals(result, source))
    points = {name: history(of, streams, unit) for name, of in outs.items()}
    replace(folder / "curves.svg", curves(points, source, unit))


def intervals(result: Mapping[str, Any], source: str) -> str:
    """Return an SVG of the differences in loss between the arms of a study and the first arm. Each difference has its
    95 % confidence interval if there are several seeds. The losses are those on the held-out data of `source`, one of
    the sources in `result` (the content of table.json)."""
    of = result["sources"][source]
    first, *others = result["arms"]
    noise = of["noise"] or 0.0
    deltas = [of["arms"][name]["delta"] for name in others]
    reach = max([abs(delta) + noise for delta in deltas] + [1e-6]) * 1.1
    bottom = TOP + ROW * len(others)

    def x(value: float) -> float:
        return LEFT + (value + reach) / (2 * reach) * (WIDTH - LEFT - RIGHT)

    parts = [tag("rect", class_="bg", width=WIDTH, height=bottom + 48),
             label("title", 12, 20, f"Loss on held-out text ({source}): difference to {first} in {result['unit']}"),
             label("axis", 12, 37, "left of the dashed line is better; bars are 95 % intervals, filled dots are beyond "
                                   "the noise" if of["noise"] is not None else "one seed: the noise is not known")]
    for value in ticks(-reach, reach, 6):
        parts += [tag("line", class_="grid", x1=x(value), x2=x(value), y1=TOP, y2=bottom),
                  label("axis", x(value), bottom + 18, f"{value:+g}" if value else "0", text_anchor="middle")]
    parts.append(tag("line", class_="entropy", x1=x(0), x2=x(0), y1=TOP, y2=bottom))
    for i, (name, delta) in enumerate(zip(others, deltas)):
        y = TOP + ROW * (i + 0.5)
        title = tag("title", f"{name}: {delta:+.4f} ± {noise:.4f}")
        parts += [label("name", 12, y + 4, name[:22]),
                  tag("line", title, class_="held", x1=x(delta - noise), x2=x(delta + noise), y1=y, y2=y),
                  tag("circle", title, class_="dot" if of["arms"][name]["beyond_noise"] else "held", cx=x(delta), cy=y,
                      r=5)]
    return drawing(parts, bottom + 48, f"Differences of the arms to {first}")


def history(outs: Sequence[Path], streams: Sequence[str], unit: str) -> list[tuple[float, float]]:
    """Return the curve of the losses of an arm (a training of a study, with its seeds) on the held-out data of
    `streams`: (number of tokens, mean over the seeds) for each evaluation. `outs` are the folders of the arm's
    trainings, one for each seed. Evaluations that a seed lacks are left out."""
    sums: dict[int, list[float]] = {}
    for out in outs:
        for line in read(out / "metrics.jsonl"):
            if line["event"] == "eval":
                value = loss_of([line["streams"][name] for name in streams], unit)
                sums.setdefault(line["tokens"], []).append(value)
    return [(float(tokens), sum(values) / len(values)) for tokens, values in sorted(sums.items())
            if len(values) == len(outs)]


def curves(points: Mapping[str, Sequence[tuple[float, float]]], source: str, unit: str) -> str:
    """Return an SVG of held-out losses over tokens, a curve for each of the first STREAMS arms of a study. `points` are
    the (tokens, loss) of each arm; the evaluation before the first step is left out. The title names the held-out data,
    `source`, and the `unit` of the losses."""
    drawn = {name: [(t, v) for t, v in of if t] for name, of in list(points.items())[:STREAMS]}
    values = [v for of in drawn.values() for _, v in of] or [0.0, 1.0]
    air = max(max(values) - min(values), 1e-3) * 0.06
    low, high = min(values) - air, max(values) + air
    total = max([t for of in drawn.values() for t, _ in of] or [1.0])

    def x(tokens: float) -> float:
        return 64 + tokens / total * (WIDTH - 64 - RIGHT)

    def y(value: float) -> float:
        return TOP + (high - value) / (high - low) * HEIGHT

    parts = [tag("rect", class_="bg", width=WIDTH, height=TOP + HEIGHT + 44),
             label("title", 12, 20, f"Loss on held-out text ({source}) in {unit}")]
    for value in ticks(low, high, 6):
        parts += [tag("line", class_="grid", x1=64, x2=WIDTH - RIGHT, y1=y(value), y2=y(value)),
                  label("axis", 58, y(value) + 4, f"{value:g}", text_anchor="end")]
    parts += [label("axis", x(v), TOP + HEIGHT + 18, count(v), text_anchor="middle") for v in ticks(0, total, 8)]
    parts.append(label("axis", WIDTH - RIGHT, TOP + HEIGHT + 36, "tokens", text_anchor="end"))
    for i, of in enumerate(drawn.values()):
        parts += [curve(f"stream s{i}", of, x, y),
                  *(tag("circle", class_=f"stream s{i}", cx=x(t), cy=y(v), r=2.5) for t, v in of)]
    parts += legend([(f"stream s{i}", name[:22]) for i, name in enumerate(drawn)], 37)
    return drawing(parts, TOP + HEIGHT + 44, f"Held-out loss on {source} over tokens")


def drawing(parts: Sequence[Element], height: float, title: str) -> str:
    return tag("svg", tag("style", Element(STYLE)), *(Element(f"\n{part}") for part in parts), Element("\n"),
               xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {WIDTH} {height:g}", width=WIDTH,
               height=f"{height:g}", role="img", aria_label=title) + "\n"
