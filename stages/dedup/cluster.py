"""Finds the clusters of near-duplicates: the connected components of a graph whose nodes are documents.

Documents are connected if they have the same band key (the hash of one band of a MinHash signature). Two documents with
the same key need no edge between them if a path through other documents connects them.

If there are at most `Sizes.one_task_edges` edges, a single task computes the components. It holds the documents that
occur in edges (typically 10-30 % of all), with 40 bytes for each document. It reads the edge files one after another
and keeps only a forest of at most one edge per document.

If there are more edges, several tasks compute the same components in rounds, and each task holds only a block of edges
at a time (`stages.dedup.stars`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from stages.barrier import Done, FileRef, TaskDraft, Wave
from stages.dedup.fragment import SIZES, Sizes, files_of, split_place, write_segments
from stages.dedup.lsh import EDGE, components, forest, log2_bins
from stages.task import Counters, Cursor, Inputs, Out

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: Nodes from the place KEYS << 32 on are band keys of old documents (`stages.dedup.against`). They bring documents into
#: the graph that share a key only with old ones.
KEYS = 1 << 31
#: a document of a cluster: its part and row within its group, and the smallest place (part and row, counted over all
#: groups) of the cluster's documents
MEMBER = np.dtype([("part", "<u4"), ("row", "<u4"), ("root", "<u8")])


class Clusters:
    """Task that finds all clusters of near-duplicates from the edges between documents, alone and in one round.

    Arguments: `links` (references to files of EDGE records, pairs of documents), `firsts` (for each of these files the
    number to add to the part numbers in its records), `groups` (number of the first part of each group of parts; a part
    is a file of documents), and `folded` (the number of edges that are held in memory before they are reduced to a
    forest). `folded` is under `$volatile`, which holds arguments that do not change the task's key.

    The task writes the exchange file `members.seg` (a MEMBER record for each document, in buckets by number of the
    group). It counts the candidates (documents that have an edge), the clusters, the documents of the largest cluster,
    and the clusters by size (bin b: clusters with 2**b <= documents < 2**(b + 1)).
    """

    name = "clusters"
    version = 3

    @staticmethod
    def run(inputs: Inputs, cursor: Cursor, out: Out) -> Counters:
        args = inputs.args
        tree = np.zeros(0, EDGE)
        for block in edges_of(inputs, args["links"], args["firsts"], args["$volatile"]["folded"]):
            edges = np.concatenate([tree, block])
            tree = forest(edges["a"], edges["b"])
        nodes, roots = real(*components(tree["a"], tree["b"]))
        members, group = members_of(nodes, roots, args["groups"])
        write_segments(out, "members.seg", members, group, len(args["groups"]))
        return cluster_counters(len(nodes), np.unique(roots, return_counts=True)[1])


def edges_of(inputs: Inputs, links: Sequence[FileRef], firsts: Sequence[int], most: int) -> Iterator[NDArray[Any]]:
    """Yield the EDGE records (pairs of documents) of the files `links`, in arrays.

    An EDGE record names a document by its place: part number << 32 | row. A part is a file of documents. In some files
    of edges, parts are numbered from the start of a group of parts. In the result, parts are numbered over all groups.
    `firsts` holds for each file the number to add. An array is yielded as soon as it holds more than `most` edges. The
    last array may hold fewer.
    """
    pending: list[NDArray[Any]] = []
    size = 0
    for ref, first in zip(links, firsts, strict=True):
        for block in inputs.segments([ref], 0):
            edges = np.array(block)
            edges["a"] += np.uint64(first << 32)
            edges["b"] += np.uint64(first << 32)
            pending.append(edges)
            size += len(edges)
            if size > most:
                yield np.concatenate(pending)
                pending, size = [], 0
    if pending:
        yield np.concatenate(pending)


def real(nodes: NDArray[np.uint64], roots: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Return the nodes that are documents, with their roots. The other nodes, which stand for band keys of old
    documents (KEYS), are left out."""
    documents = nodes < np.uint64(KEYS << 32)
    return (nodes, roots) if documents.all() else (nodes[documents], roots[documents])


