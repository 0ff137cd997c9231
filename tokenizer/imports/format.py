"""What a format of another project says of itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from tokenizer.imports.documents import Documents
from tokenizer.imports.source import Source


class Format(Protocol):
    """A format in which another project stores tokens. The module of the same name in `tokenizer.export` gives the
    layout of its files."""

    def files(self, source: Source) -> list[str]:
        """Return the files with tokens, relative to the folder of the source and in the order of their tokens."""

    def documents(self, source: Source, names: list[str]) -> Iterator[Documents]:
        """Yield all documents of the files `names`, in their order. Raises TokenFileError when a file is not as the
        format wants it."""
