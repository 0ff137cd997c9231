"""Counts the documents of a pass for the report, so that the report need not read the documents.

Every count is taken from a row when it is written. So a document whose verdict was copied from an earlier run
(`replay`) counts like a new one. The counters of all tasks can be added up (`pipeline.store.records.merge_counters`)::

    "kept", "languages", "lengths"      kept documents by source, as in docs/architecture.md
    "licences": {source: {licence: docs}}       kept documents that state a licence (`licence_label`)
    "dropped_languages": {stage: {language: docs}}      dropped documents, by their language when they were dropped
    "dropped_lengths": {source: {bin: docs}}            dropped documents, by log2 of their characters when they were
                                        dropped
    "dropped_licences": {source: {licence: docs}}       dropped documents, by licence; '' for those that state none
    "pii": {signal: n}                  sums of the signals pii_* over kept documents, also of signals that an earlier
                                        pass computed. Values are cut to whole numbers: a sum of floats would depend on
                                        their order, and one NaN would spoil it
    "dropped_pii": {signal: n}          the same sums over dropped documents
    "scores": {signal: {bin: docs}}     histograms of the signals that stages show (`Stage.scored`), over all documents
                                        that the stage has seen
    "similarity": {barrier: {bin: docs}}    documents that the barrier removed, by similarity to the kept document
    "tallies": {stage: …}               what the stages count themselves (`Stage.counts`), over all documents seen
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from pipeline.passes.chain import LoadedStage, count
from pipeline.passes.licences import licence_label
from pipeline.passes.storable import language_label
from pipeline.store.records import Counters, merge_counters
from stages.document import Document
from stages.stage import Stage

#: largest count that a pii_* signal may give: beyond it, a float cannot hold every whole number
MOST_PII = 2.0 ** 53
#: bins of the similarity of removed documents, over [0, 1]
SIMILARITY_BINS = 20
#: The histogram of a score has BINS bins for each factor of two. A score below 2**LOWEST counts as 0, and a score of
#: 2**HIGHEST or more falls into the last bin
BINS, LOWEST, HIGHEST = 16, -13, 40


def score_bin(score: float) -> int | None:
    """Returns the number of the histogram bin that a score falls into; None for a score that is not finite.

    Bin 0 holds scores whose absolute value is below 2**LOWEST. From there to 2**HIGHEST, the range between two
    successive powers of two is divided into BINS bins of equal width. The last bin also holds all larger scores. A
    negative score has the negative number of its absolute value's bin, so that bins are in the order of the scores. The
    arithmetic is exact.
    """
    if not math.isfinite(score):
        return None
    part, power = math.frexp(abs(score))                 # part · 2**power, 0.5 <= part < 1
    if power <= LOWEST or not score:
        return 0
    number = (power - LOWEST - 1) * BINS + int((part - 0.5) * 2 * BINS) + 1
    number = min(number, (HIGHEST - LOWEST) * BINS)
    return -number if score < 0 else number


def bin_edges(number: int) -> tuple[float, float]:
    """Returns the edges (from, to) of the histogram bin with this number. It holds the scores s with from <= |s| < to;
    the last bin of each sign also holds all larger |s|."""
    if not number:
        return 0.0, 2.0 ** LOWEST
    octave, place = divmod(abs(number) - 1, BINS)
    low = 2.0 ** (octave + LOWEST)
    return low * (1 + place / BINS), low * (1 + (place + 1) / BINS)


class Tally:
    """Counts the documents of a pass as they are written. `steps` is the chain of stages, and `signals` are the names
    of all signal columns (numbers stored beside a document). With `until_drop`, a document goes no further than the
    stage that drops it."""

    def __init__(self, steps: Sequence[LoadedStage], signals: Iterable[str], until_drop: bool) -> None:
        self._places = {step.name: place for place, step in enumerate(steps)}
        self._end = len(steps)
        self._until_drop = until_drop
        self._scores = [(place, name) for place, step in enumerate(steps) for name in step.stage.scored()]
        self._counting = [(place, step) for place, step in enumerate(steps)
                          if not step.foreign and type(step.stage).counts is not Stage.counts]
        self._pii = {name: 0 for name in signals if name.startswith("pii_")}
        self._dropped_pii = dict(self._pii)
        #: documents and bytes kept, by source, language and length together: one look-up per document instead of three
        self._kept: dict[tuple[str, str, int], list[int]] = {}
        self._licences: dict[str, dict[str, int]] = {}
        self._dropped: dict[tuple[str, str, str, int], int] = {}
        self._dropped_licences: dict[str, dict[str, int]] = {}
        self._bins: dict[str, dict[int, int]] = {}
        self._similar: dict[str, dict[int, int]] = {}
        self._tallies: Counters = {}

    def kept(self, docs: Iterable[Document]) -> None:
        """Count documents that every stage kept."""
        stages_count = bool(self._scores or self._counting)
        for doc in docs:
            kind = doc.source, language_label(doc.language), len(doc.text).bit_length()
            into = self._kept.get(kind)
            if into is None:
                into = self._kept[kind] = [0, 0]
            into[0] += 1
            into[1] += doc.text_bytes
            if doc.meta and (licence := licence_label(doc.meta)):
                count(self._licences.setdefault(doc.source, {}), licence, 1)
            _add_pii(self._pii, doc)
            if stages_count:
                self._count_stages(doc, self._end)

    def dropped(self, doc: Document, stage: str) -> None:
        """Count a document that the stage `stage` of the chain dropped. The counts are taken from the row that is
        written for the document."""
        self._count_dropped(doc, stage)
        self._count_stages(doc, self._places[stage] if self._until_drop else self._end)

    def removed(self, doc: Document, barrier: str, similarity: float | None) -> None:
        """Count a document that the barrier before the chain (a step such as deduplication) removed. Its `similarity`
        to the kept document (0 to 1) is counted, too, unless it is None."""
        self._count_dropped(doc, barrier)
        if similarity is not None:
            bins = self._similar.setdefault(barrier, {})
            number = min(math.floor(similarity * SIMILARITY_BINS), SIMILARITY_BINS - 1)
            bins[number] = bins.get(number, 0) + 1

    def _count_dropped(self, doc: Document, stage: str) -> None:
        # an input column may hold a string of any length
        kind = stage, language_label(doc.language), doc.source, len(doc.text).bit_length()
        self._dropped[kind] = self._dropped.get(kind, 0) + 1
        count(self._dropped_licences.setdefault(doc.source, {}), licence_label(doc.meta) if doc.meta else "", 1)
        _add_pii(self._dropped_pii, doc)

    def _count_stages(self, doc: Document, last: int) -> None:
        """Count the scores of a document, and add what `Stage.counts` of each stage returns for it. Only stages up to
        number `last` of the chain are included, because later ones have not seen the document."""
        for place, name in self._scores:
            score = doc.signals.get(name) if place <= last else None
            number = None if score is None else score_bin(score)
            if number is not None:
                bins = self._bins.setdefault(name, {})
                bins[number] = bins.get(number, 0) + 1
        for place, step in self._counting:
            counts = step.stage.counts(doc) if place <= last else None
            if counts:
                merge_counters(self._tallies.setdefault(step.name, {}), counts)

    def into(self, counters: Counters) -> None:
        """Add all counts so far to the counters of the pass, which go into the commit record of the task."""
        for (source, language, bits), (docs, size) in self._kept.items():
            into = counters["kept"].setdefault(source, {"docs": 0, "bytes": 0})
            into["docs"] += docs
            into["bytes"] += size
            count(counters["languages"].setdefault(source, {}), language, docs)
            count(counters["lengths"].setdefault(source, {}), str(max(bits, 1) - 1), docs)
        languages: dict[str, Any] = {}
        lengths: dict[str, Any] = {}
        for (stage, language, source, bits), docs in self._dropped.items():
            count(languages.setdefault(stage, {}), language, docs)
            count(lengths.setdefault(source, {}), str(max(bits, 1) - 1), docs)
        totals = {"licences": self._licences, "dropped_languages": languages, "dropped_lengths": lengths,
                  "dropped_licences": self._dropped_licences, "pii": self._pii, "dropped_pii": self._dropped_pii,
                  "scores": {name: _keyed(bins) for name, bins in self._bins.items()},
                  "similarity": {name: _keyed(bins) for name, bins in self._similar.items()}, "tallies": self._tallies}
        counters.update({name: total for name, total in totals.items() if total})


def _add_pii(sums: dict[str, int], doc: Document) -> None:
    for name in sums:
        value = doc.signals.get(name)
        if value and abs(value) < MOST_PII:
            sums[name] += int(value)


def _keyed(bins: dict[int, int]) -> dict[str, int]:
    """Returns the bins of a histogram in ascending order, with strings as keys for JSON."""
    return {str(number): docs for number, docs in sorted(bins.items())}
