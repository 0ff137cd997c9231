"""Decides whether it is worthwhile to request the pages of a shard set from the disk before they are read."""

from __future__ import annotations

import resource

#: batches whose pages are requested after one that had to wait for the disk
REQUESTED = 64


def read_from_disk() -> int:
    """Return a counter of this thread that has grown if the thread has read from the disk in the meantime. It counts
    blocks that were read, and page faults that had to wait for the disk. Some file systems do not count blocks."""
    usage = resource.getrusage(resource.RUSAGE_THREAD)
    return usage.ru_inblock + usage.ru_majflt


class PageCache:
    """Decides whether the pages of the next batch are requested before they are read. A request saves time if the page
    is not in the page cache. If it is, the request costs a microsecond of CPU time without any use. So requests stop
    after some batches without a read from the disk, and begin again with the next such read."""

    def __init__(self) -> None:
        #: number of batches for which pages are requested even if nothing comes from the disk
        self.requests = 1

    def note(self, has_read: bool) -> None:
        """Note whether a batch was read from the disk, in part at least."""
        if not has_read:
            self.requests = max(0, self.requests - 1)
        elif not self.requests:
            self.requests = REQUESTED
