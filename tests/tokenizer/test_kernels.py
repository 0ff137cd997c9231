"""The compiled kernels of the order compute exactly the numbers of the numpy code and of the definitions."""

from __future__ import annotations

import hashlib
import itertools
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.stages.test_mix_order import make
from tests.tokenizer.webster import draw
from tokenizer.mixture import kernels
from tokenizer.mixture.apportion import Apportionment
from tokenizer.mixture.order import Order
from tokenizer.mixture.permutation import KeyedPermutations

ROOT = Path(__file__).resolve().parents[2]
WITH = {"numpy": mock.patch.object(kernels, "ENOUGH", sys.maxsize), "numba": mock.patch.object(kernels, "ENOUGH", 0)}


def feistel(number: int, n: int, key: str) -> int:
    """Map one number by the permutation, following the definition in docs/contracts.md."""
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    digest = hashlib.blake2b(key.encode(), digest_size=48).digest()
    while True:
        left, right = number >> half, number % 2**half
        for i in range(6):
            x = right ^ int.from_bytes(digest[8 * i:8 * i + 4], "little")
            x = x * 0x7FEB352D % 2**32
            x ^= x >> 15
            x = x * 0x846CA68B % 2**32
            x ^= x >> 16
            left, right = right, left ^ x % 2**half
        number = left << half | right
        if number < n:
            return number


@settings(deadline=None)
@given(st.lists(st.integers(1, 1 << 62) | st.integers(1, 300), min_size=1, max_size=9), st.integers(0, 2**32),
       st.sampled_from([1, 2, 100, 1023, 1024, 1025, 3000]))
def test_permutations_equal_the_definition_with_numpy_and_with_numba(sizes, seed, count):
    rng, keys = np.random.default_rng(seed), [f"{seed}/{i}" for i in range(len(sizes))]
    permutations = KeyedPermutations(sizes, keys)
    which = rng.integers(0, len(sizes), count)
    numbers = rng.integers(0, np.array(sizes, np.int64)[which])
    found = {}
    for name, chosen in WITH.items():
        with chosen:
            found[name] = permutations.permute(which, numbers)
            assert np.array_equal(permutations.unpermute(which, found[name]), numbers)
            one = np.array([count % len(sizes)])
            mine = numbers % sizes[one[0]]
            assert permutations.permute(one, mine)[-1] == feistel(int(mine[-1]), sizes[one[0]], keys[one[0]])
    assert np.array_equal(found["numpy"], found["numba"])
    for i in range(0, count, 97):
        assert found["numba"][i] == feistel(int(numbers[i]), sizes[which[i]], keys[which[i]])


@pytest.mark.parametrize("name", WITH)
def test_a_number_outside_its_permutation_is_refused(name):
    permutations = KeyedPermutations([5, 3000], ["a", "b"])
    for wrong, size in ((np.array([2, 3000]), 3000), (np.array([5, 1]), 5), (np.array([-1, 1]), 5)):
        with WITH[name], pytest.raises(ValueError, match=f"outside a permutation of {size}"):
            permutations.permute(np.array([0, 1]), wrong)


@settings(deadline=None)
@given(st.data(), st.integers(1, 40), st.integers(0, 10**9), st.integers(0, 700))
def test_draws_of_any_mixture_are_the_same_with_numba(data, streams, first, count):
    weights = data.draw(st.lists(st.integers(0, 1000), min_size=streams, max_size=streams).filter(any))
    cuts = sorted(data.draw(st.sets(st.integers(0, streams), max_size=4)))
    groups = [list(range(a, b)) for a, b in itertools.pairwise(cuts)]
    apportioned = Apportionment(weights, groups)
    with WITH["numpy"]:
        plain = apportioned.draws(first, first + count)
    with WITH["numba"]:
        compiled = apportioned.draws(first, first + count)
        assert apportioned.draws(0, 60)[0].tolist() == draw(60, weights, groups)
    assert np.array_equal(plain, compiled)


@pytest.mark.parametrize("phases", [
    [(5000, 32, 8, {"a": 3, "b": 1, "c": 2}), (3000, 64, 8, {"a": 1, "c": 5}, {"on_exhausted": "repeat"}),
     (4000, 16, 8, {"b": 1}, {"on_exhausted": "repeat"})],
    [(9000, 16, 8, {"a": 500, "b": 499, "c": 3}, {"groups": {"g": ["a", "c"]}, "on_exhausted": "repeat"})]])
def test_whole_orders_are_the_same_with_numba(phases):
    order = Order(make({"a": 150_000, "b": 90_000, "c": 64 * 77}, phases))
    hashes = set()
    for chosen in WITH.values():
        with chosen:
            hashes.add((order.hash(), *(tuple(map(bytes, order.samples_of(s, 3, 40)[0][:2])) for s in (0, 1))))
    assert len(hashes) == 1


def python(code: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


ORDER = """
import sys
{before}
from tokenizer.mixture import kernels
from tests.stages.test_mix_order import make
from tokenizer.mixture.order import Order
order = Order(make({{"a": 10**7}}, [(100_000, 32, 8, {{"a": 1}})]))
order.hash()
print("numba" in sys.modules, sys.modules.get("numba") is None)
kernels.ENOUGH = 0
print(order.hash(), "numba" in sys.modules)
"""


def test_numba_is_imported_only_for_long_work_and_may_be_missing():
    with_numba = python(ORDER.format(before=""))
    without = python(ORDER.format(before="sys.modules['numba'] = None"))
    assert with_numba[:2] == ["False", "True"] and with_numba[3] == "True"
    assert with_numba[2] == without[2], "numpy and numba give one order"
