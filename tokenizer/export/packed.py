"""Reads the packed rows (training samples of whole documents) of a shard set for an export, in the order of the set.

If the set was made by importing rows of another project, the export has the same rows in the same files. As far as the
imported files gave them, the rows keep their sample numbers, streams, epochs and windows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from tokenizer.export.samples import ExportSamples, RowPart, SampleBlock
from tokenizer.export.source import BLOCK_TOKENS, ExportError
from tokenizer.mixture.curriculum import TokenizerRef
from tokenizer.shards.layout import REMEDY, ShardError
from tokenizer.shards.reader import ShardSet
from tokenizer.shards.rows import RowOrigin


class PackedSamples(ExportSamples):
    """Reads the packed rows of a shard set for an export. A packed row is a training sample of whole documents. If the
    set was packed several times, the rows that were published last are read.

    With `drop_loss`, loss masks are ignored, so that all tokens count in the loss. After each read, `progress` is
    called with the number of bytes of tokens that were read."""

    def __init__(self, shards: ShardSet, drop_loss: bool, progress: Callable[[int], None]) -> None:
        manifest, packing = shards.manifest, shards.published_packing()
        if packing is None or not packing.rows:
            raise ExportError(f"{shards.folder}: the set has no packed rows; leave out --rows to export its documents")
        self.shards, self.progress, self.folder, self.dtype = shards, progress, shards.folder, shards.dtype
        self.packed, self.sequence = shards.packed_rows(packing.sha256), packing.longest
        self.tokenizer = TokenizerRef(manifest.tokenizer, manifest.vocab_size, manifest.eos, "")
        self.streams = self._names = [manifest.stream]     # grows while rows of other streams are read
        self._numbers = {manifest.stream: 0}               # name of a stream → its place in `streams`
        self.version = f"{packing.sha256}:0:{packing.rows}"
        rows = manifest.source.get("rows") or {}           # what an import of rows says of them
        ends = np.cumsum(rows.get("files") or [file.rows for file in packing.files if file.rows]).tolist()
        self.parts = [RowPart(number, begin, end) for number, (begin, end) in enumerate(zip([0, *ends], ends))]
        self._has_ids = bool(rows.get("ids"))
        has_padding = packing.rows * (packing.longest + 1) > sum(file.tokens for file in packing.files)
        masked = rows.get("masked", has_padding or any(info.loss for info in manifest.shards))
        self.masked = bool(masked) and not drop_loss

    def __len__(self) -> int:
        return len(self.packed)

    @property
    def tokens(self) -> int:
        return len(self) * (self.sequence + 1)

    def first_of(self, part: RowPart) -> int:
        return part.begin

    def original(self, part: RowPart, kind: str) -> Path | None:
        return None

    def blocks(self, part: RowPart) -> Iterator[SampleBlock]:
        step = max(1, BLOCK_TOKENS // (self.sequence + 1))
        for begin in range(part.begin, part.stop, step):
            yield self._block(begin, min(begin + step, part.stop))

    def _block(self, first: int, stop: int) -> SampleBlock:
        width, count = self.sequence + 1, stop - first
        tokens, targets = np.full(count * width, self.shards.eos, self.dtype), np.zeros(count * width, np.uint8)
        begins = np.zeros(count * width + 1, np.uint8)
        origins: list[RowOrigin] = []
        begin = first
        while begin < stop:                                # rows of one shard at a time
            end = min(stop, self.packed.firsts[self.packed.shard_of(begin) + 1])
            pieces, counts = self.packed.pieces(begin, end)
            rows = np.repeat(np.arange(begin - first, end - first), counts)
            sizes = pieces[:, 1] - pieces[:, 0]
            before = np.cumsum(sizes) - sizes
            firsts = np.cumsum(counts) - counts
            places = rows * width + before - np.repeat(before[firsts], counts)      # where its first token goes
            low, high = int(pieces[:, 0].min()), int(pieces[:, 1].max())
            inside = np.arange(int(sizes.sum())) - np.repeat(before, sizes)
            chosen, into = np.repeat(pieces[:, 0] - low, sizes) + inside, np.repeat(places, sizes) + inside
            tokens[into] = self.shards.read(low, high)[chosen]
            flags = self.shards.counts(low, high)
            targets[into] = 1 if flags is None else flags[chosen]
            begins[places] = begins[places + sizes] = 1
            origins += self._origins(pieces[firsts, 0], begin)
            begin = end
        self._check(tokens)
        self.progress(tokens.nbytes)
        return SampleBlock(first, tokens.reshape(-1, width), begins[:-1].reshape(-1, width)[:, 1:],
                           targets.reshape(-1, width)[:, 1:] if self.masked else None,
                           np.array([self._stream(origin.stream) for origin in origins]),
                           np.array([origin.epoch or 0 for origin in origins], np.uint32),
                           np.array([origin.window or 0 for origin in origins], np.uint64),
                           np.array([origin.sample for origin in origins], np.uint64))

    def _origins(self, starts: np.ndarray, first: int) -> list[RowOrigin]:
        """Return the origin of each of some rows of one shard: sample number, stream, epoch and window. An imported row
        has the origin that its file gave it. Any other row has its own number as sample and window, the stream of the
        set, and epoch 0.

        The rows are numbered from `first` on. `starts` has the first token of each row, counted over all shards."""
        rows = range(first, first + len(starts))
        ids = [span.id for span in self.shards.documents_at(starts.tolist())] if self._has_ids else [""] * len(rows)
        return [RowOrigin.of_id(id) or RowOrigin(row, self.streams[0], 0, row) for id, row in zip(ids, rows)]

    def _stream(self, name: str) -> int:
        if name not in self._numbers:
            self._numbers[name] = len(self._names)
            self._names.append(name)
        return self._numbers[name]

    def _check(self, tokens: np.ndarray) -> None:
        """Raise ShardError when a token is outside the vocabulary."""
        if int(tokens.max()) >= self.tokenizer.vocab_size:
            raise ShardError(f"{self.folder}: token id {int(tokens.max())} is outside the vocabulary of "
                             f"{self.tokenizer.vocab_size}: {REMEDY}")
