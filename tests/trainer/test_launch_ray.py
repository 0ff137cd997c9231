"""Training on a Ray cluster gives the same losses as training without Ray, also when ranks and nodes die meanwhile. If
it cannot start, it says why."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.cluster import Cluster
from tests.processes import alive, named, signal_all, stopped, until
from tests.trainer.synthetic import make_run
from trainer.__main__ import main
from trainer.base.files import training_process
from trainer.loop.run import open_run
from trainer.loop.train import train
from trainer.observe.metrics import read, standing
from trainer.tools.arm_table import ALL

ROOT = Path(__file__).resolve().parents[2]
#: what a pod's SIGTERM makes of `ray start --block`: one of the nodes with a CPU is told to go
DRAIN = """
import sys, time
import ray
from ray.core.generated.autoscaler_pb2 import DrainNodeReason
ray.init(address=sys.argv[1], logging_level="ERROR")
node = next(n["NodeID"] for n in ray.nodes() if n["Alive"] and n["Resources"].get("CPU"))
client = ray._raylet.GcsClient(address=sys.argv[1])
until = int(1e3 * time.time()) + 300_000
taken, why = client.drain_node(node, DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION, "test", until)
assert taken, why
"""
pytestmark = [pytest.mark.ray, pytest.mark.slow]


def command(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "trainer", *arguments], cwd=ROOT, capture_output=True, text=True,
                          timeout=600, env={**os.environ, "OMP_NUM_THREADS": "1"})


def lines(out: Path, *events: str) -> list[dict[str, Any]]:
    path = out / "metrics.jsonl"
    return [line for line in read(path) if line["event"] in events] if path.exists() else []


def test_two_ranks_on_a_cluster_equal_one_without(ray_session, tmp_path, alone):
    folder = make_run(tmp_path, documents=200, total=1920)
    here = train(open_run(str(folder), None, str(tmp_path / "here"), []), alone, None, lambda _text: None)
    address = ray_session.get_runtime_context().gcs_address
    done = command("run", str(folder), "--address", address, "--insecure-local", "--ranks", "2", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    there = json.loads((folder / "train" / "summary.json").read_text())
    assert there["heldout_loss"] == pytest.approx(here["heldout_loss"], abs=1e-4)
    first = json.loads((folder / "train" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["world"] == 2

    broken = command("run", str(folder), "--out", str(tmp_path / "other"), "--address", address, "--insecure-local",
                     "--ranks", "1", "--device", "cuda")
    assert broken.returncode == 2                                    # the exit code of the rank, and its message
    assert "torch sees no CUDA device" in broken.stdout + broken.stderr
    assert "going on" not in broken.stderr                           # what would fail again is not tried again


def test_the_arms_of_a_study_train_on_a_cluster_as_they_do_without(ray_session, tmp_path, forked_arms):
    run = make_run(tmp_path, documents=200, total=1920)
    words = ["ablate", str(run), "--arm", "slow", "optimizer.lr=0.001", "--seeds", "1", "--device", "cpu", "--out"]
    done = command(*words, str(tmp_path / "there"), "--address", ray_session.get_runtime_context().gcs_address,
                   "--insecure-local", "--jobs", "2")
    assert done.returncode == 0, done.stderr
    assert main([*words, str(tmp_path / "here")]) == 0
    there, here = (json.loads((tmp_path / name / "ablate" / "table.json").read_text())["sources"][ALL]["arms"]
                   for name in ("there", "here"))
    for arm in ("base", "slow"):
        assert there[arm]["loss"] == pytest.approx(here[arm]["loss"], abs=1e-4)


def test_a_study_on_a_cluster_survives_the_loss_of_a_rank_and_of_its_own_process(cluster, tmp_path, forked_arms):
    run = make_run(tmp_path / "it's \"a\" $HOME store", documents=400, total=24_000,
                   train={"checkpoint": {"every": 10}})
    words = ["ablate", str(run), "--arm", "slow", "optimizer.lr=0.001", "--seeds", "1", "--jobs", "2", "--device",
             "cpu"]
    assert main([*words, "--out", str(tmp_path / "here")]) == 0
    out, log = run.parent / "there", tmp_path / "log"

    def start() -> subprocess.Popen[bytes]:
        with log.open("ab") as file:
            return subprocess.Popen([sys.executable, "-m", "trainer", *words, "--out", str(out), "--address",
                                     cluster.address], cwd=ROOT, env=cluster.env, stdout=file, stderr=file,
                                    start_new_session=True)

    def begun(event: str, arms: int) -> bool:
        return sum(bool(lines(arm, event)) for arm in out.glob("ablate/*-seed0")) >= arms

    jobs = [start()]
    try:
        both = halted(cluster, lambda: begun("checkpoint", 2), jobs[0], log)
        os.kill(both[0], signal.SIGKILL)
        signal_all(both, signal.SIGCONT)
        left = halted(cluster, lambda: begun("resume", 1), jobs[0], log)
        jobs[0].kill()
        jobs[0].wait()
        signal_all(left, signal.SIGCONT)                             # arms may still write their checkpoints
        jobs.append(start())
        until(lambda: training_process(out / "ablate") == jobs[1].pid, 600, "another start", jobs[1], log)
        jobs[1].send_signal(signal.SIGSTOP)                          # it must not end before another one is refused
        jobs.append(start())
        assert jobs[2].wait(600) == 2, log.read_text()
        jobs[1].send_signal(signal.SIGCONT)
        assert jobs[1].wait(600) == 0, log.read_text()
        assert "trains there" in log.read_text() and "Traceback" not in log.read_text()
    finally:
        for job in jobs:
            job.kill()
            job.wait()
    tables = [json.loads((folder / "ablate" / "table.json").read_text()) for folder in (tmp_path / "here", out)]
    for arm in ("base", "slow"):
        here, there = (one["sources"][ALL]["arms"][arm]["loss"] for one in tables)
        assert there == pytest.approx(here, abs=1e-4)
        steps = [line["step"] for line in standing(lines(out / "ablate" / f"{arm}-seed0", "step", "resume"))
                 if line["event"] == "step"]
        assert steps == list(range(1, steps[-1] + 1))
    written = b"".join(path.read_bytes() for path in [log, *out.rglob("*")] if path.is_file())
    assert cluster.env["RAY_AUTH_TOKEN"].encode() not in written and cluster.address.encode() not in written


@pytest.fixture
def cluster():
    """A Ray cluster with token authentication: a head without CPUs, and two nodes with one CPU each."""
    temp = tempfile.mkdtemp(prefix="tml", dir="/tmp")                # short: Ray's sockets lie below
    env = {**{k: v for k, v in os.environ.items() if not k.startswith("RAY_")}, "TMPDIR": temp, "RAY_TMPDIR": temp,
           "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0",
           "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    made = Cluster(env, nodes=2)
    made.env = env
    yield made
    made.close()
    shutil.rmtree(temp, ignore_errors=True)


def ranks(cluster: Cluster) -> list[int]:
    return [p for node in cluster.nodes for p in node.processes if named(p, "ray::Rank")]


def halted(cluster: Cluster, condition: Callable[[], Any], job: subprocess.Popen[bytes], log: Path) -> list[int]:
    """Wait until `condition()` is true, and stop all ranks (SIGSTOP), so that none ends before a test has done what it
    does then. Returns their pids; the test lets them go on."""
    until(condition, 600, "what a test waits for", job, log)
    pids = signal_all(ranks(cluster), signal.SIGSTOP)
    until(lambda: all(stopped(pid) or not alive(pid) for pid in pids), what="the stop")
    return pids


def test_a_rank_and_a_node_are_lost_and_the_losses_are_those_of_an_undisturbed_run(cluster, tmp_path, alone):
    """Two ranks; one is killed: two again. A node is killed: one. A node joins: two. A node is drained: one, without a
    step lost. The job is stopped, in good order, and begun again, on one."""
    folder = make_run(tmp_path, documents=1000, total=40_000, train={"checkpoint": {"every": 10}})
    train(open_run(str(folder), None, str(tmp_path / "here"), []), alone, None, lambda _text: None)
    out, last = folder / "train", open_run(str(folder), None, None, []).curriculum.steps
    said = tmp_path / "said"

    def start(*more: str) -> subprocess.Popen[bytes]:
        with said.open("a") as log:
            return subprocess.Popen([sys.executable, "-m", "trainer", "run", str(folder), "--address", cluster.address,
                                     *more, "--device", "cpu"], cwd=ROOT, env=cluster.env, stdout=log, stderr=log,
                                    start_new_session=True)

    job = start("--ranks", "2", "--least", "1")

    def wait_for(condition: Callable[[], Any], what: str) -> Any:
        return until(condition, 600, what, job=job, log=said)

    try:
        both = halted(cluster, lambda: lines(out, "checkpoint"), job, said)
        os.kill(both[1], signal.SIGKILL)
        signal_all(both, signal.SIGCONT)
        again = wait_for(lambda: lines(out, "resume"), "a restart")[-1]
        both = halted(cluster, lambda: lines(out, "checkpoint")[-1]["step"] > again["step"], job, said)
        cluster.nodes[1].kill()
        cluster.nodes.pop()
        signal_all(both, signal.SIGCONT)
        [left] = halted(cluster, lambda: len(lines(out, "resume")) > 1, job, said)
        cluster.add()                                                # it must not end before the node has come
        wait_for(lambda: "there is room for all ranks again" in said.read_text(), "room")
        os.kill(left, signal.SIGCONT)
        both = halted(cluster, lambda: len(lines(out, "resume")) > 2, job, said)     # nor before the node is told to go
        done = subprocess.run([sys.executable, "-c", DRAIN, cluster.address], env=cluster.env, capture_output=True,
                              timeout=600)
        assert done.returncode == 0, done.stderr
        wait_for(lambda: "a node is about to go: stopping after this step" in said.read_text(), "the request")
        signal_all(both, signal.SIGCONT)
        both = halted(cluster, lambda: len(lines(out, "resume")) > 3, job, said)
        gone = lines(out, "resume")[-1]
        assert gone["step"] == [line for line in lines(out, "step", "resume") if line["event"] == "step"
                                and line["step"] <= gone["step"]][-1]["step"]
        job.send_signal(signal.SIGTERM)                              # what Ray's job server sends
        wait_for(lambda: "stopping after this step, with a checkpoint (Ctrl-C" in said.read_text(), "the request")
        signal_all(both, signal.SIGCONT)
        assert job.wait(600) == 130, said.read_text()[-4000:]
        stopped = lines(out, "step")[-1]["step"]
        assert lines(out, "checkpoint")[-1]["step"] == stopped < last
        job = start("--ranks", "1")
        assert job.wait(600) == 0, said.read_text()[-4000:]
    finally:
        job.kill()
        job.wait()
    assert [line["world"] for line in lines(out, "start", "resume")] == [2, 2, 1, 2, 1, 1], said.read_text()
    assert "a rank died" in said.read_text() and "training on 1 of 2 ranks" in said.read_text()
    assert cluster.env["RAY_AUTH_TOKEN"] not in said.read_text()
    here, there = ({line["step"]: line["loss"] for line in lines(o, "step")} for o in (tmp_path / "here", out))
    assert len(here) == last
    assert there == pytest.approx(here, abs=1e-4)
