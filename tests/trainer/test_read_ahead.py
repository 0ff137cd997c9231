"""Tokens that are read ahead: which bytes are requested for a batch. A folder stands in for the bucket."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from threading import Event, Thread
from typing import ClassVar

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow.fs import LocalFileSystem, S3FileSystem

from tests.tokenizer.packs import write_packing
from tests.trainer.synthetic import language, write_shards
from tokenizer.shards.layout import ShardError
from tokenizer.shards.reader import ShardSet
from tokenizer.shards.requested import BlockRange
from tokenizer.shards.sums import BLOCK
from trainer.data.read_ahead import MOST, NEAR, REQUESTS, RemoteShardSet, request_threads, together
from trainer.data.rows import Row, windows


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
    assert sum(requests.values()) < len(places) / 10, "documents that are near each other are one request"


RANGES = st.builds(lambda shard, kind, first, size: BlockRange(shard, kind, first, first + size), st.integers(0, 1),
                   st.sampled_from(["body", "loss"]), st.integers(0, 3000), st.integers(1, 1500))


@given(st.lists(RANGES, max_size=60), st.integers(0, 3000))
def test_ranges_are_one_request_exactly_if_they_are_near(wanted, spread):
    wanted = [one._replace(first=one.first + spread * i, stop=one.stop + spread * i) for i, one in enumerate(wanted)]
    groups = list(together(set(wanted)))
    assert [one for group in groups for one in group] == sorted(set(wanted)), "each once, in order"
    ends = [max(one.stop for one in group) for group in groups]
    for group, end in zip(groups, ends):
        assert len({one[:2] for one in group}) == 1
        assert end - group[0].first <= max(MOST, max(one.stop - one.first for one in group))
        assert all(min(b.first - a.stop for a in group[:i]) <= NEAR for i, b in enumerate(group) if i)
    for (one, other), end in zip(pairwise(groups), ends):
        first = other[0]
        assert one[0][:2] != first[:2] or first.first - end > NEAR or first.stop - one[0].first > MOST


def test_a_failed_request_names_the_file_for_each_of_its_ranges(tmp_path: Path, pool):
    folder = tmp_path / "shards" / "web" / "split=train"
    info = write_shards(folder, "web", "train", language(1, 400), 1)
    there = RemoteShardSet(folder, info["sha256"], LocalFileSystem(), str(tmp_path / "gone"), pool)
    there.prefetch([(0, 100), (5000, 5100)])
    for start in (0, 5000):
        with pytest.raises(ShardError, match=r"gone/.*missing"):
            there.read(start, start + 100)


def test_the_mask_of_a_window_that_begins_with_the_last_byte_of_a_block_is_requested_once(tmp_path: Path, pool):
    folder, length = tmp_path / "shards" / "web" / "split=train", BLOCK - 1
    info = write_shards(folder, "web", "train", language(1, 400), 1, masked=True)
    there = RemoteShardSet(folder, info["sha256"], LocalFileSystem(), str(folder), pool)
    here = ShardSet(folder, info["sha256"])
    assert here.tokens > 2 * BLOCK
    assert same(windows([there], [(0, 1)], length), windows([here], [(0, 1)], length))
    assert not there._coming, "all that was requested has been read"


class OneFile(BaseHTTPRequestHandler):
    """A bucket with one file of 1 MB. It only answers requests for bytes once 64 different ones have arrived."""

    protocol_version = "HTTP/1.1"
    arrived: ClassVar[set[str]] = set()
    enough = Event()

    def log_message(self, *arguments: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(200, 1 << 20)

    def do_GET(self) -> None:
        wanted = self.headers["Range"]
        self.arrived.add(wanted)
        if len(self.arrived) == 64:
            self.enough.set()
        if not self.enough.wait(60):
            self.answer(404, 0)
            return
        start, last = map(int, wanted.removeprefix("bytes=").split("-"))
        self.answer(206, last + 1 - start)
        self.wfile.write(bytes(last + 1 - start))

    def answer(self, status: int, size: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(size))
        self.send_header("Last-Modified", "Wed, 21 Oct 2026 07:28:00 GMT")
        self.end_headers()


def test_a_bucket_gets_more_requests_at_once_than_pyarrow_makes_by_itself(monkeypatch):
    monkeypatch.setattr(ThreadingHTTPServer, "request_queue_size", 256)
    pa.set_io_thread_count(8)
    with ThreadingHTTPServer(("127.0.0.1", 0), OneFile) as server, request_threads() as threads:
        server.daemon_threads = True
        Thread(target=server.serve_forever, daemon=True).start()
        bucket = S3FileSystem(access_key="a", secret_key="b", region="us-east-1", scheme="http",
                              endpoint_override=f"127.0.0.1:{server.server_port}", request_timeout=120)
        file = bucket.open_input_file("bucket/file")
        read = list(threads.map(lambda i: file.read_at(100, 4096 * i), range(64)))
        server.shutdown()
    assert REQUESTS > 64 and read == [bytes(100)] * 64
