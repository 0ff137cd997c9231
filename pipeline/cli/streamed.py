"""Writes the files that export, import and decode commands make to object storage while they are made."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from pipeline.base.clock import SYSTEM
from pipeline.base.scratch import Scratch
from pipeline.cli.errors import BadUsage
from pipeline.cli.incomplete import MARK, claim, removal_order, unused_store
from pipeline.store.fs import Store
from tokenizer.export.target import Target


class StreamedTarget(Target):
    """A folder of object storage to which a command writes files. A file whose name is known from the beginning is sent
    while it is written. Other files are first written to a temporary folder of this machine, and moved when they are
    complete. `there` are the objects that a killed command with the same contents has left in the folder. They are
    whole, so they are not sent again."""

    def __init__(self, store: Store, there: set[str]) -> None:
        super().__init__()
        self._store, self._there = store, there
        self._scratch: Scratch | None = None
        self.names: list[str] = []

    @property
    def work(self) -> Path:
        if self._scratch is None:
            self._scratch = Scratch()
        return Path(self._scratch.path)

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[BinaryIO]:
        self.names.append(name)
        there = self._store.size(name) if name in self._there else None
        with self._store.writer(name) if there is None else SizeOnly() as file:
            yield cast(BinaryIO, file)
            size = file.tell()
        self._count(name, there, size)

    def move(self, local: Path, name: str) -> None:
        self.names.append(name)
        there, size = self._store.size(name) if name in self._there else None, local.stat().st_size
        if there is None:
            self._store.upload(str(local), name)
        else:
            local.unlink()
        self._count(name, there, size)

    def open(self, name: str) -> BinaryIO:
        return self._store.open(name)

    def _count(self, name: str, there: int | None, size: int) -> None:
        """Add a written file of `size` bytes to the numbers of files and bytes. `there` is the size of the object that
        a killed command has left under this name, or None. Raises BadUsage when the two sizes differ."""
        if there not in (None, size):
            raise BadUsage(f"{self._store.root}/{name}: has {there:,} bytes, not {size:,}: this command does not write "
                           f"it; remove it and run the command again")
        self.files, self.bytes = self.files + 1, self.bytes + size

    def close(self) -> None:
        if self._scratch is not None:
            self._scratch.close()


class SizeOnly(io.RawIOBase):
    """A file for writing that discards the bytes and keeps only their number."""

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
    """A context manager for writing the files of a command to a folder of object storage, below which there must be no
    objects. `option` is the command-line option that has given `url`, for messages. `contents` identifies the contents
    of the files.

    In object storage, a folder cannot appear all at once: its objects appear one by one. So the object MARK is created
    first and removed last, and no command imports from a folder that has MARK. A shard set appears with its
    `shards.json`, which is sent last. Only one of two writers can create MARK.

    If the code in the `with` block raises, the objects are removed. If the process is killed, the objects stay, and so
    does MARK, which holds `contents`. A command with the same contents then completes the folder, and any other command
    is refused. If the completion fails, too, all objects and MARK stay.
    """
    store = unused_store(url, option)
    own = f"{contents} {SYSTEM.new_id()}".encode()
    there = claim(store, option, own)
    target = StreamedTarget(store, there)
    try:
        with contextlib.closing(target):
            yield target
    except BaseException:
        if not there and store.exists(MARK) and store.read(MARK) == own:       # no other process completes the folder
            for path in sorted(target.names, key=removal_order):
                store.remove(path)
            store.remove(MARK)
        raise
    if stray := sorted(there - {*target.names}):
        raise BadUsage(f"{option} {store.root}: has {stray[0]}, which this command does not write; remove it and "
                       f"run the command again")
    store.remove(MARK)
