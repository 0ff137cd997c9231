"""The commit log: which records count, with several processes, takeovers and kills."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import multiprocessing
import os
import random
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest

from pipeline.store import lease
from pipeline.store import log as store_log
from pipeline.store.fs import Store
from pipeline.store.garbage import collect_garbage
from pipeline.store.lease import LeaseHeld
from pipeline.store.log import Fenced, Log, OtherContent, attempt_name
from pipeline.store.records import FileInfo, PartRecord
from tests.simulate.clock import VirtualClock


def record(key: str, attempt: str = "00000001-00000000", quarantine=(), files: tuple[str, ...] = ("kept.parquet",)):
    infos = {f: FileInfo(f"objects/{key}/{attempt}.{f}", 10, "s" * 64, "c" * 64, 1) for f in files}
    return PartRecord(key, "m:C", "clean", attempt, infos, {"records": 1, "in": {"web": {"docs": 1}}}, list(quarantine))


def quarantined(id: str, stage_key: str, reason: str = "crash"):
    return {"row": 3, "id": id, "stage": "html", "stage_key": stage_key, "reason": reason}


@pytest.fixture(params=["disk", "memory"])
def store(request, tmp_path):
    if request.param == "disk":
        yield Store(tmp_path / "store")
    else:
        root = f"memory://t{tmp_path.name}-{os.getpid()}"
        yield Store(root)
        fsspec.filesystem("memory").rm(root, recursive=True)


def test_records_survive_and_the_first_one_for_a_key_wins(store):
    with Log.open(store, run="one") as log:
        assert log.epoch == 1
        first = record("k1")
        assert log.append(first) is first
        again = log.append(record("k1", "00000001-00000009"))
        assert again == first
        assert again.attempt == "00000001-00000000"
        log.append(record("k2"))
        assert log.get("k2") == record("k2")          # before the flush: what follows it can only be committed after it
    with Log.open(store) as log:
        assert log.epoch == 2
        assert [r.key for r in log.records()] == ["k1", "k2"]
        assert log.append(record("k1", "00000002-00000000")).attempt == "00000001-00000000"
        assert "k1" in log
        assert "k3" not in log
        assert log.get("k3") is None
        assert len(log) == 2
    assert Log.read(store).get("k1") == first


def test_view_reads_without_touching(store):
    with Log.open(store) as log:
        log.append(record("a"))
        log.flush()
        view = Log.read(store)
        before = list(store.list("log"))
        log.append(record("b"))
        log.flush()
        assert "b" not in view
        view.refresh()
        assert "b" in view
        assert not hasattr(view, "append")
        assert [p for p in store.list("log") if p not in before] == ["log/00000003.json"]


def test_group_commit_by_count_and_by_age(store):
    clock = VirtualClock()

    def sizes() -> list[int]:
        return [len(json.loads(store.read(p))["body"].get("records", ())) for p in store.list("log")
                if "heartbeat" not in p]
    with Log.open(store, clock=clock, threaded=False, segment_records=10) as log:
        for i in range(25):
            log.append(record(f"k{i:02}"))
        clock.sleep(0.99 * store_log.SEGMENT_S)
        assert log.tend() and sizes() == [0, 10, 10]     # the epoch, and two by count
        clock.sleep(0.01 * store_log.SEGMENT_S)
        assert log.tend() and sizes() == [0, 10, 10, 5]  # the last by age
        assert log.tend() and len(sizes()) == 4


def test_the_thread_of_the_log_commits_without_any_call(store, monkeypatch):
    committed = threading.Event()
    with Log.open(store) as log:
        flush = log.flush
        monkeypatch.setattr(log, "flush", lambda: (flush(), committed.set()))
        log.append(record("k1"))
        assert committed.wait(300)
        assert len(Log.read(store)) == 1


def test_quarantine_is_replayed_by_stage_key(store):
    with Log.open(store) as log:
        log.append(record("k1", quarantine=[quarantined("d1", "s1"), quarantined("d2", "s2")]))
        log.append(record("k2", quarantine=[quarantined("d3", "s1", "cpu"), quarantined("d1", "s3", "cpu")]))
        log.append(record("k3", quarantine=[quarantined("d3", "s1", "memory")]))     # the first one counts
        # a loser's quarantine is not part of the truth
        log.append(record("k1", "00000001-00000001", quarantine=[quarantined("d9", "s1")]))
    for view in (Log.read(store), log):
        assert {k: v["reason"] for k, v in view.quarantined(["s1"]).items()} == {"d1": "crash", "d3": "cpu"}
        assert view.quarantined(["s3", "s1"])["d1"]["reason"] == "cpu"
        assert view.quarantined(["s1", "s2", "nobody"]).keys() == {"d1", "d2", "d3"}
        assert view.quarantined([]) == {}


def test_quarantined_rows_are_replayed_until_their_part_is_there(store):
    clock = VirtualClock()
    first = Log.open(store, run="first", clock=clock, threaded=False)
    first.quarantine("k1", 7, 2, "crash:SIGSEGV")
    first.quarantine("k1", 7, 0, "memory")                  # the first one counts
    first.quarantine("k1", 3, 2, "cpu_limit")
    first.quarantine("k2", 7, 1, "memory")
    assert first.quarantined_rows("k1") == {7: (2, "crash:SIGSEGV"), 3: (2, "cpu_limit")}
    clock.sleep(store_log.SEGMENT_S)
    assert first.tend()                                  # without any call, and nobody closes it: it died
    for view in (Log.read(store), second := Log.open(store, run="second", takeover=True)):
        assert view.quarantined_rows("k1") == {7: (2, "crash:SIGSEGV"), 3: (2, "cpu_limit")}
        assert view.quarantined_rows("k2") == {7: (1, "memory")}
        assert view.quarantined_rows("k3") == {}
        assert view.quarantined(["s1"]) == {}
    second.append(record("k1", "00000002-00000000", quarantine=[quarantined("d7", "s1")]))
    second.quarantine("k1", 9, 0, "cpu_limit")              # of an attempt that lost
    second.close()
    for view in (Log.read(store), second):
        assert view.quarantined_rows("k1") == {} and view.quarantined_rows("k2") == {7: (1, "memory")}
        assert view.quarantined(["s1"]).keys() == {"d7"}
    first.quarantine("k4", 1, 0, "memory")
    with pytest.raises(Fenced):
        first.flush()


def test_second_driver_is_refused_then_takes_over_and_the_first_is_fenced(store):
    first = Log.open(store, run="first", threaded=False)     # it hears of the second when it commits, not before
    first.append(record("mine"))
    first.flush()
    with pytest.raises(LeaseHeld, match=r"run 'first' \(host .*, process \d+\).*--takeover"):
        Log.open(store, run="second")
    second = Log.open(store, run="second", takeover=True)
    assert second.epoch == 2
    assert "mine" in second
    first.append(record("late"))
    with pytest.raises(Fenced, match="run 'second'"):
        first.flush()
    second.check_lease()
    with pytest.raises(Fenced):
        first.append(record("later"))
    with pytest.raises(Fenced):
        first.close()
    second.append(record("late", "00000002-00000000"))
    second.close()
    assert Log.read(store).get("late").attempt == "00000002-00000000"


def test_fencing_met_in_the_background_reaches_the_driver(store):
    clock = VirtualClock()
    first = Log.open(store, run="first", clock=clock, threaded=False)
    idle = Log.open(store, run="idle", takeover=True, clock=clock, threaded=False)
    idle.check_lease()
    Log.open(store, run="second", takeover=True).close()
    with pytest.raises(Fenced, match="run 'second'"):
        idle.check_lease()
    idle.close()
    first.append(record("late"))
    clock.sleep(store_log.SEGMENT_S)
    assert not first.tend()
    with pytest.raises(Fenced):
        first.close()
    first.close()                                        # said once
    assert "late" not in Log.read(store)


def test_clean_close_needs_no_waiting(store, monkeypatch, caplog):
    caplog.set_level(logging.WARNING, "tokenmill")
    monkeypatch.setattr(lease, "alive", lambda holder: None)      # as if it were another machine
    Log.open(store).close()
    Log.open(store).close()
    assert "waiting up to" not in caplog.text


def test_elsewhere_the_heartbeat_decides(store, monkeypatch):
    monkeypatch.setattr(lease, "alive", lambda holder: None)
    clock = VirtualClock()
    first = Log.open(store, run="first", clock=clock, threaded=False)
    with pytest.raises(LeaseHeld, match="first"):
        Log.open(store, clock=VirtualClock(asleep=lambda seconds: (clock.sleep(seconds), first.tend())))
    assert clock.time == store_log.HEARTBEAT_S           # it was watched until it beat
    second = Log.open(store, clock=clock, threaded=False)                # the process stands still
    assert second.epoch == 2
    assert clock.time == store_log.HEARTBEAT_S + lease.PATIENCE_S
    second.close()


def test_a_driver_that_was_taken_over_leaves_no_heartbeat_behind(store):
    clock = VirtualClock()
    first = Log.open(store, run="first", clock=clock, threaded=False)
    second = Log.open(store, takeover=True)
    collect_garbage(second)
    clock.sleep(store_log.HEARTBEAT_S)
    first.tend()
    with pytest.raises(Fenced):
        first.flush()
    assert list(store.list("log/heartbeat")) == ["log/heartbeat/00000002.json"]
    second.close()


def test_liveness_needs_host_boot_pid_space_and_start_time():
    me = lease.identity("r")
    assert lease.alive(me) is True
    assert lease.alive({**me, "started": "1"}) is False            # the pid was given to somebody else
    for other in ({"host": "elsewhere"}, {"boot": "0"}, {"space": "pid:[1]"}):
        assert lease.alive({**me, **other}) is None


@pytest.mark.parametrize("seed", range(5))
def test_drivers_that_fence_each_other_on_a_real_disk_lose_nothing_acknowledged(tmp_path, seed):
    """Threads of the system, hard links of a local disk: what tests/simulate does not have. What `flush` acknowledged
    is in the log with the attempt that won, epochs are contiguous, no key has two records."""
    rng, store = random.Random(seed), Store(tmp_path)
    plans = [[(rng.choice(["append", "append", "append", "flush"]), f"k{rng.randrange(12)}")
              for _ in range(rng.randrange(20, 60))] for _ in range(3)]
    acknowledged: list[tuple[str, str]] = []

    def drive(name: int) -> None:
        appended: list[tuple[str, str]] = []
        log = Log.open(store, run=str(name), takeover=True)
        with contextlib.suppress(Fenced), log:
            for n, (what, key) in enumerate(plans[name]):
                if what == "append":
                    appended.append((key, log.append(record(key, attempt_name(log.epoch, n))).attempt))
                else:
                    log.flush()
                    acknowledged.extend(appended)

    with ThreadPoolExecutor(len(plans)) as pool:
        list(pool.map(drive, range(len(plans))))
    view = Log.read(store)
    assert view.epoch == len(plans) and acknowledged
    assert all(view.get(key).attempt == attempt for key, attempt in acknowledged)
    epoch, keys = 0, []
    for path in (p for p in store.list("log") if "heartbeat" not in p):
        body = json.loads(store.read(path))["body"]
        assert body["epoch"] == epoch + (body["kind"] == "epoch")
        epoch = body["epoch"]
        keys += [r["key"] for r in body.get("records", ())]
        assert all(r["attempt"].startswith(f"{epoch:08d}-") for r in body.get("records", ()))
    assert len(keys) == len(set(keys))


fork = multiprocessing.get_context("fork")


def forked(work, *arguments):
    """Start a child that runs `work(line, *arguments)`. Returns (child, our end of the line)."""
    ours, theirs = fork.Pipe()
    child = fork.Process(target=work, args=(theirs, *arguments))
    child.start()
    theirs.close()
    return child, ours


def heard(line) -> list[str]:
    """Return what comes over the line until the other end closes it or dies."""
    words = []
    with contextlib.suppress(EOFError, OSError):
        while True:
            words.append(line.recv())
    return words


def drive(line, name: str, root: str, takeover: bool) -> None:
    """Commit 20 records and send the key of each, then wait until told to end."""
    line.recv()
    try:
        log = Log.open(Store(root), run=name, takeover=takeover)
        for i in range(20):
            log.append(record(f"{name}-{i}", attempt_name(log.epoch, i)))
            log.flush()
            line.send(f"{name}-{i}")
        line.recv()
        log.close()
        line.send("closed")
    except (LeaseHeld, Fenced) as e:
        line.send(type(e).__name__)


def drive_at_once(root: str, takeover: bool) -> list[list[str]]:
    """Let four drivers open a store at the same moment. Returns what each of them sent."""
    children = [forked(drive, str(i), root, takeover) for i in range(4)]
    for _, line in children:
        line.send("go")
    first = [line.recv() for _, line in children]          # all have opened it, or have met who has it
    for _, line in children:
        with contextlib.suppress(BrokenPipeError):         # it has ended
            line.send("end")
    said = [[word, *heard(line)] for word, (_, line) in zip(first, children)]
    for child, _ in children:
        child.join()
        assert child.exitcode == 0
    return said


def append_for_ever(line, root: str) -> None:
    log = Log.open(Store(root))
    for i in itertools.count():
        key = f"{log.epoch}-{i}"
        log.append(record(key, attempt_name(log.epoch, i)))
        log.flush()
        line.send(key)


def append_and_be_killed(root: str) -> list[str]:
    """Start eight drivers, one after the other, each of which is killed while it appends. Returns the keys that they
    reported as committed."""
    rng, acknowledged = random.Random(7), []
    for _ in range(8):
        child, line = forked(append_for_ever, root)
        acknowledged += [line.recv() for _ in range(rng.randint(3, 25))]
        child.kill()
        acknowledged += heard(line)
        child.join()
    return acknowledged


def elsewhere(call: str, *arguments) -> list:
    """Run a function of this module in a process without threads, where it may fork. Returns its result."""
    code = f"import json; from {__name__} import *; print(json.dumps({call}(*{arguments!r})))"
    out = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True,
                         cwd=Path(__file__).parents[2])
    return json.loads(out.stdout)


@pytest.mark.parametrize("takeover", [False, True])
def test_processes_that_open_one_store_at_once(tmp_path, takeover):
    """Without takeover exactly one gets it, the others are told who has it. With it they fence each other, and every
    acknowledged record is there."""
    said = elsewhere("drive_at_once", str(tmp_path), takeover)
    view = Log.read(Store(tmp_path))
    assert all(key in view for words in said for key in words[:-1])
    if takeover:
        assert view.epoch == 4
        last = int(view.holder["run"])
        assert said[last] == [*(f"{last}-{i}" for i in range(20)), "closed"]
    else:
        assert view.epoch == 1
        assert sorted(words[-1] for words in said) == ["LeaseHeld", "LeaseHeld", "LeaseHeld", "closed"]


def test_kill_9_while_appending_loses_nothing_acknowledged(tmp_path, caplog):
    """And whoever comes next on this machine sees at once that the process is dead."""
    caplog.set_level(logging.WARNING, "tokenmill")
    acknowledged = elsewhere("append_and_be_killed", str(tmp_path))
    assert len(acknowledged) > 20
    with Log.open(Store(tmp_path)) as log:
        assert log.epoch == 9
        assert [k for k in acknowledged if k not in log] == []
        assert len(log) - len(acknowledged) <= 8         # at most the one in flight of each
    assert "waiting up to" not in caplog.text


def test_garbage_of_older_epochs_alone_is_collected(store, tmp_path):
    def leave(path: str) -> None:
        scratch = tmp_path / "scratch"
        scratch.write_bytes(b"x" * 10)
        store.upload(str(scratch), path)

    with Log.open(store) as log:
        for n, key in ((0, "kept"), (1, "kept"), (2, "orphan")):
            leave(f"objects/{key}/{attempt_name(1, n)}.kept.parquet")
        log.append(record("kept", attempt_name(1, 0)))
    with Log.open(store) as log:
        leave(f"objects/now/{attempt_name(2, 0)}.kept.parquet")          # of our own epoch: perhaps in flight
        leave(f"objects/later/{attempt_name(3, 0)}.kept.parquet")        # of a driver that took over
        leave("objects/other/notes.txt")                                 # not ours to judge
        leave(f"objects/lists/{'a' * 64}.json")                          # of a task that is over
        assert collect_garbage(log).files == 3
        assert list(store.list("objects")) == [
            "objects/kept/00000001-00000000.kept.parquet", "objects/later/00000003-00000000.kept.parquet",
            "objects/now/00000002-00000000.kept.parquet", "objects/other/notes.txt"]
        assert list(store.list("log/heartbeat")) == ["log/heartbeat/00000002.json"]
        assert collect_garbage(log) == (0, 0, {})
    if store.local:
        assert not (store.local / "objects" / "orphan").exists()


def test_who_is_taken_over_while_it_collects_garbage_stops(store, tmp_path, monkeypatch):
    """The same lists are written again under the same names by the driver after it."""
    lists = [f"objects/lists/{n:064x}.json" for n in range(40)]
    for path in lists:
        assert store.put_absent(path, b"[]")
    first, remove, drivers = Log.open(store, run="first"), Store.remove, []

    def takes_long(self, path: str) -> None:
        if path in lists and not drivers:                # not the probe that the second one removes as it opens
            drivers.append(Log.open(store, run="second", takeover=True))
        remove(self, path)
    monkeypatch.setattr(store, "map", lambda call, items, most=0: map(call, items))   # in turn, as on a disk
    monkeypatch.setattr(Store, "remove", takes_long)
    with pytest.raises(Fenced, match="second"):
        collect_garbage(first, verify_every=2)
    assert len(list(store.list("objects"))) == 38
    drivers[0].close()


def test_a_retired_record_counts_no_more_and_the_next_one_does(store):
    with Log.open(store) as log:
        log.append(record("k", "00000001-00000000"))
        log.append(record("other"))
        assert not log.retire("k", "00000009-00000000", "of an attempt that does not count")
        assert log.retire_files({"objects/k/00000001-00000000.unknown": "no file of the record",
                                 "datasets/clean/part-0": "no file of a task"}) == 0
        assert log.retire_files({"objects/k/00000001-00000000.kept.parquet": "is damaged"}) == 1
        assert log.get("k") is None and "k" not in log and "other" in log
        view = Log.read(store)                                         # at once, and for everybody
        assert view.get("k") is None and [r.key for r in view.records()] == ["other"]
        log.append(record("k", "00000001-00000001"))
        assert not log.retire("k", "00000001-00000000", "too late: another one counts")
    view = Log.read(store)
    assert view.get("k").attempt == "00000001-00000001"
    assert [r.key for r in view.records()] == ["other", "k"]


def test_what_was_retired_is_made_the_same_again_or_not_at_all(store):
    other = record("k", "00000001-00000001")
    other.files["kept.parquet"].content = "d" * 64
    with Log.open(store) as log:
        log.append(record("k"))
        log.retire("k", "00000001-00000000", "is damaged")
        with pytest.raises(OtherContent, match=r"clean: task k ran again and wrote other contents to kept\.parquet"):
            log.append(other)
        assert log.get("k") is None
    with Log.open(store) as log, pytest.raises(OtherContent):          # the next driver knows, too
        log.append(other)


def test_what_an_earlier_driver_quarantined_stays_so_when_its_part_is_made_anew(store):
    with Log.open(store) as log:
        log.append(record("k", quarantine=[quarantined("doc", "stage")]))
        log.retire("k", "00000001-00000000", "is damaged")
    assert set(Log.read(store).quarantined(["stage"])) == {"doc"}


@pytest.mark.parametrize("harm", ["gone", "cut", "folder"])
def test_records_whose_files_are_gone_or_cut_are_retired_before_a_run(store, tmp_path, harm):
    def leave(key: str, size: int) -> None:
        (tmp_path / "scratch").write_bytes(b"x" * size)
        store.upload(str(tmp_path / "scratch"), f"objects/{key}/00000001-00000000.kept.parquet")

    with Log.open(store) as log:
        for key in ("whole", "harmed"):
            log.append(record(key, files=("kept.parquet",)))
        leave("whole", 10)
        if harm != "folder":
            leave("harmed", 9)
        if harm == "gone":
            store.remove("objects/harmed/00000001-00000000.kept.parquet")
    with Log.open(store) as log:
        path = "objects/harmed/00000001-00000000.kept.parquet"
        assert collect_garbage(log).damaged == {path: "has 9 bytes instead of 10" if harm == "cut" else "is gone"}
        assert log.get("harmed") is None and log.get("whole") is not None
        assert collect_garbage(log).damaged == {}


def test_a_lost_folder_of_many_records_costs_few_segments(store):
    with Log.open(store, segment_records=10, threaded=False) as log:     # its thread would write more segments
        for i in range(35):
            log.append(record(f"k{i}", files=("dropped.parquet", "kept.parquet")))
        log.flush()
        before = log.segments
        assert len(collect_garbage(log).damaged) == 70
        assert log.segments == before + 4
        assert not list(log.records())
    assert not list(Log.read(store).records())


def test_what_no_run_names_binds_nobody(store):
    """A result that is not reproducible to the byte, thrown away on purpose, may be another one next time."""
    other = record("k", "00000001-00000001")
    other.files["kept.parquet"].content = "d" * 64
    with Log.open(store) as log:
        log.append(record("k"))
        log.retire_unnamed([("k", "00000001-00000000")])
        assert log.append(other) is other
    assert Log.read(store).get("k").attempt == "00000001-00000001"
