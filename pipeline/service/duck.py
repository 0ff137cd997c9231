"""Runs DuckDB on a few files and denies it access to everything else.

A database lives in memory for one query. It may open only the files that it was given. It may not use any other path,
the network, extensions, Python variables, or temporary files for data that exceeds its memory. These settings are
locked before a query runs. The SQL text comes from this program; every value from a user is bound as a parameter.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from pipeline.base.clock import SYSTEM, Clock
from pipeline.base.errors import TokenmillError

#: seconds between two tries to interrupt a query: an interrupt before the query runs has no effect
AGAIN_S = 0.05


class QueryError(TokenmillError):
    """Raised when a query about documents cannot be answered. `status` is the HTTP status, `key` is the parameter that
    is wrong, and `remedy` says what to do."""

    status = 400
    title = "The query is wrong"

    def __init__(self, detail: str, key: str = "", remedy: str = "") -> None:
        super().__init__(f"{key}: {detail}; {remedy}" if key else f"{detail}; {remedy}")
        self.detail, self.key, self.remedy = detail, key, remedy


class TooDear(QueryError):
    """Raised when a query needs more time, memory or transfer than one query may use."""

    status = 422
    title = "The query is too dear"


class Busy(QueryError):
    """Raised when a query cannot begin because too many other queries run."""

    status = 503
    title = "Other queries run"


class Cancelled(QueryError):
    """Raised when the client that sent the query has disconnected, or its request has run out of time."""

    status = 499
    title = "Cancelled"


@dataclass(frozen=True)
class QueryLimits:
    """Limits for queries. `memory_mb` is DuckDB's memory for one query. At most `at_once` queries run at a time, and a
    further query waits up to `wait_s` seconds. A query on object storage may read at most `fetched_bytes`."""

    seconds: float = 20.0
    memory_mb: int = 256
    threads: int = 2
    at_once: int = 2
    wait_s: float = 10.0
    fetched_bytes: int = 4 << 30


class Stop:
    """Tells the code that works on a query when to end. This is when the time of the query is up, or when another
    thread has called `cancel`."""

    def __init__(self, seconds: float, clock: Clock = SYSTEM) -> None:
        self._clock, self._until, self._seconds = clock, clock.now() + seconds, seconds
        self._wake = threading.Event()
        self._cancelled = False

    def cancel(self) -> None:
        self._cancelled = True
        self._wake.set()

    @property
    def left(self) -> float:
        """The number of seconds until the query's time is up."""
        return max(0.0, self._until - self._clock.now())

    def check(self) -> None:
        """Raise Cancelled or TooDear when the query should end."""
        if self._cancelled:
            raise Cancelled("the query was cancelled", remedy="ask again")
        if not self.left:
            raise TooDear(f"the query took longer than {self._seconds:g} s",
                          remedy="ask for fewer documents: filter by source, reason or language first")

    @contextlib.contextmanager
    def interrupting(self, connections: Sequence[Any]) -> Iterator[None]:
        """A context manager that interrupts DuckDB's queries on `connections` when their time is up or they are
        cancelled. Raises TooDear or Cancelled if this happens before the queries begin."""
        self.check()
        done = threading.Event()

        def watch() -> None:
            self._wake.wait(self.left)
            while not done.wait(AGAIN_S):
                for connection in connections:
                    connection.interrupt()

        watcher = threading.Thread(target=watch, name="query-stop", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            done.set()
            self._wake.set()
            watcher.join()
            if not self._cancelled:
                self._wake.clear()


class Database:
    """A context manager: an in-memory DuckDB database that can read only `files` (paths on this machine). Queries raise
    TooDear when they need more memory than the limit."""

    def __init__(self, files: Sequence[str], limits: QueryLimits, stop: Stop) -> None:
        import duckdb

        self._duckdb, self._stop, self._limits = duckdb, stop, limits
        first = duckdb.connect(":memory:", config={
            "threads": limits.threads, "memory_limit": f"{limits.memory_mb}MiB", "temp_directory": "",
            "autoload_known_extensions": False, "autoinstall_known_extensions": False,
            "allow_community_extensions": False, "allow_persistent_secrets": False,
            "python_enable_replacements": False, "preserve_insertion_order": False})
        self._connections = [first, *(first.cursor() for _ in range(1, limits.threads))]
        for connection in self._connections:
            connection.execute("SET enable_progress_bar = false")       # of one connection; the others are of all
        first.execute("SET allowed_paths = ?", [list(files)])
        first.execute("SET enable_external_access = false")
        first.execute("SET lock_configuration = true")

    def rows(self, sql: str, values: Sequence[Any]) -> list[dict[str, Any]]:
        """Run one SELECT, with `values` bound to its placeholders, and return its rows."""
        return self.rows_of_each([(sql, values)])[0]

    def rows_of_each(self, selects: Sequence[tuple[str, Sequence[Any]]]) -> list[list[dict[str, Any]]]:
        """Run several SELECTs, each with the values to bind to its placeholders, and return the rows of each. As many
        of them run at a time as a query may have threads: DuckDB uses one thread for a SELECT that reads few rows. If
        their memory together exceeds the limit, they run one after another."""
        for sql in {sql for sql, _ in selects}:
            statements = self._connections[0].extract_statements(sql)
            if len(statements) != 1 or statements[0].type != self._duckdb.StatementType.SELECT:
                raise ValueError("a query is one SELECT")
        free: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for connection in self._connections:
            free.put(connection)

        def run(select: tuple[str, Sequence[Any]]) -> list[dict[str, Any]]:
            connection = free.get()
            try:
                self._stop.check()
                cursor = connection.execute(select[0], list(select[1]))
                names = [column[0] for column in cursor.description]
                return [dict(zip(names, row)) for row in cursor.fetchall()]
            finally:
                free.put(connection)

        try:
            with self._stop.interrupting(self._connections):
                if len(selects) > 1:
                    # together, SELECTs may need more memory than there is, though each alone does not
                    with (contextlib.suppress(self._duckdb.OutOfMemoryException),
                          ThreadPoolExecutor(len(self._connections)) as pool):
                        return list(pool.map(run, selects))
                return [run(select) for select in selects]
        except self._duckdb.InterruptException:
            self._stop.check()
            raise
        except self._duckdb.OutOfMemoryException as e:
            raise TooDear(f"the query needs more than {self._limits.memory_mb} MiB of memory",
                          remedy="ask for fewer documents or columns, or sort by 'stored'") from e

    def __enter__(self) -> Database:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self._connections:
            connection.close()
