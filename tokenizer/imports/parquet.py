"""Reads Parquet files with a row per document; `tokenizer.export.parquet` gives their columns.

`input_ids` may be lists of any integers. The columns `id` (string) and `loss` (lists of bool, or of integers 0 and 1)
may be missing. All other columns are ignored, and so is an `id` that is not a string. Either all files have the column
`loss` or none.

With `ImportSource.sequence`, each row of the table is a training sample, which may hold parts of several documents. Its
columns are those of `tokenizer.shards.rows`. All but `input_ids` may be missing. Without `ends`, each EOS ends a
document.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.base.parquet import open_parquet
from pipeline.base.process import limited_memory
from tokenizer.imports.documents import ImportedDocuments, row_pieces
from tokenizer.imports.rows import piece_ids
from tokenizer.imports.source import AGAIN, ImportLimits, ImportSource, TokenFile, TokenFileError
from tokenizer.shards.rows import RowOrigin

#: columns that say, together with `stream`, where a training read a row
NUMBERS = ("sample", "epoch", "window")
Lists: TypeAlias = "pa.ListArray | pa.LargeListArray"


class ParquetReader:
    """Reads Parquet files, in the order of their names."""

    continues = False
    keeps_rows = True

    def files(self, source: ImportSource) -> list[str]:
        return source.files(".parquet")

    def beside(self, source: ImportSource, name: str) -> list[str]:
        return []

    def documents(self, source: ImportSource, names: list[str]) -> Iterator[ImportedDocuments]:
        masked: dict[bool, str] = {}              # whether files have loss masks → the first of them
        for name in names:
            with source.open(name) as file:
                row = 0
                try:
                    with open_parquet(file.file) as table:
                        columns = (row_columns if source.sequence else columns_of)(file, table.schema_arrow)
                        masked.setdefault("loss" in columns, name)
                        if len(masked) > 1:
                            raise TokenFileError(f"{source.folder / masked[False]}: has no column loss, unlike "
                                                 f"{masked[True]}; add it, or remove it from all files if all tokens "
                                                 f"count in the loss")
                        rows = batches(table, columns, source.limits)
                        while True:
                            with limited_memory(source.limits.memory):     # ends before the caller gets the documents
                                if (batch := next(rows, None)) is None:
                                    break
                                documents = (rows_in if source.sequence else documents_of)(source, file, name, row,
                                                                                           batch)
                            yield documents
                            before, row = row, row + len(batch)
                            total = max(table.metadata.num_rows, 1)
                            source.progress(file.size * row // total - file.size * before // total)
                except MemoryError as e:
                    raise TokenFileError(f"{file.path}: rows from {row:,} on: take more than "
                                         f"{source.limits.memory >> 20:,} MiB of memory; write rows of fewer tokens, "
                                         f"or row groups of fewer rows") from e
                except (pa.ArrowException, OSError, ValueError) as e:
                    if isinstance(e, TokenFileError):
                        raise
                    raise TokenFileError(f"{file.path}: row {row:,}: cannot be read ({' '.join(str(e).split())}): "
                                         f"{AGAIN}") from e


def columns_of(file: TokenFile, schema: pa.Schema) -> list[str]:
    """Return the columns to read from a file with a row per document: `input_ids`, and `loss` and `id` if they exist.
    An `id` that is not a string is left out. Raises TokenFileError when `input_ids` is missing, when `input_ids` or
    `loss` has a wrong type, or when two columns have the same name."""
    if "input_ids" not in schema.names:
        raise TokenFileError(f"{file.path}: has no column input_ids, but {', '.join(schema.names)}; rename that of the "
                             f"tokens")
    if len(set(schema.names)) < len(schema.names):
        raise TokenFileError(f"{file.path}: has two columns of one name; rename one of them")
    columns = ["input_ids", *(["loss"] if "loss" in schema.names else []),
               *(["id"] if "id" in schema.names and is_string(schema.field("id").type) else [])]
    for column in columns[:2]:
        kind = schema.field(column).type
        if column == "id":
            continue
        value = kind.value_type if pa.types.is_list(kind) or pa.types.is_large_list(kind) else pa.null()
        if not (pa.types.is_integer(value) or (column == "loss" and pa.types.is_boolean(value))):
            raise TokenFileError(f"{file.path}: the column {column} has the type {kind}, not list<integer>; write it "
                                 f"again as such")
    return columns


def is_string(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def batches(table: pq.ParquetFile, columns: list[str], limits: ImportLimits) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a file, a block of tokens and at most `limits.rows` rows at a time.

    The number of tokens is estimated from the sizes of row groups. The metadata of columns would give it exactly, but
    when they are damaged, reading them makes pyarrow crash the process."""
    for group in range(table.num_row_groups):
        info = table.metadata.row_group(group)
        rows = max(1, min(limits.rows, info.num_rows * 2 * limits.block_tokens // max(info.total_byte_size, 1)))
        yield from table.iter_batches(rows, row_groups=[group], columns=columns, use_threads=False)


def documents_of(source: ImportSource, file: TokenFile, name: str, row: int,
                 batch: pa.RecordBatch) -> ImportedDocuments:
    """Return the documents in a batch of rows. The first row of the batch is row number `row` of the file."""
    batch.validate(full=True)
    for column in batch.schema.names:
        values = batch.column(column)
        if values.null_count or (column != "id" and values.flatten().null_count):
            raise TokenFileError(f"{file.path}: rows from {row:,} on: null in the column {column}; write the file "
                                 f"again without")
    tokens, lengths = flat(batch.column("input_ids"))
    ends = np.cumsum(lengths)

    def place(token: int) -> str:
        document = int(np.searchsorted(ends, token, side="right"))
        return f"{file.path}: row {row + document:,}, token {token - int(ends[document] - lengths[document]):,}"

    if int(lengths.min()) < 1:
        raise TokenFileError(f"{file.path}: row {row + int(lengths.argmin()):,}: has no tokens, not even EOS "
                             f"({source.coding.eos}); remove it, or write EOS at the ends of documents")
    if int(lengths.max()) > source.limits.longest:
        raise TokenFileError(f"{file.path}: row {row + int(lengths.argmax()):,}: has more than "
                             f"{source.limits.longest:,} tokens; divide it into documents")
    tokens, targets = source.checked(tokens, place), None
    source.check_ends(tokens, ends, place)
    if "loss" in batch.schema.names:
        flags, sizes = flat(batch.column("loss"))
        if not np.array_equal(sizes, lengths) or int(flags.min()) < 0 or int(flags.max()) > 1:
            raise TokenFileError(f"{file.path}: rows from {row:,} on: the column loss does not have 0 or 1 for each "
                                 f"token: {AGAIN}")
        targets = flags.astype(np.uint8)
    ids = batch.column("id").to_pylist() if "id" in batch.schema.names else None
    return ImportedDocuments(name, row, tokens, lengths, ids, targets)


def row_columns(file: TokenFile, schema: pa.Schema) -> list[str]:
    """Return the columns to read from a file with a row per training sample: `input_ids`, `loss` if it exists, `ends`,
    and the four columns that say where a sample comes from. `ends` is left out if it is missing or has a wrong type.
    The four columns are left out if that is so for one of them. Raises TokenFileError as `columns_of` does."""
    columns = [column for column in columns_of(file, schema) if column != "id"]
    is_positions = "ends" in schema.names and pa.types.is_list(schema.field("ends").type) and pa.types.is_integer(
        schema.field("ends").type.value_type)
    has_origin = {"stream", *NUMBERS} <= set(schema.names) and is_string(schema.field("stream").type) and all(
        pa.types.is_integer(schema.field(name).type) for name in NUMBERS)
    return [*columns, *(["ends"] if is_positions else []), *(["stream", *NUMBERS] if has_origin else [])]


def rows_in(source: ImportSource, file: TokenFile, name: str, row: int, batch: pa.RecordBatch) -> ImportedDocuments:
    """Return the pieces of documents in a batch of rows, each of which is a training sample. The first row of the batch
    is row number `row` of the file."""
    batch.validate(full=True)
    where, width, count = f"{file.path}: rows from {row:,} on", source.sequence + 1, len(batch)
    for column in batch.schema.names:
        values = batch.column(column)
        if (values.null_count and column != "loss") or (pa.types.is_list(values.type) and values.flatten().null_count):
            raise TokenFileError(f"{where}: null in the column {column}; write the file again without")
    tokens, sizes = flat(batch.column("input_ids"))
    if (sizes != width).any():
        raise TokenFileError(f"{file.path}: row {row + int(np.flatnonzero(sizes != width)[0]):,} does not have the "
                             f"{width:,} tokens of sequence {source.sequence}; see that the number is right")
    tokens = source.checked(tokens, lambda token: f"{file.path}: row {row + token // width:,}")
    ends = None
    if "ends" in batch.schema.names:
        positions, sizes = flat(batch.column("ends"))
        ends = positions.astype(np.int64) + np.repeat(np.arange(count) * width, sizes)
        if len(ends) and (int(positions.min()) < 1 or int(positions.max()) >= width or (np.diff(ends) < 1).any()):
            raise TokenFileError(f"{where}: the column ends does not have increasing positions from 1 to {width - 1:,}"
                                 f": {AGAIN}")
    lengths, counts = row_pieces(ends, tokens, width, source.coding.eos)
    targets: np.ndarray | None = None
    if "loss" in batch.schema.names:
        by_row, masks = np.ones((count, width), np.uint8), batch.column("loss")
        flags, sizes = flat(masks.drop_null())
        if (sizes != width - 1).any() or (len(flags) and (int(flags.min()) < 0 or int(flags.max()) > 1)):
            raise TokenFileError(f"{where}: the column loss does not have 0 or 1 for each of the tokens 1 to "
                                 f"{width - 1:,}: {AGAIN}")
        by_row[masks.is_valid().to_numpy(zero_copy_only=False), 1:] = flags.reshape(-1, width - 1)
        targets = by_row.ravel()
    ids = None
    if "stream" in batch.schema.names:
        origins = zip(*(batch.column(column).to_pylist() for column in ("sample", "stream", "epoch", "window")))
        ids = piece_ids(itertools.starmap(RowOrigin, origins), counts)
    return ImportedDocuments(name, row, tokens, lengths, ids, targets)


def flat(lists: Lists) -> tuple[np.ndarray, np.ndarray]:
    """Return (values of all lists of an Arrow list array, back to back; length of each list)."""
    return lists.flatten().to_numpy(zero_copy_only=False), lists.value_lengths().to_numpy().astype(np.int64)
