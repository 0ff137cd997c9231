"""Finds stretches that occur in several texts, by hashes of short runs of bytes.

A *window* is a run of `window` bytes. Two texts share a stretch of at least `window` bytes if, and only if, they share
a window. To compare the windows of a whole corpus, one would have to exchange a hash for each byte. But most windows
occur only once, and a sample of the text, its seeds, shows which windows these are.

The *seed* of a window is the run of `window` // 2 bytes in the window whose hash is smallest (its minimizer, Schleimer
et al. 2003, "Winnowing"). Equal windows have seeds of equal hash, so only windows whose seed's hash occurs more than
once need to be hashed. Neighbouring windows mostly share their seed, so a text has about 4 seeds for each `window`
bytes. Two equal windows that do not overlap have two seeds, because each seed lies within its window.

Several runs of a window may have the smallest hash. If the seed of the previous window is one of them, it is also the
seed of this window ("robust winnowing"). If it is not, the last of the runs is the seed. Without this rule, a text of a
million equal bytes would have a million seeds.

The functions take the bytes of a text or, in the same way, its tokens, given by number.

Hashes are polynomials modulo the prime 2**61 - 1 (Karp and Rabin 1987). Different windows may have equal hashes, and a
hostile text can be made so that they do. Code that removes a stretch must therefore first compare the bytes, or a
cryptographic hash of the bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.base.compiled import njit

if TYPE_CHECKING:
    from numpy.typing import NDArray

_U = np.uint64
_PRIME = _U((1 << 61) - 1)
_BASE = _U(0x1A37F2C94D6B8E51)
_LOW = _U((1 << 32) - 1)
_M1, _M2 = _U(0xFF51AFD7ED558CCD), _U(0xC4CEB9FE1A85EC53)
#: windows that are processed at a time; this bounds the memory that a long text takes (8 bytes for each window)
BLOCK = 1 << 20


@njit(cache=True, inline="always")
def _times(a, b):
    """Return a * b modulo the prime 2**61 - 1. Both a and b must be below the prime."""
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
    """Return the base of the hash polynomials to the power `exponent`, modulo the prime 2**61 - 1."""
    out = _U(1)
    for _ in range(exponent):
        out = _times(out, _BASE)
    return out


@njit(cache=True)
def run_hashes(data, width, first, stop):
    """Return the hash of the `width` bytes that begin at each position from `first` to `stop` - 1, uint64[stop -
    first]. `data` is uint8[bytes]."""
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
    """Return two arrays with an entry for each seed, int64[seeds], both ascending: (the position of the seed, the
    number of the first window that has it). `hashes` holds the hash of each run of seed length. A window contains
    `inside` such runs."""
    seeds, firsts = np.empty(64, np.int64), np.empty(64, np.int64)
    size = inside + 1
    queue = np.empty(size, np.int64)              # a ring of positions with rising hashes: the first is the smallest
    head, tail, count, seed = 0, 0, 0, -1
    for place in range(hashes.shape[0]):
        while tail > head and hashes[queue[(tail - 1) % size]] >= hashes[place]:
            tail -= 1
        queue[tail % size] = place
        tail += 1
        start = place - inside + 1
        if queue[head % size] < start:
            head += 1
        least = queue[head % size]                                # the last of several smallest ones
        if start < 0 or (seed >= start and hashes[seed] == hashes[least]):
            continue
        if count == seeds.shape[0]:
            seeds, firsts = np.concatenate((seeds, seeds)), np.concatenate((firsts, firsts))
        seed = least
        seeds[count], firsts[count] = seed, start
        count += 1
    return seeds[:count].copy(), firsts[:count].copy()


def seed_length(window: int) -> int:
    """Return the number of bytes of the seed of a window of `window` bytes."""
    return max(1, window // 2)


def _seed_blocks(data: NDArray[Any], window: int, most: int) -> Iterator[tuple[NDArray[Any], ...]]:
    """Yield the seeds of a text's windows (see the docstring of this module), in blocks of at most `most` windows, so
    that memory does not grow with the text. A block is four arrays with an entry for each seed: (hash of the seed, its
    position, number of the first window with this seed, exclusive end of the numbers of the windows with this seed). If
    a seed belongs to windows of two blocks, it is in both blocks."""
    width = seed_length(window)
    for first in range(0, len(data) - window + 1, most):
        stop = min(first + most, len(data) - window + 1)
        hashes = run_hashes(data, width, first, stop + window - width)
        places, begins = window_seeds(hashes, window - width + 1)
        yield hashes[places], places + first, begins + first, np.r_[begins[1:] + first, stop]


def seeds_of(data: NDArray[Any], window: int,
             most: int = BLOCK) -> tuple[NDArray[np.uint64], NDArray[np.uint32]]:
    """Return (hash of each seed, position of each seed) of a text, in the order of the text. A text that is shorter
    than a window has no seeds. `data` is the text in UTF-8, uint8[bytes]. The text is read in blocks of `most`
    windows."""
    hashes, places, last = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)], -1
    for block, positions, _, _ in _seed_blocks(data, window, most):
        again = int(positions[0] == last)
        hashes.append(block[again:])
        places.append(positions[again:])
        last = int(positions[-1])
    return np.concatenate(hashes), np.concatenate(places).astype(np.uint32)


def windows_with(data: NDArray[Any], window: int, shared: NDArray[np.uint64],
                 most: int = BLOCK) -> Iterator[tuple[NDArray[np.uint64], NDArray[np.uint32]]]:
    """Yield the windows of a text whose seed has one of the hashes `shared` (sorted), as (hash of each window, position
    of each window). They come in the order of the text, in blocks of at most `most` windows. Equal windows have seeds
    of equal hash, so of a set of equal windows either all are yielded, or none."""
    for seeds, _, begins, ends in _seed_blocks(data, window, most) if len(shared) else ():
        chosen = shared[np.minimum(np.searchsorted(shared, seeds), len(shared) - 1)] == seeds
        if not chosen.any():
            continue
        begins, ends = begins[chosen], ends[chosen]
        apart = begins[1:] != ends[:-1]                        # neighbouring windows are hashed together
        for first, stop in zip(begins[np.r_[True, apart]], ends[np.r_[apart, True]]):
            yield run_hashes(data, window, int(first), int(stop)), np.arange(first, stop, dtype=np.uint32)


@njit(cache=True)
def covering(texts, starts, stops):
    """Choose spans that together cover every byte that any of the given spans covers. Returns bool[n]: whether each
    span is chosen. Span i reaches from starts[i] to stops[i] in the text number texts[i]. The spans must be sorted by
    text, and within a text both starts and stops must ascend. The last span, and the first one of each text, are always
    chosen."""
    needed = np.zeros(starts.shape[0], np.bool_)
    kept = -1
    for i in range(starts.shape[0]):
        other = kept < 0 or texts[i] != texts[kept]
        if (other or starts[i] > stops[kept]) and i - 1 > kept:
            kept = i - 1                                          # the furthest span that begins in the coverage
            needed[kept] = True
            other = texts[i] != texts[kept]
        if other or starts[i] > stops[kept]:
            kept = i
            needed[i] = True
    if starts.shape[0]:
        needed[-1] = True
    return needed


def merged(spans: list[tuple[int, int]], share: float) -> list[tuple[int, int]]:
    """Join neighbouring spans of a text to one span, if they cover at least the share `share` of the joined span (OLMo
    3's fuzzy merge). The spans are in order and neither overlap nor touch. With `share` 1, nothing is joined."""
    out: list[tuple[int, int, int]] = []                       # begin, end, bytes covered
    for begin, end in spans:
        covered = end - begin
        while out and out[-1][2] + covered >= share * (end - out[-1][0]):
            first, _, before = out.pop()
            begin, covered = first, covered + before
        out.append((begin, end, covered))
    return [(begin, end) for begin, end, _ in out]
