"""Back-off n-gram language models: a compact file that workers map into memory, and the scores it gives.

A model is read from ARPA (of SRILM, IRSTLM, lmplz or our own trainer, `stages.text.kneser_ney`) or trained, and kept as
one file. Scores are KenLM's (Heafield 2011; kenlm 0.3.0): the score of a word is the log10 probability of the longest
n-gram that ends in it plus the back-off weights of the longer contexts, added in float32 in KenLM's order, so that each
word scores as in KenLM to the bit. A text's score is the sum over its words in float64 (KenLM sums in float32, and so
loses digits over long texts). Unseen words are scored as `<unk>`, or -100 where the model has no `<unk>`, as in KenLM.

File (little-endian, sections start at multiples of 64):

    b"tokenmill ngram 1\\n" · u64 length of the header · JSON header · sections
    header    {"order", "counts": n-grams of each order, "normalize", "sections": {name: [offset, bytes]}, …}
    words     UTF-8, one a line, by id: <unk> is 0
    unigrams  float32 (words, 2): log10 probability, log10 back-off weight
    gramsN    uint64 (slots, 2): hash of the n-gram (0: empty), its float32 probability and back-off; linear probing
    pieces    a SentencePiece model (may be empty): the words are its pieces

An n-gram is identified by 64 bits of hash over its word ids (KenLM's function). Among n of them two collide with
probability n²/2⁶⁵, three in a million for 10⁷ n-grams; a collision within a model is an error when the file is made.
"""

from __future__ import annotations

import gzip
import json
import mmap
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stages.text.compiled import njit

MAGIC = b"tokenmill ngram 1\n"
UNK, BOS, EOS = "<unk>", "<s>", "</s>"
#: log10 probability of unknown words in models without <unk>
UNKNOWN = -100.0
#: highest order of a model that can be read, its longest header (bytes), and most words
MOST_ORDER, MOST_HEADER, MOST_WORDS = 10, 1 << 20, 1 << 24
#: numbers in ARPA must be smaller than this, so that float32 holds them
LARGEST = 1e38
#: slots per n-gram
ROOM = 1.5
_ALIGN = 64


class BadModel(ValueError):
    """The file is no model or a damaged one; the message names it and says what to do."""

    permanent = True


# -- hashing and tables ------------------------------------------------------------------------------------------------
@njit(cache=True, nogil=True)
def _combine(node: np.uint64, word: np.uint64) -> np.uint64:
    """KenLM's CombineWordHash: the hash of an n-gram from the hash of its last words and the word before them."""
    return (node * np.uint64(8978948897894561157)) ^ ((word + np.uint64(1)) * np.uint64(17894857484156487943))


