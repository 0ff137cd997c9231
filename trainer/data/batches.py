"""Makes batches from shards (files of tokens). The position in the data is one integer: the number of the next sample.

A sample is a window (a range of consecutive tokens) of a stream (the tokens of one source, language or bucket). The
stream, epoch and window of sample n are a pure function of n (`tokenizer.mixture.order`). A step is a range of
consecutive samples. Each of R data ranks takes every R-th sample; the ranks that share layers (a tensor group) are one
data rank and read the same samples. World size, micro-batches and accumulation therefore do not change the samples of a
step. Memory does not grow with the number of tokens, because tokens and document ends are memory-mapped.
"""

from __future__ import annotations

import operator
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tokenizer.mixture.curriculum import Curriculum
from tokenizer.mixture.kernels import is_compiled
from tokenizer.mixture.order import Located, Order
from tokenizer.mixture.steps import TrainingStep
from tokenizer.shards.reader import ShardSet
from trainer.base.config import ConfigError
from trainer.data import kernels
from trainer.data.read_ahead import STEPS, RemoteShardSet
from trainer.data.remote import training_sets
from trainer.data.rows import (
    Row,
    SampleRows,
    refuse_short,
    refuse_unknown,
    refuse_unordered,
    token_ranges,
    touched,
    windows,
)
from trainer.model.attention import DocMask, Masking, cumulative_lengths, document_mask
from trainer.model.config import RepeatsConfig
from trainer.model.loss import IGNORE
from trainer.model.repeats import repeated

#: number of rows that numpy fills at a time; few, so that the temporary arrays are small and their memory is reused
TOGETHER = 32
#: samples that are located in one call, for the steps to come
AHEAD = 1 << 14


