"""How a driver begins and ends when things go wrong: no committed result is lost, nothing of another driver is changed,
the lease is given back, and scratch of a killed driver is removed."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import sqlite3
import stat
import subprocess
import sys
import textwrap
import time
import tracemalloc
from functools import partial
from pathlib import Path

import fsspec
import pytest

from pipeline import materialize as materialize_module
from pipeline import run as run_module
from pipeline.base.scratch import user_folder
from pipeline.cluster.attempts import ask_to_stop, facts_of
from pipeline.engine.backends.inline import InlineBackend
from pipeline.engine.driver.endings import TaskFailed
from pipeline.engine.driver.progress import Progress
from pipeline.engine.driver.scheduler import Scheduler
from pipeline.engine.messages import Done, Failed, Failure, Quarantined
from pipeline.plan.nodes import BarrierResult
from pipeline.plan.pass_plans import DatasetPasses
from pipeline.plan.why import explain
from pipeline.recipe import RecipeError, load_recipe
from pipeline.store import dataset, temp
from pipeline.store.errors import EnvironmentFailure
from pipeline.store.fs import Store, StoreError
from pipeline.store.garbage import collect_garbage
from pipeline.store.log import Fenced, Log, attempt_name
from pipeline.store.records import PartRecord
from pipeline.store.temp import scratch_database
from stages.barrier import PartRef
from tests.conftest import alone
from tests.pipeline import engine_tasks as t
from tests.pipeline.test_engine_scheduler import Scripted
from tests.pipeline.test_store_log import record

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(params=["disk", "memory"])
def store(request, tmp_path):
    if request.param == "disk":
        yield Store(tmp_path / "store")
    else:
        root = f"memory://e{tmp_path.name}-{os.getpid()}"
        yield Store(root)
        fsspec.filesystem("memory").rm(root, recursive=True)


# -- commits ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("performed", [True, False], ids=["performed", "not performed"])
def test_ctrl_c_in_a_commit_loses_nothing_and_fences_nobody(store, monkeypatch, performed):
    """The segment is there or it is not when the interrupt comes; `close` commits what waits, once."""
    log = Log.open(store, run="r")
    log._stop.set()                                       # this thread alone commits
    log._thread.join()
    log.append(record("a"))
    log.quarantine("x", 3, 0, "memory")
    put = store.put_absent

    def interrupted(path, data):
        monkeypatch.undo()
        if performed:
            put(path, data)
        raise KeyboardInterrupt

    monkeypatch.setattr(store, "put_absent", interrupted)
    with pytest.raises(KeyboardInterrupt):
        log.flush()
    log.append(record("b"))
    log.close()
    view = Log.read(store)
    assert [r.key for r in view.records()] == ["a", "b"] and view.quarantined_rows("x") == {3: (0, "memory")}
    bodies = [json.loads(store.read(p))["body"] for p in store.list("log") if "heartbeat" not in p]
    assert [len(b.get("records", ())) for b in bodies] == [0, 1, 1]


def test_a_commit_whose_folder_cannot_be_synced_is_no_commit(tmp_path, monkeypatch):
    """It is there to be read, but a power cut may take it: nobody is told that it is durable."""
    log = Log.open(Store(tmp_path))
    log._stop.set()                                       # this thread alone commits
    log._thread.join()
    fsync = os.fsync

    def folders_fail(fd):
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(fd)

    log.append(record("a"))
    with monkeypatch.context() as m:
        m.setattr(os, "fsync", folders_fail)
        with pytest.raises(StoreError, match=r"cannot write .*00000002\.json: Input/output error"):
            log.flush()
    with pytest.raises(StoreError, match="Input/output error"):
        log.close()


def test_a_full_disk_while_a_dataset_is_shown_is_said_in_words(tmp_path, monkeypatch):
    def full(path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(dataset, "sync", full)
    with pytest.raises(EnvironmentFailure, match=r"cannot write .*quarantine/d: .*; the disk is full: free some space"):
        dataset.publish(Store(tmp_path), "d", [dataset.PassParts()])
    assert not list((tmp_path / ".publish").rglob("d*")), "nothing half-built stays"


def test_what_ended_together_with_a_failure_is_committed():
    """One poll brings the end of a task and the last failure of another, in this order and the other one."""
    class Together(Scripted):
        def wait(self, timeout):
            if len(self.queue) < 2:
                return []
            (bad, good), self.queue = sorted(self.queue, key=lambda a: a.spec.key != specs[0].key), []
            return [Failed(bad.id, Failure("exception", "no")),
                    Done(good.id, PartRecord(good.spec.key, "x", "t", "a", {}, {}))]

    specs, log = t.row_specs(parts=2), t.MemoryLog()
    with pytest.raises(TaskFailed, match="no"):
        Scheduler(Together(), log, max_attempts=1).run(specs)
    assert log.appended == [specs[1].key] and log.flushed == 1


QUARANTINED = [partial(Quarantined, row=row, stage=2, reason="crash:SIGSEGV") for row in range(5)]
BAD_CODE = "bad code, not bad data"


def test_a_task_that_fails_for_good_quarantines_no_document(tmp_path):
    """Its documents are looked at again by the next run, whose machine or library may be a better one."""
    store, [spec] = Store(tmp_path / "store"), t.row_specs(parts=1)
    with Log.open(store) as log:
        log.quarantine("other", 1, 0, "memory")
        b = Scripted({spec.key: [[*QUARANTINED, Failure("exception", BAD_CODE)]] * 2})
        with pytest.raises(TaskFailed, match="bad code"):
            Scheduler(b, log, max_attempts=2).run([spec])
        assert [len(a.skip) for a in b.taken] == [0, 5], "within the run they are remembered"
        assert log.quarantined_rows(spec.key) == {}
        assert Log.read(store).quarantined_rows(spec.key) == {}, "it is in the log when the run ends"
    with Log.open(store) as log:
        assert log.quarantined_rows("other") == {1: (0, "memory")}
        b = Scripted({spec.key: [[QUARANTINED[0], Failure("environment", BAD_CODE)]]})
        Scheduler(b, log).run([spec])
        assert [a.skip for a in b.taken] == [(), ((0, 2, "crash:SIGSEGV"),)]


def test_a_verdict_after_an_release_counts(store):
    with Log.open(store) as log:
        log.quarantine("k", 1, 0, "memory")
        log.release("k")
        log.release("unknown")
        log.quarantine("k", 2, 0, "memory")
    assert Log.read(store).quarantined_rows("k") == {2: (0, "memory")}


# -- garbage ---------------------------------------------------------------------------------------------------------
def leave(store: Store, path: str, scratch: Path) -> None:
    (scratch / "x").write_bytes(b"x")
    store.upload(str(scratch / "x"), path)


def test_a_driver_that_was_taken_over_collects_nothing(store, tmp_path):
    """It stood still before it looked for garbage; the lists that the tasks of its successor read are not garbage."""
    first = Log.open(store, run="first")
    leave(store, f"objects/dead/{attempt_name(0, 1)}.x", tmp_path)
    flush = first.flush

    def slow():
        first.flush = flush
        first.flush()
        with Log.open(store, run="second", takeover=True):
            leave(store, f"objects/lists/{'a' * 64}.json", tmp_path)

    first.flush = slow
    with pytest.raises(Fenced, match="run 'second'"):
        collect_garbage(first)
    assert list(store.list("objects")) == [f"objects/dead/{attempt_name(0, 1)}.x", f"objects/lists/{'a' * 64}.json"]
    assert list(store.list("log/heartbeat"))[-1] == "log/heartbeat/00000002.json"
    with contextlib.suppress(Fenced):
        first.close()


def test_half_written_files_of_dead_writers_are_collected(tmp_path):
    store = Store(tmp_path)
    old = ["log/.00000007.json.ab.tmp~", "log/heartbeat/.x.tmp~", "runs/r/.progress.json.ab.tmp~", "runs/.witness-ab",
           "objects/lists/.y.tmp~", "shards/web/split=train/.shards.json.cd.tmp~", ".report.json.ef.tmp~",
           *(f"{folder}/.0000.json.gh.tmp~" for folder in (
               "queue/00000001", "takedowns", "labels/d", "audit", "trainings/t", "studies/s"))]
    for path in [*old, "runs/r/.young.tmp~", "runs/.witness-young", "runs/r/report.json"]:
        store.write(path, b"x")
        if path in old or path.endswith("report.json"):
            then = time.time() - 7200
            os.utime(tmp_path / path, (then, then))
    with Log.open(store) as log:
        assert collect_garbage(log)[0] == len(old)
        assert [p for p in old if (tmp_path / p).exists()] == []
        assert all((tmp_path / p).exists() for p in ("runs/r/.young.tmp~", "runs/.witness-young", "runs/r/report.json"))
        assert collect_garbage(log) == (0, 0, {})


def measured_peak(folder: Path) -> int:
    """Return the most bytes that Python allocates to look for garbage in a store with the folders of 1,500 tasks."""
    store = Store(folder)
    with Log.open(store, threaded=False) as log:          # the heartbeat would be measured, too
        for i in range(1500):
            os.makedirs(folder / "objects" / f"{i:032x}")
            (folder / "objects" / f"{i:032x}" / f"{attempt_name(1, i)}.kept.parquet").touch()
        tracemalloc.start()
        assert collect_garbage(log) == (0, 0, {})
        return tracemalloc.get_traced_memory()[1]


def test_looking_for_garbage_takes_no_memory(tmp_path):
    """A folder for each task of a store: there may be a million."""
    assert alone(measured_peak, tmp_path) < 80_000, "not 80 bytes a folder and more"


# -- runs that cannot begin ------------------------------------------------------------------------------------------
@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "a.txt").write_text("A text.")
    (tmp_path / "recipe.yaml").write_text("version: 1\nsources: {s: {read: text, path: a.txt}}\n"
                                          "datasets: {d: {from: s}}\n")
    return load_recipe(tmp_path / "recipe.yaml")


def refuse(*_args, **_kw):
    raise StoreError("cannot write there")


def given_back(store: Store) -> None:
    """Check that nobody holds the store any more, though this very process did."""
    with Log.open(store):
        pass


@pytest.mark.parametrize("what", ["make_backend", "note_attempt", "Progress", "keep_code"])
def test_a_run_that_cannot_begin_gives_the_store_back(tmp_path, recipe, monkeypatch, what):
    inline = run_module.make_backend("inline", 1, None)
    if what != "make_backend":
        monkeypatch.setattr(run_module, what, refuse)
    make = refuse if what == "make_backend" else inline
    with pytest.raises(StoreError, match="cannot write there"):
        run_module.run_recipe(recipe, str(tmp_path / "store"), make_backend=make)
    given_back(Store(tmp_path / "store"))
    if what == "keep_code":
        [progress] = (tmp_path / "store/runs").glob("*/progress.json")
        assert json.loads(progress.read_text())["error"] == "cannot write there"


def test_a_wish_to_stop_is_not_for_a_run_whose_facts_were_lost(tmp_path, recipe):
    """Attempts are counted in run.json; when that is gone the first one's number is taken, and its wish is there."""
    store, inline = Store(tmp_path / "store"), run_module.make_backend("inline", 1, None)
    name = run_module.run_recipe(recipe, store.root, make_backend=inline).run
    ask_to_stop(store, name, 1)
    store.write(f"runs/{name}/run.json", b"{")
    run_module.run_recipe(recipe, store.root, make_backend=inline)
    assert facts_of(store, name)["attempt"] == 2


