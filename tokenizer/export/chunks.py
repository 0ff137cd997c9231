"""Writes files of several samples in the formats of MosaicML streaming and litdata; all integers are little-endian::

    u32            number of samples, N
    (N + 1) × u32  byte of the file at which each sample begins; the last is the size of the file
    bytes          the configuration (MosaicML; none in litdata)
    bytes          the samples, back to back
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import BinaryIO, TypeVar

import numpy as np

from tokenizer.export.source import ExportError, ShardDocuments

#: smallest size of a file that offsets of u32 cannot hold
LIMIT = 1 << 32
Sample = TypeVar("Sample", bytes, memoryview, bytes | memoryview)


def pack(samples: Iterable[Sample], fixed: int, limit: int) -> Iterator[list[Sample]]:
    """Divide consecutive samples among files of at most `limit` bytes, and yield the samples of each file. A larger
    sample gets a file of its own. `fixed` is the size in bytes of a file without samples."""
    chunk: list[Sample] = []
    size = fixed
    for sample in samples:
        if chunk and size + 4 + len(sample) > limit:
            yield chunk
            chunk, size = [], fixed
        chunk.append(sample)
        size += 4 + len(sample)
    if chunk:
        yield chunk


def write_chunk(file: BinaryIO, samples: Sequence[bytes | memoryview], config: bytes = b"") -> int:
    """Write a file of samples, in the layout that the docstring of this module gives. Returns the file's size in
    bytes."""
    offsets = offsets_of([len(sample) for sample in samples], len(config))
    file.write(len(samples).to_bytes(4, "little") + offsets.astype("<u4").tobytes() + config)
    file.writelines(samples)
    return int(offsets[-1])


def offsets_of(sizes: Sequence[int], config: int) -> np.ndarray:
    """Return where each sample begins in a file, and the size of the file; int64. `sizes` are the sizes of the samples,
    and `config` is the size of the configuration, in bytes. Raises ExportError when the file is too large."""
    offsets = np.cumsum([4 + 4 * (len(sizes) + 1) + config, *sizes], dtype=np.int64)
    check_size(int(offsets[-1]), "a document")
    return offsets


def check_sizes(documents: ShardDocuments, width: int) -> None:
    """Raise ExportError when a document is too large for offsets of u32. Each token of a document takes `width`
    bytes."""
    if len(documents.tokens) * width < LIMIT:
        return
    sizes = np.diff(documents.ends, prepend=0)
    check_size(int(sizes.max()) * width, f"document {documents.ids[int(sizes.argmax())]}")


def check_size(size: int, subject: str) -> None:
    """Raise ExportError if a file of `size` bytes would be too large for offsets of u32. `subject` says in the message
    what needs so large a file, such as a document."""
    if size >= LIMIT:
        raise ExportError(f"{subject} needs a file of {size:,} bytes: this --format has files below 4 GiB; choose "
                          f"another")
