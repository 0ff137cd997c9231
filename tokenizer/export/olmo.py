"""The format of OLMo-core and dolma. Each shard is these files; all integers are little-endian::

    part-0-00000.npy           u8, u16 or u32 per token, documents back to back, without the header of NumPy; the bytes
                               of the shard's body
    part-0-00000.csv.gz        a line START,END,ID,SRC,LOC per document: its tokens [START, END) in the file, its id,
                               the stream, and its number in the shard set from 1; no header line
    labels_mask-0-00000.npy    u8 per token: 1 if the token is a target, else 0; only if the set has loss masks

A file does not say how wide its tokens are. OLMo-core reads the smallest of u8, u16 and u32 that holds the vocabulary
of its settings, so a vocabulary of at most 256 tokens is written as u8. The masks are for OLMo-core's setting
`label_mask_paths`, which wants as many files as `paths`, in the same order; their names do not match `part-*.npy`.
OLMo-core reads the first two columns of a line. dolma has the path of a source file as SRC and a line in it as LOC.

In an export in training order, the first L tokens of each sample are back to back, because OLMo-core cuts instances of
L tokens without overlap. An instance of L tokens has L - 1 targets, so the last target of each sample is lost. A line
of the .csv.gz file stands for a piece of a document inside one sample. ID is the number of the sample, and SRC its
stream. LOC is the number of the window that the sample reads: the stream is divided into windows of L tokens. Files are
numbered from 0.
"""

from __future__ import annotations

import csv
import gzip
import io
from typing import BinaryIO

import numpy as np

from tokenizer.export.samples import ExportSamples, each_token
from tokenizer.export.source import ExportSource
from tokenizer.export.target import Target


class OlmoWriter:
    """Writes a shard set, or the samples of a training, in the format of OLMo-core and dolma. Tokens go to raw .npy
    files; where an existing file has the same bytes, the .npy file is a hard link to it, if possible. The documents in
    a file are listed in a .csv.gz file."""

    holds_loss = True

    def write(self, source: ExportSource, target: Target) -> None:
        folder, narrow = source.shards.folder, source.manifest.vocab_size <= 1 << 8
        for number in source.numbers:
            info = source.info(number)
            self.write_documents(source, number, target)
            if narrow and source.dtype.itemsize > 1:        # an older Tokenmill wrote such sets
                target.write(f"part-0-{info.index:05d}.npy", (t.astype(np.uint8) for t in source.tokens(number)))
            else:
                target.share(f"part-0-{info.index:05d}.npy", folder / info.body, source.tokens(number))
            mask = f"labels_mask-0-{info.index:05d}.npy"
            if source.masked and info.loss:
                target.share(mask, folder / info.loss, source.targets(number))
            elif source.masked:
                target.write(mask, source.targets(number))

    def write_documents(self, source: ExportSource, number: int, target: Target) -> None:
        place = 1 + sum(info.documents for info in source.manifest.shards[:number])
        with target.create(f"part-0-{source.info(number).index:05d}.csv.gz") as file, gzipped(file) as packed:
            begin = 0
            for table in source.rows(number):
                lines = io.StringIO()
                writer = csv.writer(lines, lineterminator="\n")
                for id, end in zip(table.ids, table.ends.tolist()):
                    writer.writerow((begin, end, id, source.manifest.stream, place))
                    begin, place = end, place + 1
                packed.write(lines.getvalue().encode())

    def write_samples(self, samples: ExportSamples, target: Target) -> None:
        length, narrow = samples.sequence, samples.tokenizer.vocab_size <= 1 << 8
        for number, part in enumerate(samples.parts):
            with target.create(f"part-0-{number:05d}.npy") as body, \
                    target.create(f"part-0-{number:05d}.csv.gz") as file, gzipped(file) as packed:
                begin = 0
                for block in samples.blocks(part):
                    tokens = block.tokens[:, :length]
                    body.write(np.ascontiguousarray(tokens, np.uint8 if narrow else samples.dtype).data)
                    rows, ends = block.pieces(length)
                    ends += (block.first - samples.first_of(part)) * length
                    lines = []
                    for row, end in zip(rows.tolist(), ends.tolist()):
                        stream = samples.streams[int(block.streams[row])]
                        lines.append(f"{begin},{end},{int(block.numbers[row])},{stream},{int(block.windows[row])}\n")
                        begin = end
                    packed.write("".join(lines).encode())
            if samples.masked:
                target.write(f"labels_mask-0-{number:05d}.npy", (
                    each_token(block.targets, length) for block in samples.blocks(part) if block.targets is not None))


def gzipped(file: BinaryIO) -> gzip.GzipFile:
    """Open a file for writing gzip-compressed data. Its header has no time and no name, so equal data give equal
    bytes."""
    return gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0)
