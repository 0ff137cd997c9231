"""Reads files of several samples and the index.json beside them, in the formats of MosaicML streaming and litdata;
`tokenizer.export.chunks` gives their layout.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterator
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from tokenizer.imports.source import AGAIN, ImportLimits, ImportSource, TokenFile, TokenFileError

INDEX = "index.json"
#: largest size of index.json in bytes; the entry of a file usually takes less than a kilobyte
INDEX_BYTES = 1 << 28
OFFSET = np.dtype("<u4")
#: number of offsets that are read at a time
BLOCK_OFFSETS = 1 << 16


class Samples(NamedTuple):
    """Consecutive samples of a file in the format of MosaicML streaming or litdata, as bytes."""

    first: int                    # number of the first of them in the file, from 0
    byte: int                     # byte of the file at which they begin
    ends: list[int]               # exclusive end of each sample in `data`
    data: bytes


def read_index(source: ImportSource) -> dict[str, Any]:
    """Return the contents of index.json. Raises TokenFileError when there is no such file, when it is no JSON mapping,
    or when it has more than INDEX_BYTES bytes."""
    if not source.is_folder and source.path.name != INDEX:
        raise TokenFileError(f"{source.path}: is no folder with {INDEX}; name such a folder")
    with source.open(INDEX) as file:
        if file.size > INDEX_BYTES:
            raise TokenFileError(f"{file.path}: has {file.size:,} bytes, more than an index of up to {INDEX_BYTES:,}; "
                                 f"see that the format is that of the files")
        try:
            index = json.loads(file.read(0, file.size))
        except (ValueError, RecursionError) as e:
            raise TokenFileError(f"{file.path}: is no JSON ({e}): {AGAIN}") from e
    if not isinstance(index, dict):
        raise TokenFileError(f"{file.path}: is no mapping; see that the format is that of the files")
    return index


def field(source: ImportSource, entry: Any, key: str, kind: type) -> Any:
    """Return the value of `key` in the mapping `entry` of index.json. Raises TokenFileError when the value is not of
    the type `kind`."""
    value = entry.get(key) if isinstance(entry, dict) else None
    if type(value) is not kind:
        raise TokenFileError(f"{source.folder / INDEX}: {key} is {str(value)[:80]!r}, not of the type {kind.__name__}: "
                             f"see that the format is that of the files, or {AGAIN}")
    return value


def unset(source: ImportSource, entry: dict[str, Any], *keys: str) -> None:
    """Raise TokenFileError when the mapping `entry` of index.json has a value for one of the keys. Such a key (for
    instance `compression`) says that the files were written in a way that an import cannot read."""
    for key in keys:
        if entry.get(key):
            raise TokenFileError(f"{source.folder / INDEX}: {key} is {str(entry[key])[:80]!r}, which an import cannot "
                                 f"undo; write the files again without it")


def file_names(source: ImportSource, names: list[str]) -> list[str]:
    """Return the names of files that index.json lists. Raises TokenFileError when a name leads out of the folder or is
    there twice."""
    for number, name in enumerate(names):
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name or not is_utf8(name):
            raise TokenFileError(f"{source.folder / INDEX}: {name[:80]!r} is no name of a file in the folder; edit it")
        if number and len(set(names)) < len(names):
            raise TokenFileError(f"{source.folder / INDEX}: names a file twice; remove one of both")
    return names


def check_names(source: ImportSource, before: list[str], names: Container[str]) -> None:
    """Raise TokenFileError if index.json no longer lists all files of `before`, because another program has changed it
    since the import began. `names` are the files that it lists now."""
    if not all(name in names for name in before):
        raise TokenFileError(f"{source.folder / INDEX}: changed while it was read; import it when nothing writes to it "
                             f"any more")


def is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeError:
        return False
    return True


def samples_of(file: TokenFile, count: int, limits: ImportLimits) -> Iterator[Samples]:
    """Yield the samples (documents or rows of tokens) of a file, as many at a time as fit into twice
    `limits.block_tokens` bytes, but at least one. `count` is their number according to the index. Raises TokenFileError
    when the file does not agree with this number or with its own offsets."""
    number = int(file.array(0, 1, OFFSET)[0])
    begin = OFFSET.itemsize * (number + 2)
    if number != count or file.size < begin:
        raise TokenFileError(f"{file.path}: byte 0: {number:,} samples in {file.size:,} bytes, of which {INDEX} has "
                             f"{count:,}: truncated, or of another index: {AGAIN}")
    first = 0
    while first < number:
        stop = min(first + BLOCK_OFFSETS, number)
        byte = OFFSET.itemsize * (1 + first)
        offsets = file.array(byte, stop - first + 1, OFFSET).astype(np.int64)
        sizes = np.diff(offsets)
        if int(offsets[0]) < begin or int(sizes.min()) < 0 or int(offsets[-1]) > file.size or \
                int(sizes.max()) > 8 * limits.longest:
            raise TokenFileError(f"{file.path}: byte {byte:,}: samples from number {first:,} on do not follow one "
                                 f"another within the {file.size:,} bytes of the file: {AGAIN}")
        last = max(1, int(np.searchsorted(offsets, offsets[0] + 2 * limits.block_tokens, side="right")) - 1)
        ends = offsets[1:last + 1] - offsets[0]
        yield Samples(first, int(offsets[0]), ends.tolist(), file.read(int(offsets[0]), int(ends[-1])))
        begin, first = int(offsets[last]), first + last
    end = int(file.array(OFFSET.itemsize * (1 + number), 1, OFFSET)[0])
    if end != file.size:
        raise TokenFileError(f"{file.path}: byte {OFFSET.itemsize * (1 + number):,}: the last sample ends at byte "
                             f"{end:,}, the file at {file.size:,}: {AGAIN}")
