"""Intervals of samples hold the true values as often as they say."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.base.prf import all_below
from pipeline.service.intervals import count_interval, sum_interval

IDS = [f"{i:032x}" for i in range(2500)]
SHARE, SEEDS = 0.08, 400


@pytest.fixture(scope="module")
def samples() -> list[np.ndarray]:
    """Samples as the playground draws them, of many seeds."""
    return [all_below(seed, "playground", IDS, SHARE) for seed in range(SEEDS)]


def test_whether_an_id_is_chosen_depends_on_no_other_id():
    chosen = all_below(3, "p", IDS[:300], 0.3)
    assert chosen.tolist() == [all_below(3, "p", [id], 0.3)[0] for id in IDS[:300]]
    assert all_below(3, "p", IDS[:300][::-1], 0.3).tolist() == chosen.tolist()[::-1]
    assert all_below(3, "p", IDS[:300], 1.0).all() and not all_below(3, "p", IDS[:300], 0.0).any()
    assert all_below(3, "p", [], 0.3).tolist() == []


def test_a_larger_sample_contains_a_smaller_one():
    small, large = (all_below(3, "p", IDS, share) for share in (0.1, 0.4))
    assert not (small & ~large).any() and small.sum() < large.sum()


@pytest.mark.parametrize("ids", [IDS, [f"{i << 64:032x}" for i in range(2500)], [id[::-1] for id in IDS],
                                 [f"{i * 0x9E3779B97F4A7C15F39CC0605CEDC834 % 2**128:032x}" for i in range(2500)]])
def test_samples_of_ids_in_a_row_are_as_random_as_others(ids):
    """Numbers of chosen ids and of chosen neighbours lie within five standard deviations of those of coin tosses, and
    two seeds or purposes choose independently."""
    share, n = 0.3, len(ids)
    one, other, third = (all_below(seed, purpose, ids, share) for seed, purpose in ((1, "p"), (2, "p"), (1, "q")))
    for mask, p in ((one, share), (one[1:] & one[:-1], share ** 2), (one[2:] & one[:-2], share ** 2),
                    (one & other, share ** 2), (one & third, share ** 2)):
        assert abs(mask.sum() - n * p) < 5 * (n * p * (1 - p)) ** 0.5


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
