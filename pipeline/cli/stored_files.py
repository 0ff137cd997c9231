"""Opens the token files that commands read, in a local folder or in object storage, without copying them first."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from pipeline.base.scratch import Scratch
from pipeline.cli.errors import BadUsage
from pipeline.cli.incomplete import MARK, is_url, naming
from pipeline.cli.options import check_root
from pipeline.store.ahead_file import AheadFile
from pipeline.store.fs import Store
from pipeline.store.listing import RemoteObject
from tokenizer.imports.source import StoredFile, StoredFiles


class ObjectFile(AheadFile, StoredFile):
    """An object of object storage, opened for reading as a token file for `tokenmill shards import` or `decode`."""

    def __init__(self, store: Store, name: str, size: int, state: str) -> None:
        super().__init__(size, lambda start, stop: store.read_range(name, start, stop))
        self._store, self._name, self._state = store, name, state

    def is_unchanged(self) -> bool:
        entry = self._store.remote.head(self._name)
        return entry is not None and state_of(entry) == self._state


class ObjectFolder(StoredFiles):
    """A folder of object storage, whose objects are the token files for `tokenmill shards import` or `decode`."""

    def __init__(self, store: Store) -> None:
        entries = [*store.entries("")]
        self.sizes = {entry.path: entry.size for entry in entries}
        self.states = {entry.path: state_of(entry) for entry in entries}
        self._store = store

    def open(self, name: str) -> ObjectFile:
        return ObjectFile(self._store, name, self.sizes[name], self.states[name])


def state_of(entry: RemoteObject) -> str:
    return f"{entry.size}:{entry.version}"


@contextlib.contextmanager
def token_files(path: str, option: str) -> Iterator[tuple[Path, ObjectFolder | None]]:
    """A context manager for reading token files. `path` is a file, a folder or the URL of a folder, the value of the
    command-line option `option`. It yields the path, and the files as an ObjectFolder if they are in object storage
    (otherwise None). The messages of TokenmillErrors that are raised in the `with` block then name the URL."""
    if not is_url(path):
        yield Path(path), None
        return
    check_root(path, option)
    store = Store(path)
    if store.local is not None:
        yield store.local, None
        return
    files = ObjectFolder(store)
    if not files.sizes:
        raise BadUsage(f"{option} {path}: there is no folder with files")
    if MARK in files.sizes:
        raise BadUsage(f"{option} {path}: has {MARK}: a command still writes there, or was killed; wait for it, or "
                       f"write the folder again")
    with naming(str(Path(path)), path):
        yield Path(path), files


@contextlib.contextmanager
def copies_of(store: Store) -> Iterator[Path]:
    """A context manager that yields a new temporary folder of this machine, for copies of files of `store`. The
    messages of TokenmillErrors that are raised in the `with` block name the store instead of this folder."""
    with Scratch() as scratch:
        folder = Path(scratch.path, "copy")
        folder.mkdir()
        with naming(str(folder), store.root):
            yield folder
