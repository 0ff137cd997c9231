"""Defines Document: a text with its id, its signals (numbers that stages compute), and views of the text (words, lines
…). A view is computed once and then used by all stages."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import xxhash


def document_id(source: str, path: str, member: str, ordinal: int) -> str:
    """Return the id of a document (docs/contracts.md: Identity): the xxh3_128 hash of its place in the input, as 32 hex
    characters. The hash does not depend on byte offsets, root folders or the numbers of partitions.

    `path` is that of the file, relative to the root folder of the source. `ordinal` is the number of the record in the
    file, from 0. If the file is an archive, `member` names the file inside it, and `ordinal` is the record's number
    among the members of that name. Otherwise `member` is "".
    """
    return xxhash.xxh3_128_hexdigest(_before_ordinal(source, path, member) + _field(str(ordinal)))


@lru_cache(maxsize=64)
def _before_ordinal(source: str, path: str, member: str) -> bytes:
    """Return the beginning of the byte string that `document_id` hashes: the bytes that are the same for all records of
    a file."""
    return _field(source) + _field(path) + _field(member)


def _field(value: str) -> bytes:
    data = value.encode("utf-8", "surrogatepass")
    return len(data).to_bytes(8, "little") + data


def storable_text(text: str) -> str:
    """Return a text in the form in which it is stored. Surrogates have no UTF-8 encoding: a lone surrogate becomes
    U+FFFD, and a pair becomes the character that it encodes."""
    try:
        text.encode()
    except UnicodeEncodeError:                   # from JSON escapes, or from file names that are not UTF-8
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


class DuplicateId(ValueError):
    """Raised when two documents have the same id. Ids must be unique, because results refer to documents by id
    alone."""

    def __init__(self, id: str, where: str = "the inputs of a deduplication") -> None:
        super().__init__(f"two documents of {where} have the id {id}: ids must be unique (is one file part of two "
                         f"datasets under `from:`?)")


class Document:
    """One document on its way through the steps of a pass (steps that run together, document by document). Setting
    `text` clears the cached views, such as `words`. Some of the other attributes:

    - `raw`: the bytes from which an extractor makes the text; None if the reader gave a text.
    - `mime`, `charset`: the content type and encoding that the transport, for instance HTTP, declared for `raw`.
    - `signals`: {name of a signal: float}.
    - `meta`: further facts; only JSON values.
    - `locator`: the document's place in the input, {file, offset, record, sub} (docs/contracts.md).
    - `side`: {name of a stage: the document's row in the side table that the stage writes beside the documents}.
    - `loss_spans`: the stretches of the text, {start, end} in UTF-8 bytes, that training learns from; None: the whole
      text.
    - `cuts`: the passages that a barrier (such as deduplication) has chosen, and that the stage `stages.cut` cuts out
      of the text. They are not stored.
    """

    __slots__ = ("_size", "_text", "_views", "charset", "cuts", "date", "id", "language", "locator", "loss_spans",
                 "meta", "mime", "raw", "side", "signals", "source", "url")

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
        self.cuts: list[dict[str, Any]] | None = None

    @property
    def text(self) -> str:
        return self._text

    @text.setter
    def text(self, value: str) -> None:
        if value != self._text:
            self._text, self._views, self._size = value, {}, -1

    @property
    def text_bytes(self) -> int:
        """Return the number of UTF-8 bytes of the text, where a lone surrogate counts as three bytes."""
        if self._size < 0:
            text = self._text
            self._size = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
        return self._size

    def view(self, name: str, make: Any) -> Any:
        """Return the view `name` of the text, such as its words. At first use, `make(text)` computes the view. It is
        then cached until the text changes."""
        cached = self._views.get(name)
        if cached is None:
            cached = self._views[name] = make(self._text)
        return cached

    @property
    def words(self) -> Any:
        """Return the words of the text as `stages.text.words.Words`. The text is split by spaCy's English tokenisation,
        as in datatrove. The words are computed once, and all filters use the same object."""
        from stages.text.words import words_of

        return self.view("words", words_of)

    @property
    def lines(self) -> list[str]:
        """Return the lines of the text, including blank lines, as `str.splitlines` returns them (cut at \\n, \\r, \\v,
        \\f, U+0085, U+2028 …). The position and the number of sentences of each line that is not blank
        are in `words.lines`."""
        return self.view("lines", str.splitlines)

    @property
    def lower(self) -> str:
        """Return the text in lower case, for searches for a phrase anywhere in it."""
        return self.view("lower", str.lower)

    @property
    def utf8(self) -> bytes:
        """Return the text as UTF-8, in which a lone surrogate takes three bytes."""
        return self.view("utf8", _utf8)

    def __repr__(self) -> str:
        return f"Document({self.id!r}, {len(self._text)} chars, source={self.source!r}, url={self.url!r})"


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


class BadRecord(Exception):
    """A record that a reader cannot turn into a document. A reader yields a BadRecord in the place of the document, and
    does not raise it. The record is counted and quarantined (listed apart from the documents).

    `reason` is snake_case (`truncated_gzip`, `invalid_utf8`, …). `fatal` means that the rest of the file cannot be
    read. `bytes` is the size of what is lost in the file, if that is more than this record; otherwise it is 0. It is
    set for a fatal record (by `pipeline.passes.reading`) and for an unreadable row group of a Parquet file (by the
    reader).
    """

    def __init__(self, reason: str, *, id: str = "", locator: dict[str, Any] | None = None, detail: str = "",
                 fatal: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.id, self.locator, self.detail, self.fatal = reason, id, locator or {}, detail, fatal
        self.bytes = 0
