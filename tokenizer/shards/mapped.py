"""Maps the files of a shard set into memory."""

from __future__ import annotations

import errno
import mmap
import resource
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np

from tokenizer.shards.layout import REMEDY, ShardError


def mapped_file(path: Path, dtype: np.dtype, items: int, shards: int) -> tuple[np.ndarray, mmap.mmap | None]:
    """Map a file of a set of `shards` shards. Returns (read-only array of the file's `items` items, memory map). The
    memory map is None if the file is empty. Raises ShardError when the file is missing, has another size or cannot be
    mapped."""
    try:
        size = path.stat().st_size
        if size != items * dtype.itemsize:
            raise ShardError(f"{path}: {size} bytes, the manifest says {items * dtype.itemsize}: damaged: {REMEDY}")
        memory = _mapped(path) if size else None
    except OSError as e:
        if e.errno in (errno.EMFILE, errno.ENOMEM):
            raise ShardError(f"{path}: {e.strerror}, of a set of {shards:,} shards; raise the limit "
                             f"({'ulimit -n' if e.errno == errno.EMFILE else 'vm.max_map_count'})") from e
        raise ShardError(f"{path}: missing ({e.strerror}): {REMEDY}") from e
    return (np.frombuffer(memory, dtype) if memory else np.empty(0, dtype), memory)


def _mapped(path: Path) -> mmap.mmap:
    """Map a file into memory, read-only.

    On Python below 3.13, a mapped file stays open. A corpus may have more shards than the usual limit of open files
    (1,024 on most systems), so the soft limit is raised to the hard limit there. Checkpoints and connections need file
    descriptors, too."""
    with open(path, "rb") as file:
        if sys.version_info >= (3, 13):
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ, trackfd=False)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != hard:
            with suppress(OSError, ValueError):                  # macOS does not allow the hard limit that it reports
                resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
