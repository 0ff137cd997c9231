"""Statistics for experiment arms (variants that are trained with the same seeds and compared): paired differences with
confidence intervals, p-values corrected for several comparisons, and the number of seeds that a difference needs.

Arms with the same seed have the same initial values and order of data, so differences are taken within a seed. This is
a randomised block design, with the residual variance pooled over all arms; for two arms it is the paired t-test. It
assumes that any two arms differ by equally much noise. Arms with equal losses in all seeds, such as two copies of a
data set, break this assumption: they would make the noise of the other differences seem smaller than it is. So only one
of them counts for the variance.

The p-values are corrected by Holm's method (Scand. J. Statist. 6, 1979). With it, the chance that any arm without a
true difference to the first one is found to differ is at most LEVEL.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

#: a difference counts if it would occur with less than this probability between equal arms
LEVEL = 0.05
#: the probability with which the number of seeds that `seeds_for` returns shows a difference
POWER = 0.8
#: the most seeds that `seeds_for` considers
MOST_SEEDS = 1000


@dataclass(frozen=True)
class Contrasts:
    """How the losses of a study's arms (its trainings) differ from the loss of the first arm.

        deltas  mean difference of each arm; 0 for the first arm
        half    half the width of the 95 % confidence interval of a mean difference; None with one seed or one arm
        sd      standard deviation of a difference between two arms with the same seed; None with one seed or one arm
        p       p-values of the arms after the first, corrected by Holm's method; empty if `sd` is None
    """

    deltas: list[float]
    half: float | None
    sd: float | None
    p: list[float]


def contrasts(values: Sequence[Sequence[float]]) -> Contrasts:
    """Compare the losses of several arms (trainings of a study) with those of the first arm. `values`[arm][seed] are
    the losses."""
    losses = np.asarray(values, dtype=np.float64)
    arms, seeds = losses.shape
    means = losses.mean(1)
    deltas = (means - means[0]).tolist()
    if arms == 1 or seeds == 1:
        return Contrasts(deltas, None, None, [])
    distinct = np.unique(losses, axis=0)
    free = (len(distinct) - 1) * (seeds - 1)
    if not free:
        return Contrasts(deltas, 0.0, 0.0, [1.0] * (arms - 1))
    residuals = distinct - distinct.mean(1)[:, None] - distinct.mean(0) + distinct.mean()
    sd = math.sqrt(2 * (residuals ** 2).sum() / free)
    error = sd / math.sqrt(seeds)
    # a residual of the size of rounding errors is none: arms that are equal bit by bit do not differ
    single = [1.0 if abs(delta) <= 1e-12 else tail(abs(delta) / error, free) if error > 1e-12 else 0.0
              for delta in deltas[1:]]
    return Contrasts(deltas, quantile(1 - LEVEL / 2, free) * error, sd, holm(single))


def holm(p: Sequence[float]) -> list[float]:
    """Return the p-values of several comparisons, corrected by Holm's method, in the order of `p`."""
    corrected, least = [0.0] * len(p), 0.0
    for rank, i in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
        least = corrected[i] = max(least, min(1.0, (len(p) - rank) * p[i]))
    return corrected


def seeds_for(difference: float, sd: float, arms: int) -> int | None:
    """Return how many seeds a study with `arms` arms needs to show `difference` (of two arms' losses) with probability
    POWER. LEVEL is the accepted chance that the study shows any difference where there is none. `sd` is the standard
    deviation of a difference within one seed. Returns None if more than MOST_SEEDS are needed."""
    def shows(seeds: int) -> bool:
        free = (arms - 1) * (seeds - 1)
        needed = quantile(1 - LEVEL / 2 / (arms - 1), free) + quantile(POWER, free)
        return abs(difference) * math.sqrt(seeds) >= needed * sd

    if not shows(MOST_SEEDS):
        return None
    low, high = 1, 2
    while not shows(high):
        low, high = high, 2 * high
    while high - low > 1:                                 # `low` seeds do not show it, `high` seeds do
        middle = (low + high) // 2
        low, high = (low, middle) if shows(middle) else (middle, high)
    return high


def tail(t: float, free: int) -> float:
    """Return the probability that the absolute value of Student's t with `free` degrees of freedom is above `t`
    (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(free))
    if (t > 30 and free > 30) or t > 1e6:                   # the sum below would be 1 but for rounding
        return 0.0
    sine, cosine = math.sin(angle), math.cos(angle)
    term, total = (cosine, 0.0) if free % 2 else (1.0, 0.0)
    for k in range(1 if free % 2 else 0, free - 1, 2):
        total += term
        term *= cosine ** 2 * (k + 1) / (k + 2)
    inside = 2 / math.pi * (angle + sine * total) if free % 2 else sine * total
    return min(1.0, max(0.0, 1 - inside))


def quantile(share: float, free: int) -> float:
    """Return the quantile `share` (at least 0.5) of Student's t distribution with `free` degrees of freedom."""
    low, high = 0.0, 1.0
    while tail(high, free) > 2 * (1 - share):
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if tail(middle, free) > 2 * (1 - share) else (low, middle)
    return high
