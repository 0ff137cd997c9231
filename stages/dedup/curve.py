"""Computes the probability that MinHash-LSH finds a pair of documents, and chooses bands and rows for a wanted
probability.

Two documents of Jaccard similarity s share at least one of `bands` bands of `rows` hashes with probability
1 - (1 - s^rows)^bands (Leskovec, Rajaraman, Ullman, "Mining of Massive Datasets", 3.4).
"""

from __future__ import annotations

import math

#: most hashes of a signature that `shape` chooses, unless one row per band needs more; the default of 14 × 8 has 112
HASHES = 128
#: most bands and rows of a signature
BANDS, ROWS = 256, 64


def chance(similarity: float, bands: int, rows: int) -> float:
    """Return the probability that two documents of Jaccard similarity `similarity` share at least one band."""
    return 1 - (1 - similarity**rows) ** bands


def shape(recall: float, similarity: float) -> tuple[int, int]:
    """Return the (bands, rows) of a signature with which a pair of the given similarity is found with a probability of
    at least `recall`.

    More rows give fewer candidates that are no near-duplicates, but need more hashes. The result has as many rows as
    possible with at most HASHES hashes in total. If even one row per band needs more than HASHES hashes, the result has
    one row. Raises ValueError if BANDS bands do not suffice.
    """
    best = None
    for rows in range(1, ROWS + 1):
        shared = similarity**rows
        bands = 1 if shared >= 1 else math.ceil(math.log1p(-recall) / math.log1p(-shared) - 1e-12)
        if bands > BANDS or (best is not None and bands * rows > HASHES):
            break
        best = max(bands, 1), rows
    if best is None:
        raise ValueError(f"{BANDS} bands do not find pairs of similarity {similarity:g} with a probability of {recall}"
                         "; lower recall, or raise verify or containment")
    return best


def masses(threshold: float, bands: int, rows: int, steps: int = 2000) -> tuple[float, float]:
    """Return (false-positive mass, false-negative mass) of a signature, as datasketch defines them. The first is the
    area under the curve of `chance` below the threshold. The second is the area above the curve from the threshold to
    1. If all similarities are equally frequent, these are the shares of pairs that are wrongly found and of pairs that
    are missed."""
    def area(first: float, last: float) -> float:                      # Simpson's rule
        width = (last - first) / steps
        return width / 3 * sum((1 if i in (0, steps) else 4 if i % 2 else 2) * chance(first + i * width, bands, rows)
                               for i in range(steps + 1))

    return area(0.0, threshold), (1 - threshold) - area(threshold, 1.0)


def facts(threshold: float, bands: int, rows: int) -> list[str]:
    """Return the lines that `tokenmill plan` prints about a signature: the probability with which it finds pairs, for
    several similarities, and its `masses`."""
    points = sorted({0.5, 0.6, 0.7, 0.8, 0.9, round(threshold, 4)})
    wrong, missed = masses(threshold, bands, rows)
    return [f"{bands} bands of {rows} rows find a pair of similarity "
            + ", ".join(f"{s:g} with {chance(s, bands, rows):.1%}" for s in points if s > 0),
            f"false-positive mass {wrong:.4f} below {threshold:g}, false-negative mass {missed:.4f} above"]
