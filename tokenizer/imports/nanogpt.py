"""Reads files of llm.c and modded-nanogpt; `tokenizer.export.nanogpt` gives their layout.

In these files EOS begins each document, and a document may go on in the next file. In a shard EOS ends each document.
So an import leaves out the first EOS of all files, and adds one at the end. A document that has an EOS inside becomes
two documents, because only EOS separates documents in these files.

With `ImportSource.sequence` = L, the files hold rows (training samples) of L tokens each, back to back. The rows may
come from a program that ends documents with EOS, or from one that begins them with EOS. A file does not say which. An
import always takes an EOS for the end of a document.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tokenizer.export.nanogpt import HEADS
from tokenizer.imports.documents import ImportedDocuments, TokenRange, cut_at_eos, cut_flat_rows
from tokenizer.imports.source import AGAIN, OTHER, ImportSource, TokenFile, TokenFileError, WrongTokenizer

HEADER_BYTES = 1024


class NanoGptReader:
    """Reads files in the format of llm.c and modded-nanogpt, in the order of their names."""

    continues = True
    keeps_rows = False

    def files(self, source: ImportSource) -> list[str]:
        return source.files(".bin")

    def beside(self, source: ImportSource, name: str) -> list[str]:
        return []

    def documents(self, source: ImportSource, names: list[str]) -> Iterator[ImportedDocuments]:
        return rows(source, names) if source.sequence else cut_at_eos(source, pieces(source, names))


def pieces(source: ImportSource, names: list[str]) -> Iterator[TokenRange]:
    """Yield the tokens of all files, with EOS at the ends of documents instead of at their beginnings."""
    eos, first = source.coding.eos, True
    for name in names:
        with source.open(name) as file:
            dtype, tokens = header(file)
            for start in range(0, tokens, source.limits.block_tokens):
                byte = HEADER_BYTES + start * dtype.itemsize
                block = file.array(byte, min(source.limits.block_tokens, tokens - start), dtype)
                block = source.checked(block, file.place(byte, dtype.itemsize))
                if first and int(block[0]) != eos:
                    raise WrongTokenizer(f"{file.path}: byte {byte:,}: the first token is {int(block[0])}, not EOS "
                                         f"({eos}), with which a document begins; {OTHER}, or import this file with "
                                         f"those before it")
                skip, first = int(first), False
                yield TokenRange(name, byte + skip * dtype.itemsize, dtype.itemsize, block[skip:])
    if not first:
        yield TokenRange(names[-1], HEADER_BYTES, 0, np.array([eos], source.dtype))


def rows(source: ImportSource, names: list[str]) -> Iterator[ImportedDocuments]:
    for name in names:
        with source.open(name) as file:
            yield from cut_flat_rows(source, name, file, header(file)[0], HEADER_BYTES)


def header(file: TokenFile) -> tuple[np.dtype, int]:
    """Read the header of a .bin file. Returns (dtype of tokens, number of tokens)."""
    fields = file.array(0, HEADER_BYTES // 4, np.dtype("<i4")).tolist()
    width = next((width for width, head in HEADS.items() if head[0] == fields[0]), 0)
    if not width:
        raise TokenFileError(f"{file.path}: byte 0: {fields[0]} is no magic number of llm.c "
                             f"({', '.join(str(magic) for magic, _ in HEADS.values())}); see that the format is that "
                             f"of the files")
    if fields[1] != HEADS[width][1]:
        raise TokenFileError(f"{file.path}: byte 4: version {fields[1]}; with this magic number, Tokenmill reads "
                             f"{HEADS[width][1]}")
    if fields[2] < 0 or file.size != HEADER_BYTES + fields[2] * width:
        raise TokenFileError(f"{file.path}: byte 8: {fields[2]:,} tokens need {HEADER_BYTES + fields[2] * width:,} "
                             f"bytes, but the file has {file.size:,}: truncated: {AGAIN}")
    return np.dtype(f"<u{width}"), fields[2]
