"""Which documents and tasks are blamed when child processes die, stand still, or use too much CPU time or memory."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest

from pipeline.base.clock import Clock
from pipeline.engine.driver.endings import TaskFailed
from pipeline.engine.driver.scheduler import Scheduler
from pipeline.engine.messages import Assignment, Done, Ready, StatusReport
from pipeline.engine.task import CrashCursor
from pipeline.engine.worker import limits as measure
from pipeline.engine.worker.crash_triage import CPU_LIMIT
from pipeline.engine.worker.excess import excess
from pipeline.engine.worker.limits import ProcessLimits
from pipeline.engine.worker.supervisor import Supervisor
from pipeline.store.records import READING
from tests.pipeline import engine_tasks as t
from tests.pipeline import test_engine_processes
from tests.pipeline.test_engine_processes import inline
from tests.processes import until

#: fixtures
processes, store = test_engine_processes.processes, test_engine_processes.store
pytestmark = [pytest.mark.usefixtures("room"),
              pytest.mark.skipif(sys.platform != "linux", reason="child processes need Linux")]


def at_work(backend):
    """Return the children that are at a document. This is called from another thread than the supervisor's."""
    found = []
    for child in list(backend.supervisor._children):
        with contextlib.suppress(ValueError):            # it was buried meanwhile
            if child.cursor.read()[0] >= 0:
                found.append(child)
    return found


def judged(monkeypatch, row, **limits):
    """Apply `limits` to a child only while it is at row `row`. Until then it starts and imports modules, which may take
    any time on a busy machine."""
    def judge(child, job, patient, now):
        return excess(child, job, replace(patient, **limits) if child.cursor.read()[0] == row else patient, now)

    monkeypatch.setattr("pipeline.engine.worker.supervisor.excess", judge)


POISON = {"segfault": "crash:SIGSEGV", "spin": "cpu_limit", "exit": "crash:exit3", "memory": "memory"}


def check_poison(records, specs):
    """Check that exactly the poisonous rows are quarantined."""
    for record, spec in zip(records, specs):
        poison = {int(k): v for k, v in spec.args["poison"].items()}
        expected = [(row, POISON[kind]) for row, kind in sorted(poison.items())]
        assert [(q["row"], q["reason"]) for q in record.quarantine] == expected
        assert record.counters["kept"] == spec.args["rows"] - len(poison)


@pytest.mark.slow
def test_each_kind_of_trouble_costs_exactly_the_documents_to_blame(processes, store, tmp_path):
    """One run of six partitions, in which

    * two documents of a batch crash,
    * one of a large batch never ends,
    * a large batch takes more than a batch may, though its documents take a third of what they may: nobody is blamed,
    * an innocent document is hit once,
    * storage does not give a mapped file, twice: no document's fault,
    * nothing happens.
    """
    (tmp_path / "marks").mkdir()
    specs = [t.row_specs(parts=1, memory_mb=100, **args)[0] for args in (
        {"poison": {0: {2: "segfault", 3: "exit"}}}, {"poison": {0: {17: "spin"}}, "batch": 22},
        {"rows": 60, "batch": 60, "cpu_ms": 35}, {"poison": {0: {9: "once"}}, "mark": str(tmp_path / "mark")},
        {"poison": {0: {9: "mapped"}}, "batch": 1, "marks": str(tmp_path / "marks")}, {})]
    records = Scheduler(processes(2, cpu_s=0.1), t.MemoryLog(), max_attempts=1, straggler_s=3600.0).run(specs)
    assert len(list(store.list("objects"))) == 6          # dead attempts and inquiries left nothing behind
    crashed, endless, slow, once, mapped, clean = records
    check_poison([crashed, endless], specs)
    assert store.read(crashed.files["rows.txt"].path).decode().split() == [str(n * n) for n in range(40)
                                                                           if n not in (2, 3)]
    assert (tmp_path / "mark").exists() and len(list((tmp_path / "marks").iterdir())) == 2, "nobody died"
    assert [(r.quarantine, r.counters["kept"]) for r in (slow, once, mapped)] == [([], 60), ([], 40), ([], 40)]
    assert t.outcome([clean]) == inline(store, specs[5:], tmp_path)


