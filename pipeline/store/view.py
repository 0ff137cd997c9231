"""The commit log as it is read: the format of a segment, and the state after replaying all of them.

Nothing here writes. `LogView` is the state that reports, plans and the writer (`pipeline.store.log.Log`) share: the
record that counts for each key, and the documents in quarantine. A document is quarantined in one of two ways:

by id    {row, id, stage, stage_key, reason}: committed with the record of the part it was found in. Any task
         that later meets the document at this stage, in another partition or another stream, skips it
by row   {key, row, stage, reason}: reported at once by a supervisor, which knows the row of a task but no ids. The next
         attempt of the same task, also under another driver, skips the row and names it by id when it commits. A task
         that fails for good has proved nothing, so the quarantine of all its rows is withdrawn (`released`)

A record whose files were damaged or missing is *retired*, by key and attempt: {key, attempt, why}. It no longer counts,
and the next record of its key does. The contents of its files are remembered, so that `Log.append` detects a task that
makes other contents the next time. They are forgotten when no run named the record any more (`unnamed: true`).

An input file that killed its reader is quarantined in the same two ways, from a record on: by row with a stage of
`Cursor.reading`, by id with `file` (which file, which piece of it, how many of its records come before) and the key of
its reader as `stage_key`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from pipeline.store.fs import Store, StoreError
from pipeline.store.lease import Holder
from pipeline.store.quick_json import loads
from pipeline.store.records import READING, PartRecord
from pipeline.store.temp import scratch_database

FORMAT = 1
READ_AHEAD = 8               # segments fetched at a time from object storage, a few MB each; twice as many may wait

_SEGMENT = re.compile(r"log/(\d{8})\.json")
_HEAD = b'{"sha256":"%s","body":'


class CorruptLog(StoreError):
    """A segment is damaged or missing."""


def segment_name(number: int) -> str:
    return f"log/{number:08d}.json"


def dumps(value: Any) -> bytes:
    """Canonical JSON in ASCII (file names may hold lone surrogates). Raises ValueError for a NaN, which JSON lacks."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def encode_segment(body: dict[str, Any]) -> bytes:
    data = dumps(body)
    return _HEAD % hashlib.sha256(data).hexdigest().encode() + data + b"}\n"


def decode_segment(data: bytes, where: str) -> dict[str, Any]:
    head = len(_HEAD) - 2 + 64
    body = data[head:-2]
    if data[:head] != _HEAD % hashlib.sha256(body).hexdigest().encode() or data[-2:] != b"}\n":
        raise CorruptLog(f"{where} is damaged ({len(data)} bytes, its checksum does not match); restore it from a "
                         f"copy. If it is the last segment, move it away instead: what it recorded is computed again")
    found: dict[str, Any] = loads(body)
    if found.get("format") != FORMAT:
        raise StoreError(f"{where} has format {found.get('format')}, this version of tokenmill reads format {FORMAT}; "
                         f"use the version that wrote this store, or a new --store")
    return found


