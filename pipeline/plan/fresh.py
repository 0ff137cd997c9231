"""Finds nodes of a plan (groups of tasks) that are *fresh* as a whole: all of their tasks have results in the store.
The tasks of such a node need not be checked one by one.

To check a task, a plan forms the key of the task and reads its record, the entry in the commit log that tells of its
result. This takes 0.1 ms. A run then reads each record again to add up counters and to publish results. With two
million tasks this takes many minutes, even when nothing has changed. When a node ends, the driver therefore writes one
file, `nodes/NAME`:

    {"format", "inputs", "segment", "sum", "sums", "warnings", "batches": [[node, [[origin, tasks], …]], …]}
    the keys of its tasks in plan order, 16 bytes each

These two parts come after a first line, which holds their sha256. A later plan treats the node as fresh when two
conditions hold:

* The later plan computes the same `inputs` for the node. It is a hash of everything that decides which tasks the node
  has: our code, the node's ingredients (`plan.provenance`) and arguments, the files of its sources, and the `results`
  (`NodeSums`) of the nodes it depends on. The `results` of a node differ when any record of the node differs.
* Since the node ended, the commit log has only grown, and no record was retired (made invalid; `LogView.retired_at`).
  The log has only grown if its segment (file) number `segment` still has the checksum `sum`. All records that were
  valid when the node ended are then still there. Of several records for a key the first one is valid, so each task
  still has the record it had.

Otherwise the tasks of the node are checked one by one, which is called *walking* the node, and its file is written
again. A file that is missing, damaged, or older or newer than the log therefore costs only time. After one record is
retired, every node is walked once, because it is not known which node the record belonged to. Nodes of different
recipes that have the same name replace each other's files.

The result of a fresh node is computed only when a node that is walked needs it. The generator of the fresh node
(`Node.work`) then runs again and is sent the records of the keys in the file. The task specs that it yields are
ignored.
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import json
import re
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, groupby
from typing import Any

from pipeline.engine.backends.fingerprint import code_hash, roots
from pipeline.engine.driver.queue import Row, TaskRecords
from pipeline.engine.driver.sums import NodeSums
from pipeline.plan.nodes import Node
from pipeline.store.errors import StoreError
from pipeline.store.log import Log
from pipeline.store.snapshot import segment_head
from pipeline.store.temp import scratch_database
from pipeline.store.view import LogView

FORMAT = 1
FOLDER = "nodes"
KEY_BYTES, PIECE = 16, 1 << 14


@dataclass(frozen=True)
class FreshNode:
    """The commit records of a node of the plan (a group of tasks) whose tasks all have results in the store. `sums` are
    the sums of the counters, and `batches` the records of each batch of tasks."""

    sums: NodeSums
    batches: list[TaskRecords]


class Results(Mapping[str, Any]):
    """The results of the nodes of a plan (groups of tasks), by name. The result of a fresh node (all of whose tasks
    have results in the store) is computed on first access."""

    def __init__(self) -> None:
        self._computed: dict[str, Any] = {}
        self._later: dict[str, Callable[[], Any]] = {}

    def put(self, name: str, result: Any) -> None:
        self._computed[name] = result

    def put_later(self, name: str, make: Callable[[], Any]) -> None:
        self._later[name] = make

    def __getitem__(self, name: str) -> Any:
        if name in self._later:
            self._computed[name] = self._later[name]()
            del self._later[name]
        return self._computed[name]

    def __contains__(self, name: object) -> bool:
        return name in self._computed or name in self._later

    def __iter__(self) -> Iterator[str]:
        return iter([*self._computed, *self._later])

    def __len__(self) -> int:
        return len(self._computed) + len(self._later)


class FreshNodes:
    """Finds fresh nodes of a plan (groups of tasks that all have results in the store), and writes a file about each
    node that ends. It writes nothing when `log` is a read-only view and not a `Log`.

    * `ingredients` is the result of `provenance.node_ingredients`: for each node, the settings and versions that its
      results depend on.
    * `code` is a hash of Tokenmill's code, by default `our_code()`.
    * `warnings` is the list to which nodes add warnings while they are planned. A fresh node is not planned again; the
      warnings in its file are added to the list instead.
    * `suffix` is appended to the names of the files, so that variants of a recipe that run together do not replace each
      other's files.
    """

    def __init__(self, log: LogView, ingredients: Mapping[str, Any], warnings: list[str],
                 code: str | None = None, suffix: str = "") -> None:
        self._suffix = suffix
        self._log, self._ingredients, self.warnings = log, ingredients, warnings
        self._code = our_code() if code is None else code
        self._results: dict[str, str] = {}               # node → `NodeSums.results`
        self._segments: dict[int, str] = {}              # segment → its checksum, as it is now

    def find(self, node: Node) -> FreshNode | None:
        """Return the sums and records of a node (a group of tasks) if the store has the results of all its tasks.
        Return None if this is not known; the caller must then check the tasks one by one."""
        inputs = self._inputs(node)
        if inputs is None:
            return None
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, StoreError):
            head, keys = _decode(self._log.store.read(path_of(node.name + self._suffix)))
            segment = head["segment"]
            if head["format"] != FORMAT or head["inputs"] != inputs or not (
                    self._log.retired_at <= segment <= self._log.segments) or self._sum(segment) != head["sum"]:
                return None
            sums = NodeSums.from_json(head["sums"])
            batches = _batches(head["batches"], keys, self._log)
            self._results[node.name] = sums.results
            self.warnings += head["warnings"]
            return FreshNode(sums, batches)
        return None

    def ended(self, node: Node, sums: NodeSums, warnings: Sequence[str] = ()) -> None:
        """Write the file about a node (a group of tasks) that has ended. From this file, later plans see that all tasks
        of the node have results. `node.batches` holds the records of all tasks, and `warnings` are those that the node
        added.

        An error while writing this file is ignored: the next plan then checks the tasks one by one. An error is raised
        when another driver has taken over the store, and when the commit log cannot be written.
        """
        inputs = self._inputs(node)
        self._results[node.name] = sums.results
        if inputs is None or not isinstance(self._log, Log):
            return
        self._log.flush()
        segment, batches, keys = self._log.segments, [], bytearray()
        for batch in node.batches:
            batches.append((batch.node, [(origin, sum(1 for _ in tasks)) for origin, tasks in groupby(batch.origins)]))
            for key in batch.keys:
                keys += bytes.fromhex(key)
        if len(keys) != KEY_BYTES * sums.tasks:
            raise ValueError(f"{node.name}: {sums.tasks} tasks have keys of {len(keys)} bytes")
        self._log.check_lease()
        with contextlib.suppress(OSError, StoreError, LookupError, ValueError):     # the next plan walks the node
            head = {"format": FORMAT, "inputs": inputs, "segment": segment, "sum": self._sum(segment),
                    "sums": sums.to_json(), "warnings": list(warnings), "batches": batches}
            self._log.store.write(path_of(node.name + self._suffix), _encode(head, bytes(keys)))

    def made_again(self, node: Node, results: Mapping[str, Any], batches: Sequence[TaskRecords]) -> Any:
        """Compute the result of a fresh node (all of whose tasks are done). This runs the generator of the node
        (`Node.work`) with the stored records of the tasks."""
        before = len(self.warnings)
        work = node.work(results)
        try:
            next(work)
            for batch in batches:
                work.send(batch)
        except StopIteration as stop:
            del self.warnings[before:]                       # `find` has added them
            return stop.value
        raise RuntimeError(f"{node.name} asks for more tasks than it had when it ended")

    def _inputs(self, node: Node) -> str | None:
        """Return a hash of everything that decides which tasks a node of the plan has. Returns None when the node
        cannot name all of this (`Node.inputs` is None). Also returns None while the results of a node that it depends
        on are not known."""
        if node.inputs is None or any(dep not in self._results for dep in node.deps):
            return None
        parts = [FORMAT, self._code, node.name, node.kind, self._ingredients.get(node.name), node.inputs(),
                 [[dep, self._results[dep]] for dep in node.deps]]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def _sum(self, segment: int) -> str:
        """Return the checksum of a segment (file) of the commit log. It is read from the beginning of the segment."""
        if segment not in self._segments:
            self._segments[segment] = segment_head(self._log.store, segment).split(b'"')[3].decode()
        return self._segments[segment]


@cache
def our_code() -> str:
    """Return a hash of Tokenmill's source code. The code of the trainer is left out, because no task of a plan depends
    on it."""
    return code_hash({name: root for name, root in roots().items() if name != "trainer"})


def path_of(node: str) -> str:
    """Return the path, in the store, of the file that records the finished tasks of a node. Characters of the node's
    name that do not suit a file name, such as '/', are replaced."""
    plain = re.sub(r"[^\w.-]", "_", node)[:64]
    return f"{FOLDER}/{plain}-{hashlib.sha256(node.encode()).hexdigest()[:8]}"


def _encode(head: Mapping[str, Any], keys: bytes) -> bytes:
    data = json.dumps(head, separators=(",", ":")).encode() + b"\n" + keys
    return hashlib.sha256(data).hexdigest().encode() + b"\n" + data


def _decode(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Split the contents of a node's file into the JSON head and the keys of the node's tasks. Raises ValueError for a
    damaged file."""
    checksum, _, signed = data.partition(b"\n")
    if hashlib.sha256(signed).hexdigest().encode() != checksum:
        raise ValueError("damaged")
    head, _, keys = signed.partition(b"\n")
    return json.loads(head), keys


