"""Parquet files of a store are read by the thread that asks for them, and by no other (see `Store.parquet`)."""

from __future__ import annotations

import io
import threading
from typing import ClassVar

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.report.nodes import batches, take
from pipeline.store.fs import Store
from pipeline.store.records import FileInfo

ROWS = range(5000)
TABLE = pa.table({"a": list(ROWS), "b": ["x" * (i % 90) for i in ROWS], "c": [i / 7 for i in ROWS]})


class Watched(io.BytesIO):
    """A file that notes which threads read it."""

    callers: ClassVar[set[int]] = set()

    def read(self, *args):
        self.callers.add(threading.get_ident())
        return super().read(*args)

    def readinto(self, *args):
        self.callers.add(threading.get_ident())
        return super().readinto(*args)


@pytest.fixture
def store(tmp_path, monkeypatch):
    pq.write_table(TABLE, tmp_path / "x.parquet", row_group_size=700)
    data = (tmp_path / "x.parquet").read_bytes()
    monkeypatch.setattr(Store, "open", lambda self, path: Watched(data))
    monkeypatch.setattr(Watched, "callers", set())
    return Store(tmp_path)


def test_no_thread_of_arrows_reads_an_object_of_python(store):
    info = FileInfo("x.parquet", 0, "", "", TABLE.num_rows)            # without a hash it is read where it lies
    assert pa.Table.from_batches(batches(store, info, ["a", "b"])).equals(TABLE.select(["a", "b"]))
    assert take(store, info, [3, 699, 700, 4999], ["a"]) == {r: {"a": r} for r in (3, 699, 700, 4999)}
    assert store.table("x.parquet").equals(TABLE)
    assert Watched.callers == {threading.get_ident()}


def test_the_watch_sees_arrows_threads(store):
    """Arrow reads ahead by itself: what the test above is about (and what makes it one that can fail)."""
    pq.ParquetFile(store.open("x.parquet")).read()
    assert Watched.callers - {threading.get_ident()}
