"""Reads files of MosaicML streaming; `tokenizer.export.mds` gives their layout.

Without `ImportSource.sequence`, each MDS sample is a document. Its tokens are in the column `tokens`, an array of
integers of any type. The columns `id` (str) and `loss` (u8, 0 or 1) may be missing; others are ignored. With
`ImportSource.sequence`, each MDS sample is a row: a training sample of a fixed length, which may hold parts of several
documents. The columns `ends`, `loss`, `sample` and `stream` of a row may be missing. Without `ends`, each EOS ends a
document.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from tokenizer.imports.chunks import INDEX, Samples, check_names, field, file_names, read_index, samples_of, unset
from tokenizer.imports.documents import ImportedDocuments, row_pieces
from tokenizer.imports.rows import piece_ids
from tokenizer.imports.source import AGAIN, SEQUENCE, ImportSource, TokenFile, TokenFileError
from tokenizer.shards.rows import RowOrigin

#: encodings of tokens and the types of their values
TYPES = {f"ndarray:{name}": np.dtype(name).newbyteorder("<")
         for name in ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")}


class MdsFile(NamedTuple):
    """What index.json says about one .mds file."""

    name: str
    samples: int
    bytes: int
    columns: dict[str, str]       # name → encoding, in the order of the columns in a sample
    sizes: list[int | None]       # bytes of each column; None: a sample has a u32 with its size


class MdsReader:
    """Reads files in the format of MosaicML streaming, in the order in which index.json lists them."""

    continues = False
    keeps_rows = True

    def files(self, source: ImportSource) -> list[str]:
        shards = shards_of(source)
        for shard in shards:
            if ("loss" in shard.columns) != ("loss" in shards[0].columns):
                raise TokenFileError(f"{source.folder / INDEX}: {shard.name} and {shards[0].name} do not both have the "
                                     f"column loss; add it, or remove it from all files")
        return file_names(source, [shard.name for shard in shards])

    def beside(self, source: ImportSource, name: str) -> list[str]:
        return [INDEX]

    def documents(self, source: ImportSource, names: list[str]) -> Iterator[ImportedDocuments]:
        shards = {shard.name: shard for shard in shards_of(source)}
        check_names(source, names, shards)
        for shard in map(shards.__getitem__, names):
            with source.open(shard.name) as file:
                if file.size != shard.bytes:
                    raise TokenFileError(f"{file.path}: has {file.size:,} bytes, of which {INDEX} has {shard.bytes:,}: "
                                         f"truncated, or of another index: {AGAIN}")
                for samples in samples_of(file, shard.samples, source.limits):
                    yield (decoded_rows if source.sequence else decoded)(source, file, shard, samples)
                    source.progress(len(samples.data))


def shards_of(source: ImportSource) -> list[MdsFile]:
    """Return what index.json says about each .mds file. Raises TokenFileError when a value in it is wrong or not
    supported."""
    index = read_index(source)
    if index.get("version") != 2:
        raise TokenFileError(f"{source.folder / INDEX}: version is {str(index.get('version'))[:80]}; this Tokenmill "
                             f"reads 2")
    return [shard_of(source, entry) for entry in field(source, index, "shards", list)]


def shard_of(source: ImportSource, entry: Any) -> MdsFile:
    where = source.folder / INDEX
    if field(source, entry, "format", str) != "mds":
        raise TokenFileError(f"{where}: format is {entry['format'][:80]!r}, not 'mds'; write the files as such")
    unset(source, entry, "compression", "zip_data")
    raw = field(source, entry, "raw_data", dict)
    names, encodings, sizes = (field(source, entry, key, list)
                               for key in ("column_names", "column_encodings", "column_sizes"))
    if not len(names) == len(encodings) == len(sizes) == len(set(map(str, names))) or \
            not all(size is None or (type(size) is int and size >= 0) for size in sizes):
        raise TokenFileError(f"{where}: column_names, column_encodings and column_sizes do not belong together: "
                             f"{AGAIN}")
    columns = dict(zip(map(str, names), map(str, encodings)))
    if source.sequence:
        columns = of_rows(source, columns, sizes)
    elif any(size is not None for name, size in zip(columns, sizes) if name in ("tokens", "loss", "id")):
        raise TokenFileError(f"{where}: the columns tokens, loss and id have fixed sizes: the samples are rows of a "
                             f"training; {SEQUENCE}, or write a sample per document")
    elif columns.get("tokens") not in TYPES:
        raise TokenFileError(f"{where}: the column tokens has the encoding {columns.get('tokens')}, not one of "
                             f"{', '.join(TYPES)}; write a sample per document, with its tokens as such")
    elif columns.get("loss", "ndarray:uint8") != "ndarray:uint8" or columns.get("id", "str") != "str":
        raise TokenFileError(f"{where}: the column loss is not ndarray:uint8, or id is not str; write them as such")
    return MdsFile(field(source, raw, "basename", str), field(source, entry, "samples", int),
                   field(source, raw, "bytes", int), columns, sizes)


def of_rows(source: ImportSource, columns: dict[str, str], sizes: list[int | None]) -> dict[str, str]:
    """Check the columns of files whose samples are rows of L = `source.sequence` targets. `columns` maps each column to
    its encoding, and `sizes` has their sizes in bytes, or None. Returns `columns` without the lengths in the encodings,
    such as ndarray:uint16 for ndarray:uint16:N. Raises TokenFileError when a column has an encoding or a length that
    rows of L targets cannot have."""
    where, result = source.folder / INDEX, {}
    lengths = {"tokens": source.sequence + 1, "loss": source.sequence}
    for (name, encoding), size in zip(columns.items(), sizes):
        array, _, length = encoding.rpartition(":") if encoding.count(":") == 2 else (encoding, "", "")
        result[name] = array
        if length and name in lengths and (length != str(lengths[name]) or
                                           size != lengths[name] * TYPES.get(array, np.dtype("u1")).itemsize):
            raise TokenFileError(f"{where}: the column {name} has the encoding {encoding[:80]}, but rows of sequence "
                                 f"{source.sequence} have {lengths[name]:,} values; see that the number is right")
    expected = {"tokens": TYPES, "loss": ("ndarray:uint8",), "ends": ("ndarray:uint32",), "sample": ("uint64",),
                "stream": ("str",)}
    for name, encodings in expected.items():
        if result.get(name, "" if name == "tokens" else next(iter(encodings))) not in encodings:
            raise TokenFileError(f"{where}: the column {name} has the encoding {str(result.get(name))[:80]}, not "
                                 f"{' or '.join(encodings)}; write the rows as such")
    return result


def decoded_rows(source: ImportSource, file: TokenFile, shard: MdsFile, samples: Samples) -> ImportedDocuments:
    """Return the pieces of documents in consecutive MDS samples of a file. Each of these samples is a row, that is, a
    training sample."""
    dtype, width, begin = TYPES[shard.columns["tokens"]], source.sequence + 1, 0
    fixed = {name for name, size in zip(shard.columns, shard.sizes) if size is not None}
    values: dict[str, list[np.ndarray]] = {name: [] for name in ("tokens", "loss", "ends")}
    origins: list[RowOrigin] = []
    for number, end in enumerate(samples.ends, samples.first):
        sample = samples.data[begin:end]
        try:
            parts = {name: sample[slice(*span)] for name, span in columns_in(shard, sample).items()}
            for name, kind, length in (("tokens", dtype, width), ("loss", np.dtype("u1"), width - 1),
                                       ("ends", np.dtype("<u4"), 0)):
                if name in parts:
                    column = np.frombuffer(parts[name], kind) if name in fixed else array(parts[name], kind)
                    if len(column) != (length or len(column)):
                        raise ValueError(f"{name} has {len(column):,} values, not {length:,}")
                    values[name].append(column)
            if "ends" in parts:
                ends = values["ends"].pop().astype(np.int64)
                if int(np.diff(ends, prepend=0).min()) < 1 or int(ends[-1]) != width:
                    raise ValueError(f"its ends do not increase up to {width:,}")
                values["ends"].append(ends + len(values["ends"]) * width)
            if "loss" in parts and int(values["loss"][-1].max()) > 1:
                raise ValueError("loss is not 0 or 1 for each token")
            if "sample" in parts and "stream" in parts:
                origins.append(RowOrigin(int.from_bytes(parts["sample"], "little"), parts["stream"].decode(), None,
                                         None))
        except ValueError as e:
            raise TokenFileError(f"{file.path}: byte {samples.byte + begin:,}: row {number:,} is damaged ({e}); see "
                                 f"that the sequence length is right, or {AGAIN}") from e
        begin = end
    tokens = source.checked(np.concatenate(values["tokens"]),
                            lambda token: f"{file.path}: row {samples.first + token // width:,}")
    lengths, counts = row_pieces(np.concatenate(values["ends"]) if values["ends"] else None, tokens, width,
                                 source.coding.eos)
    targets = np.ones((len(values["tokens"]), width), np.uint8) if values["loss"] else None
    if targets is not None:
        targets[:, 1:] = np.stack(values["loss"])
    return ImportedDocuments(shard.name, samples.first, tokens, lengths,
                             piece_ids(origins, counts) if origins else None,
                             None if targets is None else targets.ravel())


def decoded(source: ImportSource, file: TokenFile, shard: MdsFile, samples: Samples) -> ImportedDocuments:
    """Return the documents in consecutive MDS samples of a file. Each of these samples is a document."""
    dtype = TYPES[shard.columns["tokens"]]
    tokens: list[np.ndarray] = []
    targets: list[np.ndarray] = []
    ids: list[str] = []
    begins: list[int] = []                        # byte of the file at which the tokens of each sample begin
    begin = 0
    for number, end in enumerate(samples.ends, samples.first):
        sample, byte = samples.data[begin:end], samples.byte + begin
        try:
            spans = columns_in(shard, sample)
            first, stop = spans["tokens"]
            tokens.append(array(sample[first:stop], dtype))
            begins.append(byte + stop - tokens[-1].nbytes)
            if "loss" in spans:
                targets.append(array(sample[slice(*spans["loss"])], np.dtype("u1")))
                if len(targets[-1]) != len(tokens[-1]) or int(targets[-1].max()) > 1:
                    raise ValueError("loss is not 0 or 1 for each token")
            if "id" in spans:
                ids.append(sample[slice(*spans["id"])].decode())
        except ValueError as e:
            raise TokenFileError(f"{file.path}: byte {byte:,}: sample {number:,} is damaged ({e}): {AGAIN}") from e
        begin = end
    lengths = np.array([len(part) for part in tokens])
    ends = np.cumsum(lengths)

    def place(token: int) -> str:
        sample = int(np.searchsorted(ends, token, side="right"))
        inside = token - int(ends[sample] - lengths[sample])
        return f"{file.path}: byte {begins[sample] + inside * dtype.itemsize:,}"

    flat = source.checked(np.concatenate(tokens), place)
    source.check_ends(flat, ends, place)
    return ImportedDocuments(shard.name, samples.first, flat, lengths, ids or None,
                             np.concatenate(targets) if targets else None)


def columns_in(shard: MdsFile, sample: bytes) -> dict[str, tuple[int, int]]:
    """Return {column: (first byte, exclusive end)} for the columns of a sample. Raises ValueError when the columns do
    not fill the sample exactly."""
    head = 4 * shard.sizes.count(None)
    if len(sample) < head:
        raise ValueError("it is shorter than the sizes of its columns")
    variable = iter(np.frombuffer(sample[:head], "<u4").tolist())
    spans, begin = {}, head
    for name, size in zip(shard.columns, shard.sizes):
        end = begin + (next(variable) if size is None else size)
        spans[name] = begin, end
        begin = end
    if begin != len(sample):
        raise ValueError(f"its columns have {begin:,} bytes of {len(sample):,}")
    return spans


def array(data: bytes, dtype: np.dtype) -> np.ndarray:
    """Decode an array of one dimension with at least one value from the bytes of an MDS column `ndarray`. Raises
    ValueError when `data` is no such array."""
    code = data[0] - (1 << 2) if data else -1
    if not 0 <= code <= 3:
        raise ValueError("an array has not one dimension")
    size = int.from_bytes(data[1:1 + (1 << code)], "little")
    values = np.frombuffer(data[1 + (1 << code):], dtype)
    if not size or len(values) != size:
        raise ValueError(f"an array has {len(values):,} values, not {size:,}, or none")
    return values
