"""The sample of the playground is as random as its confidence intervals assume, whatever the ids look like."""

from __future__ import annotations

import hashlib
import itertools
import random

import numpy as np
import pytest

from pipeline.service.sampling import id_bytes, in_sample, random_numbers
from stages.document import document_id

N, SEEDS, CELLS = 2080, 150, 16
TWO_BITS = list(itertools.combinations_with_replacement(range(64, 128), 2))
#: ids of documents, and numbers that have few bits in common with a hash
FAMILIES = {
    "documents": [document_id("web", "a.jsonl", "", i) for i in range(N)],
    "in a row": [f"{i:032x}" for i in range(N)],
    "first halves in a row": [f"{i << 64:032x}" for i in range(N)],
    "highest digits in a row": [f"{i:032x}"[::-1] for i in range(N)],
    "halves alike": [f"{i:016x}" * 2 for i in range(N)],
    "one or two bits": [f"{1 << a | 1 << b:032x}" for a, b in TWO_BITS],
}


def reference(id: str, seed: int) -> int:
    """Compute the random number of an id with Python's integers, which have no overflow and no byte order."""
    def mix(x: int) -> int:
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
            x = (x ^ x >> shift) * factor % 2**64
        return x

    def words(data: bytes) -> list[int]:
        return [sum(byte << 8 * i for i, byte in enumerate(data[at:at + 8])) for at in (0, 8)]

    assert mix(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF   # the published first output of SplitMix64 with seed 0
    key = words(hashlib.blake2b(f"{seed}/playground".encode(), digest_size=16).digest())
    halves = words(bytes.fromhex(id))
    return mix(mix(halves[0] ^ key[0]) ^ halves[1] ^ key[1])


def cells(ids: list[str], seed: int, count: int = CELLS) -> np.ndarray:
    """Return for each id in which of `count` equal ranges its random number is."""
    return (random_numbers(ids, seed) // np.uint64(2**64 // count)).astype(np.int64)


def excess(counts: np.ndarray) -> float:
    """Return by how many standard deviations the sum of the chi-squares of the rows of `counts` is above its
    expectation for a uniform distribution. A row has the numbers of draws in each cell."""
    expected = counts.sum(axis=1, keepdims=True) / counts.shape[1]
    freedom = counts.shape[0] * (counts.shape[1] - 1)
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / (2 * freedom) ** 0.5)


def counted(*drawn: np.ndarray) -> np.ndarray:
    return np.array([np.bincount(cell, minlength=CELLS) for cell in drawn])


def pairs(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return one cell for each pair of numbers, out of four ranges for either number."""
    return one // 4 * 4 + other // 4


@pytest.mark.parametrize("ids", FAMILIES.values(), ids=FAMILIES)
def test_numbers_are_those_of_the_reference(ids):
    some = ids[::17] + ids[:3]
    for seed in (0, 1, 12345, -1):
        assert random_numbers(some, seed).tolist() == [reference(id, seed) for id in some]
    for share in (0.0, 1e-9, 0.08, 0.5, 1 - 2**-53, 1.0):
        assert in_sample(some, share, 3).tolist() == [reference(id, 3) < share * 2**64 for id in some]


@pytest.mark.parametrize("ids", FAMILIES.values(), ids=FAMILIES)
def test_numbers_are_uniform_over_ids_and_over_seeds(ids):
    drawn = [cells(ids, seed) for seed in range(SEEDS)]
    assert abs(excess(counted(*drawn))) < 5, "for a seed, over ids"
    assert abs(excess(counted(*np.transpose(drawn)))) < 5, "for an id, over seeds"


@pytest.mark.parametrize("ids", FAMILIES.values(), ids=FAMILIES)
def test_an_id_says_nothing_about_its_neighbours_nor_about_itself_under_another_seed(ids):
    drawn = [cells(ids, seed) for seed in range(SEEDS)]
    for apart in (1, 2, 64):
        assert abs(excess(counted(*(pairs(cell[apart:], cell[:-apart]) for cell in drawn)))) < 5, f"{apart} ids apart"
    for apart in (1, 2, 64):
        assert abs(excess(counted(*(pairs(*two) for two in zip(drawn, drawn[apart:]))))) < 5, f"{apart} seeds apart"


def test_each_bit_of_an_id_changes_half_of_the_samples_bits():
    rng = random.Random(5)
    ids = [rng.randrange(2**128) for _ in range(400)]
    whole = random_numbers([f"{id:032x}" for id in ids], 1)
    for bit in range(128):
        changed = whole ^ random_numbers([f"{id ^ 1 << bit:032x}" for id in ids], 1)
        ones = np.array([int((changed >> np.uint64(place) & np.uint64(1)).sum()) for place in range(64)])
        assert np.abs(ones - 200).max() < 6 * 10, bit      # a standard deviation is 10


def test_whether_an_id_is_chosen_depends_on_no_other_id():
    ids = [*FAMILIES["documents"][:300], "named by hand", "g" * 32, f"{7:030x}", " " * 32, "\ud800"]
    chosen = in_sample(ids, 0.3, 3)
    assert chosen.tolist() == [in_sample([id], 0.3, 3)[0] for id in ids]
    assert in_sample(ids[::-1], 0.3, 3).tolist() == chosen.tolist()[::-1]
    assert in_sample(ids, 1.0, 3).all() and not in_sample(ids, 0.0, 3).any()
    assert in_sample([], 0.3, 3).tolist() == []


def test_ids_of_any_form_have_sixteen_bytes_of_their_own():
    """Two ids of 31 and 33 digits have as many as two of 32: they must not be read as others."""
    ids = ["a" * 31, "a" * 33, "a" * 32, "a b" + "c" * 29, "", "é" * 32]
    found = id_bytes(ids)
    parts = [found[16 * i:16 * i + 16] for i in range(len(ids))]
    assert len(found) == 16 * len(ids) and len(set(parts)) == len(ids)
    assert parts[2] == bytes.fromhex("a" * 32) and parts == [id_bytes([id]) for id in ids]


def test_a_larger_sample_contains_a_smaller_one():
    small, large = (in_sample(FAMILIES["documents"], share, 3) for share in (0.1, 0.4))
    assert not (small & ~large).any() and small.sum() < large.sum()
