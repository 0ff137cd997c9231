"""The request for a clean stop of a run: running tasks may finish for a while, and no further task begins."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from pipeline.base.clock import Clock
from pipeline.engine.driver.endings import Interrupted


class StopRequest:
    """The request to stop a run: whether a signal or a thread (`ask`) has made it, and how long running tasks may still
    go on."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._signum: int | None = None              # signal that asked for the stop
        self._deadline = 0.0                         # when tasks that still run are killed

    @property
    def asked(self) -> bool:
        return self._signum is not None

    def ask(self, signum: int, grace_s: float) -> None:
        """Ask for a stop of the run, because of the signal `signum`. Running tasks may finish within `grace_s` seconds.
        If several stops are requested, the earliest deadline counts."""
        deadline = self._clock.now() + grace_s
        if self._signum is None or deadline < self._deadline:
            self._deadline, self._signum = deadline, signum

    def end_grace(self) -> None:
        """End the time that running tasks still have, so that they are killed."""
        self._deadline = 0.0

    def check(self, idle: bool) -> None:
        """Raise Interrupted if a stop was requested and either no task runs any more (`idle`) or the time for running
        tasks is over. The request is then forgotten."""
        if self._signum is not None and (idle or self._clock.now() >= self._deadline):
            signum, self._signum = self._signum, None
            raise Interrupted(signum)

    @contextlib.contextmanager
    def at_signals(self, grace_s: float, interruptible: Callable[[], bool]) -> Iterator[None]:
        """Context manager that makes SIGINT and SIGTERM ask for a stop of the run. After SIGTERM, running tasks may go
        on for `grace_s` seconds; after SIGINT, they are killed at once. If `interruptible()` is true when a signal
        comes, Interrupted is raised at once instead. A second signal goes to the previous handlers, which by default
        end the process. Signals are handled only if the context is entered in the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield                     # only the main thread may install handlers; another thread's owner calls `ask`
            return
        before = {s: signal.getsignal(s) or signal.SIG_DFL for s in (signal.SIGINT, signal.SIGTERM)}

        def handler(signum: int, frame: Any) -> None:
            for s, old in before.items():
                signal.signal(s, old)
            if interruptible():
                raise Interrupted(signum)
            self.ask(signum, grace_s if signum == signal.SIGTERM else 0.0)

        for s in before:
            signal.signal(s, handler)
        try:
            yield
        finally:
            for s, old in before.items():
                signal.signal(s, old)
