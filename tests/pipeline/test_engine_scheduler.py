"""The scheduler with the inline backend: order, reuse, retries, failure and stop; and what a single attempt leaves
behind."""

from __future__ import annotations

import hashlib
import io
import json
import os
import signal
import threading
from dataclasses import replace
from functools import partial

import pytest

from pipeline.engine.backends.inline import InlineBackend
from pipeline.engine.driver.endings import Interrupted, TaskFailed
from pipeline.engine.driver.hangs import clock
from pipeline.engine.driver.progress import Progress
from pipeline.engine.driver.protocols import Running
from pipeline.engine.driver.scheduler import MAX_LOST, Scheduler
from pipeline.engine.messages import Done, Failed, Failure, Hindered, Lost, Quarantined
from pipeline.engine.task import CrashCursor, TaskSpec
from pipeline.engine.worker.attempt import peak_rss_mb, run_attempt
from pipeline.store.fs import Store
from pipeline.store.log import Log
from pipeline.store.records import PartRecord
from tests.pipeline import engine_tasks as t
from tests.simulate.clock import VirtualClock


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


@pytest.fixture
def backend(store, tmp_path):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    b = InlineBackend(store, scratch=str(scratch))
    yield b
    b.close()
    assert list(scratch.iterdir()) == []


def test_records_come_in_spec_order_and_files_are_in_the_store(backend, store):
    specs = t.row_specs()
    log = t.MemoryLog()
    records = Scheduler(backend, log).run(specs)
    assert [r.key for r in records] == [s.key for s in specs]
    assert log.flushed == len(specs)
    assert len({r.attempt for r in records}) == len(specs)
    assert all(r.attempt.startswith("00000001-") for r in records)
    info = records[1].files["rows.txt"]
    body = store.read(info.path)
    assert info.path.startswith(f"objects/{records[1].key}/{records[1].attempt}")
    assert body == b"".join(f"{n * n}\n".encode() for n in range(40, 80))
    assert (info.bytes, info.rows) == (len(body), 40)
    assert info.sha256 == info.content == hashlib.sha256(body).hexdigest()
    assert records[1].rss_mb > 5
    assert records[1].wall_s >= 0


def test_largest_first_and_shuffled_dispatch(backend):
    log = t.MemoryLog()
    specs = t.row_specs()
    Scheduler(backend, log).run(specs)
    assert log.appended == [s.key for s in reversed(specs)]
    orders = set()
    for seed in range(5):
        other = t.MemoryLog()
        records = Scheduler(backend, other, dispatch_seed=seed).run(specs)
        assert t.outcome(records) == t.outcome([log.records[s.key] for s in specs])
        orders.add(tuple(other.appended))
    assert len(orders) > 1


def test_what_the_log_holds_is_not_run_again(backend):
    log = t.MemoryLog()
    specs = t.row_specs(parts=4)
    first = Scheduler(backend, log).run(specs[:2])
    again = Scheduler(backend, log).run([*specs, specs[0]])
    assert sorted(log.appended) == sorted(s.key for s in specs)
    assert again[:2] == first
    assert again[4] == first[0]


def test_a_fresh_run_never_starts_its_backend(store):
    log = t.MemoryLog()
    specs = t.row_specs(parts=2)
    Scheduler(InlineBackend(store), log).run(specs)

    class Sealed(InlineBackend):
        def start(self, memory_mb=0):
            raise AssertionError("started without work")

    Scheduler(Sealed(store), log).run(specs)


def test_a_task_that_always_raises_ends_the_run_with_its_message(backend):
    log = t.MemoryLog()
    with pytest.raises(TaskFailed, match="no such thing as bread") as caught:
        Scheduler(backend, log, max_attempts=3).run([t.spec(t.Fails, what="bread", weight=5), *t.row_specs(parts=3)])
    assert caught.value.reasons == ["ValueError: no such thing as bread"] * 2      # the second time it is no accident
    assert str(caught.value) == "t: t 0 failed 2 times: ValueError: no such thing as bread"
    assert "Traceback" in caught.value.__notes__[0]
    assert log.flushed == len(log.appended)


