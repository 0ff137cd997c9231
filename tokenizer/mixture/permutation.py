"""Permutes numbers by keyed bijections, without a table: a balanced Feistel network of 6 rounds with cycle walking
(Black & Rogaway, CT-RSA 2002).

The round keys are the blake2b hash of a text, read as little-endian numbers on every machine (docs/contracts.md: Shards
and order). This module needs only the standard library and numpy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from tokenizer.mixture import kernels

ROUNDS = 6
#: how many numbers are permuted at a time, so that they stay in the processor's cache
CHUNK = 1 << 14


def permutation_key(seed: int, stream: str, epoch: int, reservation: int | str) -> str:
    """Return the text from which the keys of a permutation are derived. An epoch of a stream has two kinds of
    permutations: that of its super-windows (blocks of `longest` tokens), for which `reservation` is "super", and those
    of the windows (samples) that a phase of the training has reserved. For these, `reservation` is the index of the
    phase."""
    return f"v1/{seed}/{stream}/{epoch}/{reservation}"


class KeyedPermutations:
    """Several permutations, of different sizes, that are applied in one call. Permutation i maps [0, n) to itself,
    where n is `sizes[i]` and 1 <= n <= 2**62. The text `keys[i]` determines which permutation it is."""

    def __init__(self, sizes: Sequence[int], keys: Sequence[str]) -> None:
        wrong = next((n for n in sizes if not 0 < n <= 1 << 62), None)
        if wrong is not None:
            raise ValueError(f"a permutation needs 1 <= n <= 2**62, not {wrong}")
        self._sizes = np.array(sizes, dtype=np.uint64)
        #: bits of each half of the numbers that the Feistel network permutes; there are up to 4n such numbers
        self._half = np.array([max(1, ((n - 1).bit_length() + 1) // 2) for n in sizes], dtype=np.uint64)
        self._mask = ((1 << self._half) - 1).astype(np.uint32)
        digests = b"".join(hashlib.blake2b(key.encode(), digest_size=8 * ROUNDS).digest() for key in keys)
        # the round function uses the lower half of each 64-bit round key
        self._keys = np.ascontiguousarray(np.frombuffer(digests, "<u8").reshape(-1, ROUNDS).T).astype(np.uint32)

    def permute(self, which: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """Map each `numbers[i]` by permutation number `which[i]`. Both arrays are int64 (N,). If `which` has the shape
        (1,), its one permutation maps all numbers. Returns int64 (N,). Raises ValueError if a number is outside its
        permutation."""
        return self._walk(which, numbers, backward=False)

    def unpermute(self, which: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """Map numbers back by several permutations: the inverse of `permute`."""
        return self._walk(which, numbers, backward=True)

    def _walk(self, which: np.ndarray, numbers: np.ndarray, backward: bool) -> np.ndarray:
        """Map each `numbers[i]` by permutation number `which[i]`, or by its inverse if `backward`. The Feistel network
        permutes a larger range than [0, n), so it is applied again until the result is below n (cycle walking)."""
        if kernels.is_compiled(numbers.size):
            mapped = np.empty(numbers.size, np.int64)
            outside = kernels.walk(which, numbers, self._sizes, self._half, self._keys, backward, mapped)
        else:
            mapped, outside = self._walked(which, numbers, backward)
        if outside >= 0:
            raise ValueError(f"index {numbers[outside]} outside a permutation of "
                             f"{self._sizes[which[outside if which.size > 1 else 0]]}")
        return mapped

    def _walked(self, which: np.ndarray, numbers: np.ndarray, backward: bool) -> tuple[np.ndarray, int]:
        """Map numbers by keyed permutations, or back, with numpy, exactly as the compiled `kernels.walk` does. Returns
        (mapped numbers, index of the first number outside its permutation, or -1)."""
        sizes, mapped = self._sizes.take(which), numbers.astype(np.uint64)
        if not (mapped < sizes).all():
            return numbers, int(np.argmin(mapped < sizes))
        values, places = mapped, np.arange(mapped.size)
        while places.size:                           # on average at most four times
            values = np.concatenate([
                self._network(which[at] if which.size > 1 else which, values[at], backward)
                for at in (slice(first, first + CHUNK) for first in range(0, places.size, CHUNK))])
            mapped[places] = values
            outside = np.flatnonzero(values >= sizes)
            values, places = values[outside], places[outside]
            if which.size > 1:
                which, sizes = which[outside], sizes[outside]
        return mapped.astype(np.int64), -1

    def _network(self, which: np.ndarray, values: np.ndarray, backward: bool) -> np.ndarray:
        half, mask = self._half.take(which), self._mask.take(which)
        left, right = (values >> half).astype(np.uint32), values.astype(np.uint32) & mask
        if backward:
            left, right = right, left
        for keys in self._keys[::-1] if backward else self._keys:
            hashed = _mix(right, keys.take(which))
            hashed &= mask
            hashed ^= left
            left, right = right, hashed
        if backward:
            left, right = right, left
        together: np.ndarray = (left.astype(np.uint64) << half) | right
        return together


def _mix(x: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Compute the round function of the Feistel network: hash each number in `x` with its key, all uint32. The hash is
    two multiply-xorshift steps (constants of lowbias32 by C. Wellons, hash-prospector)."""
    x = x ^ keys
    x *= np.uint32(0x7FEB352D)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x846CA68B)
    x ^= x >> np.uint32(16)
    return x


def permute(numbers: np.ndarray | int, n: int, key: str) -> np.ndarray:
    """Map `numbers` by a bijection of [0, n) that the text `key` determines. Returns a flat int64 array."""
    return KeyedPermutations([n], [key]).permute(_ONE, np.array(numbers, dtype=np.int64, ndmin=1))


def unpermute(numbers: np.ndarray | int, n: int, key: str) -> np.ndarray:
    """Map `numbers` back by the bijection of [0, n) that the text `key` determines: the inverse of `permute`."""
    return KeyedPermutations([n], [key]).unpermute(_ONE, np.array(numbers, dtype=np.int64, ndmin=1))


_ONE = np.zeros(1, np.int64)
