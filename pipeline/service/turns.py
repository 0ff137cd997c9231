"""Limits how many requests do expensive work at a time. Other requests wait for a while; if too many wait, new ones are
refused."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from pipeline.service.duck import Busy


class Turns:
    """Lets at most `at_once` requests work at a time, and at most `waiting` more requests wait. Each waiting request
    holds a thread of the server."""

    def __init__(self, at_once: int, waiting: int) -> None:
        self._at_once = at_once
        self._slots = threading.BoundedSemaphore(at_once)
        self._room = threading.BoundedSemaphore(at_once + waiting)

    @contextlib.contextmanager
    def turn(self, wait_s: float, what: str = "queries") -> Iterator[None]:
        """A context manager that waits until fewer than `at_once` requests work. Raises Busy when too many requests
        wait already, or after `wait_s` seconds. `what` names the requests in the error message."""
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
