"""A document has a text, an identity, signals, and views of the text that are computed once for all stages."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import xxhash


def document_id(source: str, path: str, member: str, ordinal: int) -> str:
    """Identity of a document (docs/contracts.md: Identity): xxh3_128 of where it stands, 32 hex characters.

    `path` is relative to the source root, `member` names a file inside an archive ("" when there is none), `ordinal`
    counts records in file order from 0. Offsets, roots and partition numbers never enter.
    """
    return xxhash.xxh3_128_hexdigest(_before_ordinal(source, path, member) + _field(str(ordinal)))


@lru_cache(maxsize=64)
def _before_ordinal(source: str, path: str, member: str) -> bytes:
    """The part of an identity that all records of a file share."""
    return _field(source) + _field(path) + _field(member)


def _field(value: str) -> bytes:
    data = value.encode("utf-8", "surrogatepass")
    return len(data).to_bytes(8, "little") + data


class DuplicateId(ValueError):
    """Two documents have the same id. An id must name a single document in everything derived from it."""

    def __init__(self, id: str, where: str = "the inputs of a deduplication") -> None:
        super().__init__(f"two documents of {where} have the id {id}: ids must be unique (is one file part of two "
                         f"datasets under `from:`?)")


class Document:
    """One document on its way through a pass.

    `raw` holds the bytes an extractor reads (None for text sources) with `mime` and `charset` as the transport declared
    them. Setting `text` clears the cached views. `signals` maps signal names to floats; `meta` must be JSON. `locator`
    is {file, offset, record, sub} (docs/contracts.md). `side` collects rows for side tables, by stage name.
    """

    __slots__ = ("_size", "_text", "_views", "charset", "date", "id", "language", "locator", "loss_spans", "meta",
                 "mime", "raw", "side", "signals", "source", "url")

    def __init__(self, id: str, text: str = "", *, source: str = "", url: str = "", language: str = "",
                 date: str | None = None, raw: bytes | None = None, mime: str = "", charset: str = "",
                 locator: dict[str, Any] | None = None, meta: dict[str, Any] | None = None,
                 signals: dict[str, float] | None = None,
                 loss_spans: list[dict[str, int]] | None = None) -> None:
        self.id, self._text, self._size = id, text, -1
        self._views: dict[str, Any] = {}
        self.source, self.url, self.language, self.date = source, url, language, date
        self.raw, self.mime, self.charset = raw, mime, charset
        self.locator = locator or {}
        self.meta = {} if meta is None else meta
        self.signals = {} if signals is None else signals
        self.loss_spans = loss_spans
        self.side: dict[str, dict[str, Any]] = {}

    @property
    def text(self) -> str:
        return self._text

    @text.setter
    def text(self, value: str) -> None:
        if value != self._text:
            self._text, self._views, self._size = value, {}, -1

    @property
    def text_bytes(self) -> int:
        """Number of UTF-8 bytes of the text (a lone surrogate counts three)."""
        if self._size < 0:
            text = self._text
            self._size = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
        return self._size

    def view(self, name: str, make: Any) -> Any:
        """The cached view `name` of the text, made by `make(text)` at first use."""
        found = self._views.get(name)
        if found is None:
            found = self._views[name] = make(self._text)
        return found

    @property
    def words(self) -> Any:
        """`stages.text.words.Words` of the text: the datatrove/spaCy English tokenisation, shared by all filters."""
        from stages.text.words import words_of

        return self.view("words", words_of)

    @property
    def lines(self) -> list[str]:
        """Lines as `str.splitlines` cuts them (\\n, \\r, \\v, \\f, U+0085, U+2028 …), blank ones included.
        `words.lines` has places, chunks and sentences of the lines that are not blank."""
        return self.view("lines", str.splitlines)

    @property
    def lower(self) -> str:
        """The text in lower case, for searches for a phrase anywhere in it."""
        return self.view("lower", str.lower)

    @property
    def utf8(self) -> bytes:
        """The text as UTF-8 (a lone surrogate as three bytes)."""
        return self.view("utf8", _utf8)

    def __repr__(self) -> str:
        return f"Document({self.id!r}, {len(self._text)} chars, source={self.source!r}, url={self.url!r})"


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


class BadRecord(Exception):
    """What a reader yields (not raises) for a record it cannot turn into a document. The record is counted and
    quarantined.

    `reason` is snake_case (`truncated_gzip`, `invalid_utf8`, …); `fatal` says that the rest of the file is unreadable.
    `bytes` counts the stored bytes lost with the record when more than the record itself is lost. It is set by
    `pipeline.passes.reading` for a fatal record, and by the reader for a row group.
    """

    def __init__(self, reason: str, *, id: str = "", locator: dict[str, Any] | None = None, detail: str = "",
                 fatal: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.id, self.locator, self.detail, self.fatal = reason, id, locator or {}, detail, fatal
        self.bytes = 0
