"""Children on one machine: how they share it, and what happens when it has no room left, or when the run ends."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.base.clock import SYSTEM
from pipeline.engine.backends.inline import InlineBackend
from pipeline.engine.backends.local import ProcessBackend
from pipeline.engine.driver.endings import CannotRun, Interrupted, TaskFailed
from pipeline.engine.driver.progress import Progress
from pipeline.engine.driver.scheduler import Scheduler
from pipeline.engine.messages import Assignment, Done, Quarantined, Ready, StatusReport
from pipeline.engine.worker import limits as measure
from pipeline.engine.worker.limits import ProcessLimits
from pipeline.engine.worker.supervisor import Supervisor
from pipeline.store.fs import Store
from tests.pipeline import engine_tasks as t
from tests.processes import alive, children_of, until
from tests.processes import stopped as is_stopped

pytestmark = [pytest.mark.usefixtures("room"),
              pytest.mark.skipif(sys.platform != "linux", reason="child processes need Linux")]
REPO = Path(__file__).resolve().parents[2]


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


@pytest.fixture
def processes(store, tmp_path):
    """A function that makes process backends. After the test, no process and no scratch of theirs may be left."""
    made = []

    def make(workers=2, clock=SYSTEM, **limits):
        backend = ProcessBackend(store, workers, limits=ProcessLimits(**limits), scratch=str(tmp_path), clock=clock)
        made.append(backend)
        return backend

    yield make
    for backend in made:
        pids = backend.supervisor.pids if backend.supervisor else []
        backend.close()
        assert not [p for p in pids if alive(p)]
    assert not list(tmp_path.glob("tokenmill-*/scratch-*"))


def inline(store, specs, tmp_path):
    backend = InlineBackend(store, scratch=str(tmp_path))
    return t.outcome(Scheduler(backend, t.MemoryLog()).run(specs))


def test_results_equal_the_inline_backends_and_few_tasks_wait_at_hand(processes, store, tmp_path):
    """No more tasks are in flight than there are slots, and as many again at hand."""
    specs = [*t.row_specs(), *t.row_specs(parts=20, rows=2), *t.row_specs(parts=1, ballast="x" * 3_000_000)]
    log, backend, most = t.MemoryLog(), processes(3), []
    submit = backend.submit
    backend.submit = lambda a: (submit(a), most.append(len(backend.worker.open)))[0]
    records = Scheduler(backend, log, dispatch_seed=4).run(specs)
    assert t.outcome(records) == inline(store, specs, tmp_path)
    assert len(log.appended) == len(specs)
    assert 4 <= max(most) <= 6
    for r in records:
        assert store.read(r.files["rows.txt"].path)
        assert 10 < r.rss_mb < 300


def test_a_full_disk_is_waited_for_and_held_against_nobody(processes, tmp_path):
    (tmp_path / "marks").mkdir()
    spec = t.spec(t.Full, marks=str(tmp_path / "marks"), times=1)
    [record] = Scheduler(processes(1), t.MemoryLog(), max_attempts=1).run([spec])
    assert record.counters == {"n": 1} and len(list((tmp_path / "marks").iterdir())) == 2


def test_a_disk_too_full_to_start_a_child_is_waited_for_too(processes, store, tmp_path, monkeypatch):
    specs, backend = t.row_specs(parts=1), processes(1, max_environment=1)
    backend.start()
    real, failing = backend.supervisor.scratch.folder, [1]

    def folder():
        if failing[0]:
            failing[0] -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/scratch/x")
        return real()

    monkeypatch.setattr(backend.supervisor.scratch, "folder", folder)
    records = Scheduler(backend, t.MemoryLog(), max_attempts=1).run(specs)
    assert failing == [0] and t.outcome(records) == inline(store, specs, tmp_path)
    failing[0] = 99
    with pytest.raises(TaskFailed, match=r"no space left for temporary files in .*set TMPDIR to a larger disk"):
        Scheduler(backend, t.MemoryLog(), max_attempts=1, max_lost=1).run(t.row_specs(parts=1, mark="unconfined"))


def test_a_disk_that_stays_full_ends_the_run_with_its_name(processes, tmp_path):
    (tmp_path / "marks").mkdir()
    spec = t.spec(t.Full, marks=str(tmp_path / "marks"), times=99)
    with pytest.raises(TaskFailed, match="No space left on device: '/scratch/x'"):
        Scheduler(processes(1, max_environment=0), t.MemoryLog(), max_attempts=1, max_lost=2).run([spec])
    assert len(list((tmp_path / "marks").iterdir())) == 2


def test_an_exception_carries_its_traceback(processes):
    with pytest.raises(TaskFailed, match="no such thing as bread") as caught:
        Scheduler(processes(1), t.MemoryLog(), max_attempts=1).run([t.spec(t.Fails, what="bread")])
    assert "raise ValueError" in caught.value.__notes__[0] and "\n" not in str(caught.value)


def test_a_task_that_ignores_its_orders_is_named(processes):
    with pytest.raises(TaskFailed, match=r"honour inputs\.skip"):
        Scheduler(processes(1), t.MemoryLog(), max_attempts=1).run([t.spec(t.Deaf)])


def test_what_libraries_print_does_not_disturb_and_children_stay_warm(processes, store):
    specs = [t.spec(t.Noisy, order=i, n=i) for i in range(2)]
    for recycle_cpu_s, children in ((600.0, 1), (0.0, 2)):
        records = Scheduler(processes(1, recycle_cpu_s=recycle_cpu_s), t.MemoryLog()).run(specs)
        assert len({store.read(r.files["pid.txt"].path) for r in records}) == children


def test_a_straggler_is_doubled_and_the_loser_killed(processes, tmp_path):
    specs = [t.spec(t.Straggles, order=i, weight=10 - i, n=i) for i in range(6)]
    specs[0] = t.spec(t.Straggles, weight=99, n=0, mark=str(tmp_path / "mark"))
    log = t.MemoryLog()
    records = Scheduler(processes(2), log, straggler_s=0.5).run(specs)
    assert [r.counters for r in records] == [{"n": 1}] * 6
    assert len(log.appended) == 6


def test_events_are_gathered_as_long_as_no_slot_is_idle_and_no_row_is_quarantined(store, tmp_path):
    supervisor = Supervisor(store.root, 1, scratch=str(tmp_path))

    def poll(specs, linger):
        assignments = [Assignment(i, s, f"{time.monotonic()}") for i, s in enumerate(specs)]
        return [e for e in supervisor.poll(assignments, 600.0, linger) if not isinstance(e, Ready | StatusReport)]

    try:
        until(lambda: any(isinstance(e, Ready) for e in supervisor.poll([], 0.0)))
        events = poll(t.row_specs(parts=4, rows=2), 600.0)        # the third leaves the slot to the last
        assert [e.id for e in events] == [0, 1, 2, 3] and all(isinstance(e, Done) for e in events)
        assert len(poll(t.row_specs(parts=4, rows=3), 0.0)) < 4
        while supervisor._queue or any(c.job for c in supervisor._children):
            supervisor.poll([], 1.0)
        [*_, last] = poll(t.row_specs(parts=2, rows=8, poison={0: {3: "segfault"}}), 600.0)
        assert isinstance(last, Quarantined)
    finally:
        supervisor.close()


def test_declared_memory_bounds_what_runs_together(store, tmp_path):
    supervisor = Supervisor(store.root, 4, memory_mb=1000, scratch=str(tmp_path))
    try:
        specs = t.row_specs(parts=5, ms=2, memory_mb=450)
        commands = [Assignment(i, s, f"1-{i}") for i, s in enumerate(specs)]
        done, most = 0, 0
        while done < 5:
            events = supervisor.poll(commands, 0.2)
            commands = []
            done += sum(isinstance(e, Done) for e in events)
            most = max(most, sum(c.job is not None for c in supervisor._children))
        assert most == 2
    finally:
        supervisor.close()


def test_memory_pressure_kills_the_largest_child_and_quarantines_no_document(processes, store, tmp_path, monkeypatch):
    mark = tmp_path / "mark"                             # the pressure is over, and its parts may end
    specs = t.row_specs(parts=3, poison={p: {20: "held"} for p in range(3)}, mark=str(mark))
    backend = processes(3, pressure_s=0.2)
    backend.memory_mb = 2000

    def use():
        if backend.supervisor is not None and backend.supervisor._allowed < 3:
            mark.touch()
        return 10 if mark.exists() else 90, 100

    monkeypatch.setattr(measure, "memory_use", use)
    records = Scheduler(backend, t.MemoryLog()).run(specs)
    assert mark.exists(), "fewer run than before"
    assert t.outcome(records) == inline(store, specs, tmp_path)


def test_memory_that_others_have_filled_does_not_end_the_run(processes, store, tmp_path, monkeypatch):
    """Killing the last child would help nobody: it goes on, one after the other."""
    mark = tmp_path / "mark"                             # only one is left
    specs = t.row_specs(parts=3, poison={p: {20: "held"} for p in range(3)}, mark=str(mark))
    backend = processes(3, pressure_s=0.1)
    backend.memory_mb = 2000

    def use():
        if backend.supervisor is not None and backend.supervisor._allowed == 1:
            mark.touch()
        return 95 << 30, 100 << 30

    monkeypatch.setattr(measure, "memory_use", use)
    assert t.outcome(Scheduler(backend, t.MemoryLog(), max_lost=2).run(specs)) == inline(store, specs, tmp_path)
    assert backend.supervisor._allowed == 1


DRIVER = """
import sys
from pipeline.engine.backends.local import ProcessBackend
from pipeline.engine.driver.endings import Interrupted
from pipeline.engine.driver.scheduler import Scheduler
from pipeline.engine.worker import limits
from pipeline.store.fs import Store
from tests.pipeline import engine_tasks as t
limits.memory_use = lambda: (1 << 30, 64 << 30)
backend = ProcessBackend(Store(sys.argv[1]), 2, scratch=sys.argv[2])
specs = t.row_specs(parts=4, poison={part: {0: "held"} for part in range(4)}, mark=sys.argv[2] + "/never")
try:
    Scheduler(backend, t.MemoryLog()).run(specs)
