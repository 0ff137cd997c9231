"""The confidence intervals of samples contain the true values as often as they should."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.service.intervals import count_interval, sum_interval
from pipeline.service.sampling import in_sample

IDS = [f"{i:032x}" for i in range(2500)]
SHARE, SEEDS = 0.08, 400


@pytest.fixture(scope="module")
def samples() -> list[np.ndarray]:
    """Samples with many seeds, drawn as the playground draws them."""
    return [in_sample(IDS, SHARE, seed) for seed in range(SEEDS)]


@pytest.mark.parametrize("share", [0.004, 0.02, 0.1, 0.5, 0.98])
def test_intervals_of_counts_hold_95_of_100_times(samples, share):
    there = np.arange(len(IDS)) % 1000 < share * 1000
    truth, hits, widths = int(there.sum()), 0, []
    for sample in samples:
        estimate, low, high = count_interval(int(there[sample].sum()), int(sample.sum()), len(IDS))
        assert low <= estimate <= high
        hits += low <= truth <= high
        widths.append(high - low)
    assert hits / SEEDS >= 0.92                            # three standard deviations below
    n = SHARE * len(IDS)
    usual = 2 * 1.96 * len(IDS) * np.sqrt(share * (1 - share) / n)
    assert np.mean(widths) < usual * 1.1 + 6 * len(IDS) / n, "an interval of everything holds always, and says nothing"


@pytest.mark.parametrize(("spread", "least"), [(0.5, 0.92), (1.0, 0.88)])
def test_intervals_of_bytes_hold_nearly_so(samples, spread, least):
    rng = np.random.default_rng(7)
    sizes = rng.lognormal(7, spread, len(IDS)) * (rng.random(len(IDS)) < 0.4)
    hits, estimates = 0, []
    for sample in samples:
        values = sizes[sample]
        estimate, low, high = sum_interval(values.sum(), (values * values).sum(), len(values), len(IDS))
        hits += low <= sizes.sum() <= high
        estimates.append(estimate)
    assert least <= hits / SEEDS < 1
    assert np.mean(estimates) == pytest.approx(sizes.sum(), rel=0.03)


def test_all_documents_leave_no_doubt_and_none_leave_all():
    assert count_interval(7, 50, 50) == (7, 7, 7) and sum_interval(9.0, 81.0, 50, 50) == (9, 9, 9)
    assert count_interval(0, 0, 50) == (0, 0, 50)


def test_what_a_sample_has_is_there_and_what_it_lacks_may_be():
    estimate, low, high = count_interval(0, 100, 10_000)
    assert estimate == 0 == low and 100 < high < 600
    estimate, low, high = count_interval(100, 100, 10_000)
    assert estimate == high == 10_000 and low < 9_900
