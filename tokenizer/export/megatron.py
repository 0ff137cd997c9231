"""The format of Megatron-LM (IndexedDataset). Each shard is a pair of files; all integers are little-endian::

    shard_00000.bin    u8, u16 or i32 per token, documents back to back; the bytes of the shard's body
    shard_00000.idx    9 bytes  "MMIDIDX" and two zeros
                       u64      version, 1
                       u8       code of the tokens' type: 1 for u8, 8 for u16, 4 for i32
                       u64      number of sequences, N; each document is one sequence
                       u64      N + 1, the number of the indices at the end of the file
                       N × i32  tokens of each sequence
                       N × i64  byte of the .bin file at which each sequence begins
                       (N + 1) × i64  the first sequence of each document, then N: 0 to N

Tokens of four bytes are signed, so ids from 2**31 on are refused; smaller ids have the same bytes as in u32. Megatron
itself writes u16 for vocabularies below 65,500, but reads any type that the code names. A path for `--data-path` is
that of a pair without `.bin`. The names are not plain numbers, because `--data-path` would take a number for a weight.

In an export in training order, the L + 1 tokens of a sample are one sequence and one document. So the elements of
Megatron's IndexedDataset are the samples of a file, in their order. Files are numbered from 0. Only the EOS tokens show
where documents begin in a sample. A training keeps the order only if it reads IndexedDataset directly, because
Megatron's GPTDataset shuffles the sequences.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tokenizer.export.samples import ExportSamples
from tokenizer.export.source import ExportError, ExportSource
from tokenizer.export.target import Target

MAGIC = b"MMIDIDX\x00\x00"
CODES = {1: 1, 2: 8, 4: 4}
#: first number that an i32 cannot hold
LIMIT = 1 << 31


class MegatronWriter:
    """Writes a shard set, or the samples of a training, in the format of Megatron-LM, as pairs of a .bin and an .idx
    file. Where an existing file has the same bytes, the .bin file is a hard link to it, if possible."""

    holds_loss = False

    def write(self, source: ExportSource, target: Target) -> None:
        check_vocab(source.manifest.vocab_size, source.shards.folder)
        for number in source.numbers:
            info = source.info(number)
            with target.create(f"shard_{info.index:05d}.idx") as file:
                size, documents = source.dtype.itemsize, info.documents
                file.write(head(size, documents))
                for begins, ends in spans(source, number):
                    file.write(lengths(begins, ends, info.body).data)
                for begins, _ in spans(source, number):
                    file.write((begins * size).astype("<i8").data)
                for numbers in indices(documents):
                    file.write(numbers.data)
            target.share(f"shard_{info.index:05d}.bin", source.shards.folder / info.body, source.tokens(number))

    def write_samples(self, samples: ExportSamples, target: Target) -> None:
        check_vocab(samples.tokenizer.vocab_size, samples.folder)
        width, size = samples.sequence + 1, samples.dtype.itemsize
        for number, part in enumerate(samples.parts):
            count = part.stop - part.begin
            with target.create(f"shard_{number:05d}.idx") as file:
                file.write(head(size, count))
                file.write(np.full(count, width, "<i4").data)
                file.write((np.arange(count, dtype="<i8") * (width * size)).data)
                for numbers in indices(count):
                    file.write(numbers.data)
            target.share(f"shard_{number:05d}.bin", samples.original(part, "tokens"),
                         (block.tokens for block in samples.blocks(part)))


def check_vocab(vocab_size: int, folder: Path) -> None:
    """Raise ExportError when a vocabulary has ids that signed tokens of four bytes cannot hold."""
    if vocab_size > LIMIT:
        raise ExportError(f"{folder}: vocab_size {vocab_size:,}: --format megatron has i32 tokens, which hold ids "
                          f"below {LIMIT:,}; choose another format")


def head(size: int, documents: int) -> bytes:
    """Return the header of an .idx file, for tokens of `size` bytes and documents of one sequence each."""
    return MAGIC + struct.pack("<QBQQ", 1, CODES[size], documents, documents + 1)


def indices(documents: int) -> Iterator[np.ndarray]:
    """Yield the last table of an .idx file, block by block: the number of the first sequence of each document, then the
    number of documents. Each document is one sequence, so these are the numbers from 0 to `documents`."""
    for first in range(0, documents + 1, 1 << 20):
        yield np.arange(first, min(first + (1 << 20), documents + 1), dtype="<i8")


def spans(source: ExportSource, number: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield (first tokens, exclusive ends) of the documents of a shard, block by block, int64."""
    begin = 0
    for ends in source.ends(number):
        yield np.concatenate(([begin], ends[:-1])), ends
        begin = int(ends[-1])


def lengths(begins: np.ndarray, ends: np.ndarray, file: str) -> np.ndarray:
    """Return how many tokens each document has, i32. Raises ExportError, which names the shard's `file`, when a
    document has more tokens than i32 can hold."""
    sizes: np.ndarray = ends - begins
    if (longest := int(sizes.max())) >= LIMIT:
        raise ExportError(f"{file}: a document has {longest:,} tokens: --format megatron holds documents of fewer than "
                          f"{LIMIT:,}; choose another format")
    return sizes.astype("<i4")
