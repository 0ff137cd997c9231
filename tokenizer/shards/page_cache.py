"""Tells whether the system's page cache holds what is read of a shard set."""

from __future__ import annotations

import resource

#: batches whose pages are requested after one that had to wait for the disk
REQUESTED = 64


def read_from_disk() -> int:
    """Return a number that grows when this thread reads from the disk. On file systems that do not count their reads,
    it grows only when the thread waits for a page."""
    usage = resource.getrusage(resource.RUSAGE_THREAD)
    return usage.ru_inblock + usage.ru_majflt


class PageCache:
    """Decides whether the pages of the next batch are requested before they are read. A request saves the wait for a
    page that is not in the page cache; for any other, it is a microsecond of CPU time for nothing."""

    def __init__(self) -> None:
        #: number of batches for which pages are requested even if nothing comes from the disk
        self.requests = 1

    def note(self, has_read: bool) -> None:
        """Note whether a batch was read from the disk, in part at least."""
        if not has_read:
            self.requests = max(0, self.requests - 1)
        elif not self.requests:
            self.requests = REQUESTED