@dataclass(frozen=True)
class Batch:
    """R rows (samples) of L tokens each, with their targets. If a rank has fewer samples in a step than another,
    padding rows are added, whose targets do not count in the loss."""

    tokens: Tensor            # [R, L] int64
    targets: Tensor  # [R, L] int64; IGNORE for the first token of a document, padding, and targets left out of the loss
    positions: Tensor         # [R, L] int64, from 0 in every document piece
    stream: Tensor            # [R] int64, index into the curriculum's streams
    attended: int             # Σ length² over document pieces, for MFU
    repeated: int = 0         # targets left out as repetitions (trainer/model/repeats.py)
    starts: Tensor | None = None   # of a micro-batch on CUDA: `attention.cumulative_lengths` of positions
    one_document: bool = False       # of a micro-batch on CUDA: every row is one document, so attention needs no mask

    @property
    def rows(self) -> int:
        return self.tokens.shape[0]

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.tokens, self.targets, self.positions, self.stream

    def padded(self, rows: int) -> Batch:
        """Return this batch with padding rows added, so that it has `rows` rows. A batch that already has so many rows
        is returned unchanged. The targets of padding rows do not count in the loss."""
        if self.rows >= rows:
            return self
        blank = padding(rows - self.rows, self.tokens.shape[1])
        tokens, targets, positions, stream = (torch.cat(pair) for pair in zip(self.tensors(), blank.tensors()))
        return Batch(tokens, targets, positions, stream, self.attended, self.repeated)

    def each(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """Return a copy of this batch, or a part of it, in which tokens, targets, positions and stream are the results
        of `change`. `attended` and `repeated` are 0 in the result, so that metrics count only the original batch."""
        return Batch(change(self.tokens), change(self.targets), change(self.positions), change(self.stream), attended=0)

    def valid(self) -> int:
        """Return the number of targets that count in the loss."""
        return int((self.targets != IGNORE).sum())

    def micro(self, rows: int, device: torch.device) -> Iterator[Batch]:
        """Cut this batch into micro-batches of `rows` consecutive rows, and yield these on `device`. The last
        micro-batch is filled up with padding rows, whose targets do not count in the loss."""
        for start in range(0, self.rows, rows):
            part = self.each(operator.itemgetter(slice(start, start + rows))).padded(rows)
            if device.type != "cuda":
                yield part
                continue
            # computed on the CPU: on the device, the host would have to wait for the number of documents
            starts, one_document = cumulative_lengths(part.positions), not bool((part.positions[:, 1:] == 0).any())

            def send(x: Tensor) -> Tensor:
                return x.pin_memory().to(device, non_blocking=True)

            yield replace(part.each(send), starts=send(starts), one_document=one_document)

    def mask(self, dtype: torch.dtype, masking: Masking) -> DocMask:
        """Return the attention mask of this (micro-)batch, for activations of `dtype`.

        No mask is needed if every row of a micro-batch on CUDA is one document, as is common with long contexts. Faster
        kernels for causal attention are then used: on an H100, cuDNN's kernel takes 4.9 ms forward and backward,
        FlashAttention 2 takes 8.3 ms (8 × 4,096 tokens, 32 heads of width 64).
        """
        return document_mask(self.positions, dtype, "none" if self.one_document else masking, starts=self.starts)


def padding(rows: int, length: int) -> Batch:
    """Make a batch of `rows` rows that only fill up another batch. Each row is one document of `length` tokens with id
    0, and none of its targets counts in the loss."""
    zeros = torch.zeros(rows, length, dtype=torch.int64)
    positions = torch.arange(length).repeat(rows, 1)
    return Batch(zeros, torch.full_like(zeros, IGNORE), positions, torch.zeros(rows, dtype=torch.int64), 0)


def collate(rows: Sequence[Row], length: int) -> Batch:
    """Make a batch from samples; each sample becomes a row of `length` tokens. A sample is a tuple of its tokens, its
    bounds and the index of its stream (data source). A fourth element may say which of its targets count in the loss.

    The last token of a sample is only a target. A sample with fewer than `length` other tokens is filled up with
    padding, which does not count in the loss. `bounds` are the positions at which documents begin inside the sample
    (see `ShardSet.bounds`). Positions restart at each bound. The first token of a document does not count as a target,
    because it would be predicted from the end of an unrelated document.
    """
    # one piece of memory, because the system hands out a large piece faster than small ones
    tokens, targets, positions = np.empty((3, len(rows), length), np.int64)
    attended = 0
    if is_compiled(tokens.size) and len(rows) and (isinstance(rows, SampleRows) or all(
            len(row[0]) > length for row in rows)):
        attended = _fill_compiled(rows if isinstance(rows, SampleRows) else SampleRows.of(rows), tokens, targets,
                                  positions)
    else:
        for first in range(0, len(rows), TOGETHER):
            part = slice(first, first + TOGETHER)
            attended += _fill(rows[part], tokens[part], targets[part], positions[part])
    stream = torch.from_numpy(rows.streams) if isinstance(rows, SampleRows) else torch.tensor(
        [row[2] for row in rows], dtype=torch.int64)
    return Batch(torch.from_numpy(tokens), torch.from_numpy(targets), torch.from_numpy(positions), stream, attended)


def _fill_compiled(rows: SampleRows, tokens: np.ndarray, targets: np.ndarray, positions: np.ndarray) -> int:
    """Write samples into the arrays of a batch, as `_fill` does, with the compiled loop of `trainer.data.kernels`."""
    attended = kernels.fill(rows.tokens, rows.bounds, rows.counts, tokens, targets, positions)
    for target, mask in zip(targets, rows.masks):
        if mask is not None:
            target[~mask] = IGNORE
    return int(attended)


def _fill(rows: Sequence[Row], tokens: np.ndarray, targets: np.ndarray, positions: np.ndarray) -> int:
    """Write samples into the arrays of a batch, [rows, length] each, one row per sample. Returns the sum of length²
    over all pieces of documents (`Batch.attended`)."""
    length = tokens.shape[1]
    sizes = np.array([len(window) - 1 for window, *_ in rows])
    for row, (window, _, _, *masks) in enumerate(rows):
        size = len(window) - 1
        tokens[row, :size], targets[row, :size] = window[:-1], window[1:]
        for counts in masks:
            if counts is not None:
                targets[row, :size][~counts] = IGNORE
    bounds = np.concatenate([row[1] for row in rows])
    starts = np.repeat(np.arange(len(rows)) * length, [len(row[1]) for row in rows])
    targets.reshape(-1)[starts + bounds - 1] = IGNORE
    # where documents begin, with the rows one after the other; what fills up a short row is one document
    short = np.flatnonzero(sizes < length)
    begins = np.sort(np.concatenate([np.arange(len(rows)) * length, short * length + sizes[short],
                                     (starts + bounds)[bounds < sizes[starts // length]]]))
    lengths = np.diff(begins, append=tokens.size)
    np.subtract(np.arange(length), np.repeat(begins % length, lengths).reshape(positions.shape), out=positions)
    for row, size in zip(short.tolist(), sizes[short].tolist()):
        tokens[row, size:], targets[row, size:], positions[row, size:] = 0, IGNORE, np.arange(size, length)
    return int(lengths @ lengths - ((length - sizes[short]) ** 2).sum())


class Data:
    """Reads the training data and the held-out data that a curriculum names. The curriculum's paths of shards are
    relative to the folder `store`. If `store` is a local copy of a store in object storage, `source` is the URL of the
    original, from which missing tokens are read.

    With `repeats`, targets inside repetitions do not count in the loss of training batches (method `step`). They do
    count in held-out data and in batches made by `samples`. Raises ConfigError when shards have another tokenizer or
    other packed rows than the curriculum says.
    """

    def __init__(self, curriculum: Curriculum, store: Path, repeats: RepeatsConfig | None = None,
                 source: str | None = None) -> None:
        self.curriculum, self.order, self.repeats = curriculum, Order(curriculum), repeats
        self._ahead = 0, self.order.locate(0, 0)       # first sample of the last call, and its result
        self.streams = [s.name for s in curriculum.streams]
        self.train = training_sets(store, source, curriculum.streams)
        self.heldout = [ShardSet(store / s.val, s.val_sha256) if s.val and s.val_tokens > 1 else None
                        for s in curriculum.streams]
        for stream, shards in zip(curriculum.streams, self.train):
            if shards.manifest.tokenizer != curriculum.tokenizer.sha256:
                raise ConfigError(f"stream {stream.name}: its shards were encoded with another tokenizer than the "
                                  f"curriculum's; resolve the curriculum again")
            if shards.packed is not None and (len(shards.packed), shards.packed.longest) != (
                    stream.rows, curriculum.longest):
                raise ConfigError(f"stream {stream.name}: it has {len(shards.packed):,} packed rows of "
                                  f"{shards.packed.longest:,} tokens, the curriculum says {stream.rows:,} of "
                                  f"{curriculum.longest:,}; resolve the curriculum again")

    def samples(self, numbers: Sequence[int]) -> Batch:
        """Read the samples with the given numbers, in that order. All must have the same sequence length."""
        places: list[tuple[int, int]] = []
        length = 0
        for first, stop in runs(numbers):
            at = self.order.locate(first, stop)
            places += zip(at.stream.tolist(), at.window.tolist())
            length = int(at.sequence[0])
        return collate(windows(self.train, places, length), length)

    def step(self, first: int, batch: int, data_rank: int, data_size: int) -> Batch:
        """Read the part of one training step that belongs to data rank `data_rank` of `data_size` (ranks that read
        different samples). The step consists of the samples [first, first + batch). The result has ⌈batch / data_size⌉
        rows; if there are fewer samples for this rank, padding rows are added."""
        at = self.located(first, first + batch)
        length = int(at.sequence[0])
        rows = windows(self.train, np.stack([at.stream, at.window], 1)[data_rank::data_size], length)
        result = collate(rows, length)
        if self.repeats is not None:
            result = without_repeats(result, [row[0] for row in rows], self.repeats)
        return result.padded(-(-batch // data_size))

    @property
    def reads_ahead(self) -> bool:
        """Whether tokens are read from object storage, so that `request` should be called in advance."""
        return not all(shards.has_local_tokens for shards in self.train)

    def request(self, first: int, batch: int, data_rank: int, data_size: int) -> None:
        """Request from object storage the tokens that `step` will read when it is called with the same arguments. Does
        not wait for them."""
        at = self.order.locate(first, first + batch)
        wanted: dict[int, list[tuple[int, int]]] = {}
        for stream, window, length in zip(*(column[data_rank::data_size].tolist()
                                            for column in (at.stream, at.window, at.sequence))):
            if not self.train[stream].has_local_tokens:
                wanted.setdefault(stream, []).extend(token_ranges(self.train[stream], window, length))
        for stream, ranges in wanted.items():
            self.train[stream].prefetch(ranges)

    def forget_requests(self) -> None:
        """Forget all tokens that were requested from object storage but not yet read."""
        for shards in self.train:
            if isinstance(shards, RemoteShardSet):
                shards.forget()

    def located(self, first: int, stop: int) -> Located:
        """Return which stream (data source), epoch and window each of the samples [first, stop) reads. To locate few
        samples takes almost as long as to locate many. So one call locates AHEAD samples from `first` on, and the next
        calls use its result."""
        start, at = self._ahead
        if not start <= first <= stop <= start + len(at.stream):
            start, at = first, self.order.locate(first, max(stop, min(first + AHEAD, self.order.samples)))
            self._ahead = start, at
        return Located(*(column[first - start:stop - start] for column in at))

    def heldout_rows(self, stream: int, length: int, most: int) -> list[Row]:
        """Read samples of `length` tokens from the held-out data of a stream (data source), as input of `collate`. All
        samples are read, or `most` evenly spaced ones if there are more; the last one of the data may be shorter.
        Without held-out data, the result is []. The choice depends only on the data and the arguments. Raises
        ShardError for damaged data."""
        shards, places = self.heldout[stream], self.heldout_windows(stream, length, most)
        if shards is None:
            return []
        for shard in sorted({shard for start, stop in places for shard in touched(shards, start, stop - start)}):
            refuse_short(shards, shard)
        rows: list[Row] = [(shards.read(start, stop), shards.ends(start + 1, stop) - start, stream,
                            shards.counts(start + 1, stop)) for start, stop in places]
        for (start, stop), (tokens, bounds, *_) in zip(places, rows):
            refuse_unknown(shards, start, tokens)
            refuse_unordered(shards, start, bounds, stop - start)
        return rows

    def heldout_windows(self, stream: int, length: int, most: int) -> list[tuple[int, int]]:
        """Return which held-out tokens the method `heldout_rows` reads: a range [start, stop) for each sample."""
        shards = self.heldout[stream]
        if shards is None:
            return []
        windows = -(-(shards.tokens - 1) // length)
        chosen = range(windows) if windows <= most else [i * windows // most for i in range(most)]
        return [(w * length, min(w * length + length + 1, shards.tokens)) for w in chosen]


def without_repeats(batch: Batch, windows: Sequence[np.ndarray], config: RepeatsConfig) -> Batch:
    """Return `batch` with the targets inside repetitions left out of the loss. `windows` has an array for each row of
    the batch: the input tokens of the row, followed by the last target of the row. The attribute `repeated` of
    the result is the number of targets left out."""
    if not windows:
        return batch
    left_out = torch.from_numpy(np.stack([repeated(w, config.ngram, config.times)[1:] for w in windows]))
    count = int((left_out & (batch.targets != IGNORE)).sum())
    return replace(batch, targets=batch.targets.masked_fill(left_out, IGNORE), repeated=count)


def runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the ranges of consecutive numbers: [3, 4, 5, 9] → (3, 6), (9, 10)."""
    start = 0
    for i in range(1, len(numbers) + 1):
        if i == len(numbers) or numbers[i] != numbers[i - 1] + 1:
            yield int(numbers[start]), int(numbers[i - 1]) + 1
            start = i


class Prefetch:
    """Iterates over `steps`, and yields each step with this rank's batch. A thread reads the next batch while the
    trainer computes with the current one. `skipped` is called with a step's number, from 1, and returns the reason why
    the step is skipped, or None. No data is read for a skipped step, and its batch is None."""

    def __init__(self, data: Data, steps: Iterable[TrainingStep], data_rank: int, data_size: int,
                 skipped: Callable[[int], str | None] = lambda _number: None) -> None:
        self.data, self.steps, self.skipped = data, steps, skipped
        self.data_rank, self.data_size = data_rank, data_size
        self.waited = 0.0                 # seconds spent waiting for the latest batch

    def __iter__(self) -> Iterator[tuple[TrainingStep, Batch | None]]:
        self.data.forget_requests()
        with ThreadPoolExecutor(1, thread_name_prefix="loader") as pool:
            waiting: tuple[TrainingStep, Future[Batch] | None] | None = None
            for step in self._requested(pool) if self.data.reads_ahead else self.steps:
                ahead = None if self.skipped(step.number + 1) else \
                    pool.submit(self.data.step, step.first, step.batch, self.data_rank, self.data_size)
                if waiting is not None:
                    yield waiting[0], self._take(waiting[1])
                waiting = (step, ahead)
            if waiting is not None:
                yield waiting[0], self._take(waiting[1])

    def _requested(self, pool: ThreadPoolExecutor) -> Iterator[TrainingStep]:
        """Yield the steps in order. Before a step is yielded, the tokens of its samples and of those of the next STEPS
        steps are requested from object storage."""
        requested: deque[TrainingStep] = deque()
        for step in self.steps:
            if not self.skipped(step.number + 1):
                pool.submit(self.data.request, step.first, step.batch, self.data_rank, self.data_size)
            requested.append(step)
            if len(requested) > STEPS:
                yield requested.popleft()
        yield from requested

    def _take(self, ahead: Future[Batch] | None) -> Batch | None:
        began = time.perf_counter()
        batch = ahead.result() if ahead is not None else None
        self.waited = time.perf_counter() - began
        return batch
