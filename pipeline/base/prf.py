"""Random numbers that belong to one document: a pseudo-random function of (seed, purpose, key), without any state.

A number does not depend on order, worker, partition or other documents, so adding documents never changes a decision.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence


def prf(seed: int, purpose: str, key: str) -> int:
    """A uniform integer in [0, 2**64) that depends on (seed, purpose, key) alone."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{purpose}/{key}".encode(), digest_size=8).digest(), "little")


def below(seed: int, purpose: str, key: str, share: float) -> bool:
    """Whether `key` belongs to a random `share` (0 … 1) of all keys. A larger share contains all keys of a smaller
    one."""
    return prf(seed, purpose, key) < int(share * 2**64)


def all_below(seed: int, purpose: str, keys: Sequence[str], share: float) -> list[bool]:
    """`below` of each key, in half the time."""
    limit = int(share * 2**64)
    begun = hashlib.blake2b(f"{seed}/{purpose}/".encode(), digest_size=8)
    result = []
    for key in keys:
        hash = begun.copy()
        hash.update(key.encode())
        result.append(int.from_bytes(hash.digest(), "little") < limit)
    return result
