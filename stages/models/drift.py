"""Measures whether data has changed since a classifier's threshold was chosen.

A *profile* of a corpus (part of a model card) records how the scores, lengths and languages of its texts are
distributed. `compare` compares other texts with the profile, by two measures.

The population stability index says how large a change is. It is computed for every distribution, over ten bins of equal
shares. By convention, an index below 0.1 means no change, and an index of 0.25 or more means that the texts come from
another population. Two samples of n and m documents from the same population have an index of about (bins - 1)(1/n +
1/m) by chance, so only an index above three times this noise counts.

The Kolmogorov-Smirnov distance, computed for scores only, says whether a change is larger than by chance.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from stages.models import measure
from stages.scoring.models import FastText, default_lid176

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stages.models.classifier import Scores

#: stability index from which the verdict is "watch", and from which it is "drift"; an index must also exceed this many
#: times its noise
WATCH, DRIFT, NOISE = 0.1, 0.25, 3.0
#: how many bins of equal shares there are, how many points of a distribution are stored, and how many names (languages,
#: labels) are counted separately
_BINS, _POINTS, _LANGUAGES = 10, 256, 20
#: fewest documents for a verdict, and characters of a text used to find its language
FEWEST_DOCUMENTS, _LANGUAGE_CHARACTERS = 100, 5_000


def profile(texts: Sequence[str], scores: Scores) -> dict[str, Any]:
    """Describe how scores, lengths and languages are distributed in a corpus, for the card of a classifier. `compare`
    later compares other texts with this profile. Returns a dict with these entries:

    - "documents", "bytes": the size of the corpus.
    - "scores", "lengths": distributions. Each is {"at": points ascending, "below": for each point the share of values
      up to it, "bins": edges between ten bins (fewer if values are equal), "counts": values in each bin}. Scores are in
      the units of the step `quality`, lengths in characters.
    - "labels": counts by name, instead of "scores" for a classifier that only chooses among labels.
    - "languages": counts by name. They are missing if the language model is not installed.
    """
    result: dict[str, Any] = {"documents": len(texts),
                             "bytes": sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)}
    values = scores.values()
    if values is not None:
        result["scores"] = _distribution(values)
    else:
        best = Counter(scores.best())
        result["labels"] = {label: best[label] for label in scores.labels}
    result["lengths"] = _distribution(np.array([len(text) for text in texts], np.float64))
    languages = _languages(texts)
    if languages is not None:
        result["languages"] = dict(sorted(languages.items(), key=lambda item: (-item[1], item[0])))
    return result


def compare(baseline: dict[str, Any], texts: Sequence[str], scores: Scores) -> dict[str, Any]:
    """Compare texts with the profile `baseline` of an earlier corpus, to find out whether the data has changed.
    `scores` are the classifier's scores of the texts.

    Returns {"verdict", "documents"} and an entry for each of "scores", "lengths", "languages" and "labels" that both
    the profile and the texts have. Such an entry is {"index": the population stability index, "noise": its size by
    chance, "verdict": "same", "watch" or "drift"}. The overall verdict is the worst of the entries. All verdicts are
    "too_few" if the profile or the texts have fewer than FEWEST_DOCUMENTS documents.

    Some entries have further values. "scores" has the Kolmogorov-Smirnov "distance" and its "critical" value; a
    distance up to this value makes the verdict "same". "labels" and "languages" have "moved", the names whose shares
    changed most: [[name, share before, share after], …].
    """
    n, m = baseline["documents"], len(texts)
    result: dict[str, Any] = {"documents": m}
    values = scores.values()
    if values is not None and "scores" in baseline:
        part = _compared_distribution(baseline["scores"], values, n, m)
        part["distance"] = round(measure.ks_distance(baseline["scores"]["at"], baseline["scores"]["below"], values), 4)
        part["critical"] = round(measure.ks_critical(n, m), 4)
        if part["distance"] <= part["critical"]:
            part["verdict"] = "same"
        result["scores"] = part
    if "lengths" in baseline:
        lengths = np.array([len(text) for text in texts], np.float64)
        result["lengths"] = _compared_distribution(baseline["lengths"], lengths, n, m)
    if scores.score is None and "labels" in baseline:
        best = Counter(scores.best())
        result["labels"] = _compared_shares(baseline["labels"], best)
    if "languages" in baseline and (languages := _languages(texts)) is not None:
        result["languages"] = _compared_shares(baseline["languages"], languages)
    order = ("same", "watch", "drift")
    verdicts = [part["verdict"] for part in result.values() if isinstance(part, dict)]
    result["verdict"] = max(verdicts, key=order.index, default="same")
    if min(n, m) < FEWEST_DOCUMENTS:
        for part in [result, *(part for part in result.values() if isinstance(part, dict))]:
            part["verdict"] = "too_few"
    return result


def _distribution(values: NDArray[np.float64]) -> dict[str, Any]:
    """Return the distribution of values, in the form of `profile`. Without values, the lists are empty, except that
    "counts" has one bin with the count 0."""
    ordered = np.sort(values)
    if not len(ordered):
        return {"at": [], "below": [], "bins": [], "counts": [0]}
    points = np.unique(ordered[np.linspace(0, len(ordered) - 1, _POINTS).round().astype(int)])
    below = np.searchsorted(ordered, points, side="right") / len(ordered)
    edges = np.unique(ordered[(np.arange(1, _BINS) * len(ordered)) // _BINS])
    return {"at": [round(float(value), 6) for value in points], "below": [round(float(value), 6) for value in below],
            "bins": [round(float(value), 6) for value in edges],
            "counts": np.bincount(np.searchsorted(edges.round(6), values.round(6), side="right"),
                                  minlength=len(edges) + 1).tolist()}


def _compared_distribution(baseline: dict[str, Any], values: NDArray[np.float64], n: int, m: int) -> dict[str, Any]:
    counts = np.bincount(np.searchsorted(np.array(baseline["bins"]), values.round(6), side="right"),
                         minlength=len(baseline["counts"]))
    index = measure.stability_index(baseline["counts"], counts.astype(np.float64))
    return _judged(index, len(baseline["counts"]), n, m)


def _compared_shares(baseline: dict[str, int], current: Counter[str]) -> dict[str, Any]:
    """Compare how often each name (a language or label) occurs in two corpora, and judge the change. `baseline` and
    `current` are the counts. The _LANGUAGES most frequent names are compared one by one, and all others together."""
    common = [name for name, _ in (Counter(baseline) + current).most_common(_LANGUAGES)]
    n, m = sum(baseline.values()), sum(current.values())
    old, new = [baseline.get(name, 0) for name in common], [current[name] for name in common]
    part = _judged(measure.stability_index([*old, n - sum(old)], [*new, m - sum(new)]), len(common) + 1, n, m)
    shares = [(name, round(before / max(1, n), 4), round(after / max(1, m), 4))
              for name, before, after in zip(common, old, new)]
    part["moved"] = [list(row) for row in sorted(shares, key=lambda row: (-abs(row[2] - row[1]), row[0]))[:5]]
    return part


def _judged(index: float, bins: int, n: int, m: int) -> dict[str, Any]:
    """Judge how much a distribution has changed. `index` is the population stability index between samples of n and m
    documents over `bins` bins. The result holds the index, its size by chance ("noise"), and the verdict: "same",
    "watch" or "drift"."""
    noise = measure.stability_noise(bins, n, m)
    sure = index > NOISE * noise
    return {"index": round(index, 4), "noise": round(noise, 4),
            "verdict": "drift" if sure and index >= DRIFT else "watch" if sure and index >= WATCH else "same"}


def _languages(texts: Sequence[str]) -> Counter[str] | None:
    """Return how many of the texts are in each language, with the texts without a recognised language under "". Returns
    None if the language model is not installed."""
    path = default_lid176()
    if path is None:
        return None
    model = FastText(path)
    return Counter((model.predict(text[:_LANGUAGE_CHARACTERS]) or [("", 0.0)])[0][0] for text in texts)
