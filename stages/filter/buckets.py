"""The step `buckets`: puts scores into numbered buckets. These are twenty of equal weight (vigintiles) per topic or
language, or CCNet's three (head, middle and tail)."""

from __future__ import annotations

import bisect
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stages.stage import Stage, StageConfig, resource, signal

if TYPE_CHECKING:
    from stages.document import Document

FORMAT = "tokenmill buckets 1"
#: most different values of one score that are counted; scores are rounded to a grid, which leaves far fewer
MOST_VALUES = 20_000_000
#: most buckets, most groups, and most bytes of a file of edges
MOST_BUCKETS, MOST_GROUPS, MOST_BYTES = 1000, 100_000, 64 << 20


class Buckets(Stage):
    """Write, for each score of a document, the number of the bucket that it falls into, 0 for the lowest. The bucket of
    the signal `quality_score` is written as the signal `quality_score_bucket`.

    The edges of the buckets are the scores at which the next bucket begins. `tokenmill buckets fit` computes them from
    a published dataset, in one of two ways. It makes twenty buckets of equal weight, as Dolma 3 does per topic and
    Nemotron-CC by tokens (arXiv 2412.02595). Or it cuts at given shares, as CCNet does at 30 and 60 % per language
    (arXiv 1911.00359).

    The bucket of a score is the number of edges that are less than or equal to it. A document gets no bucket for a
    score that it lacks, and none if its group (a language or topic) has no edges. The step `buckets` drops nothing. A
    later step `where` that asks for a bucket drops a document without it, as `where_no_quality_score_bucket`.
    """

    name = "buckets"
    version = 2
    cost_ms = 0.005

    class Config(StageConfig):
        edges: str = resource(..., "file written by `tokenmill buckets fit`")
        scores: tuple[str, ...] | None = signal(None, "scores to be put in buckets; null: all that the file knows",
                                                min_length=1)

    def __init__(self, config: Any = None, **kw: Any) -> None:
        super().__init__(config, **kw)
        self._broken = ""
        try:
            self._edges = Edges.read(self.config.edges)
        except (ValueError, OSError) as e:
            self._edges, self._broken = Edges(None, {}), str(e)       # reported by `problems`
        self._scores = tuple(s for s in self.config.scores or self._edges.scores if s in self._edges.scores)
        self.signals = tuple(f"{score}_bucket" for score in self._scores)

    def problems(self) -> dict[str, str]:
        if self._broken:
            return {"edges": self._broken}
        strange = sorted(set(self.config.scores or ()) - set(self._edges.scores))
        return {"scores": f"{self.config.edges} has no edges for '{strange[0]}'; it has "
                          f"{', '.join(self._edges.scores)}"} if strange else {}

    def reads(self) -> dict[str, str]:
        grouping = self._edges.by
        by_signal = {grouping: "edges"} if grouping and grouping != "source" else {}
        return {**dict.fromkeys(self._scores, "scores"), **by_signal}

    def setup(self) -> None:
        for name, message in self.problems().items():
            raise ValueError(f"buckets: {name}: {message}")

    def process(self, doc: Document) -> str | None:
        group = self._edges.group(doc)
        for score in self._scores:
            value, edges = doc.signals.get(score), self._edges.scores[score].get(group)
            doc.signals.pop(f"{score}_bucket", None)               # an earlier dataset may have stored a value
            if value is not None and edges is not None:
                doc.signals[f"{score}_bucket"] = bisect.bisect_right(edges, value)
        return None


@dataclass
class Edges:
    """The contents of a file of bucket edges (the scores at which the next bucket begins). `scores` is {score: {group:
    ascending edges}}. `by` says what decides a document's group: "language", "source" or the name of a signal (a number
    stored with the document). If `by` is None, all documents are in one group, named ""."""

    by: str | None
    scores: dict[str, dict[str, list[float]]]

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Edges:
        """Read a file of bucket edges (the scores at which the next bucket begins). Raises OSError if the file cannot
        be read. Raises ValueError, which names the file, if the file has more than MOST_BYTES or is not in the form
        that `tokenmill buckets fit` writes."""
        try:
            if Path(path).stat().st_size > MOST_BYTES:
                raise ValueError(f"more than {MOST_BYTES:,} bytes")
            doc = json.loads(Path(path).read_text(encoding="utf-8"))
            if doc["format"] != FORMAT:
                raise ValueError(f"its format is {doc['format']!r}")
            scores = {str(score): {str(group): [math.inf if edge is None else float(edge) for edge in fitted["edges"]]
                               for group, fitted in groups.items()} for score, groups in doc["scores"].items()}
            if not all(a <= b for groups in scores.values() for edges in groups.values()
                       for a, b in pairwise([-math.inf, *edges, math.inf])):               # also false for NaN
                raise ValueError("edges do not ascend")
            if not isinstance(doc["by"], str | None):
                raise ValueError("'by' is no name")
            return cls(doc["by"], scores)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
            raise ValueError(f"{path} is no file of `tokenmill buckets fit` ({e})") from None

    def group(self, doc: Document) -> str:
        if self.by is None:
            return ""
        if self.by in ("language", "source"):
            return str(getattr(doc, self.by))
        return group_name(doc.signals.get(self.by))


