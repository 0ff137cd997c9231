"""Judges which benchmark tasks say something about small trainings, by the four criteria of FineTasks (Hugging Face,
2024). The input is the scores of the trainings' checkpoints. Candidates are what the trainings compare, such as data
sets.

* monotonicity: does the score improve as training goes on? (Spearman's rank correlation with the step)
* noise: is the gain of the training much larger than the spread between seeds?
* distance from chance: is the score better than guessing, by several standard errors?
* rank consistency: is the order of the candidates the same shortly before and at the end of training, and for all sizes
  of the model? (Kendall's rank correlation)

A task cannot decide between data sets if its score does not move, moves at random, or orders candidates differently
each time. It only adds noise to a mean over tasks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from statistics import fmean, variance
from typing import Any

from trainer.observe.alerts import LOWER

#: limits of the criteria. A rank consistency of 0.5 means that three of four pairs of candidates keep their order
MONOTONICITY, GAIN, DISTANCE, CONSISTENCY = 0.5, 5.0, 3.0, 0.5

#: the number of scored checkpoints of a training that monotonicity needs
LEAST_STEPS = 3
#: a gain divided by the noise is limited to ±MOST, because the noise may be 0
MOST = 9999.0


@dataclass(frozen=True)
class ScoredRun:
    """The scores of one training's checkpoints on benchmark tasks. `rows` are lines of tasks.jsonl. `candidate` is the
    name of what is compared, such as a data set; `size` is the model's number of parameters. Trainings that differ only
    in `seed` show the noise."""

    candidate: str
    size: int
    seed: int
    rows: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class TaskSignal:
    """How much one measure of a task can say about trainings. A value is None if the trainings cannot tell.

        runs          the number of trainings
        steps         the largest number of scored checkpoints in one training
        monotonicity  rank correlation of score and step, of the best candidate
        noise         standard deviation of scores between seeds
        gain          how much the score rises from first to last checkpoint, divided by the noise, of the best
                      candidate
        distance      by how many standard errors the last score is better than chance, in the best training. A measure
                      without chance is compared with the first score instead
        early         agreement of the candidates' order at the end with their order at earlier steps (`early_and_late`)
        sizes         agreement of the candidates' order between sizes of models
        verdict       `use` if monotonicity and distance are known and no known criterion fails, else `ignore`

    The best candidate is the one with the highest mean over its trainings.
    """

    task: str
    measure: str
    runs: int
    steps: int
    monotonicity: float | None
    noise: float | None
    gain: float | None
    distance: float | None
    early: float | None
    sizes: float | None
    verdict: str
    reason: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


#: scores of one training by step: step → (score, standard error); larger is better
Curve = Mapping[int, tuple[float, float]]


def signals(runs: Sequence[ScoredRun]) -> list[TaskSignal]:
    """Judge all tasks by each of their measures. Returns a result for each task and measure, sorted by the name of the
    task."""
    scored: dict[tuple[str, str], list[tuple[ScoredRun, dict[int, tuple[float, float]], float | None]]] = {}
    for run in runs:
        own: dict[tuple[str, str], tuple[dict[int, tuple[float, float]], list[float]]] = {}
        for row in run.rows:
            curve, chances = own.setdefault((row["task"], row["measure"]), ({}, []))
            sign = -1 if row["measure"] in LOWER else 1
            curve[row["step"]] = (sign * row["value"], row.get("stderr") or 0.0)
            chances += [max(row["chance"], row.get("constant") or 0.0)] if row.get("chance") is not None else []
        for key, (curve, chances) in own.items():
            scored.setdefault(key, []).append((run, curve, max(chances, default=None)))
    order = {key: i for i, key in enumerate(scored)}                       # measures stay in the order of the rows
    return [judge(task, measure, of) for (task, measure), of in
            sorted(scored.items(), key=lambda item: (item[0][0], order[item[0]]))]


def judge(task: str, measure: str, of: Sequence[tuple[ScoredRun, Curve, float | None]]) -> TaskSignal:
    """Judge one measure of a task. `of` has for each training (training, its scores by step, chance). Chance is the
    score of a random guess, or that of naming always the same position, whichever is higher; None if it is unknown."""
    curves = [(run, curve) for run, curve, _ in of]
    chance = max((c for _, _, c in of if c is not None), default=0.0 if measure in ("word", "fg", "code") else None)
    monotonicity = best_candidate((run, spearman(sorted(curve), [curve[step][0] for step in sorted(curve)]))
                                  for run, curve in curves if len(curve) >= LEAST_STEPS)
    noise = between_seeds(curves)
    gained = best_candidate((run, curve[max(curve)][0] - curve[min(curve)][0]) for run, curve in curves
                            if len(curve) > 1)
    gain = None if noise is None or gained is None else ratio(gained, noise)
    distance = max((away(curve, chance) for _, curve in curves if chance is not None or len(curve) > 1), default=None)
    early, sizes = early_and_late(curves), between_sizes(curves)
    limits: list[tuple[float | None, float, Callable[[float], str]]] = [
        (distance, DISTANCE, lambda v: f"only {v:.1f} standard errors from "
                                       + ("chance" if chance is not None else "its first score")),
        (monotonicity, MONOTONICITY, lambda v: f"not monotonic (Spearman {v:.2f})"),
        (gain, GAIN, lambda v: f"noisy (training gains {v:.1f} times the spread between seeds)"),
        (early, CONSISTENCY, lambda v: f"early scores order candidates otherwise (Kendall {v:.2f})"),
        (sizes, CONSISTENCY, lambda v: f"sizes order candidates otherwise (Kendall {v:.2f})")]
    failed = [text(value) for value, limit, text in limits if value is not None and value < limit]
    unknown = [name for name, value in (("monotonicity", monotonicity), ("noise", gain), ("distance", distance),
                                        ("rank consistency", early if early is not None else sizes)) if value is None]
    passed = not failed and monotonicity is not None and distance is not None
    reason = "; ".join(failed) or ("passes" + (f", but unknown: {', '.join(unknown)}" if unknown else "") if passed
                                   else f"too few checkpoints: {', '.join(unknown)} unknown")
    return TaskSignal(task, measure, len(curves), max(len(curve) for _, curve in curves), monotonicity, noise, gain,
                      distance, early, sizes, "use" if passed else "ignore", reason)


def best_candidate(values: Iterable[tuple[ScoredRun, float]]) -> float | None:
    """Return the highest of the candidates' means, each over the candidate's trainings; None without trainings. Taking
    the highest keeps data that makes a model worse at a task from counting against the task."""
    of: dict[str, list[float]] = {}
    for run, value in values:
        of.setdefault(run.candidate, []).append(value)
    return max((fmean(each) for each in of.values()), default=None)


def ratio(value: float, unit: float) -> float:
    """Return `value` divided by `unit`, limited to ±MOST, because JSON has no infinity."""
    if not value:
        return 0.0
    return max(-MOST, min(MOST, value / unit)) if unit else math.copysign(MOST, value)


def between_seeds(curves: Iterable[tuple[ScoredRun, Curve]]) -> float | None:
    """Return the standard deviation of scores between seeds; None if nowhere two seeds have a step in common. The
    variances of all candidates, sizes of models and steps are pooled. Of the steps that all seeds of a candidate and
    size have, the later half is used."""
    groups: dict[tuple[str, int], list[Curve]] = {}
    for run, curve in curves:
        groups.setdefault((run.candidate, run.size), []).append(curve)
    squares, free = 0.0, 0
    for of in groups.values():
        steps = sorted(set.intersection(*(set(curve) for curve in of)))
        for step in later(steps) if len(of) > 1 else []:
            squares += variance([curve[step][0] for curve in of]) * (len(of) - 1)
            free += len(of) - 1
    return math.sqrt(squares / free) if free else None


def later(steps: Sequence[int]) -> Sequence[int]:
    return steps[len(steps) // 2:]


def away(curve: Curve, chance: float | None) -> float:
    """Return by how many standard errors the last score of a training is better than `chance`. If `chance` is None, it
    is compared with the training's first score instead."""
    (first, first_error), (last, error) = curve[min(curve)], curve[max(curve)]
    if chance is not None:
        return ratio(last - chance, error)
    return ratio(last - first, math.hypot(error, first_error))


