"""Clusters of several nodes on one machine: workers of different kinds, and nodes that are drained, stopped or
autoscaled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from pipeline.engine.task import TaskSpec
from pipeline.store.fs import Store
from tests.pipeline import engine_tasks as t
from tests.pipeline.test_engine_ray import REPO, inline

pytestmark = [pytest.mark.chaos, pytest.mark.ray,
              pytest.mark.skipif(sys.platform != "linux", reason="child processes need Linux")]

#: what the scripts share: a cluster, a run in a thread of its own, samples of what it does meanwhile
COMMON = """
import dataclasses, json, os, signal, sys, threading, time
import ray
from ray.cluster_utils import Cluster
from pipeline.engine.backends.ray_backend import RayBackend
from pipeline.engine.driver.scheduler import Scheduler
from pipeline.engine.messages import Lost, Returned, StatusReport
from pipeline.store.fs import Store
from tests.pipeline import engine_tasks as t
from tests.processes import until

NODE = {"object_store_memory": 80 << 20, "include_dashboard": False}
store, scratch = Store(sys.argv[1]), sys.argv[2]
MARK = scratch + "/mark"                          # tasks that are held end when it is there
def release(): open(MARK, "w").close()

def backend_at(address, **kw):
    backend = RayBackend(store, address=address, scratch=scratch, **kw)
    backend.places, backend.most = {}, 0          # task → node it was given to; most that were in flight at a time
    submit = backend.submit
    def noted(a):
        submit(a)
        backend.room_for(*a.spec.kind)            # gives it to a supervisor
        worker_slots = list(backend.fleet.worker_slots.values())
        backend.places.setdefault(a.spec.label, []).append(next(p.host for p in worker_slots if a.id in p.open))
        backend.most = max(backend.most, sum(len(p.open) for p in worker_slots))
    backend.submit = noted
    return backend

class Run(threading.Thread):
    def __init__(self, backend, specs, **kw):
        super().__init__(daemon=True)
        self.backend, self.specs, self.kw = backend, specs, kw
        self.records = self.error = None
        self.log = t.MemoryLog()
        self.start()
    def run(self):
        try:
            self.records = Scheduler(self.backend, self.log, max_attempts=1, **self.kw).run(self.specs)
        except BaseException as e:
            self.error = f"{type(e).__name__}: {e}"

def say(run, **more):
    print(json.dumps({"error": run.error, "places": run.backend.places, "most": run.backend.most,
                      "log": sorted(run.log.appended) == sorted({s.key for s in run.specs}),
                      "outcome": run.records and repr(t.outcome(run.records)), **more}), flush=True)
"""


def on_cluster(script: str, tmp_path: Path, **env: str) -> dict:
    """Run a script that makes a cluster of its own. Returns the JSON of the last line that it prints."""
    with tempfile.TemporaryDirectory(prefix="tmr", dir="/tmp") as short:      # for Ray's sockets
        clean = {k: v for k, v in os.environ.items() if k not in ("RAY_ADDRESS", "CUDA_VISIBLE_DEVICES")}
        done = subprocess.run([sys.executable, "-c", COMMON + script, str(tmp_path / "store"), str(tmp_path)], cwd=REPO,
                              env={**clean, "PYTHONPATH": str(REPO), "RAY_TMPDIR": short, **env},
                              stdout=subprocess.PIPE, text=True, timeout=900)
    assert done.returncode == 0
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


#: in a script: tasks that stay at their row 10 until `release()`
HELD = 't.row_specs(parts={parts}, rows=20, poison={{p: {{10: "held"}} for p in range({parts})}}, mark=MARK)'


def held(parts: int, tmp_path: Path) -> list[TaskSpec]:
    """Return the same tasks as the script does."""
    return t.row_specs(parts=parts, rows=20, poison={p: {10: "held"} for p in range(parts)}, mark=f"{tmp_path}/mark")


POOLS = """
import logging
from pipeline.base.machine import cpu_tag
from ray._private.internal_api import get_memory_info_reply, get_state_from_address