def test_a_small_task_does_not_report_the_peak_of_a_large_one_before_it(backend, tmp_path):
    """They share a process, whose peak is measured anew for each."""
    large = b"x" * (300 << 20)
    before = peak_rss_mb()
    del large
    [record] = Scheduler(backend, t.MemoryLog()).run(t.row_specs(parts=1))
    assert record.rss_mb < before - 250


def raised(message, row=None, kind="exception"):
    return Failure(kind, message, row=row, traceback="Traceback …")


@pytest.mark.parametrize(("answers", "tried"), [
    ([raised("no column 'text'", kind="permanent")], 1),
    ([raised("KeyError: 'x'", 3)] * 2, 2),
    ([raised("KeyError: 'x'", 3), raised("KeyError: 'x'", 4)] * 2, 4),
    ([raised("KeyError: 'x'", 3), raised("KeyError: 'y'", 3)] * 2, 4),
    ([raised("OSError: reset")] * 4, 4)])            # without a row: of the system, or of a child
def test_what_can_only_fail_again_is_not_tried_again(answers, tried):
    specs = t.row_specs(parts=1)
    b = Scripted({specs[0].key: [[a] for a in answers]})
    with pytest.raises(TaskFailed) as caught:
        Scheduler(b, t.MemoryLog(), max_attempts=4).run(specs)
    assert len(b.taken) == len(caught.value.reasons) == tried
    assert "\n" not in str(caught.value) and "Traceback" not in str(caught.value)


def test_an_attempt_that_was_given_up_reports_no_damage():
    """Its task is done, so no file has to be made anew."""
    [spec], log = t.row_specs(parts=1), t.MemoryLog()
    late = raised("objects/x is gone", kind="damaged")
    record = PartRecord(spec.key, spec.task, spec.node, "a", {}, {})
    with Scheduler(Scripted({spec.key: [[partial(Done, record=record), late]]}), log) as scheduler:
        scheduler.add([spec])
        while not scheduler.finished():
            scheduler.step()
        scheduler.step()                                        # raises DamageFound if a file waits to be made anew
    assert log.appended == [spec.key]


def test_a_full_disk_is_said_once_however_many_meet_it():
    """Every worker names its own file; one line says it, and the one that ends the run names the last."""
    specs, out = t.row_specs(parts=2), io.StringIO()
    said = [f"cannot write /disk/st/objects/{i:032x}/a.parquet: No space left on device; free some space" for i in
            range(2 * MAX_LOST)]
    b = Scripted({s.key: [[partial(Hindered, message=said[2 * i + n]), raised(said[2 * i + n], kind="environment")]
                          for i in range(MAX_LOST)] for n, s in enumerate(specs)})
    progress = Progress("rich", stream=out)
    with pytest.raises(TaskFailed) as caught:
        Scheduler(b, t.MemoryLog(), progress).run(specs)
    assert out.getvalue().count("No space left") == 1 and "waiting, then trying again" in out.getvalue()
    assert str(caught.value).count("No space left") == 1 and f"failed {MAX_LOST} times" in str(caught.value)
    [shown] = progress.snapshot()["failures"]
    assert shown["times"] > MAX_LOST and shown["kind"] == "environment"


def test_a_hiccup_is_retried(backend, tmp_path):
    marks = tmp_path / "marks"
    marks.mkdir()
    [record] = Scheduler(backend, t.MemoryLog()).run([t.spec(t.FailsFirst, marks=str(marks), times=2)])
    assert record.counters == {"n": 1}


def test_a_named_output_that_is_not_there_is_an_error(backend):
    with pytest.raises(TaskFailed, match=r"forgotten\.txt"):
        Scheduler(backend, t.MemoryLog(), max_attempts=1).run([t.spec(t.Forgets)])


