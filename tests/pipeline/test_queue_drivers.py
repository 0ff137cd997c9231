"""The queue of a store with real drivers, which are killed, fail, or are told to end."""

from __future__ import annotations

import json
import signal
import subprocess
from typing import Any

import pytest

from pipeline.cluster.attempts import facts_of
from pipeline.cluster.dispatch import Dispatcher, DriverOptions, start_driver
from pipeline.cluster.queue import Queue, QueueEntry
from pipeline.store.fs import Store
from pipeline.store.log import Log
from tests.corpus import sentences
from tests.pipeline.test_queue import submission
from tests.processes import until

RECIPE = """
version: 1
code: [held.py]
sources: {docs: {read: text, path: docs}}
datasets:
  whole: {from: docs, steps: []}
  clean: {from: whole, steps: ['held:Held', {gopher_quality: {min_doc_words: 5}}]}
run: {partition: 2KB}
"""
#: while the file `hold` is there, a driver writes `held` and waits at a document of its second pass
STAGE = """
from pathlib import Path
from time import sleep

from stages.stage import Stage


class Held(Stage):
    '''Waits at one document.'''
    name = "held"

    def process(self, doc):
        folder = Path(__file__).parent
        while doc.locator["file"].endswith("d20.txt") and (folder / "hold").exists():
            (folder / "held").touch()
            sleep(0.01)
"""


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


@pytest.fixture
def data(tmp_path):
    (tmp_path / "data" / "docs").mkdir(parents=True)
    prose = sentences()
    for i in range(40):
        (tmp_path / "data" / "docs" / f"d{i:02d}.txt").write_text("\n".join(prose[i:i + 8]))
    (tmp_path / "data" / "held.py").write_text(STAGE)
    (tmp_path / "data" / "hold").touch()
    yield tmp_path / "data"
    (tmp_path / "data" / "hold").unlink(missing_ok=True)       # a driver that a failed test left ends


class RealServer:
    """A dispatcher of the queue that starts real drivers."""

    def __init__(self, store: Store, roots: tuple[str, ...]) -> None:
        self.queue, self.drivers = Queue(store), []
        options = DriverOptions(backend="inline", roots=roots, allow_code=True)

        def start(entry: QueueEntry) -> subprocess.Popen[bytes]:
            self.drivers.append(start_driver(store, options, entry))
            return self.drivers[-1]

        self.dispatcher = Dispatcher(self.queue, start)

    def ended(self) -> bool:
        self.dispatcher.tick()
        return all(entry.ended for entry in self.queue.entries())


@pytest.mark.slow
def test_a_killed_server_and_a_killed_driver_lose_nothing(store, data):
    """The driver is killed in the middle of its run, and its server with it; the next server starts it again, and
    then the run that waits. A server that comes while a driver runs leaves it alone."""
    first = RealServer(store, (str(data),))
    for number in (1, 2):
        first.queue.submit(submission(number, base=str(data), text=RECIPE.replace("5}", f"{number + 4}}}")))
    first.dispatcher.tick()
    until(lambda: (data / "held").exists() and len(Log.read(store)) > 4, job=first.drivers[0])
    second = RealServer(store, (str(data),))                 # the first one is gone, its driver is not
    second.dispatcher.tick()
    assert not second.drivers
    first.drivers[0].send_signal(signal.SIGKILL)
    first.drivers[0].wait()
    assert second.queue.entry(1).state == "running"
    (data / "hold").unlink()
    until(second.ended)
    assert [e.state for e in second.queue.entries()] == ["done", "done"]
    kinds = [[e.kind for e in entry.events] for entry in second.queue.entries()]
    assert kinds == [["submitted", "start", "running", "start", "running", "done"],
                     ["submitted", "start", "running", "done"]]
    assert facts_of(store, "run-1")["attempt"] == 2
    records = [record for path in store.list("log") if path.count("/") == 1 for record in records_of(store.read(path))]
    assert len(records) == len({record["key"] for record in records})          # no task was committed twice
    assert {record["attempt"][:8] for record in records} == {"00000001", "00000002", "00000003"}   # by all drivers


def records_of(segment: bytes) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = json.loads(segment)["body"].get("records", [])
    return records


def test_a_driver_reports_why_it_failed_and_when_it_was_told_to_end(store, data):
    server = RealServer(store, (str(data),))
    server.queue.submit(submission(1, base=str(data), text=RECIPE.replace("path: docs", "path: /etc/passwd")))
    server.queue.submit(submission(2, base=str(data), text=RECIPE))
    until(lambda: server.dispatcher.tick() or (data / "held").exists())
    failed = server.queue.entry(1)
    assert failed.state == "failed" and "sources.docs.path" in failed.last.error
    assert "/etc/passwd" not in server.queue.entry(2).last.error
    server.drivers[-1].terminate()                            # the machine is shut down: nobody cancelled the run
    server.drivers[-1].wait()
    assert server.queue.entry(2).state == "waiting"
    (data / "hold").unlink()
    until(server.ended)
    assert server.queue.entry(2).state == "done"
