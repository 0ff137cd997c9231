"""Marks a checkpoint as being read by another process than the training, which then does not delete it.

A mark is a file IN_USE.ID in the folder of the step; each reader makes one of its own, because one that ends must not
remove the mark of another. A mark counts while it is fresh. A process that reads for long touches it again and again,
so that the mark of a process that was killed does not keep a checkpoint for ever. The training and the other processes
may be on different machines that share the folder.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

NAME = "IN_USE"
#: pattern of the names of marks
MARKS = f"{NAME}.*"
#: a mark that is older than this many seconds does not count
FRESH_S = 600.0


@contextmanager
def marked(step: Path) -> Iterator[Path]:
    """Mark the checkpoint in the folder `step` (step_00000120) within a context. Yields the mark; call its method
    `touch` at least every few minutes, which also makes it again if it was removed. The checkpoint
    may have been deleted just before, so that reading it fails. Without the right to write there, nothing is marked."""
    mark = step / f"{NAME}.{uuid.uuid4().hex[:12]}"
    with suppress(OSError):
        mark.touch()
    try:
        yield mark
    finally:
        with suppress(OSError):
            mark.unlink()


def in_use(step: Path) -> bool:
    """Return whether the checkpoint in the folder `step` has a fresh mark. A mark from the future, which a clock that
    was set back leaves behind, is as old as it is ahead."""
    for mark in step.glob(MARKS):
        with suppress(OSError):                                      # removed at this moment
            if abs(time.time() - mark.stat().st_mtime) < FRESH_S:
                return True
    return False
