"""Computes pseudo-random numbers from (seed, purpose, key) alone, without any state. The key is, for example, the id of
a document.

A document's number does not depend on other documents, on the order of documents, on workers or on partitions. So
adding documents never changes a decision about another document.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np


def prf(seed: int, purpose: str, key: str) -> int:
    """Returns a pseudo-random integer, uniform in [0, 2**64), that depends on (seed, purpose, key) alone."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{purpose}/{key}".encode(), digest_size=8).digest(), "little")


def below(seed: int, purpose: str, key: str, share: float) -> bool:
    """Whether `key` belongs to a random sample that contains the fraction `share` (0 … 1) of all keys. The sample for a
    larger share contains the sample for a smaller one."""
    return prf(seed, purpose, key) < int(share * 2**64)


def all_below(seed: int, purpose: str, ids: Sequence[str], share: float) -> np.ndarray:
    """Return for each id whether it belongs to a random sample that contains the fraction `share` (0 … 1) of all ids,
    like `below`, but not the same sample. An id has 32 hex digits and is a hash itself, so a few multiplications mix it
    well enough: a million ids take 0.2 s. Whoever can choose ids can choose the sample."""
    if share >= 1:
        return np.ones(len(ids), bool)
    keys = np.frombuffer(hashlib.blake2b(f"{seed}/{purpose}".encode(), digest_size=16).digest(), "<u8")
    halves = np.frombuffer(bytes.fromhex("".join(ids)), "<u8").reshape(-1, 2)
    numbers = _mixed(halves[:, 0] ^ keys[0])
    chosen: np.ndarray = _mixed(numbers ^ halves[:, 1] ^ keys[1]) < np.uint64(share * 2**64)
    return chosen


def _mixed(numbers: np.ndarray) -> np.ndarray:
    """Mix the bits of uint64 numbers, so that each bit of the result depends on all bits (the last step of the
    generator SplitMix64; Steele, Lea and Flood, 2014)."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = numbers ^ (numbers >> np.uint64(31))
    return mixed
