"""Turns a classifier's scores into probabilities, by a calibration that is fitted once on held-out documents and
applied as a table of integers.

fastText is overconfident: of the documents that it calls good with a probability of 0.999, perhaps two in three are
good. A calibration is a monotone, piecewise linear map from scores to probabilities. Scores and probabilities are
integers here, multiples of the step to which the recipe step `quality` rounds (0 … 10⁶ for 0 … 1). The map is therefore
applied in integer arithmetic, with the same result on every machine. It never reverses the order of two documents, but
two documents with neighbouring scores may get the same probability.

There are two ways to fit the map. With 1,000 documents or more, and always for grades, it is *isotonic* regression:
adjacent violators are pooled, and lines join the centres of the blocks (Oron and Flournoy 2017). With fewer documents
it is *Platt*'s sigmoid on the log-odds with smoothed targets (Platt 1999, by the Newton steps of Lin, Lin and Weng
2007), tabulated at 257 points. The file of a calibration is JSON::

    {"format": "tokenmill-calibration/1", "model_sha256": …, "grid": 1e-06, "method": "isotonic", "documents": 5120,
     "labels": {"hq": [[0, 310], [17, 620], …, [1000000, 998000]]}, "grade": null}
"""

from __future__ import annotations

import json
from bisect import bisect_right
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

FORMAT = "tokenmill-calibration/1"
#: fewest documents for isotonic regression, and fewest for any calibration
ISOTONIC_FROM, FEWEST_DOCUMENTS = 1000, 40
_PLATT_POINTS = 257

#: [[score, calibrated score], …] in units of the grid, both ascending
Knots = list[list[int]]


class CalibrationError(ValueError):
    """Raised for a file that is no calibration of a classifier, or that was made for another model. The message names
    the problem and the remedy."""

    permanent = True


class Table:
    """A monotone, piecewise linear map from integers to integers, given by its knots: points [x, y] with straight lines
    between them.

    >>> Table([[0, 100], [1000, 300]])(500)
    200
    """

    def __init__(self, knots: Knots) -> None:
        self.x, self.y = [knot[0] for knot in knots], [knot[1] for knot in knots]

    def __call__(self, score: int) -> int:
        i = bisect_right(self.x, score)
        if i == 0:
            return self.y[0]
        if i == len(self.x):
            return self.y[-1]
        x, y, dx, dy = self.x[i - 1], self.y[i - 1], self.x[i] - self.x[i - 1], self.y[i] - self.y[i - 1]
        return y + (2 * (score - x) * dy + dx) // (2 * dx)         # rounded, halves up


def fit(scores: ArrayLike, truths: ArrayLike, low: int, high: int, graded: bool = False) -> tuple[str, Knots] | None:
    """Fit a map from a classifier's scores to probabilities or grades, on documents whose true labels are known.
    `scores` is int64[n] and `truths`, the probability or grade that the true label stands for, float64[n]. Both are in
    steps of the grid to which scores are rounded, from `low` to `high`.

    Returns (method, knots of the map), or None if there are too few documents, or if all scores or all truths are
    equal. For a label, each truth is `low` or `high`. For grades (`graded`), truths may also lie between these values,
    which only isotonic regression can fit.
    """
    x, y = np.asarray(scores, np.int64), np.asarray(truths, np.float64)
    if len(x) < FEWEST_DOCUMENTS or len(np.unique(y)) < 2 or len(np.unique(x)) < 2:
        return None
    if not graded and len(x) < ISOTONIC_FROM:
        return "platt", _platt(x, y > low, high)
    return "isotonic", _isotonic(x, y, low, high)


