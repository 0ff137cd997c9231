"""Keeps the plans of recent requests in memory, so that a page that is loaded again does not plan its recipe again."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from typing import Any

from pipeline.base.clock import SYSTEM, Clock
from pipeline.cluster.queue import Submission
from pipeline.store.fs import Store

#: plans in memory, and the seconds for which one is kept: inputs may change without a trace in the store
MOST, KEPT_S = 16, 30.0

Key = tuple[str, str, str]


def plan_key(store: Store, submission: Submission) -> Key:
    """Return a key under which a plan can be remembered. It consists of the store, a hash of the store's log of
    finished tasks, and a hash of the submitted recipe. The recipe's input files are not part of the key."""
    log = hashlib.blake2b(digest_size=16)
    for entry in store.entries("log"):
        log.update(f"{entry.path} {entry.size}\n".encode("utf-8", "surrogateescape"))
    return store.root, log.hexdigest(), submission.digest()


class Plans:
    """Keeps the most recent plans of recipes in memory. A plan is forgotten after KEPT_S seconds, or when MOST newer
    ones exist."""

    def __init__(self, clock: Clock = SYSTEM) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._results: OrderedDict[Key, tuple[float, dict[str, Any]]] = OrderedDict()

    def get(self, key: Key) -> dict[str, Any] | None:
        with self._lock:
            computed, result = self._results.get(key, (0.0, None))
        return result if result is not None and self._clock.now() - computed < KEPT_S else None

    def put(self, key: Key, result: dict[str, Any]) -> None:
        with self._lock:
            self._results.pop(key, None)
            self._results[key] = self._clock.now(), result
            while len(self._results) > MOST:
                self._results.popitem(last=False)
