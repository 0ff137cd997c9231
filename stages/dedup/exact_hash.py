"""Computes the hashes by which the step `exact` compares documents: the stage `exact_hash`, and the settings that it
shares with the step."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pyarrow as pa
import xxhash
from pydantic import field_validator

from stages.dedup.survivor import COLUMN, DEFAULT, checked, order_bytes, signals, stored
from stages.dedup.units import same_text
from stages.stage import Stage, StageConfig, signal

if TYPE_CHECKING:
    from stages.document import Document

_SPACE = re.compile(r"\s+")
#: the properties by which documents are compared, in words
_PROPERTIES = "text, bytes, no-space, url and meta.KEY"


class ExactConfig(StageConfig):
    by: str | tuple[str, ...] = signal(
        "text", f"what makes two documents equal: one or several of {_PROPERTIES}; documents are compared by the first "
                "of a list, and those that stay by the next; both: [url, text]")
    normalise: bool = signal(True, "with by: text, texts that differ only in white space and case count as equal; "
                                   "false: only texts of the same bytes do")
    prefer: tuple[str, ...] = signal(
        DEFAULT, "which of equal documents is kept: priority, newest, signal:NAME (largest value), longest; the first "
                 "by which the documents differ decides, and at last the smallest id", added=True)

    @field_validator("by")
    @classmethod
    def _known(cls, by: str | tuple[str, ...]) -> str | tuple[str, ...]:
        names = _names(by)
        for name in names:
            if name not in ("text", "bytes", "no-space", "url") and not (name.startswith("meta.") and name != "meta."):
                raise ValueError(f"{name!r} is nothing that documents can be compared by: name one or several of "
                                 f"{_PROPERTIES}, or both")
        if not names or len(set(names)) < len(names):
            raise ValueError("name at least one property, and each once")
        return by

    _checked = field_validator("prefer")(checked)

    @property
    def columns(self) -> tuple[str, ...]:
        """The properties by which documents are compared, in the order in which the step applies them."""
        return _names(self.by)


def _names(by: str | tuple[str, ...]) -> tuple[str, ...]:
    return ("url", "text") if by == "both" else (by,) if isinstance(by, str) else by


def same_url(url: str) -> str:
    """Return the form in which `exact` compares URLs (RFC 3986, 6.2.2-3; the scheme as in SURT keys). http and https
    are equal, the host is in lower case, the ports 80 and 443, a user name and the fragment are removed, and an empty
    path becomes "/". All other paths, and queries that are not empty, stay unchanged. From a URL of another scheme, or
    one that cannot be parsed, only the white space at its ends is removed."""
    url = url.strip()
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        return url
    if parts.scheme not in ("http", "https") or not host:
        return url
    place = host if port in (None, 80, 443) else f"{host}:{port}"
    return f"//{place}{parts.path or '/'}" + (f"?{parts.query}" if parts.query else "")


def _digest(text: str) -> bytes:
    return xxhash.xxh3_128_digest(text.encode("utf-8", "surrogatepass"))


class ExactHash(Stage):
    """Compute the xxh3_128 hashes by which `exact` finds duplicates, one for each property that the setting `by` names.
    The hash of a property that the document lacks is empty: the hash of the URL if it has no URL, and the hash of a
    metadata key if the key is missing or its value is an empty text. The columns `text` and `url` exist even if `by`
    does not name them; in that case, all hashes in the column are empty."""

    name = "exact_hash"
    version = 1
    cost_ms = 0.05
    side = pa.schema([("text", pa.binary()), ("url", pa.binary()), ("chars", pa.uint32())])
    Config = ExactConfig

    def __init__(self, config: Any = None, **kw: Any) -> None:
        super().__init__(config, **kw)
        for column in self.config.columns:
            if column not in ("text", "url"):
                self.side = self.side.append(pa.field(column, pa.binary()))
        if stored(self.config.prefer):
            self.side = self.side.append(COLUMN)

    def reads(self) -> dict[str, str]:
        return dict.fromkeys(signals(self.config.prefer), "prefer")

    def process(self, doc: Document) -> str | None:
        side: dict[str, Any] = {"text": b"", "url": b"", "chars": len(doc.text)}
        for column in self.config.columns:
            side[column] = self._hash(doc, column)
        if stored(self.config.prefer):
            side["order"] = order_bytes(doc, self.config.prefer)
        doc.side[self.name] = side
        return None

    def _hash(self, doc: Document, column: str) -> bytes:
        if column == "url":
            return _digest(same_url(doc.url)) if (doc.url or "").strip() else b""
        if column.startswith("meta."):
            value = doc.meta.get(column.removeprefix("meta."))
            return b"" if value is None or value == "" else _digest(json.dumps(value, sort_keys=True))
        if column == "no-space":
            return _digest(_SPACE.sub("", doc.text.lower()))
        return _digest(same_text(doc.text) if column == "text" and self.config.normalise else doc.text)
