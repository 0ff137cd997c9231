"""The Ray backend: equal results, dead supervisors, refused nodes, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from pipeline.engine.backends.inline import InlineBackend
from pipeline.engine.driver.endings import CannotRun
from pipeline.engine.driver.scheduler import Scheduler
from pipeline.engine.worker.limits import ProcessLimits
from pipeline.store.fs import Store
from tests.pipeline import engine_tasks as t
from tests.pipeline.test_confinement import check_hostile, needs_kernel, results_of, targets
from tests.pipeline.test_engine_blame import check_poison
from tests.processes import alive, until

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray"),
              pytest.mark.skipif(sys.platform != "linux", reason="child processes need Linux")]
REPO = Path(__file__).resolve().parents[2]


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


@pytest.fixture
def on_ray(ray_session, store, tmp_path):
    from pipeline.engine.backends.ray_backend import RayBackend

    made = []
    # Ray takes its time to give back what the supervisors of the test before had: what is not free yet would be taken
    # for somebody else's, and there would be two small supervisors instead of one
    until(lambda: ray_session.available_resources().get("CPU") == ray_session.cluster_resources()["CPU"])

    def make(workers=2, **limits):
        # memory_share: supervisors see the memory of this machine, and what else fills it is not our business here
        made.append(
            RayBackend(store,
                       workers,
                       limits=ProcessLimits(**{
                           "memory_share": 10.0,
                           **limits
                       }),
                       child_memory_mb=300,
                       scratch=str(tmp_path)))
        return made[-1]

    yield make
    for backend in made:
        backend.close()
    assert ray_session.is_initialized()         # it was not ours to shut down
    assert not list(tmp_path.glob("tokenmill-*/scratch-*"))
    assert not list(store.list("runs"))


def inline(store, specs, tmp_path):
    return t.outcome(Scheduler(InlineBackend(store, scratch=str(tmp_path)), t.MemoryLog()).run(specs))


def test_results_equal_the_inline_backends_and_few_tasks_wait_at_hand(on_ray, store, tmp_path):
    """No more tasks are in flight than there are slots, and as many again at hand."""
    specs, backend, most = [*t.row_specs(), *t.row_specs(parts=20, rows=2)], on_ray(2), []
    place, slots = backend._placement.place, backend.fleet.worker_slots
    backend._placement.place = lambda: (place(), most.append(sum(len(p.open) for p in slots.values())))[0]
    records = Scheduler(backend, t.MemoryLog(), dispatch_seed=5).run(specs)
    assert t.outcome(records) == inline(store, specs, tmp_path)
    assert 3 <= max(most) <= 4


@needs_kernel
def test_a_parser_that_was_taken_over_gets_nowhere(on_ray, store, tmp_path):
    with targets(tmp_path) as hostile:
        spec = t.spec(t.Hostile, **{**hostile, "token": f"/proc/{os.getpid()}/environ"})
        check_hostile(*results_of(store, Scheduler(on_ray(1), t.MemoryLog()).run([spec])))


def test_a_poisoned_document_costs_itself(on_ray):
    specs = t.row_specs(parts=1, poison={0: {5: "segfault"}}, batch=1)
    check_poison(Scheduler(on_ray(1), t.MemoryLog()).run(specs), specs)


def test_a_supervisor_that_dies_is_replaced_and_its_children_go_with_it(on_ray, store, tmp_path):
    mark = tmp_path / "mark"                            # one of two children works until it is there
    specs = [t.spec(t.Waits, weight=99, mark=str(mark)), *t.row_specs(parts=2)]
    backend = on_ray(2)
    seen = {}

    def chaos():
        try:
            pid, seen["children"] = until(lambda: next((x for x in supervised(tmp_path).items() if len(x[1]) == 2), 0))
            seen["supervisor"] = pid
            os.kill(pid, signal.SIGKILL)
        finally:
            mark.touch()

    thread = threading.Thread(target=chaos)
    thread.start()
    records = Scheduler(backend, t.MemoryLog(), max_attempts=1).run(specs)      # nobody is charged
    thread.join()
    assert backend.nodes_lost == 1
    assert len(seen["children"]) == 2
    until(lambda: not any(alive(p) for p in [*seen["children"], seen["supervisor"]]))
    assert t.outcome(records) == inline(store, specs, tmp_path)


def supervised(scratch: Path) -> dict[int, list[int]]:
    """Return {pid of a supervisor: pids of its children} for the supervisors whose children work below `scratch`."""
    parents = {}
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if str(scratch).encode() in environ.read_bytes():
                after_name = Path(environ.parent, "stat").read_text().rpartition(")")[2].split()
                parents[int(environ.parent.name)] = int(after_name[1])
        except OSError:
            continue
    tops = set(parents.values()) - set(parents) - {os.getpid()}      # a child may have started something, too
    return {top: [p for p, parent in parents.items() if parent == top] for top in tops}


def test_our_own_code_is_what_it_was_when_we_began(on_ray, monkeypatch):
    """Who edits the files of a driver that runs does not make nodes with the new code its equals, nor those with the
    old code strangers: a node with other code is refused by name."""
    from pipeline.engine.backends import ray_backend

    backend, real = on_ray(1), ray_backend.fingerprint
    backend.start()
    monkeypatch.setattr(ray_backend, "fingerprint", lambda names: replace(real(names), code="0" * 64))
    assert len(Scheduler(backend, t.MemoryLog()).run(t.row_specs(parts=1))) == 1
    stale = on_ray(1)
    stale.start()
    with pytest.raises(ray_backend.NoNodes, match=f"{os.uname().nodename} .*other code .*the code was changed since "
                                                  "this run began; run again"):
        Scheduler(stale, t.MemoryLog()).run(t.row_specs(parts=1, rows=7))


def test_a_store_the_nodes_do_not_see_is_refused(on_ray, store, monkeypatch):
    from pipeline.engine.backends import ray_backend

    backend = on_ray(1)
    backend.start()
    store.remove(backend._witness)
    with pytest.raises(ray_backend.NoNodes, match="does not see the store"):
        Scheduler(backend, t.MemoryLog()).run(t.row_specs(parts=1))


def test_supervisors_that_cannot_start_end_the_run(on_ray, tmp_path):
    from pipeline.engine.backends import ray_backend

    backend = on_ray(1)
    (tmp_path / "file").touch()
    backend.scratch = str(tmp_path / "file")      # no folder can be made below a file
    with pytest.raises(ray_backend.NoNodes, match=r"die before they are ready|died before that"):
        Scheduler(backend, t.MemoryLog()).run(t.row_specs(parts=1))


def test_a_task_no_node_can_hold_is_named_with_its_need(on_ray):
    backend = on_ray(2)
    backend.fleet.fit_s = 0.0
    huge = t.spec(t.Fails, node="graph", what="", memory_mb=1 << 30)
    with pytest.raises(CannotRun, match=r"graph 0 cannot run: .*declares 1,073,741,824 MB of memory; the largest node"):
        Scheduler(backend, t.MemoryLog()).run([huge])
    gpu = replace(t.spec(t.Fails, node="classify", what=""), gpus=2.0)
    with pytest.raises(CannotRun, match=r"classify 0 cannot run: .* and 2 GPUs; the largest node, .* and 0 GPUs"):
        Scheduler(backend, t.MemoryLog()).run([gpu])


def test_supervisors_come_with_work_and_go_when_there_is_none(on_ray):
    backend = on_ray(2)
    backend.fleet.idle_s = 1.0
    backend.start()
    backend.set_demand({})
    for _ in range(3):
        backend.wait(0.1)
    assert backend.fleet.worker_slots == {}, "no work, no supervisor"
    Scheduler(backend, t.MemoryLog()).run(t.row_specs(parts=1))
    [slot] = backend.fleet.worker_slots.values()
    backend.set_demand({})
    until(lambda: not (backend.wait(0.2), backend.fleet.worker_slots)[1])        # a report may come before it is gone
    again = Scheduler(backend, t.MemoryLog()).run(t.row_specs(parts=1, rows=7))
    assert len(again) == 1 and [*backend.fleet.worker_slots.values()] != [slot]


DRIVER = """
import sys
from pipeline.engine.backends.ray_backend import RayBackend
from pipeline.engine.driver.endings import Interrupted
from pipeline.engine.driver.scheduler import Scheduler
from pipeline.store.fs import Store
from tests.pipeline import engine_tasks as t
backend = RayBackend(Store(sys.argv[1]), 3, child_memory_mb=300, scratch=sys.argv[2])
specs = t.row_specs(parts=6, poison={part: {0: "held"} for part in range(6)}, mark=sys.argv[2] + "/never")
try:
    Scheduler(backend, t.MemoryLog()).run(specs)
