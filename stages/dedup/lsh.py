"""Links the documents that share a band key (the hash of one band of a MinHash signature): the first two waves of the
search for near-duplicates.

The tasks of a wave may run at the same time. In the first wave, a task handles one group of parts (files of documents).
It sorts the band keys of the group's documents, and links all documents that have a key to the first of them. It passes
only one record per key on to the second wave, however often the key occurs. A key that a million pages share thus costs
the second wave one record per group.

In the second wave, a task handles one range of keys, from all groups. For each key, the first wave has named one
document per group, and the task links these documents to the first of them. Documents with one key are thus linked to
one document, not to each other, so n documents give n - 1 edges. A task of the first wave writes only a spanning forest
of its edges, which has at most one edge per document. A task of the second wave writes such a forest for each block of
records that it reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.base.compiled import njit
from stages.dedup.fragment import bucket_of, fixed_bytes, places, read_side, write_segments
from stages.task import Counters, Cursor, Inputs, Out

if TYPE_CHECKING:
    from numpy.typing import NDArray

    U64 = NDArray[np.uint64]

#: a band key in one group: the place of the first document that has it, and the number of documents that have it
BAND = np.dtype([("key", "<u8"), ("place", "<u8"), ("n", "<u4")])
#: keys that are sorted at a time, so that they and their places stay in the processor's cache
_RANGE = 1 << 14
#: two documents of one cluster, by place
EDGE = np.dtype([("a", "<u8"), ("b", "<u8")])


class BandMap:
    """Task that links the documents of one group of parts (files of documents) that share a band key (the hash of one
    band of a MinHash signature).

    Arguments: `sides` (references to the side tables of the group's parts, in order; they hold the band keys),
    `buckets` (number of ranges of keys).

    The task writes two exchange files: `bands.seg` (BAND records, in buckets by range of keys) and `links.seg` (EDGE
    records, pairs of linked documents, in one bucket). In both files, parts are numbered from the start of the group.
    """

    name = "lsh_map"
    version = 3

    @staticmethod
    def run(inputs: Inputs, cursor: Cursor, out: Out) -> Counters:
        keys, spots, documents, signed = [], [], 0, 0
        for part, side in enumerate(inputs.args["sides"]):
            table = read_side(inputs.fetch(side), ["bands"])
            present, raw = fixed_bytes(table["bands"])
            documents, signed = documents + len(present), signed + len(raw)
            if len(raw):
                bands = raw.view("<u8")
                keys.append(bands.ravel())
                spots.append(np.repeat(places(part, table["row"].to_numpy()[present]), bands.shape[1]))
        records, links = stars(_joined(keys), _joined(spots))
        buckets = inputs.args["buckets"]
        write_segments(out, "bands.seg", records, bucket_of(records["key"], buckets), buckets, ("key",))
        write_segments(out, "links.seg", links)
        return {"documents": documents, "signed": signed, "keys": len(records), "linked": len(links)}


class BandReduce:
    """Task that links documents of different groups that share a band key (the hash of one band of a MinHash
    signature), for one range of keys. A group is a run of files of documents, called parts.

    Arguments: `maps` (references to the files `bands.seg`, one per group), `firsts` (number of the first part of each
    group), `bucket` (number of the range).

    The task writes the exchange file `links.seg` (EDGE records, pairs of linked documents, in one bucket), which
    numbers parts over all groups. The task holds only one block of records in memory at a time, whatever the size of
    the bucket.

    The counters are `keys`, `linked` (edges), `collisions` (for each key that several documents share, the number of
    these documents), `max_bucket` (the documents of the most frequent shared key) and `bucket_sizes`: {b: number of
    keys that 2**b <= documents < 2**(b + 1) share}, b >= 1.
    """

    name = "lsh_reduce"
    version = 3

    @staticmethod
    def run(inputs: Inputs, cursor: Cursor, out: Out) -> Counters:
        args = inputs.args
        firsts = np.asarray(args["firsts"], np.uint64) << np.uint64(32)
        counters: Counters = {"keys": 0, "linked": 0, "collisions": 0, "max_bucket": 0}
        bins = np.zeros(33, np.int64)
        with out.segments("links.seg", EDGE, 1) as writer:
            for block in inputs.segments(args["maps"], args["bucket"], whole=("key",), numbered=True):
                records, links = stars(block["key"], block["place"] + firsts[block["source"]], block["n"])
                writer.write(np.zeros(len(links), np.int64), links)
                shared = records["n"][records["n"] > 1]
                counters["keys"] += len(records)
                counters["linked"] += len(links)
                counters["collisions"] += int(shared.sum())
                counters["max_bucket"] = max(counters["max_bucket"], int(shared.max(initial=0)))
                bins += log2_bins(shared)
        return {**counters, "bucket_sizes": {str(b): int(n) for b, n in enumerate(bins) if n}}


def log2_bins(sizes: NDArray[Any]) -> NDArray[np.int64]:
    """Return a histogram of sizes, int64[33]: the value at b is the number of sizes in [2**b, 2**(b + 1))."""
    return np.bincount(np.frexp(np.asarray(sizes, np.float64))[1] - 1, minlength=33)


def stars(key: U64, place: U64, counts: NDArray[np.uint32] | None = None) -> tuple[NDArray[Any], NDArray[Any]]:
    """Link, for each band key, all documents with this key to the first of them. Returns (BAND records, EDGE records).

    Entry i of `key` is a band key of the document at entry i of `place`. A place is the number of the document's file
    << 32 | row. There is one BAND record for each key, in ascending order: it holds the key, its smallest place, and
    the sum of its `counts` (default: 1 for each place). The EDGE records are a spanning forest that connects the places
    of each key.
    """
    records = np.empty(len(key), BAND)
    ends, other_ends = np.empty(len(key), np.uint64), np.empty(len(key), np.uint64)  # untouched memory costs nothing
    if (key[1:] >= key[:-1]).all():                   # merged from sorted files
        order = np.arange(len(key))
    elif counts is None:
        key, place, order = _by_ranges(key, place)
    else:
        order = np.argsort(key)
    keys, edges = _stars(order, key, place, np.zeros(0, np.uint32) if counts is None else counts, records, ends,
                         other_ends)
    return records[:keys], forest(ends[:edges], other_ends[:edges])


def _by_ranges(key: U64, place: U64) -> tuple[U64, U64, NDArray[np.int64]]:
    """Divide keys and their places into ranges of keys that fit into the processor's cache. A sort of all keys at once
    would wait for memory most of the time. Returns (keys, places, permutation that sorts these keys)."""
    bits = min(max(int(np.log2(len(key) / _RANGE)), 0), 10) if len(key) > _RANGE else 0
    starts = np.zeros(2**bits + 1, np.int64)
    key, place = _divided(key, place, bits, starts)
    order = np.empty(len(key), np.int64)
    for first, stop in zip(starts[:-1].tolist(), starts[1:].tolist()):
        order[first:stop] = np.argsort(key[first:stop])
        order[first:stop] += first
    return key, place, order


@njit(cache=True)
def _divided(key, place, bits, starts):
    """Return (the keys, their places), ordered by the first `bits` bits of the keys. `starts`, zeros at first, is
    filled with the position at which each of the 2**bits ranges of keys begins, followed by the number of all keys."""
    shift = np.uint64(64 - bits)
    for i in range(key.shape[0]):
        starts[(np.int64(key[i] >> shift) if bits else 0) + 1] += 1
    for i in range(1, starts.shape[0]):
        starts[i] += starts[i - 1]
    free = starts.copy()
    keys, places = np.empty_like(key), np.empty_like(place)
    for i in range(key.shape[0]):
        part = np.int64(key[i] >> shift) if bits else 0
        keys[free[part]], places[free[part]] = key[i], place[i]
        free[part] += 1
    return keys, places


@njit(cache=True)
def _stars(order, key, place, counts, records, ends, other_ends):
    """Write one BAND record for each key to `records`. For each key that several places have, also write edges from the
    smallest of these places to all of them, as pairs in `ends` and `other_ends`. `order` is the permutation that sorts
    the keys. Returns (number of records, number of edges)."""
    count, edges, i = 0, 0, 0
    while i < order.shape[0]:
        own = key[order[i]]
        least, total, stop = place[order[i]], 0, i
        while stop < order.shape[0] and key[order[stop]] == own:
            if place[order[stop]] < least:
                least = place[order[stop]]
            total += counts[order[stop]] if counts.shape[0] else 1
            stop += 1
        records[count]["key"] = own
        records[count]["place"] = least
        records[count]["n"] = total
        if stop - i > 1:
            for member in range(i, stop):
                ends[edges], other_ends[edges] = least, place[order[member]]
                edges += 1
        count, i = count + 1, stop
    return count, edges


# -- union-find ------------------------------------------------------------------------------------------------------
@njit(cache=True)
def _roots(ends, other_ends, size):
    """Return, for each of `size` nodes of a graph, the smallest node of its connected component. The nodes are numbered
    from 0, and edge i joins ends[i] and other_ends[i]."""
    parent = np.arange(size)
    for edge in range(ends.shape[0]):
        root, other_root = ends[edge], other_ends[edge]
        while parent[root] != root:
            parent[root] = parent[parent[root]]
            root = parent[root]
        while parent[other_root] != other_root:
            parent[other_root] = parent[parent[other_root]]
            other_root = parent[other_root]
        if root < other_root:                         # the smallest member is the root, whatever the order of the edges
            parent[other_root] = root
        else:
            parent[root] = other_root
    for root in range(size):                          # parent[root] <= root: one ascending pass flattens every path
        parent[root] = parent[parent[root]]
    return parent


def components(ends: U64, other_ends: U64) -> tuple[U64, U64]:
    """Find the connected components of a graph of documents. Edge i joins the documents ends[i] and other_ends[i]. A
    document is given by its place (number of its file << 32 | row). Returns (every place that occurs, ascending; for
    each of these places, the smallest place of its component)."""
    nodes, numbers = np.unique(np.concatenate([ends, other_ends]), return_inverse=True)
    return nodes, nodes[_roots(numbers[:len(ends)], numbers[len(ends):], len(nodes))]


def forest(ends: U64, other_ends: U64) -> NDArray[Any]:
    """Reduce edges between documents to a spanning forest with the same connected components. In each component, one
    edge leads from the smallest place (number of a file of documents << 32 | row) to every other place. Returns EDGE
    records, sorted. The result depends only on the components, not on which edges connect them."""
    nodes, roots = components(ends, other_ends)
    leaf = nodes != roots
    edges = np.empty(int(leaf.sum()), EDGE)
    edges["a"], edges["b"] = roots[leaf], nodes[leaf]
    edges.sort(order=("a", "b"))
    return edges


def _joined(blocks: list[NDArray[Any]]) -> NDArray[Any]:
    """Return the arrays of the list `blocks`, joined into one array. The list is emptied, so that its arrays no longer
    take memory."""
    joined = np.concatenate(blocks) if blocks else np.zeros(0, np.uint64)
    blocks.clear()
    return joined
