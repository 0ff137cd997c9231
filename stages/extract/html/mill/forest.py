"""Evaluates the boosted decision trees of the extraction engine `mill` in integer arithmetic."""

from __future__ import annotations

import numpy as np

from pipeline.base.compiled import njit

#: A score is a logarithm of odds, in units of 1/1024. `scores` maps it to a probability by the table `odds`, which
#: covers -8 … 8 in steps of 1/64.
STEP, REACH = 16, 8 * 1024


@njit(cache=True, nogil=True)
def scores(features, roots, feature, threshold, left, right, leaf, odds, out):
    """Write the probability that boosted decision trees give to each row of `features` (int32[rows, n]) to `out`
    (int32[rows], 0..1000).

    Each node of a tree tests one feature. The path continues at the left child when the value is ≤ the threshold,
    otherwise at the right child. A negative child number c stands for the leaf -1 - c. The score of a row is the sum of
    the leaves that it reaches in all trees, and `odds` maps the score to the probability.
    """
    for r in range(len(features)):
        row = features[r]
        total = np.int64(0)
        for tree in range(len(roots)):
            node = np.int32(roots[tree])
            while node >= 0:
                node = left[node] if row[feature[node]] <= threshold[node] else right[node]
            total += leaf[-1 - node]
        at = min(max(total, np.int64(-REACH)), np.int64(REACH)) + REACH
        out[r] = odds[at // STEP]
