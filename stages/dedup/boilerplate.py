"""Finds the boilerplate of a cluster of near-duplicates: shingles (hashes of word n-grams) that many documents of one
source have, such as those of a menu and a legal notice. `minhash` can leave them out of the comparison of texts.

Two pages of a template may have most of their shingles in common, although what they say differs. Of two copies of a
page that a source has many times, on the other hand, all shingles look like boilerplate, and only the differences are
left. So the boilerplate is left out only if both texts have at least the share LEAST of their shingles besides.
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

#: smallest share of a text's shingles that must be no boilerplate, for boilerplate to be left out
LEAST = 0.1
#: most documents of a source that may share a text without its being boilerplate, however few documents the source has.
#: A small share of few documents is one or two: without this limit, what a page and its copy share would be boilerplate
COPIES = 10
#: memory that boilerplate takes in a task that compares texts, in MB
MEMORY_MB = 64
#: bits of the number of a counter; shingles that are counted together; shingles that are counted exactly; bytes of the
#: sets without boilerplate that are kept
_BITS, _BATCH, _MOST, _KEPT_BYTES = 21, 1 << 18, 1 << 19, 16 << 20


def boilerplate_limits(share: float, plan: Sequence[PartGroup]) -> dict[str, Any]:
    """Return the arguments of `Boilerplate` for some groups of parts (files of documents): shingles are boilerplate if
    more than `share` of the documents of a source have them, and more than COPIES."""
    rows: dict[str, int] = {}
    for group in plan:
        rows[group.dataset] = rows.get(group.dataset, 0) + group.rows
    numbers = {dataset: number for number, dataset in enumerate(rows)}
    return {"sources": [numbers[group.dataset] for group in plan],
            "limits": [max(COPIES, int(share * n)) for n in rows.values()]}


class Boilerplate:
    """The limits beyond which shingles are boilerplate. `sources` is the number of the source of each group of parts
    (files of documents), and `limits` the most documents of each source that may have a shingle that is none."""

    def __init__(self, sources: Sequence[int], limits: Sequence[int]) -> None:
        self._sources, self._limits = np.asarray(sources, np.int64), limits
        #: a cluster of at most so many documents has no boilerplate
        self.smallest_limit = min(limits, default=COPIES)

    def of(self, groups: NDArray[Any], set_of: Callable[[int], Hashes]) -> Hashes:
        """Return the boilerplate of a cluster, sorted: the shingles that more documents of the cluster have than the
        limit of their common source. `groups` is the number of the group of each document of the cluster, and `set_of`
        returns the shingle set of a document, given its number in the cluster."""
        boilerplate = [np.zeros(0, np.uint64)]
        if len(groups) > self.smallest_limit:
            sources = self._sources[groups]
            for source, limit in enumerate(self._limits):
                documents = np.flatnonzero(sources == source).tolist()
                if len(documents) > limit:
                    boilerplate.append(_frequent(documents, set_of, limit))
        return np.unique(np.concatenate(boilerplate))


def _frequent(documents: Sequence[int], set_of: Callable[[int], Hashes], limit: int) -> Hashes:
    """Return the shingles that more than `limit` documents have, sorted.

    Memory is bounded. The first pass counts in 2**_BITS counters, each for many shingles. The second pass counts
    exactly those shingles whose counter is beyond the limit. If there are more than _MOST of these, the rarest are
    dropped, and the count of the rarest one is taken off the others (Misra and Gries 1982): a shingle near the limit
    may then be missed, but none is returned that fewer documents have.
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
    """Yield the values of sets in arrays of about _BATCH values."""
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
    """Compares documents of a cluster without its boilerplate. A document is named by a number, whose shingle set
    `set_of` returns. What is left of the sets that were used last stays in memory, because a document of a template is
    compared with many others."""

    def __init__(self, boilerplate: Hashes, set_of: Callable[[int], Hashes]) -> None:
        self._boilerplate, self._set_of = boilerplate, set_of
        self._left: OrderedDict[int, tuple[Hashes, bool]] = OrderedDict()
        self._bytes = 0

    def similarity(self, a: int, b: int) -> float:
        """Return the Jaccard similarity of two documents' shingle sets, without the boilerplate if at least the share
        LEAST of each set is left, and otherwise with it."""
        left, other_left = self._without(a), self._without(b)
        if left[1] and other_left[1]:
            return jaccard(left[0], other_left[0])
        return jaccard(self._set_of(a), self._set_of(b))

    def _without(self, document: int) -> tuple[Hashes, bool]:
        """Return (the shingles of a document that are no boilerplate, whether they are at least the share LEAST)."""
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
