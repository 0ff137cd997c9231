"""Compiles ARPA files, the text format of n-gram language models, into the binary files that `stages.text.ngram_lm`
reads. ARPA files come from SRILM, IRSTLM, KenLM's lmplz and Tokenmill's own trainer."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stages.text.ngram_lm import MOST_ORDER, UNK, BadModel, hashes, write_model

#: log10 probability of unknown words in models without <unk>
UNKNOWN = -100.0
#: numbers in ARPA must be smaller than this, so that float32 holds them
LARGEST = 1e38


def compile_arpa(source: str | os.PathLike[str], out: str | os.PathLike[str], *, normalize: str = "none",
                 pieces: bytes = b"") -> list[int]:
    """Compile an ARPA file (plain or .gz) into the model file `out`. Returns the number of n-grams of each order.

    The file `out` also stores `normalize` (how texts are normalised) and `pieces` (a SentencePiece model). The function
    needs about 150 bytes of memory per n-gram.

    The end of an n-gram is the n-gram of all its words but the first. SRILM may prune the end of an n-gram that stays
    in the model. This function adds such missing ends, with the score that every reader of ARPA would give them: the
    back-off weight of the context (all words but the last) plus the log10 probability of their own end.

    Raises BadModel if the file is not valid ARPA, has orders above MOST_ORDER, or lacks the context of one of its
    n-grams. The message names the file and, for a bad entry, its line.
    """
    words: list[str] = []
    orders: list[tuple[np.ndarray, np.ndarray]] = []       # ids (n-grams, n), values (n-grams, 2)
    for n, ids, values, vocabulary in _sections(source):
        if n > MOST_ORDER:
            raise BadModel(f"{source}: orders above {MOST_ORDER} are not supported")
        words = vocabulary
        orders.append((ids, values))
    for n in range(2, len(orders)):
        contexts = hashes(list(orders[n - 1][0].T))
        unreachable = np.flatnonzero(~np.isin(hashes(list(orders[n][0][:, :-1].T)), contexts))
        if len(unreachable):
            ngram = " ".join(words[i] for i in orders[n][0][unreachable[0]])
            raise BadModel(f"{source}: the context of the {n + 1}-gram '{ngram}' is no {n}-gram of the model, so it "
                           f"could not be reached; KenLM refuses such a model, too")
    unigrams = np.zeros((len(words), 2), np.float32)
    unigrams[0, 0] = UNKNOWN
    unigrams[orders[0][0][:, 0]] = orders[0][1]
    grams = _with_missing_ends(unigrams, orders[1:])
    try:
        write_model(out, words, unigrams, [len(k) for k, _ in grams], grams, normalize=normalize, pieces=pieces)
    except ValueError as e:
        raise BadModel(f"{source}: {e}") from None
    return [len(words), *(len(k) for k, _ in grams)]


def _with_missing_ends(unigrams: np.ndarray, orders: Sequence[tuple[np.ndarray, np.ndarray]]
                       ) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the n-grams of a model together with the ends that it lacks. The end of an n-gram is the n-gram of all its
    words but the first, so it belongs to the next lower order.

    `orders` holds (word ids, values) for every order from 2 on. The values of an n-gram are its log10 probability and
    its back-off weight. The result holds (hashes of the n-grams, values) for every order from 2 on.
    """
    ids = [i for i, _ in orders]
    values = [v for _, v in orders]
    missing: list[list[np.ndarray]] = [[] for _ in orders]
    for n in range(len(orders) - 1, 0, -1):  # from the longest order down, since an added n-gram has an end, too
        all_ids = np.concatenate([ids[n], *missing[n]]) if missing[n] else ids[n]
        ends = np.unique(all_ids[:, 1:], axis=0)
        present = hashes(list(ids[n - 1].T))
        lacking = ends[~np.isin(hashes(list(ends.T)), present)]
        if len(lacking):
            missing[n - 1].append(lacking)
    out: list[tuple[np.ndarray, np.ndarray]] = []
    for n in range(len(orders)):
        for rows in missing[n]:
            added = np.zeros((len(rows), 2), np.float32)
            added[:, 0] = _backed_off(rows, unigrams, out[n - 1] if n else None)
            ids[n], values[n] = np.concatenate([ids[n], rows]), np.concatenate([values[n], added])
        out.append((hashes(list(ids[n].T)), values[n]))
    return out


