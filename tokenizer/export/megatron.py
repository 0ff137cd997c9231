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
chooses u16 for vocabularies below 65,500 when it writes, but obeys the code when it reads. A path for `--data-path` is
that of a pair without `.bin`. The names are not plain numbers, because `--data-path` would take a number for a weight.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np

from tokenizer.export.source import ExportError, Source
from tokenizer.export.target import Target

MAGIC = b"MMIDIDX\x00\x00"
CODES = {1: 1, 2: 8, 4: 4}
#: first number that an i32 cannot hold
LIMIT = 1 << 31


class MegatronWriter:
    """Writes .bin and .idx files; .bin files as hard links where possible."""

    holds_loss = False

    def write(self, source: Source, target: Target) -> None:
        if source.manifest.vocab_size > LIMIT:
            raise ExportError(f"{source.shards.folder}: vocab_size {source.manifest.vocab_size:,}: --format megatron "
                              f"has i32 tokens, which hold ids below {LIMIT:,}; choose another format")
        for number in source.numbers:
            info = source.info(number)
            with target.create(f"shard_{info.index:05d}.idx") as file:
                size, documents = source.dtype.itemsize, info.documents
                file.write(MAGIC + struct.pack("<QBQQ", 1, CODES[size], documents, documents + 1))
                for begins, ends in spans(source, number):
                    file.write(lengths(begins, ends, info.body).data)
                for begins, _ in spans(source, number):
                    file.write((begins * size).astype("<i8").data)
                for first in range(0, documents + 1, 1 << 20):
                    file.write(np.arange(first, min(first + (1 << 20), documents + 1), dtype="<i8").data)
            target.share(f"shard_{info.index:05d}.bin", source.shards.folder / info.body, source.tokens(number))


def spans(source: Source, number: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield (first tokens, exclusive ends) of the documents of a shard, block by block, int64."""
    begin = 0
    for ends in source.ends(number):
        yield np.concatenate(([begin], ends[:-1])), ends
        begin = int(ends[-1])


def lengths(begins: np.ndarray, ends: np.ndarray, file: str) -> np.ndarray:
    """Return the tokens of each document as i32. Raises ExportError for a document that is too long for it; the error
    names the shard's `file`."""
    sizes: np.ndarray = ends - begins
    if (longest := int(sizes.max())) >= LIMIT:
        raise ExportError(f"{file}: a document has {longest:,} tokens: --format megatron holds documents of fewer than "
                          f"{LIMIT:,}; choose another format")
    return sizes.astype("<i4")
