"""Estimates counts and sums over all documents from a random sample of them. The intervals contain the true value for
95 of 100 samples.
"""

from __future__ import annotations

import math

#: standard deviations to each side of a normal estimate
Z = 1.959963984540054


def count_interval(hits: int, sampled: int, total: int) -> tuple[float, float, float]:
    """Estimate how many of `total` documents have a property, from a random sample of `sampled` documents of which
    `hits` have it. Returns (estimate, low, high).

    The interval is Wilson's, with the correction for a sample that is a large part of the whole. It is sound for rare
    properties, for which the normal interval is too narrow. It has a width even if `hits` is 0. If all documents were
    sampled, the interval is the exact count; if none was sampled, it reaches from 0 to `total`.
    """
    if not sampled or sampled >= total:
        return (float(hits), float(hits), float(hits)) if sampled else (0.0, 0.0, float(total))
    n = sampled * (total - 1) / (total - sampled)
    share = hits / sampled
    middle = (share + Z * Z / (2 * n)) / (1 + Z * Z / n)
    half = Z * math.sqrt(share * (1 - share) / n + Z * Z / (4 * n * n)) / (1 + Z * Z / n)
    unseen = total - sampled
    low, high = max(middle - half, 0.0) * total, min(middle + half, 1.0) * total
    estimate = share * total
    return estimate, min(max(low, float(hits)), estimate), max(min(high, float(hits + unseen)), estimate)


def sum_interval(sample_sum: float, squares: float, sampled: int, total: int) -> tuple[float, float, float]:
    """Estimate the sum of a value over `total` documents from a random sample of `sampled` documents. `sample_sum` is
    the sum of the values of the sampled documents, and `squares` is the sum of the squares of these values. Returns
    (estimate, low, high).

    The interval is a normal one, from the variance of the sample. With few documents, or with a few very large ones, it
    contains the true sum less often than in 95 of 100 samples. If all documents or none were sampled, it has no width.
    """
    if not sampled or sampled >= total:
        return (sample_sum, sample_sum, sample_sum)
    mean = sample_sum / sampled
    variance = max(squares / sampled - mean * mean, 0.0) * sampled / max(sampled - 1, 1)
    half = Z * total * math.sqrt(variance / sampled * (1 - sampled / total))
    return mean * total, max(mean * total - half, sample_sum), mean * total + half