def means(curves: Iterable[tuple[ScoredRun, Curve]]) -> dict[int, dict[str, dict[int, float]]]:
    """Return the mean scores of candidates (what is compared, such as data sets) over seeds, as {size of the model:
    {candidate: {step: score}}}. Steps that not all seeds have are left out."""
    groups: dict[int, dict[str, list[Curve]]] = {}
    for run, curve in curves:
        groups.setdefault(run.size, {}).setdefault(run.candidate, []).append(curve)
    return {size: {name: {step: fmean(curve[step][0] for curve in of)
                          for step in sorted(set.intersection(*(set(curve) for curve in of)))}
                   for name, of in candidates.items()} for size, candidates in groups.items()}


def early_and_late(curves: Iterable[tuple[ScoredRun, Curve]]) -> float | None:
    """Return how well the order of candidates at earlier steps agrees with their order at the last step. Only steps of
    the later half are compared. The result is the mean of Kendall's tau over steps and sizes of models. None if no size
    has several candidates with three steps in common, or if equal scores leave nothing to order."""
    taus = []
    for candidates in means(curves).values():
        steps = sorted(set.intersection(*(set(of) for of in candidates.values()))) if len(candidates) > 1 else []
        taus += [kendall(*([of[at] for of in candidates.values()] for at in (step, steps[-1])))
                 for step in later(steps)[:-1]]
    known = [tau for tau in taus if tau is not None]
    return fmean(known) if known else None