def test_a_failed_upload_leaves_nothing(store, tmp_path, monkeypatch):
    scratch = tmp_path / "s"
    scratch.mkdir()
    real = Store.upload

    def fail(self, local, path):
        real(self, local, path)
        raise OSError("connection reset")

    monkeypatch.setattr(Store, "upload", fail)
    with pytest.raises(OSError, match="connection reset"):
        run_attempt(t.row_specs(parts=1)[0], store, "00000001-00000001", CrashCursor(), str(scratch))
    assert list(store.list("objects")) == []
    assert list(scratch.iterdir()) == []


def test_an_inquiry_writes_nothing_to_the_store(store, tmp_path):
    record = run_attempt(t.row_specs(parts=1)[0], store, "1-1", CrashCursor(), str(tmp_path), only={3, 4}, batch_rows=1)
    assert (record.files, record.counters["kept"]) == ({}, 2)
    assert list(store.list("objects")) == []


class Scripted:
    """A backend that answers with the events of a script, {key: [event, …]}, and afterwards with success."""

    interruptible = False
    slots = 2

    def __init__(self, script=None):
        self.script, self.queue, self.taken = script or {}, [], []

    def start(self, memory_mb=0): ...
    def close(self): ...

    def cancel(self, ids):
        self.queue = [a for a in self.queue if a.id not in ids]

    def set_demand(self, waiting):
        return {}

    def room_for(self, memory_mb, gpus, cpu=""):
        return self.slots - len(self.queue)

    def submit(self, assignment):
        assert len(self.queue) < 2 * self.slots
        self.queue.append(assignment)
        self.taken.append(assignment)

    def wait(self, timeout):
        if not self.queue:
            return []
        a = self.queue.pop(0)
        key = a.spec.key
        if self.script.get(key):
            return [Failed(a.id, e) if isinstance(e, Failure) else e(a.id) for e in self.script[key].pop(0)]
        return [Done(a.id, PartRecord(key, "x", "t", a.attempt, {}, {}))]


ENVIRONMENT = Failure("environment", "SIGKILL from outside")
QUARANTINED = partial(Quarantined, row=7, stage=2, reason="crash:SIGSEGV")


def test_environment_failures_are_not_charged_but_bounded():
    specs = t.row_specs(parts=3)
    ok = Scripted({specs[0].key: [[ENVIRONMENT]] * (MAX_LOST - 1)})
    assert len(Scheduler(ok, t.MemoryLog(), max_attempts=1).run(specs)) == 3
    lost = Scripted({specs[0].key: [[lambda id: Lost((id,), "node n1 died")]] * MAX_LOST})
    with pytest.raises(TaskFailed, match="node n1 died"):
        Scheduler(lost, t.MemoryLog(), max_attempts=1).run(specs)


def test_an_environment_in_which_nothing_gets_done_ends_the_run_however_many_tasks_meet_it():
    specs = t.row_specs(parts=60)
    b = Scripted({s.key: [[ENVIRONMENT]] * MAX_LOST for s in specs})
    with pytest.raises(TaskFailed, match="SIGKILL from outside"):
        Scheduler(b, t.MemoryLog(), dispatch_seed=1).run(specs)
    assert MAX_LOST * b.slots <= len(b.taken) <= (MAX_LOST + 2) * b.slots, "and what was at hand"
    b = Scripted({s.key: [[ENVIRONMENT]] * 2 for s in specs})           # what gets done begins the count anew
    assert len(Scheduler(b, t.MemoryLog()).run(specs)) == 60


def test_later_attempts_know_who_was_quarantined():
    specs = t.row_specs(parts=1)
    b = Scripted({specs[0].key: [[QUARANTINED, ENVIRONMENT]]})
    Scheduler(b, t.MemoryLog()).run(specs)
    assert [a.skip for a in b.taken] == [(), ((7, 2, "crash:SIGSEGV"),)]
    assert len({a.attempt for a in b.taken}) == 2


