"""Wave 3 of near-duplicate detection: the connected components of the candidate graph.

One task, over the documents that occur in edges only (typically 10-30 % of all): 40 bytes each, about 2 GB for fifty
million. Edge files are folded in one after another into a forest that has at most one edge a document.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from stages.dedup.fragment import read_segments, split_place, write_segments
from stages.dedup.lsh import EDGE, components, forest

#: a document of a cluster: its place within its group, and the cluster's smallest place (global)
MEMBER = np.dtype([("part", "<u4"), ("row", "<u4"), ("root", "<u8")])
#: edges held before they are folded into the forest
_FOLD = 4_000_000


class Clusters:
    """args: links [$ref], firsts [what to add to the part of its places, one each], groups [first part of each group].

    Writes segments `members` (MEMBER, bucket = number of the group). Counts candidates, clusters, the largest cluster,
    a histogram of cluster sizes (bin b: 2**b <= documents < 2**(b + 1)) and the candidates of each group.
    """

    version = 1

    @staticmethod
    def run(inputs: Any, cursor: Any, out: Any) -> dict[str, Any]:
        args = inputs.args
        tree = np.zeros(0, EDGE)
        held: list[Any] = []
        size = 0
        for ref, first in zip(args["links"], args["firsts"], strict=True):
            edges = read_segments(inputs, [ref], 0, EDGE)[0]
            edges["a"] += np.uint64(first << 32)
            edges["b"] += np.uint64(first << 32)
            held.append(edges)
            size += len(edges)
            if size > _FOLD:
                tree, held, size = _fold(tree, held), [], 0
        tree = _fold(tree, held)
        nodes, roots = components(tree["a"], tree["b"])
        part, row = split_place(nodes)
        starts = np.asarray(args["groups"], np.uint32)
        group = np.searchsorted(starts, part, side="right") - 1
        members = np.empty(len(nodes), MEMBER)
        members["part"], members["row"], members["root"] = part - starts[group] if len(nodes) else part, row, roots
        write_segments(out, "members.seg", members, group, len(starts))
        _, sizes = np.unique(roots, return_counts=True)
        bins = np.bincount(np.frexp(sizes.astype(np.float64))[1] - 1) if len(sizes) else np.zeros(0, int)
        counts = np.bincount(group, minlength=len(starts)) if len(nodes) else np.zeros(len(starts), int)
        return {"candidates": len(nodes), "clusters": len(sizes), "max_cluster": int(sizes.max(initial=0)),
                "cluster_sizes": {str(b): int(n) for b, n in enumerate(bins) if n},
                "candidates_by_group": {str(g): int(n) for g, n in enumerate(counts) if n}}


def _fold(tree: Any, more: list[Any]) -> Any:
    every = np.concatenate([tree, *more])
    return forest(every["a"], every["b"])
