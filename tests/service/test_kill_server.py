"""Real servers and drivers are killed during a run: no run is lost, and none runs twice."""

from __future__ import annotations

import json
import os
import signal
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
from tests.service.conftest import reserved_port
from tests.service.test_submit import RECIPE

RUNS = 2
#: keeps a run in the middle of a document until the test has killed what it kills
GATE = """
import time
from pathlib import Path
from stages.stage import Stage

HERE = Path(__file__).parent


class Gate(Stage):
    name = "gate"

    def process(self, doc):
        if doc.locator["file"] == "dDOCUMENT.txt":
            (HERE / "reached").touch()
            while not (HERE / "open").exists():
                time.sleep(0.05)
"""


def serve(store: Path, data: Path, port: int) -> tuple[subprocess.Popen[bytes], httpx.Client]:
    """Start a server in a process of its own, and wait until it answers."""
    command = [sys.executable, "-m", "pipeline.cli", "serve", "--store", f"s={store}", "--port", str(port),
               "--allow-root", str(data), "--backend", "inline", "--allow-custom-stages"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}/api/v1/stores/s", headers={"X-Tokenmill": "1"},
                          timeout=300)

    def answers() -> bool:
        try:
            return client.get("/queue").status_code == 200
        except httpx.TransportError:
            return False

    until(answers, what="an answer", job=server)
    return server, client


@pytest.mark.parametrize(("document", "killed"), rest_slow(1, [
    (15, ("server", "driver")), (0, ("server",)), (29, ("driver",))]))
def test_a_killed_server_and_its_killed_driver_lose_no_run(tmp_path, document, killed):
    data, recipe = tmp_path / "data", RECIPE.replace("steps: [", "steps: ['gate:Gate', ") + "code: [gate.py]\n"
    (data / "docs").mkdir(parents=True)
    (tmp_path / "store").mkdir()
    (data / "gate.py").write_text(GATE.replace("DOCUMENT", f"{document:02d}"))
    for i in range(30):
        (data / "docs" / f"d{i:02d}.txt").write_text("\n".join(sentences()[i:i + 8]))
    queue = Queue(Store(tmp_path / "store"))
    with reserved_port() as port:
        server, client = serve(tmp_path / "store", data, port)
        try:
            submit(client, recipe)
            until((data / "reached").exists, what="the start of the first run")
            driver = queue.entry(1)
            if "server" in killed:
                server.kill()
                server.wait()
            if "driver" in killed:
                os.kill(driver.last.holder["pid"], signal.SIGKILL)
            (data / "open").touch()
            if "server" in killed:
                server, client = serve(tmp_path / "store", data, port)
            submit(client, recipe)                                 # whoever got no answer asks again
            until(lambda: all(entry.ended for entry in queue.entries()), what="the end of the runs")
        finally:
            server.kill()
            server.wait()
    entries = queue.entries()
    assert [e.state for e in entries] == ["done"] * RUNS
    kinds = [[e.kind for e in entry.events] for entry in entries]
    assert kinds[1] == ["submitted", "start", "running", "done"]
    assert kinds[0] == ["submitted", *["start", "running"] * (2 if "driver" in killed else 1), "done"]
    keys = [record["key"] for path in sorted((tmp_path / "store" / "log").glob("*.json"))
            for record in json.loads(path.read_bytes())["body"].get("records", ())]
    assert len(keys) == len(set(keys)) > 10                        # no task was committed twice


def submit(client: httpx.Client, recipe: str) -> None:
    """Submit the recipe RUNS times, each time with another threshold."""
    for i in range(RUNS):
        body = {"recipe": recipe, "overrides": [f"datasets.clean.steps.gopher_quality.min_doc_words={5 + i}"]}
        client.post("/queue", json=body, headers={"Idempotency-Key": f"k{i}"}).raise_for_status()
