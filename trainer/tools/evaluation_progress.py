"""Shows the progress of an evaluation of checkpoints on benchmark tasks. Also marks the checkpoints that the evaluation
still has to read, so that a training does not delete them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from pipeline.base.visible import visible
from trainer.checkpoint.in_use import marked

#: seconds between two lines of progress, and between two renewals of a mark (a tenth of the time for which it counts)
PROGRESS_S, TOUCH_S = 10.0, 60.0


class EvaluationProgress:
    """Prints the progress of an evaluation to stderr. On a terminal, one line is replaced up to five times a second,
    and erased on leaving the context. Elsewhere a line is printed at most every PROGRESS_S seconds. Whenever progress
    is shown, the marks by which `using` protects checkpoints from deletion are also renewed."""

    def __init__(self) -> None:
        self.marks: list[Path] = []
        self.terminal = sys.stderr.isatty()
        self.last = 0.0
        self.touched = -TOUCH_S

    def __enter__(self) -> EvaluationProgress:
        return self

    def __exit__(self, *_: object) -> None:
        if self.terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    @contextmanager
    def using(self, steps: Iterable[Path]) -> Iterator[None]:
        """Mark the checkpoints in the folders `steps` (step_00000120) as in use within a context, so that a training
        does not delete them. A checkpoint that has just been deleted is not marked."""
        with ExitStack() as stack:
            self.marks = [stack.enter_context(marked(step)) for step in steps]
            try:
                yield
            finally:
                self.marks = []

    def refresh(self) -> None:
        """Renew (touch) the files by which `using` marks checkpoints as in use. Does nothing if they were renewed less
        than TOUCH_S seconds ago, because on a shared file system each touch is a request."""
        if time.monotonic() - self.touched < TOUCH_S:
            return
        self.touched = time.monotonic()
        for mark in self.marks:
            with suppress(OSError):              # the folder is gone or cannot be written
                mark.touch()

    def show(self, text: str) -> None:
        now = time.monotonic()
        if now - self.last >= (0.2 if self.terminal else PROGRESS_S):
            self.last = now
            self.refresh()
            print(f"\r\x1b[K{visible(text)}" if self.terminal else visible(text), end="" if self.terminal else "\n",
                  file=sys.stderr, flush=True)

    def of(self, name: str, work: int) -> Callable[[int], None]:
        """Return a function that shows how many of the `work` rows of the task `name` are finished, and how long the
        rest will take. Call it with the number of rows that have just been finished."""
        began, done = time.monotonic(), 0

        def advance(rows: int) -> None:
            nonlocal done
            done += rows
            left = (time.monotonic() - began) / done * (work - done)
            self.show(f"{name}: {done:,} of {work:,} rows, {left:,.0f} s left")

        return advance
