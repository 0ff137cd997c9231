"""Reads the commit log: replays its segments (the files of the log), or the packs that compact them
(`pipeline.store.snapshot`), into a state.

The state is a `LogView`. It holds, for the key of each finished task, the record that counts, and the documents in
quarantine. Reports, plans and the writer of the log (`pipeline.store.log.Log`) all use it. Nothing in this module
writes to the store.

A document is quarantined in one of two ways:

by id    {row, id, stage, stage_key, reason}: committed with the record of the task that met the document. Every task
         that later meets the document at this stage skips it, also in other partitions and streams
by row   {key, row, stage, reason}: committed as soon as it is proved that a row of the task `key` kills the task's
         child process. The next attempt of the task skips the row, even under another driver

The quarantine by row comes from the supervisor of the child process, which does not know the document's id. When the
task commits, it quarantines the document by id instead. If the task fails for good, nothing shows that its rows were to
blame, and their quarantine is withdrawn (`released`).

A record whose files are damaged or missing is *retired* by an entry {key, attempt, why}. It no longer counts, and the
next record that is committed for its key counts instead. The content hashes of its files are remembered, so that
`Log.append` detects when the task runs again and produces other contents. They are not remembered for a record that was
retired because no run needed it (`unnamed: true`).

A process may die while it reads a record of an input file. Then the part of the file that begins with this record is
quarantined, first by row and then by id:

by row   `stage` is a number that stands for the file (`pipeline.store.records.READING`)
by id    `file` names the file, the piece of the file that the task reads, and the number of records of this piece that
         come before. `stage_key` is the key of the reader
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pipeline.store import snapshot
from pipeline.store.fs import Store
from pipeline.store.lease import Holder
from pipeline.store.packed import PackedRecords
from pipeline.store.quick_json import loads
from pipeline.store.records import READING, PartRecord
from pipeline.store.segment import SEGMENT, CorruptLog, Facts, decode_segment, dumps, facts, segment_name
from pipeline.store.snapshot import READ_AHEAD, Pack, PackData
from pipeline.store.temp import MOST_KEYS, scratch_database

log = logging.getLogger("tokenmill")

#: MB of cache for the table of records. Keys are hashes, so with 10⁵ records a smaller cache misses at every record
CACHE_MB = 64


class LogView:
    """The state of the commit log, for reading. Records are kept on disk, and each is decoded only when it is asked
    for. So a log of millions of records needs little memory. Records from packs (files that compact many segments of
    the log) are in a temporary file (`PackedRecords`), and all later records in a temporary database."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.damaged: set[Pack] = set()                      # packs that could not be used
        self._begin_with(PackedRecords())

    def _begin_with(self, packed: PackedRecords) -> None:
        """Reset the state to the empty log, before its first segment. `packed` holds the records of the packs (files
        that compact many segments) that will be replayed first."""
        self.segments = 0                                    # number of segments replayed
        self.retired_at = 0                                  # the last segment that retired a record; 0: none did
        self.epoch = 0                                       # the latest epoch
        self.holder: Holder | None = None            # the driver that opened the latest epoch
        self.runs: dict[int, str] = {}                       # epoch → run of the driver that opened the epoch
        self.packed = 0                                      # the last segment that was read from a pack
        self.unpacked = 0                                    # bytes of the segments replayed after `packed`
        self.holes: list[tuple[int, int]] = []            # ranges of segments up to `packed` that are in no sound pack
        self._packed = packed
        self._db = scratch_database(CACHE_MB)
        self._db.execute("CREATE TABLE record "
                         "(number INTEGER PRIMARY KEY, key TEXT UNIQUE, replay_key TEXT, data BLOB)")
        self._db.execute("CREATE INDEX replay ON record (replay_key) WHERE replay_key != ''")
        self._db.execute("CREATE TABLE retired (key TEXT PRIMARY KEY, contents BLOB) WITHOUT ROWID")  # {file: content}
        #: stage key → document id → entry
        self._quarantined_documents: dict[str, dict[str, dict[str, Any]]] = {}
        #: key without a record → row → (stage, reason)
        self._quarantined_rows: dict[str, dict[int, tuple[int, str]]] = {}

    def get(self, key: str) -> PartRecord | None:
        """Return the record that counts for the task `key`; None when there is none. The first record of a key counts.
        If it is retired (withdrawn), the next record that is committed for the key counts."""
        row = self._db.execute("SELECT data FROM record WHERE key = ?", (key,)).fetchone()
        if row is not None:
            return _record(row[0])
        number = self._packed.find(key)
        return None if number is None else _record(self._packed.data(number))

    def get_all(self, keys: Sequence[str]) -> dict[str, PartRecord]:
        """Return, for each of `keys`, the record that counts (the first one of its key that was not withdrawn). Keys
        without a record are left out."""
        records: dict[str, PartRecord] = {}
        for first in range(0, len(keys), MOST_KEYS):
            chunk = keys[first:first + MOST_KEYS]
            records.update((key, _record(data)) for key, data in self._db.execute(
                f"SELECT key, data FROM record WHERE key IN ({','.join('?' * len(chunk))})", chunk))
        for key in keys:
            if key not in records and (number := self._packed.find(key)) is not None:
                records[key] = _record(self._packed.data(number))
        return records

    def earlier(self, replay_key: str) -> PartRecord | None:
        """Return the latest valid record with this replay key; None when there is none. A replay key is a task's key
        (hash of its inputs and settings) computed without its thresholds. Tasks that share it compute the same signals
        (numbers stored beside a text), so the signals of the earlier task can be used again."""
        if not replay_key:
            return None
        row = self._db.execute("SELECT data FROM record WHERE replay_key = ? AND replay_key != '' "
                               "ORDER BY number DESC LIMIT 1", (replay_key,)).fetchone()
        if row is not None:
            return _record(row[0])
        number = self._packed.earlier(replay_key)
        return None if number is None else _record(self._packed.data(number))

    def __contains__(self, key: object) -> bool:
        return (self._db.execute("SELECT 1 FROM record WHERE key = ?", (key,)).fetchone() is not None
                or self._packed.find(str(key)) is not None)

    def __len__(self) -> int:
        return len(self._packed) + int(self._db.execute("SELECT count(*) FROM record").fetchone()[0])

    def state(self) -> str:
        """Return a string that identifies the set of valid records. The string changes when a record is added or
        withdrawn, and stays the same when a process merely opens the log for writing."""
        row = self._db.execute("SELECT data FROM record ORDER BY number DESC LIMIT 1").fetchone()
        number = self._packed.last() if row is None else None
        last = row[0] if row is not None else b"{}" if number is None else self._packed.data(number)
        record = json.loads(last)
        return f"{len(self)} {record.get('key', '')} {record.get('attempt', '')}"

    def records(self) -> Iterator[PartRecord]:
        """Yield all valid records (those not withdrawn), in the order in which they were committed."""
        for number in self._packed.numbers():
            yield _record(self._packed.data(number))
        last = 0
        while rows := self._db.execute("SELECT number, data FROM record WHERE number > ? ORDER BY number LIMIT 256",
                                       (last,)).fetchall():
            last = rows[-1][0]
            for _, data in rows:
                yield _record(data)

    def sample(self, most: int) -> Iterator[PartRecord]:
        """Yield a sample of the valid records (those not withdrawn), spread evenly over the log. It has at most about
        `most` records."""
        last = self._db.execute("SELECT max(number) FROM record").fetchone()[0] or 0
        step = max(1, -(-(self._packed.limit + last) // most))
        for number in range(0, self._packed.limit, step):
            if self._packed.counts(number):                   # a retired record does not count
                yield _record(self._packed.data(number))
        for number in range(1, last + 1, step):
            row = self._db.execute("SELECT data FROM record WHERE number = ?", (number,)).fetchone()
            if row is not None:
                yield _record(row[0])

    def retired_contents(self, key: str) -> dict[str, str]:
        """Return {name of a file: content hash} for the files of a retired record of the task `key`: the last record
        that was withdrawn because its files were damaged. {} when there is none."""
        if not self.retired_at:                               # the usual case, which a driver asks for at every commit
            return {}
        row = self._db.execute("SELECT contents FROM retired WHERE key = ?", (key,)).fetchone()
        return {} if row is None else json.loads(row[0])

    def quarantined(self, stage_keys: Iterable[str]) -> dict[str, dict[str, Any]]:
        """Return the documents that one of these stages quarantined, as id → {"id", "stage", "stage_key", "reason",
        "row"}. Tasks skip these documents. If several of the stages quarantined a document, the result has what the
        first of them in `stage_keys` noted."""
        result: dict[str, dict[str, Any]] = {}
        for key in stage_keys:
            for id, entry in self._quarantined_documents.get(key, {}).items():
                result.setdefault(id, entry)
        return result

    def quarantined_rows(self, key: str) -> dict[int, tuple[int, str]]:
        """Return the rows of the unfinished task `key` that are quarantined because its attempts died on them: {row:
        (number of the stage that ran, reason)}. The result is empty once the task has a record, because the record
        names the documents by id."""
        return dict(self._quarantined_rows.get(key, ()))

    # -- replay --------------------------------------------------------------------------------------------------
    def refresh(self) -> None:
        """Replay the segments (files of the log) added since the last call. If a pack (file that compacts many
        segments) holds one of them, replay the whole log instead. Raises CorruptLog when a segment is damaged or
        missing and no undamaged pack holds it."""
        packs, again, done = snapshot.listed(self.store), False, False
        while not done:
            try:
                if any(pack.last > self.segments and pack not in self.damaged for pack in packs):
                    self._replay_packs(packs)
                self._replay_segments(max((pack.last for pack in packs), default=0))
                done = True
            except CorruptLog:
                # since packs were listed, `store gc` may have removed segments, or a driver replaced damaged packs
                before, packs = packs, snapshot.listed(self.store)
                if packs == before and again:
                    raise
                again = packs == before
                self.damaged.clear()
            finally:
                if not done:                                  # a partial replay must not count as replayed
                    self._begin_with(PackedRecords())

    def _replay_packs(self, packs: Sequence[Pack]) -> None:
        """Replay the log from its beginning to the end of the last undamaged pack (file that compacts many segments of
        the log)."""
        packed, holes, first = PackedRecords(), [], 1
        for data, hole in self._sound(packs):
            if hole:
                holes.append((first, data.pack.last))
            packed.add(data, first)
            first = data.pack.last + 1
        self._begin_with(packed)
        self.segments = self.packed = first - 1
        self.holes = holes
        quarantining = packed.settle()
        with_rows = {entry["key"] for _, _, body in packed.events for entry in body.get("quarantined", ())}
        # replaying any other record would change nothing: `packed` already finds it by its keys
        numbers = iter(sorted({*quarantining, *itertools.chain.from_iterable(map(packed.numbers_of, with_rows))}))
        number = next(numbers, None)
        for before, segment, body in [*packed.events, (packed.limit, 0, {})]:
            while number is not None and number < before:
                packed.limit = number + 1
                if packed.counts(number):
                    data_of = packed.data(number)
                    self._settle_quarantine(facts(data_of), data_of)
                number = next(numbers, None)
            packed.limit = before
            if body:
                self._apply(body, segment, "a pack")

    def _sound(self, packs: Sequence[Pack]) -> Iterator[tuple[PackData, bool]]:
        """Yield the contents of undamaged packs (files that compact segments of the log) that together hold the log
        from its beginning, each as (data, False). The packs may leave a gap: segments before a later pack that no
        undamaged pack holds. These segments are read from their own files, packed in memory, and yielded as (data,
        True)."""
        first = 1
        while True:
            chain, end = [], first
            while (pack := snapshot.covering(packs, end, self.damaged)) is not None:
                chain.append(pack)
                end = pack.last + 1
            for pack, data in zip(chain, self.store.map(self._read_pack, chain, READ_AHEAD)):
                if data is None:
                    self.damaged.add(pack)
                    break
                yield data, False
                first = pack.last + 1
            else:
                next_first = min((pack.first for pack in packs if pack.first > first and pack not in self.damaged),
                                 default=0)
                if not next_first:
                    return
                for pack, pack_bytes in snapshot.build(first, self._read_segments(first, next_first - 1), self.store):
                    yield snapshot.decode(pack, pack_bytes, "memory"), True
                first = next_first

    def _read_pack(self, pack: Pack) -> PackData | None:
        try:
            return snapshot.read(self.store, pack)
        except CorruptLog as e:
            log.warning("%s. Its segments are read instead", e)
            return None

    def _read_segments(self, first: int, last: int) -> Iterator[bytes]:
        """Yield the bytes of the segments (files of the log) `first` to `last`. Raises CorruptLog when one is
        missing."""
        number, names = first, map(segment_name, range(first, last + 1))
        try:
            for data in self.store.map(self.store.read, names, READ_AHEAD):
                yield data
                number += 1
        except FileNotFoundError as e:
            raise CorruptLog(f"{self.store.at(segment_name(number))} is missing though later segments or a pack are "
                             f"there; restore it from a copy, or start a new --store") from e

    def _replay_segments(self, last_packed: int) -> None:
        """Replay all segments (files of the log) that have not been replayed. All segments up to number `last_packed`
        must exist, because the name of a pack (file of compacted segments) covers them. They are read even if the
        listing of the store lacks them."""
        last = last_packed
        for path in self.store.list("log", after=segment_name(self.segments)):
            if path.count("/") > 1:
                break                                         # folders sort after the segments
            if (match := SEGMENT.fullmatch(path)) is not None:          # skips segments moved away
                last = max(last, int(match[1]))
        # a large folder is listed page by page, so the list may lack a new segment and yet hold a later one
        for data in self._read_segments(self.segments + 1, last):
            number = self.segments + 1
            self.unpacked += len(data)
            self._replay(number, decode_segment(data, self.store.at(segment_name(number))))

    def _replay(self, number: int, body: dict[str, Any]) -> None:
        """Apply segment `number` of the commit log, with this body, to the state."""
        for data in body.get("records", ()):
            self._add_record(facts(data), data)
        self._apply(body, number, self.store.at(segment_name(number)))
        self.segments = number

    def _apply(self, body: dict[str, Any], segment: int, where: str) -> None:
        """Apply everything in the body of segment number `segment` except its records.

        Raises CorruptLog when the epoch of the segment (the term of one driver) does not follow from the segments
        before. This can happen when a dead driver's delayed write creates a segment under a number whose own segment
        `store gc` has removed.
        """
        if body["epoch"] != self.epoch + (body["kind"] == "epoch"):
            raise CorruptLog(f"{where} is of epoch {body['epoch']} and follows epoch {self.epoch}; restore what "
                             f"was there from a copy, or start a new --store")
        if body["kind"] == "epoch":
            self.epoch, self.holder = body["epoch"], body["holder"]
            self.runs[self.epoch] = body["holder"]["run"]
        for entry in body.get("quarantined", ()):
            self._quarantine_row(entry)
        for key in body.get("released", ()):
            self._quarantined_rows.pop(key, None)
        for entry in body.get("retired", ()):
            self._retire(entry, segment)

    def _add_record(self, fact: Facts, data: bytes) -> bool:
        """Add an encoded record to the state of the log. `fact` holds the main fields of the record. Returns False when
        the record's key already has a record that counts."""
        if self._packed.find(fact.key) is not None:
            return False
        inserted = self._db.execute("INSERT OR IGNORE INTO record (key, replay_key, data) VALUES (?, ?, ?)",
                                    (fact.key, fact.replay_key, data))
        if not inserted.rowcount:
            return False
        self._settle_quarantine(fact, data)
        return True

    def _settle_quarantine(self, fact: Facts, data: bytes) -> None:
        """Quarantine the documents that a new record names. This replaces the quarantine of rows that the record's task
        had while it was unfinished."""
        self._quarantined_rows.pop(fact.key, None)
        if fact.quarantines:
            for entry in loads(data)["quarantine"]:
                self._quarantine_document(entry)

    def _retire(self, entry: dict[str, Any], segment: int) -> bool:
        """Retire (withdraw) the record that `entry` names by key and attempt. `entry` comes from segment (file of the
        log) number `segment`. Returns False when the key has no record, or when its current record comes from another
        attempt."""
        record = self.get(entry["key"])
        if record is None or record.attempt != entry["attempt"]:
            return False
        if not entry.get("unnamed"):             # nothing was built on an unnamed record, so the next one may differ
            contents = dumps({name: info.content for name, info in record.files.items()})
            self._db.execute("INSERT OR REPLACE INTO retired VALUES (?, ?)", (record.key, contents))
        if (number := self._packed.find(record.key)) is not None:
            self._packed.drop(record.key, number)
        self._db.execute("DELETE FROM record WHERE key = ?", (record.key,))
        self.retired_at = segment
        return True

    def _quarantine_document(self, entry: dict[str, Any]) -> bool:
        of_stage = self._quarantined_documents.setdefault(entry["stage_key"], {})
        return of_stage.setdefault(entry["id"], entry) is entry

    def _quarantine_row(self, entry: dict[str, Any]) -> bool:
        """Quarantine the row (document) that `entry`, read from the log, names by task and number. If the process died
        while it read the row, the quarantine of later rows is dropped, because these rows get other numbers. Returns
        False when the row is quarantined already, or when its task has a record."""
        if entry["key"] in self:
            return False
        rows = self._quarantined_rows.setdefault(entry["key"], {})
        if entry["row"] in rows:
            return False
        if entry["stage"] <= READING:                         # a fault while reading renumbers later rows
            for row in [row for row in rows if row > entry["row"]]:
                del rows[row]
        rows[entry["row"]] = (entry["stage"], entry["reason"])
        return True


def _record(data: bytes) -> PartRecord:
    return PartRecord.from_json(loads(data))
