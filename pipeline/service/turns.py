"""Lets few requests do dear work at a time. Others wait for a while; when too many wait, they are refused."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from pipeline.service.duck import Busy


class Turns:
    """At most `at_once` work and `waiting` wait. A waiting one holds a thread of the server."""

    def __init__(self, at_once: int, waiting: int) -> None:
        self._at_once = at_once
        self._slots = threading.BoundedSemaphore(at_once)
        self._room = threading.BoundedSemaphore(at_once + waiting)

    @contextlib.contextmanager
    def turn(self, wait_s: float, what: str = "queries") -> Iterator[None]:
        """Wait until fewer work than may. Raises Busy when too many wait already, or it takes longer than `wait_s`."""
        if not self._room.acquire(blocking=False):
            raise Busy(f"too many {what} wait", remedy="try again in a few seconds")
        try:
            if not self._slots.acquire(timeout=wait_s):
                raise Busy(f"{self._at_once} other {what} run", remedy="try again in a few seconds")
            try:
                yield
            finally:
                self._slots.release()
        finally:
            self._room.release()
