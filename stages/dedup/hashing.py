"""Computes word shingles, MinHash signatures and band keys, for the search for near-duplicates.

Hashes and signatures are computed with unsigned integers of 64 bits, so they are the same on every machine. A
*simplified* text (`stages.text.normalize.simplify`) is in lower case, has 0 for each number and single spaces, and no
punctuation or accents. There are three dialects. They differ in how they split a text into words and how they hash
these:

``tokenmill``   Words are runs of non-space characters of the simplified text; characters of scripts written without
                spaces (Han, kana, Thai, Lao, Tibetan, Myanmar, Khmer) are a word each, so that such texts have shingles
                at all. A shingle of n words is hashed word by word (FNV-1a, then MurmurHash3's 64-bit finaliser). The
                permutations are x -> a x + b modulo 2**64 with odd a (Dietzfelbinger et al. 1997). They are bijections
                of the 64-bit integers. The low bits of a result depend only on the low bits of x, so x must be well
                mixed; the finaliser does that.
``datatrove``   Bit-equal to datatrove 0.10.1. Words are spaCy's English words of the simplified text. A shingle is its
                words joined by a space, hashed by sha1 (first 8 bytes, little-endian) or xxh64 (stages.text.ngrams).
                The hash functions are ``(x * a + b) % (2**61 - 1)`` *after* ``x * a + b`` has wrapped modulo 2**64.
                datatrove's comment calls them a universal hash, which they are not because of the wrapping. They are
                kept so because FineWeb's signatures were computed with them.
``datasketch``  Bit-equal to a `datasketch.MinHash` that is updated with every shingle (scheme "legacy", the only one
                before datasketch 2). Words are those of ``tokenmill``. A shingle is its words joined by a space. The
                signature uses the first 4 bytes of its sha1; texts are compared by the first 8.

MinHash: Broder 1997, "On the resemblance and containment of documents". Banding: Leskovec, Rajaraman, Ullman, "Mining
of Massive Datasets", 3.4.
"""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.base.compiled import njit

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
def _unspaced(code):
    """Return whether a code point belongs to one of the scripts in UNSPACED."""
    for i in range(_RANGES.shape[0]):  # noqa: SIM110 (numba knows no generator expressions)
        if _RANGES[i, 0] <= code <= _RANGES[i, 1]:
            return True
    return False


@njit(cache=True)
def _wide_code(data, i):
    """Return the code point of the character of three or four bytes that begins at byte `i` of a text in UTF-8."""
    code = ((data[i + 1] & 63) << 6) | (data[i + 2] & 63)
    if data[i] < 0xF0:
        return ((data[i] & 15) << 12) | code
    return ((data[i] & 7) << 18) | (code << 6) | (data[i + 3] & 63)


@njit(cache=True)
def _word_hashes(data):
    """Return the hash of each word of a text, uint64[words]. The text `data` is simplified (lower case, no punctuation,
    words separated by spaces), in UTF-8, uint8[bytes]."""
    wide = False
    for i in range(data.shape[0]):
        wide |= data[i] >= 0xE0                        # a character of three or four bytes, which may be a word alone
    out = _hashes_by_script(data) if wide else _hashes_by_space(data)
    for i in range(out.shape[0]):                      # a loop of its own, for the processor's vector instructions
        out[i] = _mix(out[i])
    return out


@njit(cache=True)
def _hashes_by_script(data):
    """Return the FNV-1a hash of each word of a text. Words end at spaces, and characters of the scripts in UNSPACED are
    a word each."""
    out = np.empty(data.shape[0], np.uint64)
    count, start, end, hashed = 0, 0, -1, _FNV_START   # of the word; `end`: only of one that is one character
    for i in range(data.shape[0]):
        byte = data[i]
        begins_word = byte >= 0xE0 and _unspaced(_wide_code(data, i))
        if byte == 32 or begins_word:
            if i > start:
                out[count] = hashed
                count, hashed = count + 1, _FNV_START
            start = i
            if not begins_word:
                start = i + 1
                continue
            end = i + (3 if byte < 0xF0 else 4)
        hashed = (hashed ^ _U(byte)) * _FNV
        if i + 1 == end:
            out[count] = hashed
            count, hashed, start = count + 1, _FNV_START, end
    if data.shape[0] > start:
        out[count] = hashed
        count += 1
    return out[:count]


