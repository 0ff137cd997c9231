"""The files of a source in the order of their paths, on disk: a source may have millions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from pipeline.store.temp import OnDisk, path_bytes, path_of, scratch_database


class SourceFile(NamedTuple):
    """One input file. `path` is relative to `root` with forward slashes; `etag` is mtime_ns, an object store's etag or
    version id, or 'sha256:…' when inputs are verified by content. `bad` is the reason why the file is not read; it is
    part of the file's identity, so that the file is read once the reason is gone."""

    path: str
    root: str
    size: int
    etag: str
    bad: str = ""

    def arg(self, **range: int | None) -> dict[str, Any]:
        """The file (or a range of it) as a task argument; the root never enters a key."""
        doc: dict[str, Any] = {"$file": self.path, "root": self.root, "size": self.size, "etag": self.etag}
        if self.bad:
            doc["bad"] = self.bad
        return {**doc, **{k: v for k, v in range.items() if v is not None}}


class FileList(OnDisk[SourceFile]):
    """Files below one root, sorted by path, each path once. `bytes` is the sum of their sizes."""

    def __init__(self, root: str, files: Iterable[tuple[str, int, str, str]]) -> None:
        """`files`: (path, size, etag, bad), in any order. Of a path that was listed twice, and changed in between, the
        entry with the larger etag is taken."""
        self.root = root
        self._db = scratch_database()
        self._db.execute("CREATE TABLE listed (path BLOB, size INTEGER, etag TEXT, bad TEXT)")
        self._db.executemany("INSERT INTO listed VALUES (?, ?, ?, ?)",
                             ((path_bytes(path), size, etag, bad) for path, size, etag, bad in files))
        self._db.execute("CREATE TABLE file (place INTEGER PRIMARY KEY, path BLOB, size INTEGER, etag TEXT, bad TEXT)")
        self._db.execute("INSERT INTO file (path, size, etag, bad) "
                         "SELECT path, size, max(etag), bad FROM listed GROUP BY path ORDER BY path")
        self._db.execute("DROP TABLE listed")
        self._size: int
        self.bytes: int
        self._size, self.bytes = self._db.execute("SELECT count(*), coalesce(sum(size), 0) FROM file").fetchone()

    def _read(self, first: int, stop: int) -> list[SourceFile]:
        rows = self._db.execute("SELECT path, size, etag, bad FROM file WHERE place > ? AND place <= ? ORDER BY place",
                                (first, stop))
        return [SourceFile(path_of(path), self.root, size, etag, bad)
                for path, size, etag, bad in rows.fetchall()]