@pytest.mark.parametrize("what", ["make_backend", "Progress", "drive"])
def test_a_materialize_that_cannot_begin_gives_the_store_back(tmp_path, monkeypatch, what):
    store = Store(tmp_path / "store")
    store.write("runs/r/curriculum.json", b"{}")
    monkeypatch.setattr(materialize_module.Curriculum, "loads", lambda *_: None)
    if what != "make_backend":
        monkeypatch.setattr(materialize_module, what, refuse)
    with pytest.raises(StoreError, match="cannot write there"):
        materialize_module.materialize(store.root, "r", "bytes", make_backend=refuse if what == "make_backend"
                                       else run_module.make_backend("inline", 1, None))
    given_back(store)


def test_a_backend_that_cannot_close_does_not_keep_the_store(tmp_path, recipe, monkeypatch):
    monkeypatch.setattr(InlineBackend, "close", refuse)
    with pytest.raises(StoreError, match="cannot write there"):
        run_module.run_recipe(recipe, str(tmp_path / "store"), make_backend=run_module.make_backend("inline", 1, None))
    given_back(Store(tmp_path / "store"))


@pytest.mark.parametrize("section", ["datasets: {index: {from: s}}", "datasets: {shards: {from: s}}",
                                     "datasets: {d: {from: '2'}}"])
