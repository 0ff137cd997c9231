"""Kernels of near-duplicate detection: word shingles of a text, MinHash signatures, band keys, Jaccard similarity.

Everything here is integer arithmetic modulo 2**64, so the numbers are the same on every machine. There are two
dialects, which differ in how they find words and hash them:

``tokenmill``   Words are runs of non-space characters of the simplified text; characters of scripts written without
                spaces (Han, kana, Thai, Lao, Tibetan, Myanmar, Khmer) are a word each, so that such texts have shingles
                at all. A shingle of n words is hashed word by word (FNV-1a, then MurmurHash3's 64-bit finaliser). The
                permutations are x -> a x + b modulo 2**64 with odd a (Dietzfelbinger et al. 1997). They are bijections
                of the 64-bit integers and are applied to hashes that are already mixed.
``datatrove``   Bit-equal to datatrove 0.10.1: spaCy's English words of the simplified text joined by a space, sha1
                (first 8 bytes, little-endian) or xxh64 (stages.text.ngrams), and ``(x * a + b) % (2**61 - 1)`` *after*
                the product has wrapped modulo 2**64. datatrove's comment calls this a universal hash. It is none, but
                FineWeb's signatures were computed with it.

MinHash: Broder 1997, "On the resemblance and containment of documents". Banding: Leskovec, Rajaraman, Ullman,
"Mining of Massive Datasets", 3.4.
"""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING

import numpy as np

from stages.text.compiled import njit

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Hashes = NDArray[np.uint64]

_U = np.uint64
_FNV, _FNV_START = _U(0x100000001B3), _U(0xCBF29CE484222325)
_M1, _M2, _GOLD = _U(0xFF51AFD7ED558CCD), _U(0xC4CEB9FE1A85EC53), _U(0x9E3779B97F4A7C15)
_MERSENNE = _U((1 << 61) - 1)


@njit(cache=True, inline="always")
def _mix(x):  # MurmurHash3 fmix64: a bijection in which every input bit reaches every output bit
    x ^= x >> _U(33)
    x *= _M1
    x ^= x >> _U(33)
    x *= _M2
    return x ^ (x >> _U(33))


#: code points, first and last, of scripts that do not put spaces between words: Thai, Lao, Tibetan; Myanmar; Khmer;
#: kana; Han; half-width kana; Han of the supplementary planes
UNSPACED = ((0x0E00, 0x0FFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x3041, 0x30FF), (0x3400, 0x4DBF), (0x4E00, 0x9FFF),
            (0xF900, 0xFAFF), (0xFF66, 0xFF9F), (0x20000, 0x3FFFF))
_RANGES = np.array(UNSPACED)
_CLASS = "".join(f"{chr(first)}-{chr(last)}" for first, last in UNSPACED)
_WORD = re.compile(f"[{_CLASS}]|[^ {_CLASS}]+")


@njit(cache=True)
def _unspaced(c):
    for i in range(_RANGES.shape[0]):  # noqa: SIM110 (numba knows no generator expressions)
        if _RANGES[i, 0] <= c <= _RANGES[i, 1]:
            return True
    return False


@njit(cache=True)
def _word_hashes(data):
    out = np.empty(data.shape[0], np.uint64)
    n, i, inside, h = 0, 0, False, _FNV_START
    while i < data.shape[0]:
        lead = data[i]
        size = 1 if lead < 0xC0 else 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
        if size > data.shape[0] - i:
            size = data.shape[0] - i
        alone = False
        if size == 3:
            alone = _unspaced(((lead & 15) << 12) | ((data[i + 1] & 63) << 6) | (data[i + 2] & 63))
        elif size == 4:
            alone = _unspaced(((lead & 7) << 18) | ((data[i + 1] & 63) << 12) | ((data[i + 2] & 63) << 6)
                              | (data[i + 3] & 63))
        if (alone or lead == 32) and inside:
            out[n] = _mix(h)
            n, h, inside = n + 1, _FNV_START, False
        if lead != 32:
            for k in range(i, i + size):
                h = (h ^ _U(data[k])) * _FNV
            inside = True
            if alone:
                out[n] = _mix(h)
                n, h, inside = n + 1, _FNV_START, False
        i += size
    if inside:
        out[n] = _mix(h)
        n += 1
    return out[:n]


