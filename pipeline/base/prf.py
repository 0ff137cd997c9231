"""Randomness that belongs to a document: a counter-based pseudo-random function of (seed, purpose, key).

It does not depend on order, worker, partition or other documents, so adding documents never changes a decision.
"""

from __future__ import annotations

import hashlib


def prf(seed: int, purpose: str, key: str) -> int:
    """A uniform integer in [0, 2**64) that depends on (seed, purpose, key) alone."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{purpose}/{key}".encode(), digest_size=8).digest(), "little")


def below(seed: int, purpose: str, key: str, share: float) -> bool:
    """True for the given share of keys (0 … 1); a larger share contains the smaller one's keys."""
    return prf(seed, purpose, key) < int(share * 2**64)
