"""Reads the texts of chosen rows of a part, a Parquet file of documents."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from pipeline.base.parquet import open_parquet

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: bytes of texts in a batch; with what a kernel makes of them, they should stay in the processor's cache
BATCH = 128 << 10


class Texts(NamedTuple):
    """Texts in UTF-8: text n is data[starts[n]:stops[n]]."""

    data: NDArray[np.uint8]
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]


def text_batches(path: str, rows: NDArray[Any], *, batch_bytes: int = BATCH) -> Iterator[Texts]:
    """Yield the texts of the given rows (ascending) of the part at `path`, in batches of about `batch_bytes`. Row
    groups of the Parquet file that hold none of these rows are not read. Raises ValueError at the end if the part has
    fewer rows than the largest of the given ones."""
    for texts in _of_row_groups(path, rows):
        ends = np.cumsum(texts.stops - texts.starts)
        edges = np.flatnonzero(np.diff(ends // batch_bytes)) + 1
        for first, stop in zip([0, *edges.tolist()], [*edges.tolist(), len(ends)]):
            yield Texts(texts.data, texts.starts[first:stop], texts.stops[first:stop])


def texts_at(path: str, rows: NDArray[Any]) -> Iterator[str]:
    """Yield the texts of the given rows (ascending) of the part at `path`, one by one, as strings. Rows are read as by
    `text_batches`."""
    return (data.tobytes().decode() for data in utf8_at(path, rows))


def utf8_at(path: str, rows: NDArray[Any]) -> Iterator[NDArray[np.uint8]]:
    """Yield the texts of the given rows (ascending) of the part at `path`, one by one, as UTF-8. Rows are read as by
    `text_batches`."""
    return (texts.data[start:stop] for texts in _of_row_groups(path, rows)
            for start, stop in zip(texts.starts.tolist(), texts.stops.tolist()))


def _of_row_groups(path: str, rows: NDArray[Any]) -> Iterator[Texts]:
    """Yield the texts of the given rows (ascending) of the part at `path`. Each item holds all those in one row group
    of the Parquet file."""
    first = rows_read = 0
    with open_parquet(path, memory_map=True) as file:
        for number in range(file.num_row_groups):
            stop = first + file.metadata.row_group(number).num_rows
            rows_up_to = int(np.searchsorted(rows, stop))
            if rows_up_to > rows_read:
                column = file.read_row_group(number, columns=["text"], use_threads=False)["text"]
                column.validate(full=True)             # the kernels read beyond the end of a text that is no UTF-8
                texts = column.combine_chunks()
                if texts.type != pa.large_string():
                    texts = texts.cast(pa.large_string())
                ends = np.frombuffer(texts.buffers()[1], np.int64)[texts.offset:]
                data = np.frombuffer(texts.buffers()[2] or b"", np.uint8)
                places = rows[rows_read:rows_up_to].astype(np.int64) - first
                yield Texts(data, ends[places], ends[places + 1])
            first, rows_read = stop, rows_up_to
    if rows_read < len(rows):
        raise ValueError(f"a part has {first} rows, but its side table speaks of row {int(rows[rows_read])}")
