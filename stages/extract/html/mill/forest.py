"""Boosted trees over integers."""

from __future__ import annotations

import numpy as np

from stages.text.compiled import njit

#: a score is a logarithm of odds in 1/1024; `ODDS` maps it to a probability in 1/1000, -8 … 8 in steps of 1/64
STEP, REACH = 16, 8 * 1024


@njit(cache=True, nogil=True)
def scores(features, roots, feature, threshold, left, right, leaf, odds, out):
    """Probabilities (int32[rows], 0..1000) of the rows of `features` (int32[rows, n]).

    A node has a feature and goes left when its value is ≤ the threshold; children below zero are leaves, -1 - number.
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