def _backed_off(rows: np.ndarray, unigrams: np.ndarray, lower: tuple[np.ndarray, np.ndarray] | None) -> np.ndarray:
    """Return the log10 probabilities of n-grams that the model lacks. Such a probability is the back-off weight of the
    n-gram's context (all its words but the last) plus the log10 probability of its end (all its words but the first).
    `rows` holds the word ids of the n-grams. `lower` holds (hashes, values) of the model's n-grams that are one word
    shorter; it is None if these are the unigrams."""
    if lower is None:
        return unigrams[rows[:, 0], 1] + unigrams[rows[:, 1], 0]
    order = np.argsort(lower[0], kind="stable")
    keys, values = lower[0][order], lower[1][order]

    def look_up(part: np.ndarray, column: int) -> np.ndarray:
        part_keys = hashes(list(part.T))
        at = np.minimum(np.searchsorted(keys, part_keys), len(keys) - 1)
        return np.where(keys[at] == part_keys, values[at, column], np.float32(0))

    return look_up(rows[:, :-1], 1) + look_up(rows[:, 1:], 0)


def _sections(source: str | os.PathLike[str]) -> Iterator[tuple[int, np.ndarray, np.ndarray, list[str]]]:
    """Read an ARPA file, and yield (order, ids, values, words) for every order of n-grams in it. `ids`, int64[n-grams,
    order], holds the word ids of the n-grams of this order. `values`, float32[n-grams, 2], holds their log10
    probabilities and back-off weights. `words` lists all words of the model in the order of their ids."""
    index: dict[str, int] = {UNK: 0}
    order, number, entries = 0, 0, 0
    flat: list[int] = []
    numbers: list[float] = []
    ended = False

    def section() -> tuple[int, np.ndarray, np.ndarray, list[str]]:
        return (order, np.array(flat, np.int64).reshape(-1, order), np.array(numbers, np.float32).reshape(-1, 2),
                list(index))

    open_file = gzip.open if Path(source).suffix == ".gz" else open
    with open_file(source, "rb") as f:
        for number, raw in enumerate(_read(source, f), 1):
            line = raw.strip(b" \t\r\n")
            if not line:
                continue
            if line.startswith(b"\\"):
                if order:
                    yield section()
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
                continue                                    # a count ("ngram 1=…"), which is not needed
            # KenLM and SRILM separate the numbers by tabs and the words by blanks; others use only blanks
            fields = line.split(b"\t") if line.count(b"\t") else line.split(b" ")
            if len(fields) >= 2 and line.count(b"\t"):
                fields = [fields[0], *fields[1].split(b" "), *fields[2:]]
            if len(fields) not in (order + 1, order + 2):
                raise BadModel(f"{source}:{number}: an entry of \\{order}-grams: has a probability, {order} words and "
                               f"perhaps a back-off weight")
            try:
                probability = float(fields[0])
                weight = float(fields[order + 1]) if len(fields) == order + 2 else 0.0
                if not (abs(probability) < LARGEST and abs(weight) < LARGEST):
                    raise ValueError(f"{probability:g}, {weight:g}: probabilities and weights are finite numbers")
                numbers += probability, weight
                if order == 1:
                    flat.append(index.setdefault(_unk(fields[1].decode()), len(index)))
                else:
                    flat += [index[_unk(w.decode())] for w in fields[1:order + 1]]
            except KeyError as e:
                raise BadModel(f"{source}:{number}: the word {e} is no unigram of the model") from None
            except ValueError as e:
                raise BadModel(f"{source}:{number}: {e}") from None
            entries += 1
    if not ended or not entries:
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
    """Return a word of an ARPA file unchanged, except that SRILM's <UNK> becomes <unk>, KenLM's spelling of the unknown
    word."""
    return UNK if word == "<UNK>" else word
