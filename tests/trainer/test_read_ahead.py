"""Tokens read ahead: which bytes are requested for a batch. A folder takes the place of the bucket."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pyarrow.fs import LocalFileSystem

from tests.tokenizer.packs import write_packing
from tests.trainer.synthetic import language, write_shards
from tokenizer.shards.reader import ShardSet
from tokenizer.shards.sums import BLOCK
from trainer.data.batches import Row, windows
from trainer.data.read_ahead import RemoteShardSet


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as threads:
        yield threads


def same(some: list[Row], others: list[Row]) -> bool:
    pairs = zip(some, others, strict=True)
    return all(a[0].tolist() == b[0].tolist() and a[1].tolist() == b[1].tolist() and
               (a[3] is None if b[3] is None else a[3].tolist() == b[3].tolist())
               for a, b in pairs)


def test_documents_of_a_batch_in_the_same_block_are_requested_once(tmp_path: Path, pool, monkeypatch):
    folder = tmp_path / "shards" / "web" / "split=train"
    info = write_shards(folder, "web", "train", language(1, 900, mean=8), 2, masked=True)
    packing = write_packing(folder, 64)
    there = RemoteShardSet(folder, info["sha256"], LocalFileSystem(), str(folder), pool, packing["sha256"])
    here = ShardSet(folder, info["sha256"], packing=packing["sha256"])
    requests, request = Counter(), RemoteShardSet._request

    def counted(self, wanted):
        requests[wanted] += 1
        return request(self, wanted)

    monkeypatch.setattr(RemoteShardSet, "_request", counted)
    places = [(0, row) for row in range(0, packing["rows"], 3)]
    assert sum(len(there.packed.row(row)) for _, row in places) > 3 * len(places), "rows hold several documents"
    assert same(windows([there], places, 64), windows([here], places, 64))
    assert set(requests.values()) == {1} and not there._coming


def test_the_mask_of_a_window_that_begins_with_the_last_byte_of_a_block_is_requested_once(tmp_path: Path, pool):
    folder, length = tmp_path / "shards" / "web" / "split=train", BLOCK - 1
    info = write_shards(folder, "web", "train", language(1, 400), 1, masked=True)
    there = RemoteShardSet(folder, info["sha256"], LocalFileSystem(), str(folder), pool)
    here = ShardSet(folder, info["sha256"])
    assert here.tokens > 2 * BLOCK
    assert same(windows([there], [(0, 1)], length), windows([here], [(0, 1)], length))
    assert not there._coming, "all that was requested has been read"
