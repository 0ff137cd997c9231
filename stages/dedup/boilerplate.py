"""Finds the boilerplate of a cluster of near-duplicates: shingles (hashes of word n-grams) that many documents of one
source have, such as those of a menu and a legal notice. `minhash` can leave them out of the comparison of texts.

Two pages of a template may have most of their shingles in common, although what they say differs. Of two copies of a
page that a source has many times, on the other hand, all shingles look like boilerplate, and only the differences are
left. So the boilerplate is left out only if both texts have at least the share LEAST of their shingles besides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from stages.dedup.fragment import PartGroup
from stages.dedup.sets import jaccard

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Hashes = NDArray[np.uint64]

#: smallest share of a text's shingles that must be no boilerplate, for boilerplate to be left out
LEAST = 0.1
#: documents whose shingles are counted together, and bits of the number of a counter
_DOCUMENTS, _BITS = 1024, 22


class Boilerplate:
    """The limits beyond which shingles are boilerplate. `share` is a share of the documents of a source, `sources` the
    number of the source of each group of parts (files of documents), and `rows` the number of documents of each
    source."""

    def __init__(self, share: float, sources: Sequence[int], rows: Sequence[int]) -> None:
        self._sources = np.asarray(sources, np.int64)
        self._limits = [share * n for n in rows]

    def of(self, groups: NDArray[Any], set_of: Callable[[int], Hashes]) -> Hashes:
        """Return the boilerplate of a cluster, sorted: the shingles that more documents of the cluster have than the
        limit of their common source. `groups` is the number of the group of each document of the cluster, and `set_of`
        returns the shingle set of a document, given its number in the cluster.

        Memory holds 2**22 counters, the sets of 1,024 documents, and little more than the boilerplate: a shingle is
        counted exactly only if the counter that it shares with others is beyond the limit.
        """
        found = [np.zeros(0, np.uint64)]
        if len(groups) <= min(self._limits):
            return found[0]
        for source, limit in enumerate(self._limits):
            documents = np.flatnonzero(self._sources[groups] == source).tolist()
            if len(documents) <= limit:
                continue
            counters = np.zeros(1 << _BITS, np.uint32)
            for document in documents:
                np.add.at(counters, set_of(document) >> np.uint64(64 - _BITS), np.uint32(1))
            frequent = counters > limit
            values, counts = np.zeros(0, np.uint64), np.zeros(0, np.int64)
            for start in range(0, len(documents), _DOCUMENTS):
                sets = [set_of(document) for document in documents[start:start + _DOCUMENTS]]
                more = np.concatenate([s[frequent[s >> np.uint64(64 - _BITS)]] for s in sets])
                values, numbers = np.unique(np.r_[values, more], return_inverse=True)
                counts = np.bincount(numbers, np.r_[counts, np.ones(len(more), np.int64)], len(values)).astype(np.int64)
            found.append(values[counts > limit])
        return np.unique(np.concatenate(found))


def boilerplate_limits(share: float, plan: Sequence[PartGroup]) -> dict[str, Any]:
    """Return the arguments of `Boilerplate` for some groups of parts (files of documents)."""
    rows: dict[str, int] = {}
    for group in plan:
        rows[group.dataset] = rows.get(group.dataset, 0) + group.rows
    numbers = {dataset: number for number, dataset in enumerate(rows)}
    return {"share": share, "sources": [numbers[group.dataset] for group in plan], "rows": list(rows.values())}


def similarity_without(boilerplate: Hashes, a: Hashes, b: Hashes) -> float:
    """Return the Jaccard similarity of two shingle sets (sorted, unique), without the boilerplate if at least the share
    LEAST of each set is left, and otherwise with it."""
    if not len(boilerplate):
        return jaccard(a, b)
    left = [values[boilerplate[np.minimum(np.searchsorted(boilerplate, values), len(boilerplate) - 1)] != values]
            for values in (a, b)]
    enough = all(len(rest) >= LEAST * len(values) for rest, values in zip(left, (a, b)))
    return jaccard(*left) if enough else jaccard(a, b)
