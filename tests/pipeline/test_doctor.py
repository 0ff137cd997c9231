"""`tokenmill doctor`: what it says about machines that are in order and others, here and on the nodes of a real Ray
cluster."""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
import time
from collections import namedtuple
from dataclasses import asdict
from pathlib import Path

import pytest

from pipeline.base.auth import ClusterError
from pipeline.cluster import diagnostics, doctor
from pipeline.cluster.diagnostics import check_store, clock, inspect_node
from pipeline.engine.backends.fingerprint import declared_libraries, fingerprint
from pipeline.store.fs import Store, StoreError

linux = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc and /dev")


def by_name(checks) -> dict[str, dict[str, str]]:
    return {c["name"]: c for c in checks}


@linux
def test_this_machine_and_a_new_store(tmp_path):
    found = by_name(inspect_node(str(tmp_path / "store"))["checks"])
    assert {"open files", "/dev/shm", "scratch: space", "memory", "child processes", "language model", "OCR",
            "store: space", "store: commits", "store: clock"} <= found.keys()
    assert found["store: commits"]["level"] == found["store: clock"]["level"] == "green"
    assert found["child processes"]["level"] == "green"
    assert not any(c["remedy"] for c in found.values() if c["level"] == "green")
    assert not (tmp_path / "store").exists(), "looking at a store makes none"
    (tmp_path / "old" / "runs").mkdir(parents=True)
    list(check_store(Store(tmp_path / "old")))
    assert not list((tmp_path / "old" / "runs").iterdir()), "nothing is left behind"


@linux
def test_few_open_files(monkeypatch):
    for soft, level in ((256, "red"), (2048, "yellow"), (65536, "green"), (resource.RLIM_INFINITY, "green")):
        monkeypatch.setattr(diagnostics.resource, "getrlimit", lambda _, s=soft: (s, 1 << 20))
        [found] = diagnostics._open_files()
        assert found["level"] == level and (level == "green") != ("ulimit -n 65536" in found["remedy"])


@linux
def test_a_full_disk_no_inodes_and_little_shared_memory(monkeypatch, tmp_path):
    usage = shutil.disk_usage(tmp_path)
    Info = namedtuple("Info", "f_bavail f_frsize f_favail f_files f_blocks")
    for info, levels in ((Info(1 << 10, 1 << 10, 5, 100, 1 << 20), ["red", "red"]),
                         (Info(5 << 20, 1 << 10, 50_000, 1 << 20, 1 << 30), ["yellow", "yellow"]),
                         (Info(1 << 30, 1 << 10, 0, 0, 1 << 40), ["green"])):
        monkeypatch.setattr(diagnostics.os, "statvfs", lambda _, i=info: i)
        found = list(diagnostics._space("scratch", tmp_path, "more"))
        assert [c["level"] for c in found] == levels
    monkeypatch.setattr(diagnostics.shutil, "disk_usage", lambda _: usage._replace(free=64 << 20))
    [found] = diagnostics._shm()
    assert found["level"] == "yellow" and "--shm-size" in found["remedy"]