def _isotonic(x: NDArray[np.int64], y: NDArray[np.float64], low: int, high: int) -> Knots:
    """Fit an isotonic regression of the truths y on the scores x. Returns the knots ([score, fitted truth]) of the
    fitted map."""
    order = np.argsort(x, kind="stable")
    values, starts, counts = np.unique(x[order], return_index=True, return_counts=True)
    sums = np.add.reduceat(y[order], starts)
    blocks: list[list[float]] = []                                   # [weight, sum of x, sum of y]
    for value, count, total in zip(values.tolist(), counts.tolist(), sums.tolist()):
        blocks.append([count, value * count, total])
        while len(blocks) > 1 and blocks[-2][2] * blocks[-1][0] >= blocks[-1][2] * blocks[-2][0]:
            last = blocks.pop()
            blocks[-1] = [before + after for before, after in zip(blocks[-1], last)]
    # no score makes a document certainly good or bad, so values stay half a document away from low and high
    doubt = (high - low) / (2 * len(x))
    knots = [[round(x_sum / weight), round(min(max(y_sum / weight, low + doubt), high - doubt))]
             for weight, x_sum, y_sum in blocks]
    # outside the centres of the first and last block the map rises half-way to the end of the range, so that documents
    # with such scores keep their order
    if knots[0][0] > low:
        knots.insert(0, [low, (low + knots[0][1]) // 2])
    if knots[-1][0] < high:
        knots.append([high, (knots[-1][1] + high + 1) // 2])
    return _ascending(knots)


def _platt(x: NDArray[np.int64], good: NDArray[np.bool_], top: int) -> Knots:
    """Fit Platt's sigmoid to scores x in 0 … top. `good` says which documents are good. Returns the knots ([score,
    probability]) of a map that approximates the sigmoid."""
    log_odds = _log_odds(x, top)
    count, n_good = len(x), int(good.sum())
    target = np.where(good, (n_good + 1) / (n_good + 2), 1 / (count - n_good + 2))
    slope, offset = 0.0, float(np.log((n_good + 1) / (count - n_good + 1)))

    def loss(slope: float, offset: float) -> float:
        logits = slope * log_odds + offset
        return float((np.logaddexp(0, logits) - target * logits).sum())

    current = loss(slope, offset)
    for _ in range(100):
        predicted = 1 / (1 + np.exp(-(slope * log_odds + offset)))
        weights = predicted * (1 - predicted) + 1e-12
        gradient = np.array([((predicted - target) * log_odds).sum(), (predicted - target).sum()])
        mixed = (weights * log_odds).sum()
        hessian = np.array([[(weights * log_odds * log_odds).sum() + 1e-9, mixed], [mixed, weights.sum() + 1e-9]])
        step = np.linalg.solve(hessian, gradient)
        size = 1.0
        while size > 1e-9 and loss(slope - size * step[0], offset - size * step[1]) > current:
            size /= 2
        slope, offset = slope - size * step[0], offset - size * step[1]
        last_loss, current = current, loss(slope, offset)
        if last_loss - current < 1e-9:
            break
    slope = max(slope, 1e-3)     # for a score that says nothing, or the opposite: nearly flat, but still ascending
    ends = _log_odds(np.array([0, top]), top)
    points = np.linspace(ends[0], ends[1], _PLATT_POINTS)
    inputs = np.round(top / (1 + np.exp(-points))).astype(np.int64)
    inputs[0], inputs[-1] = 0, top
    outputs = np.round(top / (1 + np.exp(-(slope * points + offset)))).astype(np.int64)
    return _ascending([[int(score), int(probability)] for score, probability in zip(inputs, outputs)])


def _log_odds(x: NDArray[np.int64], top: int) -> NDArray[np.float64]:
    p = (x + 0.5) / (top + 1)
    return np.log(p) - np.log1p(-p)


def _ascending(knots: Knots) -> Knots:
    """Return knots [score, value], given in order of score, as knots whose scores ascend and whose values do not
    descend. Knots with the same score become one, with the largest of their values. A value below the previous one is
    raised to the previous one."""
    out: Knots = []
    for score, value in knots:
        if out and score <= out[-1][0]:
            out[-1][1] = max(out[-1][1], value)
        else:
            out.append([score, max(value, out[-1][1]) if out else value])
    return out


def read(path: str | Path, model_sha256: str | None = None) -> dict[str, Any]:
    """Read a calibration file. Returns its content as a dict, after a check of the knots of its maps.

    Raises:
        CalibrationError: the file has another format, its knots do not ascend, or it was made for a model other than
            the one with the hash `model_sha256` (None: the model is not checked).
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as e:
        raise CalibrationError(f"{path} is no calibration: {e}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CalibrationError(f"{path} is no calibration; `tokenmill classifier train` writes one beside its model")
    tables = [*content["labels"].values()] if isinstance(content.get("labels"), dict) else [None]
    for knots in [*tables, *([content["grade"]] if content.get("grade") is not None else [])]:
        if not (isinstance(knots, list) and len(knots) > 1 and all(
                isinstance(knot, list) and len(knot) == 2 and all(type(n) is int for n in knot) for knot in knots)
                and all(lower[0] < upper[0] and lower[1] <= upper[1] for lower, upper in pairwise(knots))):
            raise CalibrationError(f"{path}: a table of it is no list of ascending [score, probability]; train again")
    if model_sha256 is not None and content.get("model_sha256") != model_sha256:
        raise CalibrationError(f"{path} was made for another model; take the one beside the model, or train again")
    return content
