"""Reads evaluation sets: JSON Lines (also gzipped) or Parquet files, or a folder of them such as a data set downloaded
from the Hugging Face hub.

A set has rows, numbered from 0 through its files in the order of their paths. The setting `fields` names the fields of
a row that hold its question, answer and passage. A dot in the name of a field leads into an object (`choices.text`). If
a field holds a list of strings, each string is a text of its own. No error message shows the contents of a row, because
these may be the answer of a test.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pipeline.base.parquet import open_parquet

Part = Literal["question", "answer", "passage"]
PARTS: tuple[Part, ...] = ("question", "answer", "passage")
#: ends of the names of files that are read
SUFFIXES = (".jsonl", ".jsonl.gz", ".ndjson", ".parquet")
#: most bytes of a line; a longer one is no row of an evaluation set
_MOST_BYTES = 64 << 20


class SetError(ValueError):
    """Raised for an evaluation set that cannot be used. `field` is the setting that the user must change: `sets`,
    `fields` or `common`."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class ItemText(NamedTuple):
    """A text of an evaluation set, with the number of its row and the part of the row that it is (question, answer or
    passage)."""

    row: int
    part: Part
    text: str


def read_set(path: Path, fields: dict[Part, str]) -> Iterator[list[ItemText]]:
    """Yield the texts of each row of an evaluation set. `path` is a file or a folder. `fields` says which field of a
    row holds which part: question, answer or passage.

    Raises:
        SetError: the set cannot be read or has no row, a row lacks a field, or a field holds something other than a
            string, a list of strings or null. A field that is null gives no text.
    """
    number = 0
    for file in set_files(path):
        for place, row in _rows(file):
            yield [ItemText(number, part, text) for part in PARTS if (field := fields.get(part))
                   for text in _texts(row, field, f"{file}: row {place}")]
            number += 1
    if not number:
        raise SetError("sets", f"{path}: the set has no row; name another file")


def set_files(path: Path) -> list[Path]:
    """Return the files of an evaluation set in the order in which they are read. If `path` is a file, it is the only
    one. If it is a folder, these are all files in it, at any depth, that have one of the SUFFIXES. Hidden files and
    files in hidden folders do not count. Raises SetError if a folder has no such file."""
    if not path.is_dir():
        return [path]
    files = sorted(p for p in path.rglob("*") if p.name.endswith(SUFFIXES) and p.is_file()
                   and not any(part.startswith(".") for part in p.relative_to(path).parts))
    if not files:
        raise SetError("sets", f"{path}: the folder has no file {', '.join(SUFFIXES)}; name one that has")
    return files


def _rows(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (number of the row in the file, from 0; the row) for each row of a file of an evaluation set."""
    try:
        if file.name.endswith(".parquet"):
            with open_parquet(str(file)) as table:
                batches = (row for batch in table.iter_batches(256) for row in batch.to_pylist())
                yield from enumerate(batches)
        else:
            yield from _json_rows(file)
    except SetError:
        raise
    except (OSError, EOFError, zlib.error, ValueError) as error:             # errors of Arrow are ValueErrors, too
        reason = str(error).partition("\n")[0] if isinstance(error, OSError) else type(error).__name__
        raise SetError("sets", f"{file}: cannot be read ({reason}); a set is JSON Lines or Parquet") from None


def _json_rows(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    number = 0
    with gzip.open(file) if file.name.endswith(".gz") else open(file, "rb") as lines:
        while line := lines.readline(_MOST_BYTES):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if not isinstance(row, dict):
                raise SetError("sets", f"{file}: row {number} is no JSON object; a set has one object per line")
            yield number, row
            number += 1


def _texts(row: dict[str, Any], field: str, place: str) -> Iterator[str]:
    value: Any = row
    for name in field.split("."):
        if not isinstance(value, dict) or name not in value:
            has = f"; it has {', '.join(sorted(value))}" if isinstance(value, dict) else ""
            raise SetError("fields", f"{place} has no field '{field}'{has}")
        value = value[name]
    if isinstance(value, list):
        if not all(isinstance(item, str) for item in value):
            raise SetError("fields", f"{place}: '{field}' is a list that does not hold strings alone; name another")
        yield from value
    elif isinstance(value, str):
        yield value
    elif value is not None:
        raise SetError("fields", f"{place}: '{field}' holds no text but a {type(value).__name__}; name another field")
