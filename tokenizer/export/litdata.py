"""The format of litdata, for its `TokensLoader`. An item is a document; all integers are little-endian::

    chunk-0-0.bin    a file of items (`tokenizer.export.chunks`), at most 64 MB unless one document is larger. An item
                     is its tokens, u8, u16 or u32, without a header
    index.json       for each file its name, size, number of items and number of tokens; and how tokens are encoded

`TokensLoader` reads the tokens of a file as if they were one document. It cuts them into blocks and drops what is left
at the end of the file. In the index, `no_header_numpy:4` means u8, `no_header_numpy:5` u16 and `no_header_numpy:6` u32;
the numbers are litdata's for NumPy's types. litdata empties its cache when `updated_at` changes. Here it is the sha256
of the shard set, so that equal sets give equal bytes.

In an export in training order, an item is the L + 1 tokens of a sample, so the blocks of
`TokensLoader(block_size=L + 1)` are the samples. Only the EOS tokens show where documents begin in a sample.
`updated_at` names the order and the range of samples.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from tokenizer.export.chunks import check_sizes, pack, write_chunk
from tokenizer.export.samples import ExportSamples
from tokenizer.export.source import ExportSource
from tokenizer.export.target import Target

#: bytes of a token → litdata's number for the NumPy type
TYPES = {1: 4, 2: 5, 4: 6}


class LitDataWriter:
    """Writes a shard set, or the samples of a training, in the format of litdata: files chunk-0-N.bin of at most
    `chunk_bytes` bytes, and index.json."""

    holds_loss = False

    def __init__(self, chunk_bytes: int = 64_000_000) -> None:
        self.chunk_bytes = chunk_bytes

    def write(self, source: ExportSource, target: Target) -> None:
        self.write_items(items(source), source.dtype.itemsize, source.manifest.sha256, target)

    def write_samples(self, samples: ExportSamples, target: Target) -> None:
        rows = (row.tobytes() for part in samples.parts for block in samples.blocks(part) for row in block.tokens)
        self.write_items(rows, samples.dtype.itemsize, samples.version, target)

    def write_items(self, contents: Iterable[bytes | memoryview], size: int, version: str, target: Target) -> None:
        """Write items (documents or samples) to files, and write index.json. `contents` are the tokens of each item as
        bytes, `size` is the number of bytes per token, and `version` becomes `updated_at` in the index."""
        chunks: list[dict[str, Any]] = []
        for chunk in pack(contents, 8, self.chunk_bytes):
            name = f"chunk-0-{len(chunks)}.bin"
            with target.create(name) as file:
                written = write_chunk(file, chunk)
            chunks.append({"chunk_bytes": written, "chunk_size": len(chunk), "dim": sum(map(len, chunk)) // size,
                           "filename": name})
        config = {"chunk_bytes": self.chunk_bytes, "chunk_size": None, "compression": None,
                  "data_format": [f"no_header_numpy:{TYPES[size]}"],
                  "data_spec": json.dumps([1, {"type": None, "context": None, "children_spec": []}]),
                  "encryption": None, "item_loader": "TokensLoader"}
        index = {"chunks": chunks, "config": config, "updated_at": version}
        target.write("index.json", [np.frombuffer(json.dumps(index, sort_keys=True).encode(), np.uint8)])


def items(source: ExportSource) -> Iterator[memoryview]:
    """Yield the tokens of each document of a shard set."""
    for number in source.numbers:
        for documents in source.documents(number):
            size = documents.tokens.itemsize
            check_sizes(documents, size)
            data, begin = documents.tokens.data.cast("B"), 0
            for end in (documents.ends * size).tolist():
                yield data[begin:end]
                begin = end
