"""Computes pseudo-random numbers from (seed, purpose, key) alone, without any state. The key is, for example, the id of
a document.

A document's number does not depend on other documents, on the order of documents, on workers or on partitions. So
adding documents never changes a decision about another document.
"""

from __future__ import annotations

import hashlib


def prf(seed: int, purpose: str, key: str) -> int:
    """Returns a pseudo-random integer, uniform in [0, 2**64), that depends on (seed, purpose, key) alone."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{purpose}/{key}".encode(), digest_size=8).digest(), "little")


def below(seed: int, purpose: str, key: str, share: float) -> bool:
    """Whether `key` belongs to a random sample that contains the fraction `share` (0 … 1) of all keys. The sample for a
    larger share contains the sample for a smaller one."""
    return prf(seed, purpose, key) < int(share * 2**64)
