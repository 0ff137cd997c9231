"""Snapshots of the commit log: they give the same view as the segments, whatever is damaged, lost or removed, and also
when several processes act at once."""

from __future__ import annotations

import errno
import json
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest

from pipeline.store import snapshot
from pipeline.store.fs import Store
from pipeline.store.garbage import packed_segments, remove_packed_segments
from pipeline.store.lease import identity
from pipeline.store.log import Fenced, Log
from pipeline.store.records import FileInfo, PartRecord
from pipeline.store.segment import FORMAT, CorruptLog, encode_record, encode_segment, facts, segment_name
from pipeline.store.snapshot import Pack
from pipeline.store.verify import repair, verify_store
from pipeline.store.view import LogView
from tests.simulate.clock import VirtualClock

KEYS = [f"{n:032x}" for n in range(12)] + ["k", "with \"quotes\" and ä"]
STAGES = ["stage1", "stage2"]


def record(key: str, attempt: str = "00000001-00000000", quarantine: tuple[dict[str, Any], ...] = (),
           replay_key: str = "") -> PartRecord:
    info = FileInfo(f"objects/{key}/{attempt}.kept", 10, "s" * 64, attempt * 2, 1)
    return PartRecord(key, "t", "clean", attempt, {"kept": info}, {"in": {"web": {"docs": 1}}}, list(quarantine),
                      replay_key=replay_key)


def fill(store: Store, segments: int, *, pack_segments: int = 5, run: str = "first", **how: Any) -> Log:
    """Write a log with `segments` segments, with one record in each after the first, and the snapshot that is due.
    Returns it."""
    log = Log.open(store, run=run, clock=VirtualClock(), threaded=False, pack_segments=pack_segments, **how)
    while log.segments < segments:
        log.append(PartRecord(f"{run}{log.segments}", "t", "clean", f"{log.epoch:08d}-{log.segments:08d}", {}, {}))
        log.flush()
    log.tend()
    return log


def packs(store: Store) -> list[Pack]:
    return snapshot.listed(store)


def segments(store: Store) -> list[int]:
    return [int(path[4:12]) for path in store.list("log") if path.endswith(".json") and path.count("/") == 1]


def seen(view: LogView) -> dict[str, Any]:
    """Return everything that a view of the log tells."""
    assert view.get_all([*["none"] * 300, *KEYS]) == {key: r for key in KEYS if (r := view.get(key)) is not None}
    return {"records": list(view.records()), "count": len(view), "state": view.state(),
            "got": [view.get(key) for key in KEYS], "in": [key in view for key in KEYS],
            "earlier": [view.earlier(f"replay{n}") for n in range(4)], "none": view.earlier(""),
            "retired": [view.retired_contents(key) for key in KEYS],
            "documents": {stage: view.quarantined([stage]) for stage in STAGES},
            "rows": [view.quarantined_rows(key) for key in KEYS],
            "epoch": (view.epoch, view.holder, view.runs), "segments": view.segments}


