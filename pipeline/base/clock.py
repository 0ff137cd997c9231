"""The clock, and the source of unique names, for all code that waits, has deadlines, or names attempts to run a task.

Code that calls `time` itself can only be tested by waiting, and a race between two drivers cannot be replayed. Code
that takes a `Clock` runs the same in a simulation, where a thousand seconds pass in a millisecond and every name comes
from a seed.
"""

from __future__ import annotations

import time
import uuid


class Clock:
    """The clock of this machine. A simulated clock overrides all four methods."""

    def now(self) -> float:
        """Seconds on a clock that never goes back, from an arbitrary start: for durations and deadlines."""
        return time.monotonic()

    def wall(self) -> float:
        """Seconds since 1970: for people and for other machines, never for deadlines."""
        return time.time()

    def sleep(self, seconds: float) -> None:
        """Wait for `seconds`."""
        time.sleep(seconds)

    def new_id(self) -> str:
        """A unique name of 32 hexadecimal digits, for an attempt to run a task, or as the nonce of a segment (a file)
        of the commit log."""
        return uuid.uuid4().hex


SYSTEM = Clock()
