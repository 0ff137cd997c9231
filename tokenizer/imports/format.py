"""The interface of the classes that read token files in the formats of other projects."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from tokenizer.imports.documents import ImportedDocuments
from tokenizer.imports.source import ImportSource


class ImportFormat(Protocol):
    """Reads token files in the format of another project. The module of the same name in `tokenizer.export` gives the
    layout of the files."""

    #: whether a document may go on in the next file, so that one process must read all files
    continues: bool
    #: whether rows (training samples) in the files have all L + 1 tokens of a sample, where L is
    #: `ImportSource.sequence`; else they have its first L tokens
    keeps_rows: bool

    def files(self, source: ImportSource) -> list[str]:
        """Return the files with tokens, relative to the folder of the source, in the order in which they are read.
        Raises TokenFileError when their names say that files do not belong together."""

    def beside(self, source: ImportSource, name: str) -> list[str]:
        """Return the other files of the source that are read with the file `name`, such as its index."""

    def documents(self, source: ImportSource, names: list[str]) -> Iterator[ImportedDocuments]:
        """Yield all documents of the files `names` in their order. `names` are some or all of the names that `files`
        returns. If the source has rows (training samples) instead of documents, the pieces of documents in the rows are
        yielded. Raises TokenFileError when a file does not have the format."""
