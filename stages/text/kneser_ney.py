"""Trains n-gram models by interpolated modified Kneser-Ney smoothing (Chen & Goodman 1998, TR-10-98; Heafield et al.
2013, "Scalable Modified Kneser-Ney Language Model Estimation"), as KenLM's lmplz does without pruning.

  * Counts, written a: the count of an n-gram of the highest order, or of one that begins with <s>, is the number of its
    occurrences. The count of any other n-gram is the number of different words that precede it.
  * Discounts, written D: let t_k be the number of n-grams of an order with the count k, and Y = t₁ / (t₁ + 2 t₂). For k
    of 1, 2, and 3 or more, D_k = k - (k + 1) Y t_{k+1} / t_k. If the discounts cannot be computed (t₁, t₂ or t₃ is 0)
    or lie outside 0 … k, the order uses `FALLBACK`, as lmplz does with --discount_fallback. `Estimate.fallback` lists
    such orders.
  * Probabilities: p(w | c) = (a(c w) - D) / Σ a(c ·) + γ(c) p(w | c without its first word). γ redistributes what the
    discounts subtract. Unigrams are interpolated with 1 / (number of words, with <unk> and </s>, without <s>).

Training needs 160 bytes of memory per token in the worst case, in which nearly all n-grams differ, and 240 bytes per
token while the model is saved. `train` therefore stops at `most` tokens. Training takes 1 to 2 µs per token. To train
on more text, use lmplz, and compile its ARPA file with `tokenmill lm compile`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stages.text.ngram_lm import BOS, EOS, MOST_ORDER, UNK, hashes, write_model

#: discounts of an order whose counts allow no estimate (lmplz --discount_fallback)
FALLBACK = (0.5, 1.0, 1.5)
#: bits of a word's id in a sorted key
_WORD_BITS = 24


@dataclass
class NgramOrder:
    """The n-grams of one order, that is, of one number of words. They are sorted by their context (all words but the
    last), and then by their last word."""

    context: np.ndarray       # row of its first n-1 words in the order below, int32; 0 for unigrams
    word: np.ndarray          # its last word, int32
    end: np.ndarray           # row of its last n-1 words in the order below, int32
    count: np.ndarray         # how often it occurs, int32
    begins: np.ndarray        # whether its first word is <s>


@dataclass
class Estimate:
    """A trained n-gram model. `values` holds for each order the log10 probability and back-off weight of its
    n-grams."""

    words: list[str]
    orders: list[NgramOrder]
    values: list[np.ndarray]          # float32 (n-grams, 2)
    discounts: list[tuple[float, float, float]]
    fallback: list[int]               # orders that use `FALLBACK`
    tokens: int                       # words and ends of texts it was trained on


class WordIds:
    """Gives words numbers (ids) from 3 on, in the order in which the words first occur. The ids 0, 1 and 2 stand for
    <unk> (an unknown word), <s> (beginning of a text) and </s> (its end)."""

    def __init__(self) -> None:
        self.index: dict[str, int] = {UNK: 0, BOS: 1, EOS: 2}

    def ids(self, words: Sequence[str]) -> list[int]:
        """Return the ids of the words of a text. New words get the next ids. A word that is spelt like <unk>, <s> or
        </s> counts as unknown."""
        index = self.index
        return [i if (i := index.setdefault(w, len(index))) > 2 else 0 for w in words]


def train(texts: Iterable[Sequence[str]], *, order: int = 5, most: int = 20_000_000) -> Estimate:
    """Estimate an n-gram model of order `order` from texts (or sentences), each a sequence of words. Training ends
    before the first text that would exceed `most` tokens.

    Raises ValueError when there is nothing to learn from, when `order` is out of range, or when the texts have too many
    different words.
    """
    if not 1 <= order <= MOST_ORDER:
        raise ValueError(f"order {order} is outside 1 … {MOST_ORDER}")
    words, chunks, tokens = WordIds(), [], 0
    for text in texts:
        if tokens + len(text) + 1 > most:
            break
        if text:
            chunks.append(np.array([1, *words.ids(text), 2], np.int32))
            tokens += len(text) + 1
    if not tokens:
        raise ValueError(f"no text to train on: there is none, or the first has more than {most:,} tokens")
    if len(words.index) >= 1 << _WORD_BITS:
        raise ValueError(f"{len(words.index):,} different words; at most {1 << _WORD_BITS:,}: cut texts into pieces")
    stream = np.concatenate(chunks)
    del chunks
    orders = list(_count(stream, len(words.index), order))
    return _estimate(list(words.index), orders, tokens)


def _count(stream: np.ndarray, vocabulary: int, order: int) -> Iterator[NgramOrder]:
    """Yield the different n-grams of each order from 1 to `order`, with their counts. `stream` holds the word ids of
    all texts, one text after another, each between <s> and </s>. `vocabulary` is the number of ids.

    In the code, `rank[i]` is the row of the n-gram that begins at position i of `stream`. It is -1 if the text ends
    before the n-gram does.
    """
    counts = np.bincount(stream, minlength=vocabulary).astype(np.int32)
    no_context = np.zeros(vocabulary, np.int32)
    ids = np.arange(vocabulary, dtype=np.int32)
    yield NgramOrder(no_context, ids, no_context, counts, ids == 1)
    begins = ids == 1
    rank = stream.astype(np.int32)
    for n in range(2, order + 1):
        # an n-gram is extended by a word unless the text ends inside it or with it
        starts = np.flatnonzero((rank[:-1] >= 0) & (rank[1:] >= 0) & (stream[n - 2:n - 2 + len(rank) - 1] != 2))
        keys = rank[starts].astype(np.int64) << _WORD_BITS | stream[starts + n - 1]
        ngrams, first, inverse, times = np.unique(keys, return_index=True, return_inverse=True, return_counts=True)
        del keys
        context = (ngrams >> _WORD_BITS).astype(np.int32)
        word, end = (ngrams & (1 << _WORD_BITS) - 1).astype(np.int32), rank[starts[first] + 1]
        del ngrams, first
        begins = begins[context]
        rank = np.full(len(rank) - 1, -1, np.int32)
        rank[starts] = inverse
        del starts, inverse
        yield NgramOrder(context, word, end, times.astype(np.int32), begins)


def _estimate(words: list[str], orders: list[NgramOrder], tokens: int) -> Estimate:
    adjusted: list[np.ndarray] = []
    for n, grams in enumerate(orders):
        if n == len(orders) - 1:
            a = grams.count.copy()
        else:
            a = np.where(grams.begins, grams.count, np.bincount(orders[n + 1].end, minlength=len(grams.word)))
        if n == 0:
            a[1] = 0                                       # <s> is never predicted
        adjusted.append(a)
    discounts, fallback = [], []
    for n, a in enumerate(adjusted, 1):
        computed = _discounts(np.bincount(np.minimum(a, 5), minlength=6))
        if computed is None:
            fallback.append(n)
        discounts.append(computed or FALLBACK)
    values: list[np.ndarray] = []
    lower: Any = 1 / (len(words) - 1)                      # uniform over all words, with <unk> and </s>, without <s>
    for n, (grams, d) in enumerate(zip(orders, discounts)):
        a = adjusted[n]
        discounted = np.array([0.0, *d])[np.minimum(a, 3)]
        contexts = len(orders[n - 1].word) if n else 1
        total = np.bincount(grams.context, weights=a, minlength=contexts)
        gamma = np.bincount(grams.context, weights=discounted, minlength=contexts).astype(float)  # empty: integers
        occurs = total > 0
        gamma[occurs] /= total[occurs]
        if n:
            values[n - 1][occurs, 1] = np.log10(gamma[occurs])
            lower = lower[grams.end]
        lower = (a - discounted) / total[grams.context] + gamma[grams.context] * lower
        if n == 0:
            lower[1] = 1.0                                 # log10 gives 0, as lmplz writes; no score uses it
        values.append(np.zeros((len(lower), 2), np.float32))
        values[n][:, 0] = np.log10(lower)
    return Estimate(words, orders, values, discounts, fallback, tokens)


def _discounts(t: np.ndarray) -> tuple[float, float, float] | None:
    """Compute the three discounts of an order of n-grams: D₁, D₂ and D₃₊, by which counts of 1, 2, and 3 or more are
    lowered. t[k] is the number of n-grams of the order with count k. Returns None if the discounts cannot be computed,
    or if a D_k lies outside 0 … k."""
    if not (t[1] and t[2] and t[3]):
        return None
    y = t[1] / (t[1] + 2 * t[2])
    d1, d2, d3 = (float(k - (k + 1) * y * t[k + 1] / t[k]) for k in (1, 2, 3))
    return (d1, d2, d3) if 0 <= d1 <= 1 and 0 <= d2 <= 2 and 0 <= d3 <= 3 else None


# -- files -------------------------------------------------------------------------------------------------------------
def columns(estimate: Estimate, n: int) -> list[np.ndarray]:
    """Return the n-grams of order `n` as n arrays of word ids: the first words of all n-grams, their second words, and
    so on."""
    out, at = [], np.arange(len(estimate.orders[n - 1].word))
    for grams in reversed(estimate.orders[:n]):
        out.append(grams.word[at])
        at = grams.context[at]
    return out[::-1]


def save(estimate: Estimate, path: str | os.PathLike[str], *, normalize: str = "none", pieces: bytes = b"") -> None:
    """Write a trained model as a file that `stages.text.ngram_lm.NgramLM` reads. The file also stores `normalize` (how
    texts were normalised) and `pieces` (a SentencePiece model)."""
    counts = [len(grams.word) for grams in estimate.orders[1:]]
    grams = ((hashes(columns(estimate, n)), estimate.values[n - 1]) for n in range(2, len(counts) + 2))
    facts: dict[str, Any] = {"trained": {"tokens": estimate.tokens, "fallback": estimate.fallback,
                                         "discounts": [[round(x, 6) for x in d] for d in estimate.discounts]}}
    write_model(path, estimate.words, estimate.values[0], counts, grams, normalize=normalize, pieces=pieces,
                facts=facts)


def save_arpa(estimate: Estimate, path: str | os.PathLike[str]) -> None:
    """Write a trained model as an ARPA file, in the form that KenLM's lmplz writes. KenLM, SRILM and others can read
    the file. Raises ValueError for a word with white space."""
    if bad := next((w for w in estimate.words if len(w.split()) != 1), None):
        raise ValueError(f"ARPA parts words by white space, and {bad!r} holds some")
    words, last = estimate.words, len(estimate.orders)
    with open(path, "w", encoding="utf-8", newline="\n") as f:
        f.write("\\data\\\n")
        f.writelines(f"ngram {n}={len(grams.word)}\n" for n, grams in enumerate(estimate.orders, 1))
        for n in range(1, last + 1):
            f.write(f"\n\\{n}-grams:\n")
            ids, values = columns(estimate, n), estimate.values[n - 1]
            for at in range(0, len(values), 100_000):
                rows = slice(at, at + 100_000)
                texts = map(" ".join, zip(*([words[i] for i in column[rows].tolist()] for column in ids)))
                # numpy writes the shortest digits that give back the float32
                if n < last:
                    f.writelines(f"{p!s}\t{t}\t{b!s}\n" for t, (p, b) in zip(texts, values[rows]))
                else:
                    f.writelines(f"{p!s}\t{t}\n" for t, (p, _) in zip(texts, values[rows]))
        f.write("\n\\end\\\n")