@njit(cache=True)
def _hashes_by_space(data):
    """Return the FNV-1a hash of each word of a text whose words end only at spaces.

    For speed, one loop hashes both halves of the text. Each step of FNV-1a waits for the multiplication of the step
    before, so two independent sequences of steps overlap. The loop has no branch that depends on where words end,
    because processors would often mispredict it.
    """
    middle = data.shape[0] // 2
    while middle < data.shape[0] and data[middle] != 32:
        middle += 1
    left, right = data[:middle], data[middle:]
    out = np.empty(data.shape[0] + 2, np.uint64)
    out_right = out[middle + 1:]
    count, hashed, inside = _U(0), _FNV_START, _U(0)                    # `inside`: 1 in a word, otherwise 0
    count_right, hashed_right, inside_right = _U(0), _FNV_START, _U(0)
    both = min(left.shape[0], right.shape[0])
    for i in range(_U(both)):
        out[count], out_right[count_right] = hashed, hashed_right       # overwritten until the word is complete
        count, hashed, inside = _after_byte(_U(left[i]), count, hashed, inside)
        count_right, hashed_right, inside_right = _after_byte(_U(right[i]), count_right, hashed_right, inside_right)
    count = _rest(left[both:], out, count, hashed, inside)
    count_right = _rest(right[both:], out_right, count_right, hashed_right, inside_right)
    for i in range(count_right):
        out[count + i] = out_right[i]
    return out[:count + count_right]


@njit(cache=True, inline="always")
def _after_byte(byte, count, hashed, inside):
    """Process one more byte of a text. Takes and returns the state of the hashing: (number of complete words, hash of
    the current word, 1 inside a word and 0 outside)."""
    space = _U(byte == _U(32))
    goes_on = space - _U(1)                                             # all bits are ones unless the byte is a space
    return (count + (space & inside), (((hashed ^ byte) * _FNV) & goes_on) | (_FNV_START & ~goes_on),
            goes_on & _U(1))


@njit(cache=True)
def _rest(data, out, count, hashed, inside):
    """Hash the words of `data`, the rest of a text, which may begin within a word. `out` holds the hashes of the
    `count` words before the rest, and the new hashes are written behind them. `hashed` and `inside` are results of
    `_after_byte`. Returns the number of words, including those before the rest."""
    for i in range(_U(data.shape[0])):
        out[count] = hashed
        count, hashed, inside = _after_byte(_U(data[i]), count, hashed, inside)
    out[count] = hashed
    return count + inside


@njit(cache=True)
def _join(words, ngram):
    """Return the hash of every run of `ngram` consecutive words, computed from the hashes of the single words."""
    out = np.full(max(words.shape[0] - ngram + 1, 0), _U(ngram))
    for word in range(ngram):
        for first in range(out.shape[0]):              # the inner loop, for the processor's vector instructions
            out[first] = _mix(out[first] * _GOLD + words[first + word])
    return out


@njit(cache=True)
def _minima(shingles, a, b):
    """Return the smallest value that each permutation x -> a[i] x + b[i] modulo 2**64 takes over the shingles (hashes
    of word n-grams). This is the function of the dialect ``tokenmill``; `_minima_mersenne` is that of ``datatrove``."""
    out = np.full(a.shape[0], _U(0xFFFFFFFFFFFFFFFF))
    for number in range(shingles.shape[0]):
        shingle = shingles[number]
        for function in range(a.shape[0]):
            value = shingle * a[function] + b[function]
            out[function] = value if value < out[function] else out[function]
    return out


