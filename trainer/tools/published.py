"""Reads the published datasets of a store, in which the documents of training shards can be looked up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem
    from pyarrow.parquet import ParquetFile


def datasets(store: FileSystem, top: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield each published dataset (folder below `top`/datasets) as (name, {key of the task that wrote a file: path of
    the file}). The files are parts of the dataset, in Parquet."""
    from pyarrow import fs

    from pipeline.base.parquet import read_table

    for folder in sorted(f.path for f in store.get_file_info(fs.FileSelector(f"{top}/datasets", allow_not_found=True))
                         if f.type == fs.FileType.Directory):
        try:
            with store.open_input_file(f"{folder}/.manifest") as source:
                table = read_table(source, ["part", "key"])
        except FileNotFoundError:
            continue
        yield folder.rpartition("/")[2], {key: f"{folder}/{name}" for key, name in zip(
            table["key"].to_pylist(), table["part"].to_pylist())}


@contextmanager
def part(store: FileSystem, path: str) -> Iterator[ParquetFile]:
    """Open a part of a dataset (the Parquet file `path`) for reading, as a context manager. Raises ConfigError if the
    file is damaged."""
    import pyarrow as pa

    from pipeline.base.parquet import open_parquet
    from trainer.base.config import ConfigError

    with store.open_input_file(path) as source:
        try:
            file = open_parquet(source)
        except pa.ArrowInvalid as error:
            raise ConfigError(f"{path}: damaged ({error}); run the recipe that writes {path.split('/')[-2]} again") \
                from None
        with file:
            yield file