class RandomLog:
    """Makes random segments with everything that a log may contain, also records of keys that already have one, and
    retirements without effect."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.epoch, self.attempts = rng, 0, 0
        self.made: list[tuple[str, str]] = []

    def segment(self) -> bytes:
        rng = self.rng
        nonce = f"{rng.getrandbits(64):x}"
        if self.epoch == 0 or rng.random() < .15:
            self.epoch += 1
            return encode_segment({"format": FORMAT, "kind": "epoch", "epoch": self.epoch, "nonce": nonce,
                                   "holder": {**identity(f"run{self.epoch}"), "pid": rng.randrange(99)}})
        body: dict[str, Any] = {"format": FORMAT, "kind": "records", "epoch": self.epoch, "nonce": nonce,
                                "records": [self.record() for _ in range(rng.choice((0, 1, 1, 2, 5)))],
                                "quarantined": [self.verdict() for _ in range(rng.choice((0, 0, 2)))]}
        if rng.random() < .2:
            body["released"] = rng.sample(KEYS, 2)
        if rng.random() < .4 and self.made:
            body["retired"] = [{"key": key, "attempt": attempt, "why": "is gone",
                                **({"unnamed": True} if rng.random() < .3 else {})}
                               for key, attempt in rng.choices(self.made[-6:], k=2)]
        return encode_segment(body)

    def verdict(self) -> dict[str, Any]:
        rng = self.rng
        return {"key": rng.choice(KEYS), "row": rng.randrange(4), "stage": rng.choice((-2, 0, 1)), "reason": "crash"}

    def record(self) -> bytes:
        rng, self.attempts = self.rng, self.attempts + 1
        attempt, key = f"{self.epoch:08d}-{self.attempts:08d}", rng.choice(KEYS)
        entries = [{"row": 1, "id": f"doc{rng.randrange(6)}", "stage": "s", "stage_key": rng.choice(STAGES),
                    "reason": attempt} for _ in range(rng.choice((0, 0, 0, 1)))]
        self.made.append((key, attempt))
        return encode_record(record(key, attempt, tuple(entries), rng.choice(("", "replay0", "replay1", "replay2"))))


def copy(store: Store, to: Store) -> Store:
    for path in store.list("log"):
        to.write(path, store.read(path))
    return to


@pytest.mark.parametrize("seed", range(60))
def test_a_view_from_packs_is_the_view_from_segments(tmp_path, seed):
    """Packs of any cut, some over others, some damaged or lost; and segments that packs hold are gone."""
    rng = random.Random(seed)
    made, plain, store = RandomLog(rng), Store(tmp_path / "plain"), Store(tmp_path / "packed")
    count = rng.choice((3, 12, 40))
    for number in range(1, count + 1):
        plain.write(segment_name(number), made.segment())
    copy(plain, store)
    at = 1
    while at <= count and rng.random() < .95:
        last = min(count, at + rng.choice((0, 2, 7)))
        list(snapshot.take(store, at, last))
        at = last + 1 if rng.random() < .8 else rng.choice((at, last + 2))
    sound = set()
    for pack in packs(store):
        if (draw := rng.random()) < .15:
            store.remove(pack.path)
        elif draw < .3:
            data = bytearray(store.read(pack.path))
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            store.write(pack.path, bytes(data))
        else:
            sound |= set(range(pack.first, pack.last + 1))
    for number in sound:
        if number < count and rng.random() < .5:
            store.remove(segment_name(number))
    early = Log.read(store)
    assert seen(early) == seen(Log.read(plain))
    for number in range(count + 1, count + 8):
        data = made.segment()
        for to in (plain, store):
            to.write(segment_name(number), data)
    early.refresh()
    assert seen(early) == seen(Log.read(store)) == seen(Log.read(plain))


def test_a_record_is_found_by_its_beginning():
    for key in KEYS:
        for quarantine in ((), ({"id": "d", "row": 1, "stage": "s", "stage_key": "k", "reason": "r"},)):
            data = encode_record(record(key, quarantine=quarantine, replay_key="r" + key))
            assert facts(data) == (key, "r" + key, bool(quarantine))
            assert PartRecord.from_json(json.loads(data)) == record(key, quarantine=quarantine, replay_key="r" + key)


def test_a_snapshot_is_taken_when_enough_segments_came_and_packs_are_never_rewritten(tmp_path):
    store = Store(tmp_path)
    log = fill(store, 4)
    assert packs(store) == []
    log = fill(store, 5, run="second", takeover=True)
    assert packs(store) == [(1, 5)]
    before = store.read(Pack(1, 5).path)
    for n in range(5):
        assert log.tend() and packs(store) == [(1, 5)]
        log.append(record(f"more{n}"))
        log.flush()
    assert log.tend() and packs(store) == [(1, 5), (6, 10)]
    assert store.read(Pack(1, 5).path) == before
    log.close()
    assert Log.read(store).packed == 10


def test_a_pack_ends_when_it_is_large(tmp_path):
    store = Store(tmp_path)
    fill(store, 9, pack_segments=100).close()
    large = store.size(segment_name(2)) * 3
    assert list(snapshot.take(store, 1, 9, pack_bytes=large)) == [(1, 4), (5, 7), (8, 9)]
    assert seen(Log.read(store))["segments"] == 9


HARM: dict[str, Callable[[bytes], bytes]] = {
    "flip": lambda data: data[:200] + bytes([data[200] ^ 1]) + data[201:], "torn": lambda data: data[:-10],
    "empty": lambda data: b"", "garbage": lambda data: b"{]" * 100,
}


@pytest.mark.parametrize("harm", [*HARM, "gone", "another's"])
def test_a_damaged_pack_costs_time_never_data_and_the_next_driver_writes_it_again(tmp_path, harm, caplog):
    store = Store(tmp_path)
    fill(store, 15).close()
    assert packs(store) == [(1, 5), (6, 10), (11, 15)]
    expected, sound = seen(Log.read(store)), store.read(Pack(6, 10).path)
    if harm == "gone":
        store.remove(Pack(6, 10).path)
    else:
        store.write(Pack(6, 10).path, store.read(Pack(1, 5).path) if harm == "another's" else HARM[harm](sound))
    assert seen(Log.read(store)) == expected
    assert ("00000006-00000010.pack" in caplog.text) == (harm != "gone")
    fill(store, 0, run="second").close()
    assert store.read(Pack(6, 10).path) == sound
    assert Log.read(store).holes == []


@pytest.mark.parametrize("harm", [*HARM, "gone"])
@pytest.mark.parametrize("which", [(1, 5), (6, 10), (11, 15)])
def test_what_neither_pack_nor_segments_give_is_no_end_of_the_log(tmp_path, which, harm):
    store = Store(tmp_path)
    fill(store, 15).close()
    with fill(store, 0, run="gc") as log:
        assert remove_packed_segments(log) == 14
    assert segments(store) == [1, 16]                        # what opened an epoch stays
    pack = Pack(*which)
    if harm == "gone":
        store.remove(pack.path)
    else:
        store.write(pack.path, HARM[harm](store.read(pack.path)))
    before = {path: store.read(path) for path in store.list("log")}
    for attempt in (Log.read, Log.open):
        with pytest.raises(CorruptLog):
            attempt(store)
    assert {path: store.read(path) for path in store.list("log") if "probe" not in path} == before


def test_the_last_pack_is_damaged_and_nothing_comes_behind_it(tmp_path):
    """The listing of segments is empty, and that must not look like a new store."""
    store = Store(tmp_path)
    fill(store, 5).close()
    for number in range(1, 6):
        store.remove(segment_name(number))
    assert len(Log.read(store)) == 4
    store.write(Pack(1, 5).path, b"")
    with pytest.raises(CorruptLog, match=r"00000001\.json is missing"):
        Log.open(store)
    assert segments(store) == []


class Interrupted(Store):
    """A store in which something happens before a call: only once, at the first path for which `when` is true."""

    def __init__(self, root: Any, call: str, when: Callable[[str], bool], happens: Callable[[], object]) -> None:
        super().__init__(root)
        self._call, self._when, self._happens = call, when, happens

    def _before(self, call: str, path: str) -> None:
        if call == self._call and self._when(path):
            self._call = ""
            self._happens()

    def read(self, path: str) -> bytes:
        self._before("read", path)
        return super().read(path)

    def put_absent(self, path: str, data: bytes) -> bool:
        self._before("put_absent", path)
        return super().put_absent(path, data)


def collect(store: Store, **how: Any) -> None:
    with fill(store, 0, run="gc", takeover=True, **how) as log:
        remove_packed_segments(log)


@pytest.mark.parametrize("reads", [1, 3])
def test_a_reader_whose_segments_are_removed_meanwhile_goes_on_from_the_pack(tmp_path, reads):
    store = Store(tmp_path)
    fill(store, 12, pack_segments=1000).close()              # listed before there is a pack
    expected = {r.key for r in Log.read(store).records()}

    def meanwhile() -> None:
        fill(store, 0, run="packs", takeover=True).close()
        collect(store)

    reader = Interrupted(tmp_path, "read", lambda path: path == segment_name(reads), meanwhile)
    assert {r.key for r in Log.read(reader).records()} == expected
    assert 2 not in segments(store)


def test_a_view_that_is_older_than_the_removed_segments_goes_on_from_the_pack(tmp_path):
    store = Store(tmp_path)
    fill(store, 3).close()
    view = Log.read(store)
    fill(store, 12, run="second").close()
    collect(store)
    assert segments(store) == [1, 4, 11, 12, 13]
    view.refresh()
    assert seen(view) == seen(Log.read(store))


def test_a_driver_that_was_fenced_before_its_segments_were_removed_stays_fenced(tmp_path):
    store = Store(tmp_path)
    first = fill(store, 3)
    fill(store, 12, run="second", takeover=True).close()
    collect(store)
    first.append(record("late"))
    with pytest.raises(Fenced):
        first.flush()
    assert "late" not in Log.read(store)


def test_a_driver_that_read_the_log_before_segments_were_removed_does_not_commit_among_them(tmp_path):
    """It stands still between reading the log and taking the lease. Then the name of its epoch is free again."""
    store = Store(tmp_path)
    first = fill(store, 3)
    holders: list[Log] = []

    def meanwhile() -> None:
        for n in range(9):
            first.append(record(f"mean{n}"))
            first.flush()
        first.tend()
        collect(store)
        assert 4 not in segments(store)
        holders.append(fill(store, 0, run="third", takeover=True))

    late = Interrupted(tmp_path, "put_absent", lambda path: path == segment_name(4), meanwhile)
    with Log.open(late, run="late", takeover=True, threaded=False) as log:
        assert log.epoch == 4 and len(log) == 11
        with pytest.raises(Fenced):
            holders[0].check_lease()
    assert len(Log.read(store)) == 11


def test_a_segment_that_came_where_one_was_removed_is_not_believed(tmp_path):
    """The put of a driver that died in between had its effect late; and now the pack of that place is damaged."""
    store = Store(tmp_path)
    fill(store, 5).close()
    fill(store, 12, run="second").close()
    collect(store)
    assert segments(store) == [1, 6, 11, 12, 13]
    for number in range(2, 6):
        store.write(segment_name(number), encode_segment({"format": FORMAT, "kind": "epoch", "epoch": 2, "nonce": "n",
                                                          "holder": identity("dead")}))
    assert len(Log.read(store)) == 4 + 6
    store.write(Pack(1, 5).path, b"")
    with pytest.raises(CorruptLog, match="epoch"):
        Log.read(store)


def test_commits_do_not_wait_for_a_snapshot(tmp_path):
    reading, go_on = threading.Event(), threading.Event()

    def stands_still() -> None:
        reading.set()
        assert go_on.wait(300)

    slow = Interrupted(tmp_path, "read", lambda path: path == segment_name(2), stands_still)
    with Log.open(slow, pack_segments=2) as log:
        log.append(record("a"))
        log.flush()
        assert reading.wait(300), "the snapshot is due"
        log.append(record("b"))
        log.flush()
        assert "b" in Log.read(Store(tmp_path)) and not packs(slow)
        go_on.set()
    assert packs(slow) == [(1, 2)]


def test_two_drivers_that_pack_the_same_segments_do_no_harm(tmp_path):
    store = Store(tmp_path)
    first = Log.open(Interrupted(tmp_path, "put_absent", lambda path: path.endswith(".pack"),
                                 lambda: fill(store, 9, run="second", takeover=True, pack_segments=3).close()),
                     run="first", threaded=False, pack_segments=4)
    for n in range(3):
        first.append(record(f"first{n}"))
        first.flush()
    first.tend()                                              # and is fenced meanwhile
    assert packs(store) == [(1, 3), (1, 4), (4, 6), (7, 9)]
    expected = seen(Log.read(store))
    assert expected["count"] == 3 + 4
    for pack in packs(store):
        store.remove(pack.path)
    assert seen(Log.read(store)) == expected


# -- store gc, store verify -------------------------------------------------------------------------------------------
def test_gc_removes_what_sound_packs_hold_and_nothing_else(tmp_path):
    store = Store(tmp_path)
    fill(store, 12).close()
    store.write(Pack(6, 10).path, HARM["flip"](store.read(Pack(6, 10).path)))
    assert packed_segments(store, 13) == [segment_name(n) for n in (2, 3, 4, 5)]
    expected = seen(Log.read(store))["records"]
    with Log.open(store, threaded=False) as log:
        assert remove_packed_segments(log) == 4
        assert remove_packed_segments(log) == 0
    assert segments(store) == [1, *range(6, 14)]
    assert list(Log.read(store).records()) == expected


def test_gc_keeps_segments_of_its_own_epoch(tmp_path):
    store = Store(tmp_path)
    with fill(store, 12) as log:
        assert packs(store) == [(1, 5), (6, 10)]
        assert remove_packed_segments(log) == 0
    assert segments(store) == list(range(1, 13))


def test_verify_names_damage_of_the_log_and_repair_restores_it(tmp_path):
    store = Store(tmp_path)
    fill(store, 12).close()
    whole = {path: store.read(path) for path in store.list("log") if path.endswith(".pack") or path.count("/") == 1}
    harmed = {segment_name(2): "flip", segment_name(7): "empty", Pack(1, 5).path: "ok", Pack(6, 10).path: "ok"}
    for path, how in harmed.items():
        if how in HARM:
            store.write(path, HARM[how](whole[path]))
    assert verify_store(store, Log.read(store)).damaged.keys() == {segment_name(2), segment_name(7)}
    with Log.open(store, threaded=False) as log:
        done = verify_store(store, log)
        assert repair(store, log, done.damaged) == (0, 0, 2, [], [])
    store.write(Pack(6, 10).path, HARM["torn"](whole[Pack(6, 10).path]))
    with Log.open(store, threaded=False) as log:
        done = verify_store(store, log)
        assert done.damaged.keys() == {Pack(6, 10).path}
        assert repair(store, log, done.damaged) == (0, 0, 1, [], [])
    assert {path: store.read(path) for path in whole} == whole
    assert not verify_store(store, Log.read(store)).damaged


def test_repair_removes_a_damaged_pack_that_cannot_be_written_again(tmp_path):
    store = Store(tmp_path)
    fill(store, 12).close()
    list(snapshot.take(store, 1, 8))
    collect(store)
    store.write(Pack(1, 8).path, b"")
    expected = seen(Log.read(store))["records"]
    with Log.open(store, threaded=False) as log:
        assert repair(store, log, verify_store(store, log).damaged) == (0, 0, 1, [], [])
    assert Pack(1, 8) not in packs(store)
    assert list(Log.read(store).records()) == expected


# -- what a start costs -----------------------------------------------------------------------------------------------
def test_a_start_reads_packs_and_the_segments_behind_them(tmp_path):
    class Counting(Store):
        read_paths: list[str]

        def read(self, path: str) -> bytes:
            self.read_paths.append(path)
            return super().read(path)

    fill(Store(tmp_path), 23, pack_segments=10).close()
    store = Counting(tmp_path)
    store.read_paths = []
    assert len(Log.read(store)) == 22
    assert store.read_paths == [Pack(1, 10).path, Pack(11, 20).path, *map(segment_name, (21, 22, 23))]


def test_a_pack_that_was_mended_since_a_verification_began_is_not_removed(tmp_path):
    """The verification was interrupted, a driver mended the pack, and `store gc` removed its segments."""
    store = Store(tmp_path)
    with fill(store, 14) as log:
        log.append(record(KEYS[0]))
        log.flush()
        log.tend()
    sound = store.read(Pack(6, 10).path)
    store.write(Pack(6, 10).path, b"")

    def stop(done: object, total: int) -> None:
        raise KeyboardInterrupt

    with fill(store, 0, run="verify", pack_segments=1000) as log, pytest.raises(KeyboardInterrupt):
        verify_store(store, log, stop)
    fill(store, 0, run="second").close()
    collect(store)
    assert store.read(Pack(6, 10).path) == sound and 7 not in segments(store)
    with fill(store, 0, run="verify") as log:
        damaged = verify_store(store, log).damaged
        assert [path for path in damaged if path.startswith("log/")] == []
        assert repair(store, log, {**damaged, Pack(6, 10).path: "was damaged then"}).lost == []
    assert store.read(Pack(6, 10).path) == sound


def test_a_damaged_pack_that_nothing_else_holds_stays_and_is_named(tmp_path):
    store = Store(tmp_path)
    fill(store, 15).close()
    collect(store)
    with fill(store, 0, run="verify", pack_segments=1000) as log:
        store.write(Pack(6, 10).path, b"rotten")
        assert repair(store, log, verify_store(store, log).damaged).lost == [Pack(6, 10).path]
    assert store.read(Pack(6, 10).path) == b"rotten", "whoever has a copy of it sees where it belongs"


def test_other_names_among_the_segments_end_nothing(tmp_path):
    """One is told to move a damaged last segment away, and copying tools leave their own names."""
    store = Store(tmp_path)
    fill(store, 6).close()
    (tmp_path / segment_name(6)).rename(tmp_path / f"{segment_name(6)}.damaged")
    store.write("log/00000002.json~", b"")
    fill(store, 9, run="second", pack_segments=1000).close()
    assert Log.read(store).segments == 9
    fill(store, 0, run="third").close()


def test_a_pack_on_a_bad_sector_costs_time_only(tmp_path, monkeypatch):
    store = Store(tmp_path)
    fill(store, 15).close()
    expected, read = seen(Log.read(store)), Store.read

    def bad(self: Store, path: str) -> bytes:
        if path == Pack(6, 10).path:
            raise OSError(errno.EIO, "Input/output error")
        return read(self, path)

    monkeypatch.setattr(Store, "read", bad)
    view = Log.read(store)
    assert seen(view) == expected
    assert "cannot be read" in verify_store(store, view).damaged[Pack(6, 10).path]


def test_segments_of_earlier_drivers_count_towards_the_next_snapshot(tmp_path):
    store = Store(tmp_path)
    fill(store, 4, pack_segments=1000).close()
    with Log.open(store, threaded=False) as log:
        assert log.unpacked == sum(len(store.read(segment_name(n))) for n in range(1, 5))