def test_the_rows_of_all_tasks_that_fail_at_once_are_released():
    one, two = t.row_specs(parts=2)

    class Together(Scripted):
        def wait(self, timeout):
            """Both tasks fail between two polls of the scheduler."""
            return [*super().wait(timeout), *super().wait(timeout)]

    broken, log = raised("no column 'text'", kind="permanent"), t.MemoryLog()
    with pytest.raises(TaskFailed, match="no column"):
        Scheduler(Together({s.key: [[QUARANTINED, broken]] for s in (one, two)}), log).run([one, two])
    assert log.quarantined_rows(one.key) == log.quarantined_rows(two.key) == {}


def test_a_quarantine_is_durable_before_the_part_goes_on(tmp_path):
    """It is in the log's files when the next events are asked for, and the first attempt of the next driver has it."""
    store, specs = Store(tmp_path / "store"), t.row_specs(parts=1)

    class Killed(BaseException):
        pass

    class Dies(Scripted):
        def wait(self, timeout):
            if self.taken and not self.queue:
                raise Killed
            events = super().wait(timeout)
            self.queue.clear()
            return events

    first = Log.open(store)
    with pytest.raises(Killed):
        Scheduler(Dies({specs[0].key: [[QUARANTINED]]}), first).run(specs)
    assert Log.read(store).quarantined_rows(specs[0].key) == {7: (2, "crash:SIGSEGV")}
    with Log.open(store, takeover=True) as log:                        # nobody closed the first one
        b = Scripted()
        Scheduler(b, log).run(specs)
        assert [a.skip for a in b.taken] == [((7, 2, "crash:SIGSEGV"),)]
        assert log.quarantined_rows(specs[0].key) == {}


def test_assignments_in_flight_are_bounded_by_slots():
    b = Scripted()      # asserts the bound itself
    assert len(Scheduler(b, t.MemoryLog()).run(t.row_specs(parts=300))) == 300


def test_a_log_that_refuses_ends_the_run():
    class Fenced(Exception):
        pass

    class Refusing(t.MemoryLog):
        def append(self, record):
            raise Fenced("another driver")

    with pytest.raises(Fenced):
        Scheduler(Scripted(), Refusing()).run(t.row_specs(parts=2))


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_cleanly_and_a_rerun_goes_on(backend, signum):
    mark = backend.scratch + "/../mark"                       # the last task runs, for an hour
    specs = [*t.row_specs(parts=2), t.spec(t.Straggles, n=1, weight=0, mark=mark)]
    log = t.MemoryLog()
    before = signal.getsignal(signum)
    us = threading.get_ident()

    def interrupt():
        t.wait_for(mark)
        signal.pthread_kill(us, signum)

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    with pytest.raises(Interrupted) as caught:
        Scheduler(backend, log).run(specs)
    thread.join()
    assert caught.value.signum == signum
    assert log.flushed == 2
    assert signal.getsignal(signum) is before
    assert len(Scheduler(backend, log).run(specs)) == 3


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("late", [False, True])
def test_a_signal_while_a_task_is_handed_out_keeps_it_from_beginning(backend, signum, late, monkeypatch):
    """Nobody could stop it afterwards: it might take an hour."""
    submit = type(backend).submit

    def interrupted(self, assignment):
        if late:
            submit(self, assignment)
        os.kill(os.getpid(), signum)
        if not late:
            submit(self, assignment)

    monkeypatch.setattr(type(backend), "submit", interrupted)
    log = t.MemoryLog()
    with pytest.raises(Interrupted) as caught:
        Scheduler(backend, log).run(t.row_specs(parts=1))
    assert caught.value.signum == signum and not log.appended
    monkeypatch.undo()
    assert len(Scheduler(backend, log).run(t.row_specs(parts=1))) == 1


