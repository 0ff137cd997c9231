"""Finds the connected components of a graph of any size. The work is done in rounds of tasks, and a task reads one
bucket of edges.

The algorithm is that of Kiveris et al., "Connected Components in MapReduce and Beyond" (SoCC 2014). For each node, let
m be the smallest of the node and its neighbours. A *large-star* round links the larger neighbours of the node to m. A
*small-star* round links the node and its smaller neighbours to m. When the two kinds of rounds alternate, every
component becomes a star around its smallest node after O(log^2 n) rounds at most. The number of edges never grows. The
result depends only on the graph and equals that of a union-find.

An edge is stored as two arcs, (u, v) and (v, u), each in the bucket of its first node. Buckets are sorted, so a task
reads the neighbours of a node in ascending order, the smallest first, and holds only one block of arcs at a time. A
node with a billion neighbours costs no more memory than one with two.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from stages.dedup.cluster import KEYS, MEMBER, edges_of, members_of, real
from stages.dedup.fragment import bucket_of
from stages.dedup.hashing import mix
from stages.dedup.lsh import forest, log2_bins
from stages.task import Counters, Cursor, Inputs, Out, Segments

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: an arc from one place to another, in the bucket of `u`
ARC = np.dtype([("u", "<u8"), ("v", "<u8")])


class Spread:
    """Task that prepares the first round of the task `Star`: it reads edges between documents, and writes each edge as
    two arcs, one in each direction.

    Arguments: `links` (references to files of EDGE records, pairs of documents), `firsts` (for each of these files the
    number to add to the part numbers in its records; a part is a file of documents), `folded` (number of edges that are
    reduced to a spanning forest at a time), `buckets` (number of buckets of arcs).

    The task writes the exchange file `edges.seg` (ARC records, in buckets by a hash of their first node `u`).
    """

    name = "stars_spread"
    version = 2

    @staticmethod
    def run(inputs: Inputs, cursor: Cursor, out: Out) -> Counters:
        args = inputs.args
        edges = 0
        with _arcs_to(out, args["buckets"]) as writer:
            for block in edges_of(inputs, args["links"], args["firsts"], args["folded"]):
                tree = forest(block["a"], block["b"])
                edges += len(tree)
                _write(writer, tree["a"], tree["b"])
        return {"edges": edges}


class Star:
    """Task that computes one round of the search for connected components, for one bucket of arcs (directed edges).

    Arguments: `edges` (references to the files of ARC records), `bucket` (number of the bucket), `buckets` (number of
    all buckets), `round` (number of the round; odd: large-star, even: small-star, as the module explains).

    The task writes the exchange file `edges.seg` (ARC records). It counts, as `moved`, the arcs in the bucket that were
    not yet part of a star. A star is a node with edges to all other nodes of its component. If the counter is 0 in all
    buckets of a round, every component is a star.
    """

    name = "stars_star"
    version = 2

    @staticmethod
    def run(inputs: Inputs, cursor: Cursor, out: Out) -> Counters:
        args = inputs.args
        large = args["round"] % 2 == 1
        edges = moved = 0
        with _arcs_to(out, args["buckets"]) as writer:
            for arcs in neighbourhoods(inputs.segments(args["edges"], args["bucket"])):
                above = arcs.v > arcs.u
                # Two kinds of edges are not part of a star yet: those to larger neighbours of a node that also has a
                # smaller neighbour, and those to smaller neighbours other than the smallest.
                moved += int((above & (arcs.least < arcs.u)).sum() + (~above & (arcs.v != arcs.least)).sum())
                if large:
                    smaller, larger = arcs.least[above], arcs.v[above]
                else:
                    other_smaller = ~above & (arcs.v != arcs.least)
                    own = arcs.first & ~above
                    smaller = np.concatenate([arcs.least[other_smaller], arcs.least[own]])
                    larger = np.concatenate([arcs.v[other_smaller], arcs.u[own]])
                edges += len(smaller)
                _write(writer, smaller, larger)
        return {"edges": edges, "moved": moved, "max_round": args["round"]}


class Members:
    """Task that finds out to which cluster each document belongs, from one bucket of arcs (directed edges) of the last
    round of the task `Star`. The arcs form one star for each cluster: a node that is joined to all other nodes of the
    cluster.

    Arguments: `edges` (references to the files of ARC records), `bucket` (number of the bucket), `groups` (number of
    the first part of each group of parts; a part is a file of documents).

    The task writes the exchange file `members.seg` (a MEMBER record for each document, in buckets by number of the
    group). The task has the same counters as `cluster.Clusters`.
    """

    name = "stars_members"
    version = 2

    @staticmethod
    def run(inputs: Inputs, cursor: Cursor, out: Out) -> Counters:
        args = inputs.args
        counters: Counters = {"candidates": 0, "clusters": 0, "max_cluster": 0}
        bins = np.zeros(33, np.int64)
        open_size = 0                              # size of the cluster whose arcs continue in the next block

        def count(sizes: NDArray[Any]) -> None:
            counters["clusters"] += len(sizes)
            counters["max_cluster"] = max(counters["max_cluster"], int(sizes.max(initial=0)))
            bins[:] += log2_bins(sizes)

        with out.segments("members.seg", MEMBER, len(args["groups"])) as writer:
            for arcs in neighbourhoods(inputs.segments(args["edges"], args["bucket"])):
                nodes, roots = arcs.u[arcs.first], arcs.least[arcs.first]
                members, group = members_of(*real(nodes, roots), args["groups"])
                writer.write(group, members)
                counters["candidates"] += len(members)
                # the cluster around a root consists of the root and all its neighbours
                starts = np.flatnonzero(arcs.first)
                documents = np.r_[0, np.cumsum(arcs.v < np.uint64(KEYS << 32))]
                lengths = np.diff(documents[np.r_[0, starts, len(arcs.u)]])
                sizes = np.r_[open_size, np.where(nodes == roots, 1, 0)]
                around = np.r_[open_size > 0, nodes == roots]
                sizes = sizes + np.where(around, lengths, 0)
                count(sizes[:-1][around[:-1]])
                open_size = int(sizes[-1]) if around[-1] else 0
            if open_size:
                count(np.array([open_size]))
        return {**counters, "cluster_sizes": {str(b): int(n) for b, n in enumerate(bins) if n}}


# -- arcs ------------------------------------------------------------------------------------------------------------
@dataclass
class Arcs:
    """A block of arcs (directed edges from `u` to `v`), ascending and without duplicates. `first` marks the first arc
    of each node `u`. `least` holds for each arc the smallest node among its `u` and all neighbours of that `u`."""

    u: NDArray[np.uint64]
    v: NDArray[np.uint64]
    first: NDArray[np.bool_]
    least: NDArray[np.uint64]


def neighbourhoods(blocks: Iterable[NDArray[Any]]) -> Iterator[Arcs]:
    """Yield the arcs (directed edges) of a graph in blocks, without duplicates. Each arc comes with the smallest of its
    first node and that node's neighbours. `blocks` holds ARC records, sorted over all blocks. The neighbours of one
    node may be in several blocks."""
    previous: tuple[int, int, int] | None = None     # the last arc, and `least` of its node
    for block in blocks:
        u, v = np.ascontiguousarray(block["u"]), np.ascontiguousarray(block["v"])
        new = np.ones(len(u), bool)
        new[1:] = (u[1:] != u[:-1]) | (v[1:] != v[:-1])
        if previous is not None and len(u):
            new[0] = (int(u[0]), int(v[0])) != previous[:2]
        u, v = u[new], v[new]
        if not len(u):
            continue
        first = np.ones(len(u), bool)
        first[1:] = u[1:] != u[:-1]
        goes_on = previous is not None and int(u[0]) == previous[0]
        first[0] = not goes_on
        starts = np.flatnonzero(first)
        least = np.minimum(u[starts], v[starts])
        if previous is not None and goes_on:
            starts, least = np.r_[0, starts], np.r_[np.uint64(previous[2]), least]
        leasts = np.repeat(least, np.diff(np.r_[starts, len(u)]))
        previous = int(u[-1]), int(v[-1]), int(leasts[-1])
        yield Arcs(u, v, first, leasts)


def _arcs_to(out: Out, buckets: int) -> AbstractContextManager[Segments]:
    return out.segments("edges.seg", ARC, buckets, key=("u", "v"))


def _write(writer: Segments, ends: NDArray[np.uint64], other_ends: NDArray[np.uint64]) -> None:
    """Write each edge of a graph as two arcs (directed edges), one in each direction. Edge i joins ends[i] and
    other_ends[i]."""
    arcs = np.empty(2 * len(ends), ARC)
    arcs["u"][:len(ends)], arcs["v"][:len(ends)] = ends, other_ends
    arcs["u"][len(ends):], arcs["v"][len(ends):] = other_ends, ends
    writer.write(bucket_of(mix(arcs["u"]), writer.buckets), arcs)
