"""Reads files of litdata; `tokenizer.export.litdata` gives their layout.

An item is a document. Items are tokens without a header, of one type in all files.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tokenizer.imports.chunks import INDEX, check_names, field, file_names, read_index, samples_of, unset
from tokenizer.imports.documents import ImportedDocuments, cut_rows_at_eos
from tokenizer.imports.source import ImportSource, TokenFileError

#: types of integers by litdata's names for them: those of NumPy, then those of PyTorch
TYPES = {"no_header_numpy:1": "<i2", "no_header_numpy:2": "<i4", "no_header_numpy:3": "<i8", "no_header_numpy:4": "u1",
         "no_header_numpy:5": "<u2", "no_header_numpy:6": "<u4", "no_header_tensor:16": "<i4",
         "no_header_tensor:17": "<i8"}


class LitDataReader:
    """Reads files in the format of litdata, in the order in which index.json lists them."""

    continues = False
    keeps_rows = True

    def files(self, source: ImportSource) -> list[str]:
        return file_names(source, [name for name, _ in chunks(source, read_index(source))])

    def beside(self, source: ImportSource, name: str) -> list[str]:
        return [INDEX]

    def documents(self, source: ImportSource, names: list[str]) -> Iterator[ImportedDocuments]:
        index = read_index(source)
        config = field(source, index, "config", dict)
        unset(source, config, "compression", "encryption")
        formats = field(source, config, "data_format", list)
        if len(formats) != 1 or str(formats[0]) not in TYPES:
            raise TokenFileError(f"{source.folder / INDEX}: data_format is {str(formats)[:80]}, not one of "
                                 f"{', '.join(TYPES)}; write the tokens as one array of such a type")
        dtype = np.dtype(TYPES[str(formats[0])])
        counts = dict(chunks(source, index))
        check_names(source, names, counts)
        for name in names:
            with source.open(name) as file:
                for first, byte, ends, data in samples_of(file, counts[name], source.limits):
                    sizes = np.diff(ends, prepend=0)
                    if (sizes % dtype.itemsize).any() or int(sizes.min()) == 0:
                        raise TokenFileError(f"{file.path}: byte {byte:,}: an item from number {first:,} on is no "
                                             f"whole number of {dtype.name}, or has no tokens, not even EOS "
                                             f"({source.coding.eos}); write it again")
                    place = file.place(byte, dtype.itemsize)
                    tokens = source.checked(np.frombuffer(data, dtype), place)
                    source.check_ends(tokens, np.array(ends) // dtype.itemsize, place)
                    found = ImportedDocuments(name, first, tokens, sizes // dtype.itemsize, None, None)
                    yield cut_rows_at_eos(source, found) if source.sequence else found
                    source.progress(len(data))


def chunks(source: ImportSource, index: dict[str, Any]) -> list[tuple[str, int]]:
    """Return the name and the number of items (documents or samples) of each file that index.json lists."""
    return [(field(source, chunk, "filename", str), field(source, chunk, "chunk_size", int))
            for chunk in field(source, index, "chunks", list)]
