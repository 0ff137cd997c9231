"""Looks up the documents of a window (one training sample) in the published datasets: URL, source, language, text and
so on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager
from typing import Any

import pyarrow.parquet as pq

#: columns that are looked up of every document, and those that are looked up on demand
LIGHT, WHOLE = ("id", "url", "locator", "source", "language"), ("signals", "meta", "text")
#: opens the part of a dataset at a path. Raises FileNotFoundError
OpenPart = Callable[[str], AbstractContextManager[pq.ParquetFile]]


def add_origins(documents: Sequence[dict[str, Any]], datasets: Iterable[tuple[str, dict[str, str]]],
                open_part: OpenPart, whole: bool, chars: int, pool: Executor) -> int:
    """Add to each document (a mapping from `window_documents`) what the published datasets say about it: `dataset`,
    url, locator, source and language. With `whole`, signals, meta and `chars` characters of the text are added too; the
    text begins at about the first token in the window. `datasets` yields (name, {key of a part: its path}), where a
    part is a file of a dataset. Returns how many documents were found in no dataset."""
    by_key: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for d in documents:
        by_key[d["key"]].append(d)
    missing = {key for key in by_key if key}
    for name, parts in datasets if missing else ():
        there = sorted(missing & parts.keys())
        missing -= {key for key, present in zip(there, pool.map(
            lambda key, name=name, parts=parts: _read(open_part, parts[key], name, by_key[key], whole, chars), there))
            if present}
        if not missing:
            break
    return sum("dataset" not in d for d in documents)


def _read(open_part: OpenPart, part: str, dataset: str, wanted: list[dict[str, Any]], whole: bool, chars: int) -> bool:
    """Add to each document of `wanted` the columns of its row in `part` (a file of a dataset). The document's `at` is
    the number of the row. If the row has another id, the dataset has changed, and nothing is added. Returns whether the
    file exists."""
    try:
        with open_part(part) as file:
            columns = [c for c in (*LIGHT, *(WHOLE if whole else ())) if c in file.schema_arrow.names]
            start = 0
            for group in range(file.num_row_groups):
                first, start = start, start + file.metadata.row_group(group).num_rows
                here = [d for d in wanted if first <= d["at"] < start]
                if not here:
                    continue
                table = file.read_row_group(group, columns=columns, use_threads=False)
                for d in here:
                    [row] = table.slice(d["at"] - first, 1).to_pylist()
                    if row.pop("id") != d["id"]:
                        continue
                    if "text" in row:                # the place is approximate, as token lengths vary
                        text = row["text"] or ""
                        begins = len(text) * d["begins"] // d["of"]
                        row["text"] = text[begins:begins + chars]
                    if "signals" in row:
                        row["signals"] = {k: v for k, v in (row["signals"] or {}).items() if v is not None}
                    d.update(row, dataset=dataset, verdict="kept")
    except FileNotFoundError:
        return False
    return True
