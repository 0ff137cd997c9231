"""A fastText classifier that keeps in a cache what each word contributes to a prediction.

fastText's prediction depends on the mean of the vectors of all words of a text and of the character n-grams inside each
word. The n-grams of a word are always the same. So the sum of the vectors of a word and its n-grams is computed once,
from the model's matrix, and kept in a cache. A word in the cache costs one look-up and one addition, where fastText's
library hashes and looks up some thirty n-grams. The cache helps because most of a text consists of few different words
(Zipf).

The predictions differ from the library's only by the order of additions. The library adds n-gram by n-gram in float32,
while this module first adds the n-grams of each word, in float64. A probability thereby changes by about 1e-6, or by
1e-5 if thousands of n-grams of a text are equal. The sum of a word is the same whether it comes from the cache or is
computed anew, so predictions do not depend on earlier texts.

The module reads supervised models of the library's file version 12, with the loss `softmax` or `hs`, without word
n-grams, quantised or not. Examples are lid.176.ftz and .bin, GlotLID and OpenLID. The file of a model that is not
quantised is memory-mapped, so that workers share its matrix. The format is that of fastText 0.9.2 (`fasttext.cc`,
`dictionary.cc`, `productquantizer.cc`).

Words are identified by a hash of 64 bits: among a million words, two have the same hash with a probability of 3e-8. The
hash gets a new random seed for each model that is loaded. So an attacker cannot write words that have the same hash, or
that all fall into one slot of a table. No result depends on the seed.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.base.compiled import njit

_MAGIC, _VERSION, _SUPERVISED, _HS, _SOFTMAX = 793712314, 12, 3, 1, 3
_EOS, _LABEL = b"</s>", b"__label__"
#: most bytes of the sums that are kept, and most words; when a limit is reached, all sums are dropped
MOST_BYTES, MOST_WORDS = 128 << 20, 1 << 18


class UnknownFormat(ValueError):
    """Raised for a file that holds no fastText model that `WordSums` can read. fastText's own library may be able to
    read it."""

    permanent = True


class WordSums:
    """A fastText classifier that returns the most probable label of a text. It keeps in a cache what each word
    contributes to a prediction. It has the interface of `stages.scoring.models.FastText`. Threads may share one object.

    Raises:
        UnknownFormat: the file holds no fastText model, or one of another version, loss or kind.
        FileNotFoundError: there is no such file.
    """

    def __init__(self, path: str | Path, cache_bytes: int = MOST_BYTES) -> None:
        if not Path(path).is_file():
            raise FileNotFoundError(f"{path}: no such fastText model")
        try:
            with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                self._read_file(data, path)
        except UnknownFormat:
            raise
        except (struct.error, IndexError, ValueError) as e:
            raise UnknownFormat(f"{path}: no fastText model, or one cut short ({e})") from e
        dim = self._rows.shape[1]
        capacity = max(min(cache_bytes // (4 * dim), MOST_WORDS), 1)
        #: the kept words: the sum of each, the number of rows in each sum, their hashes and indices (a table for
        #: `_find`), and how many words are kept
        self._cache = (np.zeros((capacity, dim), np.float32), np.zeros(capacity, np.int64), *_table(capacity),
                       np.zeros(1, np.int64))
        self._lock = threading.Lock()

    def labels(self) -> list[str]:
        return list(self._labels)

    def predict(self, text: str) -> list[tuple[str, float]]:
        """Return the most probable label of a text, as a list with one (label, probability). Line breaks in the text
        count as spaces. The list is empty if the model knows nothing of the text, not even the end of a line."""
        data = np.frombuffer(text.encode("utf-8", "surrogatepass") + b"\n", np.uint8)
        with self._lock:
            while self._waiting:
                _enter(self._waiting.pop(), self._seed, *self._vocabulary)
            best, probability = _most_probable(data, self._seed, self._cache, self._vocabulary, self._grams,
                                               self._places, self._rows, self._out, self._tree)
        return [(self._labels[best], probability)] if best >= 0 else []

    # -- the file ------------------------------------------------------------------------------------------------
    def _read_file(self, data: mmap.mmap, path: str | Path) -> None:
        magic, version, dim, *args = struct.unpack_from("<14i", data)
        word_grams, loss, kind, bucket, shortest, longest = *args[4:7], *args[7:10]
        if (magic, version, kind) != (_MAGIC, _VERSION, _SUPERVISED) or word_grams > 1 or loss not in (_HS, _SOFTMAX):
            raise UnknownFormat(f"{path}: no supervised fastText model of version {_VERSION} without word n-grams, "
                                f"with the loss softmax or hs")
        size, words, labels, _, pruned = struct.unpack_from("<3i2q", data, 64)
        offset = 92
        words_of_file, counts, self._labels = [], [], []
        for _ in range(size):
            end = data.find(b"\0", offset)
            if end < 0:
                raise UnknownFormat(f"{path}: the vocabulary is cut short")
            count, label = struct.unpack_from("<qb", data, end + 1)
            if label:
                self._labels.append(data[offset:end].removeprefix(_LABEL).decode("utf-8"))
                counts.append(count)
            else:
                words_of_file.append(data[offset:end])
            offset = end + 10
        if (len(words_of_file), len(counts)) != (words, labels):
            raise UnknownFormat(f"{path}: {len(words_of_file):,} words and {len(counts):,} labels, where it says "
                                f"{words:,} and {labels:,}")
        self._seed = int.from_bytes(os.urandom(7), "little")
        #: hash of a word of the vocabulary → its row
        self._vocabulary = _table(words)
        #: words that are not in that table yet: a compiled function enters them before the first prediction
        self._waiting = [np.frombuffer(b" ".join(words_of_file), np.uint8)]
        #: shortest and longest n-gram (characters), number of their buckets, and the row of the first bucket
        self._grams = (shortest, longest, bucket, words)
        #: bucket → row of its n-grams, -1 for pruned ones; empty if nothing was pruned
        self._places = np.empty(0, np.int32)
        if pruned >= 0:
            self._places = np.full(bucket, -1, np.int32)
            buckets, places = np.frombuffer(data[offset:offset + 8 * pruned], np.int32).reshape(-1, 2).T
            self._places[buckets] = places
            offset += 8 * pruned
        self._rows, offset = _matrix(data, offset, path)
        out, offset = _matrix(data, offset, path)
        self._out = np.array(out, np.float64)
        grams = 0 if longest <= 0 else bucket if pruned < 0 else 1 + self._places.max(initial=-1)
        if words + grams > len(self._rows) or (longest > 0 and bucket < 1):
            raise UnknownFormat(f"{path}: {len(self._rows):,} rows for {words:,} words and {grams:,} n-grams")
        if self._rows.shape[1] != dim or self._out.shape != (labels, dim):    # hs leaves the last row unused
            raise UnknownFormat(f"{path}: matrices of {self._rows.shape} and {self._out.shape}")
        self._tree = _tree(counts) if loss == _HS else np.empty((0, 2), np.int32)


def _matrix(data: mmap.mmap, offset: int, path: str | Path) -> tuple[np.ndarray, int]:
    """Read the matrix that begins at byte `offset` of a fastText model file. Returns (the matrix, float32[rows, dim];
    the offset after the matrix)."""
    if not data[offset]:
        rows, dim = struct.unpack_from("<2q", data, offset + 1)
        return np.memmap(path, np.float32, "r", offset + 17, (rows, dim)), offset + 17 + 4 * rows * dim
    normed, rows, dim, size = struct.unpack_from("<?2qi", data, offset + 1)
    offset += 22
    codes = np.frombuffer(data[offset:offset + size], np.uint8).reshape(rows, -1)
    matrix, offset = _centroids(data, offset + size, codes)
    if normed:
        length_codes = np.frombuffer(data[offset:offset + rows], np.uint8).reshape(rows, 1)
        lengths, offset = _centroids(data, offset + rows, length_codes)
        matrix = matrix * lengths
    if matrix.shape != (rows, dim):
        raise UnknownFormat(f"{path}: a quantised matrix of {matrix.shape}, where it says {(rows, dim)}")
    matrix.flags.writeable = False
    return matrix, offset


def _centroids(data: mmap.mmap, offset: int, codes: np.ndarray) -> tuple[np.ndarray, int]:
    """Decode vectors that are stored as codes of a product quantizer. The quantizer begins at byte `offset` of a
    fastText model file. `codes` is uint8[rows, parts]. Returns (the vectors, float32[rows, dim]; the offset after the
    quantizer)."""
    dim, parts, width, last_width = struct.unpack_from("<4i", data, offset)
    end = offset + 16 + 4 * dim * 256
    values = np.frombuffer(data[offset + 16:end], np.float32)
    result = []
    for part in range(parts):
        wide = width if part < parts - 1 else last_width
        result.append(values[part * 256 * width:][:256 * wide].reshape(256, wide)[codes[:, part]])
    return np.concatenate(result, axis=1), end


def _tree(counts: list[int]) -> np.ndarray:
    """Build the Huffman tree over the labels, for hierarchical softmax, from the labels' counts. Returns the two
    children of each inner node, int32[labels - 1, 2]. With L labels, a child below L is a label, and a child n >= L is
    the inner node in row n - L. The last row is the root."""
    size = len(counts)
    weight = [*counts, *[10**15] * (size - 1)]
    tree = np.empty((size - 1, 2), np.int32)
    leaf, node = size - 1, size
    for number in range(size - 1):
        for side in range(2):
            if leaf >= 0 and weight[leaf] < weight[node]:
                tree[number, side], leaf = leaf, leaf - 1
            else:
                tree[number, side], node = node, node + 1
        weight[size + number] = weight[tree[number, 0]] + weight[tree[number, 1]]
    return tree


def _table(entries: int) -> tuple[np.ndarray, np.ndarray]:
    """Make an empty hash table with room for `entries` words. Returns (the hash of the word in each slot, uint64, 0
    where the slot is free; the value of the word in each slot, int32)."""
    size = 1 << max(2 * entries, 2).bit_length()
    return np.zeros(size, np.uint64), np.zeros(size, np.int32)


@njit(cache=True, nogil=True)
def _hash(data: Any, begin: int, end: int, seed: int) -> Any:
    """Return a 64-bit hash of the bytes of `data` from `begin` up to `end`. The hash depends on `seed`, and is never
    0."""
    hashed = np.uint64(seed)
    for place in range(begin, end):
        hashed = (hashed ^ np.uint64(data[place])) * np.uint64(0x9E3779B97F4A7C15)
        hashed ^= hashed >> np.uint64(32)
    return hashed if hashed != np.uint64(0) else np.uint64(1)


@njit(cache=True, nogil=True)
def _find(hashes: Any, hashed: Any) -> np.int64:
    """Return the slot of a word in a hash table, given the hash of the word. If the table lacks the word, the result is
    the free slot where the word belongs."""
    mask = len(hashes) - 1
    slot = np.int64(hashed & np.uint64(mask))
    while hashes[slot] != np.uint64(0) and hashes[slot] != hashed:
        slot = (slot + 1) & mask
    return slot


@njit(cache=True, nogil=True)
def _enter(words: Any, seed: int, hashes: Any, values: Any) -> None:
    """Enter words into an empty hash table (`hashes` and `values`). `words` holds the bytes of all words, separated by
    blanks. The value of a word is its number in `words`, from 0."""
    begin: int | np.int64 = np.int64(0)
    number = 0
    for place in range(len(words) + 1):
        if place == len(words) or words[place] == 32:
            hashed = _hash(words, begin, place, seed)
            slot = _find(hashes, hashed)
            hashes[slot] = hashed
            values[slot] = number
            number += 1
            begin = place + 1


@njit(cache=True, nogil=True)
def _sum(data: Any, begin: int, end: int, row: int, grams: Any, places: Any, rows: Any, total: Any) -> int:
    """Add to `total` the vectors that one word contributes. The word is `data` from `begin` up to `end`. It contributes
    its own vector, if it is in the vocabulary (`row` is the row of `rows` with this vector, otherwise negative), and
    the vectors of its character n-grams. N-grams are taken from the string "<word>", with < and > at its ends. Returns
    the number of vectors added."""
    shortest, longest, bucket, first_bucket = grams
    count = 0
    if row >= 0:
        count = 1
        for column in range(len(total)):
            total[column] += rows[row, column]
    start = begin - 1
    while start <= end and longest > 0:                     # begin - 1 is <, end is >
        place = start
        characters = 1
        hashed = np.uint32(2166136261)
        while place <= end and characters <= longest:
            while True:                                     # one character
                byte = np.uint32(60 if place < begin else 62 if place == end else data[place])
                if byte >= 128:                                # the library's char is signed
                    byte |= np.uint32(0xFFFFFF00)
                hashed = np.uint32((hashed ^ byte) * np.uint32(16777619))
                place += 1
                if place >= end or data[place] & 0xC0 != 0x80:
                    break
            if characters >= shortest and not (characters == 1 and (start < begin or place > end)):
                bucket_row = np.int64(hashed % np.uint32(bucket))
                if len(places) > 0:
                    bucket_row = np.int64(places[bucket_row])
                if bucket_row >= 0:
                    count += 1
                    for column in range(len(total)):
                        total[column] += rows[first_bucket + bucket_row, column]
            characters += 1
        start += 1
        while start < end and data[start] & 0xC0 == 0x80:
            start += 1
    return count


@njit(cache=True, nogil=True)
def _starts(data: Any, begin: int, end: int, word: Any) -> bool:
    """Return whether the bytes of `data` from `begin` up to `end` start with the bytes of `word`."""
    equal = 0
    while equal < len(word) and begin + equal < end and data[begin + equal] == word[equal]:
        equal += 1
    return equal == len(word)


@njit(cache=True, nogil=True)
def _mean(data: Any, seed: int, cache: Any, vocabulary: Any, grams: Any, places: Any, rows: Any, hidden: Any) -> int:
    """Add to `hidden` the contributions of all words of a text, whose bytes `data` must end with a line break. Returns
    the number of vectors added, by which the caller divides to get the mean."""
    sums, counts, hashes, word_of_slot, used_words = cache
    total = np.zeros(rows.shape[1])
    single = np.zeros(rows.shape[1], np.float32)
    begin: int | np.int64 = np.int64(0)
    number = 0
    for place in range(len(data)):
        byte = data[place]
        if byte > 32 or 0 < byte < 9 or 13 < byte < 32:
            continue
        if place > begin:
            hashed = _hash(data, begin, place, seed)
            slot = _find(hashes, hashed)
            if hashes[slot] == hashed:
                word = word_of_slot[slot]
                number += counts[word]
                for column in range(len(hidden)):
                    hidden[column] += sums[word, column]
            else:
                entry = _find(vocabulary[0], hashed)
                row = np.int64(vocabulary[1][entry]) if vocabulary[0][entry] == hashed else -1
                if place - begin == 4 and _starts(data, begin, place, _EOS):
                    return number + _end(seed, vocabulary, rows, hidden)   # the library reads no further
                count = 0
                for column in range(len(total)):       # loops: numba takes seconds to compile an assignment of a row
                    total[column] = 0.0
                if row >= 0 or not _starts(data, begin, place, _LABEL):     # the library treats it as a label
                    count = _sum(data, begin, place, row, grams, places, rows, total)
                for column in range(len(hidden)):
                    single[column] = total[column]
                    hidden[column] += single[column]
                number += count
                if used_words[0] < len(sums):
                    word = used_words[0]
                    used_words[0] += 1
                    hashes[slot] = hashed
                    word_of_slot[slot] = word
                    counts[word] = count
                    for column in range(len(single)):
                        sums[word, column] = single[column]
        begin = place + 1
    return number + _end(seed, vocabulary, rows, hidden)


@njit(cache=True, nogil=True)
def _end(seed: int, vocabulary: Any, rows: Any, hidden: Any) -> int:
    """Add to `hidden` the vector of the end of a line, which fastText treats as a word without n-grams. Returns the
    number of vectors added: 1, or 0 if the vocabulary lacks the end of a line."""
    hashed = _hash(_EOS, np.int64(0), len(_EOS), seed)
    slot = _find(vocabulary[0], hashed)
    if vocabulary[0][slot] != hashed:
        return 0
    for column in range(len(hidden)):
        hidden[column] += rows[vocabulary[1][slot], column]
    return 1


@njit(cache=True, nogil=True)
def _most_probable(data: Any, seed: int, cache: Any, vocabulary: Any, grams: Any, places: Any, rows: Any, out: Any,
                   tree: Any) -> tuple[int, float]:
    """Return (number of the most probable label, its probability) for a text, given as the bytes `data`. The number is
    -1 if no vector of the model applies to the text: it knows none of the words, and not the end of a line."""
    if cache[4][0] == len(cache[0]):                        # the cache is full, so all its words are dropped
        cache[2].fill(np.uint64(0))
        cache[4][0] = 0
    hidden = np.zeros(rows.shape[1])
    number = _mean(data, seed, cache, vocabulary, grams, places, rows, hidden)
    if number == 0:
        return -1, 0.0
    for column in range(len(hidden)):
        hidden[column] /= number
    inner = len(tree)
    labels = len(out)
    score = np.zeros(labels + inner)
    if inner:
        for node in range(inner - 1, -1, -1):                  # the library adds 1e-5 before it takes a logarithm
            value = 0.0
            for column in range(len(hidden)):
                value += hidden[column] * out[node, column]
            value = 1.0 / (1.0 + np.exp(-value))
            score[tree[node, 0]] = score[labels + node] + np.log(1.0 - value + 1e-5)
            score[tree[node, 1]] = score[labels + node] + np.log(value + 1e-5)
    else:
        for label in range(labels):
            for column in range(len(hidden)):
                score[label] += hidden[column] * out[label, column]
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