@njit(cache=True)
def _minima_mersenne(shingles, a, b):
    """Return the smallest value that each of datatrove's hash functions (x a + b) mod (2**61 - 1) takes over the
    shingles x (hashes of word n-grams). As in datatrove, x a + b wraps modulo 2**64 first."""
    out = np.full(a.shape[0], _U(0xFFFFFFFFFFFFFFFF))
    for number in range(shingles.shape[0]):
        shingle = shingles[number]
        for function in range(a.shape[0]):
            value = shingle * a[function] + b[function]       # wraps, as numpy's uint64 does in datatrove
            value = (value & _MERSENNE) + (value >> _U(61))       # congruent modulo the Mersenne prime
            value = value - _MERSENNE if value >= _MERSENNE else value
            out[function] = value if value < out[function] else out[function]
    return out


@njit(cache=True)
def _minima_datasketch(shingles, a, b):
    """Return the smallest value that each of datasketch's hash functions takes over the shingles (hashes of word
    n-grams). A function takes the low 32 bits x of a shingle and returns the low 32 bits of (x a + b) mod (2**61 - 1).
    As in datasketch, x a + b wraps modulo 2**64 first."""
    out = np.full(a.shape[0], _U(0xFFFFFFFF))
    for number in range(shingles.shape[0]):
        shingle = shingles[number] & _U(0xFFFFFFFF)
        for function in range(a.shape[0]):
            value = shingle * a[function] + b[function]
            value = (value & _MERSENNE) + (value >> _U(61))
            value = value - _MERSENNE if value >= _MERSENNE else value
            value &= _U(0xFFFFFFFF)
            out[function] = value if value < out[function] else out[function]
    return out


@njit(cache=True)
def _character_hashes(data):
    """Return a hash of each character of a text in UTF-8, uint64[characters]."""
    out = np.empty(data.shape[0], np.uint64)
    count = 0
    for i in range(data.shape[0]):
        if data[i] & 0xC0 != 0x80:
            out[count] = _FNV_START
            count += 1
        out[count - 1] = (out[count - 1] ^ _U(data[i])) * _FNV
    for i in range(count):
        out[i] = _mix(out[i])
    return out[:count]


@njit(cache=True)
def _roll(hashes, ngram):
    """Return the hash of every run of `ngram` consecutive hashes. The hash of a run is computed from that of the
    previous run, so the time does not grow with `ngram`."""
    total = hashes.shape[0] - ngram + 1
    out = np.empty(max(total, 0), np.uint64)
    if total <= 0:
        return out
    power, rolled = _U(1), _U(0)
    for i in range(ngram):
        rolled = rolled * _GOLD + hashes[i]
        power *= _GOLD
    out[0] = _mix(rolled)
    for first in range(1, total):
        rolled = rolled * _GOLD + hashes[first + ngram - 1] - power * hashes[first - 1]
        out[first] = _mix(rolled)
    return out


@njit(cache=True)
def band_keys(signature, bands, rows):
    """Return one 64-bit key for each band of a MinHash signature (uint64[bands * rows] -> uint64[bands]).

    A band is `rows` consecutive values of the signature. The number of the band enters its key, so equal values in
    different bands give different keys. Two bands with different values have an equal key with a probability of only
    2**-64.
    """
    out = np.empty(bands, np.uint64)
    for band in range(bands):
        hashed = _U(band + 1) * _GOLD
        for row in range(rows):
            hashed = _mix(hashed ^ signature[band * rows + row]) + _GOLD
        out[band] = _mix(hashed)
    return out


@njit(cache=True)
def mix(values):
    """Hash each of the integers `values` by a bijection of the 64-bit integers, so that even consecutive numbers spread
    evenly."""
    out = np.empty(values.shape[0], np.uint64)
    for i in range(values.shape[0]):
        out[i] = _mix(_U(values[i]))
    return out


def split_words(simplified: str) -> list[str]:
    """Return the words that `word_shingles` hashes, as strings, to show them to people."""
    return _WORD.findall(simplified)


