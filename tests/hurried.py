"""A clock for tests of code that waits long: it sleeps a twentieth of the time."""

from __future__ import annotations

from pipeline.base.clock import Clock


class HurriedClock(Clock):
    """A clock that sleeps a twentieth of the requested time, but at most 0.1 s. With `still`, its time does not pass by
    itself; a test adds seconds to `passed`."""

    def __init__(self, still: bool = False) -> None:
        self.passed, self._started = 0.0, super().now() if still else None

    def now(self) -> float:
        return (super().now() if self._started is None else self._started) + self.passed

    def sleep(self, seconds: float) -> None:
        super().sleep(min(seconds / 20, 0.1))