said = []
class Kept(logging.Handler):
    def emit(self, record): said.append(record.getMessage())
logging.getLogger("tokenmill").addHandler(Kept())

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **NODE})
small = cluster.add_node(num_cpus=2, memory=1500 << 20, **NODE)
large = cluster.add_node(num_cpus=2, num_gpus=1, memory=6000 << 20, **NODE)
backend = backend_at(cluster.address)
greet = backend._greet
def as_other(slot, ready):                     # the small node says it has another type of CPU
    other = dataclasses.replace(ready, fingerprint=dataclasses.replace(ready.fingerprint, cpu="arm-base"))
    greet(slot, other if slot.host == small.node_id else ready)
backend._greet = as_other

kinds = {"cpu": (8, 300, 0.0, ""), "gpu": (4, 500, 0.5, ""), "big": (2, 3000, 0.0, ""),
         "num": (4, 300, 0.0, cpu_tag())}
ends = {"cpu": {"mark": MARK}}
specs = [dataclasses.replace(t.spec(t.Devices, node=name, order=i, n=i, name=name, memory_mb=m,
                                    **ends.get(name, {"s": 0.5})), gpus=g, cpu=c)
         for name, (n, m, g, c) in kinds.items() for i in range(n)]
run = Run(backend, specs)
until(lambda: backend.slots or run.error)
reply = lambda: get_memory_info_reply(get_state_from_address(cluster.address)).store_stats
peak = spilled = created = 0
while run.is_alive():
    at = {h for label, hosts in list(backend.places.items()) if label.startswith("cpu") for h in hosts}
    if at == {small.node_id, large.node_id}:       # both nodes have some
        release()
    stats = reply()
    peak, spilled = max(peak, stats.object_store_bytes_used), max(spilled, stats.spilled_bytes_total)
    time.sleep(0.1)
worker_slots = [[p.host, p.slots, p.memory_mb, p.gpus] for p in backend.fleet.worker_slots.values()]
seen = {s.label: r.counters["seen"] for s, r in zip(specs, run.records or [])}
backend.close()
say(run, small=small.node_id, large=large.node_id, peak=peak, spilled=spilled, posts=worker_slots, seen=seen, said=said,
    outcome=None)
cluster.shutdown()
"""


def test_kinds_of_tasks_find_the_nodes_that_have_what_they_need(tmp_path):
    """CPU filters beside a GPU classifier, a task larger than a node, numeric tasks where CPUs differ; and the object
    store stays empty, because nothing but records of 1 kB goes through Ray."""
    found = on_cluster(POOLS, tmp_path)
    assert (found["error"], found["log"]) == (None, True)
    small, large = found["small"], found["large"]
    on = {name: {h for label, hosts in found["places"].items() if label.startswith(name) for h in hosts}
          for name in ("cpu", "gpu", "big", "num")}
    assert on == {"cpu": {small, large}, "gpu": {large}, "big": {large}, "num": {large}}
    assert all(seen == ("0" if label.startswith("gpu") else "") for label, seen in found["seen"].items())
    assert any("is skipped for tasks that declare 3,000 MB" in line for line in found["said"])
    assert found["peak"] < 5 << 20 and found["spilled"] == 0
    for host, limit in ((small, 1500), (large, 6000)):
        mine = [p for p in found["posts"] if p[0] == host]
        assert sum(memory + 300 for _, _, memory, _ in mine) <= limit


TOO_LARGE = """
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "memory": 900 << 20, **NODE})
backend = backend_at(cluster.address)
backend.fleet.fit_s = 3.0
specs = [*t.row_specs(parts=3), t.spec(t.Devices, node="graph", n=0, memory_mb=5000)]
run = Run(backend, specs)
run.join()
backend.close()
say(run)
cluster.shutdown()
"""


def test_a_task_no_node_can_hold_ends_the_run_with_its_name_its_need_and_the_largest_node(tmp_path):
    error = on_cluster(TOO_LARGE, tmp_path)["error"]
    assert error.startswith("CannotRun: graph: graph 0 cannot run")
    assert "declares 5,000 MB of memory; the largest node" in error and "can give a task 600 MB" in error


DRAINED = """
from ray.core.generated import autoscaler_pb2
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **NODE})
nodes = [cluster.add_node(num_cpus=1, memory=2000 << 20, **NODE) for _ in range(2)]
backend = backend_at(cluster.address)
returned, reported, wait = [], [0], backend.wait
def noted(timeout):
    events = wait(timeout)
    returned.extend(i for e in events if isinstance(e, Returned) for i in e.ids)
    returned.extend(-i for e in events if isinstance(e, Lost) for i in e.ids)
    reported.extend(len(e.running) for e in events if isinstance(e, StatusReport))
    return events