@linux
def test_a_cache_that_scratch_cannot_be_linked_to(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TOKENMILL_CACHE", str(tmp_path / "some" / "cache"))
    assert "cache" not in by_name(diagnostics._scratch())
    if os.stat("/dev/shm").st_dev == tmp_path.stat().st_dev:
        pytest.skip("/dev/shm is on the disk of the tests")
    monkeypatch.setenv("TOKENMILL_CACHE", "/dev/shm/tokenmill-cache")
    found = by_name(diagnostics._scratch())["cache"]
    assert found["level"] == "yellow" and "/dev/shm/tokenmill-cache is on another disk" in found["said"]


@linux
def test_little_memory_for_many_cores(monkeypatch):
    for gigabytes, level in ((1, "red"), (3, "yellow"), (64, "green")):
        monkeypatch.setattr(diagnostics, "memory_use", lambda g=gigabytes: (1 << 28, g << 30))
        monkeypatch.setattr(diagnostics.os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
        [found] = diagnostics._memory()
        assert found["level"] == level, found


def test_systems_that_cannot_have_child_processes(monkeypatch):
    def refuse(_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(diagnostics.os, "memfd_create", refuse, raising=False)
    for platform, level, said in (("darwin", "yellow", "darwin has no parent-death signal"),
                                  ("linux", "red", "memfd_create: Operation not permitted")):
        monkeypatch.setattr(diagnostics.sys, "platform", platform)
        [found] = diagnostics._children()
        assert (found["level"], found["said"]) == (level, said)


def test_models_and_gpus(monkeypatch, tmp_path):
    monkeypatch.setenv("TOKENMILL_MODELS", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    [found] = diagnostics._models()
    assert found["level"] == "yellow" and "tokenmill fetch lid176" in found["remedy"]
    monkeypatch.setattr(diagnostics, "visible_gpus", lambda: ["0", "1"])
    [found] = diagnostics._gpus()
    assert found["level"] == ("green" if Path("/proc/driver/nvidia/version").exists() else "yellow")
    monkeypatch.setattr(diagnostics, "visible_gpus", list)
    assert list(diagnostics._gpus()) == []


def test_stores_that_will_not_do(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("")
    found = by_name(check_store(Store(file)))
    assert found["store: commits"]["level"] == "red" and found["store: commits"]["remedy"]
    [elsewhere] = check_store(Store(tmp_path), witness="runs/.doctor-none")
    assert elsewhere["level"] == "red" and "all nodes share" in elsewhere["remedy"]
    with monkeypatch.context() as m:
        m.setattr(Store, "exists", lambda *_: (_ for _ in ()).throw(StoreError(
            "cannot read s3://b/x: 403; access was refused: see that the credentials of this process may read there")))
        [refused] = check_store(Store(tmp_path), witness="runs/.doctor-none")
    assert refused["level"] == "red" and "403" in refused["said"] and "credentials" in refused["remedy"], \
        "a node without credentials is not one with another store"
    monkeypatch.setattr(Store, "put_absent", lambda *_: True)            # an object store that ignores If-None-Match
    (tmp_path / "runs").mkdir()
    assert by_name(check_store(Store(tmp_path)))["store: commits"]["level"] == "red"


def test_an_object_store_is_looked_at_too():
    found = by_name(check_store(Store("memory://doctor/store")))
    assert found["store: commits"]["level"] == "green"
    assert not list(Store("memory://doctor/store").list("runs"))


def test_clocks():
    assert [clock("clock", off, "it")["level"] for off in (0.0, 30.0, 1000.0)] == ["green", "yellow", "red"]


def cluster(monkeypatch, *, change=None, error="", open_=False, dashboard="127.0.0.1:8265", late=0.0):
    """Fake what `doctor` sees of a cluster of one node."""
    from pipeline.cluster import jobs

    def check_gcs(address, insecure_local=False):
        if open_ and not insecure_local:
            raise ClusterError("10.0.0.1:6379 is open: anybody who reaches it can run code on it; set RAY_AUTH_MODE")
        return not open_

    def on_every_node(address, target, arguments):
        theirs = {**asdict(fingerprint(declared_libraries())), **(change or {})}
        now = time.time()
        node = {"name": "n1", "id": "1", "began": now, "ended": now}
        asked = {"fingerprint": theirs, "time": now + late, "checks": []}
        return {"dashboard": dashboard, "nodes": [{**node, **({"error": error} if error else {"result": asked})}]}

    monkeypatch.setattr(jobs, "check_gcs", check_gcs)
    monkeypatch.setattr(jobs, "on_every_node", on_every_node)
    found = doctor.diagnose(None, "10.0.0.1:6379")
    return found, {(c["where"], c["name"]): c for c in found["checks"]}


def test_a_cluster_in_order(monkeypatch):
    _, found = cluster(monkeypatch)
    assert all(found[key]["level"] == "green" for key in (
        ("cluster", "token authentication"), ("cluster", "dashboard"), ("n1", "code and versions"), ("n1", "clock")))


@pytest.mark.parametrize(("how", "key", "level", "said"), [
    ({"change": {"python": "3.9.1"}}, ("n1", "code and versions"), "red", "Python 3.9.1 instead of"),
    ({"change": {"code": "0" * 64}}, ("n1", "code and versions"), "red", "other code"),
    ({"error": "ModuleNotFoundError: No module named 'pipeline'"}, ("n1", "answers"), "red", "No module named"),
    ({"dashboard": "0.0.0.0:8265"}, ("cluster", "dashboard"), "yellow", "0.0.0.0:8265"),
    ({"late": 60.0}, ("n1", "clock"), "yellow", "60.0 s away"),
    ({"late": -4000.0}, ("n1", "clock"), "red", "away from the clock here"),
    ({"open_": True}, ("cluster", "token authentication"), "red", "is open"),
])
def test_a_cluster_out_of_order(monkeypatch, how, key, level, said):
    document, found = cluster(monkeypatch, **how)
    assert found[key]["level"] == level and said in found[key]["said"] and found[key]["remedy"]
    assert document["worst"] == "red" or level == "yellow"
    if how.get("open_"):
        assert not any(where == "n1" for where, _ in found), "nothing is run on an open cluster"


@linux
def test_the_command(tokenmill, tmp_path, monkeypatch):
    said = tokenmill("doctor", "--store", tmp_path / "store", "--json")
    document = json.loads(said.out)
    assert said.code == (1 if document["worst"] == "red" else 0)
    monkeypatch.setattr(diagnostics.resource, "getrlimit", lambda _: (100, 100))
    shown = tokenmill("doctor")
    assert shown.code == 1 and "red     open files" in shown.out and "→ ulimit -n 65536" in shown.out
    assert tokenmill("doctor", "--address", "http://127.0.0.1:1").code == 2


@linux
@pytest.mark.ray
def test_every_node_of_a_cluster_is_asked(ray_session, tmp_path):
    """On real Ray: the function runs in a worker process of every node, errors come back as such."""
    from pipeline.cluster.jobs import on_every_node

    address = ray_session.get_runtime_context().gcs_address
    store = Store(tmp_path / "store")
    store.write("runs/here", b"")
    found = on_every_node(address, "pipeline.cluster.diagnostics:inspect_node", {"store_root": store.root,
                                                                       "witness": "runs/here"}, timeout=600)
    [node] = found["nodes"]
    assert node["began"] - 1 < node["result"]["time"] < node["ended"] + 1
    assert node["result"]["fingerprint"] == asdict(fingerprint(declared_libraries()))
    assert by_name(node["result"]["checks"])["store: commits"]["level"] == "green"
    [node] = on_every_node(address, "pipeline.cluster.diagnostics:inspect_node", {"nonsense": 1}, timeout=600)["nodes"]
    assert "nonsense" in node["error"]
    [pid] = [n["result"] for n in on_every_node(address, "os:getpid", {}, timeout=600)["nodes"]]
    assert pid != os.getpid()
    assert ray_session.is_initialized(), "it was not ours to shut down"