except Interrupted as e:
    print(e, flush=True)
    sys.exit(1)
finally:
    backend.close()
"""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_a_driver_that_ends_leaves_no_process(tmp_path, signum):
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(tmp_path / "store"), str(tmp_path)], cwd=REPO,
                              stdout=subprocess.PIPE, text=True)
    children = until(lambda: len(found := children_of(driver.pid)) == 2 and found)
    until(lambda: len(list(tmp_path.glob("tokenmill-*/scratch-*/*/attempt-*"))) == 2)        # they are at work
    driver.send_signal(signum)
    out, _ = driver.communicate(timeout=300)
    until(lambda: not any(alive(p) for p in children))
    scratch = list(tmp_path.glob("tokenmill-*/scratch-*"))
    if signum == signal.SIGKILL:
        assert driver.returncode == -signal.SIGKILL
        assert len(scratch) == 1                # and the next one who comes clears it away
        Supervisor(str(tmp_path / "store"), 1, scratch=str(tmp_path)).close()
        scratch = list(tmp_path.glob("tokenmill-*/scratch-*"))
    else:
        assert driver.returncode == 1
        assert "run again to go on" in out
    assert scratch == []


def test_stopped_and_run_again_gives_the_same(processes, store, tmp_path):
    mark = tmp_path / "mark"                             # of six tasks, only the first to begin ends before it is there
    poison = {part: {20: "held"} for part in range(5)}

    class Stopping(t.MemoryLog):
        """A log that asks for a stop, from another thread, when it gets its first record."""

        def append(self, record):
            if not self.appended:
                stop = threading.Thread(target=scheduler.stop)
                stop.start()
                stop.join()
            return super().append(record)

    specs = t.row_specs(parts=6, poison=poison, mark=str(mark))
    log, backend = Stopping(), processes(2)
    scheduler = Scheduler(backend, log)
    with pytest.raises(Interrupted):
        scheduler.run(specs)
    assert len(log.records) == 1
    mark.touch()
    assert [c for c in backend.supervisor._children if c.job] == []
    assert t.outcome(scheduler.run(specs)) == inline(store, specs, tmp_path)
    assert sorted(log.appended) == sorted(s.key for s in specs)


def test_gpu_children_see_their_own_share_and_the_others_none(store, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-7f")
    backend = ProcessBackend(store, 6, memory_mb=6000, scratch=str(tmp_path))
    specs = [replace(t.spec(t.Devices, node=f"g{gpus}", order=i, n=i, gpus=gpus), gpus=gpus)
             for i, gpus in enumerate([0, 0.5, 1, 2] * 2)]
    try:
        records = Scheduler(backend, t.MemoryLog(), dispatch_seed=3).run(specs)
    finally:
        backend.close()
    held = []
    for record, spec in zip(records, specs):
        said = record.counters
        names = [n for n in said["seen"].split(",") if n]
        assert len(names) == -(-spec.gpus // 1) and set(names) <= {"3", "GPU-7f"}
        held += [(said["start"], said["end"], name, min(spec.gpus, 1)) for name in names]
    for moment, _, _, _ in held:
        for device in ("3", "GPU-7f"):
            assert sum(part for start, end, name, part in held if name == device and start <= moment < end) <= 1
    assert any(a[2] != b[2] and a[0] <= b[0] < a[1] for a in held for b in held), "both devices were used at a time"


def test_what_can_never_run_here_ends_the_run_by_name(processes, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    log = t.MemoryLog()
    for need, words in (({"gpus": 1.0}, "declares 300 MB of memory and 1 GPU"),
                        ({"memory_mb": 1 << 30}, "declares 1,073,741,824 MB of memory"),
                        ({"cpu": "pdp11-base"}, "a CPU of type pdp11-base")):
        with pytest.raises(CannotRun, match=words) as caught:
            Scheduler(processes(1), log).run([replace(t.row_specs(parts=1)[0], label="crawl-7", **need)])
        assert "crawl-7 cannot run" in str(caught.value) and "this machine, can give a task" in str(caught.value)
    assert log.appended == []


def test_a_large_task_is_overtaken_but_not_for_ever(store, tmp_path):
    supervisor = Supervisor(store.root, 3, memory_mb=1000, scratch=str(tmp_path))
    try:
        sizes = [600, 900, *[300] * 12]
        specs = [t.spec(t.Devices, order=i, n=i, memory_mb=m) for i, m in enumerate(sizes)]
        commands = [Assignment(i, s, f"1-{i}") for i, s in enumerate(specs)]
        ended = []
        while len(ended) < len(specs):
            events = supervisor.poll(commands, 0.2)
            commands = []
            ended += [e.id for e in events if isinstance(e, Done)]
    finally:
        supervisor.close()
    place = ended.index(1)
    assert 1 <= place <= 5, "small ones that fit beside the first went before it, the many others behind it"


class Watching(Progress):
    """Notes at which rows a task of the class `Held` was reported as hanging, and after how many seconds. After `times`
    reports about a row, it lets the task go on."""

    def __init__(self, marks, times):
        super().__init__("quiet")
        self.marks, self.times, self.hung = marks, times, {}
        marks.mkdir()

    def held(self, rows):
        return t.spec(t.Held, order=1, rows=rows, marks=str(self.marks))

    def hanging(self, task):
        if task.spec.order == 1 and task.stage == 2:
            self.hung.setdefault(task.row, []).append(task.still)
            if len(self.hung[task.row]) >= self.times:
                (self.marks / str(task.row)).touch()


def test_what_makes_no_progress_is_named_and_goes_on(processes, tmp_path):
    watch = Watching(tmp_path / "marks", times=2)
    records = Scheduler(processes(2, hanging_s=0.3), t.MemoryLog(), watch).run([*t.row_specs(parts=1), watch.held(3)])
    assert [r.counters["kept"] for r in records] == [40, 3]
    assert list(watch.hung) == [0, 1, 2]
    for told in watch.hung.values():
        assert all(seconds >= 0.3 * 2 ** n for n, seconds in enumerate(told)), "again when it has lasted twice as long"


def test_a_child_that_is_stopped_is_named_with_its_process_until_it_goes_on(processes, tmp_path):
    """Long before one that computes would be: it uses no CPU time."""
    stopped = []

    class Watch(Progress):
        def running(self, slots, tasks):
            super().running(slots, tasks)
            if tasks and not stopped:
                stopped.append(tasks[0].pid)
                os.kill(tasks[0].pid, signal.SIGSTOP)
                until(lambda: is_stopped(stopped[0]))             # before its state is reported again
            elif self.tasks and "hangs" in self.tasks[0] and not (tmp_path / "mark").exists():
                self.said = self.tasks[0]         # as it was first reported: it goes on from here
                os.kill(stopped[0], signal.SIGCONT)
                (tmp_path / "mark").touch()

    watch = Watch("quiet")
    backend = processes(1, hanging_s=1e9, idle_s=0.5)
    Scheduler(backend, t.MemoryLog(), watch).run([t.spec(t.Waits, mark=str(tmp_path / "mark"))])
    pid = stopped[0]
    assert watch.said["pid"] == pid
    assert f"process {pid} on {socket.gethostname()} (stopped); on its machine, kill -CONT {pid}" in watch.said["hangs"]
