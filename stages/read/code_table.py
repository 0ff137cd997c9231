"""Reads source files from Parquet tables in which each row holds a file, as in The Stack (arXiv 2211.15533). It leaves
out the same files as the reader `code`.

The default settings name the columns of The Stack. For other data sets, a recipe names the columns. With the setting
`repository`, consecutive rows of one repository make one document (`read.repository`), so a table should be sorted by
repository first. When a table is split between tasks, no repository is divided.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.base.parquet import open_parquet
from stages.document import BadRecord, Document
from stages.read.authored import path_reason
from stages.read.code import CodeConfig, examine
from stages.read.parquet import Parquet
from stages.read.reader import Skipped, Slice, Split, is_machine_fault
from stages.read.repository import Repository
from stages.stage import signal


class CodeTable(Parquet):
    """Reads source files from Parquet tables in which each row holds a file, as in The Stack.

    Rows of which no document is made are counted under the reasons of the readers `parquet` and `code`. `meta.path` and
    `meta.repository` are values of the row. A licence in the row takes precedence over a licence that the beginning of
    the file names. With the setting `repository`, all files of a repository become one document, and no other columns
    are kept, since they describe single files.
    """

    name = "code_table"
    version = 3
    reserved = ("path", "repository", "licence", "code_language")

    class Config(Parquet.Config, CodeConfig):
        text: str = signal("content", "column of the file's text")
        file_path: str = signal("max_stars_repo_path", "column of the file's path in its repository")
        repository_name: str = signal("max_stars_repo_name", "column of the repository's name; '' for none")
        licence: str = signal("", "column of its licences (SPDX), a string or a list; '' for none")
        id: str = signal("", "column of the set's own id, kept in meta.id; '' for none")
        max_bytes: int = signal(1 << 20, "largest file, bytes; beyond: too_large", gt=0)

    def __init__(self, config: Any = None, **kw: Any) -> None:
        super().__init__(config, **kw)
        c = self.config
        if c.repository and not c.repository_name:
            raise ValueError("`repository: true` needs the column of the repository's name; set `repository_name:`")
        if c.repository and c.signals:
            raise ValueError("`signals:` are of one row, and with `repository: true` a document is made of many; take "
                             "out one of the two")
        used = tuple(column for column in (c.file_path, c.repository_name, c.licence) if column)
        listed = () if c.keep == "all" else c.keep
        if c.keep != "all" or c.repository:
            self.columns.all, self.columns.named = False, tuple(dict.fromkeys((*used, *listed)))
        self.required = tuple(dict.fromkeys((*self.required, *used)))
        self._used_only = {self.columns.name(column) for column in used if column not in listed}

    def read(self, local: str, slice: Slice) -> Iterator[Document | BadRecord]:
        repository, name = None, None
        for item in super().read(local, slice):
            if isinstance(item, BadRecord):
                oversized = item.reason == "too_large" and "row group" not in item.detail
                yield Skipped("too_large", id=item.id, locator=item.locator) if oversized else item
                continue
            current, record = item.meta.get(self.columns.name(self.config.repository_name)), item.locator["record"]
            if repository is not None and current != name:
                yield from repository.documents()
                repository = None
            examined = self._source_document(item)
            if not self.config.repository or current is None:
                yield examined
                continue
            if repository is None:
                repository, name = Repository(self.config, slice.source, slice.path, str(current), record), current
            yield from repository.add(examined, str(item.meta.get("path", "")))
        if repository is not None:
            yield from repository.documents()

    def _source_document(self, doc: Document) -> Document | Skipped:
        config, row = self.config, dict(doc.meta)
        doc.meta = {k: v for k, v in row.items() if k not in self._used_only}
        path, repository, licences = (row.get(self.columns.name(column)) for column in
                                      (config.file_path, config.repository_name, config.licence))
        path = str(path or "")
        reason = (None if config.vendored else path_reason(path)) or examine(doc, doc.text, path, config)
        if reason:
            return Skipped(reason, id=doc.id, locator=doc.locator)
        doc.meta["path"] = path
        if repository is not None:
            doc.meta["repository"] = repository
        if licences := [licences] if isinstance(licences, str) else sorted(map(str, licences or ())):
            doc.meta["licence"] = " AND ".join(f"({x})" if " OR " in x else x for x in licences)
        return doc

    def needs(self, slice: Slice | None, size: int, read: Callable[[int, int], bytes]) -> list[tuple[int, int]] | None:
        """Return the byte ranges of a table in object storage that must be fetched to read a slice (the file or a piece
        of it), or to split the file if `slice` is None. The ranges are those of the reader `parquet`. With the setting
        `repository`, however, splitting needs the whole file (the result is None), because it reads the column of
        repository names."""
        return None if slice is None and self.config.repository else super().needs(slice, size, read)

    def beyond(self, local: str, slice: Slice, record: int) -> Slice | None:
        """Return the slice (piece of the file) with which reading resumes after a record has crashed the process, as
        the reader `parquet` does. With the setting `repository`, the result is None (reading does not resume), since a
        repository may continue in the next row group."""
        return None if self.config.repository else super().beyond(local, slice, record)

    def splits(self, local: str, path: str, target: int) -> list[Split] | None:
        """Return the pieces in which the table can be read; None if the file cannot be split. A piece consists of whole
        row groups. With the setting `repository`, no piece ends inside a repository."""
        pieces = super().splits(local, path, target)
        if pieces is None or not self.config.repository:
            return pieces
        try:
            with open_parquet(local) as file:
                ends = [self._ends(file, group) for group in range(file.num_row_groups)]
        except (pa.ArrowException, OSError) as e:
            if is_machine_fault(e):
                raise
            return None                                         # `read` says what is wrong
        merged: list[Split] = []
        for piece in pieces:
            before = next((ends[g] for g in range(piece.start - 1, -1, -1) if ends[g]), None)
            after = next((ends[g] for g in range(piece.start, len(ends)) if ends[g]), None)
            if merged and (before is None or after is None or before[1] == after[0]):
                last = merged.pop()
                piece = Split(last.start, piece.stop, last.ordinal, last.records + piece.records,
                              last.bytes + piece.bytes)
            merged.append(piece)
        return merged

    def _ends(self, file: pq.ParquetFile, group: int) -> tuple[Any, Any] | None:
        """Returns the names of the repositories in the first and in the last row of a row group; None if the row group
        is empty."""
        names = file.read_row_group(group, columns=[self.config.repository_name]).column(self.config.repository_name)
        return (names[0].as_py(), names[-1].as_py()) if len(names) else None