def group_name(value: float | None) -> str:
    """Return the name of a document's group. `value` is the value of the signal (a number stored with the document,
    such as its topic) that decides the group. The name is '' if `value` is None or not finite."""
    if value is None or not math.isfinite(value):
        return ""
    return str(int(value)) if value == int(value) else repr(value)


# -- fitting -----------------------------------------------------------------------------------------------------------
@dataclass
class Weights:
    """Holds, for each value of a score, the total weight of the documents that have this value, in one group of
    documents. Weights are integers, so the sums are exact and do not depend on how the documents are split between
    calls of `add`."""

    values: np.ndarray = field(default_factory=lambda: np.empty(0))                    # ascending, float64
    weights: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    documents: int = 0

    def add(self, values: np.ndarray, weights: np.ndarray) -> None:
        """Add documents, given by their scores and their weights. Raises ValueError if the scores then have more than
        MOST_VALUES different values."""
        every, place = np.unique(np.concatenate([self.values, values]), return_inverse=True)
        if len(every) > MOST_VALUES:
            raise ValueError(f"more than {MOST_VALUES:,} different values; round the score to a grid")
        summed = np.zeros(len(every), np.int64)
        np.add.at(summed, place, np.concatenate([self.weights, weights]))
        self.values, self.weights, self.documents = every, summed, self.documents + len(values)

    def merge(self, other: Weights) -> None:
        documents = self.documents + other.documents
        self.add(other.values, other.weights)
        self.documents = documents

    def edges(self, shares: Sequence[Fraction]) -> list[float]:
        """Return one bucket edge for each share in `shares`: the smallest score with a rank of at least that share, or
        infinity if there is none.

        The rank of a score is the share of the total weight that lower scores have, plus half of the share that the
        score itself has. Documents of equal score thus all go to one bucket: the one into which the middle of their
        weight falls.
        """
        total = int(self.weights.sum())
        doubled = (2 * np.cumsum(self.weights) - self.weights).tolist() if total else []       # 2 · total · rank
        out = []
        for share in shares:
            # rank >= share, in integers
            doubled_rank = -(-2 * share.numerator * total // share.denominator)
            place = bisect.bisect_left(doubled, doubled_rank)
            out.append(float(self.values[place]) if place < len(doubled) else math.inf)
        return out


def vigintiles(buckets: int = 20) -> list[Fraction]:
    """Return the shares of the total weight at which buckets of equal weight end: 1/20, 2/20 … 19/20 for twenty
    buckets. Raises ValueError unless 2 <= buckets <= MOST_BUCKETS."""
    if not 2 <= buckets <= MOST_BUCKETS:
        raise ValueError(f"{buckets} buckets; 2 … {MOST_BUCKETS} are possible")
    return [Fraction(number, buckets) for number in range(1, buckets)]


class Fit:
    """Collects the scores of many documents by group (a language or topic), and computes the edges of the buckets into
    which the scores are divided.

    The method `add` takes columns with one value per document: groups (None if `by` is None), {score: float64 values,
    NaN for a document without the score}, and integer weights. It raises ValueError if there are more than MOST_GROUPS
    groups, or more than MOST_VALUES different values of a score in one group.
    """

    def __init__(self, scores: Sequence[str], by: str | None) -> None:
        self.by, self.missing = by, dict.fromkeys(scores, 0)
        self.weights: dict[str, dict[str, Weights]] = {score: {} for score in scores}

    def add(self, groups: Sequence[str] | None, scores: Mapping[str, np.ndarray], weights: np.ndarray) -> None:
        if groups is None:
            rows = [("", np.arange(len(weights)))]
        else:
            names, place = np.unique(np.asarray(groups, object).astype(str), return_inverse=True)
            rows = [(str(name), np.flatnonzero(place == i)) for i, name in enumerate(names)]
        for score, values in scores.items():
            for group, row_numbers in rows:
                scored = row_numbers[~np.isnan(values[row_numbers])]
                self.missing[score] += len(row_numbers) - len(scored)
                if len(scored):
                    by_group = self.weights[score]
                    if group not in by_group and len(by_group) >= MOST_GROUPS:
                        raise ValueError(f"more than {MOST_GROUPS:,} different values of '{self.by}'; name a topic or "
                                         f"a language")
                    by_group.setdefault(group, Weights()).add(values[scored], weights[scored])

    def document(self, shares: Iterable[Fraction], weight: str) -> dict[str, Any]:
        """Return the bucket edges for the given shares of the weight as a JSON document, which `Edges.read` reads.
        Infinite edges are null. `weight` names the quantity by which documents were weighted."""
        shares = list(shares)
        return {"format": FORMAT, "by": self.by, "weight": weight, "shares": [str(s) for s in shares], "scores": {
            score: {group: {"documents": fitted.documents, "weight": int(fitted.weights.sum()),
                            "edges": [None if math.isinf(edge) else edge for edge in fitted.edges(shares)]}
                    for group, fitted in sorted(groups.items())} for score, groups in self.weights.items()}}
