"""Marks a checkpoint as being read by another process than the training, so that the training does not delete it.

A mark is a file IN_USE.ID in the folder of the checkpoint's step. Each reader has a mark of its own, because a reader
that ends removes its mark. Only a fresh mark counts, that is, one that was touched less than FRESH_S seconds ago. A
process that reads for long touches its mark again and again. So a process that was killed does not keep a checkpoint
for ever. The training and the readers may be on different machines that share the folder.
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
    """Mark the checkpoint in the folder `step` (step_00000120) as being read, within a context. Yields the file that is
    the mark. The caller must call its method `touch` at least every few minutes, which also creates the file again if
    it was removed. The checkpoint may have been deleted just before, so that reading it fails. Without the right to
    write to the folder, the checkpoint is not marked."""
    mark = step / f"{NAME}.{uuid.uuid4().hex[:12]}"
    with suppress(OSError):
        mark.touch()
    try:
        yield mark
    finally:
        with suppress(OSError):
            mark.unlink()


def in_use(step: Path) -> bool:
    """Return whether the checkpoint in the folder `step` has a fresh mark of a reader, touched within FRESH_S seconds.
    A clock that was set back leaves marks with a time in the future. Such a mark is fresh if its time is less than
    FRESH_S seconds ahead."""
    for mark in step.glob(MARKS):
        with suppress(OSError):                                      # removed at this moment
            if abs(time.time() - mark.stat().st_mtime) < FRESH_S:
                return True
    return False
