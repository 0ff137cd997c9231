"""Makes Python's garbage collector run rarely in processes that hold many small objects."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

#: new objects after which the youngest generation is collected, and collections of a generation until the next older
#: one is collected. Python's own are 700, 10 and 10
RARELY = (50_000, 20, 100)


@contextlib.contextmanager
def rarely_collected() -> Iterator[None]:
    """A context in which Python's garbage collector looks for reference cycles only after 50,000 new objects.

    The driver of a run holds thousands of tasks and decodes records all the time. None of these objects is part of a
    cycle. With Python's default thresholds, the collector would visit them again and again, and find nothing.
    """
    before = gc.get_threshold()
    gc.set_threshold(*RARELY)
    try:
        yield
    finally:
        gc.set_threshold(*before)