@njit(cache=True)
def _join(words, n):
    total = words.shape[0] - n + 1
    out = np.empty(max(total, 0), np.uint64)
    for i in range(total):
        h = _U(n)
        for k in range(n):
            h = _mix(h * _GOLD + words[i + k])
        out[i] = h
    return out


@njit(cache=True)
def _minima(shingles, a, b):
    out = np.full(a.shape[0], _U(0xFFFFFFFFFFFFFFFF))
    for i in range(shingles.shape[0]):
        x = shingles[i]
        for k in range(a.shape[0]):
            h = x * a[k] + b[k]
            out[k] = h if h < out[k] else out[k]
    return out


@njit(cache=True)
def _minima_mersenne(shingles, a, b):
    out = np.full(a.shape[0], _U(0xFFFFFFFFFFFFFFFF))
    for i in range(shingles.shape[0]):
        x = shingles[i]
        for k in range(a.shape[0]):
            h = x * a[k] + b[k]                       # wraps, as numpy's uint64 does in datatrove
            h = (h & _MERSENNE) + (h >> _U(61))       # = h modulo the Mersenne prime, once more below
            h = h - _MERSENNE if h >= _MERSENNE else h
            out[k] = h if h < out[k] else out[k]
    return out


@njit(cache=True)
def band_keys(signature, bands, rows):
    """One 64-bit key for each band of a signature (uint64[bands * rows] -> uint64[bands]).

    The band's number enters its key, so equal hashes in different bands give different keys. Two documents that share
    no band have an equal key with a probability of only 2**-64 for each pair of keys, and verification rejects such a
    pair of documents.
    """
    out = np.empty(bands, np.uint64)
    for band in range(bands):
        h = _U(band + 1) * _GOLD
        for row in range(rows):
            h = _mix(h ^ signature[band * rows + row]) + _GOLD
        out[band] = _mix(h)
    return out


@njit(cache=True)
def common(a, b):
    """How many values two sorted arrays without repetitions share."""
    i, j, n = 0, 0, 0
    while i < a.shape[0] and j < b.shape[0]:
        if a[i] == b[j]:
            n, i, j = n + 1, i + 1, j + 1
        elif a[i] < b[j]:
            i += 1
        else:
            j += 1
    return n


@njit(cache=True)
def mix(values):
    """Hash numbers that are not mixed yet, element by element, by a bijection of the 64-bit integers."""
    out = np.empty(values.shape[0], np.uint64)
    for i in range(values.shape[0]):
        out[i] = _mix(_U(values[i]))
    return out


def jaccard(a: Hashes, b: Hashes) -> float:
    """Jaccard similarity |A and B| / |A or B| of two shingle sets (sorted, unique uint64); 0 when both are empty."""
    both = int(common(a, b))
    union = len(a) + len(b) - both
    return both / union if union else 0.0


def split_words(simplified: str) -> list[str]:
    """The words `word_shingles` hashes, as strings. They are for people to read; the kernel does not need them."""
    return _WORD.findall(simplified)


def word_shingles(simplified: str, ngram: int) -> tuple[Hashes, int]:
    """(hash of every run of `ngram` words in order, number of words) of a simplified text; dialect ``tokenmill``."""
    words = _word_hashes(np.frombuffer(simplified.encode("utf-8", "surrogatepass"), np.uint8))
    return _join(words, ngram), len(words)


class Permutations:
    """The `count` hash functions of a signature.

    >>> signature = Permutations(112, seed=1, dialect="tokenmill")(shingles)      # uint64[112]
    """

    def __init__(self, count: int, seed: int, dialect: str) -> None:
        if dialect == "datatrove":
            draw = np.random.RandomState(seed)         # numpy guarantees that its stream never changes
            self.a = draw.randint(1, int(_MERSENNE), dtype=np.uint64, size=count)
            self.b = draw.randint(0, int(_MERSENNE), dtype=np.uint64, size=count)
            self._minima = _minima_mersenne
        else:
            stream = b"".join(hashlib.blake2b(f"tokenmill/minhash/{seed}/{k}".encode(), digest_size=16).digest()
                              for k in range(count))
            ab = np.frombuffer(stream, "<u8").reshape(count, 2)
            self.a, self.b = (ab[:, 0] | _U(1)).copy(), ab[:, 1].copy()
            self._minima = _minima

    def __call__(self, shingles: Hashes) -> Hashes:
        """uint64[count]: the smallest value of each function over the shingles (all ones when there are none)."""
        return self._minima(shingles, self.a, self.b)
