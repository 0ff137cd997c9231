"""Objects that are read from front to back while the next pieces come."""

from __future__ import annotations

import random
import threading

import pytest

from pipeline.store import ahead_file
from pipeline.store.ahead_file import AheadFile


class Bucket:
    """An object of random bytes, and a list of the requests for ranges of it."""

    def __init__(self, size: int) -> None:
        self.data, self.requests = random.Random(size).randbytes(size), list[tuple[int, int]]()

    def fetch(self, start: int, stop: int) -> bytes:
        self.requests.append((start, stop))
        return self.data[start:stop]


@pytest.mark.parametrize("size", [0, 1, 999, 1000, 1001, 54_321])
def test_reads_at_any_place_have_the_bytes_of_the_object(size):
    bucket, rng = Bucket(size), random.Random(1)
    with AheadFile(size, bucket.fetch, piece=1000) as file:
        for _ in range(200):
            start, count = rng.randint(0, size), rng.choice([0, 1, 400, 5000, 99_999])
            assert file.read_at(start, count) == bucket.data[start:start + count]
            assert (file.seek(start), file.read(count), file.tell()) == (
                start, bucket.data[start:start + count], min(start + count, size))
        assert file.seek(0) == 0 and file.read() == bucket.data


def test_three_places_are_read_with_one_request_for_each_piece():
    bucket = Bucket(90_000)
    with AheadFile(90_000, bucket.fetch, piece=1000) as file:
        for place in range(0, 30_000, 700):
            for begin in (0, 30_000, 60_000):
                stop = min(place + 700, 30_000)
                assert file.read_at(begin + place, stop - place) == bucket.data[begin + place:begin + stop]
    assert len(set(bucket.requests)) == 90
    assert len(bucket.requests) <= 90 + 2 * ahead_file.AHEAD, "two places end where another began"


def test_the_next_pieces_come_while_one_is_used():
    bucket, fetched = Bucket(20_000), threading.Semaphore(0)

    def fetch(start: int, stop: int) -> bytes:
        data = bucket.fetch(start, stop)
        fetched.release()
        return data

    with AheadFile(20_000, fetch, piece=1000) as file:
        file.read_at(0, 10)
        for _ in range(1 + ahead_file.AHEAD):
            assert fetched.acquire(timeout=300)
        assert sorted(bucket.requests) == [(n * 1000, n * 1000 + 1000) for n in range(1 + ahead_file.AHEAD)]


def test_a_piece_that_failed_or_is_forgotten_is_requested_again():
    bucket, failures = Bucket(3_000), [OSError("reset"), OSError("reset")]

    def fetch(start: int, stop: int) -> bytes:
        if start == 1000 and failures:
            raise failures.pop()
        return bucket.fetch(start, stop)

    with AheadFile(3_000, fetch, piece=1000) as file:
        for _ in range(2):
            with pytest.raises(OSError, match="reset"):
                file.read_at(1_000, 10)
        assert file.read_at(1_000, 10) == bucket.data[1_000:1_010]
        requests = len(bucket.requests)
        file.forget(1_500, 1_600)
        assert file.read_at(1_000, 10) == bucket.data[1_000:1_010] and len(bucket.requests) == requests + 1


def test_an_object_that_has_become_shorter_is_an_error():
    bucket = Bucket(5_000)
    with AheadFile(9_000, bucket.fetch, piece=1000) as file, pytest.raises(OSError, match="ends at 5000"):
        file.read_at(4_500, 1_000)
