"""Marks a checkpoint as being read by another process than the training, so that the training does not delete it.

A mark is a file IN_USE.ID in the folder of the checkpoint's step. Each reader has a mark of its own, and removes it at
the end. A mark counts only if it was touched less than FRESH_S seconds ago, so that a reader that was killed does not
keep a checkpoint for ever. A reader therefore touches its mark again and again. The training and the readers may be on
different machines that share the folder.
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
    """Mark the checkpoint in the folder `step` (step_00000120) as being read, until the context ends. Yields the path
    of the mark, which the caller must touch at least every few minutes. `touch` also creates the mark again if it was
    removed. The checkpoint is not marked if it has just been deleted, or if the folder cannot be written."""
    mark = step / f"{NAME}.{uuid.uuid4().hex[:12]}"
    with suppress(OSError):
        mark.touch()
    try:
        yield mark
    finally:
        with suppress(OSError):
            mark.unlink()


def in_use(step: Path) -> bool:
    """Return whether a reader has marked the checkpoint in the folder `step`, and touched the mark within the last
    FRESH_S seconds. After a clock was set back, a mark may have a time in the future; it counts if it is less than
    FRESH_S seconds ahead."""
    for mark in step.glob(MARKS):
        with suppress(OSError):                                      # removed at this moment
            if abs(time.time() - mark.stat().st_mtime) < FRESH_S:
                return True
    return False
