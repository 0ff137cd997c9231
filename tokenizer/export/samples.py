"""Reads training samples for an export. `ExportSamples` is the interface that the writers of all formats use.

This module reads the samples of a training in their order, from the rows that `tokenmill materialize` has written.
Every file of rows is compared with its sha256 before it is read. `tokenizer.export.packed` reads the packed rows of a
shard set instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from tokenizer.export.source import BLOCK_TOKENS, ExportError
from tokenizer.mixture.curriculum import Curriculum, TokenizerRef
from tokenizer.shards.layout import ShardError
from tokenizer.shards.rows import RowSet

REMEDY = "run `tokenmill materialize` with this run again"


class SampleBlock(NamedTuple):
    """Consecutive samples of a training, each of L + 1 tokens."""

    first: int                    # place of the first of them in the rows that are read
    tokens: np.ndarray            # (samples, L + 1)
    bounds: np.ndarray            # (samples, L) u8: element p - 1 is 1 where a document begins at position p
    targets: np.ndarray | None    # (samples, L) u8: element p - 1 is 1 if the token at p counts in the loss
    streams: np.ndarray           # (samples,) number of the stream of each sample
    epochs: np.ndarray
    windows: np.ndarray
    numbers: np.ndarray           # number of each sample in its training

    def pieces(self, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the pieces of documents in the first `width` tokens of each sample, as (number of the piece's sample
        in the block, exclusive end of the piece), int64. Ends are counted as if the samples of `width` tokens were back
        to back. The end of a sample always ends a piece."""
        ends = np.ones((len(self.tokens), width), np.uint8)
        ends[:, :-1] = self.bounds[:, :width - 1]
        flat = np.flatnonzero(ends)
        return flat // width, flat + 1


class RowPart(NamedTuple):
    """Consecutive samples of an export that come from one file: a file of materialised rows, or a file from which
    packed rows were imported."""

    file: int                     # number of the file
    begin: int                    # rows [begin, stop) of the file, or, for packed rows, of the whole set
    stop: int


class ExportSamples(Protocol):
    """The training samples that an export writes, whatever they are read from. All samples have L = `sequence`
    targets."""

    folder: Path                  # for error messages
    tokenizer: TokenizerRef
    dtype: np.dtype
    sequence: int
    streams: Sequence[str]        # names of the streams that `SampleBlock.streams` refers to; it may grow while reading
    parts: Sequence[RowPart]      # each becomes a file, if the format has files of its own for them
    masked: bool                  # whether samples have loss masks
    version: str                  # identifies the samples and their order

    def __len__(self) -> int: ...

    @property
    def tokens(self) -> int:
        """How many tokens an export reads: L + 1 of each sample."""

    def first_of(self, part: RowPart) -> int:
        """Return the number of the first sample of a part (samples that come from one file). It is the number that
        `SampleBlock.first` has for this sample."""

    def original(self, part: RowPart, kind: str) -> Path | None:
        """Return the path of an existing file that holds exactly the samples of `part`. `kind` says which of a sample's
        data the file holds, for instance tokens. Returns None if there is no such file."""

    def blocks(self, part: RowPart) -> Iterator[SampleBlock]:
        """Yield the samples of a part (samples that come from one file), about BLOCK_TOKENS tokens at a time."""