@pytest.mark.parametrize("seen", [10.0, 15.0], ids=["before it went on", "after"])
def test_what_a_child_uses_while_it_is_measured_is_charged_to_no_document(monkeypatch, seen):
    """A supervisor that is not scheduled in the middle of a look: the child has gone on by six documents and 5 s."""
    cpu, cursor = 10.0, CrashCursor()
    job = SimpleNamespace(spec=t.row_specs(parts=1)[0])
    child = SimpleNamespace(pid=1, cursor=cursor, position=(3, 3, 0), cpu_position=cpu, cpu_quiet=cpu, quiet_since=0.0,
                            empty_mb=96.0)
    cursor.set(3, 3, 0)

    def stands_still(pid):
        cursor.set(9, 9, 0)
        return seen

    monkeypatch.setattr(measure, "anonymous_mb", lambda pid: 50.0)
    monkeypatch.setattr(measure, "working_seconds", lambda pid: cpu)
    monkeypatch.setattr(measure, "cpu_seconds", stands_still)
    assert excess(child, job, ProcessLimits(cpu_s=1.0), 1.0) is None
    found = []
    for cpu in (15.2, 16.1, 16.3):
        monkeypatch.setattr(measure, "cpu_seconds", lambda pid, cpu=cpu: cpu)
        found.append(excess(child, job, ProcessLimits(cpu_s=1.0), 2.0))
    assert found == [None, None, CPU_LIMIT], "a second at row 9"


def test_killed_children_quarantine_nobody(processes, store, tmp_path):
    mark = tmp_path / "mark"                             # until it is there, every part stays at its row 20
    specs = t.row_specs(parts=3, poison={p: {20: "held"} for p in range(3)}, mark=str(mark))
    backend = processes(2)
    backend.start()
    killed = []

    def chaos():
        try:
            for signum in (signal.SIGKILL, signal.SIGTERM):
                victim = until(lambda: [c.pid for c in at_work(backend) if c.pid not in killed])[0]
                os.kill(victim, signum)
                killed.append(victim)
        finally:
            mark.touch()

    thread = threading.Thread(target=chaos)
    thread.start()
    records = Scheduler(backend, t.MemoryLog()).run(specs)
    thread.join()
    assert len(killed) == 2
    assert t.outcome(records) == inline(store, specs, tmp_path)
    assert all(r.quarantine == [] for r in records)


def test_the_suspect_is_probed_in_a_child_that_has_seen_nothing_else(processes):
    backend = processes(1)
    scheduler = Scheduler(backend, t.MemoryLog())
    scheduler.run(t.row_specs(parts=1))
    assert len(backend.supervisor.pids) == 1        # warm and idle
    [record] = scheduler.run(t.row_specs(parts=1, poison={0: {9: "warm"}}))
    assert record.quarantine == []
    assert record.counters["kept"] == 40
    assert len(backend.supervisor.pids) == 1


class Ahead(Clock):
    """A clock that a test sets forward by adding seconds to `ahead`."""

    ahead = 0.0

    def now(self):
        return super().now() + self.ahead


def test_a_stopped_child_is_not_a_hung_document(processes, store, tmp_path, monkeypatch):
    """Its supervisor looks at it ten times in ten seconds, of which the child uses none."""
    mark = tmp_path / "mark"
    specs = t.row_specs(parts=1, poison={0: {20: "held"}}, mark=str(mark))
    clock, looks = Ahead(), threading.Semaphore(0)
    backend = processes(1, clock, cpu_s=0.2)
    backend.start()
    stopped = []

    def look(*args):
        if stopped:
            clock.ahead += 1.0
            looks.release()
        return excess(*args)

    def stall():
        try:
            [child] = until(lambda: at_work(backend))
            os.kill(child.pid, signal.SIGSTOP)
            stopped.append(child.pid)
            seen = [looks.acquire(timeout=120) for _ in range(10)]
            os.kill(child.pid, signal.SIGCONT)
            assert all(seen)
        finally:
            mark.touch()

    monkeypatch.setattr("pipeline.engine.worker.supervisor.excess", look)
    with ThreadPoolExecutor(1) as pool:
        stalled = pool.submit(stall)
        records = Scheduler(backend, t.MemoryLog()).run(specs)
        stalled.result()
    assert t.outcome(records) == inline(store, specs, tmp_path)
    assert backend.supervisor.pids == stopped           # it was waited for, not replaced


