"""Measures how well scores separate good documents from others (ROC-AUC, average precision, calibration error, with
their uncertainty), and how much two samples of scores differ.

Scores are float64[n], truths (whether each document is good) bool[n]. If two documents have equal scores, the pair
counts as half in the AUC. All documents of equal score count as one step in the average precision. Bootstraps draw
documents with replacement by a seeded PCG64, whose bit stream is the same in all versions of numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    Floats = NDArray[np.float64]
    Truths = NDArray[np.bool_]

#: resamples of a bootstrap, and the share of them inside an interval
RESAMPLES, INSIDE = 1000, 0.95


class Ranking:
    """A ranking of documents: their scores, best first, and whether each document is good. From one ranking, measures
    such as the AUC can be computed repeatedly with different weights of the documents.

    >>> Ranking([0.9, 0.8, 0.1], [True, False, False]).auc()
    1.0
    """

    def __init__(self, scores: ArrayLike, good: ArrayLike) -> None:
        scores, good = np.asarray(scores, np.float64), np.asarray(good, bool)
        if scores.shape != good.shape or scores.ndim != 1:
            raise ValueError(f"{scores.shape} scores and {good.shape} truths do not belong together")
        if not np.isfinite(scores).all():
            raise ValueError("a score is not finite")
        self.order = np.argsort(-scores, kind="stable")
        self.scores, self.good = scores[self.order], good[self.order]
        #: where each run of equal scores begins
        self.starts = np.flatnonzero(np.r_[True, self.scores[1:] != self.scores[:-1]]) if len(scores) else \
            np.zeros(0, np.int64)

    def steps(self, weights: Floats | None = None) -> tuple[Floats, Floats]:
        """Return (total weight of the good documents at each distinct score, total weight of the other documents at
        each distinct score), with the best score first. `weights` has an entry for each document, in the order in which
        the documents were given."""
        by_rank = np.ones(len(self.good)) if weights is None else np.asarray(weights, np.float64)[self.order]
        if not len(by_rank):
            return np.zeros(0), np.zeros(0)
        return (np.add.reduceat(np.where(self.good, by_rank, 0.0), self.starts),
                np.add.reduceat(np.where(self.good, 0.0, by_rank), self.starts))

    def auc(self, weights: Floats | None = None) -> float:
        """Return the probability that a good document has a higher score than one that is not good (the area under the
        ROC curve). The result is NaN if all documents are good or none is."""
        good, others = self.steps(weights)
        above = np.cumsum(good) - good / 2
        pairs = good.sum() * others.sum()
        return float((above * others).sum() / pairs) if pairs else float("nan")

    def average_precision(self, weights: Floats | None = None) -> float:
        """Return the average precision: the area under the precision-recall curve, taken as a step function. The result
        is NaN if no document is good."""
        good, others = self.steps(weights)
        total = good.sum()
        if not total:
            return float("nan")
        weight_above = np.cumsum(good + others)
        precision = np.divide(np.cumsum(good), weight_above, out=np.ones_like(weight_above), where=weight_above > 0)
        return float((precision * good).sum() / total)

    def curve(self, points: int = 20) -> list[dict[str, float]]:
        """Return the precision-recall curve as a list of points, one for each recall of 1/points, 2/points … 1. A point
        holds the highest threshold that reaches its recall, and what this threshold gives: precision, recall, F1 and
        the share of all documents kept by `score >= threshold`. If several recalls have the same threshold, it is
        listed once. The list is empty if no document is good."""
        good, others = self.steps()
        total, documents = good.sum(), len(self.good)
        if not total:
            return []
        hits, weight_above = np.cumsum(good), np.cumsum(good + others)
        out: list[dict[str, float]] = []
        for number in range(1, points + 1):
            place = int(np.searchsorted(hits, total * number / points - 1e-9))
            good_above, above = hits[place], weight_above[place]
            point = {"threshold": float(self.scores[self.starts[place]]), "precision": _short(good_above / above),
                     "recall": _short(good_above / total), "f1": _short(2 * good_above / (above + total)),
                     "kept": _short(above / documents)}
            if not out or point != out[-1]:
                out.append(point)
        return out


def bootstrap(measures: Mapping[str, Callable[[Floats], float]], n: int, seed: int,
              resamples: int = RESAMPLES) -> dict[str, Floats]:
    """Compute measures on documents drawn at random with replacement, `resamples` times. Returns {name: values,
    float64[resamples]}. All measures get the same draws, so the difference between two measures can be taken draw by
    draw.

    A measure is a function. It gets an array that says how often each of the `n` documents was drawn, and returns a
    number.
    """
    rng = np.random.Generator(np.random.PCG64(seed))
    result: dict[str, list[float]] = {name: [] for name in measures}
    for _ in range(resamples):
        drawn = np.bincount(rng.integers(0, n, n), minlength=n).astype(np.float64)
        for name, measure in measures.items():
            result[name].append(measure(drawn))
    return {name: np.array(values) for name, values in result.items()}


def interval(values: Floats) -> list[float] | None:
    """Return [low, high], the bounds between which the middle 95 % of the finite bootstrap values lie; None if no value
    is finite."""
    values = values[np.isfinite(values)]
    if not len(values):
        return None
    tail = (1 - INSIDE) / 2
    return [_short(value) for value in np.quantile(values, [tail, 1 - tail])]


def calibration_error(probabilities: ArrayLike, good: ArrayLike, bins: int = 10) -> float:
    """Return the expected calibration error of `probabilities`, the probabilities of being good (Naeini et al. 2015,
    with equal-mass bins). Documents are sorted by probability and divided into bins of (nearly) equal numbers of
    documents. The error of a bin is |mean probability - share of good documents|. The result is the mean error over
    bins, weighted by their numbers of documents. It is 0 without documents."""
    predicted, observed = np.asarray(probabilities, np.float64), np.asarray(good, np.float64)
    order = np.argsort(predicted, kind="stable")
    parts = [part for part in np.array_split(order, bins) if len(part)]
    errors = (abs(predicted[part].mean() - observed[part].mean()) * len(part) for part in parts)
    return float(sum(errors) / len(predicted)) if len(predicted) else 0.0


def brier(probabilities: ArrayLike, good: ArrayLike) -> float:
    """Return the Brier score: the mean squared difference between the probability of being good and the truth (0 or
    1)."""
    return float(np.mean((np.asarray(probabilities, np.float64) - np.asarray(good, np.float64)) ** 2))


def threshold_keeping(scores: ArrayLike, share: float) -> float:
    """Return the lowest score t for which at most a share `share` of the documents have `score >= t`.

    If more than this share of the documents have the highest score, no score meets the condition. The result is then a
    number above every score. It is infinite without documents.
    """
    ordered = np.sort(np.asarray(scores, np.float64))[::-1]
    count = int(np.floor(share * len(ordered) + 1e-9))
    if count <= 0:
        return float(np.nextafter(ordered[0], np.inf)) if len(ordered) else float("inf")
    if count >= len(ordered):
        return float(ordered[-1])
    if ordered[count - 1] > ordered[count]:
        return float(ordered[count - 1])
    above = ordered[ordered > ordered[count]]          # documents with equal scores across the cut all stay out
    return float(above[-1]) if len(above) else float(np.nextafter(ordered[0], np.inf))


# -- how far two samples are apart -------------------------------------------------------------------------------------
def stability_index(expected: Sequence[float] | Floats, observed: Sequence[float] | Floats) -> float:
    """Return the population stability index of two histograms of counts. It is the sum of (q - p) ln(q / p) over the
    bins, where p and q are the shares of a bin in the two histograms. Half a document is added to each bin, so that no
    share is 0. By convention, an index below 0.1 means no change, and an index of 0.25 or more means another population
    (Siddiqi 2006)."""
    p, q = np.asarray(expected, np.float64) + 0.5, np.asarray(observed, np.float64) + 0.5
    p, q = p / p.sum(), q / q.sum()
    return float(((q - p) * np.log(q / p)).sum())


def stability_noise(bins: int, n: int, m: int) -> float:
    """Return the approximate mean of `stability_index` over pairs of samples of n and m documents from one population,
    that is, its size by chance. It is (bins - 1) (1/n + 1/m)."""
    return (bins - 1) * (1 / n + 1 / m) if n and m else float("inf")


def ks_distance(at: ArrayLike, below: ArrayLike, scores: ArrayLike) -> float:
    """Return the Kolmogorov-Smirnov distance between the sample `scores` and a distribution. The distribution is known
    at some points only: `below[i]` is its share of values <= at[i]. The result is therefore a lower bound."""
    ordered = np.sort(np.asarray(scores, np.float64))
    shares = np.searchsorted(ordered, np.asarray(at, np.float64), side="right") / max(1, len(ordered))
    return float(np.abs(shares - np.asarray(below, np.float64)).max(initial=0.0))


def ks_critical(n: int, m: int, alpha: float = 0.001) -> float:
    """Return the critical Kolmogorov-Smirnov distance: samples of n and m documents from one population have a greater
    distance with probability `alpha` (asymptotically)."""
    return float(np.sqrt(-np.log(alpha / 2) / 2) * np.sqrt((n + m) / (n * m))) if n and m else float("inf")


def _short(value: Any) -> float:
    return round(float(value), 4)