class TrainingSamples(ExportSamples):
    """Reads samples [first, stop) of a training for an export, from its materialised rows; all have L = `sequence`
    targets. With `drop_loss`, their loss masks are ignored. `progress` is called after each read, with the number of
    bytes of tokens that were read."""

    def __init__(self, rows: RowSet, curriculum: Curriculum, first: int, stop: int, drop_loss: bool,
                 progress: Callable[[int], None]) -> None:
        self.rows, self.tokenizer, self.progress = rows, curriculum.tokenizer, progress
        self.first, self.stop, self.dtype = first, stop, rows.dtype
        self.streams, self.folder = rows.manifest.streams, rows.folder
        self.version = f"{rows.manifest.order}:{first}:{stop}"
        self._reported = first                    # samples before this one were reported as read
        if rows.manifest.order != curriculum.order:
            raise ShardError(f"{rows.folder}: the rows are those of another curriculum than the run has now; {REMEDY}")
        if not 0 <= first < stop <= len(rows):
            raise ExportError(f"--samples {first}:{stop}: the run has samples 0 to {len(rows):,}; choose a range of "
                              f"them")
        files = rows.manifest.files
        self.parts = [RowPart(number, max(first - file.first, 0), min(stop - file.first, file.rows))
                      for number, file in enumerate(files) if file.first < stop and first < file.first + file.rows]
        lengths = {files[part.file].sequence: curriculum.phases[files[part.file].phase].name for part in self.parts}
        if len(lengths) > 1:
            names = ", ".join(f"{length:,} in phase {name}" for length, name in sorted(lengths.items()))
            raise ExportError(f"{rows.folder}: the samples have different lengths ({names}), but the rows of an export "
                              f"have one; choose samples of one length with --phase or --samples")
        [self.sequence] = lengths
        self.masked = not drop_loss and any("loss" in files[part.file].files for part in self.parts)

    def __len__(self) -> int:
        return self.stop - self.first

    @property
    def tokens(self) -> int:
        """How many tokens an export reads: L + 1 of each sample."""
        return len(self) * (self.sequence + 1)

    def first_of(self, part: RowPart) -> int:
        """Return the number of the first sample of a part (samples that come from one file)."""
        return self.rows.manifest.files[part.file].first + part.begin

    def original(self, part: RowPart, kind: str) -> Path | None:
        """Return the path of the materialised file of a `kind` (such as tokens) that has exactly the samples of `part`.
        Returns None if the file has other samples, too, or if there is no file of this kind."""
        file = self.rows.manifest.files[part.file]
        whole = (part.begin, part.stop) == (0, file.rows)
        return self.rows.folder / file.files[kind] if whole and kind in file.files else None

    def blocks(self, part: RowPart) -> Iterator[SampleBlock]:
        """Yield the samples of a part (samples that come from one file), about BLOCK_TOKENS tokens at a time."""
        maps, length = self.rows.maps(part.file), self.sequence
        file, step = self.rows.manifest.files[part.file], max(1, BLOCK_TOKENS // (length + 1))
        for begin in range(part.begin, part.stop, step):
            rows = slice(begin, min(begin + step, part.stop))
            tokens, origin = np.asarray(maps["tokens"][rows]), maps["origin"][rows]
            if int(tokens.max()) >= self.tokenizer.vocab_size:
                raise ShardError(f"{self.rows.folder / file.files['tokens']}: token id {int(tokens.max())} is outside "
                                 f"the vocabulary of {self.tokenizer.vocab_size}; {REMEDY}")
            targets = None
            if self.masked:
                targets = unpacked(maps["loss"][rows], length) if "loss" in maps else \
                    np.ones((len(tokens), length), np.uint8)
            yield SampleBlock(file.first + begin, tokens, unpacked(maps["bounds"][rows], length), targets,
                              origin["stream"], origin["epoch"], origin["window"],
                              np.arange(file.first + begin, file.first + rows.stop))
            if (done := file.first + rows.stop) > self._reported:                # a format may read samples twice
                self.progress((done - self._reported) * tokens[0].nbytes)
                self._reported = done


def unpacked(bits: np.ndarray, length: int) -> np.ndarray:
    """Unpack the bits in a file `bounds` or `loss` of materialised rows (samples of a training, written to files) into
    flags, u8 (rows, `length`)."""
    return np.unpackbits(bits, axis=1, count=length, bitorder="little")


def each_token(targets: np.ndarray, width: int) -> np.ndarray:
    """Return a flag for each of the first `width` tokens of samples: whether the token counts in the loss, u8 (samples,
    `width`). `targets` has the flags of tokens 1 to L. The flag of token 0, which is not a target, is 1; no reader uses
    it."""
    flags = np.ones((len(targets), width), np.uint8)
    flags[:, 1:] = targets[:, :width - 1]
    return flags
