"""Apportions samples to streams. A stream is the tokens of one source, language or bucket. This module says from which
stream sample n is drawn, and how many of the first n samples are drawn from each stream.

Weights are integers. Webster's method (Sainte-Laguë) is used: draw k (from 0) of a stream of weight w is due at time
(2k + 1) / w. Samples are numbered in the order of due time; of draws due at the same time, that of the lowest stream
index comes first. Adding a sample never takes one away from a stream (a divisor method is house-monotone: Balinski &
Young, *Fair Representation*, 1982), so the order does not depend on batch size, ranks or workers.

The *quota* of a stream is its share of the samples so far. With few streams, Webster's method keeps every stream close
to its quota. With many streams it may not: suppose that one stream has a third of the weight, and 999 equal streams
have the rest. All 999 are then due at the same times, and the large stream is up to 166 samples off its quota.

Many streams are therefore the leaves of a binary tree. Each node divides its samples between its two children by
Webster's method. Each child then has at most half a sample more or less than its share of the node's samples. The tree
is Huffman's: the two lightest nodes are joined first. In it, an inner node has at most two thirds of the weight of the
node above it. The errors of all levels therefore add up to at most

    1/2 + 1/2 · (1 + 2/3 + (2/3)² + …) = 2 samples.

If streams form groups, samples are first apportioned to the groups, and then the samples of each group to its streams.
So a group is within two samples of its quota, and a stream within two samples of its share of the group's samples.

This module needs only the standard library and numpy, because the trainer imports it on machines where nothing else is
installed.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from pipeline.base.errors import TokenmillError
from tokenizer.mixture import kernels

#: a mixture of more streams than this is apportioned in a tree
FLAT = 8
#: if the sum of the weights is at least this, only `counts` works; drawing samples would overflow int64
BIG = 1 << 30


class CurriculumError(TokenmillError, ValueError):
    """Raised if a curriculum cannot be read or used for a training; the message names the key and the remedy."""

    permanent = True


def check_weights(weights: Sequence[int]) -> None:
    """Raise CurriculumError if the weights of streams (data sources) are not integers of at least 0, or if their sum is
    0."""
    if not weights or min(weights) < 0 or sum(weights) <= 0 or any(weight != int(weight) for weight in weights):
        raise CurriculumError(f"weights must be integers >= 0 with a positive sum, not {list(weights)}")


def check_range(total: int, n: int) -> None:
    """Raise CurriculumError if apportioning the first `n` samples needs numbers that int64 cannot hold. `total` is the
    sum of the weights."""
    if total >= BIG or (2 * n + 1) * total >= 1 << 62:
        raise CurriculumError(f"weights with the sum {total} over {n} samples overflow 64 bits: use smaller weights")


def is_flat(weights: Sequence[int]) -> bool:
    """Return whether Webster's method can divide samples among streams (data sources) with these weights without a
    tree. At most FLAT streams may have a weight above 0. Each of them must stay within two samples of its quota, its
    share of the samples so far.

    For the second condition, an upper bound is computed. At time t, a stream of weight w has drawn w·t/2 samples,
    rounded, so each of the k streams is wrong by at most 1/2. Suppose that a stream has the share s of all weights. Its
    own rounding then makes an error of at most (1 − s)/2, and that of the other streams one of at most s·(k − 1)/2."""
    live = [weight for weight in weights if weight]
    return len(live) <= FLAT and max(live) * (len(live) - 2) <= 3 * sum(live)


class Apportionment:
    """The order in which samples are drawn from streams (data sources). `weights` has an integer weight for each
    stream. Each list in `groups` has the indices of the streams that form one group; no stream is in two groups.

    Memory is proportional to the number of streams. So is the time of `counts`, whatever the number of samples. The
    other methods take time and memory for each sample that they are asked about."""

    def __init__(self, weights: Sequence[int], groups: Sequence[Sequence[int]] = ()) -> None:
        check_weights(weights)
        self.weights = [int(weight) for weight in weights]
        self._total = sum(self.weights)
        #: by node: [(weight, child), …], where a child is the number of a node, or ~i for stream i
        self._nodes: list[list[tuple[int, int]]] = []
        grouped = {stream for group in groups for stream in group}
        members = [*([stream] for stream in range(len(weights)) if stream not in grouped), *map(list, groups)]
        top = []
        for streams in sorted(members, key=min):
            leaves = [(self.weights[s], ~s) for s in sorted(streams) if self.weights[s]]
            if leaves:
                top.append(self._join(leaves) if len(streams) > 1 else leaves[0])
        if (not groups and is_flat(self.weights)) or len(top) == 1:
            self._nodes.append(top)
        else:
            self._join(top)
        most = max(map(len, self._nodes))
        padded = [[*node, *[(0, 0)] * (most - len(node))] for node in self._nodes]
        #: by child and node
        dtype = np.int64 if self._total < BIG else object
        self._weights = np.array([[node[k][0] for node in padded] for k in range(most)], dtype=dtype)
        self._children = np.array([[node[k][1] for node in padded] for k in range(most)], dtype=np.int64)
        self._totals = self._weights.sum(0)
        #: place of each stream and node below the root: (the node above it, which child of that it is)
        self._above = {child: (number, k) for number, node in enumerate(self._nodes)
                       for k, (_, child) in enumerate(node)}

    def _join(self, children: list[tuple[int, int]]) -> tuple[int, int]:
        """Join nodes into a Huffman tree. `children` are pairs (weight, child), where a child is a node or a stream.
        Returns the pair of the tree's root. A single child is returned as it is."""
        waiting = [(weight, age, child) for age, (weight, child) in enumerate(children)]
        heapq.heapify(waiting)
        for age in range(len(children), 2 * len(children) - 1):
            pair = sorted([heapq.heappop(waiting), heapq.heappop(waiting)], key=lambda entry: entry[1])
            self._nodes.append([(weight, child) for weight, _, child in pair])
            heapq.heappush(waiting, (pair[0][0] + pair[1][0], age, len(self._nodes) - 1))
        return waiting[0][0], waiting[0][2]

    def counts(self, n: int) -> list[int]:
        """Return how many of the first `n` samples are drawn from each stream (data source). The counts are exact for
        any n."""
        # in as many samples as the sum of the weights, each stream is drawn exactly as often as its weight; then the
        # order repeats
        rounds, n = divmod(n, self._total)
        draws = [rounds * weight for weight in self.weights]
        nodes, samples = np.array([len(self._nodes) - 1]), np.array([n], self._weights.dtype)
        while nodes.size:
            children, counts = self._children[:, nodes].ravel(), self._counts(nodes, samples).ravel()
            for stream, count in zip((~children[children < 0]).tolist(), counts[children < 0].tolist()):
                draws[stream] += count
            below = (children >= 0) & (counts > 0)
            nodes, samples = children[below], counts[below]
        return draws

    def _counts(self, nodes: np.ndarray, samples: np.ndarray) -> np.ndarray:
        """Return how many samples each child of a node gets if the node gets `samples` samples. This is computed for N
        nodes at once: `nodes` has their numbers and `samples` their samples, both int64 (N,).

        Returns int64 (largest number of children, N). If the weights sum to BIG or more, samples and results are
        Python's integers (dtype object)."""
        weights, totals = self._weights[:, nodes], self._totals[nodes]
        if len(weights) == 2:
            first = (2 * samples * weights[0] + totals) // (2 * totals)       # rounded; a half goes to the first child
            return np.stack([first, samples - first])
        counts: np.ndarray = (2 * samples * weights + totals) // (2 * totals)         # all draws due by 2n/total
        off = counts.sum(0) - samples
        while off.any():                             # take away the latest draws, or add the next ones, one by one
            columns = np.arange(nodes.size)
            last = _extreme(2 * counts - 1, weights, latest=True)
            counts[last, columns] -= off > 0
            following = _extreme(2 * counts + 1, weights, latest=False)
            counts[following, columns] += off < 0
            off -= np.sign(off)
        return counts

    def _sample_of(self, nodes: np.ndarray, own: np.ndarray, draws: np.ndarray) -> np.ndarray:
        """Return at which samples of a node its children are drawn, for several draws at once. Draw i is number
        `draws[i]`, counted from 0, of child number `own[i]` of the node `nodes[i]`. All arrays are int64 (N,), or (1,)
        if one value applies to all.

        Draw j of a child of weight w is due at T = (2j + 1)/w. The result is the number of draws of all children that
        precede it. A child of weight v has as many draws before T as there are odd numbers below T·v. If one of its
        draws is due exactly at T, this draw precedes only if the child has a lower index."""
        due, weight = 2 * draws + 1, self._weights[own, nodes]
        numbers = np.zeros_like(due)
        for k, weights in enumerate(self._weights):
            numbers += (due * weights[nodes] + weight - (k >= own)) // (2 * weight)
        return numbers

    def sample_of(self, stream: int, draws: np.ndarray | int) -> np.ndarray:
        """Return the numbers of the samples that are drawn from the stream (data source) with the index `stream`.
        `draws` says which of the stream's draws to look up, counted from 0: one number, or an array. Returns int64, one
        sample for each draw. Raises CurriculumError when the stream has weight 0, or when the numbers are too large for
        int64 (`check_range`)."""
        numbers = np.array(draws, dtype=np.int64, ndmin=1)
        if not self.weights[stream]:
            raise CurriculumError(f"stream {stream} has weight 0 and gives no samples")
        check_range(self._total, (int(numbers.max(initial=0)) + 1) * self._total // self.weights[stream] + 2)
        child = ~stream
        while child in self._above:
            child, own = self._above[child]
            numbers = self._sample_of(np.array([child]), np.array([own]), numbers)
        return numbers

    def draws(self, first: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return for each sample of [first, stop) its stream (data source), and the number of the draw (from 0) within
        that stream: two int64 arrays (stop − first,). Raises CurriculumError when the numbers are too large for
        int64."""
        check_range(self._total, stop)
        stream, draw = np.empty((2, stop - first), np.int64)
        nodes = np.array([len(self._nodes) - 1])
        if kernels.is_compiled(stop - first):
            kernels.draw(self._counts(nodes, np.array([first])).ravel(), self._weights, self._children, stream, draw)
            return stream, draw
        starts, stops = np.array([first]), np.array([stop])
        place = np.arange(stop - first)              # of the samples of all nodes of a level, node after node
        while place.size:
            counts = self._counts(np.concatenate([nodes, nodes]), np.concatenate([starts, stops])).T
            before, after = counts[:nodes.size], counts[nodes.size:]
            # a slot is a child of a node; its draws in the range are numbered from before to after
            sizes, begins = (after - before).ravel(), np.cumsum(stops - starts) - (stops - starts)
            slot = np.repeat(np.arange(sizes.size), sizes)
            drawn = np.arange(place.size) + (before.ravel() - np.cumsum(sizes) + sizes)[slot]
            at, own = np.divmod(slot, len(self._weights))
            at_sample = self._sample_of(nodes[at], own, drawn) + (begins - starts)[at]
            place = place[at_sample]
            children = self._children[:, nodes].T.ravel()
            child = children[slot]
            leaf = child < 0
            stream[place[leaf]], draw[place[leaf]] = ~child[leaf], drawn[leaf]
            below = (sizes > 0) & (children >= 0)
            nodes, starts, stops, place = children[below], before.ravel()[below], after.ravel()[below], place[~leaf]
        return stream, draw


def _extreme(dues: np.ndarray, weights: np.ndarray, latest: bool) -> np.ndarray:
    """Return for each column the row with the latest draw, or with the earliest one if `latest` is False, int64 (N,).
    The draw of a row is due at the time dues / weights; both are int64 (rows, N). Of rows with equal times, the last
    one is returned if `latest`, else the first. Rows of weight 0 are ignored."""
    best = np.zeros(dues.shape[1], np.int64)
    columns = np.arange(dues.shape[1])
    for k in range(1, len(dues)):
        ours, theirs = dues[k] * weights[best, columns], dues[best, columns] * weights[k]
        better = (weights[k] > 0) & ((ours >= theirs) if latest else (ours < theirs))
        best[better] = k
    return best
