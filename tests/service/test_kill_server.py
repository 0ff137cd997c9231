"""Real servers and drivers are killed during a run: no run is lost, and none runs twice."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from pipeline.cluster.queue import Queue
from pipeline.store.fs import Store
from tests.conftest import rest_slow
from tests.corpus import sentences
from tests.processes import until
from tests.service.test_submit import RECIPE

RUNS = 2


def serve(store: Path, data: Path) -> tuple[subprocess.Popen[bytes], httpx.Client]:
    """Start a server in a process of its own, and wait until it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "pipeline.cli", "serve", "--store", f"s={store}", "--port", str(port),
               "--allow-root", str(data), "--backend", "inline"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}/api/v1/stores/s", headers={"X-Tokenmill": "1"},
                          timeout=120)

    def answers() -> bool:
        try:
            return client.get("/queue").status_code == 200
        except httpx.TransportError:
            return False

    until(answers, 120)
    return server, client


@pytest.mark.parametrize(("seed", "killed"), rest_slow(1, [
    (1, ("server", "driver")), (2, ("server",)), (3, ("driver",))]))
def test_a_killed_server_and_its_killed_driver_lose_no_run(tmp_path, seed, killed):
    rng = random.Random(seed)
    (tmp_path / "data" / "docs").mkdir(parents=True)
    (tmp_path / "store").mkdir()
    for i in range(30):
        (tmp_path / "data" / "docs" / f"d{i:02d}.txt").write_text("\n".join(sentences()[i:i + 8]))
    queue = Queue(Store(tmp_path / "store"))
    server, client = serve(tmp_path / "store", tmp_path / "data")
    try:
        for i in range(RUNS):
            body = {"recipe": RECIPE, "overrides": [f"datasets.clean.steps.gopher_quality.min_doc_words={5 + i}"]}
            client.post("/queue", json=body, headers={"Idempotency-Key": f"k{i}"}).raise_for_status()
        until(lambda: queue.entry(1).state == "running", 120)
        results, tasks = tmp_path / "store" / "objects", rng.randint(0, 12)                     # of the run's 15
        until(lambda: len(list(results.glob("*"))) >= tasks, 120, f"task {tasks}")
        if "server" in killed:
            server.kill()
            server.wait()
        driver = queue.entry(1)
        died = "driver" in killed and driver.state == "running"
        if died:
            os.kill(driver.last.holder["pid"], signal.SIGKILL)
        if "server" in killed:
            server, client = serve(tmp_path / "store", tmp_path / "data")
        for i in range(RUNS):                                      # whoever got no answer asks again
            body = {"recipe": RECIPE, "overrides": [f"datasets.clean.steps.gopher_quality.min_doc_words={5 + i}"]}
            client.post("/queue", json=body, headers={"Idempotency-Key": f"k{i}"}).raise_for_status()
        until(lambda: all(entry.ended for entry in queue.entries()), 300)
    finally:
        server.kill()
        server.wait()
    entries = queue.entries()
    assert [e.state for e in entries] == ["done"] * RUNS
    kinds = [[e.kind for e in entry.events] for entry in entries]
    assert kinds[1] == ["submitted", "start", "running", "done"]
    assert kinds[0] == ["submitted", *["start", "running"] * (2 if died else 1), "done"]
    keys = [record["key"] for path in sorted((tmp_path / "store" / "log").glob("*.json"))
            for record in json.loads(path.read_bytes())["body"].get("records", ())]
    assert len(keys) == len(set(keys)) > 10                        # no task was committed twice
