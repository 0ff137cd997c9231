"""The format of MosaicML streaming (MDS). In an export of documents, an MDS sample is a document; all integers are
little-endian::

    shard.00000.mds    a file of samples (`tokenizer.export.chunks`), at most 64 MiB unless one document is larger. Its
                       configuration is JSON with sorted keys: version 2, format, compression, hashes, size_limit, and
                       the names, encodings and sizes of the columns
    index.json         version 2 and, for each file, its configuration, its name, its size and its number of samples

    sample             u32 for each column, its size in bytes, then the columns:
                       id      the document's id, UTF-8
                       loss    ndarray:uint8, 1 if the token is a target, else 0; only if the set has loss masks
                       tokens  ndarray:uint8, :uint16 or :uint32, EOS included
    ndarray            u8, 4 × number of dimensions (1) + k; the length as u8 (k = 0), u16 (1) or u32 (2); the values

The columns are in the order of their names. Sizes are null in the configuration, because documents differ in length.

In an export in training order, an MDS sample is a training sample instead, with these columns:

    ends    ndarray:uint32, the exclusive end of each piece of a document in the sample. The last end is always L + 1,
            so the array is never empty: MosaicML allows no empty arrays
    loss    ndarray:uint8:L, whether each of the tokens 1 to L counts in the loss; only if the set has loss masks
    sample  uint64, the number of the sample in the training
    stream  str
    tokens  ndarray:uint8:N, ndarray:uint16:N or ndarray:uint32:N, where N = L + 1

A column of fixed size (loss, sample, tokens) consists of its values alone. Its size is in the configuration and not in
the sample.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tokenizer.export.chunks import check_sizes, pack, write_chunk
from tokenizer.export.samples import ExportSamples
from tokenizer.export.source import ExportSource
from tokenizer.export.target import Target


class MdsWriter:
    """Writes a shard set, or the samples of a training, in the format of MosaicML streaming: .mds files of at most
    `size_limit` bytes, and index.json."""

    holds_loss = True

    def __init__(self, size_limit: int = 1 << 26) -> None:
        self.size_limit = size_limit

    def write(self, source: ExportSource, target: Target) -> None:
        loss = {"loss": "ndarray:uint8"} if source.masked else {}
        columns = {"id": "str", **loss, "tokens": f"ndarray:{source.dtype.name}"}
        self.write_files(documents(source), columns, [None] * len(columns), target)

    def write_samples(self, samples: ExportSamples, target: Target) -> None:
        length = samples.sequence
        loss = {"loss": (f"ndarray:uint8:{length}", length)} if samples.masked else {}
        columns: dict[str, tuple[str, int | None]] = {
            "ends": ("ndarray:uint32", None), **loss,
            "sample": ("uint64", 8), "stream": ("str", None),
            "tokens": (f"ndarray:{samples.dtype.name}:{length + 1}", (length + 1) * samples.dtype.itemsize)}
        self.write_files(windows(samples), {name: encoding for name, (encoding, _) in columns.items()},
                         [size for _, size in columns.values()], target)

    def write_files(self, contents: Iterable[bytes], columns: Mapping[str, str], sizes: Sequence[int | None],
                    target: Target) -> None:
        """Write the encoded samples `contents` to files, and write the index. `columns` maps each column to its
        encoding. `sizes` has the size of each column in bytes, or None if the size differs between samples."""
        config = {"version": 2, "format": "mds", "compression": None, "hashes": [], "size_limit": self.size_limit,
                  "column_names": list(columns), "column_encodings": list(columns.values()),
                  "column_sizes": list(sizes)}
        head = json.dumps(config, sort_keys=True).encode()
        shards: list[dict[str, Any]] = []
        for chunk in pack(contents, 8 + len(head), self.size_limit):
            name = f"shard.{len(shards):05d}.mds"
            with target.create(name) as file:
                size = write_chunk(file, chunk, head)
            shards.append({"samples": len(chunk), "raw_data": {"basename": name, "bytes": size, "hashes": {}},
                           "zip_data": None, **config})
        index = json.dumps({"version": 2, "shards": shards}, sort_keys=True).encode()
        target.write("index.json", [np.frombuffer(index, np.uint8)])


def windows(samples: ExportSamples) -> Iterator[bytes]:
    """Yield each sample of a training as the bytes of an MDS sample."""
    for part in samples.parts:
        for block in samples.blocks(part):
            names = [name.encode() for name in samples.streams]
            origins = zip(block.streams.tolist(), block.numbers.tolist())
            for row, (tokens, bounds, (stream, number)) in enumerate(zip(block.tokens, block.bounds, origins)):
                ends = ndarray(np.append(np.flatnonzero(bounds) + 1, len(tokens)).astype("<u4"))
                loss = b"" if block.targets is None else block.targets[row].tobytes()
                yield b"".join((len(ends).to_bytes(4, "little"), len(names[stream]).to_bytes(4, "little"), ends, loss,
                                number.to_bytes(8, "little"), names[stream], tokens.tobytes()))


def documents(source: ExportSource) -> Iterator[bytes]:
    """Yield each document of a shard set as the bytes of an MDS sample."""
    for number in source.numbers:
        for block in source.documents(number):
            arrays = [block.tokens] if block.targets is None else [block.targets, block.tokens]
            width, views = sum(array.itemsize for array in arrays), [bytes_of(array) for array in arrays]
            check_sizes(block, width)
            sizes_of = struct.Struct(f"<{1 + len(arrays)}I").pack
            begin = 0
            for id, end in zip(block.ids, block.ends.tolist()):
                name, head = id.encode(), ndarray_head(end - begin)
                parts = [view[begin * size:end * size] for view, size in views]
                sizes = [len(head) + len(part) for part in parts]
                yield b"".join([sizes_of(len(name), *sizes), name, *(data for part in parts for data in (head, part))])
                begin = end


def bytes_of(array: np.ndarray) -> tuple[memoryview, int]:
    """Return (the bytes of an array, the number of bytes of one of its values)."""
    return np.ascontiguousarray(array).data.cast("B"), array.itemsize


def ndarray_head(size: int) -> bytes:
    """Return the bytes that MDS puts before the values of an array of one dimension with `size` values. They do not
    contain the dtype, which is in the configuration of the file."""
    code = 0 if size < 1 << 8 else 1 if size < 1 << 16 else 2
    return bytes((1 << 2 | code,)) + size.to_bytes(1 << code, "little")


def ndarray(values: np.ndarray) -> bytes:
    """Return an array of one dimension as MDS stores it in a column `ndarray`."""
    return ndarray_head(len(values)) + values.tobytes()
