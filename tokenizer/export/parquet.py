"""Parquet files, a row per document, for Hugging Face's datasets and other readers of Parquet. Each shard is one file::

    train-00000-of-00008.parquet    id         string      id of the document
                                    input_ids  list<u16>   its tokens, EOS included; list<u32> for large vocabularies
                                    loss       list<bool>  whether each of them is a target; only if the set has masks

The name is that of the split (train or val), from which datasets derives its split. Pages are compressed with zstd. A
row group has about four million tokens, or 65,536 documents if these have fewer.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from pipeline.base.parquet import parquet_writer
from tokenizer.export.source import ExportError, Source
from tokenizer.export.target import Target


class ParquetWriter:
    """Writes Parquet files with a row per document."""

    holds_loss = True

    def write(self, source: Source, target: Target) -> None:
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


def offsets_of(ids: list[str], ends: np.ndarray) -> pa.Array:
    """Return the offsets of an Arrow array of lists, which are i32, from the ends of documents. Raises ExportError for
    a document that is too long for them."""
    if int(ends[-1]) >= 1 << 31:
        raise ExportError(f"document {ids[-1]} has {int(ends[-1]):,} tokens: --format parquet holds documents of fewer "
                          f"than {1 << 31:,}; choose another format")
    return pa.array(np.concatenate(([0], ends)).astype(np.int32))
