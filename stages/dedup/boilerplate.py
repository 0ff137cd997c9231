"""Finds the boilerplate of a cluster of near-duplicates: shingles (hashes of word n-grams) that many documents of one
source have, such as those of a menu and a legal notice. `minhash` can leave boilerplate out of the comparison of texts.

Two pages of one template may have most of their shingles in common, although their contents differ. Without the
boilerplate, they are told apart. Two copies of one page are a different case. If a source has the page many times, all
its shingles look like boilerplate, and only the differences of the copies would be compared. So the boilerplate is left
out only if, in both texts, at least the share LEAST of the shingles are not boilerplate.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from stages.dedup.fragment import PartGroup
from stages.dedup.sets import SET_BYTES, jaccard

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Hashes = NDArray[np.uint64]

#: boilerplate is left out of a comparison only if at least this share of the shingles of each text remains
LEAST = 0.1
#: shingles of at most this many documents of a source are no boilerplate, however few documents the source has. A small
#: share of few documents is one or two: without this limit, what a page and its copy share would be boilerplate
COPIES = 10
#: memory that boilerplate takes in a task that compares texts, in MB
MEMORY_MB = 64
#: bits of the number of a counter; shingles that are counted together; shingles that are counted exactly; bytes of the
#: sets without boilerplate that are kept
_BITS, _BATCH, _MOST, _KEPT_BYTES = 21, 1 << 18, 1 << 19, 16 << 20


def boilerplate_limits(share: float, plan: Sequence[PartGroup]) -> dict[str, Any]:
    """Return the arguments of `Boilerplate` for a list of groups of parts (files of documents). Shingles are
    boilerplate if more than `share` of the documents of a source have them, and more than COPIES documents."""
    rows: dict[str, int] = {}
    for group in plan:
        rows[group.dataset] = rows.get(group.dataset, 0) + group.rows
    numbers = {dataset: number for number, dataset in enumerate(rows)}
    return {"sources": [numbers[group.dataset] for group in plan],
            "limits": [max(COPIES, int(share * n)) for n in rows.values()]}


class Boilerplate:
    """The limits beyond which shingles are boilerplate. `sources` holds for each group of parts (files of documents)
    the number of its source. `limits` holds for each source the largest number of documents that may share a shingle
    before the shingle is boilerplate."""

    def __init__(self, sources: Sequence[int], limits: Sequence[int]) -> None:
        self._sources, self._limits = np.asarray(sources, np.int64), limits
        #: a cluster of at most so many documents has no boilerplate
        self.smallest_limit = min(limits, default=COPIES)

    def of(self, groups: NDArray[Any], set_of: Callable[[int], Hashes]) -> Hashes:
        """Return the boilerplate of a cluster, sorted: the shingles that more documents of one source have, within the
        cluster, than the limit of that source allows. `groups` holds for each document of the cluster the number of its
        group. `set_of` returns the shingle set of a document, given its number in the cluster."""
        boilerplate = [np.zeros(0, np.uint64)]
        if len(groups) > self.smallest_limit:
            sources = self._sources[groups]
            for source, limit in enumerate(self._limits):
                documents = np.flatnonzero(sources == source).tolist()
                if len(documents) > limit:
                    boilerplate.append(_frequent(documents, set_of, limit))
        return np.unique(np.concatenate(boilerplate))


def _frequent(documents: Sequence[int], set_of: Callable[[int], Hashes], limit: int) -> Hashes:
    """Return the shingles that more than `limit` of the `documents` have, sorted. `set_of` returns the shingle set of a
    document. No shingle is returned that `limit` documents or fewer have, but one near the limit may be missed.

    Memory is bounded. The first pass over the sets counts in 2**_BITS counters, each for many shingles. The second pass
    counts exactly those shingles whose counter exceeds the limit. If there are more than _MOST of these, the rarest are
    dropped, and the count of the most frequent one dropped is subtracted from the other counts (Misra and Gries 1982).
    """
    shift, counters = np.uint64(64 - _BITS), np.zeros(1 << _BITS, np.uint32)
    for document in documents:
        np.add.at(counters, set_of(document) >> shift, np.uint32(1))
    frequent = counters > limit
    del counters
    values, counts = np.zeros(0, np.uint64), np.zeros(0, np.int64)
    for batch in _batches(s[frequent[s >> shift]] for s in map(set_of, documents)):
        more, times = np.unique(batch, return_counts=True)
        both = np.r_[values, more]
        order = np.argsort(both, kind="stable")
        both = both[order]
        starts = np.flatnonzero(np.r_[True, both[1:] != both[:-1]]) if len(both) else np.zeros(0, np.int64)
        values, counts = both[starts], np.add.reduceat(np.r_[counts, times][order], starts)
        if len(values) > _MOST:
            rarest = np.partition(counts, -_MOST - 1)[-_MOST - 1]
            values, counts = values[counts > rarest], counts[counts > rarest] - rarest
    return values[counts > limit]


def _batches(sets: Iterator[Hashes]) -> Iterator[Hashes]:
    """Join the shingles of many sets, and yield them in arrays of about _BATCH shingles."""
    collected: list[Hashes] = []
    size = 0
    for values in sets:
        collected.append(values)
        size += len(values)
        if size >= _BATCH:
            yield np.concatenate(collected)
            collected, size = [], 0
    if size:
        yield np.concatenate(collected)


class Remainders:
    """Compares documents of a cluster by the shingles that are not boilerplate. A document is given by a number, for
    which `set_of` returns the document's shingle set. The sets without boilerplate that were used most recently stay in
    memory, because a document of a template is compared with many others."""

    def __init__(self, boilerplate: Hashes, set_of: Callable[[int], Hashes]) -> None:
        self._boilerplate, self._set_of = boilerplate, set_of
        self._left: OrderedDict[int, tuple[Hashes, bool]] = OrderedDict()
        self._bytes = 0

    def similarity(self, a: int, b: int) -> float:
        """Return the Jaccard similarity of the shingle sets of documents `a` and `b`. Boilerplate is left out of both
        sets, unless one of them would keep less than the share LEAST of its shingles."""
        left, other_left = self._without(a), self._without(b)
        if left[1] and other_left[1]:
            return jaccard(left[0], other_left[0])
        return jaccard(self._set_of(a), self._set_of(b))

    def _without(self, document: int) -> tuple[Hashes, bool]:
        """Return (the shingles of a document that are not boilerplate, whether these are at least the share LEAST of
        all its shingles)."""
        kept = self._left.get(document)
        if kept is not None:
            self._left.move_to_end(document)
            return kept
        values = self._set_of(document)
        places = np.minimum(np.searchsorted(self._boilerplate, values), len(self._boilerplate) - 1)
        left = values[self._boilerplate[places] != values]
        self._left[document] = left, len(left) >= LEAST * len(values)
        self._bytes += left.nbytes + SET_BYTES
        while self._bytes > _KEPT_BYTES and len(self._left) > 2:
            self._bytes -= self._left.popitem(last=False)[1][0].nbytes + SET_BYTES
        return self._left[document]
