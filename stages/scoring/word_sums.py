"""A fastText classifier that keeps in a cache what each word contributes to a prediction.

fastText's prediction depends on the mean over the vectors of all words of a text and of the character n-grams inside
each word. The n-grams of a word are always the same, so the sum of their vectors is kept for every word that occurred.
A text then costs one look-up and one addition per word, where fastText's library hashes and looks up some thirty
n-grams per word. Most of a text consists of few different words (Zipf). The sum of a new word is computed from the
model's matrix.

The predictions differ from the library's only by the order of additions: the library adds n-gram by n-gram in float32,
while this module first adds the n-grams of each word, in float64. This changes a probability by 1e-6, or by 1e-5 if
thousands of n-grams are equal. The sum of a word is the same whether it comes from the cache or is computed anew, so
predictions do not depend on earlier texts.

The module reads supervised models of the library's file version 12 without word n-grams, with the loss `softmax` or
`hs`, quantised or not: lid.176.ftz and .bin, GlotLID, OpenLID. The matrix of a model that is not quantised stays in the
file, which is memory-mapped, so that workers share it. Source of the format: fastText 0.9.2 (`fasttext.cc`,
`dictionary.cc`, `productquantizer.cc`).

Words are identified by a hash of 64 bits: among a million words, two have the same hash with a probability of 3e-8. The
hash gets a new random seed for each model that is loaded, so that an attacker cannot write words that have the same
hash, or that all fall into one slot of a table. No result depends on the seed.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
from pathlib import Path
from typing import Any

import numpy as np

from stages.text.compiled import njit

_MAGIC, _VERSION, _SUPERVISED, _HS, _SOFTMAX = 793712314, 12, 3, 1, 3
_EOS, _LABEL = b"</s>", b"__label__"
#: most bytes of the sums that are kept, and most words; when a limit is reached, all sums are dropped
KEPT, WORDS = 128 << 20, 1 << 18


class UnknownFormat(ValueError):
    """A model that this module cannot read; the library may be able to."""

    permanent = True


class WordSums:
    """A fastText classifier with the interface of `stages.scoring.models.FastText`. Threads may share one.

    Raises:
        UnknownFormat: a model of another version, loss or kind.
        FileNotFoundError: there is no such file.
    """

    def __init__(self, path: str | Path, kept: int = KEPT) -> None:
        if not Path(path).is_file():
            raise FileNotFoundError(f"{path}: no such fastText model")
        try:
            with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                self._read(data, path)
        except UnknownFormat:
            raise
        except (struct.error, IndexError, ValueError) as e:
            raise UnknownFormat(f"{path}: no fastText model, or one cut short ({e})") from e
        dim = self._rows.shape[1]
        most = max(min(kept // (4 * dim), WORDS), 1)
        #: the kept words: the sum of each, the number of rows in each sum, their hashes and indices (a table for
        #: `_find`), and how many words are kept
        self._kept = (np.zeros((most, dim), np.float32), np.zeros(most, np.int64), *_table(most), np.zeros(1, np.int64))
        self._lock = threading.Lock()

    def labels(self) -> list[str]:
        return list(self._labels)

    def predict(self, text: str) -> list[tuple[str, float]]:
        """[the most probable (label, probability)] of a text taken as one line; [] when no word of it is known."""
        data = np.frombuffer(text.encode("utf-8", "surrogatepass") + b"\n", np.uint8)
        with self._lock:
            best, probability = _ask(data, self._seed, self._kept, self._vocabulary, self._grams, self._places,
                                     self._rows, self._out, self._tree)
        return [(self._labels[best], probability)] if best >= 0 else []

    # -- the file ------------------------------------------------------------------------------------------------
    def _read(self, data: mmap.mmap, path: str | Path) -> None:
        magic, version, dim, *args = struct.unpack_from("<14i", data)
        word_grams, loss, kind, bucket, shortest, longest = *args[4:7], *args[7:10]
        if (magic, version, kind) != (_MAGIC, _VERSION, _SUPERVISED) or word_grams > 1 or loss not in (_HS, _SOFTMAX):
            raise UnknownFormat(f"{path}: no supervised fastText model of version {_VERSION} without word n-grams, "
                                f"with the loss softmax or hs")
        size, words, labels, _, pruned = struct.unpack_from("<3i2q", data, 64)
        at = 92
        known, counts, self._labels = [], [], []
        for _ in range(size):
            end = data.find(b"\0", at)
            if end < 0:
                raise UnknownFormat(f"{path}: the vocabulary is cut short")
            count, label = struct.unpack_from("<qb", data, end + 1)
            if label:
                self._labels.append(data[at:end].removeprefix(_LABEL).decode("utf-8"))
                counts.append(count)
            else:
                known.append(data[at:end])
            at = end + 10
        if (len(known), len(counts)) != (words, labels):
            raise UnknownFormat(f"{path}: {len(known):,} words and {len(counts):,} labels, where it says {words:,} and "
                                f"{labels:,}")
        self._seed = int.from_bytes(os.urandom(7), "little")
        #: hash of a word of the vocabulary → its row
        self._vocabulary = _table(words)
        _enter(np.frombuffer(b" ".join(known), np.uint8), self._seed, *self._vocabulary)
        #: shortest and longest n-gram (characters), number of their buckets, and the row of the first bucket
        self._grams = (shortest, longest, bucket, words)
        #: bucket → row of its n-grams, -1 for pruned ones; empty if nothing was pruned
        self._places = np.empty(0, np.int32)
        if pruned >= 0:
            self._places = np.full(bucket, -1, np.int32)
            buckets, places = np.frombuffer(data[at:at + 8 * pruned], np.int32).reshape(-1, 2).T
            self._places[buckets] = places
            at += 8 * pruned
        self._rows, at = _matrix(data, at, path)
        out, at = _matrix(data, at, path)
        self._out = np.array(out, np.float64)
        grams = 0 if longest <= 0 else bucket if pruned < 0 else 1 + self._places.max(initial=-1)
        if words + grams > len(self._rows) or (longest > 0 and bucket < 1):
            raise UnknownFormat(f"{path}: {len(self._rows):,} rows for {words:,} words and {grams:,} n-grams")
        if self._rows.shape[1] != dim or self._out.shape != (labels, dim):    # hs leaves the last row unused
            raise UnknownFormat(f"{path}: matrices of {self._rows.shape} and {self._out.shape}")
        self._tree = _tree(counts) if loss == _HS else np.empty((0, 2), np.int32)


def _matrix(data: mmap.mmap, at: int, path: str | Path) -> tuple[np.ndarray, int]:
    """Returns (the matrix at an offset of the file, float32 (rows, dim); the offset after the matrix)."""
    if not data[at]:
        rows, dim = struct.unpack_from("<2q", data, at + 1)
        return np.memmap(path, np.float32, "r", at + 17, (rows, dim)), at + 17 + 4 * rows * dim
    normed, rows, dim, size = struct.unpack_from("<?2qi", data, at + 1)
    at += 22
    codes = np.frombuffer(data[at:at + size], np.uint8).reshape(rows, -1)
    found, at = _centroids(data, at + size, codes)
    if normed:
        lengths, at = _centroids(data, at + rows, np.frombuffer(data[at:at + rows], np.uint8).reshape(rows, 1))
        found = found * lengths
    if found.shape != (rows, dim):
        raise UnknownFormat(f"{path}: a quantised matrix of {found.shape}, where it says {(rows, dim)}")
    found.flags.writeable = False
    return found, at


def _centroids(data: mmap.mmap, at: int, codes: np.ndarray) -> tuple[np.ndarray, int]:
    """Decode the codes of a product quantizer that the file holds at an offset. `codes` is uint8 (rows, parts). Returns
    (the vectors for the codes, float32 (rows, dim); the offset after the quantizer)."""
    dim, parts, width, last = struct.unpack_from("<4i", data, at)
    end = at + 16 + 4 * dim * 256
    values = np.frombuffer(data[at + 16:end], np.float32)
    result = []
    for part in range(parts):
        wide = width if part < parts - 1 else last
        result.append(values[part * 256 * width:][:256 * wide].reshape(256, wide)[codes[:, part]])
    return np.concatenate(result, axis=1), end


def _tree(counts: list[int]) -> np.ndarray:
    """Huffman's tree over labels (hierarchical softmax), int32 (labels - 1, 2): the two children of each inner node.
    With L labels, a child below L is a label, and a child n >= L is the inner node in row n - L. The last row is the
    root."""
    size = len(counts)
    weight = [*counts, *[10**15] * (size - 1)]
    tree = np.empty((size - 1, 2), np.int32)
    leaf, node = size - 1, size
    for i in range(size - 1):
        for side in range(2):
            if leaf >= 0 and weight[leaf] < weight[node]:
                tree[i, side], leaf = leaf, leaf - 1
            else:
                tree[i, side], node = node, node + 1
        weight[size + i] = weight[tree[i, 0]] + weight[tree[i, 1]]
    return tree


def _table(entries: int) -> tuple[np.ndarray, np.ndarray]:
    """An empty table with room for `entries` words: their hashes, uint64, 0 where a slot is free, and their values,
    int32."""
    size = 1 << max(2 * entries, 2).bit_length()
    return np.zeros(size, np.uint64), np.zeros(size, np.int32)


@njit(cache=True, nogil=True)
def _hash(data: Any, begin: int, end: int, seed: int) -> Any:
    """A 64-bit hash of some bytes; never 0."""
    h = np.uint64(seed)
    for i in range(begin, end):
        h = (h ^ np.uint64(data[i])) * np.uint64(0x9E3779B97F4A7C15)
        h ^= h >> np.uint64(32)
    return h if h != np.uint64(0) else np.uint64(1)


@njit(cache=True, nogil=True)
def _find(hashes: Any, h: Any) -> np.int64:
    """Slot of a hash in a table, or the free slot where it belongs."""
    mask = len(hashes) - 1
    i = np.int64(h & np.uint64(mask))
    while hashes[i] != np.uint64(0) and hashes[i] != h:
        i = (i + 1) & mask
    return i


@njit(cache=True, nogil=True)
def _enter(words: Any, seed: int, hashes: Any, values: Any) -> None:
    """Enter words, which are separated by blanks, into a table with their numbers as values."""
    begin = number = 0
    for i in range(len(words) + 1):
        if i == len(words) or words[i] == 32:
            h = _hash(words, begin, i, seed)
            at = _find(hashes, h)
            hashes[at] = h
            values[at] = number
            number += 1
            begin = i + 1


@njit(cache=True, nogil=True)
def _sum(data: Any, begin: int, end: int, row: int, grams: Any, places: Any, rows: Any, total: Any) -> int:
    """Add to `total` the row of a word, if the word has one, and the rows of its character n-grams (those of the string
    "<word>", with < and > at its ends). Returns the number of rows added."""
    shortest, longest, bucket, first = grams
    count = 0
    if row >= 0:
        count = 1
        for d in range(len(total)):
            total[d] += rows[row, d]
    start = begin - 1
    while start <= end and longest > 0:                     # begin - 1 is <, end is >
        j = start
        n = 1
        h = np.uint32(2166136261)
        while j <= end and n <= longest:
            while True:                                     # one character
                c = np.uint32(60 if j < begin else 62 if j == end else data[j])
                if c >= 128:                                # the library's char is signed
                    c |= np.uint32(0xFFFFFF00)
                h = np.uint32((h ^ c) * np.uint32(16777619))
                j += 1
                if j >= end or data[j] & 0xC0 != 0x80:
                    break
            if n >= shortest and not (n == 1 and (start < begin or j > end)):
                place = np.int64(h % np.uint32(bucket))
                if len(places) > 0:
                    place = np.int64(places[place])
                if place >= 0:
                    count += 1
                    for d in range(len(total)):
                        total[d] += rows[first + place, d]
            n += 1
        start += 1
        while start < end and data[start] & 0xC0 == 0x80:
            start += 1
    return count


@njit(cache=True, nogil=True)
def _starts(data: Any, begin: int, end: int, word: Any) -> bool:
    """Whether the bytes from `begin` to `end` start with `word`."""
    same = 0
    while same < len(word) and begin + same < end and data[begin + same] == word[same]:
        same += 1
    return same == len(word)


@njit(cache=True, nogil=True)
def _mean(data: Any, seed: int, kept: Any, vocabulary: Any, grams: Any, places: Any, rows: Any, hidden: Any) -> int:
    """Add to `hidden` the sums of all words of a text, which must end with a line break. Returns the number of rows
    added."""
    sums, counts, hashes, at, used = kept
    total = np.zeros(rows.shape[1])
    single = np.zeros(rows.shape[1], np.float32)
    number = begin = 0
    for i in range(len(data)):
        c = data[i]
        if c > 32 or 0 < c < 9 or 13 < c < 32:
            continue
        if i > begin:
            h = _hash(data, begin, i, seed)
            place = _find(hashes, h)
            if hashes[place] == h:
                word = at[place]
                number += counts[word]
                for d in range(len(hidden)):
                    hidden[d] += sums[word, d]
            else:
                known = _find(vocabulary[0], h)
                row = np.int64(vocabulary[1][known]) if vocabulary[0][known] == h else -1
                if i - begin == 4 and _starts(data, begin, i, _EOS):
                    return number + _end(seed, vocabulary, rows, hidden)   # the library reads no further
                count = 0
                for d in range(len(total)):            # loops: numba takes seconds to compile an assignment of a row
                    total[d] = 0.0
                if row >= 0 or not _starts(data, begin, i, _LABEL):     # the library takes it for a label
                    count = _sum(data, begin, i, row, grams, places, rows, total)
                for d in range(len(hidden)):
                    single[d] = total[d]
                    hidden[d] += single[d]
                number += count
                if used[0] < len(sums):
                    word = used[0]
                    used[0] += 1
                    hashes[place] = h
                    at[place] = word
                    counts[word] = count
                    for d in range(len(single)):
                        sums[word, d] = single[d]
        begin = i + 1
    return number + _end(seed, vocabulary, rows, hidden)


@njit(cache=True, nogil=True)
def _end(seed: int, vocabulary: Any, rows: Any, hidden: Any) -> int:
    """Add to `hidden` the row of the end of a line, which is a word without n-grams. Returns the number of rows added,
    1 or 0."""
    h = _hash(_EOS, 0, len(_EOS), seed)
    known = _find(vocabulary[0], h)
    if vocabulary[0][known] != h:
        return 0
    for d in range(len(hidden)):
        hidden[d] += rows[vocabulary[1][known], d]
    return 1


@njit(cache=True, nogil=True)
def _ask(data: Any, seed: int, kept: Any, vocabulary: Any, grams: Any, places: Any, rows: Any, out: Any,
         tree: Any) -> tuple[int, float]:
    """(number of the most probable label, its probability) of a text; -1 when no word of it is known."""
    if kept[4][0] == len(kept[0]):                          # full: start again
        kept[2].fill(np.uint64(0))
        kept[4][0] = 0
    hidden = np.zeros(rows.shape[1])
    number = _mean(data, seed, kept, vocabulary, grams, places, rows, hidden)
    if number == 0:
        return -1, 0.0
    for d in range(len(hidden)):
        hidden[d] /= number
    inner = len(tree)
    labels = len(out)
    score = np.zeros(labels + inner)
    if inner:
        for i in range(inner - 1, -1, -1):                  # the library adds 1e-5 before it takes a logarithm
            f = 0.0
            for d in range(len(hidden)):
                f += hidden[d] * out[i, d]
            f = 1.0 / (1.0 + np.exp(-f))
            score[tree[i, 0]] = score[labels + i] + np.log(1.0 - f + 1e-5)
            score[tree[i, 1]] = score[labels + i] + np.log(f + 1e-5)
    else:
        for label in range(labels):
            for d in range(len(hidden)):
                score[label] += hidden[d] * out[label, d]
    best = 0
    for label in range(1, labels):
        if score[label] > score[best]:
            best = label
    if inner:
        return best, np.exp(score[best])
    total = 0.0
    for label in range(labels):
        total += np.exp(score[label] - score[best])
    return best, 1.0 / total + 1e-5
