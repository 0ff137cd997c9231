"""The clock, and the source of unique names, for all code that waits, has deadlines, or names attempts at tasks.

Code that calls `time` itself can be tested only by waiting, and a race between two processes in it cannot be replayed.
Code that takes a `Clock` runs in a simulation without changes: time passes there without waiting, and every name comes
from a seed.
"""

from __future__ import annotations

import time
import uuid


class Clock:
    """The clock of this machine. A simulated clock overrides all four methods: `now`, `wall`, `sleep` and `new_id`."""

    def now(self) -> float:
        """Returns the seconds since an arbitrary start, on a clock that never goes back. Meant for durations and
        deadlines."""
        return time.monotonic()

    def wall(self) -> float:
        """Returns the seconds since 1970. Meant for people and other machines, and not for deadlines, because this
        clock may be set back."""
        return time.time()

    def sleep(self, seconds: float) -> None:
        """Wait for `seconds`."""
        time.sleep(seconds)

    def new_id(self) -> str:
        """Returns a unique name of 32 hexadecimal digits, for example for an attempt at a task."""
        return uuid.uuid4().hex


SYSTEM = Clock()