def test_a_straggler_gets_a_twin_and_the_first_commit_counts():
    class Lame(Scripted):
        """Never answers the first assignment of one key."""

        def submit(self, assignment):
            lame = assignment.spec.key == specs[-1].key and not any(
                a.spec.key == specs[-1].key for a in self.taken)
            super().submit(assignment)
            if lame:
                self.queue.pop()
                self.stuck = assignment.id

        def cancel(self, ids):
            self.cancelled = [*getattr(self, "cancelled", []), *ids]
            super().cancel(ids)

    specs = t.row_specs(parts=8)
    b = Lame()
    log = t.MemoryLog()
    assert len(Scheduler(b, log, straggler_s=0.05).run(specs)) == 8
    assert sum(a.spec.key == specs[-1].key for a in b.taken) == 2
    assert b.stuck in b.cancelled
    assert sorted(log.appended) == sorted(s.key for s in specs)


# -- progress ----------------------------------------------------------------------------------------------------------
def test_json_progress_is_one_event_a_line_and_the_snapshot_adds_up(backend):
    stream, snaps = io.StringIO(), []
    with Progress("json", snaps.append, stream=stream, clock=VirtualClock()) as progress:       # nothing between
        Scheduler(backend, t.MemoryLog(), progress).run(t.row_specs(parts=3))
    events = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [e["event"] for e in events] == ["planned", "done", "done", "done", "end"]
    assert sum(e["docs"] for e in events if e["event"] == "done") == 120
    last = snaps[-1]
    assert (last["state"], last["done"], last["parts"], last["eta_s"], last["bytes_left"]) == ("done", 3, 3, 0, 0)
    assert last["nodes"]["t"]["docs"] == 120


def test_eta_comes_from_bytes():
    clock = VirtualClock()
    p = Progress("quiet", clock=clock)
    specs = [TaskSpec(str(i), "x", "n", {}, weight=w) for i, w in enumerate([900, 50, 50])]
    p.planned(specs, {})
    p.running(1, [Running(specs[0], 0.0, -1)])
    clock.time = 9.0
    record = run_record(specs[0])
    p.done(specs[0], record)
    s = p.snapshot()
    assert s["eta_s"] == 1
    assert s["nodes"]["n"]["bytes_per_s"] == 100
    clock.time = 10.0
    for spec in specs[1:]:
        p.done(spec, run_record(spec))
    clock.time = 60.0
    assert p.snapshot()["nodes"]["n"]["seconds"] == 10        # waiting is not running
    p.close("failed")
    assert p.snapshot()["state"] == "failed"


def run_record(spec):
    return PartRecord(spec.key, spec.task, spec.node, "a", {}, {"in": {"web": {"docs": 5, "bytes": 9}}})


def test_quiet_says_nothing_and_plain_text_says_what_matters(backend):
    quiet, plain = io.StringIO(), io.StringIO()
    for mode, stream in (("quiet", quiet), ("rich", plain)):
        with Progress(mode, stream=stream) as progress:
            Scheduler(backend, t.MemoryLog(), progress).run(t.row_specs(parts=2))
    assert quiet.getvalue() == ""
    assert "t: 2/2" in plain.getvalue()


def test_names_of_nodes_are_no_emoji():
    plain, spec = io.StringIO(), replace(t.row_specs(parts=1)[0], node="index:b:x")
    with Progress("rich", stream=plain) as progress:
        progress.planned([spec], {})
        progress.failed(spec, "exception", "no", True)
        progress.done(spec, run_record(spec))
    assert "index:b:x: 1/1" in plain.getvalue()


def test_a_snapshot_that_cannot_be_written_does_not_stop_a_run(backend):
    def refuse(doc):
        raise OSError("read-only")

    with Progress("quiet", refuse) as progress:
        assert len(Scheduler(backend, t.MemoryLog(), progress).run(t.row_specs(parts=1))) == 1


def test_figures_for_people():
    assert [clock(5), clock(75), clock(4000)] == ["0:05", "1:15", "1:06:40"]
