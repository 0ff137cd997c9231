"""Reads the states of runs for many clients at once. A run's files are read at most once a second, however many clients
follow the run.

Only the latest reading is kept. A restarted server reads the files anew, and its events have the same ids as before.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from starlette.concurrency import run_in_threadpool

from pipeline.base.clock import SYSTEM, Clock
from pipeline.base.visible import json_text
from pipeline.cluster.attempts import run_names, standing
from pipeline.plan.changes import latest_run
from pipeline.service.latest import finished_runs
from pipeline.service.outward import run_document
from pipeline.service.stores import check_run
from pipeline.store.fs import Store

T = TypeVar("T")
KEPT = 512               # runs whose latest state is kept; a page of a list shows up to 500
PATIENCE_S = 0.3         # seconds to wait for a new state where there is an older one
#: fields that change with every reading even if nothing has happened
RESTLESS = ("silent_s", "age_s")


@dataclass(frozen=True)
class RunState:
    """The state of a run when it was last read. `document` is the state as a dict, and `data` is the same as JSON text.
    `id` changes when a field of the state changes, except for the fields RESTLESS. It is the same on every server."""

    id: str
    document: dict[str, Any]
    ended: bool
    data: bytes = field(repr=False)


@dataclass
class _Reading:
    result: Any = None
    at: float | None = None                       # when `result` was read; None: not yet
    task: asyncio.Task[Any] | None = None         # the task that reads it anew at the moment


class RunWatch:
    """Keeps the latest state of each run and the lists of each store's runs in memory, at most KEPT of them in all.
    What is older than `fresh_s` seconds is read again when it is asked for. Requests that come at the same time wait
    for one reading. A finished run stays finished, so it is not read again for the list of finished runs.

    If the driver (the process that leads a run) is on another machine and silent, reading the run's state takes some 12
    seconds, until the driver counts as dead. Requests in this time get the previous state.
    """

    def __init__(self, fresh_s: float, clock: Clock = SYSTEM) -> None:
        self._fresh_s, self._clock = fresh_s, clock
        self._readings: OrderedDict[tuple[str, ...], _Reading] = OrderedDict()
        self._finished: dict[str, dict[str, str]] = {}                # by store, as `finished_runs` returns them

    async def state(self, name: str, store: Store, run: str) -> RunState:
        """Return the state of `run` in the store called `name`. If the state in memory is older than `fresh_s` seconds,
        it is read again; if reading takes long, the older state is returned."""
        return await self._fresh(("run", name, run), lambda: read_state(store, run))

    async def runs(self, name: str, store: Store) -> tuple[list[str], str | None]:
        """Return the names of all runs of the store called `name`, and the name of the run that finished last."""
        return await self._fresh(("runs", name), lambda: (run_names(store), latest_run(store)))

    async def finished(self, name: str, store: Store) -> list[str]:
        """Return the names of the finished runs of the store called `name`, the latest first."""
        def read() -> list[str]:
            self._finished[name] = runs = finished_runs(store, self._finished.get(name, {}))
            return list(runs)

        return await self._fresh(("finished", name), read)

    async def _fresh(self, key: tuple[str, ...], read: Callable[[], T]) -> T:
        entry = self._readings.setdefault(key, _Reading())
        self._readings.move_to_end(key)
        if len(self._readings) > KEPT:
            self._readings.popitem(last=False)
        if entry.task is None and (entry.at is None or self._clock.now() - entry.at >= self._fresh_s):
            entry.task = asyncio.create_task(self._read(entry, read))
            # if no request waits for the task any more, asyncio would log its exception as never retrieved
            entry.task.add_done_callback(lambda task: task.cancelled() or task.exception())
        if (task := entry.task) is not None:
            await asyncio.wait((task,), timeout=None if entry.at is None else PATIENCE_S)
            if task.done():
                return cast(T, task.result())
        return cast(T, entry.result)

    async def _read(self, entry: _Reading, read: Callable[[], T]) -> T:
        try:
            entry.result = await run_in_threadpool(read)
            entry.at = self._clock.now()
            return cast(T, entry.result)
        finally:
            entry.task = None


def read_state(store: Store, run: str) -> RunState:
    """Read the state of a run from its store. Raises HttpProblem when the store or the run does not exist."""
    check_run(store, run)
    current = standing(store, run)
    document = run_document(store, current)
    lasting = json_text({k: v for k, v in document.items() if k not in RESTLESS}, sort_keys=True)
    digest = hashlib.blake2b(lasting.encode(), digest_size=8).hexdigest()
    return RunState(f"{current.attempt}-{digest}", document, current.ended, json_text(document).encode())