@njit(cache=True, nogil=True)
def _slot(key: np.uint64, slots: np.uint64) -> np.uint64:
    mixed = (key ^ (key >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return ((mixed >> np.uint64(32)) * slots) >> np.uint64(32)


@njit(cache=True, nogil=True)
def _find(table: np.ndarray, key: np.uint64) -> np.int64:
    """Row of a key in a table, -1 if it is not there."""
    slots = np.uint64(table.shape[0])
    if slots == np.uint64(0):
        return np.int64(-1)
    at = _slot(key, slots)
    for _ in range(table.shape[0]):
        found = table[at, 0]
        if found == key:
            return np.int64(at)
        if found == np.uint64(0):
            return np.int64(-1)
        at += np.uint64(1)
        if at == slots:
            at = np.uint64(0)
    return np.int64(-1)


@njit(cache=True, nogil=True)
def _fill(table: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.int64:
    """Put the keys with their values into an empty table. Returns the index of a key that is 0 or occurs twice,
    otherwise -1.
    """
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
def _score(ids: np.ndarray, start: np.ndarray, unigrams: np.ndarray, tables: tuple[np.ndarray, ...],
           values: tuple[np.ndarray, ...], out: np.ndarray, matched: np.ndarray) -> float:
    """Score the words `ids` after the context `start` (at most one id) and return the sum. Writes the scores (float32)
    to `out` and the lengths of the n-grams found to `matched`. `values` are the tables as float32 (slots, 4)."""
    longest = len(tables)                         # words of the longest context
    context = np.zeros(longest + 1, np.uint64)    # the latest first
    held = 0
    backoffs, fresh = np.zeros(longest + 1, np.float32), np.zeros(longest + 1, np.float32)
    if start.shape[0] and longest:
        context[0], held, backoffs[0] = np.uint64(start[0]), 1, unigrams[start[0], 1]
    total = 0.0
    for i in range(ids.shape[0]):
        word = ids[i]
        score = unigrams[word, 0]
        fresh[0] = unigrams[word, 1]
        node, length = np.uint64(word), 1
        for k in range(held):
            node = _combine(node, context[k])
            row = _find(tables[k], node)
            if row < 0:
                break
            score = values[k][row, 2]
            fresh[k + 1] = values[k][row, 3]
            length = k + 2
        for k in range(length - 1, held):
            score += backoffs[k]
        out[i], matched[i] = score, length
        total += score
        held = min(length, longest)
        for k in range(held - 1, 0, -1):
            context[k] = context[k - 1]
        context[0] = np.uint64(word)
        backoffs, fresh = fresh, backoffs
    return total


def hashes(columns: Sequence[np.ndarray]) -> np.ndarray:
    """Hashes of n-grams given as columns of word ids in text order; uint64 (n-grams,)."""
    with np.errstate(over="ignore"):
        node = columns[-1].astype(np.uint64)
        for words in reversed(columns[:-1]):
            node = (node * np.uint64(8978948897894561157)
                    ^ (words.astype(np.uint64) + np.uint64(1)) * np.uint64(17894857484156487943))
    return node


# -- a model -----------------------------------------------------------------------------------------------------------
class NgramLM:
    """A model, mapped from its file, so that workers on one machine share its pages.

    Raises BadModel for a file that is no model, FileNotFoundError for a missing one.
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
            raw = [self._bytes(f"grams{n}") for n in range(2, self.order + 1)]
            self.tables = tuple(np.frombuffer(b, np.uint64).reshape(-1, 2) for b in raw)
            self._values = tuple(np.frombuffer(b, np.float32).reshape(-1, 4) for b in raw)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as e:
            raise BadModel(f"{path} is damaged ({e}); train or compile it again") from None
        self._index: dict[str, int] | None = None
        places = self.index
        self.bos, self.eos = places.get(BOS, 0), places.get(EOS, 0)

    def _bytes(self, name: str) -> memoryview:
        at, length = self._sections[name]
        return memoryview(self._map)[at:at + length]

    @property
    def normalize(self) -> str:
        """How texts were normalised before they were cut into words: a key of `stages.text.ccnet.NORMALIZE`."""
        return str(self.header.get("normalize", "none"))

    @property
    def pieces(self) -> bytes:
        """The SentencePiece model whose pieces are the words; empty if there is none."""
        return bytes(self._bytes("pieces")) if "pieces" in self._sections else b""

    @property
    def index(self) -> dict[str, int]:
        """Word → id."""
        if self._index is None:
            self._index = {word: i for i, word in enumerate(self.words)}
        return self._index

    def ids(self, words: Sequence[str]) -> np.ndarray:
        """Ids of words, int64; 0 for words it does not know."""
        get = self.index.get
        return np.fromiter((get(w, 0) for w in words), np.int64, len(words))

    def word_scores(self, ids: np.ndarray, *, bos: bool = True, eos: bool = True) -> tuple[np.ndarray, np.ndarray]:
        """Scores (float32, log10) of every word and of the end of the text, and the lengths of the n-grams found."""
        return self._scored(ids, bos, eos)[1:]

    def score(self, ids: np.ndarray, *, bos: bool = True, eos: bool = True) -> float:
        """log10 probability of a text of these word ids (int64, all in range), with its beginning and end."""
        return self._scored(ids, bos, eos)[0]

    def _scored(self, ids: np.ndarray, bos: bool, eos: bool) -> tuple[float, np.ndarray, np.ndarray]:
        if eos:
            ids = np.append(ids, self.eos)
        ids = np.ascontiguousarray(ids, np.int64)
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < len(self.words):
            raise IndexError(f"word ids must lie in 0 … {len(self.words) - 1}")
        start = np.array([self.bos] if bos else [], np.int64)
        out, matched = np.empty(len(ids), np.float32), np.empty(len(ids), np.int64)
        total = 0.0
        if self.tables:
            total = _score(ids, start, self.unigrams, self.tables, self._values, out, matched)
        else:                                       # numba knows no empty tuple of arrays
            out[:], matched[:] = self.unigrams[ids, 0], 1
            total = float(np.cumsum(out, dtype=np.float64)[-1]) if len(out) else 0.0
        return total, out, matched


def write_model(path: str | os.PathLike[str], words: Sequence[str], unigrams: np.ndarray,
                counts: Sequence[int], grams: Iterable[tuple[np.ndarray, np.ndarray]], *, normalize: str = "none",
                pieces: bytes = b"", facts: Mapping[str, Any] | None = None) -> None:
    """Write a model. `words` are in the order of their ids, <unk> first; `unigrams` float32 (words, 2). For the orders
    2, 3, …, `counts` are the numbers of n-grams, and `grams` yields their hashes (uint64) and float32 (n-grams, 2) of
    probability and back-off. `facts` go into the header, too. Equal arguments give equal bytes. Raises ValueError for
    two n-grams with one hash, words with line breaks, and a first word other than <unk>."""
    if any("\n" in w for w in words) or words[0] != UNK:
        raise ValueError("words are lines of their own, and the first is <unk>")
    small = {"words": "\n".join(words).encode(), "unigrams": np.ascontiguousarray(unigrams, np.float32).tobytes(),
             "pieces": pieces}
    slots = {f"grams{n}": int(count * ROOM) + 1 for n, count in enumerate(counts, 2)}
    sizes = {**{name: len(data) for name, data in small.items()}, **{name: 16 * n for name, n in slots.items()}}
    header = b""
    for _ in range(4):                                 # the length of the header moves the sections after it
        at, places = _up(len(MAGIC) + 8 + len(header)), {}
        for name, size in sizes.items():
            places[name] = [at, size]
            at = _up(at + size)
        doc = {"order": len(counts) + 1, "counts": [len(words), *counts], "normalize": normalize, **(facts or {}),
               "sections": places}
        text = json.dumps(doc, sort_keys=True).encode()
        if len(text) <= len(header):
            header = text.ljust(len(header))
            break
        header = text.ljust(_up(len(text)))
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


def _up(n: int) -> int:
    return -(-n // _ALIGN) * _ALIGN


# -- ARPA --------------------------------------------------------------------------------------------------------------
def compile_arpa(source: str | os.PathLike[str], out: str | os.PathLike[str], *, normalize: str = "none",
                 pieces: bytes = b"") -> list[int]:
    """Compile an ARPA file (plain or .gz) into a model. Returns the number of n-grams of each order.

    SRILM prunes n-grams that are the end (all words but the first) of longer ones. Such ends are added here with the
    probability that every reader of ARPA gives them: the back-off weight of the context plus the probability of the
    shorter n-gram. Memory: about 150 bytes per n-gram. Raises BadModel, with the line, for a file that is no ARPA.
    """
    words: list[str] = []
    orders: list[tuple[np.ndarray, np.ndarray]] = []       # ids (n-grams, n), values (n-grams, 2)
    for n, ids, values, known in _sections(source):
        if n > MOST_ORDER:
            raise BadModel(f"{source}: orders above {MOST_ORDER} are not supported")
        words = known
        orders.append((ids, values))
    for n in range(2, len(orders)):
        contexts = hashes(list(orders[n - 1][0].T))
        lost = np.flatnonzero(~np.isin(hashes(list(orders[n][0][:, :-1].T)), contexts))
        if len(lost):
            shown = " ".join(words[i] for i in orders[n][0][lost[0]])
            raise BadModel(f"{source}: the context of the {n + 1}-gram '{shown}' is no {n}-gram of the model, so it "
                           f"could not be reached; KenLM refuses such a model, too")
    unigrams = np.zeros((len(words), 2), np.float32)
    unigrams[0, 0] = UNKNOWN
    unigrams[orders[0][0][:, 0]] = orders[0][1]
    grams = _closed(unigrams, orders[1:])
    try:
        write_model(out, words, unigrams, [len(k) for k, _ in grams], grams, normalize=normalize, pieces=pieces)
    except ValueError as e:
        raise BadModel(f"{source}: {e}") from None
    return [len(words), *(len(k) for k, _ in grams)]


def _closed(unigrams: np.ndarray, orders: Sequence[tuple[np.ndarray, np.ndarray]]
            ) -> list[tuple[np.ndarray, np.ndarray]]:
    """Hashes and values of every order, after adding the missing ends of all n-grams to the order below."""
    ids = [i for i, _ in orders]
    values = [v for _, v in orders]
    missing: list[list[np.ndarray]] = [[] for _ in orders]
    for n in range(len(orders) - 1, 0, -1):  # from the longest order down, since an added n-gram has an end, too
        every = np.concatenate([ids[n], *missing[n]]) if missing[n] else ids[n]
        ends = np.unique(every[:, 1:], axis=0)
        known = hashes(list(ids[n - 1].T))
        lacking = ends[~np.isin(hashes(list(ends.T)), known)]
        if len(lacking):
            missing[n - 1].append(lacking)
    out: list[tuple[np.ndarray, np.ndarray]] = []
    for n in range(len(orders)):
        for rows in missing[n]:
            made = np.zeros((len(rows), 2), np.float32)
            made[:, 0] = _backed_off(rows, unigrams, out[n - 1] if n else None)
            ids[n], values[n] = np.concatenate([ids[n], rows]), np.concatenate([values[n], made])
        out.append((hashes(list(ids[n].T)), values[n]))
    return out


def _backed_off(rows: np.ndarray, unigrams: np.ndarray, lower: tuple[np.ndarray, np.ndarray] | None) -> np.ndarray:
    """log10 probability of n-grams that a model lacks: back-off of the context plus probability of the end."""
    if lower is None:
        return unigrams[rows[:, 0], 1] + unigrams[rows[:, 1], 0]
    order = np.argsort(lower[0], kind="stable")
    keys, values = lower[0][order], lower[1][order]

    def look(part: np.ndarray, column: int) -> np.ndarray:
        wanted = hashes(list(part.T))
        at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        return np.where(keys[at] == wanted, values[at, column], np.float32(0))

    return look(rows[:, :-1], 1) + look(rows[:, 1:], 0)


def _sections(source: str | os.PathLike[str]) -> Iterator[tuple[int, np.ndarray, np.ndarray, list[str]]]:
    """Yields (order, ids int64 (n-grams, order), values float32 (n-grams, 2), words) for every order of an ARPA
    file."""
    index: dict[str, int] = {UNK: 0}
    order, number, wanted = 0, 0, 0
    flat: list[int] = []
    numbers: list[float] = []
    ended = False

    def made() -> tuple[int, np.ndarray, np.ndarray, list[str]]:
        return (order, np.array(flat, np.int64).reshape(-1, order), np.array(numbers, np.float32).reshape(-1, 2),
                list(index))

    opened = gzip.open if Path(source).suffix == ".gz" else open
    with opened(source, "rb") as f:
        for number, raw in enumerate(_read(source, f), 1):
            line = raw.strip(b" \t\r\n")
            if not line:
                continue
            if line.startswith(b"\\"):
                if order:
                    yield made()
                    flat, numbers = [], []
                if line == b"\\end\\":
                    ended = True
                    break
                if line != b"\\data\\":
                    order = _order(source, number, line, order)
                continue
            if not order:
                if b"\0" in line or line.startswith(b"mmap lm"):
                    break
                continue                                    # ngram 1=…: counts, which the lines show themselves
            # KenLM and SRILM separate the numbers by tabs and the words by blanks; others use only blanks
            fields = line.split(b"\t") if line.count(b"\t") else line.split(b" ")
            if len(fields) >= 2 and line.count(b"\t"):
                fields = [fields[0], *fields[1].split(b" "), *fields[2:]]
            if len(fields) not in (order + 1, order + 2):
                raise BadModel(f"{source}:{number}: an entry of \\{order}-grams: has a probability, {order} words and "
                               f"perhaps a back-off weight")
            try:
                said = float(fields[0]), float(fields[order + 1]) if len(fields) == order + 2 else 0.0
                if not all(abs(x) < LARGEST for x in said):
                    raise ValueError(f"{said[0]:g}, {said[1]:g}: probabilities and weights are finite numbers")
                numbers += said
                if order == 1:
                    flat.append(index.setdefault(_unk(fields[1].decode()), len(index)))
                else:
                    flat += [index[_unk(w.decode())] for w in fields[1:order + 1]]
            except KeyError as e:
                raise BadModel(f"{source}:{number}: the word {e} is no unigram of the model") from None
            except ValueError as e:
                raise BadModel(f"{source}:{number}: {e}") from None
            wanted += 1
    if not ended or not wanted:
        raise BadModel(f"{source} is no ARPA file, or a cut one (no \\end\\). Binary files of KenLM cannot be read: "
                       f"give the ARPA file they were made of")


def _read(source: Any, lines: Iterable[bytes]) -> Iterator[bytes]:
    try:
        yield from lines
    except (EOFError, zlib.error, gzip.BadGzipFile) as e:
        raise BadModel(f"{source} is a damaged .gz file ({e}); get it again") from None


def _order(source: Any, number: int, line: bytes, before: int) -> int:
    if line != f"\\{before + 1}-grams:".encode():
        raise BadModel(f"{source}:{number}: expected \\{before + 1}-grams: or \\end\\, found {line[:40]!r}")
    return before + 1


def _unk(word: str) -> str:
    """A word of ARPA; <UNK>, as SRILM and others write it, becomes <unk> as in KenLM."""
    return UNK if word == "<UNK>" else word
