"""Reads files of datatrove and nanotron; `tokenizer.export.ds` gives their layout.

An import needs the files .ds and .ds.index. Both together give the size of a token in bytes, because the last end in
the index is the number of tokens in the .ds file. A file .ds.metadata may be missing. If it exists, the size of a token
in it must agree. Either all files have a loss mask or none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from tokenizer.imports.documents import Ends, ImportedDocuments, cut_at_ends
from tokenizer.imports.source import AGAIN, OTHER, ImportSource, TokenFile, TokenFileError, WrongTokenizer
from tokenizer.shards.layout import ENDS


class DsReader:
    """Reads files in the format of datatrove and nanotron, in the order of their names."""

    continues = False
    keeps_rows = True

    def files(self, source: ImportSource) -> list[str]:
        names = source.files(".ds")
        masked = [name for name in names if source.has(f"{name}.loss")]
        if masked and len(masked) < len(names):
            missing = next(name for name in names if name not in masked)
            raise TokenFileError(f"{source.folder / missing}.loss: is missing, but {masked[0]} has a loss mask; add "
                                 f"the missing one, or remove all of them if all tokens count in the loss")
        return names

    def beside(self, source: ImportSource, name: str) -> list[str]:
        return [f"{name}.{kind}" for kind in ("index", "loss", "metadata") if source.has(f"{name}.{kind}")]

    def documents(self, source: ImportSource, names: list[str]) -> Iterator[ImportedDocuments]:
        for name in names:
            with source.open(name) as body, source.open(f"{name}.index") as index:
                dtype = dtype_of(body, index, width_in(source, f"{name}.metadata"))
                check_tokenizer(source, f"{name}.metadata")
                ends = ends_of(index, source.limits.index_entries)
                if source.has(f"{name}.loss"):
                    with source.open(f"{name}.loss") as loss:
                        yield from cut_at_ends(source, name, body, dtype, ends, index.path, loss)
                else:
                    yield from cut_at_ends(source, name, body, dtype, ends, index.path)


def first_line(source: ImportSource, name: str) -> bytes:
    """Return the first line of a file of metadata, TOKENIZER|BYTES; b"" if the file does not exist."""
    if not source.has(name):
        return b""
    with source.open(name) as file:
        return file.read(0, min(file.size, 1 << 12)).split(b"\n")[0]


def width_in(source: ImportSource, name: str) -> int | None:
    """Return the size of a token in bytes according to the .ds.metadata file of the file `name`. Returns None if the
    metadata do not exist or do not give the size."""
    width = first_line(source, name).rpartition(b"|")[2]
    return int(width) if width in (b"2", b"4") else None


def check_tokenizer(source: ImportSource, name: str) -> None:
    """Raise WrongTokenizer if the metadata of a file name another tokenizer than the given one. They are compared if
    they name it by the beginning of its sha256, as our exports do, and not by its name on a hub."""
    match = re.match(rb"tokenizer-([0-9a-f]{12})\|", first_line(source, name))
    if match and match[1].decode() != source.coding.sha256[:12]:
        raise WrongTokenizer(f"{source.folder / name}: the tokens are of the tokenizer whose sha256 begins with "
                             f"{match[1].decode()}, not of {source.coding.sha256[:12]}; {OTHER} (if it is "
                             f"the same in another file, remove the .metadata files)")


def dtype_of(body: TokenFile, index: TokenFile, width: int | None) -> np.dtype:
    """Return the type of the tokens in a file, u16 or u32. `width` is their size according to the metadata. Raises
    TokenFileError when the file, its index and its metadata do not belong together."""
    documents = index.count(ENDS)
    tokens = int(index.array((documents - 1) * ENDS.itemsize, 1, ENDS)[0]) if documents else 0
    for dtype in (np.dtype("<u2"), np.dtype("<u4")):
        if body.size == tokens * dtype.itemsize and width in (None, dtype.itemsize):
            return dtype
    sizes = "two bytes or four" if width is None else f"{width} bytes, as its metadata say"
    raise TokenFileError(f"{body.path}: {body.size:,} bytes are not the {tokens:,} tokens of {index.path}, of "
                         f"{sizes}: truncated, or of another index: {AGAIN}")


def ends_of(index: TokenFile, block: int) -> Iterator[Ends]:
    """Yield the document ends in a .ds.index file, up to `block` at a time."""
    documents = index.count(ENDS)
    for first in range(0, documents, block):
        ends = index.array(first * ENDS.itemsize, min(block, documents - first), ENDS)
        yield Ends(ends.astype(np.int64))
