"""Reads JSON Lines, one document per line (.jsonl, .json, .ndjson; plain, .gz, .bz2, .xz, .zst), or one JSON array of
records."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from stages.document import BadRecord, Document, document_id
from stages.read.columns import Columns, ColumnsConfig, NotKept, clean, json_value
from stages.read.reader import BEYOND, Reader, Slice, Split, bad, check_file, locator, skipped
from stages.read.streams import DamagedStream, DecompressedStream, coding_of, is_array, read_elements, read_lines
from stages.stage import signal

#: Deepest nesting of a line. Python's own limit is far above it, but depends on how deep the caller is nested.
MAX_DEPTH = 100
#: the row of a line that says `null`; None is the row of a blank line
NULL = ()


class Jsonl(Reader):
    """Reads JSON Lines, or one JSON array: one document per record.

    Settings may name keys by paths into nested objects ("metadata.url"). The id that a record has in its data set is
    kept as `meta.id`. `stages.read.columns` says how keys that no setting names are kept.

    Records of which no document is made are counted under `line_too_long`, `invalid_utf8`, `bad_json`, `missing_text`
    (no such key, or its value is not a string) or `empty` (a blank line or text).
    """

    name = "jsonl"
    collection = True
    version = 4
    suffixes = tuple(f"{s}{z}" for s in (".jsonl", ".ndjson", ".json") for z in ("", ".gz", ".zst", ".bz2", ".xz"))

    class Config(ColumnsConfig):
        text: str = signal("text", "key of the text")
        id: str = signal("id", "key of the set's own id, kept in meta.id; '' for none")
        url: str = signal("url", "key of the URL; '' for none")
        date: str = signal("date", "key of the date; '' for none")
        language: str = signal("", "key of the language, if it is to be trusted")
        max_line: int = signal(32 << 20, "longest line, bytes; beyond: line_too_long", gt=0)

    def __init__(self, config: Any = None, **kw: Any) -> None:
        super().__init__(config, **kw)
        c = self.config
        self.columns = columns_of(c, c.text)
        self.signals, self.lost = c.signals, self.columns.lost

    def read(self, local: str, slice: Slice) -> Iterator[Document | BadRecord]:
        for ordinal, offset, row in self.rows(local, slice):
            if isinstance(row, BadRecord):
                yield row
            elif row is None:
                yield skipped("empty", slice, offset, ordinal)
            else:
                yield self._document(row, slice, offset, ordinal)

    def rows(self, local: str, slice: Slice) -> Iterator[tuple[int, int, Any]]:
        """Yields (number of the line, offset, row) for each line of a slice (a file or a piece of it), or for each
        element of a JSON array. The row is the JSON value of the line; strings in it may hold lone surrogates. The row
        is None for a blank line, NULL for a line that says `null`, and a `BadRecord` for a faulty line."""
        check_file(local, slice.path)
        ordinal, at = slice.ordinal, slice.start
        array = slice.start == 0 and slice.stop is None and is_array(local)
        with DecompressedStream(local) as stream:
            if slice.start:
                stream.seek(slice.start)
            length = None if slice.stop is None or stream.coding else slice.stop - slice.start
            try:
                for offset, line in (read_elements(stream, self.config.max_line) if array else
                                     read_lines(stream, self.config.max_line, length)):
                    at = slice.start + offset
                    place = 0 if stream.coding else at
                    yield ordinal, place, (
                        self._row(line, slice, place, ordinal) if line is not None else
                        bad("line_too_long", slice, place, ordinal,
                            detail=f"a line of more than {self.config.max_line} bytes"))
                    ordinal += 1
            except DamagedStream as e:
                place = 0 if stream.coding else at
                yield ordinal, place, bad(e.reason, slice, place, ordinal, detail=e.detail, fatal=True)

    def _row(self, line: bytes, slice: Slice, offset: int, ordinal: int) -> Any:
        if not line.strip():
            return None
        try:
            row = json.loads(line.decode("utf-8-sig" if ordinal == 0 else "utf-8"))
        except UnicodeDecodeError as e:
            return bad("invalid_utf8", slice, offset, ordinal, detail=str(e))
        except (ValueError, RecursionError) as e:
            return bad("bad_json", slice, offset, ordinal, detail=str(e))
        if line.count(b"[") + line.count(b"{") > MAX_DEPTH and is_too_deep(row):
            return bad("bad_json", slice, offset, ordinal, detail=f"nested deeper than {MAX_DEPTH} levels")
        # `null` is not a blank line but a value that is no object
        return NULL if row is None else row

    def _document(self, row: Any, slice: Slice, offset: int, ordinal: int) -> Document | BadRecord:
        text = _value_at(row, self.config.text)
        if not isinstance(text, str):
            return bad("missing_text", slice, offset, ordinal, detail=f"no string at '{self.config.text}'")
        if not text or text.isspace():
            return skipped("empty", slice, offset, ordinal)
        meta_columns = self.columns.of(row)
        if self.config.text not in row:                   # so that `meta` does not repeat the text of a dotted path
            row = _without(row, self.config.text)
        return make_document(slice, ordinal, offset, text, lambda key: _value_at(row, key), self.config, self.columns,
                             meta_columns)

    def needs(self, slice: Slice | None, size: int, read: Callable[[int, int], bytes]) -> list[tuple[int, int]] | None:
        """Return the byte ranges of a file in object storage that must be fetched to read a slice (the file or a piece
        of it), or to split the file if `slice` is None. The result is None if the whole file must be fetched. A slice
        needs its own bytes and the first bytes of the file, which show how the file is compressed. To split a
        compressed file, its first bytes suffice: they show that it cannot be split."""
        if slice is None:
            return [(0, BEYOND)] if coding_of(read(0, 10)) else None
        return None if slice.stop is None else [(0, 10), (slice.start, slice.stop)]

    def splits(self, local: str, path: str, target: int) -> list[Split] | None:
        """Return the pieces, cut at line ends and of about `target` bytes, in which a file can be read. Returns None
        for a compressed file or a JSON array, which is read in one piece."""
        check_file(local, path)
        if is_array(local):
            self.warnings.append(f"{path}: read in one piece, for it is one JSON array; JSON Lines can be shared out")
            return None
        with DecompressedStream(local) as stream:
            if stream.coding:
                self.warnings.append(f"{path}: read in one piece, for it is compressed; many smaller files, or plain "
                                     "ones, can be shared out")
                return None
            pieces: list[Split] = []
            start = at = ordinal = lines = 0
            ended = True                                      # with a line end
            while block := stream.read():
                ended = block.endswith(b"\n")
                if at + len(block) - start >= target and (end := block.rfind(b"\n")) >= 0:
                    count = block.count(b"\n", 0, end + 1)
                    stop = at + end + 1
                    pieces.append(Split(start, stop, ordinal, lines + count, stop - start))
                    start, ordinal, lines = stop, ordinal + lines + count, block.count(b"\n", end + 1)
                else:
                    lines += block.count(b"\n")
                at += len(block)
            if at > start:
                pieces.append(Split(start, at, ordinal, lines + (not ended), at - start))
            return pieces or None


def is_too_deep(value: Any) -> bool:
    """Return whether lists and objects are nested more than `MAX_DEPTH` levels deep."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [v for v in level if isinstance(v, (dict, list))]
        if not level:
            return False
        level = [inner for v in level for inner in (v.values() if isinstance(v, dict) else v)]
    return True


