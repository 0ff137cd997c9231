"""Reads the URLs of the documents in a shard set from the published datasets from which the set was made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tokenizer.shards.index import ShardIndex
from tokenizer.shards.layout import GONE_ROW, ShardError
from tokenizer.shards.origin import OpenPart

#: number of documents that are read at a time
BATCH = 1 << 14


def paths_of(datasets: Iterable[tuple[str, Mapping[str, str]]]) -> dict[str, str]:
    """Return {key of a part: its path} for the parts (files) of all published datasets. A part may belong to several
    datasets."""
    return {key: path for _, parts in datasets for key, path in parts.items()}


def documents(shards: ShardIndex, paths: Mapping[str, str] | None,
              open_part: OpenPart) -> Iterator[tuple[list[str], list[str | None]]]:
    """Yield the documents of a shard set in order, some at a time, as (ids, URLs). The URLs are read from the parts
    (files) of the published datasets; `paths` maps the key of a part to its path. If `paths` is None, all URLs are
    None. Raises ShardError when a part is missing or no longer has the documents."""
    with _PartReader(shards, paths or {}, open_part) as parts:
        for number in range(len(shards.manifest.shards)):
            with shards.table(number) as table:
                for batch in table.iter_batches(BATCH, columns=["id", "part", "row"], use_threads=False):
                    ids = batch.column("id")
                    yield ids.to_pylist(), [None] * len(ids) if paths is None else parts.urls(batch)


class _PartReader:
    """Reads the URLs of documents from the parts (files) of published datasets. Only one row group is in memory at a
    time. Each row group is read at most once per shard if the documents are asked for in their order in the shard."""

    def __init__(self, shards: ShardIndex, paths: Mapping[str, str], open_part: OpenPart) -> None:
        self._keys, self._paths, self._open = shards.manifest.parts, paths, open_part
        self._stack = ExitStack()
        self._part, self._first = -1, 0                           # open now; first row of the row group in memory
        self._file: pq.ParquetFile | None = None
        self._rows: pa.Table | None = None

    def __enter__(self) -> _PartReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def urls(self, batch: pa.RecordBatch) -> list[str | None]:
        """Return the URLs of the documents in `batch`, which has the columns id, part and row. The URL of a document
        that was taken down is None."""
        import pyarrow.compute as pc  # loads modules that the trainer does not need

        parts, rows = batch.column("part").to_numpy(), batch.column("row").to_numpy().astype(np.int64)
        urls: list[str | None] = []
        while len(urls) < len(rows):
            at = len(urls)
            if rows[at] == GONE_ROW:
                urls.append(None)
                continue
            table = self._row_group(int(parts[at]), int(rows[at]))
            inside = (parts[at:] == parts[at]) & (rows[at:] >= rows[at]) & (rows[at:] < self._first + len(table))
            stop = at + (len(inside) if inside.all() else int(inside.argmin()))
            chosen = table.take(pa.array(rows[at:stop] - self._first))
            if not pc.all(pc.equal(chosen["id"], batch.column("id").slice(at, stop - at))).as_py():
                raise self._changed(int(parts[at]))
            urls += chosen["url"].to_pylist()
        return urls

    def _row_group(self, part: int, row: int) -> pa.Table:
        """Return the ids and URLs of the row group that has row number `row` of a part (a file of a published
        dataset)."""
        if part != self._part:
            self._stack.close()
            path = self._paths.get(self._keys[part]) if part < len(self._keys) else None
            if path is None:
                raise self._changed(part)
            try:
                self._file = self._stack.enter_context(self._open(path))
            except FileNotFoundError:
                raise self._changed(part) from None
            self._part, self._first, self._rows = part, 0, None
        assert self._file is not None
        if self._rows is None or not self._first <= row < self._first + len(self._rows):
            sizes = [self._file.metadata.row_group(g).num_rows for g in range(self._file.num_row_groups)]
            starts = np.cumsum([0, *sizes])
            group = int(np.searchsorted(starts, row, "right")) - 1
            if group >= len(sizes):
                raise self._changed(part)
            self._rows = self._file.read_row_group(group, columns=["id", "url"], use_threads=False)
            self._first = int(starts[group])
        return self._rows

    def _changed(self, part: int) -> ShardError:
        key = self._keys[part] if part < len(self._keys) else str(part)
        return ShardError(f"part {key} of a dataset, from which documents of the shards were encoded, is not published "
                          f"(any more): run the recipe of the shards again, which publishes it")