def between_sizes(curves: Iterable[tuple[ScoredRun, Curve]]) -> float | None:
    """Return how well models of different sizes agree on the order of candidates (what is compared, such as data sets).
    The result is the mean of Kendall's tau over pairs of sizes, computed from the last scores. None if no two sizes
    have two candidates in common, or if equal scores leave nothing to order."""
    taus = []
    for first, second in combinations(means(curves).values(), 2):
        both = sorted(name for name in first.keys() & second.keys() if first[name] and second[name])
        if len(both) > 1:
            taus.append(kendall(*([of[name][max(of[name])] for name in both] for of in (first, second))))
    known = [tau for tau in taus if tau is not None]
    return fmean(known) if known else None


def ranks(values: Sequence[float]) -> list[float]:
    """Return the rank of each value; equal values share the mean of their ranks."""
    order = sorted(values)
    return [order.index(v) + (order.count(v) - 1) / 2 for v in values]


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Spearman's rank correlation of two lists. It is 0 if all values of a list are equal, because such a score
    does not rise."""
    a, b = ranks(first), ranks(second)
    mean_a, mean_b = fmean(a), fmean(b)
    norm = math.sqrt(sum((x - mean_a) ** 2 for x in a) * sum((y - mean_b) ** 2 for y in b))
    return sum((x - mean_a) * (y - mean_b) for x, y in zip(a, b)) / norm if norm else 0.0


def kendall(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Return Kendall's tau-b of two lists of scores. None if all scores of a list are equal, because the list then has
    no order."""
    pairs = [((a > b) - (a < b), (c > d) - (c < d)) for (a, c), (b, d) in combinations(zip(first, second), 2)]
    norm = math.sqrt(sum(x != 0 for x, _ in pairs) * sum(y != 0 for _, y in pairs))
    return sum(x * y for x, y in pairs) / norm if norm else None
