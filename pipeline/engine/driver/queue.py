"""Keeps the driver's queue of tasks on disk: their specs, their order, and which of them are done.

A run may have millions of tasks, and a spec is a few kB. The queue is therefore a temporary SQLite database, and memory
holds only the tasks that run. A plan node (a group of tasks, such as a pass) adds its tasks as an iterable, which is
read little by little while tasks run. When they are done, the node gets a sequence of their commit records, which are
read from the commit log on demand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice

from pipeline.base.prf import prf
from pipeline.engine.task import ResourceRequest, TaskSpec
from pipeline.store.quick_json import dumps, loads
from pipeline.store.records import PartRecord
from pipeline.store.temp import CACHE_MB, MOST_KEYS, OnDisk, scratch_database

#: tasks of a batch that are read at a time, and commit records, which are larger
CHUNK, RECORDS = 1000, 256

#: the records of tasks, by key (`LogView.get_all`)
Get = Callable[[Sequence[str]], Mapping[str, PartRecord]]


#: a task of a batch: its key, the `origin` and the `weight` of its spec
Row = tuple[str, str, int]


class TaskRecords(OnDisk[PartRecord]):
    """The commit records of a batch of tasks, in the order of the tasks. They are read from the commit log on demand.

    `rows(first, stop)` returns the tasks number `first` to `stop` - 1 of the batch. `node` names the batch's plan node
    (a group of tasks, such as a pass), or one wave of it (tasks that may run at the same time). `origins` are the
    sources or datasets that the tasks read (`TaskSpec.origin`)."""

    def __init__(self, rows: Callable[[int, int], Sequence[Row]], size: int, get: Get, node: str = "") -> None:
        self._rows, self._size, self._get, self.node = rows, size, get, node

    @property
    def origins(self) -> Iterator[str]:
        return (origin for _, origin, _ in self.tasks())

    @property
    def keys(self) -> Iterator[str]:
        return (key for key, _, _ in self.tasks())

    def tasks(self) -> Iterator[Row]:
        for first in range(0, self._size, CHUNK):
            yield from self._rows(first, min(first + CHUNK, self._size))

    def with_tasks(self) -> Iterator[tuple[Row, PartRecord]]:
        """Yields ((key, origin, weight) of the task, its commit record) for each task of the batch."""
        for first in range(0, self._size, RECORDS):
            rows = self._rows(first, min(first + RECORDS, self._size))
            yield from zip(rows, self._records(rows))

    def _read(self, first: int, stop: int) -> list[PartRecord]:
        return self._records(self._rows(first, min(stop, self._size)))

    def _records(self, rows: Sequence[Row]) -> list[PartRecord]:
        records = self._get([key for key, _, _ in rows])
        try:
            return [records[key] for key, _, _ in rows]
        except KeyError as e:
            raise KeyError(f"task {e.args[0]} has no record in the log") from None


class TaskTable:
    """Keeps a table on disk with the key, origin (source or dataset that is read) and weight (bytes to read) of every
    task of all batches."""

    def __init__(self) -> None:
        self._db = scratch_database()
        self._db.execute("CREATE TABLE task (batch INTEGER, place INTEGER, key TEXT, origin TEXT, weight INTEGER, "
                         "PRIMARY KEY (batch, place)) WITHOUT ROWID")

    def add(self, batch: int, place: int, specs: Iterable[TaskSpec]) -> None:
        """Add tasks to a batch. The first of them gets the number `place` in the batch."""
        self._db.executemany("INSERT INTO task VALUES (?, ?, ?, ?, ?)", (
            (batch, place + i, s.key, s.origin, s.weight) for i, s in enumerate(specs)))

    def records(self, batch: int, size: int, get: Get, node: str) -> TaskRecords:
        """Return the commit records of a batch, which has `size` tasks. The records are read with `get` on demand.
        `node` names the batch's plan node (a group of tasks, such as a pass)."""
        def rows(first: int, stop: int) -> list[Row]:
            return self._db.execute("SELECT key, origin, weight FROM task WHERE batch = ? AND place >= ? AND place < ? "
                                    "ORDER BY place", (batch, first, stop)).fetchall()

        return TaskRecords(rows, size, get, node)


