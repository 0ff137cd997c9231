"""Compares an order of training samples with a perfect shuffle. It measures

* how often samples at some distance are from one stream, or have a document in common
* how long one stream is read without a break
* how often a document is in two samples of a batch.

In a perfect shuffle, the samples of a batch are in random order. The windows that a batch reads of a stream are drawn
at random from all its windows. The figures that a perfect shuffle would have are computed, not simulated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.store.fs import Store
from tokenizer.mixture.curriculum import Curriculum
from tokenizer.mixture.order import Located
from tokenizer.shards.layout import ShardError
from tokenizer.shards.reader import ShardSet

#: distances in samples at which pairs are compared
LAGS = (1, 2, 4, 8, 16, 32, 64)
#: document ends that are read at a time, and most such blocks of a stream; of larger streams evenly spaced ones
BLOCK, BLOCKS = 1 << 16, 256


class StreamDocuments:
    """Tells which documents of a stream are in which of its `windows` windows (training samples) of `length` tokens
    each. For this, it reads where documents end from the stream's shards. These files are not compared with their
    checksums, because only a few figures depend on them."""

    def __init__(self, shards: ShardSet, windows: int, length: int) -> None:
        self._shards, self._windows, self._length = shards, windows, length
        pairs = windows * (windows - 1) / 2
        #: probability that two windows, drawn at random, have a document in common
        self.common = self._common_pairs() / pairs if pairs else 0.0

    def edges(self, windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return, for each of these windows, the number of its first and of its last document in the stream, as two
        int64 arrays (N,). `windows` are the numbers of the windows (training samples) in the stream."""
        first = windows * self._length
        return self._shards.document_numbers(first), self._shards.document_numbers(first + self._length - 1)

    def _common_pairs(self) -> float:
        """Return an estimate of the number of pairs of windows with a common document, from at most BLOCKS blocks of
        documents. Two windows have at most one document in common, the last one of the earlier window. So no pair is
        counted twice if the pairs are counted for each document by itself."""
        blocks = [(shard, first) for shard, info in enumerate(self._shards.manifest.shards)
                  for first in range(0, info.documents, BLOCK)]
        chosen = [blocks[i] for i in np.unique(np.linspace(0, len(blocks) - 1, min(len(blocks), BLOCKS)).astype(int))]
        pairs = documents = 0
        for shard, first in chosen:
            ends = self._shards.shard_ends(shard, max(first - 1, 0), first + BLOCK) + self._shards.offsets[shard]
            edges = ends if first else np.concatenate([[self._shards.offsets[shard]], ends])
            last = np.minimum((edges[1:] - 1) // self._length, self._windows - 1)
            count = np.maximum(last - edges[:-1] // self._length + 1, 0)
            pairs, documents = pairs + int((count * (count - 1) // 2).sum()), documents + len(count)
        return pairs * self._shards.manifest.documents / documents if documents else 0.0


class Shuffle:
    """Collects figures about the order of samples, batch by batch. Figures about documents are None if the shards
    cannot be read, because they are on object storage or gone. They are also None for packed rows, which hold whole
    documents."""

    def __init__(self, curriculum: Curriculum, store: Store | None) -> None:
        self._curriculum = curriculum
        self._sets: dict[int, ShardSet] | None = None
        packed = any(stream.packing is not None for stream in curriculum.streams)
        if store is not None and store.local is not None and not packed:
            with suppress(ShardError):
                self._sets = {number: ShardSet(Path(store.root) / stream.train, stream.sha256)
                              for number, stream in enumerate(curriculum.streams)}
        self._documents: dict[tuple[int, int], StreamDocuments] = {}
        #: by lag: pairs, pairs of one stream and their expected number, pairs with a common document and theirs
        self._lags = {lag: np.zeros(5) for lag in LAGS}
        self._longest, self._longest_stream = 0, 0
        self._mixes: list[tuple[int, np.ndarray]] = []             # of each batch: samples, samples of each stream
        self._repeats, self._expected_repeats = 0, 0.0

    def add(self, located: Located) -> None:
        """Add the next batch to the figures. `located` gives, for each of its samples in order, the stream, the window
        and the sequence length. All samples of a batch must be of one phase."""
        streams, length, samples = located.stream, int(located.sequence[0]), len(located.stream)
        counts = np.bincount(streams)
        self._mixes.append((samples, counts[counts > 0]))
        edges = np.flatnonzero(np.diff(streams, prepend=-1, append=-1))
        runs = np.diff(edges)
        if runs.max() > self._longest:
            self._longest, self._longest_stream = int(runs.max()), int(streams[edges[runs.argmax()]])
        pairs_of = counts * (counts - 1) / 2
        of_stream = float(pairs_of.sum())
        of_document, first, last = self._add_documents(located, length, pairs_of)
        for lag in LAGS:
            if lag >= samples:
                break
            pairs = samples - lag
            same = streams[lag:] == streams[:-lag]
            common = same & (first[lag:] <= last[:-lag]) & (last[lag:] >= first[:-lag])
            chance = pairs / (samples * (samples - 1) / 2)
            self._lags[lag] += (pairs, same.sum(), of_stream * chance, common.sum(), of_document * chance)

    def _add_documents(self, located: Located, length: int,
                       pairs_of: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
        """Count the pairs of windows (training samples) in the batch `located` that have a document in common. `length`
        is the number of tokens of a window, and `pairs_of` has the number of pairs of samples of each stream.

        Returns the number of such pairs in a perfect shuffle, and two int64 arrays: the numbers of the first and of the
        last document of each sample.
        """
        first, last = np.zeros((2, len(located.stream)), np.int64)
        expected = 0.0
        for stream in np.unique(located.stream).tolist() if self._sets is not None else ():
            documents = self._of(stream, length)
            of_stream = located.stream == stream
            first[of_stream], last[of_stream] = documents.edges(located.window[of_stream])
            starts, stops = np.sort(first[of_stream]), np.sort(last[of_stream])
            self._repeats += int((np.searchsorted(starts, stops, "right") - 1 - np.arange(len(starts))).sum())
            expected += float(pairs_of[stream]) * documents.common
        self._expected_repeats += expected
        return expected, first, last

    def _of(self, stream: int, length: int) -> StreamDocuments:
        assert self._sets is not None
        if (stream, length) not in self._documents:
            shards, longest = self._sets[stream], self._curriculum.longest
            windows = max(0, shards.tokens - 1) // longest * (longest // length)
            self._documents[stream, length] = StreamDocuments(shards, windows, length)
        return self._documents[stream, length]

    def figures(self) -> dict[str, Any]:
        """Return the figures about all batches so far, as {lags, run, repeats}. Their fields are those of the models
        `Lag`, `LongestRun` and `Repeats` in the schema of the report."""
        known = self._sets is not None
        lags = []
        for lag, (pairs, *sums) in self._lags.items():
            if pairs:
                same, of_stream, common, of_document = (float(s / pairs) for s in sums)
                lags.append({"lag": lag, "pairs": int(pairs), "stream": round(same, 6),
                             "stream_expected": round(of_stream, 6), "document": round(common, 8) if known else None,
                             "document_expected": round(of_document, 8) if known else None})
        return {"lags": lags,
                "run": {"windows": self._longest, "stream": self._curriculum.streams[self._longest_stream].name,
                        "expected": round(expected_run(self._mixes), 3)},
                "repeats": {"pairs": self._repeats, "expected": round(self._expected_repeats, 3)} if known else None}


def expected_run(mixes: Sequence[tuple[int, np.ndarray]]) -> float:
    """Return an estimate of the longest run of samples of one stream in shuffled batches. `mixes` has, for each batch,
    its number of samples, and the number of samples of each of its streams.

    Take a batch of n samples, of which k are of one stream. The other n − k samples leave n − k + 1 gaps. Each gap
    holds a run of at least m samples of the stream with the probability k/n · (k − 1)/(n − 1) · … (m factors). The mean
    number of such runs is therefore n − k + 1 times this probability. Rare runs are nearly independent, so their number
    is nearly Poisson (Arratia, Goldstein and Gordon, 1990)."""
    sizes = np.concatenate([np.full(len(counts), samples) for samples, counts in mixes])
    members = np.concatenate([counts for _, counts in mixes])
    alone = int(members[members == sizes].max(initial=0))        # a batch of one stream is one run
    runs = sizes - members + 1.0
    expected = float(alone)
    for m in range(1, int(members.max()) + 1):
        runs *= np.maximum(members - m + 1, 0) / np.maximum(sizes - m + 1, 1)
        if (total := float(runs.sum())) < 1e-6:
            break
        if m > alone:
            expected -= math.expm1(-total)
    return expected
