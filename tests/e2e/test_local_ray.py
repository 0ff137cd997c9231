"""A Ray that the run starts by itself, on a busy machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.base.auth import ClusterError
from pipeline.store.fs import Store

ROOT = Path(__file__).resolve().parents[2]
#: a first start of Ray that is given up when all of its processes run, and what runs after the second
LATE = """
import json, sys, time
from pathlib import Path
from ray._private import services
from pipeline.engine.backends.ray_backend import RayBackend
from pipeline.base.auth import ClusterError
from pipeline.store.fs import Store

real, asked = services.get_node, []

def get_node(*about):
    asked.append(about)
    if len(asked) == 1:
        raise Exception("The current node timed out during startup.")
    return real(*about)

def running(name):
    found = 0
    for pid in Path("/proc").glob("[0-9]*"):
        try:
            command = (pid / "cmdline").read_bytes()
        except OSError:
            continue
        found += backend._temp.path.encode() in command and command.split(b"\\0")[0].endswith(name)
    return found

services.get_node = get_node
backend = RayBackend(Store(sys.argv[1]), workers=1, object_store_mb=80)
backend.start()
for _ in range(600):                              # killed processes need a moment to end
    counts = [running(b"/gcs_server"), running(b"/raylet")]
    if counts == [1, 1]:
        break
    time.sleep(0.1)
try:
    print(json.dumps([len(asked) > 1, *counts]))
finally:
    backend.close()
"""


@pytest.fixture
def backends():
    """The module of the Ray backend. It is imported by a test, not while tests are collected, because Ray reads its
    authentication mode from the environment when it is imported."""
    return pytest.importorskip("pipeline.engine.backends.ray_backend", reason="ray is not installed")


@pytest.mark.parametrize("bad", [0, 2, 3])
def test_a_ray_that_did_not_come_up_in_its_time_is_started_again(backends, tmp_path, monkeypatch, caplog, bad):
    """Ray gives its own processes a fixed time to start: the agents of a node 15 s, the node 30 s."""
    starts: list[dict[str, Any]] = []
    ended = []

    def init(**how: Any) -> None:
        starts.append(how)
        if len(starts) <= bad:
            raise Exception("The current node timed out during startup.")

    from pipeline.engine.backends.ray_local import STARTS

    monkeypatch.setattr(backends.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(backends.ray, "init", init)
    monkeypatch.setattr(backends.ray, "shutdown", lambda: ended.append(len(starts)))
    backend = backends.RayBackend(Store(tmp_path), workers=1)
    try:
        if bad == STARTS:
            with pytest.raises(ClusterError, match=r"timed out during startup\.\); .* --backend process"):
                backend.start()
        else:
            backend.start()
    finally:
        backend.close()
    assert len(starts) == min(bad + 1, STARTS) and all(how == starts[0] for how in starts)
    assert ended == list(range(1, bad + 1)), "what is left of one that failed goes before the next"
    assert len([r for r in caplog.records if "once more" in r.message]) == min(bad, 2)


@pytest.mark.parametrize("address", [None, "10.0.0.1:6379"])
def test_workers_of_ray_import_nothing_from_the_current_folder(backends, tmp_path, monkeypatch, address):
    """Ray puts the folder in which `ray.init` is called first on their import path."""
    folders: list[str] = []

    def init(**_: Any) -> None:
        folders.append(os.getcwd())
        raise Exception("no")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(backends.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(backends.ray, "init", init)
    backend = backends.RayBackend(Store(tmp_path / "store"), workers=1, address=address)
    with pytest.raises(ClusterError):
        backend.start()
    backend.close()
    assert {*folders} == {"/"} and os.getcwd() == str(tmp_path)


@pytest.mark.slow
@pytest.mark.ray                                  # in turn with the tests that use Ray
def test_of_a_ray_that_did_not_come_up_nothing_runs_on(backends, tmp_path):
    done = subprocess.run([sys.executable, "-c", LATE, str(tmp_path)], capture_output=True, text=True, timeout=900,
                          check=False, cwd=ROOT, env={**os.environ, "RAY_AUTH_MODE": "disabled"})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [True, 1, 1]
