"""A slow reference for `pipeline.store.parts`: what that module promises, computed row by row without buffers."""

from __future__ import annotations

import hashlib
import json
import struct
from typing import Any

import pyarrow as pa

from pipeline.store.parts import document_schema
from stages.document import Document

STRINGS = ("id", "url", "source", "language", "date", "meta", "reason", "stage")


def stored(text: str | None) -> str | None:
    """Return a string as it can be stored in a file: a lone surrogate becomes a replacement character."""
    if text is None:
        return None
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def row_of(doc: Document, signals: list[str], reason: str | None, stage: str | None) -> dict[str, Any]:
    place = doc.locator.get
    text = stored(doc.text) or ""
    return {
        "id": stored(doc.id), "text": text, "url": stored(doc.url), "source": stored(doc.source),
        "language": stored(doc.language), "date": stored(doc.date),
        "locator": {"file": stored(place("file")), "offset": place("offset"), "record": place("record"),
                    "sub": stored(place("sub"))},
        "signals": {"bytes": float(len(text.encode())),
                    **{s: None if doc.signals.get(s) is None else float(doc.signals[s]) for s in signals}},
        "meta": stored(json.dumps(doc.meta, sort_keys=True, ensure_ascii=False)), "loss_spans": doc.loss_spans,
        "reason": reason, "stage": stage}


def digest_of(row: dict[str, Any], schema: pa.Schema) -> bytes:
    """Return the sha256 of a row, encoded as the docstring of `pipeline.store.parts` describes."""
    names = [f.name for f in schema.field("signals").type]
    strings = [row[n] for n in STRINGS if n in schema.names] + [row["locator"]["file"], row["locator"]["sub"]]
    data = [None if s is None else s.encode() for s in [*strings, row["text"]]]
    h = hashlib.sha256(hashlib.sha256(json.dumps(["tokenmill row 1", schema.names, names]).encode()).digest())
    for d in data:
        h.update(struct.pack("<q", -1 if d is None else len(d)))
    whole = [row["locator"]["offset"], row["locator"]["record"]]
    floats = [row["signals"][n] for n in names]
    h.update(b"".join(struct.pack("<q", v or 0) for v in whole))
    h.update(b"".join(struct.pack("<d", 0.0 if v is None else v) for v in floats))
    spans = row["loss_spans"]
    h.update(struct.pack("<q", -1 if spans is None else len(spans)))
    h.update(bytes(v is None for v in [*whole, *floats]))
    for d in data:
        h.update(d or b"")
    for span in spans or ():
        h.update(struct.pack("<qq", span["start"], span["end"]))
    return h.digest()


def content_of(docs: list[tuple[Document, str | None, str | None]], signals: tuple[str, ...], dropped: bool) -> str:
    """Return the `content` hash of a part with these (document, reason, stage)."""
    schema = document_schema(signals, dropped)
    names = sorted(set(signals) - {"bytes"})
    rows = [row_of(doc, names, reason, stage) for doc, reason, stage in docs]
    found = sorted((row["id"].encode(), digest_of(row, schema)) for row in rows)
    return hashlib.sha256(b"".join(d for _, d in found)).hexdigest()
