"""Encodes, decodes and creates segments, the files of the commit log (docs/contracts.md: Store).

A segment is JSON: ``{"sha256": …, "body": {…}}``. The records of finished tasks come last in the body, each on a line
of its own. The line begins with three fields:

- the task's key, a hash of what determines its result
- its replay key, such a hash without thresholds
- the documents that the task quarantined

Replaying the log reads these fields without parsing the line; it parses only records that quarantine documents.

A record is encoded once. Segments, snapshots of the log and the `LogView` of a driver all hold the same bytes of it.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any, NamedTuple

from pipeline.base.clock import Clock
from pipeline.store import quick_json
from pipeline.store.errors import StoreError
from pipeline.store.fs import Store
from pipeline.store.quick_json import loads
from pipeline.store.records import PartRecord

FORMAT = 2
RETRIES = 8                  # repetitions of a put whose outcome is unknown (object store time-outs)
SEGMENT = re.compile(r"log/(\d{8})\.json")
#: the bytes before and after the lines of the records
RECORDS, _AFTER = b',"records":[\n', b"\n]}"

_HEAD = b'{"sha256":"%s","body":'
_FACTS = re.compile(rb'\{"key":"([^"\\]*)","replay_key":"([^"\\]*)","quarantine":\[(\])?')


class CorruptLog(StoreError):
    """Raised when a file of the commit log is damaged or missing: a segment, or a pack, which compacts many
    segments."""


class Facts(NamedTuple):
    """The facts about a task's record that are needed to replay the log: its key, its replay key (the key computed
    without thresholds), and whether it quarantines documents."""

    key: str
    replay_key: str
    quarantines: bool


def segment_name(number: int) -> str:
    return f"log/{number:08d}.json"


def dumps(value: Any) -> bytes:
    """Encode a value as JSON with sorted keys and no spaces. The JSON is ASCII, because file names may hold lone
    surrogates, which UTF-8 cannot encode. Raises ValueError for a NaN or an infinity, which JSON cannot express."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def encode_record(record: PartRecord) -> bytes:
    """Encode the record of a task as JSON. Its key, replay key (the key computed without thresholds) and quarantine
    come first, where `facts` finds them. The other fields keep the record's order. They need no canonical order,
    because the encoded bytes are stored, compared and hashed, and a record is never encoded again."""
    doc = record.to_json()
    first = {name: doc.pop(name) for name in ("key", "replay_key", "quarantine")}
    return quick_json.dumps(first)[:-1] + b"," + quick_json.dumps(doc)[1:]


def facts(record: bytes) -> Facts:
    if (match := _FACTS.match(record)) is not None:
        return Facts(match[1].decode(), match[2].decode(), match[3] is None)
    doc = loads(record)                                       # the key has escapes
    return Facts(doc["key"], doc["replay_key"], bool(doc["quarantine"]))


def encode_segment(body: dict[str, Any]) -> bytes:
    """Encode a segment (file of the commit log) with this body. The `records` in the body, if any, must be encoded
    already (`encode_record`)."""
    data = dumps({name: value for name, value in body.items() if name != "records"})
    if "records" in body:
        data = data[:-1] + RECORDS + b",\n".join(body["records"]) + _AFTER
    return _HEAD % hashlib.sha256(data).hexdigest().encode() + data + b"}\n"


def decode_segment(data: bytes, where: str) -> dict[str, Any]:
    """Return the body of a segment (file of the commit log). Its `records` stay encoded, as bytes. Raises CorruptLog
    when the segment is damaged, and StoreError when another version of Tokenmill wrote it. `where` names the segment in
    these errors."""
    head = len(_HEAD) - 2 + 64
    body = data[head:-2]
    if data[:head] != _HEAD % hashlib.sha256(body).hexdigest().encode() or data[-2:] != b"}\n":
        raise CorruptLog(f"{where} is damaged ({len(data)} bytes, its checksum does not match); restore it from a "
                         f"copy. If it is the last segment, move it away instead: what it recorded is computed again")
    before, begin, lines = body.partition(RECORDS)
    decoded: dict[str, Any] = loads(before + b"}" if begin else before)
    if decoded.get("format") != FORMAT:
        raise StoreError(f"{where} has format {decoded.get('format')}, this version of tokenmill reads format "
                         f"{FORMAT}; use the version that wrote this store, or a new --store")
    if begin:
        lines = lines.removesuffix(_AFTER)
        decoded["records"] = lines.split(b",\n") if lines else []
    return decoded


def create(store: Store, number: int, body: dict[str, Any], clock: Clock) -> dict[str, Any] | None:
    """Create segment (file of the commit log) `number` with this body, if the number is free. Returns None when this
    process created the segment. Returns the body of the existing segment when another process created it.

    A nonce (random id) in the body shows which process created the segment. The storage's reply does not always show
    this: a request may take effect and yet time out, and a client library may repeat a request that took effect and
    then report that the repetition was refused.
    """
    data, name = encode_segment(body), segment_name(number)
    for attempt in range(RETRIES + 1):
        try:
            if store.put_absent(name, data):
                return None
        except StoreError:
            raise
        except Exception as e:                            # object storage libraries raise their own exceptions
            if attempt == RETRIES:
                raise StoreError(f"cannot commit to {store.at(name)} after {RETRIES} repetitions: {e}; see that the "
                                 f"store can be reached and run again, what was committed is kept") from e
        try:
            existing = decode_segment(store.read(name), store.at(name))
        except FileNotFoundError:                         # the put had no effect
            clock.sleep(min(8.0, 0.1 * 2 ** attempt))
            continue
        except CorruptLog:
            raise
        except Exception:
            if attempt == RETRIES:
                raise
            clock.sleep(min(8.0, 0.1 * 2 ** attempt))
            continue
        return None if existing["nonce"] == body["nonce"] else existing
    raise StoreError(f"{store.at(name)} was refused but is not there; see that the store can be written and run again, "
                     f"what was committed is kept")
