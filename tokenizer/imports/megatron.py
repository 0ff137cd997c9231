"""Reads files of Megatron-LM; `tokenizer.export.megatron` gives their layout.

A document may consist of several sequences. The sequences must follow one another in the .bin file without gaps, as all
of Megatron's tools write them. Files of several modalities are refused.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np

from tokenizer.export.megatron import MAGIC
from tokenizer.imports.documents import Ends, ImportedDocuments, cut_at_ends, cut_rows_at_eos
from tokenizer.imports.source import AGAIN, ImportSource, TokenFile, TokenFileError

#: types of tokens by their code; 6 and 7 are floats
TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
#: bytes before the lengths of sequences
HEAD = 34
LENGTH, NUMBER = np.dtype("<i4"), np.dtype("<i8")


class MegatronReader:
    """Reads files in the format of Megatron-LM, as pairs of a .bin and an .idx file, in the order of their names."""

    continues = False
    keeps_rows = True

    def files(self, source: ImportSource) -> list[str]:
        if source.path.suffix == ".idx":
            raise TokenFileError(f"{source.path}: is an index; name the .bin file beside it")
        return source.files(".bin")

    def beside(self, source: ImportSource, name: str) -> list[str]:
        return [index_of(name)] if source.has(index_of(name)) else []

    def documents(self, source: ImportSource, names: list[str]) -> Iterator[ImportedDocuments]:
        for name in names:
            with source.open(name) as body, source.open(index_of(name)) as index:
                dtype, sequences, documents = header(index)
                ends = ends_of(index, sequences, documents, dtype.itemsize, source.limits.index_entries)
                found = cut_at_ends(source, name, body, dtype, ends, index.path)
                yield from (cut_rows_at_eos(source, rows) for rows in found) if source.sequence else found


def index_of(name: str) -> str:
    return f"{name.removesuffix('.bin')}.idx"


def header(index: TokenFile) -> tuple[np.dtype, int, int]:
    """Read the header of an .idx file. Returns (dtype of tokens, number of sequences, number of documents)."""
    data = index.read(0, HEAD)
    if data[:9] != MAGIC:
        raise TokenFileError(f"{index.path}: byte 0: {data[:9]!r} is not Megatron's {MAGIC!r}; see that the format is "
                             f"that of the files")
    version, code, sequences, documents = struct.unpack("<QBQQ", data[9:])
    if version != 1:
        raise TokenFileError(f"{index.path}: byte 9: version {version}; this Tokenmill reads 1")
    if code not in TYPES:
        raise TokenFileError(f"{index.path}: byte 17: {code} is the code of no type of tokens "
                             f"({', '.join(map(str, TYPES))}); write the files again with integers")
    size = HEAD + sequences * (LENGTH.itemsize + NUMBER.itemsize) + documents * NUMBER.itemsize
    if not documents or index.size != size:
        modes = "; it has several modalities, which an import cannot keep" if index.size == size + sequences else ""
        raise TokenFileError(f"{index.path}: byte 18: {sequences:,} sequences and {documents:,} ends of documents need "
                             f"{size:,} bytes, but the file has {index.size:,}{modes}: {AGAIN}")
    return np.dtype(TYPES[code]), sequences, documents - 1


def ends_of(index: TokenFile, sequences: int, documents: int, width: int, block: int) -> Iterator[Ends]:
    """Yield the ends of the documents that an .idx file lists, counted in tokens of `width` bytes. Up to `block`
    entries of the file are read at a time."""
    pointers = HEAD + sequences * LENGTH.itemsize
    firsts = pointers + sequences * NUMBER.itemsize
    waiting = index.array(firsts, 1, NUMBER)      # ends of documents, in sequences, that are still to come
    if int(waiting[0]):
        raise TokenFileError(f"{index.path}: byte {firsts:,}: the first document begins at sequence {waiting[0]:,}, "
                             f"not 0: {AGAIN}")
    read = position = 0
    waiting = waiting[1:]
    for first in range(0, sequences, block):
        count = min(block, sequences - first)
        lengths = index.array(HEAD + first * LENGTH.itemsize, count, LENGTH).astype(np.int64)
        ends = position + np.cumsum(lengths)
        wrong = (lengths < 0) | (index.array(pointers + first * NUMBER.itemsize, count, NUMBER) !=
                                 (ends - lengths) * width)
        if wrong.any():
            number = first + int(np.flatnonzero(wrong)[0])
            raise TokenFileError(f"{index.path}: byte {pointers + number * NUMBER.itemsize:,}: sequence {number:,} "
                                 f"does not begin where the one before it ends: {AGAIN}")
        ends = np.concatenate(([position], ends))
        position = int(ends[-1])
        while True:
            stop = int(np.searchsorted(waiting, first + count, side="right"))
            inside = waiting[:stop]
            if len(inside) and (int(inside.min()) < first or int(inside.max()) > first + count):
                raise disorder(index, firsts)
            yield Ends(ends[inside - first])
            waiting = waiting[stop:]
            if len(waiting) or read == documents:
                break
            waiting = index.array(firsts + (1 + read) * NUMBER.itemsize, min(block, documents - read), NUMBER)
            read += len(waiting)
    if len(waiting) or read < documents:
        raise disorder(index, firsts)


def disorder(index: TokenFile, byte: int) -> TokenFileError:
    return TokenFileError(f"{index.path}: byte {byte:,}: the documents do not follow one another in the sequences: "
                          f"{AGAIN}")
