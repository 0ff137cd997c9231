"""The state of a run as told by its store, requests to stop it, and the copy of its driver's output."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import fsspec
import pytest

from pipeline.base.files import file_sha256
from pipeline.cli.status import text as status_text
from pipeline.cli.watch import look
from pipeline.cluster import attempts
from pipeline.cluster.attempts import LogReader, ask_to_stop, asked_to_stop, note_attempt, note_refusal, standing
from pipeline.cluster.cancellation import watching
from pipeline.cluster.driver_log import DriverLog
from pipeline.engine.backends.local import ProcessBackend
from pipeline.engine.driver.endings import Interrupted
from pipeline.engine.driver.hangs import clock
from pipeline.engine.driver.progress import Progress
from pipeline.engine.driver.scheduler import Scheduler
from pipeline.engine.task import ChangedInput
from pipeline.recipe import code
from pipeline.store.fs import Store
from pipeline.store.lease import identity
from pipeline.store.log import Log
from tests.pipeline import engine_tasks as t
from tests.processes import until
from tests.simulate.clock import VirtualClock

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


@pytest.fixture(params=["disk", "objects"])
def any_store(request, tmp_path):
    """A store in a local folder, or one in object storage, where files cannot be appended to."""
    if request.param == "disk":
        yield Store(tmp_path / "store")
    else:
        root = f"memory://attempts-{tmp_path.name}-{os.getpid()}"
        yield Store(root)
        fsspec.filesystem("memory").rm(root, recursive=True)


def progress(store: Store, run: str, **doc) -> None:
    doc = {"parts": 4, "done": 1, **doc}
    store.write(f"runs/{run}/progress.json", json.dumps(doc).encode())


def beat(store: Store, run: str, **fields) -> None:
    """Write a heartbeat of a driver of `run`. Without `fields`, the driver is this process."""
    holder = {**identity(run), **fields.pop("holder", {})}
    doc = {"counter": 1, "closed": False, "holder": holder, "at": time.time(), **fields}
    store.write("log/heartbeat/00000007.json", json.dumps(doc).encode())


ELSEWHERE = {"host": "another", "boot": "0", "space": "0"}


# -- states ----------------------------------------------------------------------------------------------------------
def test_a_job_that_has_not_begun_is_submitted_then_refused_or_cancelled(any_store):
    note_attempt(any_store, "r", 1, "job", job="j", address="http://u:secret-pw@h:1")
    assert standing(any_store, "r").state == "submitted"
    assert "secret-pw" not in any_store.read("runs/r/run.json").decode()
    note_refusal(any_store, "r", 2, "of another attempt")
    assert standing(any_store, "r").state == "submitted"
    note_refusal(any_store, "r", 1, "the any_store is in use")
    found = standing(any_store, "r")
    assert (found.state, found.error, found.ended) == ("failed", "the any_store is in use", True)
    ask_to_stop(any_store, "r", 1)
    assert standing(any_store, "r").state == "cancelled"
    note_attempt(any_store, "r", 2, "job", job="k")                       # the wish was for the attempt before
    assert standing(any_store, "r").state == "submitted" and not asked_to_stop(any_store, "r", 2)


def test_a_run_that_ends_while_ray_is_asked_stands_as_its_driver_says(store, monkeypatch):
    from pipeline.cluster import jobs

    def ended_meanwhile(address, job):
        progress(store, "r", attempt=1, state="done")
        return jobs.JobState("SUCCEEDED", "", 0)

    monkeypatch.setattr("pipeline.base.auth.check_kept_server", lambda address: None)
    monkeypatch.setattr(jobs, "state", ended_meanwhile)
    monkeypatch.setattr(jobs, "job_output", lambda address, job: "")
    note_attempt(store, "r", 1, "job", job="j", address="http://h:1")
    assert look(store, "r").state == "done"


def test_progress_of_an_earlier_attempt_does_not_count(any_store):
    note_attempt(any_store, "r", 1, "local")
    progress(any_store, "r", attempt=1, state="failed", error="why")
    assert standing(any_store, "r").state == "failed" and standing(any_store, "r").error == "why"
    note_attempt(any_store, "r", 2, "job", job="j")
    found = standing(any_store, "r")
    assert (found.state, found.progress, found.attempt) == ("submitted", {}, 2)
    progress(any_store, "r", attempt=2, state="done")
    assert standing(any_store, "r").state == "done"


def test_a_running_driver_lives_or_died(any_store):
    note_attempt(any_store, "r", 1, "local")
    progress(any_store, "r", attempt=1, state="running")
    assert standing(any_store, "r").state == "died"                       # no heartbeat at all
    beat(any_store, "r")
    assert standing(any_store, "r").state == "running"
    ask_to_stop(any_store, "r", 1)
    assert standing(any_store, "r").state == "stopping"
    beat(any_store, "other")                                              # the any_store has another driver now
    assert standing(any_store, "r").state == "died"
    beat(any_store, "r", closed=True)
    assert standing(any_store, "r").state == "died"
    beat(any_store, "r", holder={"started": "1"})                         # that process id is another process by now
    assert standing(any_store, "r").state == "died"


def test_a_driver_on_another_machine_is_judged_by_its_heartbeat(store):
    note_attempt(store, "r", 1, "job")
    progress(store, "r", attempt=1, state="running")
    beats = []                                                        # what comes while we watch
    clock = VirtualClock(asleep=lambda _: beats and beat(store, "r", holder=ELSEWHERE, **beats.pop(0)))
    beat(store, "r", holder=ELSEWHERE, at=clock.wall())
    assert standing(store, "r", clock).state == "running"             # fresh by its own clock
    for at in (clock.wall() - 3600, clock.wall() + 3600):             # old, or its clock is wrong: only watching tells
        beat(store, "r", holder=ELSEWHERE, at=at)
        assert standing(store, "r", clock).state == "died"
        beats += [{"at": at, "counter": 1}, {"at": at, "counter": 2}]
        assert standing(store, "r", clock).state == "running"


def test_ages_are_said_and_a_frozen_driver_is_named(store):
    """Its process is there, so it is not dead; but nothing has come of it for 75 seconds."""
    note_attempt(store, "r", 1, "local")
    task = {"node": "clean", "label": "a.warc", "seconds": 10.0, "row": 3, "host": "w1", "pid": 77,
            "hangs": "no progress for 40 s, document 3 in stage pii"}
    progress(store, "r", attempt=1, state="running", at=1000.0, finished_s=4.0, running=[task])
    beat(store, "r", at=1003.0)
    for now, silent in ((1005.0, 2.0), (1078.0, 75.0)):
        at = VirtualClock()
        at.time = now - at.wall()
        found = standing(store, "r", at)
        assert (found.state, found.silent_s, found.age_s) == ("running", silent, now - 1000)
        shown = status_text(store, found)
        assert f"last sign of life {silent:.0f} s ago  this is as of {now - 1000:.0f} s ago  last task finished " \
               f"{now - 996:.0f} s ago" in shown
        assert f"a.warc  {clock(10 + now - 1000)}  row 3  process 77 on w1" in shown
        assert "clean  a.warc  no progress for 40 s, document 3 in stage pii" in shown
        assert (f"no sign of life for 75 s: its driver (process {os.getpid()} on " in shown) == (silent > 30)
        assert ("kill -CONT" in shown and "--takeover" in shown) == (silent > 30)


def test_files_that_cannot_be_read(any_store):
    assert standing(any_store, "r").state == "started"
    for text in ("{", "[]", '{"state": "done"}', "{}"):
        any_store.write("runs/r/progress.json", text.encode())
        assert standing(any_store, "r").state == "unknown"
    any_store.write("runs/r/progress.json", b'{"state": "done", "parts": 3, "done": 3}')   # without attempts
    assert standing(any_store, "r").state == "done"
    for text in (b"\xff", b'{"attempt": "x", "how": "job"}', b'{"attempt": null}', b'{"attempt": 1, "address": 5}'):
        any_store.write("runs/r/run.json", text)
        assert standing(any_store, "r").state == "done"
        any_store.write("runs/q/run.json", text)                # nothing to go by
        assert standing(any_store, "q").state == "unknown"
    note_attempt(any_store, "q", 1, "job", job="j")
    for text in (b'{"attempt": null, "state": "done", "parts": 1, "done": 1}', b'{"state": 1, "parts": 1, "done": 1}',
                 b'{"state": "done", "parts": "z", "done": 1}',
                 b'{"state": "done", "parts": 1, "done": 1, "failures": 3}'):
        any_store.write("runs/q/progress.json", text)
        assert standing(any_store, "q").state == "unknown", text


# -- stopping --------------------------------------------------------------------------------------------------------
def test_the_wish_is_found_once_and_only_for_this_attempt(any_store, monkeypatch):
    looks, looked, calls, called, watchers = [], threading.Semaphore(0), [], threading.Event(), []
    real = attempts.asked_to_stop

    def look(*args):
        looks.append(args)
        looked.release()
        return real(*args)

    def stop():
        calls.append(len(looks))
        watchers.append(threading.current_thread())
        called.set()

    monkeypatch.setattr("pipeline.cluster.cancellation.asked_to_stop", look)
    ask_to_stop(any_store, "r", 1)
    with watching(any_store, "r", 2, stop, poll_s=0.05):
        for _ in range(4):
            assert looked.acquire(timeout=120)
        assert calls == []
        ask_to_stop(any_store, "r", 2)
        assert called.wait(120)
        watchers[0].join(120)
        assert not watchers[0].is_alive()
    assert calls == [len(looks)], "once, and nobody looks any more"
    looks.clear(), calls.clear(), called.clear()
    ask_to_stop(any_store, "r", 3)
    with watching(any_store, "r", 3, stop, poll_s=3600.0):      # found at once: no poll has to pass
        assert called.wait(120)
    assert calls == [1]


@pytest.mark.skipif(sys.platform != "linux", reason="child processes need Linux")
@pytest.mark.usefixtures("room")
@pytest.mark.parametrize("grace", [600.0, 0.0])
def test_a_stop_lets_what_runs_finish_within_its_grace(store, tmp_path, grace):
    """Two of six tasks run. With time to finish those two are committed and nothing new begins; without, none is."""
    log, mark = t.MemoryLog(), tmp_path / "mark"          # no task ends before it is there
    scheduler = Scheduler(ProcessBackend(store, 2, scratch=str(tmp_path)), log)
    seen: list[str] = []

    class Listener(Progress):
        def running(self, slots, tasks):
            if len(tasks) == 2 and not seen:
                seen.extend(task.spec.key for task in tasks)
                scheduler.stop(grace_s=grace)

        def stopping(self):
            super().stopping()
            mark.touch()

    states: list[str] = []
    scheduler.progress = Listener("quiet", lambda snapshot: states.append(snapshot["state"]))
    with pytest.raises(Interrupted):
        scheduler.run(t.row_specs(parts=6, poison={p: {20: "held"} for p in range(6)}, mark=str(mark)))
    scheduler.backend.close()
    assert sorted(log.appended) == (sorted(seen) if grace else [])
    assert ("stopping" in states) == mark.exists() == bool(grace)


def test_the_earliest_of_several_stops_counts(store):
    scheduler = Scheduler(ProcessBackend(store, 1), t.MemoryLog())
    scheduler.stop(signal.SIGTERM, 1000.0)
    scheduler.stop(signal.SIGINT, 0.0)
    scheduler.stop(signal.SIGTERM, 1000.0)
    with pytest.raises(Interrupted, match="SIGINT"):
        scheduler.check_stop()


def test_a_driver_that_was_taken_over_leaves_the_progress_of_its_successor_alone(tmp_path, monkeypatch):
    """The first driver is fenced in the middle of its run; what it writes at its end must not be there."""
    from pipeline import run as module
    from pipeline.recipe import load_recipe
    from pipeline.store.log import Fenced

    (tmp_path / "a.txt").write_text("A text.")
    (tmp_path / "recipe.yaml").write_text("version: 1\nsources: {s: {read: text, path: a.txt}}\n"
                                          "datasets: {d: {from: s}}\n")
    store, others = Store(tmp_path / "store"), []

    def taken_over(*_):
        others.append(Log.open(store, run="r", takeover=True))
        note_attempt(store, "r", 2, "job")
        progress(store, "r", attempt=2, state="done")

    monkeypatch.setattr(module, "drive_all", taken_over)
    with pytest.raises(Fenced):
        module.run_recipe(load_recipe(tmp_path / "recipe.yaml"), str(tmp_path / "store"), run="r",
                          make_backend=module.make_backend("inline", 1, None))
    others[0].close()
    assert standing(store, "r").state == "done" and standing(store, "r").attempt == 2


# -- what the driver says --------------------------------------------------------------------------------------------
def read(store: Store, attempt: int = 1) -> str:
    return "".join(LogReader(store, "r", attempt).more())


SAYS = """
import os, resource, subprocess, sys, time
from pipeline.cluster.driver_log import DriverLog
from pipeline.store.fs import Store
resource.setrlimit(resource.RLIMIT_NOFILE, (2048, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
many = [os.dup(0) for _ in range(1100)]            # select() takes no descriptor from 1,024 on
with DriverLog(Store(sys.argv[1]), "r", 1) as log:
    print("on stdout", end="")
    print("; the token is", os.environ["RAY_AUTH_TOKEN"])
    os.write(2, "from below Python: äöü\\n".encode())
    subprocess.run(["echo", "of a child"])
    for i in range(6000):
        print(f"line {i} of many that fill more than one piece of the log")
    left = subprocess.Popen(["sleep", "600"])      # holds the other end of the pipe
    sys.stderr.write("no newline at the end")
print("not copied")
left.kill()
assert not log._thread.is_alive(), "it waited for the end of the file until it was given up"
"""


def test_all_that_is_said_is_copied_without_secrets(store):
    env = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"} | {"RAY_AUTH_TOKEN": "s3cr3t-of-the-cluster"}
    done = subprocess.run([sys.executable, "-c", SAYS, store.root], cwd=ROOT, env=env, capture_output=True, text=True,
                          timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    said = read(store)
    assert "s3cr3t" not in said + done.stdout + done.stderr
    assert said.startswith("on stdout; the token is ***\nfrom below Python: äöü\nof a child\n")
    assert re.findall(r"^line (\d+) ", said, re.M) == [str(i) for i in range(6000)]
    assert said.endswith("no newline at the end") and done.stderr == said and done.stdout == "not copied\n"
    pieces = [p for p in store.list("runs/r/log") if p.startswith("runs/r/log/0001-")]
    assert len(pieces) > 3 and all(store.size(p) <= attempts.PIECE for p in pieces)


def test_a_follower_reads_everything_once_while_it_grows(any_store, capfd):
    reader, found = LogReader(any_store, "r", 1), []
    clock = VirtualClock()
    with capfd.disabled(), open(os.devnull, "w") as null:
        saved = os.dup(2)
        os.dup2(null.fileno(), 2)                  # DriverLog passes on what it reads; not into the test's own output
        try:
            with DriverLog(any_store, "r", 1, clock):
                for i in range(3000):
                    os.write(1, f"{i:06d} {'x' * 60}\n".encode())
                    if i % 100 == 99:              # a copy is due after each sleep; a thread of the log makes it
                        found += until(lambda: clock.sleep(60.0) or list(reader.more()), what="a copy")
        finally:
            os.dup2(saved, 2)
            os.close(saved)
    found += reader.more()
    assert [line[:6] for line in "".join(found).splitlines()] == [f"{i:06d}" for i in range(3000)]
    assert len(found) >= 30 and list(reader.more()) == []


# -- code of one's own -----------------------------------------------------------------------------------------------
def test_a_worker_takes_the_planned_file_wherever_it_finds_it(store, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    name = f"own_{os.getpid()}_a"
    path = tmp_path / "elsewhere" / f"{name}.py"
    path.parent.mkdir()
    path.write_text("VALUE = 1\n")
    planned = {"path": str(path), "sha256": file_sha256(path), "kept": f"runs/r/code/{name}.py"}
    attempts.keep_code(store, "r", [str(path)])
    path.write_text("VALUE = 2\n")                                    # another version lies where the planned one lay
    code.import_planned(store, [planned])
    assert sys.modules[name].VALUE == 1
    path.unlink()
    code.import_planned(store, [planned])


def test_a_worker_runs_nothing_but_the_planned_file(store, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    name = f"own_{os.getpid()}_b"
    planned = {"path": str(tmp_path / f"{name}.py"), "sha256": "0" * 64, "kept": f"runs/r/code/{name}.py"}
    with pytest.raises(ChangedInput, match="neither"):
        code.import_planned(store, [planned])
    store.write(planned["kept"], b"raise SystemExit('ran')\n")
    with pytest.raises(ChangedInput, match="run again"):
        code.import_planned(store, [planned])
    assert name not in sys.modules