def test_names_that_nodes_of_the_plan_have_are_refused(tmp_path, section):
    source = "'2'" if "'2'" in section else "s"
    path = tmp_path / "recipe.yaml"
    path.write_text(f"version: 1\nsources: {{{source}: {{read: text, path: a.txt}}}}\n{section}\n")
    with pytest.raises(RecipeError, match=r"give the (dataset|source) a"):
        load_recipe(path)


def test_a_barrier_that_forgets_a_part_is_an_error():
    part = PartRef("k", "d", 0, 1, 1, {"$ref": "x", "content": "c"}, None)
    assert list(BarrierResult([part], [None])) == [(part, None)]
    with pytest.raises(ValueError, match="shorter"):
        list(BarrierResult([part, part], [None]))


@pytest.mark.parametrize("many", [1, 20])
def test_why_counts_what_is_in_quarantine(tmp_path, many):
    """A few entries stand in the arguments of the tasks, many in a file of the store."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.txt").write_text("A text.")
    (tmp_path / "r.yaml").write_text("version: 1\nsources: {s: {read: text, path: in}}\n"
                                     "datasets: {d: {from: s, steps: [c4]}}\n")
    recipe, store = load_recipe(tmp_path / "r.yaml"), Store(tmp_path / "store")
    run_module.run_recipe(recipe, store.root, make_backend=run_module.make_backend("inline", 1, None))
    [step] = recipe.datasets["d"].steps
    with Log.open(store) as log:
        log.append(record("x" * 32, quarantine=[{"row": i, "id": f"{i:032x}", "stage": "c4", "reason": "memory",
                                                 "stage_key": DatasetPasses(recipe).step(step).key}
                                                for i in range(many)]))
    (tmp_path / "in/b.txt").write_text("Another text.")
    said = json.dumps(explain(recipe, store.root, "d"))
    assert ("20 documents are" if many == 20 else "1 document is") + " in quarantine for these stages" in said


# -- what others see -------------------------------------------------------------------------------------------------
def test_a_task_two_nodes_want_is_counted_once():
    """Whoever asked first has it; what is left and how long it takes end at nothing."""
    spec, progress = t.spec(t.Rows, weight=0, first=0, rows=1), Progress("quiet")       # the last to be run
    twice = [spec, *(t.spec(t.Rows, order=i, first=i, rows=1) for i in range(1, 1500)), spec]
    assert len(Scheduler(Scripted(), t.MemoryLog(), progress).run(twice)) == 1501
    seen = progress.snapshot()
    assert (seen["parts"], seen["done"], seen["bytes_left"], seen["eta_s"]) == (1500, 1500, 0, 0)


# -- temporary files -------------------------------------------------------------------------------------------------
KILLED = """
    import os, signal, sys
    from pipeline.engine.backends.inline import InlineBackend
    from pipeline.store.fs import Store
    from pipeline.store.temp import Spilled, scratch_database

    db = scratch_database(1)
    db.execute("CREATE TABLE x (data BLOB)")
    db.executemany("INSERT INTO x VALUES (randomblob(100000))", [()] * 100)
    assert any("deleted" in os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
               if os.path.islink(f"/proc/self/fd/{fd}")), "it has no file yet"
    backend = InlineBackend(Store(sys.argv[1]))
    backend.start()
    open(backend.scratch + "/half.parquet", "w").write("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_what_a_killed_driver_leaves_in_tmpdir_is_swept(tmp_path, monkeypatch):
    (tmp_path / "tmp").mkdir()
    env = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path / "store")], cwd=ROOT, env=env)
    assert done.returncode == -signal.SIGKILL
    assert [p.name for p in (tmp_path / "tmp").iterdir()] == [f"tokenmill-{os.getuid()}"], "databases have no name"
    assert len(list((tmp_path / "tmp").rglob("half.parquet"))) == 1
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    backend = InlineBackend(Store(tmp_path / "store"))
    backend.start()
    assert not list((tmp_path / "tmp").rglob("half.parquet"))
    backend.close()
    assert [p.name for p in user_folder().iterdir()] == [".lock"]


