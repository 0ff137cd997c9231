"""Format of a segment of the commit log (docs/contracts.md: Store): ``{"sha256": …, "body": {…}}``.

A record is encoded once. The same bytes are then in the segment, in a snapshot and in the state of a driver. In a
segment each record has a line of its own at the end of the body. It begins with its key, replay key and quarantine. The
log can therefore be replayed without parsing a record, unless the record quarantines documents.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any, NamedTuple

from pipeline.store import quick_json
from pipeline.store.errors import StoreError
from pipeline.store.quick_json import loads
from pipeline.store.records import PartRecord

FORMAT = 2
SEGMENT = re.compile(r"log/(\d{8})\.json")
#: the bytes before and after the lines of the records
RECORDS, _AFTER = b',"records":[\n', b"\n]}"

_HEAD = b'{"sha256":"%s","body":'
_FACTS = re.compile(rb'\{"key":"([^"\\]*)","replay_key":"([^"\\]*)","quarantine":\[(\])?')


class CorruptLog(StoreError):
    """A segment is damaged or missing."""


class Facts(NamedTuple):
    """The facts about a record that replaying the log needs. `quarantines`: whether it quarantines documents."""

    key: str
    replay_key: str
    quarantines: bool


def segment_name(number: int) -> str:
    return f"log/{number:08d}.json"


def dumps(value: Any) -> bytes:
    """Canonical JSON in ASCII (file names may hold lone surrogates). Raises ValueError for a NaN, which JSON lacks."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def encode_record(record: PartRecord) -> bytes:
    """Encode a record, with the keys that `facts` reads first. The other keys keep the record's order. No canonical
    order is needed, because a record's bytes are compared and hashed only as stored."""
    doc = record.to_json()
    first = {name: doc.pop(name) for name in ("key", "replay_key", "quarantine")}
    return quick_json.dumps(first)[:-1] + b"," + quick_json.dumps(doc)[1:]


def facts(record: bytes) -> Facts:
    if (found := _FACTS.match(record)) is not None:
        return Facts(found[1].decode(), found[2].decode(), found[3] is None)
    doc = loads(record)                                       # the key has escapes
    return Facts(doc["key"], doc["replay_key"], bool(doc["quarantine"]))


def encode_segment(body: dict[str, Any]) -> bytes:
    """Encode a segment. The items of `records`, if there are any, are already encoded."""
    data = dumps({name: value for name, value in body.items() if name != "records"})
    if "records" in body:
        data = data[:-1] + RECORDS + b",\n".join(body["records"]) + _AFTER
    return _HEAD % hashlib.sha256(data).hexdigest().encode() + data + b"}\n"


def decode_segment(data: bytes, where: str) -> dict[str, Any]:
    """The body of a segment. The items of its `records` stay encoded. Raises CorruptLog when the segment is damaged."""
    head = len(_HEAD) - 2 + 64
    body = data[head:-2]
    if data[:head] != _HEAD % hashlib.sha256(body).hexdigest().encode() or data[-2:] != b"}\n":
        raise CorruptLog(f"{where} is damaged ({len(data)} bytes, its checksum does not match); restore it from a "
                         f"copy. If it is the last segment, move it away instead: what it recorded is computed again")
    before, begin, lines = body.partition(RECORDS)
    found: dict[str, Any] = loads(before + b"}" if begin else before)
    if found.get("format") != FORMAT:
        raise StoreError(f"{where} has format {found.get('format')}, this version of tokenmill reads format {FORMAT}; "
                         f"use the version that wrote this store, or a new --store")
    if begin:
        lines = lines.removesuffix(_AFTER)
        found["records"] = lines.split(b",\n") if lines else []
    return found
