"""Looks at runs for many viewers at once: however many follow a run, its files are read once a second.

What is kept here is what was read last; a restarted server reads it again and gives the same event ids.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from starlette.concurrency import run_in_threadpool

from pipeline.base.clock import SYSTEM, Clock
from pipeline.base.visible import json_text
from pipeline.cluster.attempts import standing
from pipeline.service.outward import run_document
from pipeline.service.stores import check_run
from pipeline.store.fs import Store

KEPT = 256               # runs whose last look is kept
#: what changes with every look even if nothing has happened
RESTLESS = ("silent_s", "age_s")


@dataclass(frozen=True)
class Look:
    """A run as it stood when it was looked at. `id` changes when the run does, and is the same on every server."""

    id: str
    document: dict[str, Any]
    ended: bool
    data: bytes = field(repr=False)


@dataclass
class _Run:
    lock: asyncio.Lock
    look: Look | None = None
    at: float = 0.0


class Watch:
    """The latest look at each run, at most `fresh_s` seconds old."""

    def __init__(self, fresh_s: float, clock: Clock = SYSTEM) -> None:
        self._fresh_s, self._clock = fresh_s, clock
        self._runs: OrderedDict[tuple[str, str], _Run] = OrderedDict()

    async def look(self, name: str, store: Store, run: str) -> Look:
        """The state of `run` in the store called `name`. Several who ask at once wait for one reading."""
        entry = self._runs.setdefault((name, run), _Run(asyncio.Lock()))
        self._runs.move_to_end((name, run))
        if len(self._runs) > KEPT:
            self._runs.popitem(last=False)
        async with entry.lock:
            if entry.look is None or self._clock.now() - entry.at >= self._fresh_s:
                entry.look = await run_in_threadpool(look_at, store, run)
                entry.at = self._clock.now()
            return entry.look


def look_at(store: Store, run: str) -> Look:
    """Read the state of a run from its store. Raises Problem when the run or the store is not there."""
    check_run(store, run)
    current = standing(store, run)
    document = run_document(store, current)
    lasting = json_text({k: v for k, v in document.items() if k not in RESTLESS}, sort_keys=True)
    digest = hashlib.blake2b(lasting.encode(), digest_size=8).hexdigest()
    return Look(f"{current.attempt}-{digest}", document, current.ended, json_text(document).encode())
