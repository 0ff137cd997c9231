"""Functions for shingle sets (hashes of the word n-grams of a document): they sort sets, compare two of them, and
decide which documents of small clusters are near-duplicates.

A shingle set is a sorted array of different unsigned integers of 64 bits. The integers are hashes, so they are spread
evenly over all 64-bit values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pipeline.base.compiled import njit

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Hashes = NDArray[np.uint64]

_U = np.uint64
#: bytes that a set in a cache takes besides its values, for its objects
SET_BYTES = 400
#: most values of one range that `_sort` sorts by insertion, whose time grows with their square
_CROWDED = 64


# -- sets ------------------------------------------------------------------------------------------------------------
@njit(cache=True)
def _sort(values, out, ends):
    """Write the values to `out`, sorted. The values are distributed to ranges of equal width first. There are as many
    ranges as values, rounded up to a power of 2, so most ranges hold one or two values if these are spread evenly.
    `ends` is an array with room for a number for each range."""
    count = _U(values.shape[0])
    bits = _U(1)
    while (_U(1) << bits) < count:
        bits += _U(1)
    ranges, shift = _U(1) << bits, _U(64) - bits
    for number in range(ranges):
        ends[number] = 0
    for i in range(count):
        ends[values[i] >> shift] += np.uint32(1)
    end, largest = np.uint32(0), np.uint32(0)
    for number in range(ranges):
        held = ends[number]
        largest = max(largest, held)
        ends[number] = end                                # where the range begins
        end += held
    for i in range(count):
        number = values[i] >> shift
        out[ends[number]] = values[i]
        ends[number] += np.uint32(1)
    if largest > _CROWDED:
        out.sort()
        return
    for _ in range(2):                                    # puts most values in place; no branch to mispredict
        for i in range(_U(1), count):
            left, right = out[i - _U(1)], out[i]
            out[i - _U(1)] = left if left < right else right
            out[i] = right if left < right else left
    for i in range(1, values.shape[0]):
        value, place = out[i], i
        while place > 0 and out[place - 1] > value:
            out[place] = out[place - 1]
            place -= 1
        out[place] = value


@njit(cache=True)
def _distinct(ordered):
    """Move the distinct values of a sorted array to the beginning of the array, each once, and return their number."""
    if not ordered.shape[0]:
        return 0
    count = _U(1)
    for i in range(_U(1), _U(ordered.shape[0])):
        is_new = ordered[i] != ordered[i - _U(1)]
        ordered[count] = ordered[i]                       # overwritten by the next value unless it is new
        count += _U(is_new)
    return np.int64(count)


@njit(cache=True)
def _distinct_of_texts(values, counts, out, ends):
    """Write the distinct values of each text to `out`, sorted within a text, one text after another. `values` holds the
    values of all texts, one text after another, and `counts` the number of values in each text. `counts` is overwritten
    with the numbers of distinct values. Returns the number of distinct values of all texts together."""
    total, start = 0, 0
    for number in range(counts.shape[0]):
        stop = start + counts[number]
        kept = out[total:total + counts[number]]
        _sort(values[start:stop], kept, ends)
        counts[number] = _distinct(kept)
        total += counts[number]
        start = stop
    return total


def distinct_of_texts(values: Hashes, counts: NDArray[np.int64]) -> tuple[Hashes, NDArray[np.int64]]:
    """Return the distinct values of each of many texts, sorted within a text. `values` holds the values of all texts,
    one text after another, and `counts` the number of values in each text. Returns (the distinct values, one text after
    another; their number in each text)."""
    out, counts = np.empty(len(values), np.uint64), counts.copy()
    most = int(counts.max(initial=0))
    sets = out[:_distinct_of_texts(values, counts, out, np.empty(2 * most + 2, np.uint32))]
    # if few values are distinct, they are copied: a view would keep the whole buffer in memory
    return (sets.copy() if 2 * len(sets) < len(out) else sets), counts


def distinct(values: Hashes) -> Hashes:
    """Return the distinct values of an array of hashes, sorted. `np.unique` does the same, but takes several times as
    long."""
    return distinct_of_texts(values, np.array([len(values)], np.int64))[0]


@njit(cache=True)
def common(a, b):
    """Return how many values two arrays have in common. Each array must be sorted and without repetitions."""
    i, j, shared = 0, 0, 0
    while i < a.shape[0] and j < b.shape[0]:
        if a[i] == b[j]:
            shared, i, j = shared + 1, i + 1, j + 1
        elif a[i] < b[j]:
            i += 1
        else:
            j += 1
    return shared


def jaccard(a: Hashes, b: Hashes) -> float:
    """Return the Jaccard similarity |A and B| / |A or B| of two shingle sets (hashes of word n-grams, sorted, unique).
    The similarity is 0 if both sets are empty."""
    shared = int(common(a, b))
    union = len(a) + len(b) - shared
    return shared / union if union else 0.0


# -- small clusters --------------------------------------------------------------------------------------------------
class Decided(NamedTuple):
    """What `judge_clusters` decided about the documents of clusters. A document is named by its number among all
    documents of these clusters."""

    twins: NDArray[np.int64]               # for each document: the one kept instead of it, or -1 if it stays
    similarities: NDArray[np.float64]      # of each removed document and the one kept instead
    near: NDArray[np.int64]                # pairs of kept documents that resemble each other
    near_similarities: NDArray[np.float64]
    comparisons: int
    most_kept: int                         # largest number of documents kept of one cluster


@njit(cache=True)
def _judge_clusters(starts, stops, bands, values, offsets, counts, threshold, containment, resembling, twins,
                    similarities, near, near_similarities):
    """The compiled part of `judge_clusters`, which explains the arguments. Writes its results to `twins`,
    `similarities`, `near` and `near_similarities`, whose meaning is that in `Decided`. Returns (the number of pairs in
    `near`, the number of comparisons, the largest number of documents kept of one cluster)."""
    pairs, comparisons, most = 0, 0, 0
    largest = 0
    for cluster in range(starts.shape[0]):
        largest = max(largest, stops[cluster] - starts[cluster])
    kept, shared = np.empty(largest, np.int64), np.empty(largest, np.int64)
    for cluster in range(starts.shape[0]):
        survivors = 0
        for i in range(starts[cluster], stops[cluster]):
            for k in range(survivors):
                shared[k] = 0
                for band in range(bands.shape[1]):
                    shared[k] += bands[i, band] == bands[kept[k], band]
            twins[i], pairs_before, own = -1, pairs, values[offsets[i]:offsets[i] + counts[i]]
            while True:
                best = -1                                 # the kept one that shares the most bands, then the first one
                for k in range(survivors):
                    if shared[k] > 0 and (best < 0 or shared[k] > shared[best]):
                        best = k
                if best < 0:
                    break
                shared[best] = 0
                j = kept[best]
                less, more = min(counts[i], counts[j]), max(counts[i], counts[j], 1)
                fits = containment > 0 and counts[i] <= counts[j]
                if not fits and less / more < threshold:
                    continue
                comparisons += 1
                both = common(own, values[offsets[j]:offsets[j] + counts[j]])
                union = counts[i] + counts[j] - both
                similarity = both / union if union else 0.0
                if similarity >= threshold or (fits and counts[i] > 0 and both / counts[i] >= containment):
                    twins[i], similarities[i], pairs = j, similarity, pairs_before
                    break
                if similarity >= resembling:
                    near[pairs, 0], near[pairs, 1], near_similarities[pairs] = i, j, similarity
                    pairs += 1
            if twins[i] < 0:
                kept[survivors] = i
                survivors += 1
        most = max(most, survivors)
    return pairs, comparisons, most


def judge_clusters(starts: NDArray[np.int64], stops: NDArray[np.int64], bands: Hashes, values: Hashes,
                   offsets: NDArray[np.int64], counts: NDArray[np.int64], threshold: float, containment: float,
                   resembling: float) -> Decided:
    """Decide which documents of small clusters are removed. The result is that of
    `stages.dedup.judge.ClusterJudge.judge_cluster`, in clusters so small that its limit on comparisons has no effect.

    Cluster c has the documents from starts[c] to stops[c] (exclusive), in the order in which they are decided. Document
    i has the band keys bands[i]. Its shingle set is the counts[i] values from offsets[i] on in `values`. Pairs of kept
    documents are reported if their similarity is at least `resembling`.
    """
    sizes = stops - starts
    twins, similarities = np.empty(len(counts), np.int64), np.empty(len(counts), np.float64)
    near = np.empty((int((sizes * (sizes - 1) // 2).sum()), 2), np.int64)
    near_similarities = np.empty(len(near), np.float64)
    pairs, comparisons, most_kept = _judge_clusters(starts, stops, bands, values, offsets, counts, threshold,
                                                    containment, resembling, twins, similarities, near,
                                                    near_similarities)
    return Decided(twins, similarities, near[:pairs], near_similarities[:pairs], int(comparisons), int(most_kept))