except Interrupted as e:
    print(e, flush=True)
    sys.exit(1)
finally:
    backend.close()
"""


def drive(tmp_path: Path) -> subprocess.Popen:
    """Start a driver in a session of its own, with its own Ray and 3 workers, whose tasks never end."""
    env = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    return subprocess.Popen([sys.executable, "-c", DRIVER, str(tmp_path / "store"), str(tmp_path)], cwd=REPO, env=env,
                            stdout=subprocess.PIPE, text=True, start_new_session=True)


def family(tmp_path: Path, driver: int) -> set[int]:
    """Return the pids of the processes of a driver: its descendants, and those with its scratch folder in their
    environment or command line."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = Path(folder, "stat").read_text().rpartition(")")[2].split()
            if fields[0] in "ZX":
                continue
            line = Path(folder, "cmdline").read_bytes()
            if line.startswith((b"ray::DashboardAgent", b"ray::RuntimeEnvAgent")):
                continue        # Ray's own: without a GCS they end after their own time-out of a minute
            said = line + Path(folder, "environ").read_bytes()
            if int(fields[1]) in {driver, *found} or str(tmp_path).encode() in said:
                found.add(int(folder.name))
        except OSError:
            continue
    return found - {os.getpid()}


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_an_embedded_driver_that_is_stopped_leaves_no_process(tmp_path, signum):
    driver = drive(tmp_path)
    until(lambda: list(tmp_path.glob("tokenmill-*/scratch-*/*/attempt-*")))
    processes = family(tmp_path, driver.pid)
    assert len(processes) > 4                   # gcs, raylet, a supervisor, three children, …
    if signum == signal.SIGINT:
        os.killpg(driver.pid, signum)           # as a terminal does it
    else:
        driver.send_signal(signum)
    out, _ = driver.communicate(timeout=300)
    if signum == signal.SIGINT:
        assert driver.returncode == 1
        assert "run again to go on" in out
        assert not list(tmp_path.glob("tokenmill-*/scratch-*"))
    until(lambda: not any(alive(p) for p in processes))


