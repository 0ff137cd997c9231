"""Finds, in what a training has read, the passages that share the most n-grams of tokens with given texts.

There is no index: the tokens that the training read are scanned twice, in the order of the training. The first scan
counts how often each n-gram of the texts occurs. The second scan ranks passages by the sum of the weights of the
n-grams that they share with a text. The weight of an n-gram is log(1 + tokens read / occurrences), so that a rare
n-gram weighs more than a common phrase. A passage is the part of a document that lies in one sample. Memory depends on
the texts, not on how much was read.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from tokenizer.mixture.curriculum import Curriculum
from tokenizer.mixture.order import Order
from tokenizer.mixture.steps import steps
from tokenizer.shards.reader import ShardSet
from trainer.data.rows import Row, windows

#: tokens of an n-gram: three or four words of English. Fewer are mostly grammar; more are seldom shared by a question
#: of a benchmark and a text that is not a copy of it
LENGTH = 5
#: an n-gram belongs to the template of a task if more than this many of the task's items have it, or more than a tenth
#: of them, but at least two
COMMON = 10
#: tokens that are hashed at a time, and samples that are located at a time
TOKENS, SAMPLES = 1 << 20, 1 << 12
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
#: separates samples; no token of a vocabulary is as large
_BORDER = (1 << 63) - 1


class SharedPassage(NamedTuple):
    """A passage (the part of a document in one sample) that shares n-grams with a text.

        score   sum of the weights of the shared n-grams
        shared  number of the shared n-grams
        sample  number of the sample that has the passage
        step    the step, from 1, in which the sample was read
        stream  index of the stream
        window  number of the sample's window in the stream
        length  number of tokens of the window
        first   where in the window the first shared n-gram begins
        last    where in the window the last shared n-gram begins
    """

    score: float
    shared: int
    sample: int
    step: int
    stream: int
    window: int
    length: int
    first: int
    last: int


class ReadSamples(NamedTuple):
    """Samples that a training reads, all of `length` tokens. The other fields have an entry for each sample: its
    number, the step that reads it (from 1), its window, and its row."""

    samples: np.ndarray
    steps: np.ndarray
    windows: np.ndarray
    rows: Sequence[Row]
    length: int


def hashes(tokens: np.ndarray) -> np.ndarray:
    """Return the 64-bit hash of the n-gram that begins at each token; [] if there are fewer than LENGTH tokens."""
    count = max(0, len(tokens) - LENGTH + 1)
    values, out = tokens.astype(np.uint64), np.zeros(count, np.uint64)
    for i in range(LENGTH):
        out = out * _FACTOR + values[i:i + count] + np.uint64(1)
    return (out ^ (out >> np.uint64(29))) * _FACTOR


def distinctive(texts: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Return the hashes of the different n-grams of each text. n-grams that many of the texts have, such as those of a
    template, are left out."""
    own = [np.unique(hashes(np.asarray(text, np.int64))) for text in texts]
    most = max(1, min(COMMON, len(texts) // 10))
    values, counts = np.unique(np.concatenate([np.empty(0, np.uint64), *own]), return_counts=True)
    common = values[counts > most]
    return [np.setdiff1d(grams, common, assume_unique=True) for grams in own]


def nearest(sets: Sequence[ShardSet], curriculum: Curriculum, samples: tuple[int, int],
            skipped: Callable[[int], object], texts: Sequence[np.ndarray], keep: int,
            progress: Callable[[str], None] = lambda _text: None) -> list[list[SharedPassage]]:
    """Return for each of `texts` the `keep` passages with the highest score, best first. A text is given by the hashes
    of its n-grams (see `distinctive`). The passages are those that a training read in its samples [first, stop), which
    is the pair `samples`. Of passages with equal scores, those that were read first come first. `sets` are the shard
    sets of the curriculum's streams.

    Steps for which `skipped` returns something true are left out, because the model did not learn from them. Later
    epochs of a stream are left out, because they repeat the passages of the first one. A passage whose step was skipped
    in the first epoch is therefore never returned.
    """
    keys = np.unique(np.concatenate([np.empty(0, np.uint64), *texts]))
    if not len(keys):
        return [[] for _ in texts]
    filled = np.zeros(1 << 16, bool)
    filled[keys >> np.uint64(48)] = True
    counts, total = np.zeros(len(keys), np.int64), 0
    for reads in read_samples(sets, curriculum, samples, skipped):
        progress(f"counting n-grams: sample {reads.samples[-1]:,} of {samples[1]:,}")
        tokens, _ = joined(reads.rows)
        total += len(tokens)
        np.add.at(counts, occurrences(tokens, keys, filled)[1], 1)
    weights = np.log1p(total / np.maximum(counts, 1))
    owned = [np.searchsorted(keys, grams) for grams in texts]
    heaps: list[list[tuple[float, int, int, SharedPassage]]] = [[] for _ in texts]
    for reads in read_samples(sets, curriculum, samples, skipped):
        progress(f"ranking passages: sample {reads.samples[-1]:,} of {samples[1]:,}")
        tokens, starts = joined(reads.rows)
        at, key = occurrences(tokens, keys, filled)
        if not len(at):
            continue
        pieces, row, place = passages(reads.rows, starts, at)
        for heap, own in zip(heaps, owned):
            rank(heap, own, reads, (pieces, key, row, place), weights, keep)
    return [[passage for *_, passage in sorted(heap, reverse=True)] for heap in heaps]


def read_samples(sets: Sequence[ShardSet], curriculum: Curriculum, samples: tuple[int, int],
                 skipped: Callable[[int], object]) -> Iterator[ReadSamples]:
    """Yield the samples [first, stop) that a training reads, at most about TOKENS tokens at a time. Skipped steps and
    later epochs of a stream (data source) are left out."""
    order = Order(curriculum)
    for first, stop, numbers in spans(curriculum, samples, skipped):
        at = order.locate(first, stop)
        new = np.flatnonzero(at.epoch == 0)
        for length in np.unique(at.sequence[new]).tolist():
            alike = new[at.sequence[new] == length]
            size = max(1, TOKENS // length)
            for part in (alike[i:i + size] for i in range(0, len(alike), size)):
                places = list(zip(at.stream[part].tolist(), at.window[part].tolist()))
                yield ReadSamples(first + part, numbers[part], at.window[part], windows(sets, places, length), length)


def spans(curriculum: Curriculum, samples: tuple[int, int],
          skipped: Callable[[int], object]) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yield ranges [first, stop) of the samples in the pair `samples`, without those of skipped steps. Each range comes
    with an array that has the step (from 1) of every sample in it."""
    first = stop = samples[0]
    numbers: list[np.ndarray] = []
    for step in steps(curriculum, samples[0]):
        if step.stop > samples[1]:
            break
        if skipped(step.number + 1) or step.stop - first > SAMPLES:
            if numbers:
                yield first, stop, np.concatenate(numbers)
            first, numbers = step.first, []
        if skipped(step.number + 1):
            first = step.stop
        else:
            numbers.append(np.full(step.batch, step.number + 1))
        stop = step.stop
    if numbers:
        yield first, stop, np.concatenate(numbers)


def joined(rows: Sequence[Row]) -> tuple[np.ndarray, np.ndarray]:
    """Put the tokens of all samples one after the other, with a border token after each sample. Returns (tokens, the
    positions at which the samples begin)."""
    parts = [part for row in rows for part in (row[0].astype(np.int64), np.array([_BORDER]))]
    sizes = np.array([len(row[0]) + 1 for row in rows])
    return np.concatenate(parts), np.concatenate([[0], np.cumsum(sizes)[:-1]])


def occurrences(tokens: np.ndarray, keys: np.ndarray, filled: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Find those n-grams of `tokens` whose hashes are in the sorted array `keys`. Returns (positions at which they
    begin, index into `keys` of each). `filled` says for each value of a hash's upper 16 bits whether any key has it;
    this rules out most other n-grams quickly."""
    values = hashes(tokens)
    at = np.flatnonzero(filled[values >> np.uint64(48)])
    key = np.searchsorted(keys, values[at])
    same = keys[np.minimum(key, len(keys) - 1)] == values[at]
    return at[same], key[same]


def passages(rows: Sequence[Row], starts: np.ndarray, at: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Find the passages in which some positions lie. A passage is the part of a document in one sample. The positions
    `at` count the tokens that `joined` returned, in which samples begin at `starts`. Returns three arrays with an entry
    for each position: number of the passage, index of the sample in `rows`, position within the sample."""
    row = np.searchsorted(starts, at, "right") - 1
    begins = np.concatenate([np.concatenate([[start], start + np.asarray(of[1])]) for start, of in zip(starts, rows)])
    return np.searchsorted(begins, at, "right") - 1, row, at - starts[row]


def rank(heap: list[tuple[float, int, int, SharedPassage]], own: np.ndarray, reads: ReadSamples,
         hits: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray], weights: np.ndarray, keep: int) -> None:
    """Update `heap`, which holds the `keep` passages that share the most with one text, with the passages of `reads`.

        own      indices of the text's n-grams in the sorted list of the n-grams of all texts
        hits     four arrays with an entry for each occurrence of one of these n-grams in `reads`: number of the
                 passage, index of the n-gram, index of the sample in `reads`, position within the sample
        weights  weight of each n-gram of all texts
    """
    pieces, key, row, place = hits
    shared_grams = np.flatnonzero(np.isin(key, own))
    shared_grams = shared_grams[np.lexsort((place[shared_grams], pieces[shared_grams]))]
    if not len(shared_grams):
        return
    borders = np.flatnonzero(np.diff(pieces[shared_grams])) + 1
    for group in np.split(shared_grams, borders):
        shared = np.unique(key[group])
        score, sample = round(float(weights[shared].sum()), 9), int(reads.samples[row[group[0]]])
        first, last = int(place[group[0]]), int(place[group[-1]])
        rank_of = (score, -sample, -first)
        if len(heap) == keep and rank_of <= heap[0][:3]:
            continue
        r = int(row[group[0]])
        passage = SharedPassage(score, len(shared), sample, int(reads.steps[r]), reads.rows[r][2],
                                int(reads.windows[r]), reads.length, first, last)
        (heapq.heappush if len(heap) < keep else heapq.heapreplace)(heap, (*rank_of, passage))
