"""Writes the files of an export to object storage while they are made, without a copy on this machine."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from typing import Any, BinaryIO, cast

from pipeline.base.clock import SYSTEM
from pipeline.cli.errors import BadUsage
from pipeline.cli.transfer import MARK, claim, index_last, unused_store
from pipeline.store.fs import Store
from tokenizer.export.target import Target


class StreamedTarget(Target):
    """A folder of object storage while an export writes its files there, without a copy on this machine. `there` has
    the objects that a killed export of the same contents has left. They are whole, so they are not sent again."""

    def __init__(self, store: Store, there: set[str]) -> None:
        super().__init__()
        self._store, self._there = store, there
        self.names: list[str] = []

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[BinaryIO]:
        self.names.append(name)
        there = self._store.size(name) if name in self._there else None
        with self._store.writer(name) if there is None else SizeOnly() as file:
            yield cast(BinaryIO, file)
            size = file.tell()
        if there not in (None, size):
            raise BadUsage(f"{self._store.root}/{name}: has {there:,} bytes, not {size:,}: it is not of this export; "
                           f"remove it and run the command again")
        self.files, self.bytes = self.files + 1, self.bytes + size


class SizeOnly(io.RawIOBase):
    """A file that keeps nothing of what is written to it but the number of bytes."""

    def __init__(self) -> None:
        self._size = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._size

    def write(self, data: Any) -> int:
        written = memoryview(data).nbytes
        self._size += written
        return written


@contextlib.contextmanager
def streamed(url: str, option: str, contents: str) -> Iterator[Target]:
    """A context manager for writing the files of an export to a folder of object storage, below which there must be no
    objects. `option` is the command-line option that has given `url`, for messages. `contents` identifies the contents
    of the files.

    MARK is created first and removed last, as by `uploaded`. If the body raises, the objects are removed. If the
    process is killed, they stay, and so does MARK, which holds `contents`. An export of the same contents then
    completes the folder, and any other is refused. If the completion fails, too, all objects and MARK stay."""
    store = unused_store(url, option)
    own = f"{contents} {SYSTEM.new_id()}".encode()
    there = claim(store, option, own)
    target = StreamedTarget(store, there)
    try:
        yield target
    except BaseException:
        if not there and store.exists(MARK) and store.read(MARK) == own:       # no other process completes the folder
            for path in sorted(target.names, key=index_last, reverse=True):    # indices first
                store.remove(path)
            store.remove(MARK)
        raise
    if stray := sorted(there - {*target.names}):
        raise BadUsage(f"{option} {store.root}: has {stray[0]}, which is not of this export; remove it and run the "
                       f"command again")
    store.remove(MARK)