def on_cluster(script: str, tmp_path: Path, cwd: Path) -> str:
    """Run a script that makes a cluster of its own. Returns the last line that it prints."""
    with tempfile.TemporaryDirectory(prefix="tmr", dir="/tmp") as short:      # for Ray's sockets
        env = {**{k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}, "RAY_TMPDIR": short}
        done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "store"), str(tmp_path)], cwd=cwd, env=env,
                              stdout=subprocess.PIPE, text=True, timeout=600)
    assert done.returncode == 0
    return done.stdout.splitlines()[-1]


SHIP = """
import sys
from ray.cluster_utils import Cluster
from pipeline.engine.backends.ray_backend import RayBackend
from pipeline.store.fs import Store

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 80 << 20,
                                                        "include_dashboard": False})
backend = RayBackend(Store(sys.argv[1]), address=cluster.address, scratch=sys.argv[2], ship_code=True)
backend.start()
while not backend.slots:
    backend.wait(0.5)
[slot] = backend.fleet.worker_slots.values()
backend.close()
cluster.shutdown()
print(sorted("py_modules" in place for place in slot.fingerprint.roots.values()))
"""


@pytest.mark.slow
def test_shipped_code_is_what_the_nodes_run_and_it_is_ours(tmp_path):
    assert on_cluster(SHIP, tmp_path, tmp_path) == "[True, True, True, True]"


def test_the_autoscaler_sees_demand_only_when_no_supervisor_starts():
    from pipeline.engine.backends.ray_backend import RayBackend

    for start, shown in (([], {"shape": 3}), ([("host", 0, "shape")], {})):
        backend = Mock(_temp=None, **{"fleet.worker_slots": {}, "fleet.plan.return_value": Mock(
            leave=[], start=start, demand={"shape": 3})})
        RayBackend._scale(backend, 0.0)
        backend._demand.show.assert_called_once_with(shown)
        assert backend._spawn.call_count == len(start)
