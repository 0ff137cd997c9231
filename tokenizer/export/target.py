"""Writes the files of an export or import into a folder that appears whole or not at all. A command may give another
place for the files of an export, such as object storage (`OpenTarget`)."""

from __future__ import annotations

import contextlib
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO

import numpy as np

from pipeline.base.files import beside, link, sync
from tokenizer.export.source import ExportError

#: bytes that are collected before they are written. Samples of a few kilobytes then need few calls of the system
BUFFER = 1 << 20


class Target(ABC):
    """Where the files of an export are written. `files` counts the files, `bytes` their size, and `linked` the bytes of
    the files that are hard links to files of the shard set."""

    def __init__(self) -> None:
        self.files = self.bytes = self.linked = 0

    @abstractmethod
    def create(self, name: str) -> AbstractContextManager[BinaryIO]:
        """A context manager for writing a file from front to back: it can write and tell its position, but not seek.
        The file is durable at the end."""

    def write(self, name: str, contents: Iterable[np.ndarray]) -> None:
        """Write a file that consists of the bytes of the given arrays."""
        with self.create(name) as file:
            for block in contents:
                file.write(np.ascontiguousarray(block).data)

    def share(self, name: str, original: Path | None, contents: Iterable[np.ndarray]) -> None:
        """Write the file `name`, which has the bytes of the file `original` if that is not None. `contents` are these
        bytes. They are read in any case, because reading them checks them."""
        self.write(name, contents)


#: opens the place of an export. The argument identifies the contents of its files: equal ones have equal files
OpenTarget = Callable[[str], AbstractContextManager[Target]]


class FolderTarget(Target):
    """Writes the files of an export into a local folder, which must exist. `appearing` makes the folder appear whole
    or not at all; this class does not."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[BinaryIO]:
        path = self.folder / name
        with open(path, "xb", buffering=BUFFER) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        self.files, self.bytes = self.files + 1, self.bytes + path.stat().st_size

    def share(self, name: str, original: Path | None, contents: Iterable[np.ndarray]) -> None:
        """Make the file `name` a hard link to `original`, or write it if that is None or the file system allows no
        link."""
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


@contextlib.contextmanager
def opened(out: Path | OpenTarget, contents: str) -> Iterator[Target]:
    """A context manager for writing the files of an export to the new folder `out`, or to the place that `out` opens.
    `contents` identifies the contents of the files."""
    if not isinstance(out, Path):
        with out(contents) as target:
            yield target
        return
    with appearing(out, f"--out {out}") as folder:
        yield FolderTarget(folder)


@contextlib.contextmanager
def appearing(out: Path, option: str) -> Iterator[Path]:
    """A context manager for writing the folder `out`. It yields a hidden folder beside `out`, which is renamed to `out`
    when the body ends and removed when the body raises. Raises ExportError when `out` exists, except as an empty
    folder. The error begins with `option`, the option of the command that names `out`."""
    check_free(out, option)
    part = beside(out.absolute())
    part.mkdir()
    try:
        yield part
        sync(part)
        try:
            os.rename(part, out)                  # replaces an empty folder, and nothing else
        except OSError:
            check_free(out, option)
            raise
        sync(out.absolute().parent)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def check_free(out: Path, option: str) -> None:
    """Raise ExportError when `out`, which `option` names, exists, except as an empty folder that can be replaced."""
    if out.is_symlink():
        raise ExportError(f"{option}: {out} is a symbolic link; name a new folder")
    if out.exists() and not out.is_dir():
        raise ExportError(f"{option}: {out} exists and is no folder; name a new folder")
    if os.path.ismount(out) or out.resolve() == Path.cwd():
        raise ExportError(f"{option}: {out} is mounted, or the current folder, and cannot be replaced; name a new "
                          f"folder in it")
    if out.is_dir() and any(out.iterdir()):
        raise ExportError(f"{option}: the folder {out} is not empty; name a new one, or remove it first")
