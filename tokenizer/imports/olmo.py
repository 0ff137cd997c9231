"""Reads files of OLMo-core and dolma; `tokenizer.export.olmo` gives their layout.

A .csv.gz file beside a .npy file lists its documents: the first two columns are the range of tokens [START, END), the
third is the id. Without a .csv.gz file each EOS ends a document, and ids are made from the name of the file and the
number of the document. The width of tokens is the smallest that holds the vocabulary, as in OLMo-core. A loss mask is
the file `labels_mask…` for a file `part…`; either all files have one or none. A file with a loss mask needs a .csv.gz
file.

With `ImportSource.sequence` = L, a file holds rows (training samples) of L tokens each, without gaps. The .csv.gz file
then lists the pieces of documents in the rows. Its third column is not an id but the number of the sample, which is the
same for all pieces of a row.
"""

from __future__ import annotations

import csv
import gzip
import zlib
from collections.abc import Iterator

import numpy as np

from tokenizer.imports.documents import Ends, ImportedDocuments, TokenRange, cut_at_ends, cut_at_eos, cut_flat_rows
from tokenizer.imports.source import AGAIN, ImportSource, TokenFile, TokenFileError

#: the first bytes of a NumPy file. OLMo's .npy files have no such header
NUMPY = b"\x93NUMPY"
#: number of lines of a .csv.gz file that are read at a time, and largest size of a line in bytes
LINES, LONGEST_LINE = 1 << 14, 1 << 16
MASK = "labels_mask"
#: fewest tokens of which every second one must be 0 to show that the width is wrong
TELLING = 32


class OlmoReader:
    """Reads files in the format of OLMo-core and dolma, in the order of their names."""

    continues = False
    keeps_rows = False

    def files(self, source: ImportSource) -> list[str]:
        found = source.files(".npy")
        names = [name for name in found if not base(name).startswith(MASK)]
        if not names:
            raise TokenFileError(f"{source.path}: has loss masks alone, no *.npy with tokens; add them")
        masks = {name for name in found if base(name).startswith(MASK)}
        masks |= {mask_of(name) for name in names if source.has(mask_of(name))}
        for name in names:
            if masks and mask_of(name) not in masks:
                raise TokenFileError(f"{source.folder / mask_of(name)}: is missing, but there is {min(masks)}; add the "
                                     f"loss mask, or remove all of them if all tokens count in the loss")
        if stray := sorted(masks - {mask_of(name) for name in names}):
            raise TokenFileError(f"{source.folder / stray[0]}: a loss mask without its tokens; add them, or remove it")
        return names

    def beside(self, source: ImportSource, name: str) -> list[str]:
        return [other for other in (table_of(name), mask_of(name)) if source.has(other)]

    def documents(self, source: ImportSource, names: list[str]) -> Iterator[ImportedDocuments]:
        dtype = source.dtype
        for name in names:
            with source.open(name) as body:
                if body.size >= len(NUMPY) and body.read(0, len(NUMPY)) == NUMPY:
                    raise TokenFileError(f"{body.path}: byte 0: has the header of NumPy, which OLMo's files lack; "
                                         f"write it again with tofile()")
                masked = source.has(mask_of(name))
                if not source.has(table_of(name)):
                    if masked:
                        raise TokenFileError(f"{source.folder / table_of(name)}: is missing; a file with a loss mask "
                                             f"needs it")
                    yield from cut_flat_rows(source, name, body, dtype) if source.sequence else \
                        cut_at_eos(source, pieces(source, name, body, dtype))
                    continue
                with source.open(table_of(name)) as table:
                    ends = ends_of(table)
                    if source.sequence:
                        ends = (some._replace(ids=None) for some in ends)
                    if masked:
                        with source.open(mask_of(name)) as loss:
                            yield from cut_at_ends(source, name, body, dtype, ends, table.path, loss)
                    else:
                        yield from cut_at_ends(source, name, body, dtype, ends, table.path)


def base(name: str) -> str:
    return name.rpartition("/")[2]


def mask_of(name: str) -> str:
    folder, slash, file = name.rpartition("/")
    return f"{folder}{slash}{MASK}{file.removeprefix('part')}"


def table_of(name: str) -> str:
    return f"{name.removesuffix('.npy')}.csv.gz"


def pieces(source: ImportSource, name: str, body: TokenFile, dtype: np.dtype) -> Iterator[TokenRange]:
    """Yield the tokens of a file, block by block."""
    tokens = body.count(dtype)
    for start in range(0, tokens, source.limits.block_tokens):
        byte = start * dtype.itemsize
        block = body.array(byte, min(source.limits.block_tokens, tokens - start), dtype)
        if len(block) >= TELLING and not block[1::2].any():
            raise TokenFileError(f"{body.path}: byte {byte:,}: every second token is 0, as if a token had "
                                 f"{2 * dtype.itemsize} bytes and not {dtype.itemsize}, which the vocabulary of "
                                 f"--tokenizer takes; write the tokens again with {dtype.itemsize} bytes")
        yield TokenRange(name, byte, dtype.itemsize, source.checked(block, body.place(byte, dtype.itemsize)))


def ends_of(table: TokenFile) -> Iterator[Ends]:
    """Yield the ends and ids of the documents in a .csv.gz file, block by block."""
    number = begin = 0
    ends: list[int] = []
    ids: list[str] = []
    try:
        with gzip.GzipFile(fileobj=table.file) as packed:
            while data := packed.readline(LONGEST_LINE):
                row = next(csv.reader([data.decode()], strict=True), [])
                if len(data) == LONGEST_LINE or len(row) < 3 or not (row[0].isdecimal() and row[1].isdecimal()) or \
                        int(row[0]) != begin or int(row[1]) >= 1 << 62:
                    raise TokenFileError(f"{table.path}: line {number + 1:,}: {data[:80]!r} is no START,END,ID of a "
                                         f"document that begins at token {begin:,}, where the one before it ends: "
                                         f"{AGAIN}")
                begin = int(row[1])
                ends.append(begin)
                ids.append(row[2])
                number += 1
                if len(ends) == LINES:
                    yield Ends(np.array(ends, np.int64), ids)
                    ends, ids = [], []
    except (OSError, EOFError, zlib.error, UnicodeError, csv.Error, ValueError) as e:
        raise TokenFileError(f"{table.path}: line {number + 1:,}: cannot be read ({e}): {AGAIN}") from e
    yield Ends(np.array(ends, np.int64), ids)
