"""Parquet files, a row per document, for Hugging Face's datasets and other readers of Parquet. Each shard is one file::

    train-00000-of-00008.parquet    id         string      id of the document
                                    input_ids  list<u16>   its tokens, EOS included; list<u8> for vocabularies of up
                                                           to 256 tokens, list<u32> for those of more than 65,536
                                    loss       list<bool>  whether each of them is a target; only if the set has masks

The name is that of the split (train or val), from which datasets derives its split. Pages are compressed with zstd. A
row group has about four million tokens, but at most 65,536 documents.

In an export in training order, a row has all L + 1 tokens of a sample. The files have the same names, and the columns
of `tokenizer.shards.rows`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from pipeline.base.parquet import parquet_writer
from tokenizer.export.samples import ExportSamples, SampleBlock
from tokenizer.export.source import ExportError, ExportSource
from tokenizer.export.target import Target
from tokenizer.shards.rows import parquet_schema


class ParquetWriter:
    """Writes a shard set as Parquet files with a row per document, or the samples of a training with a row per
    sample."""

    holds_loss = True

    def write(self, source: ExportSource, target: Target) -> None:
        schema = pa.schema([("id", pa.string()), ("input_ids", pa.list_(pa.from_numpy_dtype(source.dtype))),
                            *([("loss", pa.list_(pa.bool_()))] if source.masked else [])])
        # a shard without documents has no file, but its number stays free
        count = source.info(source.numbers[-1]).index + 1
        for number in source.numbers:
            name = f"{source.manifest.split}-{source.info(number).index:05d}-of-{count:05d}.parquet"
            with target.create(name) as file, parquet_writer(file, schema, use_dictionary=False) as writer:
                for documents in source.documents(number):
                    offsets = offsets_of(documents.ids, documents.ends)
                    columns = [pa.array(documents.ids, pa.string()),
                               pa.ListArray.from_arrays(offsets, pa.array(documents.tokens))]
                    if documents.targets is not None:
                        columns.append(pa.ListArray.from_arrays(offsets, pa.array(documents.targets.view(bool))))
                    writer.write_batch(pa.record_batch(columns, schema=schema))

    def write_samples(self, samples: ExportSamples, target: Target) -> None:
        schema = parquet_schema(samples.dtype, samples.masked)
        for number, part in enumerate(samples.parts):
            name = f"train-{number:05d}-of-{len(samples.parts):05d}.parquet"
            with target.create(name) as file, parquet_writer(file, schema, use_dictionary=["stream"]) as writer:
                for block in samples.blocks(part):
                    writer.write_batch(pa.record_batch(columns_of(block, samples.streams), schema=schema))


def columns_of(block: SampleBlock, streams: Sequence[str]) -> list[pa.Array]:
    """Return a block of samples as the columns of a Parquet file. The columns are those of
    `tokenizer.shards.rows.parquet_schema`."""
    count, width = block.tokens.shape
    rows, positions = np.nonzero(block.bounds)
    columns = [pa.array(block.numbers.astype(np.uint64)),
               pa.array([streams[stream] for stream in block.streams.tolist()], pa.string()),
               pa.array(block.epochs), pa.array(block.windows),
               pa.ListArray.from_arrays(pa.array(np.arange(count + 1, dtype=np.int32) * width),
                                        pa.array(block.tokens.ravel())),
               pa.ListArray.from_arrays(pa.array(np.searchsorted(rows, np.arange(count + 1)).astype(np.int32)),
                                        pa.array((positions + 1).astype(np.uint32)))]
    if block.targets is not None:
        columns.append(pa.array([None if flags.all() else flags.view(bool) for flags in block.targets],
                                pa.list_(pa.bool_())))
    return columns


def offsets_of(ids: list[str], ends: np.ndarray) -> pa.Array:
    """Convert the exclusive ends of documents to the offsets of an Arrow list array with a list per document, i32.
    Raises ExportError when an end is too large for i32."""
    if int(ends[-1]) >= 1 << 31:
        raise ExportError(f"document {ids[-1]} has {int(ends[-1]):,} tokens: --format parquet holds documents of fewer "
                          f"than {1 << 31:,}; choose another format")
    return pa.array(np.concatenate(([0], ends)).astype(np.int32))