def members_of(nodes: NDArray[Any], roots: NDArray[Any], firsts: Sequence[int]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return (a MEMBER record for each document, the number of the group that each document belongs to). A MEMBER
    record says in which cluster a document is.

    A document is given by its place (part number << 32 | row). `nodes` holds the places of the documents, and `roots`
    holds for each document the smallest place in its cluster. `firsts` holds the number of the first part of each group
    of parts (files of documents).
    """
    part, row = split_place(nodes)
    starts = np.asarray(firsts, np.uint32)
    group = np.searchsorted(starts, part, side="right") - 1
    members = np.empty(len(nodes), MEMBER)
    members["part"], members["row"], members["root"] = part - starts[group] if len(nodes) else part, row, roots
    return members, group


def cluster_counters(candidates: int, sizes: NDArray[Any]) -> Counters:
    return {"candidates": candidates, "clusters": len(sizes), "max_cluster": int(sizes.max(initial=0)),
            "cluster_sizes": {str(b): int(n) for b, n in enumerate(log2_bins(sizes)) if n}}


def cluster_waves(firsts: list[int], sizes: Sizes = SIZES, linking: Sequence[str] = ("links",)) -> list[Wave]:
    """Return the waves (groups of tasks that may run at the same time) that find the clusters of near-duplicates. They
    read the edges that the wave `bands` and the waves named in `linking` have written. The last of them, `clusters`,
    writes files `members.seg`, which say to which cluster a document belongs. `firsts` holds the number of the first
    part (file of documents) of each group of parts."""
    def linked(done: Done) -> int:
        """Return the number of edges between documents that the earlier waves have written."""
        return sum(r.counters["linked"] for wave in ("bands", *linking) for r in done[wave])

    def links_of(done: Done) -> list[FileRef]:
        """Return references to the files of edges. The files of the wave `bands` number parts (files of documents) from
        the start of a group, the other files over all groups."""
        return [ref for wave in ("bands", *linking) for ref in files_of(done[wave], "links.seg")]

    def spread(done: Done) -> list[TaskDraft]:
        total = linked(done)
        if total <= sizes.one_task_edges:
            return []
        buckets = star_buckets(total, sizes)
        links = links_of(done)
        add = firsts + [0] * (len(links) - len(firsts))
        drafts, start, size = [], 0, 0
        for i, ref in enumerate(links):
            size += ref["bytes"]
            if size >= sizes.spread_bytes or i == len(links) - 1:
                args = {"links": links[start:i + 1], "firsts": add[start:i + 1],
                        "folded": sizes.folded_edges, "buckets": buckets}
                label = f"edges of {i + 1 - start} files"
                drafts.append(TaskDraft("stages.dedup.stars:Spread", args, size, label, 1000))
                start, size = i + 1, 0
        return drafts

    def star(done: Done) -> list[TaskDraft]:
        if not done["spread"]:
            return []
        previous = done.get("star") or ()
        number = 1 + max((r.counters["max_round"] for r in previous), default=0)
        edges = files_of(previous or done["spread"], "edges.seg")
        total = linked(done)
        buckets = star_buckets(total, sizes)
        return [TaskDraft("stages.dedup.stars:Star", {"edges": edges, "bucket": b, "buckets": buckets, "round": number},
                          total * 32 // buckets, f"clusters, round {number}, range {b + 1}/{buckets}", 800)
                for b in range(buckets)]

    def edges_moved(done: Done) -> bool:
        """Return whether the last round of the wave `star` changed any edge. If it changed none, the clusters are
        complete."""
        return any(r.counters["moved"] for r in done["star"])

    def clusters(done: Done) -> list[TaskDraft]:
        total = linked(done)
        if done["spread"]:
            edges = files_of(done["star"], "edges.seg")
            return [TaskDraft("stages.dedup.stars:Members", {"edges": edges, "bucket": b, "groups": firsts},
                              total * 32 // len(edges), f"clusters, range {b + 1}/{len(edges)}", 800)
                    for b in range(len(edges))]
        links = links_of(done)
        args = {"links": links, "firsts": firsts + [0] * (len(links) - len(firsts)), "groups": firsts,
                "$volatile": {"folded": sizes.folded_edges}}
        return [TaskDraft("stages.dedup.cluster:Clusters", args, sum(f["bytes"] for f in links), "clusters",
                          700 + total * 60 // 2**20)] if total else []

    return [Wave("spread", spread), Wave("star", star, edges_moved), Wave("clusters", clusters)]


def star_buckets(edges: int, sizes: Sizes) -> int:
    """Return the number of buckets into which the edges of a graph are divided in each round of `stages.dedup.stars`.
    One task handles one bucket, and reads a share of the output of every task of the previous round."""
    size = 32 * edges                              # each edge is stored in the buckets of both its ends
    return max(1, min(-(-size // sizes.bucket_bytes), int((size / sizes.segment_bytes) ** 0.5)))