class TaskBatch:
    """The tasks that one plan node (a group of tasks, such as a pass) asked for together. The batch is complete when
    the iterable `specs` has been read to its end and all its tasks are done."""

    def __init__(self, number: int, specs: Iterable[TaskSpec]) -> None:
        self.number = number
        self.source: Iterator[TaskSpec] | None = iter(specs)     # None once read to its end
        self.size = self.unfinished = 0
        self.node = ""                                           # plan node of its first task

    @property
    def complete(self) -> bool:
        return self.source is None and self.unfinished == 0


class TaskQueue:
    """Holds batches of tasks, and hands out the tasks that still have to run. Tasks that declare the same resources are
    of one kind; within a kind, the largest are handed out first. With `seed`, the order is shuffled instead. `get`
    reads commit records by task key."""

    def __init__(self, get: Get, seed: int | None = None) -> None:
        self._get, self._seed = get, seed
        self._db = scratch_database(4 * CACHE_MB)             # keys are hashes: a smaller cache would be missed often
        self._tasks = TaskTable()
        for table in ("waiter (key TEXT, batch INTEGER, PRIMARY KEY (key, batch))",
                      "ready (memory INTEGER, gpus REAL, cpu TEXT, rank REAL, key TEXT, spec BLOB, "
                      "PRIMARY KEY (memory, gpus, cpu, rank, key))"):
            self._db.execute(f"CREATE TABLE {table} WITHOUT ROWID")
        self._batches: dict[int, TaskBatch] = {}
        self._serial = 0
        self._done: list[str] = []                            # tasks that are done, for `_settle`
        #: number of tasks waiting to be dispatched, by kind
        self.waiting: dict[ResourceRequest, int] = {}

    def __len__(self) -> int:
        """Returns the number of tasks that wait to be dispatched. Tasks that were not read from their batches yet are
        not counted."""
        return sum(self.waiting.values())

    @property
    def unread(self) -> bool:
        """Whether some batch may have tasks that have not been read from its iterable yet."""
        return any(b.source is not None for b in self._batches.values())

    def add(self, specs: Iterable[TaskSpec]) -> TaskBatch:
        self._serial += 1
        batch = self._batches[self._serial] = TaskBatch(self._serial, specs)
        return batch

    def read(self, limit: int) -> Iterator[tuple[list[TaskSpec], Mapping[str, PartRecord]]]:
        """Read at most `limit` further tasks of every batch. Yields (tasks, records) for each batch that had unread
        tasks. `tasks` are the read tasks that are done already or are new to the queue. A task that another batch had
        put into the queue before is left out. `records` maps the keys of the done tasks to their commit records."""
        for batch in list(self._batches.values()):
            if batch.source is None:
                continue
            specs = list(islice(batch.source, limit))
            if len(specs) < limit:
                batch.source = None
            fresh = self._get([s.key for s in specs])
            new = self._enter(batch, specs, fresh)
            yield [s for s in specs if s.key in fresh or s.key in new], fresh

    def _enter(self, batch: TaskBatch, specs: list[TaskSpec], fresh: Mapping[str, PartRecord]) -> set[str]:
        """Add tasks to a batch. Tasks without a commit record in `fresh` also enter the queue, unless they were put
        into it before. Returns the keys of the tasks that have entered the queue."""
        self._settle()
        self._tasks.add(batch.number, batch.size, specs)
        batch.size += len(specs)
        batch.node = batch.node or next((s.node for s in specs), "")
        missing = {s.key: s for s in reversed(specs) if s.key not in fresh}
        keys = list(missing)
        awaited: set[str] = set()                             # keys that some batch waits for already
        awaited_here: set[str] = set()                        # those that this batch waits for
        for first in range(0, len(keys), MOST_KEYS):
            chunk = keys[first:first + MOST_KEYS]
            for key, number in self._db.execute(
                    f"SELECT key, batch FROM waiter WHERE key IN ({','.join('?' * len(chunk))})", chunk):
                awaited.add(key)
                if number == batch.number:
                    awaited_here.add(key)
        self._db.executemany("INSERT INTO waiter VALUES (?, ?)", (
            (key, batch.number) for key in keys if key not in awaited_here))
        batch.unfinished += len(missing) - len(awaited_here)
        new = missing.keys() - awaited                          # no batch has asked for these keys before
        self._push([spec for key, spec in missing.items() if key in new])
        return new

    def _push(self, specs: list[TaskSpec]) -> None:
        def rank(spec: TaskSpec) -> float:
            return -float(spec.weight) if self._seed is None else float(prf(self._seed, "dispatch", spec.key))

        self._db.executemany("INSERT INTO ready VALUES (?, ?, ?, ?, ?, ?)", (
            (*spec.kind, rank(spec), spec.key, dumps(spec.to_json())) for spec in specs))
        for kind, number in Counter(spec.kind for spec in specs).items():
            self.waiting[kind] = self.waiting.get(kind, 0) + number

    def kinds(self) -> list[ResourceRequest]:
        """Returns the kinds of the waiting tasks, ordered by the first task of each kind. Tasks that declare the same
        resources are of one kind."""
        if len(self.waiting) < 2:
            return list(self.waiting)
        heads = []
        for kind in self.waiting:
            head = self._db.execute("SELECT rank, key FROM ready WHERE memory = ? AND gpus = ? AND cpu = ? "
                                    "ORDER BY rank, key LIMIT 1", kind).fetchone()
            heads.append((head, kind))
        return [kind for _, kind in sorted(heads)]

    def pop(self, kind: ResourceRequest, most: int = 1) -> list[TaskSpec]:
        """Remove the next tasks of a kind (those that declare the resources `kind`) from the queue and return them, at
        most `most`. At least one such task must wait."""
        rows = self._db.execute("SELECT rank, key, spec FROM ready WHERE memory = ? AND gpus = ? AND cpu = ? "
                                "ORDER BY rank, key LIMIT ?", (*kind, most)).fetchall()
        rank, key, _ = rows[-1]
        self._db.execute("DELETE FROM ready WHERE memory = ? AND gpus = ? AND cpu = ? AND (rank, key) <= (?, ?)",
                         (*kind, rank, key))
        self.waiting[kind] -= len(rows)
        if not self.waiting[kind]:
            del self.waiting[kind]
        return [TaskSpec.from_json(loads(spec)) for _, _, spec in rows]

    def done(self, key: str) -> None:
        """Note that the task `key` is done, so that the batches that contain it no longer wait for it."""
        self._done.append(key)
        if len(self._done) == MOST_KEYS:
            self._settle()

    def _settle(self) -> None:
        """Tell the batches which of their tasks are done. `done` only collects the tasks for this method, because one
        SQL statement for many tasks takes half the time of one statement per task."""
        if self._done:
            marks = ",".join("?" * len(self._done))
            for number, in self._db.execute(f"DELETE FROM waiter WHERE key IN ({marks}) RETURNING batch",
                                            self._done).fetchall():
                self._batches[number].unfinished -= 1
            self._done.clear()

    def finished(self) -> list[tuple[TaskBatch, TaskRecords]]:
        """Remove the complete batches (all of whose tasks are done) and return each with its commit records."""
        self._settle()
        complete = [b for b in self._batches.values() if b.complete]
        for batch in complete:
            del self._batches[batch.number]
        return [(b, self._tasks.records(b.number, b.size, self._get, b.node)) for b in complete]
