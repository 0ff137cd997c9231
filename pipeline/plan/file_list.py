"""Holds the list of the files of a source, in the order of their paths. The list is kept on disk, because a source may
have millions of files."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias

from pipeline.store.temp import OnDisk, path_bytes, path_of, scratch_database

#: the fields of a SourceFile without its root
Listed: TypeAlias = tuple[str, int, str, str, str]


class SourceFile(NamedTuple):
    """One input file. `path` is relative to `root`, with forward slashes.

    `etag` changes when the file changes. It is the modification time in ns, an object store's etag or version id, or,
    when inputs are verified by content, 'sha256:…'.

    `bad` is the reason why the file is not read, or "". The reason enters the keys of tasks, so that the file is read
    as soon as the reason is gone.

    `hashed` is the state that the file had on disk when it was hashed (`pipeline.base.files.state`). It is "" if there
    is no hash, or if the state cannot vouch for the content. While a file has this state, no worker hashes it again.
    """

    path: str
    root: str
    size: int
    etag: str
    bad: str = ""
    hashed: str = ""

    def arg(self, **range: int | None) -> dict[str, Any]:
        """Return the file (or a `range` of it) as an argument of a task. `root` and `hashed` have no influence on the
        key of the task."""
        doc: dict[str, Any] = {"$file": self.path, "root": self.root, "size": self.size, "etag": self.etag}
        if self.bad:
            doc["bad"] = self.bad
        if self.hashed:
            doc["$volatile"] = {"hashed": self.hashed}
        return {**doc, **{k: v for k, v in range.items() if v is not None}}


class FileList(OnDisk[SourceFile]):
    """The files below one root, sorted by path; each path occurs once. `bytes` is the sum of the sizes of the files."""

    def __init__(self, root: str, files: Iterable[Listed]) -> None:
        """Make a list from `files`, which may come in any order. If a path is listed twice with different etags (the
        file changed during the listing), the entry with the larger etag is taken."""
        self.root = root
        self._db = scratch_database()
        columns = "path BLOB, size INTEGER, etag TEXT, bad TEXT, hashed TEXT"
        self._db.execute(f"CREATE TABLE listed ({columns})")
        self._db.executemany("INSERT INTO listed VALUES (?, ?, ?, ?, ?)",
                             ((path_bytes(path), *fields) for path, *fields in files))
        self._db.execute(f"CREATE TABLE file (place INTEGER PRIMARY KEY, {columns})")
        self._db.execute("INSERT INTO file (path, size, etag, bad, hashed) "
                         "SELECT path, size, max(etag), bad, hashed FROM listed GROUP BY path ORDER BY path")
        self._db.execute("DROP TABLE listed")
        self._size: int
        self.bytes: int
        self._size, self.bytes = self._db.execute("SELECT count(*), coalesce(sum(size), 0) FROM file").fetchone()

    def _read(self, first: int, stop: int) -> list[SourceFile]:
        rows = self._db.execute("SELECT path, size, etag, bad, hashed FROM file WHERE place > ? AND place <= ? "
                                "ORDER BY place", (first, stop))
        return [SourceFile(path_of(path), self.root, *fields) for path, *fields in rows.fetchall()]
