"""Finds equal stretches of texts: hashes of all windows of N bytes, and the few windows that are worth hashing.

A *window* is a run of `window` bytes. Two texts share a stretch of at least `window` bytes if, and only if, they share
a window. Comparing all windows of a corpus would need a hash for each byte, although most windows occur only once.

Seeds show which windows may occur more than once. The *seed* of a window is that run of `window` // 2 bytes in it whose
hash is smallest (the leftmost of several; Schleimer et al. 2003, "Winnowing", call it a minimizer). Equal windows have
equal seeds at the same distance from their start, so only windows whose seed occurs more than once need be hashed.
Neighbouring windows mostly share their seed, so a text has only about 4 seeds for each `window` bytes.

Hashes are polynomials modulo the prime 2**61 - 1 (Karp and Rabin 1987). Whoever removes a stretch because of equal
hashes must compare the bytes first, or a cryptographic hash of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pipeline.base.compiled import njit

if TYPE_CHECKING:
    from numpy.typing import NDArray

_U = np.uint64
_PRIME = _U((1 << 61) - 1)
_BASE = _U(0x1A37F2C94D6B8E51)
_LOW = _U((1 << 32) - 1)
_M1, _M2 = _U(0xFF51AFD7ED558CCD), _U(0xC4CEB9FE1A85EC53)


@njit(cache=True, inline="always")
def _times(a, b):
    """Return a * b modulo 2**61 - 1, of numbers below it."""
    a_high, a_low, b_high, b_low = a >> _U(32), a & _LOW, b >> _U(32), b & _LOW
    middle = a_high * b_low + a_low * b_high                 # below 2**62
    low = a_low * b_low
    total = ((a_high * b_high) << _U(3)) + (middle >> _U(29)) + ((middle << _U(32)) & _PRIME) \
        + (low & _PRIME) + (low >> _U(61))
    total = (total & _PRIME) + (total >> _U(61))
    return total - _PRIME if total >= _PRIME else total


@njit(cache=True, inline="always")
def _mixed(x):
    """Hash a number by a bijection of the 64-bit integers (MurmurHash3's finaliser)."""
    x ^= x >> _U(33)
    x *= _M1
    x ^= x >> _U(33)
    x *= _M2
    return x ^ (x >> _U(33))


@njit(cache=True)
def _power(exponent):
    """Return the base of the polynomials to the power `exponent`, modulo the prime."""
    out = _U(1)
    for _ in range(exponent):
        out = _times(out, _BASE)
    return out


@njit(cache=True)
def run_hashes(data, width, first, stop):
    """Return the hash of the `width` bytes from each position on, uint64[stop - first]. The positions are `first` to
    `stop` - 1; `data` is uint8[bytes]."""
    out = np.empty(max(stop - first, 0), np.uint64)
    if stop <= first:
        return out
    power, hashed = _power(width), _U(0)
    for place in range(first, first + width):
        hashed = _times(hashed, _BASE) + _U(data[place]) + _U(1)
        hashed = hashed - _PRIME if hashed >= _PRIME else hashed
    out[0] = _mixed(hashed)
    for start in range(first + 1, stop):
        gone = _times(_U(data[start - 1]) + _U(1), power)
        hashed = _times(hashed, _BASE) + _U(data[start + width - 1]) + _U(1) + (_PRIME - gone)
        hashed = (hashed & _PRIME) + (hashed >> _U(61))
        hashed = hashed - _PRIME if hashed >= _PRIME else hashed
        out[start - first] = _mixed(hashed)
    return out


@njit(cache=True)
def window_seeds(hashes, inside):
    """Return the position of the seed of each window, int64[windows]. `hashes` holds the hash of each run of seed
    length; a window contains `inside` of them."""
    windows = hashes.shape[0] - inside + 1
    out = np.empty(max(windows, 0), np.int64)
    queue = np.empty(max(hashes.shape[0], 1), np.int64)       # positions of rising hashes: the first is the smallest
    head, tail = 0, 0
    for place in range(hashes.shape[0]):
        while tail > head and hashes[queue[tail - 1]] > hashes[place]:
            tail -= 1
        queue[tail] = place
        tail += 1
        start = place - inside + 1
        if queue[head] < start:
            head += 1
        if start >= 0:
            out[start] = queue[head]
    return out


def seed_length(window: int) -> int:
    """Return the number of bytes of a seed."""
    return max(1, window // 2)


def seeds_of(data: NDArray[np.uint8], window: int) -> tuple[NDArray[np.uint64], NDArray[np.uint32]]:
    """Return (hash, position) of each seed of a text, in the order of the text. A text that is shorter than a window
    has none. `data` is the text in UTF-8, uint8[bytes]."""
    width = seed_length(window)
    hashes = run_hashes(data, width, 0, len(data) - width + 1)
    places = window_seeds(hashes, window - width + 1)
    places = places[np.r_[True, places[1:] != places[:-1]]] if len(places) else places    # they never go back
    return hashes[places], places.astype(np.uint32)


def windows_with(data: NDArray[np.uint8], window: int,
                 shared: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], NDArray[np.uint32]]:
    """Return (hash, position) of each window of a text whose seed has one of the hashes `shared` (sorted), in the order
    of the text."""
    width = seed_length(window)
    hashes = run_hashes(data, width, 0, len(data) - width + 1)
    places = window_seeds(hashes, window - width + 1)
    if not len(places) or not len(shared):
        return np.zeros(0, np.uint64), np.zeros(0, np.uint32)
    new = np.r_[True, places[1:] != places[:-1]]
    seeds = hashes[places[new]]
    is_shared = shared[np.minimum(np.searchsorted(shared, seeds), len(shared) - 1)] == seeds
    starts = np.flatnonzero(is_shared[np.cumsum(new) - 1])
    if not len(starts):
        return np.zeros(0, np.uint64), np.zeros(0, np.uint32)
    edges = np.flatnonzero(np.diff(starts) != 1) + 1           # runs of neighbouring windows are hashed together
    out = [run_hashes(data, window, int(run[0]), int(run[-1]) + 1) for run in np.split(starts, edges)]
    return np.concatenate(out), starts.astype(np.uint32)


def runs_of(starts: NDArray[np.int64], window: int) -> list[tuple[int, int]]:
    """Return the spans (begin, end) that windows at the ascending positions `starts` cover together."""
    if not len(starts):
        return []
    edges = np.flatnonzero(np.diff(starts) > window) + 1
    return [(int(run[0]), int(run[-1]) + window) for run in np.split(starts, edges)]


def merged(spans: list[tuple[int, int]], share: float) -> list[tuple[int, int]]:
    """Join neighbouring spans if the given spans cover at least `share` of the joined span (OLMo 3's fuzzy merge). The
    spans are in order and do not overlap. With `share` 1, nothing is joined."""
    out: list[tuple[int, int, int]] = []                       # begin, end, bytes covered
    for begin, end in spans:
        covered = end - begin
        while out and out[-1][2] + covered >= share * (end - out[-1][0]):
            first, _, before = out.pop()
            begin, covered = first, covered + before
        out.append((begin, end, covered))
    return [(begin, end) for begin, end, _ in out]
