"""A clock for tests of what waits long: twenty seconds are a second."""

from __future__ import annotations

from pipeline.base.clock import Clock


class HurriedClock(Clock):
    """Sleeps a twentieth of the time, at most 0.1 s. `still`: time passes only by `passed`."""

    def __init__(self, still: bool = False) -> None:
        self.passed, self._started = 0.0, super().now() if still else None

    def now(self) -> float:
        return (super().now() if self._started is None else self._started) + self.passed

    def sleep(self, seconds: float) -> None:
        super().sleep(min(seconds / 20, 0.1))
