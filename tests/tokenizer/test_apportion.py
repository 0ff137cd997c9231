"""The stream from which each sample is drawn: equal to a slow reference, and close to the quota in every prefix and
batch."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.tokenizer.webster import draw
from tokenizer.mixture.apportion import FLAT, Apportionment, CurriculumError, is_flat

Mix = tuple[list[int], list[list[int]]]


@st.composite
def mixes(draw_from: st.DrawFn, most: int = 40) -> Mix:
    """Draw weights of streams, some of them 0, and groups of streams."""
    weight = st.one_of(st.integers(0, 3), st.integers(0, 1000), st.sampled_from([1, 1, 100_000]))
    weights = draw_from(st.lists(weight, min_size=1, max_size=most).filter(lambda w: sum(w) > 0))
    group_of = draw_from(st.lists(st.integers(0, 4), min_size=len(weights), max_size=len(weights)))
    groups = [[s for s, g in enumerate(group_of) if g == number] for number in range(1, 5)]
    return weights, [group for group in groups if group]


@given(mixes(), st.integers(0, 400), st.integers(0, 400))
def test_draws_and_counts_equal_the_slow_reference(mix, a, b):
    first, stop = sorted((a, b))
    expected = draw(stop, *mix)
    order = Apportionment(*mix)
    assert order.draws(first, stop)[0].tolist() == expected[first:stop]
    assert order.counts(stop) == [expected.count(s) for s in range(len(mix[0]))]


@pytest.mark.parametrize("number", [1, 2, 3, FLAT, FLAT + 1, 64, 300])
def test_one_to_300_streams_equal_the_slow_reference(number):
    rng = Random(number)
    weights = [rng.choice((1, 1, 7, rng.randint(1, 10_000))) for _ in range(number)]
    groups = [list(range(first, number, 5)) for first in range(min(3, number))]
    for mix in ((weights, []), (weights, groups), ([1] * number, [])):
        assert Apportionment(*mix).draws(0, 2000)[0].tolist() == draw(2000, *mix)


@given(mixes(), st.integers(0, 10**11), st.integers(1, 400))
def test_draws_far_out_fit_the_counts_and_the_inverse(mix, n, size):
    order = Apportionment(*mix)
    stream, number = order.draws(n, n + size)
    before, after = order.counts(n), order.counts(n + size)
    assert sum(before) == n
    assert sum(after) == n + size
    for s, (first, stop) in enumerate(zip(before, after)):
        assert number[stream == s].tolist() == list(range(first, stop))
        if stop > first:
            assert np.array_equal(order.sample_of(s, np.arange(first, stop)), n + np.flatnonzero(stream == s))


def furthest(mix: Mix, of: Sequence[int], total: float, n: int = 20_000) -> float:
    """Return by how many samples the streams `of`, taken together, are off their share at most, over all prefixes of up
    to n samples. The share is their weight divided by `total`, the weight of all streams or of their group."""
    stream, _ = Apportionment(*mix).draws(0, n)
    weights = np.array(mix[0])
    within = np.arange(1, n + 1) if total == weights.sum() else np.cumsum(np.isin(stream, _group_of(mix, of[0])))
    return float(np.abs(np.cumsum(np.isin(stream, of)) - within * (weights[list(of)].sum() / total)).max())


def _group_of(mix: Mix, stream: int) -> list[int]:
    return next((group for group in mix[1] if stream in group), [stream])


@given(mixes(most=60))
@example(([100, *[1] * 7], []))
@example(([500, *[1] * 59], [[1, 2, 3, 4], [0, 5, 6, *range(20, 50)]]))
def test_every_prefix_is_within_two_samples_of_the_quota_on_each_level(mix):
    weights, groups = mix
    total = sum(weights)
    alone = [[s] for s in range(len(weights)) if _group_of(mix, s) == [s] and [s] not in groups]
    for streams in [*groups, *alone]:
        assert furthest(mix, streams, total, 2000) <= 2
    for group in groups:
        for s in group:
            if weights[s] and len(group) > 1:
                assert furthest(mix, [s], sum(weights[m] for m in group), 2000) <= 2


@pytest.mark.parametrize("weights", [
    [499_500, *[1000] * 999], [500_000, *[1000] * 999], [1] * 1000, [2**i for i in range(30)], [94, *[1] * 6],
    [10**6 // (i + 1) for i in range(1000)]], ids=["a third beside 999", "rounder", "equal", "doubling", "94", "Zipf"])
def test_every_batch_of_256_is_within_two_samples_of_the_share(weights):
    stream, _ = Apportionment(weights).draws(0, 100_000)
    shares = np.array(weights) / sum(weights)
    for s in {0, 1, len(weights) // 2, len(weights) - 1}:
        drawn = np.cumsum(stream == s)
        assert np.abs(drawn[256:] - drawn[:-256] - 256 * shares[s]).max() <= 2


def test_quota_of_three_streams_is_within_one_sample_at_every_prefix():
    assert max(furthest(([63, 24, 13], []), [s], 100, 5000) for s in range(3)) < 1


def test_a_mixture_is_flat_only_if_webster_keeps_its_quota():
    assert is_flat([40, 30, 15, 5, 5, 5])
    assert not is_flat([94, 1, 1, 1, 1, 1, 1])
    assert not is_flat([1] * (FLAT + 1))
    assert is_flat([0] * 50 + [1, 2])


def test_weights_of_any_size_can_be_scaled_but_not_drawn_from_without_end():
    huge = [3 * 10**30, 10**30]
    assert Apportionment(huge).counts(10**6) == [750_000, 250_000]
    assert Apportionment([1 << 20, 1]).counts(1 << 50) == [(1 << 50) - 1073740800, 1073740800]
    with pytest.raises(CurriculumError, match="overflow 64 bits"):
        Apportionment([1 << 20, 1]).draws(1 << 50, (1 << 50) + 1)
    for call in (lambda: Apportionment(huge).draws(0, 1), lambda: Apportionment(huge).sample_of(0, 0),
                 lambda: Apportionment([1 << 20, 1]).sample_of(1, 1 << 50)):
        with pytest.raises(CurriculumError, match="overflow 64 bits"):
            call()


def test_weights_that_are_no_weights_are_refused():
    for bad in ([], [0, 0], [-1, 2], [0.5, 1]):
        with pytest.raises(CurriculumError, match="integers"):
            Apportionment(bad)
    with pytest.raises(CurriculumError, match="weight 0"):
        Apportionment([0, 1]).sample_of(0, 0)


def test_golden_order_of_a_tree():
    assert "".join(map(str, Apportionment([9, 1, 1, 1, 5, 5, 2], [[1, 2, 3], [4, 5]]).draws(0, 48)[0])) == GOLDEN


GOLDEN = "041504065040350465004250041504065040350465004250"
