"""Writes the files of an export or import into a folder, which appears under its name only when all files are complete.
A caller may give another place for the files, such as object storage (`OpenTarget`)."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa

from pipeline.base.files import beside, link, sync
from tokenizer.export.source import ExportError

#: bytes that are collected before they are written. Samples of a few kilobytes then need few calls of the system
BUFFER = 1 << 20


class Target(ABC):
    """Where the files of an export or import are written. `files` counts the files, `bytes` their size, and `linked`
    the bytes of the files that are hard links to files of the shard set."""

    def __init__(self) -> None:
        self.files = self.bytes = self.linked = 0

    @property
    @abstractmethod
    def work(self) -> Path:
        """A local folder for temporary files: data that only the import needs, and files that get their names when they
        are complete."""

    @abstractmethod
    def create(self, name: str) -> AbstractContextManager[BinaryIO]:
        """Return a context manager for writing the file `name` from front to back. It yields a file that can write and
        tell its position, but not seek. When the context ends, the file is durable."""

    def write(self, name: str, contents: Iterable[np.ndarray]) -> None:
        """Write a file that consists of the bytes of the given arrays."""
        with self.create(name) as file:
            for block in contents:
                file.write(np.ascontiguousarray(block).data)

    def share(self, name: str, original: Path | None, contents: Iterable[np.ndarray]) -> None:
        """Write the file `name` with the bytes `contents`. If `original` is given, it is a file with the same bytes,
        and a subclass may make a hard link to it instead of writing. `contents` is always read to its end, because
        reading it compares the original with its checksums."""
        self.write(name, contents)


    @abstractmethod
    def move(self, local: Path, name: str) -> None:
        """Move the finished file `local`, which is in the folder `work`, to where the export has its file `name`. The
        file is durable when this returns."""

    @abstractmethod
    def open(self, name: str) -> BinaryIO:
        """Open a file that was written to this target, for reading."""


#: opens the place for the files of an export or import. The argument is the result of `contents_of`: if it is equal,
#: so are the files
OpenTarget = Callable[[str], AbstractContextManager[Target]]


class FolderTarget(Target):
    """Writes files into a local folder, which must exist and be empty. Each file appears in it at once. Use `appearing`
    to make the whole folder appear only when all files are complete."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    @property
    def work(self) -> Path:
        return self.folder

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[BinaryIO]:
        path = self._path(name)
        with open(path, "xb", buffering=BUFFER) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        self.files, self.bytes = self.files + 1, self.bytes + path.stat().st_size

    def share(self, name: str, original: Path | None, contents: Iterable[np.ndarray]) -> None:
        """Make the file `name` a hard link to `original`. If `original` is None, or if the file system allows no link,
        write the file instead."""
        try:
            linked = original is not None and link(original.resolve(), self.folder / name)
        except OSError:                           # another disk, a disk without hard links, or too many of them
            linked = False
        if not linked:
            self.write(name, contents)
            return
        for _ in contents:
            pass
        size = (self.folder / name).stat().st_size
        self.files, self.bytes, self.linked = self.files + 1, self.bytes + size, self.linked + size

    def move(self, local: Path, name: str) -> None:
        sync(local)
        local.rename(self._path(name))
        self.files, self.bytes = self.files + 1, self.bytes + (self.folder / name).stat().st_size

    def open(self, name: str) -> BinaryIO:
        return open(self.folder / name, "rb")

    def _path(self, name: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path


@contextlib.contextmanager
def opened(out: Path | OpenTarget, contents: str, option: str = "") -> Iterator[Target]:
    """Return a context manager for writing the files of an export or import. It yields the Target: the new folder
    `out`, or the place that `out` opens. `contents` identifies the contents of the files, and `option` names the folder
    in messages."""
    if not isinstance(out, Path):
        with out(contents) as target:
            yield target
        return
    with appearing(out, option or f"--out {out}") as folder:
        yield FolderTarget(folder)


def contents_of(*facts: object) -> str:
    """Return a hash that identifies the files of an export or import: equal hashes mean equal bytes. `facts` say what
    is written, and how. The hash also covers the versions of Python and pyarrow, on which gzip and Parquet files
    depend."""
    text = json.dumps([*facts, sys.version, pa.__version__])
    return hashlib.sha256(text.encode()).hexdigest()


@contextlib.contextmanager
def appearing(out: Path, option: str) -> Iterator[Path]:
    """A context manager for writing the folder `out`. It yields a hidden folder beside `out`, which is renamed to `out`
    when the body ends and removed when the body raises. Raises ExportError when `out` exists and is not an empty
    folder. The error begins with `option`, the option of the command that names `out`."""
    check_free(out, option)
    part = beside(out.absolute())
    part.mkdir()
    try:
        yield part
        for folder in (*filter(Path.is_dir, part.rglob("*")), part):
            sync(folder)
        try:
            os.rename(part, out)                  # replaces an empty folder, and nothing else
        except OSError:
            check_free(out, option)
            raise
        sync(out.absolute().parent)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def check_free(out: Path, option: str) -> None:
    """Raise ExportError unless `out` can become a new folder: it must not exist, or be an empty folder that can be
    replaced. The error begins with `option`, the option of the command that names `out`."""
    if out.is_symlink():
        raise ExportError(f"{option}: {out} is a symbolic link; name a new folder")
    if out.exists() and not out.is_dir():
        raise ExportError(f"{option}: {out} exists and is no folder; name a new folder")
    if os.path.ismount(out) or out.resolve() == Path.cwd():
        raise ExportError(f"{option}: {out} is mounted, or the current folder, and cannot be replaced; name a new "
                          f"folder in it")
    if out.is_dir() and any(out.iterdir()):
        raise ExportError(f"{option}: the folder {out} is not empty; name a new one, or remove it first")