backend.wait = noted
run = Run(backend, """ + HELD.format(parts=10) + """)
until(lambda: len(backend.fleet.usable) == 2 and reported[-1] == 2)         # the tasks of both nodes in one report
doomed = nodes[0].node_id
gcs = ray._raylet.GcsClient(address=cluster.address)
reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
assert gcs.drain_node(doomed, reason, "spot price", int(time.time() * 1000) + 60_000)[0]
until(lambda: not any(p.host == doomed and not p.leaving for p in backend.fleet.worker_slots.values()))
given = len([h for hosts in backend.places.values() for h in hosts if h == doomed])
if sys.argv[3:] == ["at once"] or os.environ.get("AT_ONCE"):
    cluster.remove_node(nodes[0], allow_graceful=False)
release()
run.join()
after = len([h for hosts in backend.places.values() for h in hosts if h == doomed])
left = [p.host for p in backend.fleet.worker_slots.values()]
backend.close()
say(run, given=given, after=after, lost=sum(i < 0 for i in returned), returned=sum(i > 0 for i in returned),
    gone=doomed not in left)
cluster.shutdown()
"""


@pytest.mark.parametrize("at_once", ["", "1"])
def test_a_node_that_is_drained_gets_no_more_work_and_charges_nobody(store, tmp_path, at_once):
    """A preemption, announced: what it has not begun goes elsewhere at once, the rest when it ends (`at_once`)."""
    found = on_cluster(DRAINED, tmp_path, AT_ONCE=at_once)
    assert (found["error"], found["log"]) == (None, True)
    assert found["after"] == found["given"] and found["gone"] and found["lost"] == 0
    assert found["returned"] >= 1
    assert found["outcome"] == repr(inline(store, held(10, tmp_path), tmp_path))


HEAD = "f" * 51 + "00000"          # what Ray's fake provider takes the head for

AUTOSCALED = """
import socket, subprocess, tempfile
from pathlib import Path
import pipeline.engine.backends.ray_backend as ray_backend

def free_port():
    for port in range(7000 + os.getpid() % 2000, 9900):
        with socket.socket() as s:
            if s.connect_ex(("127.0.0.1", port)):
                try:
                    s.bind(("", port))
                    return port
                except OSError:
                    pass

top, HEAD = os.environ["RAY_TMPDIR"], os.environ["HEAD_ID"]
address = f"{ray.util.get_node_ip_address()}:{free_port()}"
port = int(address.rpartition(":")[2])
lists = ["cluster_synced_files", "initialization_commands", "setup_commands", "head_setup_commands",
         "worker_setup_commands", "head_start_ray_commands", "worker_start_ray_commands"]