def _value_at(row: Any, key: str) -> Any:
    """Returns the value at a key, or at a path with dots, of a JSON object; None if there is no such value."""
    if isinstance(row, dict) and key in row:
        return row[key]
    for part in key.split("."):
        if not isinstance(row, dict):
            return None
        row = row.get(part)
    return row


def _without(row: dict[str, Any], path: str) -> dict[str, Any]:
    """Returns a copy of a JSON object without the value at a path with dots."""
    key, _, inner = path.partition(".")
    if not inner:
        return {k: v for k, v in row.items() if k != key}
    return {**row, key: _without(row[key], inner)} if isinstance(row.get(key), dict) else row


def columns_of(config: Any, *used: str, reserved: Iterable[str] = ()) -> Columns:
    """Return the `Columns` object of a reader with the settings `config`: it decides which columns are kept in `meta`.
    With `keep: all`, columns that the reader uses for another purpose are left out: those that the settings `id`,
    `url`, `date`, `language` and `signals` name, and those in `used`. `reserved` are names in `meta` that the reader
    sets itself."""
    named = (config.id, config.url, config.date, config.language)
    return Columns(config, (*named, *used), (*reserved, "id") if config.id else reserved)


def make_document(slice: Slice, ordinal: int, offset: int, text: str, get: Any, config: Any, columns: Columns,
                  meta_columns: list[str], *, surrogates: bool = True) -> Document:
    """Return the document of a row (a line or table row) with the text `text`. `get(key)` returns a value of the row.
    The settings `config` name the keys of id, URL, date and language. The columns `meta_columns` are copied into
    `meta`. Lone surrogates, which JSON can express and UTF-8 cannot, become U+FFFD if `surrogates` says that the text
    may contain them."""
    doc = Document(document_id(slice.source, slice.path, "", ordinal), clean(text) if surrogates else text,
                   source=slice.source, locator=locator(slice.path, offset, ordinal))
    if config.url and (value := get(config.url)) is not None:
        doc.url = clean(str(value))
    if config.date and (value := get(config.date)) is not None:
        doc.date = clean(str(value))
    if config.language and (value := get(config.language)) is not None:
        doc.language = clean(str(value))
    if config.id and (value := get(config.id)) is not None:
        try:
            doc.meta["id"] = json_value(value)
        except NotKept as e:
            columns.lose(config.id, str(e))
    columns.fill(doc, get, meta_columns)
    return doc
