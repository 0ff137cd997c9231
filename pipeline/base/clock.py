"""Time and fresh names, passed to whatever waits, times out or names its attempts.

Code that calls `time` itself can only be tested by waiting, and a race between two drivers cannot be replayed. Code
that takes a `Clock` runs the same in a simulation, where a thousand seconds pass in a millisecond and every name comes
from a seed.
"""

from __future__ import annotations

import time
import uuid


class Clock:
    """The clock of this machine. A simulated one overrides all four."""

    def now(self) -> float:
        """Seconds on a clock that never goes back, from an arbitrary start: for durations and deadlines."""
        return time.monotonic()

    def wall(self) -> float:
        """Seconds since 1970: for people and for other machines, never for deadlines."""
        return time.time()

    def sleep(self, seconds: float) -> None:
        """Do nothing for so long."""
        time.sleep(seconds)

    def new_id(self) -> str:
        """32 hexadecimal digits that are unique: the name of an attempt, the nonce of a log segment."""
        return uuid.uuid4().hex


SYSTEM = Clock()