Path(top, "c.json").write_text(json.dumps({
    "cluster_name": "t", "max_workers": 3, "upscaling_speed": 100.0, "idle_timeout_minutes": 0.05,
    "provider": {"type": "external", "head_node_id": HEAD, "launch_multiple": True, "gcs_address": address,
                 "module": "tests.pipeline.autoscaled_nodes.Nodes",
                 "disable_node_updaters": True, "disable_launch_config_check": True},
    "head_node_type": "ray.head.default", "auth": {}, "file_mounts": {}, "file_mounts_sync_continuously": False,
    "available_node_types": {
        "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
        "cpu": {"resources": {"CPU": 2, "memory": 2000 << 20, "object_store_memory": 80 << 20}, "node_config": {},
                "min_workers": 0, "max_workers": 3}}, **{name: [] for name in lists}}))
head = subprocess.Popen(
    [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", f"--port={port}",
     f"--autoscaling-config={top}/c.json", "--num-cpus=0", f"--object-store-memory={80 << 20}",
     "--include-dashboard=false", f"--ray-client-server-port={port + 1}", "--min-worker-port=0", "--max-worker-port=0",
     f"--dashboard-agent-listen-port={port + 2}", "--disable-usage-stats", f"--temp-dir={top}/r"],
    env={**os.environ, "PYTHONPATH": os.getcwd(), "RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1",
         "RAY_enable_autoscaler_v2": "1", "RAY_CLOUD_INSTANCE_ID": HEAD, "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD},
    stdout=open(f"{top}/said", "w"), stderr=subprocess.STDOUT, start_new_session=True)
def alive():
    return sorted(n["NodeID"] for n in ray.nodes() if n["Alive"] and n["Resources"].get("CPU"))

try:
    until(lambda: "Ray runtime started" in Path(top, "said").read_text())
    backend = backend_at(address, idle_s=3.0)
    backend.start()
    seen, most_nodes, most_posts = set(), 0, 0
    few = Run(backend, t.row_specs(parts=2, rows=20, ms=50))          # what one node holds
    seen.update(until(alive))
    while few.is_alive():
        seen.update(alive())
        time.sleep(0.2)
    one = len(seen)
    # one of many lasts: the nodes that have nothing to do any more go, its node stays
    mark = Path(top, "mark")
    many = Run(backend, [t.spec(t.Waits, weight=99, mark=str(mark)), *""" + HELD.format(parts=12) + """])
    while many.is_alive() and len(many.log.appended) < 12:
        seen.update(there := alive())
        if len(seen) > 1:
            release()
        most_nodes = max(most_nodes, len(there))
        # one that leaves is still there until its node has gone, while the one after it may be there already
        most_posts = max(most_posts, sum(not p.leaving for p in list(backend.fleet.worker_slots.values())))
        time.sleep(0.2)
    until(lambda: len(alive()) == 1 or not many.is_alive())
    left, worker_slots, working = len(alive()), len(backend.fleet.worker_slots), many.is_alive()
    mark.touch()
    many.join()
    backend.close()
    say(many, few=few.error, one=one, nodes=len(seen), left=left, posts=worker_slots, most_nodes=most_nodes,
        most_posts=most_posts, working=working)
finally:
    for folder in Path("/proc").glob("[0-9]*"):        # those of the autoscaler have sessions of their own
        try:
            if int(folder.name) != os.getpid() and f"{top}/r".encode() in Path(folder, "cmdline").read_bytes():
                os.kill(int(folder.name), signal.SIGKILL)
        except OSError:
            pass
"""


def test_an_autoscaler_is_told_what_is_needed_and_gets_back_what_is_not(tmp_path):
    """A cluster that begins with no worker at all, scaled by Ray's own autoscaler (its nodes are processes here)."""
    found = on_cluster(AUTOSCALED, tmp_path, HEAD_ID=HEAD, RAY_AUTH_MODE="disabled")
    assert (found["few"], found["error"], found["log"]) == (None, None, True)
    assert found["one"] == 1, "two tasks: one node"
    assert found["nodes"] >= 2 and max(found["most_nodes"], found["most_posts"]) <= 3
    assert found["working"] and (found["left"], found["posts"]) == (1, 1)
