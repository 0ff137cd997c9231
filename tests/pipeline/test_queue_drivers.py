"""The queue of a store with real drivers, which are killed, fail, or are told to end."""

from __future__ import annotations

import json
import signal
import subprocess

import pytest

from pipeline.cluster.attempts import facts_of
from pipeline.cluster.dispatch import Dispatcher, DriverOptions, start_driver
from pipeline.cluster.queue import Queue, QueueEntry
from pipeline.store.fs import Store
from tests.corpus import sentences
from tests.pipeline.test_queue import submission
from tests.processes import until

RECIPE = """
version: 1
sources: {docs: {read: text, path: docs}}
datasets:
  clean: {from: docs, steps: [{gopher_quality: {min_doc_words: 5}}]}
run: {partition: 2KB}
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
    return tmp_path / "data"


class RealServer:
    """A dispatcher of the queue that starts real drivers."""

    def __init__(self, store: Store, roots: tuple[str, ...]) -> None:
        self.queue, self.drivers = Queue(store), []
        options = DriverOptions(backend="inline", roots=roots)

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
    until(lambda: first.queue.entry(1).state == "running" and len(list(store.list("objects"))) > 4, 180)
    second = RealServer(store, (str(data),))                 # the first one is gone, its driver is not
    second.dispatcher.tick()
    assert not second.drivers
    first.drivers[0].send_signal(signal.SIGKILL)
    first.drivers[0].wait()
    assert second.queue.entry(1).state == "running"
    until(second.ended, 180)
    assert [e.state for e in second.queue.entries()] == ["done", "done"]
    kinds = [[e.kind for e in entry.events] for entry in second.queue.entries()]
    assert kinds == [["submitted", "start", "running", "start", "running", "done"],
                     ["submitted", "start", "running", "done"]]
    assert facts_of(store, "run-1")["attempt"] == 2
    records = [json.loads(line) for path in store.list("log") if path.count("/") == 1
               for line in _records(store.read(path))]
    assert len(records) == len({r["key"] for r in records}) > 8                # no task was committed twice


def _records(segment: bytes) -> list[str]:
    body = json.loads(segment)["body"]
    return [json.dumps(record) for record in body.get("records", ())]


def test_a_driver_reports_why_it_failed_and_when_it_was_told_to_end(store, data):
    server = RealServer(store, (str(data / "docs"),))
    server.queue.submit(submission(1, base=str(data), text=RECIPE.replace("path: docs", "path: /etc/passwd")))
    server.queue.submit(submission(2, base=str(data), text=RECIPE))
    until(lambda: server.dispatcher.tick() or server.queue.entry(2).state == "running", 180)
    failed = server.queue.entry(1)
    assert failed.state == "failed" and "sources.docs.path" in failed.last.error
    assert "/etc/passwd" not in server.queue.entry(2).last.error
    server.drivers[-1].terminate()                            # the machine is shut down: nobody cancelled the run
    server.drivers[-1].wait()
    returned = server.queue.entry(2)
    assert returned.state in ("waiting", "done")
    until(server.ended, 180)
    assert server.queue.entry(2).state == "done"
