"""What a format of another project says of itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from tokenizer.imports.documents import ImportedDocuments
from tokenizer.imports.source import ImportSource


class ImportFormat(Protocol):
    """A format in which another project stores tokens. The module of the same name in `tokenizer.export` gives the
    layout of its files."""

    #: whether a document may go on in the next file, so that one process must read all files
    continues: bool

    def files(self, source: ImportSource) -> list[str]:
        """Return the files with tokens, relative to the folder of the source and in the order of their tokens. Raises
        TokenFileError when their names say that files do not belong together."""

    def beside(self, source: ImportSource, name: str) -> list[str]:
        """Return the other files of the source that are read with the file `name`, such as its index."""

    def documents(self, source: ImportSource, names: list[str]) -> Iterator[ImportedDocuments]:
        """Yield all documents of the files `names`, some or all of `files`, in their order. Raises TokenFileError
        when a file is not as the format wants it."""
