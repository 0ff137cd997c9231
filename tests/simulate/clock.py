"""Virtual time, and names that are derived from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable

from pipeline.base.clock import Clock

#: wall time at the start of every simulation: 2026-01-01
EPOCH = 1_767_225_600.0


class VirtualClock(Clock):
    """A clock that only moves when somebody sleeps or sets `time`. `asleep` is called after every sleep."""

    def __init__(self, seed: int = 0, asleep: Callable[[float], object] = lambda seconds: None) -> None:
        self.time = 0.0
        self.asleep = asleep
        self._random = random.Random(f"names {seed}")

    def now(self) -> float:
        return self.time

    def wall(self) -> float:
        return EPOCH + self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds
        self.asleep(seconds)

    def new_id(self) -> str:
        return f"{self._random.getrandbits(128):032x}"
