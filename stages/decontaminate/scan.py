"""Splits texts into words and looks up sequences of words, in compiled kernels over UTF-8, for the step
`decontaminate`.

A *word* is a run of letters, marks and digits, in lower case. Each ideograph and each kana is a word of its own. All
numbers are equal, so that a test question with other numbers is found, too: `1,250.5` equals `7`, and `ps4` equals
`ps5`. All other characters, and all characters beyond U+FFFF, separate words. A word has a hash of 64 bits, and the
hash of a sequence of words is a polynomial of the hashes of its words. Python's Unicode tables say which characters are
letters, and what their lower case is.

A *border* is a place where a sentence or line begins or ends. Borders are the ends of the text, line breaks, and the
marks `. ! ? : ;` with their East Asian forms. A word begins (or ends) at a border if no other word is between the word
and the border.
"""

from __future__ import annotations

import unicodedata
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from pipeline.base.compiled import njit

#: flags of a character beside its lower case: a word alone, a digit, a border
_ALONE, _DIGIT, _BORDER = 1 << 17, 1 << 18, 1 << 19
_MARKS = "\n\r\v\f\u0085\u2028\u2029.!?:;。！？：；…"
_BASE = 0x9E3779B97F4A7C15          # odd, so that no word is lost from the polynomial
#: A sequence of fewer words is an everyday phrase inside a sentence. It is found only where it is between two borders.
#: In 24 MB of books, Wikipedia, web pages and licences, one of the 2,176 questions of up to 12 words of 13 benchmarks
#: is inside a sentence: "the Moon's gravity", which has four words.
BORDERED = 5


class ScannedWords(NamedTuple):
    """The words of a text. `sums[i]` is the hash of the first i words. `starts` and `ends` hold the position of each
    word, in bytes. `letters[i]` is 1 if word i has a letter. `borders[i]` is 1 if a border (the end of a sentence or
    line) is between word i and the word before it. The last value of `borders` is about the place after the last
    word."""

    sums: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    borders: np.ndarray
    letters: np.ndarray


@cache
def characters() -> np.ndarray:
    """Return a table, int32[65536], by which `_split` splits texts into words. It has a value for each character of the
    Basic Multilingual Plane. A character of words has its lower case with flags, a mark that ends a sentence or line
    has _BORDER, and any other character has 0."""
    table = np.zeros(1 << 16, np.int32)
    for code in range(1 << 16):
        char = chr(code)
        if char.isalnum() or unicodedata.category(char)[0] == "M":
            lower = char.lower()
            table[code] = (ord(lower) if len(lower) == 1 else code) | _DIGIT * char.isdecimal()
            if 0x3040 <= code < 0x3100 or 0x3400 <= code < 0xA000 or 0xF900 <= code < 0xFB00:
                table[code] |= _ALONE
    for char in _MARKS:
        table[ord(char)] = _BORDER
    return table


def words_of(data: bytes) -> ScannedWords:
    """Split a text in UTF-8 into words."""
    room = len(data) // 2 + 2
    words = ScannedWords(np.zeros(room, np.uint64), np.empty(room, np.int64), np.empty(room, np.int64),
                         np.zeros(room, np.uint8), np.zeros(room, np.uint8))
    count = _split(np.frombuffer(data, np.uint8), characters(), *words)
    return ScannedWords(words.sums[:count + 1], words.starts[:count], words.ends[:count], words.borders[:count + 1],
                        words.letters[:count])


def keys_of(words: ScannedWords, length: int) -> np.ndarray:
    """Return the keys of a text: a hash (uint64) of every sequence of `length` words, in order. The index of evaluation
    sets finds sequences by their keys."""
    if length > len(words.starts):
        return np.empty(0, np.uint64)
    keys = np.empty(len(words.starts) - length + 1, np.uint64)
    _keys(words.sums, length, keys)
    return keys


class KeyTable(NamedTuple):
    """A table of keys (hashes of sequences of words) for fast look-ups. The keys are sorted, and the number of a key is
    its position among them. All keys with the same first bits form a bucket; the keys of bucket b begin at `starts[b]`.
    `filter` is a Bloom filter: a quick test that excludes most sequences that are not in the table."""

    filter: np.ndarray
    starts: np.ndarray
    keys: np.ndarray


def key_table(keys: np.ndarray) -> KeyTable:
    """Return the table of the given keys. They must be sorted and different."""
    filter_bits = np.zeros(1 << max(2 * len(keys), 32).bit_length(), np.uint8)           # 16 to 32 bits for each key
    _fill(keys, filter_bits)
    bits = np.uint64(max(len(keys).bit_length() - 3, 1))                                 # 4 to 8 keys in a bucket
    edges = np.arange(1 << int(bits), dtype=np.uint64) << np.uint64(64 - bits)
    starts = np.append(np.searchsorted(keys, edges), len(keys)).astype(np.uint32)
    return KeyTable(filter_bits, starts, keys)


def find(words: ScannedWords, lengths: np.ndarray, table: KeyTable) -> np.ndarray:
    """Look up all sequences of words of a text in a table, for each number of words in `lengths`. A sequence of fewer
    than BORDERED words counts only where it fills whole sentences or lines. Returns int64[hits, 3] with a row for each
    sequence that is in the table: the number of its first word, its number of words, and the number of its key in the
    table."""
    room = 256
    while True:
        hits = np.empty((room, 3), np.int64)
        count = _find(words.sums, words.borders, lengths, *table, hits)
        if count <= room:
            return hits[:count]
        room = count


