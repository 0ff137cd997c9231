"""Chooses the random sample of documents from which the playground (the part of the service for trying other
thresholds) estimates counts.

Whether a document is in the sample depends on its id and a seed alone, so the same question always has the same answer.
Runs draw their own samples with `pipeline.base.prf.below`, on which stored files depend. No stored file depends on the
sample here, so its rule may change.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

#: seed by which the sample is chosen. It is a constant, so that every playground shows the same documents
SEED = 0
PURPOSE = "playground"


def in_sample(ids: Sequence[str], share: float, seed: int) -> np.ndarray:
    """Return an array of bools that says for each id whether it belongs to a random sample. The sample contains the
    fraction `share` (0 … 1) of all possible ids. The sample for a larger share contains the sample for a smaller one.
    """
    if share >= 1:
        return np.ones(len(ids), bool)
    chosen: np.ndarray = random_numbers(ids, seed) < np.uint64(share * 2**64)
    return chosen


def random_numbers(ids: Sequence[str], seed: int) -> np.ndarray:
    """Return a pseudo-random uint64 number for each document id. The number depends on the id and `seed` alone.

    A document's id is a hash of 128 bits, so a few multiplications mix it with the seed well enough. BLAKE2b of each id
    takes several times as long. Somebody who can choose ids can also choose these numbers, so they must not protect
    anything.
    """
    keys = np.frombuffer(hashlib.blake2b(f"{seed}/{PURPOSE}".encode(), digest_size=16).digest(), "<u8")
    halves = np.frombuffer(id_bytes(ids), "<u8").reshape(-1, 2)
    return _mixed(_mixed(halves[:, 0] ^ keys[0]) ^ halves[:, 1] ^ keys[1])


def id_bytes(ids: Sequence[str]) -> bytes:
    """Convert document ids to bytes, 16 for each id, one id after the other. An id is normally 32 hex digits, which
    spell these bytes. A user's own step may give documents ids of another form; the bytes are then a hash of the id."""
    if all(len(id) == 32 for id in ids):
        try:
            spelt = bytes.fromhex("".join(ids))
        except ValueError:
            spelt = b""
        if len(spelt) == 16 * len(ids):                    # fewer if an id has spaces, which `fromhex` skips
            return spelt
    if len(ids) > 1:
        return b"".join(id_bytes([id]) for id in ids)
    return hashlib.blake2b(ids[0].encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _mixed(numbers: np.ndarray) -> np.ndarray:
    """Mix the bits of uint64 numbers, so that each bit of the result depends on all bits (the last step of the
    generator SplitMix64; Steele, Lea and Flood, 2014)."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = numbers ^ (numbers >> np.uint64(31))
    return mixed
