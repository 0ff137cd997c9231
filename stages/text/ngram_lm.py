"""Stores back-off n-gram language models in compact files, which workers map into memory, and scores texts with them.

A model is compiled from an ARPA file (`stages.text.arpa`) or trained (`stages.text.kneser_ney`), and stored in one
file. The score of a word in a text is the log10 probability of the longest n-gram of the model that ends with the word
there, plus the back-off weights of the longer contexts. The numbers are added in float32 and in KenLM's order, so each
word has exactly the score that KenLM gives it (Heafield 2011; kenlm 0.3.0). The score of a text is the sum of the
scores of its words, in float64. (KenLM's sum in float32 loses digits on long texts.) A word that the model lacks scores
as `<unk>`, or -100 if the model has no `<unk>`, as in KenLM.

File (little-endian, sections start at multiples of 64):

    b"tokenmill ngram 1\\n" · u64 length of the header · JSON header · sections
    header    {"order", "counts": n-grams of each order, "normalize", "sections": {name: [offset, bytes]}, …}
    words     UTF-8, one a line, by id: <unk> is 0
    unigrams  float32 (words, 2): log10 probability, log10 back-off weight
    gramsN    uint64 (slots, 2): hash of the n-gram (0: empty), its float32 probability and back-off; linear probing
    pieces    a SentencePiece model (may be empty): the words are its pieces

An n-gram is identified by a 64-bit hash of its word ids (KenLM's function). Among n n-grams, two have the same hash
with probability n²/2⁶⁵: three in a million for 10⁷ n-grams. `write_model` raises an error if this happens in a model.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from pipeline.base.compiled import njit

MAGIC = b"tokenmill ngram 1\n"
UNK, BOS, EOS = "<unk>", "<s>", "</s>"
#: highest order of a model that can be read, its longest header (bytes), and most words
MOST_ORDER, MOST_HEADER, MOST_WORDS = 10, 1 << 20, 1 << 24
#: slots per n-gram
ROOM = 1.5
_ALIGN = 64


class BadModel(ValueError):
    """Raised when a file is no n-gram model, or is damaged. The message names the file and the remedy."""

    permanent = True


# -- hashing and tables ------------------------------------------------------------------------------------------------
@njit(cache=True, nogil=True)
def _combine(node: np.uint64, word: np.uint64) -> np.uint64:
    """Return the hash of a row of words with one more word before it, as KenLM's function CombineWordHash computes it.
    `node` is the hash of the row, and `word` the id of the added word."""
    return (node * np.uint64(8978948897894561157)) ^ ((word + np.uint64(1)) * np.uint64(17894857484156487943))


@njit(cache=True, nogil=True)
def _slot(key: np.uint64, slots: np.uint64) -> np.uint64:
    mixed = (key ^ (key >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return ((mixed >> np.uint64(32)) * slots) >> np.uint64(32)


@njit(cache=True, nogil=True)
def _find(rows: np.ndarray, first: int, slots: int, key: np.uint64) -> np.int64:
    """Return the row in which a hash table holds an n-gram; -1 if the table lacks it. `key` is the hash of the n-gram.
    The table consists of the `slots` rows of `rows` from row `first` on."""
    if slots == 0:
        return np.int64(-1)
    at = np.int64(_slot(key, np.uint64(slots)))
    for _ in range(slots):
        stored = rows[first + at, 0]
        if stored == key:
            return np.int64(first + at)
        if stored == np.uint64(0):
            return np.int64(-1)
        at += 1
        if at == slots:
            at = np.int64(0)
    return np.int64(-1)


@njit(cache=True, nogil=True)
def _fill(table: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.int64:
    """Put the hashes of n-grams (`keys`), with their values, into an empty hash table. Returns -1 if all were stored. A
    hash that is 0 or occurs a second time cannot be stored; the result is then the index of the first such hash."""
    slots = np.uint64(table.shape[0])
    for i in range(keys.shape[0]):
        key = keys[i]
        if key == np.uint64(0):
            return np.int64(i)
        at = _slot(key, slots)
        while table[at, 0] != np.uint64(0):
            if table[at, 0] == key:
                return np.int64(i)
            at += np.uint64(1)
            if at == slots:
                at = np.uint64(0)
        table[at, 0] = key
        table[at, 1] = values[i]
    return np.int64(-1)


@njit(cache=True, nogil=True)
def _score(ids: np.ndarray, start: np.ndarray, unigrams: np.ndarray, rows: np.ndarray, values: np.ndarray,
           tables: np.ndarray, out: np.ndarray, matched: np.ndarray) -> float:
    """Score the words of a text, given by their `ids`. They follow the context `start`, which is at most one word id.
    Returns the sum of the words' scores, which are log10 probabilities. For each word, `out` receives the score
    (float32), and `matched` the length of the longest n-gram of the model that ends with the word.

    `rows` is the model file as uint64[n, 2], and `values` the same bytes as float32[n, 4]. `tables` holds, for each
    order from 2 on, the first row and the number of slots of its hash table.
    """
    longest = tables.shape[0]                     # words of the longest context
    context = np.zeros(longest + 1, np.uint64)    # the latest first
    context_length = 0
    backoffs, fresh = np.zeros(longest + 1, np.float32), np.zeros(longest + 1, np.float32)
    if start.shape[0] and longest:
        context[0], context_length, backoffs[0] = np.uint64(start[0]), 1, unigrams[start[0], 1]
    total = 0.0
    for i in range(ids.shape[0]):
        word = ids[i]
        score = unigrams[word, 0]
        fresh[0] = unigrams[word, 1]
        node, length = np.uint64(word), 1
        for k in range(context_length):
            node = _combine(node, context[k])
            row = _find(rows, tables[k, 0], tables[k, 1], node)
            if row < 0:
                break
            score = values[row, 2]
            fresh[k + 1] = values[row, 3]
            length = k + 2
        for k in range(length - 1, context_length):
            score += backoffs[k]
        out[i], matched[i] = score, length
        total += score
        context_length = min(length, longest)
        for k in range(context_length - 1, 0, -1):
            context[k] = context[k - 1]
        context[0] = np.uint64(word)
        backoffs, fresh = fresh, backoffs
    return total


def hashes(columns: Sequence[np.ndarray]) -> np.ndarray:
    """Return the hash of each n-gram, uint64[n-grams]. `columns` holds word ids: an array with the first word of each
    n-gram, one with the second words, and so on."""
    with np.errstate(over="ignore"):
        node = columns[-1].astype(np.uint64)
        for words in reversed(columns[:-1]):
            node = (node * np.uint64(8978948897894561157)
                    ^ (words.astype(np.uint64) + np.uint64(1)) * np.uint64(17894857484156487943))
    return node


# -- a model -----------------------------------------------------------------------------------------------------------
class NgramLM:
    """An n-gram language model in a memory-mapped file, so that all workers on a machine share its pages.

    The constructor raises BadModel if the file is no model, and FileNotFoundError if it is missing.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = str(path)
        with open(path, "rb") as f:
            if f.read(len(MAGIC)) != MAGIC:
                raise BadModel(f"{path} is no model of `tokenmill lm`; make one of an ARPA file by `tokenmill lm "
                               f"compile`")
            size = os.fstat(f.fileno()).st_size
            length = int.from_bytes(f.read(8), "little")
            if length > MOST_HEADER:
                raise BadModel(f"{path} is damaged: its header would have {length} bytes; train or compile it again")
            header = f.read(length)
            self._map = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            self.header: dict[str, Any] = json.loads(header)
            self.order = int(self.header["order"])
            self._sections = {str(k): (int(a), int(n)) for k, (a, n) in self.header["sections"].items()}
            if not 1 <= self.order <= MOST_ORDER or any(a < 0 or n < 0 or a % _ALIGN or a + n > size
                                                        for a, n in self._sections.values()):
                raise ValueError("sections lie outside the file")
            self.words = bytes(self._bytes("words")).decode().split("\n")
            self.unigrams = np.frombuffer(self._bytes("unigrams"), np.float32).reshape(-1, 2)
            if len(self.words) != len(self.unigrams) or self.words[0] != UNK or len(self.words) > MOST_WORDS:
                raise ValueError("words and their probabilities differ in number")
            places = [self._sections[f"grams{n}"] for n in range(2, self.order + 1)]
            if any(length % 16 for _, length in places):
                raise ValueError("a table of n-grams ends within a row")
            self._tables = np.array(places, np.int64).reshape(-1, 2) // 16
            self._rows = np.frombuffer(self._map, np.uint64, size // 16 * 2).reshape(-1, 2)
            self._values = self._rows.view(np.float32)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as e:
            raise BadModel(f"{path} is damaged ({e}); train or compile it again") from None
        self._index: dict[str, int] | None = None
        self.bos, self.eos = self.index.get(BOS, 0), self.index.get(EOS, 0)

    def _bytes(self, name: str) -> memoryview:
        at, length = self._sections[name]
        return memoryview(self._map)[at:at + length]

    @property
    def normalize(self) -> str:
        """Return the name of the normalisation that texts need before this model scores them: a key of
        `stages.text.ccnet.NORMALIZE`."""
        return str(self.header.get("normalize", "none"))

    @property
    def pieces(self) -> bytes:
        """Return the bytes of the SentencePiece model whose pieces are the words of this model. The result is empty if
        the words are no SentencePiece pieces."""
        return bytes(self._bytes("pieces")) if "pieces" in self._sections else b""

    @property
    def index(self) -> dict[str, int]:
        """Return the words of the model, as {word: its id}."""
        if self._index is None:
            self._index = {word: i for i, word in enumerate(self.words)}
        return self._index

    def ids(self, words: Sequence[str]) -> np.ndarray:
        """Return the ids of words, int64; 0 for words that the model does not know."""
        get = self.index.get
        return np.fromiter((get(w, 0) for w in words), np.int64, len(words))

    def word_scores(self, ids: np.ndarray, *, bos: bool = True, eos: bool = True) -> tuple[np.ndarray, np.ndarray]:
        """Return two arrays with an entry for each word of a text: the score (float32, log10 probability), and the
        number of words in the longest n-gram of the model that ends at this word. With `eos`, both have one more entry
        for the text's end. With `bos`, the words follow a mark for the beginning of a text."""
        return self._scored(ids, bos, eos)[1:]

    def score(self, ids: np.ndarray, *, bos: bool = True, eos: bool = True) -> float:
        """Return the log10 probability of a text, given as word ids (int64, all in range). With `bos`, the words follow
        a mark for the beginning of a text; with `eos`, the score includes the end of the text."""
        return self._scored(ids, bos, eos)[0]

    def _scored(self, ids: np.ndarray, bos: bool, eos: bool) -> tuple[float, np.ndarray, np.ndarray]:
        if eos:
            ids = np.append(ids, self.eos)
        ids = np.ascontiguousarray(ids, np.int64)
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < len(self.words):
            raise IndexError(f"word ids must lie in 0 … {len(self.words) - 1}")
        start = np.array([self.bos] if bos else [], np.int64)
        out, matched = np.empty(len(ids), np.float32), np.empty(len(ids), np.int64)
        total = _score(ids, start, self.unigrams, self._rows, self._values, self._tables, out, matched)
        return total, out, matched


def write_model(path: str | os.PathLike[str], words: Sequence[str], unigrams: np.ndarray,
                counts: Sequence[int], grams: Iterable[tuple[np.ndarray, np.ndarray]], *, normalize: str = "none",
                pieces: bytes = b"", facts: Mapping[str, Any] | None = None) -> None:
    """Write an n-gram model as a file that `NgramLM` reads. Equal arguments give a file of equal bytes.

    - `words`: the words in the order of their ids, <unk> first
    - `unigrams`: the log10 probability and back-off weight of each word, float32[words, 2]
    - `counts`: the numbers of n-grams of the orders 2, 3, …
    - `grams`: for the same orders, (hashes of the n-grams, uint64; their log10 probabilities and back-off weights,
      float32[n-grams, 2])
    - `normalize`, `facts`: how texts were normalised, and further entries of the file's header
    - `pieces`: a SentencePiece model

    Raises ValueError if two n-grams have the same hash, a word has a line break, or the first word is not <unk>.
    """
    if any("\n" in w for w in words) or words[0] != UNK:
        raise ValueError("words are lines of their own, and the first is <unk>")
    small = {"words": "\n".join(words).encode(), "unigrams": np.ascontiguousarray(unigrams, np.float32).tobytes(),
             "pieces": pieces}
    slots = {f"grams{n}": int(count * ROOM) + 1 for n, count in enumerate(counts, 2)}
    sizes = {**{name: len(data) for name, data in small.items()}, **{name: 16 * n for name, n in slots.items()}}
    header = b""
    for _ in range(4):                                 # the length of the header moves the sections after it
        at, places = _aligned(len(MAGIC) + 8 + len(header)), {}
        for name, size in sizes.items():
            places[name] = [at, size]
            at = _aligned(at + size)
        doc = {"order": len(counts) + 1, "counts": [len(words), *counts], "normalize": normalize, **(facts or {}),
               "sections": places}
        text = json.dumps(doc, sort_keys=True).encode()
        if len(text) <= len(header):
            header = text.ljust(len(header))
            break
        header = text.ljust(_aligned(len(text)))
    with open(path, "wb") as f:
        f.write(MAGIC + len(header).to_bytes(8, "little") + header)
        for name, data in small.items():
            f.write(b"\0" * (places[name][0] - f.tell()))
            f.write(data)
        for (name, room), (keys, values) in zip(slots.items(), grams, strict=True):
            f.write(b"\0" * (places[name][0] - f.tell()))
            f.write(_table(name.removeprefix("grams"), room, keys, values).data.cast("B"))


def _table(n: str, slots: int, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    table = np.zeros((slots, 2), np.uint64)
    order = np.argsort(keys, kind="stable")            # so the file does not depend on the order of n-grams
    packed = np.ascontiguousarray(values, np.float32).view(np.uint64).reshape(-1)
    if len(keys) and _fill(table, keys[order], packed[order]) >= 0:
        raise ValueError(f"two {n}-grams have one hash (or the same {n}-gram stands twice in the model)")
    return table


def _aligned(n: int) -> int:
    return -(-n // _ALIGN) * _ALIGN