class LogView:
    """The state of the log, for reading. Records are kept as JSON in a temporary database and decoded on demand, so
    that a log of millions needs little memory."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.segments = 0                                    # number of segments replayed
        self.epoch = 0                                       # the latest epoch
        self.holder: Holder | None = None            # the driver that opened it
        self.runs: dict[int, str] = {}                       # epoch → run whose driver opened it
        self._db = scratch_database()
        self._db.execute("CREATE TABLE record (number INTEGER PRIMARY KEY, key TEXT UNIQUE, data BLOB)")
        self._db.execute("CREATE TABLE retired (key TEXT PRIMARY KEY, contents BLOB) WITHOUT ROWID")  # {file: content}
        self._db.execute("CREATE TABLE replayable (replay_key TEXT PRIMARY KEY, key TEXT) WITHOUT ROWID")   # the latest
        #: stage key → document id → entry
        self._quarantined_documents: dict[str, dict[str, dict[str, Any]]] = {}
        #: key without a record → row → (stage, reason)
        self._quarantined_rows: dict[str, dict[int, tuple[int, str]]] = {}

    def get(self, key: str) -> PartRecord | None:
        """The record that counts for `key`, or None."""
        found = self._db.execute("SELECT data FROM record WHERE key = ?", (key,)).fetchone()
        return None if found is None else PartRecord.from_json(loads(found[0]))

    def earlier(self, replay_key: str) -> PartRecord | None:
        """The latest record of a pass that differs only in thresholds (`TaskSpec.replay_key`), or None."""
        found = self._db.execute("SELECT key FROM replayable WHERE replay_key = ?", (replay_key,)).fetchone()
        return None if found is None else self.get(found[0])

    def __contains__(self, key: object) -> bool:
        return self._db.execute("SELECT 1 FROM record WHERE key = ?", (key,)).fetchone() is not None

    def __len__(self) -> int:
        return int(self._db.execute("SELECT count(*) FROM record").fetchone()[0])

    def state(self) -> str:
        """A name for the set of records that count: it changes when one is added or retired, but not with a new
        epoch."""
        last = self._db.execute("SELECT data FROM record ORDER BY number DESC LIMIT 1").fetchone()
        record = {} if last is None else json.loads(last[0])
        return f"{len(self)} {record.get('key', '')} {record.get('attempt', '')}"

    def records(self) -> Iterator[PartRecord]:
        """Yield all records that count, in the order in which they were committed."""
        last = 0
        while rows := self._db.execute("SELECT number, data FROM record WHERE number > ? ORDER BY number LIMIT 256",
                                       (last,)).fetchall():
            last = rows[-1][0]
            for _, data in rows:
                yield PartRecord.from_json(loads(data))

    def retired_contents(self, key: str) -> dict[str, str]:
        """Contents, by file, of the last retired record of `key`; {} when none was retired."""
        row = self._db.execute("SELECT contents FROM retired WHERE key = ?", (key,)).fetchone()
        return {} if row is None else json.loads(row[0])

    def quarantined(self, stage_keys: Iterable[str]) -> dict[str, dict[str, Any]]:
        """Documents that one of these stages quarantined, by id: {"id", "stage", "stage_key", "reason", "row"}. Later
        attempts, resumes and reruns skip them. If several stages did, the first of `stage_keys` counts."""
        result: dict[str, dict[str, Any]] = {}
        for key in stage_keys:
            for id, entry in self._quarantined_documents.get(key, {}).items():
                result.setdefault(id, entry)
        return result

    def quarantined_rows(self, key: str) -> dict[int, tuple[int, str]]:
        """Rows of the task `key` that earlier attempts quarantined: {row: (stage as the cursor counts, reason)}. Empty
        once the task has a record, which names them by id."""
        return dict(self._quarantined_rows.get(key, ()))

    def refresh(self) -> None:
        """Replay the segments added since the last call. Raises CorruptLog for a damaged or missing one."""
        numbers = sorted(int(m[1]) for path in self.store.list("log") if (m := _SEGMENT.fullmatch(path)))
        new = range(self.segments + 1, (numbers[-1] if numbers else 0) + 1)
        for unseen in sorted(set(new).difference(numbers)):
            # a large folder is listed in pieces: a segment made meanwhile may be missed although a later one is listed
            if not self.store.exists(segment_name(unseen)):
                number = next(n for n in numbers if n > unseen)
                raise CorruptLog(f"{self.store.at(segment_name(unseen))} is missing though {segment_name(number)} is "
                                 f"there; restore it from a copy, or start a new --store")
        for number, data in zip(new, self.store.map(self.store.read, map(segment_name, new), READ_AHEAD)):
            self._replay(number, decode_segment(data, self.store.at(segment_name(number))))

    def _replay(self, number: int, body: dict[str, Any]) -> None:
        if body["kind"] == "epoch":
            self.epoch, self.holder = body["epoch"], body["holder"]
            self.runs[self.epoch] = body["holder"]["run"]
        for record in body.get("records", ()):
            self._take(record)
        for entry in body.get("quarantined", ()):
            self._quarantine_row(entry)
        for key in body.get("released", ()):
            self._quarantined_rows.pop(key, None)
        for entry in body.get("retired", ()):
            self._retire(entry)
        self.segments = number

    def _take(self, record: dict[str, Any]) -> bool:
        """Take a record into the state. False when its key already has one."""
        took = self._db.execute("INSERT OR IGNORE INTO record (key, data) VALUES (?, ?)",
                                (record["key"], dumps(record)))
        if not took.rowcount:
            return False
        if record.get("replay_key"):
            self._db.execute("INSERT OR REPLACE INTO replayable VALUES (?, ?)", (record["replay_key"], record["key"]))
        self._quarantined_rows.pop(record["key"], None)
        for entry in record["quarantine"]:
            self._quarantine_document(entry)
        return True

    def _retire(self, entry: dict[str, Any]) -> bool:
        """Retire a record. False when the record of that attempt does not count (any more)."""
        record = self.get(entry["key"])
        if record is None or record.attempt != entry["attempt"]:
            return False
        if not entry.get("unnamed"):             # nothing was built on an unnamed record, so the next one may differ
            contents = dumps({name: info.content for name, info in record.files.items()})
            self._db.execute("INSERT OR REPLACE INTO retired VALUES (?, ?)", (record.key, contents))
        self._db.execute("DELETE FROM record WHERE key = ?", (record.key,))
        return True

    def _quarantine_document(self, entry: dict[str, Any]) -> bool:
        of_stage = self._quarantined_documents.setdefault(entry["stage_key"], {})
        return of_stage.setdefault(entry["id"], entry) is entry

    def _quarantine_row(self, entry: dict[str, Any]) -> bool:
        """Quarantine a row. False when it already is, or when the task has its record."""
        if entry["key"] in self:
            return False
        rows = self._quarantined_rows.setdefault(entry["key"], {})
        if entry["row"] in rows:
            return False
        if entry["stage"] <= READING:                         # later rows get other numbers
            for row in [row for row in rows if row > entry["row"]]:
                del rows[row]
        rows[entry["row"]] = (entry["stage"], entry["reason"])
        return True
