"""Counts the tokens that a training reads, grouped by the labels of the documents that they are from: source, language
and quality buckets.

The order says which windows (training samples) of a stream are read, and the document tables say which documents are in
them. The labels are in the published datasets. A stream is read from its beginning to its end, in blocks. So the files
of document tables and datasets are read one after the other, and memory is bounded."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.base.errors import TokenmillError
from pipeline.store.fs import Store
from pipeline.store.shard_set import dataset_parts
from tokenizer.mixture.curriculum import Curriculum
from tokenizer.mixture.order import Order
from tokenizer.mixture.realised import realised_in
from tokenizer.shards.index import DocumentSpan, ShardIndex
from tokenizer.shards.origin import add_origins
from tokenizer.shards.reader import ShardSet

#: tokens of a block, and the fewest blocks of a stream that a share of it is estimated from
BLOCK, LEAST = 1 << 20, 30
#: parts of datasets that are read at a time
READERS = 4
#: half the width of a 95 % interval, in standard errors
SIGMAS = 1.96
COLUMNS = ("source", "language", "signals")
#: names of signals that hold a quality bucket (`stages.filter.buckets`) end in this
BUCKET = "_bucket"


@dataclass
class Sums:
    """Counts of the documents with one value of a label, such as one language, summed over those blocks of a stream
    that were read. For the estimate of the error, x is the number of tokens that a phase reads in a block. y is the
    number of these tokens that belong to the documents."""

    tokens: int = 0
    targets: int = 0
    squares: float = 0.0                      # Σ y²
    products: float = 0.0                     # Σ x y


@dataclass
class Reads:
    """What one phase reads of a stream, summed over those blocks of the stream that were read. x is the number of
    tokens that it reads in a block. `cells` maps (label, value) to the sums for the documents with this value."""

    tokens: int = 0                           # Σ x
    squares: float = 0.0                      # Σ x²
    cells: dict[tuple[str, str], Sums] = field(default_factory=lambda: defaultdict(Sums))


class PackedStream(TokenmillError):
    """Raised for a curriculum that reads packed rows, because the labels of their documents cannot be counted."""


class TooSmallShare(TokenmillError):
    """Raised when the blocks that were read hold no token that a phase reads, so that nothing is known about this
    phase."""


def count_documents(store: Store, curriculum: Curriculum, ranges: Sequence[tuple[int, int]],
                    share: float = 1.0, block: int = BLOCK) -> dict[str, Any]:
    """Count the tokens of training samples by the labels of the documents that they are from. `ranges` are ranges
    [first, stop) of sample numbers. Each stream is divided into blocks of about `block` tokens. About the given share
    of the blocks is read, at least LEAST, evenly spaced.

    Returns {exact, read, missing, rows}. `exact` says whether all tokens of the samples were read, and `read` is the
    share that was read. `missing` is the number of documents read that are in no dataset of the store any more.

    A row is {label, value, phase, tokens, targets, error}. `tokens` is the number of tokens in the phase's windows that
    belong to documents with this value of the label. For one label, these numbers add up to the tokens of the phase.
    `targets` leaves out the tokens that do not count in the loss: the first token of each document, and tokens that the
    loss mask excludes. `error` is half the width of the 95 % interval of `tokens`; 0 if all was read.

    Raises PackedStream if the curriculum reads packed rows, and TooSmallShare if the share is too small for a phase.
    """
    packed = [stream.name for stream in curriculum.streams if stream.packing is not None]
    if packed:
        raise PackedStream(f"--rows: stream '{packed[0]}' is packed (shards.{packed[0]}.packing), and the documents in "
                           f"its rows cannot be counted by label: leave out --rows")
    order, datasets = Order(curriculum), list(dataset_parts(store))
    exact = {(row["phase"], row["stream"]): row["tokens"] for row in realised_in(curriculum, ranges)}
    rows: dict[tuple[str, str, int], list[float]] = defaultdict(lambda: [0, 0, 0.0])
    read = total = missing = 0
    sets = {number: ShardSet(Path(store.root) / stream.train, stream.sha256)
            for number, stream in enumerate(curriculum.streams)
            if any(exact.get((phase.name, stream.name)) for phase in curriculum.phases)}
    labels = ["source", "language", *_buckets(store, sets.values(), datasets)]
    for number, shards in sets.items():
        stream = curriculum.streams[number]
        phases, part, absent = _stream(_Origins(store, datasets, labels), shards, order, number, ranges, share, block)
        missing += absent
        for p, reads in enumerate(phases):
            tokens = exact.get((curriculum.phases[p].name, stream.name), 0)
            if tokens and not reads.tokens:
                raise TooSmallShare(f"phase '{curriculum.phases[p].name}' reads too little of stream '{stream.name}' "
                                    f"for a share of {share:.2%}: give a larger --share")
            read, total = read + reads.tokens, total + tokens
            for (label, value), sums in reads.cells.items():
                row = rows[label, value, p]
                row[0] += sums.tokens * tokens / reads.tokens
                row[1] += sums.targets * tokens / reads.tokens
                row[2] += _variance(reads, sums, *part) * tokens**2
    return {"exact": read == total, "read": read / total if total else 1.0, "missing": missing, "rows": [
        {"label": label, "value": value, "phase": curriculum.phases[p].name, "tokens": round(tokens),
         "targets": round(targets), "error": round(SIGMAS * math.sqrt(variance))}
        for (label, value, p), (tokens, targets, variance) in sorted(rows.items())]}


def _variance(reads: Reads, sums: Sums, n: int, of: int) -> float:
    """Return the variance of the share Σy/Σx (see `Sums`), a ratio that is estimated from `n` of `of` blocks (Cochran,
    Sampling Techniques, §6.4)."""
    if n == of:
        return 0.0
    share = sums.tokens / reads.tokens
    residuals = max(0.0, sums.squares - 2 * share * sums.products + share**2 * reads.squares)
    return (1 - n / of) * n / max(n - 1, 1) * residuals / reads.tokens**2


def _buckets(store: Store, sets: Iterable[ShardIndex], datasets: list[tuple[str, dict[str, str]]]) -> list[str]:
    """Return the names of the signals that hold a quality bucket, in the datasets from which the shard sets were made.
    All parts of a dataset have the same signals, so one part of each dataset is opened."""
    names: set[str] = set()
    used = {key for shards in sets for key in shards.manifest.parts}
    for _, parts in datasets:
        if path := next((path for key, path in parts.items() if key in used), None):
            with store.parquet(path) as file:
                schema = file.schema_arrow
                if "signals" in schema.names:
                    names.update(field.name for field in schema.field("signals").type if field.name.endswith(BUCKET))
    return sorted(names)


def _stream(origins: _Origins, shards: ShardSet, order: Order, stream: int, ranges: Sequence[tuple[int, int]],
            share: float, block: int) -> tuple[list[Reads], tuple[int, int], int]:
    """Read a share of the blocks of one stream, and count its tokens in the samples `ranges`. Returns the sums for each
    phase, (number of blocks read, number of all blocks), and how many of the documents that were read are in no
    dataset."""
    longest = order.longest
    size = max(1, block // longest)
    firsts = range(0, order.supers[stream], size)
    every = max(1, min(round(1 / share), len(firsts) // LEAST))
    chosen = firsts[every // 2::every]
    phases, missing, last = [Reads() for _ in order.curriculum.phases], 0, -1
    edges = np.array(ranges, np.int64).ravel()
    with ThreadPoolExecutor(READERS) as pool:
        for first in chosen:
            stop = min(first + size, order.supers[stream])
            counts = {p: _reads(order, p, windows[np.searchsorted(edges, numbers, "right") % 2 == 1], first, stop)
                      for p, (numbers, windows, _) in order.samples_of(stream, first, stop).items()}
            counts = {p: reads for p, reads in counts.items() if reads.any()}
            if not counts:
                continue
            spans = shards.documents(first * longest + 1, stop * longest + 1)
            labels, absent = origins.labels(shards, spans, pool)
            read = np.sum([_add(phases[p], shards, spans, labels, first * longest + 1, reads)
                           for p, reads in counts.items()], axis=0)
            lost = [span.start for span, gone, tokens in zip(spans, absent, read) if gone and tokens]
            missing += sum(start > last for start in lost)           # the last document may be in the next block, too
            last = lost[-1] if lost else last
    return phases, (len(chosen), len(firsts)), missing


def _reads(order: Order, phase: int, windows: np.ndarray, first: int, stop: int) -> np.ndarray:
    """Return how often a phase reads each token of the super-windows [first, stop) as a target, as int64. These are the
    tokens first · longest + 1 to stop · longest of the stream, because a target is the token after the one that is
    read. `windows` are the numbers of the windows that the phase reads. The loss mask and the borders of documents are
    not taken into account."""
    length = order.curriculum.phases[phase].sequence
    ratio = order.longest // length
    return np.repeat(np.bincount(windows - first * ratio, minlength=(stop - first) * ratio), length)


@dataclass
class _Origins:
    """Looks up the labels of documents in the published datasets of a store."""

    store: Store
    datasets: list[tuple[str, dict[str, str]]]
    names: list[str]                          # of the labels

    def labels(self, shards: ShardIndex, spans: Sequence[DocumentSpan],
               pool: ThreadPoolExecutor) -> tuple[dict[str, list[str]], list[bool]]:
        """Return {label: its value for each document of `spans`}, and for each of them whether it is in no dataset.
        `spans` are documents of the shard set `shards`. A document without a label has the value ""."""
        parts = shards.manifest.parts
        documents: list[dict[str, Any]] = [{"id": span.id, "key": parts[span.part] if span.part < len(parts) else None,
                                            "at": span.row} for span in spans]
        add_origins(documents, self.datasets, self.store.parquet, COLUMNS, 0, pool)
        values = {name: [str(d.get(name) or "") for d in documents] for name in self.names[:2]}
        for name in self.names[2:]:
            buckets = [(d.get("signals") or {}).get(name) for d in documents]
            values[name] = ["" if bucket is None else f"{bucket:g}" for bucket in buckets]
        return values, ["dataset" not in d for d in documents]


def _add(phase: Reads, shards: ShardSet, spans: Sequence[DocumentSpan], labels: dict[str, list[str]], start: int,
         reads: np.ndarray) -> np.ndarray:
    """Add a block of a stream to the sums of a phase. `spans` are the documents in the block, with the values of their
    `labels`. `reads` says how often each token of the block, which begins with token `start`, is read as a target
    (`_reads`). Returns how many tokens of each document are read, repeats included."""
    begins = np.array([span.start for span in spans])
    edges = np.clip(np.array([[span.start, span.stop] for span in spans]) - start, 0, len(reads))
    counts = shards.counts(start, start + len(reads))
    learned = reads.copy() if counts is None else reads * counts
    learned[begins[begins >= start] - start] = 0                # a document's first token does not count in the loss
    tokens, targets = (np.diff(np.concatenate([[0], np.cumsum(values)])[edges], axis=1)[:, 0]
                       for values in (reads, learned))
    x = int(reads.sum())
    phase.tokens, phase.squares = phase.tokens + x, phase.squares + float(x)**2
    for label, values in labels.items():
        names, place = np.unique(np.array(values, object).astype(str), return_inverse=True)
        sums_of = (np.bincount(place, weights).tolist() for weights in (tokens, targets))
        for value, y, z in zip(names.tolist(), *sums_of, strict=True):
            sums = phase.cells[label, value]
            sums.tokens, sums.targets = sums.tokens + int(y), sums.targets + int(z)
            sums.squares, sums.products = sums.squares + y * y, sums.products + x * y
    return tokens