def _batches(described: list[Any], keys: bytes, log: LogView) -> list[TaskRecords]:
    """Return, for each batch of tasks of a node, its commit records. They are read from the log only when they are
    used.

    `described` and `keys` come from the node's file: [[node, [[origin, tasks], ...]], ...], and the keys of all tasks,
    16 bytes each. The keys are moved to a database on disk, so that they take no memory while nobody uses the records.
    Raises ValueError when keys are missing.
    """
    if len(keys) != KEY_BYTES * sum(n for _, runs in described for _, n in runs):
        raise ValueError("keys are missing")
    db = scratch_database(1)
    db.execute("CREATE TABLE piece (number INTEGER PRIMARY KEY, keys BLOB)")
    db.executemany("INSERT INTO piece VALUES (?, ?)", (
        (offset // PIECE, keys[offset:offset + PIECE]) for offset in range(0, len(keys), PIECE)))
    batches, start = [], 0
    for node, runs in described:
        size = sum(n for _, n in runs)
        batches.append(TaskRecords(_Rows(db, start, runs), size, log.get_all, node))
        start += size
    return batches


class _Rows:
    """Reads the tasks of one batch of a node from the database of task keys. Each task is (key, origin, 0), where the
    origin is a source or dataset. A `TaskRecords` uses it as its `rows`. The keys of the batch begin at key number
    `start` of the database. `runs` lists (origin, number of consecutive tasks with this origin)."""

    def __init__(self, db: sqlite3.Connection, start: int, runs: list[tuple[str, int]]) -> None:
        self._db, self._start = db, start
        self._origins = [origin for origin, _ in runs]
        self._ends = list(accumulate(n for _, n in runs))

    def __call__(self, first: int, stop: int) -> list[Row]:
        begin, end = KEY_BYTES * (self._start + first), KEY_BYTES * (self._start + stop)
        data = b"".join(keys for keys, in self._db.execute(
            "SELECT keys FROM piece WHERE number BETWEEN ? AND ? ORDER BY number", (begin // PIECE, end // PIECE)))
        data = data[begin % PIECE:][:end - begin]
        return [(data[offset:offset + KEY_BYTES].hex(), self._origins[bisect.bisect_right(self._ends, first + i)], 0)
                for i, offset in enumerate(range(0, len(data), KEY_BYTES))]