def test_a_child_that_stands_still_is_run_again_but_its_document_is_not_quarantined(processes, monkeypatch):
    judged(monkeypatch, 0, wall_s=0.3)
    specs = t.row_specs(parts=1, poison={0: {3: "sleep"}})
    log = t.MemoryLog()
    with pytest.raises(TaskFailed, match="stood still 2 times, at row 0"):      # a batch of 8 starts at row 0
        Scheduler(processes(1), log, max_attempts=1).run(specs)
    assert log.appended == []


def test_a_supervisor_nobody_asked_for_a_while_takes_no_child_for_stalled(store, tmp_path):
    """A machine, or a driver, that stood still for an hour: what happened meanwhile nobody has seen."""
    clock = Ahead()
    supervisor = Supervisor(store.root,
                            1,
                            ProcessLimits(wall_s=120.0, hanging_s=120.0),
                            scratch=str(tmp_path),
                            clock=clock)
    try:
        spec = t.spec(t.Waits, mark=str(tmp_path / "mark"))
        events = supervisor.poll([Assignment(1, spec, "1-1")], 0.5)
        pids = supervisor.pids
        clock.ahead = 3600.0
        events += supervisor.poll([], 0.3)
        assert supervisor.pids == pids
        (tmp_path / "mark").touch()
        until(lambda: events.extend(supervisor.poll([], 0.2)) or any(isinstance(e, Done) for e in events))
        assert {type(e) for e in events} <= {Ready, StatusReport, Done}
    finally:
        supervisor.close()


def test_a_row_at_which_children_get_killed_from_outside_is_not_quarantined_either(processes):
    log = t.MemoryLog()
    with pytest.raises(TaskFailed, match=r"killed:SIGKILL, at row 3, stage 2") as caught:
        Scheduler(processes(1, max_environment=0), log, max_attempts=1, max_lost=2).run(
            t.row_specs(parts=1, batch=1, poison={0: {3: "killed"}}))
    assert len(caught.value.reasons) == 2
    assert log.appended == []


def test_a_crash_in_set_up_fails_the_run_with_the_childs_last_words(processes, monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    with pytest.raises(TaskFailed, match="outside any document") as caught:
        Scheduler(processes(1, max_environment=0), t.MemoryLog(), max_attempts=1).run([t.spec(t.SetupDies)])
    [note] = caught.value.__notes__
    assert "Segmentation fault" in note and "loading the model" in note and "\n" not in str(caught.value)


@pytest.mark.parametrize(("record", "place"), [(-1, "outside any document"), (3, "while reading record 3")])
def test_what_computes_for_ever_outside_documents_fails_the_run_and_is_named(processes, monkeypatch, record, place):
    judged(monkeypatch, record, reading_cpu_s=0.3, cpu_s=0.1)
    with pytest.raises(TaskFailed, match=f"t 0 failed: it computes {place}"):
        Scheduler(processes(1), t.MemoryLog(), max_attempts=1).run([t.spec(t.Endless, record=record)])


def test_a_file_that_its_reader_cannot_stand_is_not_read_on_and_the_next_one_is(processes):
    backend = processes(1, record_cpu_s=0.3)
    backend.start()
    spec, log = t.spec(t.Reads, files=3, poison={"0": [1, "spin"], "1": [4, "memory"]}), t.MemoryLog()
    spawned, spawn = [], backend.supervisor._children.spawn
    backend.supervisor._children.spawn = lambda job: spawned.append(job.triage.mode) or spawn(job)
    [record] = Scheduler(backend, log, max_attempts=1).run([spec])
    assert record.counters == {"kept": 5}
    assert log.rows == {spec.key: {1: (READING, "cpu_limit"), 4: (READING - 1, "memory")}}
    assert spawned == ["run", "read", "run", "read", "run"]