def word_shingles(simplified: NDArray[np.uint8], ngram: int) -> tuple[Hashes, int]:
    """Return (hash of every run of `ngram` words in order, number of words) of a text. The text `simplified` is in
    UTF-8, in lower case and without punctuation; it may have several spaces between words. Words are split and hashed
    by the rules of the dialect ``tokenmill``, one of the sets of rules that `minhash` knows."""
    words = _word_hashes(simplified)
    return _join(words, ngram), len(words)


@njit(cache=True)
def _shingles_of_texts(simplified, ends, ngram, out, counts):
    """Hash the runs of `ngram` words of many texts. `simplified` holds all texts one after another, and `ends` the
    position where each ends. Writes the hashes to `out`, one text after another, and their number in each text to
    `counts`. Returns the number of hashes of all texts."""
    total, start = 0, 0
    for number in range(ends.shape[0]):
        shingles = _join(_word_hashes(simplified[start:ends[number]]), ngram)
        for i in range(shingles.shape[0]):
            out[total + i] = shingles[i]
        counts[number] = shingles.shape[0]
        total += shingles.shape[0]
        start = ends[number]
    return total


def word_shingles_of_texts(simplified: NDArray[np.uint8], ends: NDArray[np.int64],
                           ngram: int) -> tuple[Hashes, NDArray[np.int64]]:
    """Hash the runs of `ngram` words of many texts, each as `word_shingles` does. `simplified` holds all texts one
    after another, and `ends` the position where each ends. Returns (the hashes of all texts, one text after another;
    the number of hashes of each text)."""
    out, counts = np.empty(len(simplified), np.uint64), np.zeros(len(ends), np.int64)
    return out[:_shingles_of_texts(simplified, ends, ngram, out, counts)], counts


def character_shingles(simplified: NDArray[np.uint8], ngram: int) -> tuple[Hashes, int]:
    """Return (hash of every run of `ngram` characters in order, number of characters) of a simplified text, given in
    UTF-8."""
    characters = _character_hashes(simplified)
    return _roll(characters, ngram), len(characters)


def token_shingles(tokens: NDArray[Any], ngram: int) -> tuple[Hashes, int]:
    """Return (hash of every run of `ngram` tokens in order, number of tokens) of a text, given as the numbers of its
    tokens."""
    return _roll(mix(tokens), ngram), len(tokens)


class Permutations:
    """Holds the `count` hash functions of a MinHash signature, and computes signatures with them.

    >>> signature = Permutations(112, seed=1, dialect="tokenmill")(shingles)      # uint64[112]
    """

    def __init__(self, count: int, seed: int, dialect: str) -> None:
        if dialect == "datatrove":
            draw = np.random.RandomState(seed)         # numpy guarantees that its stream never changes
            self.a = draw.randint(1, int(_MERSENNE), dtype=np.uint64, size=count)
            self.b = draw.randint(0, int(_MERSENNE), dtype=np.uint64, size=count)
            self._minima = _minima_mersenne
        elif dialect == "datasketch":
            draw, prime = np.random.RandomState(seed), int(_MERSENNE)
            pairs = np.array([(draw.randint(1, prime, dtype=np.uint64), draw.randint(0, prime, dtype=np.uint64))
                              for _ in range(count)], np.uint64)
            self.a, self.b = pairs[:, 0].copy(), pairs[:, 1].copy()
            self._minima = _minima_datasketch
        else:
            stream = b"".join(hashlib.blake2b(f"tokenmill/minhash/{seed}/{number}".encode(), digest_size=16).digest()
                              for number in range(count))
            pairs = np.frombuffer(stream, "<u8").reshape(count, 2)
            self.a, self.b = (pairs[:, 0] | _U(1)).copy(), pairs[:, 1].copy()
            self._minima = _minima

    def __call__(self, shingles: Hashes) -> Hashes:
        """Return a MinHash signature, uint64[count]: the smallest value that each hash function takes over the
        shingles. Without shingles, all bits are ones (for ``datasketch``, the low 32 bits of each value)."""
        return self._minima(shingles, self.a, self.b)
