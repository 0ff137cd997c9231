"""`python -m tests.pipeline.killed_driver WHEN ARGUMENTS…` is the command `tokenmill ARGUMENTS…`, but its process is
killed by SIGKILL at the first verdict about a document: when the driver hears of it (`said`), or as soon as it is in
the log (`written`). With another WHEN, nothing is killed."""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

from pipeline.cli import main
from pipeline.store.log import Log

quarantine, flush = Log.quarantine, Log.flush


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("not killed")


def kill_at(when: str) -> None:
    def quarantined(self: Log, key: str, row: int, stage: int, reason: str) -> None:
        if when == "said":
            die()
        quarantine(self, key, row, stage, reason)

    def flushed(self: Log) -> None:
        waiting = len(self._quarantined)
        flush(self)
        if waiting and when == "written":
            die()

    Log.quarantine, Log.flush = quarantined, flushed  # type: ignore[method-assign]


if __name__ == "__main__":
    kill_at(sys.argv.pop(1))
    main()
