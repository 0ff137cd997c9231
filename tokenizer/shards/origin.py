"""Looks up the documents of a window (one training sample) in the published datasets: URL, source, language, text and
so on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager
from typing import Any

import pyarrow.parquet as pq

#: columns that are looked up of every document, and those of a document that is shown with its text
LIGHT = ("url", "locator", "source", "language")
WHOLE = (*LIGHT, "signals", "meta", "text")
#: number of characters of a document's text that are shown
EXCERPT = 400
#: control characters that a terminal would execute instead of showing
CONTROL = dict.fromkeys((*range(32), *range(127, 160), *range(0x200B, 0x2010), *range(0x2028, 0x202F),
                         *range(0x2066, 0x206A)), " ")
#: opens the part of a dataset at a path. Raises FileNotFoundError
OpenPart = Callable[[str], AbstractContextManager[pq.ParquetFile]]


def add_origins(documents: Sequence[dict[str, Any]], datasets: Iterable[tuple[str, dict[str, str]]],
                open_part: OpenPart, columns: Sequence[str], chars: int, pool: Executor) -> int:
    """Add what the published datasets say about the documents of a window (a training sample). Returns the number of
    documents that are in no dataset; nothing is added to these.

    `documents` are mappings from `window_documents`. They get the keys `dataset`, `verdict` (always "kept") and the
    given columns. The column `text` gets at most `chars` characters, which begin at about the first token in the
    window. `datasets` yields (name, {key of a part: its path}), where a part is a file of a dataset. The threads of
    `pool` read the parts."""
    by_key: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for d in documents:
        by_key[d["key"]].append(d)
    missing = {key for key in by_key if key}
    for name, parts in datasets if missing else ():
        there = sorted(missing & parts.keys())
        missing -= {key for key, present in zip(there, pool.map(
            lambda key, name=name, parts=parts: _read(open_part, parts[key], name, by_key[key], columns, chars), there))
            if present}
        if not missing:
            break
    return sum("dataset" not in d for d in documents)


def _read(open_part: OpenPart, part: str, dataset: str, wanted: list[dict[str, Any]], columns: Sequence[str],
          chars: int) -> bool:
    """Add columns of the rows in `part` (a file of a dataset) to the documents `wanted`. The row of a document is
    number `at`, one of its keys. Nothing is added if this row has another id, because the dataset has then changed.
    Returns False if the file does not exist."""
    try:
        with open_part(part) as file:
            present = [c for c in ("id", *columns) if c in file.schema_arrow.names]
            start = 0
            for group in range(file.num_row_groups):
                first, start = start, start + file.metadata.row_group(group).num_rows
                here = [d for d in wanted if first <= d["at"] < start]
                if not here:
                    continue
                table = file.read_row_group(group, columns=present, use_threads=False)
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


def document_lines(document: dict[str, Any]) -> list[str]:
    """Format a document of a window (a training sample) as lines of text for a terminal. `document` is a mapping from
    `window_documents`, with what `add_origins` has added."""
    first, stop = document["tokens"]
    of_total = "" if stop - first >= document["of"] else f" of {document['of']:,}"
    place = document.get("url") or (document.get("locator") or {}).get("file")     # documents from files have no URL
    labels = [document.get("source"), document.get("language"), place] if "dataset" in document else []
    out = [f"  {stop - first:>6,}{of_total} tokens from {document['begins']:,}  {document['id']}  "
           f"{'  '.join(str(x) for x in labels if x)}"]
    if document.get("signals"):
        out.append(f"         kept in {document['dataset']}: "
                   + "  ".join(f"{key}={value:.4g}" for key, value in document["signals"].items()))
    if document.get("reason"):
        kept = f"; kept in its place: {document['kept']}" if document.get("kept") else ""
        out.append(f"         dropped from {document['dataset']} since, by {document['stage']} ({document['reason']})"
                   f"{kept}")
    if document.get("meta") not in (None, "", "{}"):
        out.append(f"         {document['meta']}")
    if document.get("text"):
        out.append(f"         {'… ' * (document['begins'] > 0)}{document['text']}"
                   + (" …" if len(document["text"]) == EXCERPT else ""))
    return [line.translate(CONTROL).rstrip() for line in out]