@pytest.mark.parametrize("size", [0, 1, temp.CHUNK - 1, temp.CHUNK, temp.CHUNK + 1, 3 * temp.CHUNK + 7])
def test_a_spilled_list_is_the_list(size):
    items = [(i, f"\udc80{i}") for i in range(size)]
    spilled = temp.Spilled(items, encode=list, decode=tuple)
    assert list(spilled) == items and len(spilled) == size
    for at in {0, size // 2, temp.CHUNK - 1, temp.CHUNK, size - 1} & set(range(size)):
        assert spilled[at] == items[at] and spilled[at:at + 300] == items[at:at + 300]
    grows, seen = iter(spilled), []
    for n, item in enumerate(grows):                 # a list may grow while it is read
        seen.append(item)
        if n < 5:
            spilled.append((size + n, "more"))
    assert seen == [*items, *((size + n, "more") for n in range(5 if size else 0))]


def test_a_full_disk_under_the_drivers_tables_is_said_in_words(monkeypatch):
    monkeypatch.setenv("TMPDIR", "/some/where")
    db = scratch_database(1)
    db.execute("CREATE TABLE x (data BLOB)")
    db.execute("PRAGMA max_page_count = 50")
    with pytest.raises(EnvironmentFailure, match="/some/where: database or disk is full; free some space"):
        db.executemany("INSERT INTO x VALUES (randomblob(10000))", [()] * 100)
    with pytest.raises(sqlite3.OperationalError, match="syntax"):
        temp.scratch_database().execute("SELEC 1")
