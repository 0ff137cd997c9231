"""Cuts documents out of the reports, error messages and driver logs of earlier runs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from pipeline.report.collect import VERSION, write_pages
from pipeline.store.fs import Store
from pipeline.store.tombstones import Tombstones
from pipeline.store.view import LogView
from pipeline.takedown.search import document_files, string_columns

#: length, in characters without white space, of the stretches of text by which a quotation is recognised. A shorter
#: text is recognised as a whole, if it has at least SHORT characters
STRETCH, SHORT = 24, 8
#: what stands in a report in place of a quotation
CUT = "[taken down]"
FILES = ("report.json", "report.md", "report.html")
#: files of a run that hold error messages, which may quote a document: JSON, and the output of a driver
_MESSAGES = re.compile(r"runs/[^/]+/(run\.json|progress\.json|log/[0-9-]+\.txt)")
#: keys by which an entry of a report says which documents it is about
_ABOUT = ("id", "kept_id", "kept", "removed")


class Quotations:
    """Recognises strings that quote a removed text. A string quotes a text if both share STRETCH characters in a row,
    or if the string holds the whole of a shorter text. White space does not count.

    `documents` are the reports whose strings will be tested, and `texts` are the removed texts. Memory holds all runs
    of STRETCH characters of the reports, but not those of the texts, which may be many."""

    def __init__(self, documents: Iterable[Any], texts: Iterable[str]) -> None:
        present = {stretch for document in documents for string in _strings(document) for stretch in _stretches(string)}
        self._stretches: set[str] = set()
        self._short: set[str] = set()
        for text in texts:
            joined = "".join(text.split())
            if SHORT <= len(joined) < STRETCH:
                self._short.add(joined)
            self._stretches.update(stretch for stretch in _stretches(text) if stretch in present)

    def within(self, string: str) -> bool:
        joined = "".join(string.split())
        return any(short in joined for short in self._short) or any(s in self._stretches for s in _stretches(string))


def _stretches(string: str) -> Iterator[str]:
    joined = "".join(string.split())
    return (joined[i:i + STRETCH] for i in range(len(joined) - STRETCH + 1))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings(item)


def texts_of(store: Store, log: LogView, ids: frozenset[str]) -> Iterator[tuple[str, str]]:
    """Yield (text, URL or "") for every text that the store holds of documents with these ids. A text that is in
    several files is yielded several times."""
    for file in document_files(store, log):
        try:
            with store.parquet(file.path) as parquet:
                present = string_columns(parquet.schema_arrow)
                if {"id", "text"} <= present:
                    columns = ["id", "text", *(["url"] if "url" in present else [])]
                    for batch in parquet.iter_batches(256, columns=columns, use_threads=False):
                        rows = [row for row, id in enumerate(batch.column("id").to_pylist()) if id in ids]
                        for row in batch.take(rows).to_pylist() if rows else ():
                            yield row["text"], row.get("url") or ""
        except FileNotFoundError:
            continue


def redact(store: Store, gone: Tombstones, texts: Iterable[str]) -> list[str]:
    """Cut the documents that `gone` covers out of all reports, error messages and driver logs of a store. The pages of
    the reports are made again. `texts` are the texts and URLs of these documents. If another version of Tokenmill wrote
    a report that names or quotes one of them, the report is removed. Returns the runs whose reports changed or were
    removed."""
    reports = {path.split("/")[1]: json.loads(store.read(path)) for path in store.list("runs")
               if path.count("/") == 2 and path.endswith("/report.json")}
    latest = json.loads(store.read("report.json")).get("run") if store.exists("report.json") else None
    messages = {path: _parsed(path, store.read(path)) for path in store.list("runs") if _MESSAGES.fullmatch(path)}
    quotations, changed = Quotations([*reports.values(), *messages.values()], texts), []
    for path, message in messages.items():
        if (cut := without(message, gone, quotations)) != message:
            store.write(path, "\n".join(cut).encode() if path.endswith(".txt") else json.dumps(cut).encode())
    for run, document in reports.items():
        cut = without(document, gone, quotations)
        if cut == document:
            continue
        changed.append(run)
        if document.get("version") == VERSION:
            write_pages(store, cut, latest=run == latest)
        else:
            store.remove_all([*(f"runs/{run}/{name}" for name in FILES), *(["report.json"] if run == latest else [])])
    return changed


def _parsed(path: str, data: bytes) -> Any:
    """Return the content of a file of error messages, or of a driver's log, as JSON. In it, each message is a separate
    string. For a driver's log (.txt), this is the list of its lines."""
    if not path.endswith(".txt"):
        try:
            return json.loads(data)
        except ValueError:
            return {}                            # damaged; readers of the store do not show it either
    return data.decode("utf-8", "replace").split("\n")


def without(value: Any, gone: Tombstones, quotations: Quotations) -> Any:
    """Return `value`, which is a report or a part of one, without the documents that `gone` covers. An entry of a list
    that is about such a document, or about a duplicate of one, is left out. A string that quotes one (`quotations`) is
    replaced by CUT."""
    if isinstance(value, dict):
        return {key: without(item, gone, quotations) for key, item in value.items()}
    if isinstance(value, list):
        return [without(item, gone, quotations) for item in value if not _is_about(item, gone)]
    return CUT if isinstance(value, str) and (gone.cover(value, value) or quotations.within(value)) else value


def _is_about(item: Any, gone: Tombstones) -> bool:
    if not isinstance(item, dict):
        return False
    named = [item.get(key) for key in _ABOUT]
    named += [other.get("id") for other in named if isinstance(other, dict)]
    return any(isinstance(name, str) and name in gone.ids for name in named)
