"""The listing of a bucket continues where an interrupted run stopped, and gives the same as a listing without
interruption."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from pipeline.base.clock import Clock
from pipeline.plan.objects import CONTINUED_S, ListingJournal, Row
from pipeline.store.fs import Store

PATTERN = "s3://b/in/**"
OBJECTS: list[Row] = [(f"d{i // 7}/{i:03d}.txt", i, f"v{i}") for i in range(50)]


class At(Clock):
    """A clock that stands still at `time`."""

    time = 1e9

    def wall(self) -> float:
        return self.time


class Bucket:
    """Lists OBJECTS from a path on, and fails after `lasts` objects."""

    def __init__(self, lasts: int = 10**6, objects: list[Row] = OBJECTS) -> None:
        self.lasts, self.objects = lasts, objects
        self.asked: list[str] = []
        self.given = 0

    def scan(self, after: str) -> Iterator[Row]:
        self.asked.append(after)
        for row in self.objects:
            if row[0] > after:
                if self.given == self.lasts:
                    raise ConnectionError("the run ends here")
                self.given += 1
                yield row


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


def journal(store: Store, clock: Clock | None = None, **options) -> ListingJournal:
    return ListingJournal(store, clock=clock or At(), chunk=10, **options)


def interrupted(store: Store, lasts: int, **options) -> None:
    with pytest.raises(ConnectionError):
        list(journal(store, **options).listed(PATTERN, Bucket(lasts).scan))


def test_what_an_interrupted_run_has_listed_is_not_listed_again(store):
    interrupted(store, 34)
    bucket = Bucket()
    assert list(journal(store).listed(PATTERN, bucket.scan)) == OBJECTS
    assert bucket.asked == [OBJECTS[29][0]] and bucket.given == 20


@pytest.mark.parametrize("seed", range(20))
def test_any_number_of_interruptions_loses_and_repeats_no_object(store, seed):
    rng = random.Random(seed)
    for _ in range(rng.randint(1, 6)):
        interrupted(store, rng.randint(0, 25) if rng.random() < 0.7 else 0)
    assert list(journal(store).listed(PATTERN, Bucket().scan)) == OBJECTS


def test_an_object_added_behind_the_interruption_is_listed(store):
    interrupted(store, 25)
    added = [*OBJECTS, ("x", 1, "v")]
    assert list(journal(store).listed(PATTERN, Bucket(objects=added).scan)) == added


def test_a_listing_that_is_too_old_begins_anew(store):
    clock = At()
    interrupted(store, 25, clock=clock)
    clock.time += CONTINUED_S + 1
    bucket = Bucket()
    assert list(journal(store, clock).listed(PATTERN, bucket.scan)) == OBJECTS
    assert bucket.asked == [""]


@pytest.mark.parametrize("damage", [b"", b"{", b"[1]", b'{"version": 1}',
                                    b'{"version": 1, "pattern": "s3://b/in/**", "after": ""}', None])
@pytest.mark.parametrize("number", [0, 1])
def test_a_damaged_part_and_those_after_it_are_listed_anew(store, damage, number):
    interrupted(store, 35)
    path = sorted(store.list("listing"))[number]
    if damage is None:
        store.remove(path)
    else:
        store.write(path, damage)
    bucket = Bucket()
    assert list(journal(store).listed(PATTERN, bucket.scan)) == OBJECTS
    assert bucket.asked == ["" if number == 0 else OBJECTS[9][0]]


def test_the_listing_of_another_pattern_is_no_part_of_it(store):
    interrupted(store, 35)
    bucket = Bucket()
    assert list(journal(store).listed("s3://b/in/*.txt", bucket.scan)) == OBJECTS
    assert bucket.asked == [""]


def test_nothing_stays_when_all_is_listed(store):
    interrupted(store, 35)
    one = journal(store)
    list(one.listed(PATTERN, Bucket().scan))
    assert list(store.list("listing"))
    one.remove()
    assert not list(store.list("listing"))


def test_few_objects_write_nothing(store):
    assert len(list(journal(store).listed(PATTERN, Bucket(objects=OBJECTS[:9]).scan))) == 9
    assert not list(store.list(""))


def test_a_driver_that_lost_the_store_writes_nothing(store):
    def lost() -> None:
        raise RuntimeError("another driver owns the store")

    with pytest.raises(RuntimeError):
        list(journal(store, check_lease=lost).listed(PATTERN, Bucket().scan))
    assert not list(store.list(""))


def test_objects_are_passed_on_as_they_are_listed(store):
    bucket = Bucket()
    assert list(islice(journal(store).listed(PATTERN, bucket.scan), 3)) == OBJECTS[:3]
    assert bucket.given == 10, "not more than one part is held"


def test_storage_that_does_not_list_in_order_is_not_continued_from_a_path(store):
    shuffled = [*OBJECTS[10:30], *OBJECTS[:10], *OBJECTS[30:]]
    taken: list[Row] = []
    with pytest.raises(ConnectionError):
        taken += journal(store).listed(PATTERN, lambda after: (
            row if n < 35 else stop() for n, row in enumerate(shuffled) if row[0] > after))
    assert len(list(store.list("listing"))) == 2, "what came in order, and nothing behind it"


def stop() -> Row:
    raise ConnectionError("the run ends here")
