"""The table of a study: the held-out losses of experiment arms (variants that are trained with the same seeds), their
differences to the first arm, and what these show."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.tools.arm_statistics import LEVEL, MOST_SEEDS, contrasts, seeds_for

#: names of the rows about the held-out data of all streams together, and of the streams of the run that is annealed. No
#: stream can have such a name, because it has a space
ALL, RUN = "all streams", "the run"
#: units of the losses
NATS, BITS = "nats/token", "bits/byte"
#: what decides about arms (--by)
LOSS, TASKS = "loss", "tasks"
#: differences for which a table says how many seeds would show them
DIFFERENCES = (0.001, 0.003, 0.01, 0.03)

#: the rows of a table, called its sources: by name, the streams on whose held-out data, taken together, arms are
#: compared. The first row decides about the arms
Sources = Mapping[str, Sequence[str]]
#: by arm, the losses of each seed by source
Losses = Mapping[str, Sequence[Mapping[str, float]]]


def measured(streams: Mapping[str, Mapping[str, Any]], sources: Sources, unit: str) -> dict[str, float]:
    """Return the losses by which an arm is judged: {source: loss on its held-out data, in `unit`}. A source is a name
    for one or several streams. `streams` are the results of an evaluation, by stream. Only this function chooses what a
    study measures."""
    return {source: loss_of([streams[name] for name in names], unit) for source, names in sources.items()}


def loss_of(results: Sequence[Mapping[str, Any]], unit: str) -> float:
    """Return one loss for the held-out data of several streams (data sources). With the unit nats per token, it is the
    sum of nats over the sum of tokens; with bits per byte, the sum of bits over the sum of bytes."""
    nats = [of["loss"] * of["targets"] for of in results]
    if unit == NATS:
        return math.fsum(nats) / sum(of["targets"] for of in results)
    sizes = [total / math.log(2) / of["bits_per_byte"] for total, of in zip(nats, results)]
    return math.fsum(nats) / math.log(2) / math.fsum(sizes)


def table(losses: Losses, unit: str = NATS) -> dict[str, Any]:
    """Compute the table in which the arms of a study are compared. `losses` are the losses of each arm, by seed and
    source (a name for one or several streams). Sources that not all arms have are left out. Returns {"unit", "arms":
    [names], "seeds": number of seeds, "sources": {source: {"noise", "seeds_needed": {difference: seeds}, "arms": {name:
    {"loss", "delta", "p", "beyond_noise", "seeds_needed"}}}}}.

        loss          mean over the seeds
        delta         difference to the first arm; negative is better
        noise         half the width of the 95 % confidence interval of a difference; None with one seed or one arm
        p             p-value of the difference, corrected for the number of arms (Holm)
        beyond_noise  whether `p` is below 5 %
        seeds_needed  how many seeds a study of these arms needs to show the difference; None if this is unknown or more
                      than MOST_SEEDS, or if there is no difference

    The last three are None for the first arm, and for all arms if there is one seed.
    """
    first, *others = losses
    seeds, sources = len(losses[first]), {}
    for source in losses[first][0]:
        if not all(source in one for r in losses.values() for one in r):
            continue
        values = [[one[source] for one in r] for r in losses.values()]
        result = contrasts(values)
        p = dict(zip(others, result.p))
        arms = {name: {"loss": math.fsum(each) / seeds, "delta": delta, "p": p.get(name),
                       "beyond_noise": p[name] < LEVEL if name in p else None,
                       "seeds_needed": needed(delta, result.sd, len(losses)) if name in p else None}
                for name, each, delta in zip(losses, values, result.deltas)}
        sources[source] = {"noise": result.half, "arms": arms, "seeds_needed": {
            f"{difference:g}": needed(difference, result.sd, len(losses)) for difference in DIFFERENCES}}
    return {"unit": unit, "arms": list(losses), "seeds": seeds, "sources": sources}


def needed(difference: float, sd: float | None, arms: int) -> int | None:
    return seeds_for(difference, sd, arms) if sd and difference else None


def lines(result: Mapping[str, Any]) -> list[str]:
    """Format the result of `table`, which compares the arms of a study, as lines of text. There is a line for each
    source (a name for one or several streams), with the loss of the first arm and the differences of the other arms to
    it. A star marks differences whose corrected p-value is below 5 %. Then come the lines of `verdicts` about the first
    source. They are left out with only one seed, or if scores on tasks decide (`result["by"]`)."""
    width = max(12, *(len(n) + 2 for n in result["arms"]))
    first, *others = result["arms"]
    unit, seeds = result["unit"], result["seeds"]
    out = [f"held-out loss in {unit}, means of {seeds} seed{'s' * (seeds > 1)}; differences to {first}, negative is "
           f"better", "",
           f"{'source':<20}{first:>{width}}" + "".join(f"{n:>{width}}" for n in others) + f"{'noise':>12}"]
    for source, of in result["sources"].items():
        noise = "unknown" if of["noise"] is None else f"±{of['noise']:.4f}"
        cells = [cell(of["arms"][n]) for n in others]
        out.append(f"{source:<20}{of['arms'][first]['loss']:>{width}.4f}" + "".join(f"{c:>{width}}" for c in cells)
                   + f"{noise:>12}")
    if seeds == 1:
        return [*out, "", "one seed: what is noise is not known; repeat with --seeds 3"]
    compared = f", corrected for {len(others)} comparisons" if len(others) > 1 else ""
    out += ["", f"* beyond the noise at 5 %{compared}; ± is the 95 % interval of one difference within a seed"]
    source, of = next(iter(result["sources"].items()))
    return out if result.get("by") == TASKS else [*out, *verdicts(result["arms"], of, source, unit)]


def cell(arm: Mapping[str, Any]) -> str:
    return f"{arm['delta']:+.4f}" + ("*" if arm["beyond_noise"] else " ")


def verdicts(arms: Sequence[str], of: Mapping[str, Any], where: str, unit: str) -> list[str]:
    """Return lines that compare the arms (trainings of a study) with the first of `arms` in words: better, worse, or
    not told apart. A last line says how many seeds would show differences of given sizes. `of` is the entry of the
    table for the data by which the arms are judged, and `where` names the data."""
    first, *others = arms
    out = [""]
    for name in others:
        arm = of["arms"][name]
        figures = f"{arm['delta']:+.4f} ± {of['noise']:.4f} {unit}, p = {arm['p']:.2g}"
        if arm["beyond_noise"]:
            out.append(f"{name} is {'better' if arm['delta'] < 0 else 'worse'} than {first} on {where}: {figures}")
        else:
            seeds = f"about {arm['seeds_needed']:,} seeds" if arm["seeds_needed"] else f"more than {MOST_SEEDS:,} seeds"
            more = f"; a difference of this size needs {seeds}" if arm["delta"] else "; they are equal"
            out.append(f"{name} is not told apart from {first} on {where}: {figures}{more}")
    known = [f"{difference}: {seeds}" for difference, seeds in of["seeds_needed"].items() if seeds]
    return [*out, *([f"seeds that would show a difference of {', '.join(known)} {unit} (with probability 80 %)"]
                    if known else [])]