@njit(cache=True, nogil=True)
def _fill(keys: Any, filter_bits: Any) -> None:
    bits = np.uint64(len(filter_bits) * 8 - 1)
    for number in range(len(keys)):
        bit = keys[number] & bits
        filter_bits[np.int64(bit >> np.uint64(3))] |= np.uint8(1) << np.uint8(bit & np.uint64(7))


@njit(cache=True, nogil=True)
def _mixed(value: Any) -> Any:
    value = np.uint64(value)
    value = (value ^ (value >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    value = (value ^ (value >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    return value ^ (value >> np.uint64(32))


@njit(cache=True, nogil=True)
def _character(data: Any, at: int) -> Any:
    """Return (code point, number of bytes) of the character at byte `at` of a text in UTF-8. A byte that is no UTF-8
    counts as a character of one byte."""
    first, left = np.int64(data[at]), len(data) - at
    if first < 0x80:
        return first, 1
    if first >= 0xF0 and left > 3:
        return ((first & 7) << 18 | (np.int64(data[at + 1]) & 63) << 12 | (np.int64(data[at + 2]) & 63) << 6
                | (np.int64(data[at + 3]) & 63)), 4
    if first >= 0xE0 and left > 2:
        return (first & 15) << 12 | (np.int64(data[at + 1]) & 63) << 6 | (np.int64(data[at + 2]) & 63), 3
    if first >= 0xC0 and left > 1:
        return (first & 31) << 6 | (np.int64(data[at + 1]) & 63), 2
    return first, 1


@njit(cache=True, nogil=True)
def _split(data: Any, table: Any, sums: Any, starts: Any, ends: Any, borders: Any, letters: Any) -> Any:
    """Split a text in UTF-8 (`data`) into words. `table` is the table of `characters`. The fields of `ScannedWords` are
    written to the arrays `sums` to `letters`. Returns the number of words."""
    size, at, count = len(data), np.int64(0), 0
    borders[0] = 1
    while at < size:
        code, step = _character(data, at)
        kind = np.int64(table[code]) if code < 65536 else np.int64(0)
        if kind & 0x1FFFF == 0:
            if kind & _BORDER:
                borders[count] = 1
            at += step
            continue
        begin, hashed, digits, after_digit = at, np.uint64(0), True, False
        while True:
            is_digit = kind & _DIGIT != 0
            digits = digits and is_digit
            if not (is_digit and after_digit):
                hashed = (hashed ^ np.uint64(48 if is_digit else kind & 0x1FFFF)) * np.uint64(0x9E3779B97F4A7C15)
                hashed ^= hashed >> np.uint64(29)
            after_digit = is_digit
            at += step
            if kind & _ALONE or at == size:
                break
            code, step = _character(data, at)
            kind = np.int64(table[code]) if code < 65536 else np.int64(0)
            if digits and (code == 44 or code == 46) and at + 1 < size and 48 <= data[at + 1] < 58:
                at += 1                                       # a comma or point inside a number
                code, step = _character(data, at)
                kind = np.int64(table[code])
            if kind & 0x1FFFF == 0 or kind & _ALONE:
                break
        sums[count + 1] = sums[count] * np.uint64(_BASE) + _mixed(hashed)
        starts[count], ends[count], letters[count] = begin, at, 0 if digits else 1
        count += 1
    borders[count] = 1
    return count


@njit(cache=True, nogil=True)
def _power(length: int) -> Any:
    power = np.uint64(1)
    for _ in range(length):
        power *= np.uint64(_BASE)
    return power


@njit(cache=True, nogil=True)
def _keys(sums: Any, length: int, keys: Any) -> None:
    power = _power(length)
    for i in range(len(keys)):
        keys[i] = _mixed(sums[i + length] - sums[i] * power + np.uint64(length))


@njit(cache=True, nogil=True)
def _find(sums: Any, borders: Any, lengths: Any, filter_bits: Any, starts: Any, table_keys: Any, hits: Any) -> Any:
    """The compiled code of `find`. Writes as many hits to `hits` as it has room for, and returns the number of all
    hits."""
    bits, count, shift = np.uint64(len(filter_bits) * 8 - 1), 0, np.uint64(64)
    while np.uint64(1) << (np.uint64(64) - shift) < len(starts) - 1:
        shift -= np.uint64(1)
    for length in lengths:
        power, anywhere = _power(length), length >= BORDERED
        for i in range(len(sums) - length):
            if not (anywhere or (borders[i] and borders[i + length])):
                continue
            key = _mixed(sums[i + length] - sums[i] * power + np.uint64(length))
            bit = key & bits
            if not (filter_bits[np.int64(bit >> np.uint64(3))] >> np.uint8(bit & np.uint64(7))) & 1:
                continue
            bucket = np.int64(key >> shift)
            for number in range(starts[bucket], starts[bucket + 1]):
                if table_keys[number] == key:
                    if count < len(hits):
                        hits[count, 0], hits[count, 1], hits[count, 2] = i, length, number
                    count += 1
    return count
