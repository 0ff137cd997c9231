"""The queue of a store: positions, requests that are sent twice, cancellations, and claims. Tests with real drivers are
in test_queue_drivers.py, races in virtual time in tests/simulate/test_queue.py."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from pipeline.cluster.attempts import asked_to_stop
from pipeline.cluster.dispatch import (
    MOST_DEATHS,
    START_S,
    UNSEEN_S,
    ClaimLost,
    Dispatcher,
    begin,
    end,
)
from pipeline.cluster.queue import (
    DamagedQueue,
    Event,
    Queue,
    QueueEntry,
    QueueError,
    RequestReused,
    RunTaken,
    Submission,
    UnknownEntry,
    event_name,
    places,
)
from pipeline.store.fs import Store
from pipeline.store.lease import PATIENCE_S, Holder, identity
from pipeline.store.log import Log
from tests.simulate.clock import VirtualClock

HERE = identity("")


def submission(number: int, **more: Any) -> Submission:
    return Submission(**{"request": f"request-{number}", "run": f"run-{number}", "by": "operator", "name": "recipe",
                         "base": "/data", "text": "version: 1\n", **more})


def holder(pid: int, host: str = "elsewhere") -> Holder:
    return {"host": host, "boot": "b", "space": "s", "pid": pid, "started": "1", "run": ""}


class Child:
    """Stands in for a driver process, and does nothing."""

    def __init__(self) -> None:
        self.code: int | None = None

    def poll(self) -> int | None:
        return self.code


class Server:
    """A dispatcher of the queue in virtual time, which starts no processes."""

    def __init__(self, store: Store, clock: VirtualClock | None = None, me: Holder = HERE, alive=lambda h: None):
        self.clock = clock or VirtualClock(me["pid"])
        self.queue, self.children, self.alive = Queue(store, self.clock), [], alive
        self.dispatcher = Dispatcher(self.queue, self.start, self.clock, me, lambda holder: self.alive(holder))

    def start(self, entry: QueueEntry) -> Child:
        self.children.append((Child(), entry.number, len(entry.events)))
        return self.children[-1][0]

    def tick(self, seconds: float = 0.0) -> int:
        """Run a round of the dispatcher, `seconds` later. Returns how many drivers it has started so far."""
        self.clock.time += seconds
        self.dispatcher.tick()
        return len(self.children)


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


def states(queue: Queue) -> list[str]:
    return [entry.state for entry in queue.entries()]


# -- submitting ------------------------------------------------------------------------------------------------------
def test_places_count_what_waits(store):
    queue = Queue(store)
    for number in range(4):
        queue.submit(submission(number))
    queue.cancel(2, "operator")
    assert states(queue) == ["waiting", "cancelled", "waiting", "waiting"]
    assert places(queue.entries()) == {1: 1, 3: 2, 4: 3}
    assert [(e.number, e.run, e.by) for e in Queue(store).entries()][2] == (3, "run-2", "operator")


def test_a_request_sent_twice_makes_one_entry(store):
    one, other = Queue(store), Queue(store)
    first = one.submit(submission(1))
    assert other.submit(submission(1)) == first
    assert other.submit(submission(1, by="viewer")).number == first.number
    assert len(one.entries()) == 1
    with pytest.raises(RequestReused, match="request-1"):
        other.submit(submission(1, text="version: 1\n# another\n"))


def test_a_run_in_the_queue_keeps_its_name_from_other_submissions(store):
    """Two servers may both have found the name free before one of them puts its entry."""
    one, other = Queue(store), Queue(store)
    first = one.submit(submission(1, run="run"))
    with pytest.raises(RunTaken, match="'run'"):
        other.submit(submission(2, run="run", text="version: 1\n# another\n"))
    assert other.submit(submission(3, run="run", resumes=True)) == first
    one.cancel(1, "operator")
    assert other.submit(submission(2, run="run", text="version: 1\n# another\n")).number == 2


def test_two_requests_to_resume_a_run_make_one_entry(store):
    """Two servers may both have found the run ended before one of them put its entry."""
    one, other = Queue(store), Queue(store)
    first = one.submit(submission(1, run="run", resumes=True))
    assert other.submit(submission(2, run="run", resumes=True)) == first
    assert len(one.entries()) == 1


def test_requests_sent_by_many_at_once_make_one_entry_each(store):
    queues = [Queue(store) for _ in range(8)]
    ready = threading.Barrier(len(queues))

    def submit(queue: Queue, mine: int) -> None:
        ready.wait()
        for number in (0, mine):
            queue.submit(submission(number))

    threads = [threading.Thread(target=submit, args=(q, i // 2 + 1)) for i, q in enumerate(queues)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    entries = Queue(store).entries()
    assert sorted(e.request for e in entries) == [f"request-{n}" for n in range(5)]
    assert [e.number for e in entries] == [1, 2, 3, 4, 5]


def test_what_was_submitted_comes_back_whole(store):
    given = submission(1, text="a: ü\n", overrides=("a=1", "b=2"), inputs=("/x",), verify_inputs=True, resumes=True)
    entry = Queue(store).submit(given)
    assert Queue(store).submission(entry.number) == given
    with pytest.raises(UnknownEntry):
        Queue(store).submission(2)


def test_a_damaged_file_is_named(store):
    Queue(store).submit(submission(1))
    path = Path(store.at(event_name(1, 0)))
    path.write_bytes(path.read_bytes().replace(b"run-1", b"run-2"))
    with pytest.raises(DamagedQueue, match="00000001"):
        Queue(store).entries()


def test_an_entry_whose_run_would_be_a_path_elsewhere_is_refused(store):
    """Whoever may write to a store must not have the server's drivers write elsewhere."""
    with pytest.raises(QueueError):
        Queue(store).submit(submission(1, run="../../elsewhere"))
    Queue(store).submit(submission(1))
    body = store.read(event_name(1, 0)).partition(b"\n")[2].replace(b'"run-1"', b'"../../x"')
    store.write(event_name(1, 0), hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
    with pytest.raises(DamagedQueue, match="names no run"):
        Queue(store).entries()


def test_who_only_looks_sees_what_was_a_second_ago(store):
    clock = VirtualClock()
    mine, other = Queue(store, clock), Queue(store, clock)
    assert mine.recent() == []
    other.submit(submission(1))
    assert mine.recent() == []
    clock.time += 1.5
    assert len(mine.recent()) == 1
    mine.submit(submission(2))
    mine.cancel(2, "operator")
    assert [e.state for e in mine.recent()] == ["waiting", "cancelled"]


def test_an_entry_that_was_moved_away_leaves_the_others(store):
    queue = Queue(store)
    for number in range(3):
        queue.submit(submission(number))
    os.rename(Path(store.at(event_name(2, 0))).parent, Path(store.root) / "away")
    again = Queue(store)
    assert [e.number for e in again.entries()] == [1, 3]
    assert again.submit(submission(9)).number == 4


def test_the_queue_is_not_in_the_commit_log(store):
    Queue(store).submit(submission(1))
    assert not list(store.list("log"))


# -- starting --------------------------------------------------------------------------------------------------------
def test_one_at_a_time_in_order(store):
    server = Server(store)
    for number in range(2):
        server.queue.submit(submission(number))
    assert server.tick() == 1 and states(server.queue) == ["starting", "waiting"]
    _, number, event = server.children[0]
    begin(server.queue, number, event, HERE)
    server.alive = lambda h: True
    assert server.tick() == 1 and states(server.queue) == ["running", "waiting"]
    end(server.queue, number, event, "done")
    assert server.tick() == 2 and states(server.queue) == ["done", "starting"]


def test_two_servers_at_once_start_it_once(store):
    servers = [Server(store, me=holder(pid)) for pid in range(6)]
    servers[0].queue.submit(submission(1))
    ready = threading.Barrier(len(servers))

    def tick(server: Server) -> None:
        ready.wait()
        server.tick()

    threads = [threading.Thread(target=tick, args=(server,)) for server in servers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(len(server.children) for server in servers) == 1
    assert [e.kind for e in servers[0].queue.entry(1).events] == ["submitted", "start"]


def test_a_driver_whose_claim_was_taken_over_does_not_run(store):
    late, other = Server(store, me=holder(1)), Server(store, me=holder(2))
    late.queue.submit(submission(1))
    late.tick()
    assert other.tick() == 0
    assert other.tick(START_S + 1) == 1                     # nobody has followed the first claim
    with pytest.raises(ClaimLost):
        begin(Queue(store), *late.children[0][1:], HERE)
    begin(Queue(store), *other.children[0][1:], HERE)
    with pytest.raises(ClaimLost):
        begin(Queue(store), *other.children[0][1:], HERE)   # not twice either
    assert [e.kind for e in late.queue.entry(1).events] == ["submitted", "start", "start", "running"]


def test_a_claim_without_a_driver_of_our_own_is_made_again_at_once(store):
    server = Server(store)
    entry = server.queue.submit(submission(1))
    server.queue.append(entry, "start", holder=HERE)         # stored late, after we took it for failed
    assert server.tick() == 1


def test_a_driver_that_ended_before_it_began_is_started_again(store):
    server = Server(store)
    server.queue.submit(submission(1))
    assert server.tick() == 1 and server.tick() == 1
    server.children[0][0].code = 1
    assert server.tick() == 2


def test_drivers_that_end_without_a_message_are_not_started_for_ever(store):
    server = Server(store)
    server.queue.submit(submission(1))
    for _ in range(MOST_DEATHS + 3):
        server.tick()
        server.children[-1][0].code = -9
    assert len(server.children) == MOST_DEATHS
    assert states(server.queue) == ["failed"] and "resume run-1" in server.queue.entry(1).last.error


def test_a_run_that_makes_progress_may_die_as_often_as_it_likes(store):
    server = Server(store)
    server.queue.submit(submission(1))
    for i in range(3 * MOST_DEATHS):
        store.write("runs/run-1/progress.json", json.dumps(
            {"state": "running", "parts": 99, "done": i // 3, "attempt": 1}).encode())
        server.tick()
        server.children[-1][0].code = -9
    assert len(server.children) == 3 * MOST_DEATHS and states(server.queue) == ["starting"]


def test_a_run_that_dies_after_it_has_finished_tasks_is_started_again(store):
    """The tasks of the latest start count, too: all drivers but the last die without one."""
    server = Server(store)
    server.queue.submit(submission(1))
    for done in (*[0] * MOST_DEATHS, *[5] * MOST_DEATHS):
        store.write("runs/run-1/progress.json", json.dumps({"state": "running", "done": done, "attempt": 1}).encode())
        server.tick()
        server.children[-1][0].code = -9
    assert len(server.children) == 2 * MOST_DEATHS and states(server.queue) == ["starting"]
    server.tick()
    assert states(server.queue) == ["failed"]


@pytest.mark.parametrize(("starts", "done", "deaths"), [
    ([], 0, 0), ([0], 0, 1), ([0], 4, 0), ([0, 0, 0], 0, 3), ([0, 0, 0], 1, 0), ([0, 3, 3], 3, 2), ([0, 3, 3], 4, 0),
    # a start that dies while it plans has counted fewer tasks than there are; the next one finds them again
    ([9, 0, 9, 0], 9, 4), ([9, 0, 9, 0], 10, 0),
    # r: after this start the entry waited again; what the start has finished is not what the start before it has
    (["0r"], 0, 0), ([5, "5r", 8], 8, 2), ([5, "5r", 5], 5, 2), ([5, "7r", 7], 7, 1)])
def test_starts_that_have_finished_nothing_are_counted(starts, done, deaths):
    events = [Event("submitted", "", "")]
    for start in starts:
        tasks, returned, _ = str(start).partition("r")
        events.append(Event("start", "", "", tasks=int(tasks)))
        events += [Event("returned", "", "")] * (returned == "r")
    assert QueueEntry(1, "r", "r", "me", "q", "d", False, tuple(events)).deaths(done) == deaths


def test_a_driver_on_another_host_is_lost_when_its_heartbeat_stands_still(store):
    server = Server(store, me=holder(1), alive=lambda h: None)
    server.queue.submit(submission(1))
    server.tick()
    begin(server.queue, *server.children[0][1:], holder(7, "third"))
    for counter in range(10):
        beat = {"counter": counter, "closed": False, "at": 0.0, "holder": {**holder(7, "third"), "run": "run-1"}}
        store.write("log/heartbeat/00000001.json", json.dumps(beat).encode())
        assert server.tick(UNSEEN_S / 2) == 1
    assert server.tick(UNSEEN_S / 2) == 1
    assert server.tick(UNSEEN_S / 2 + 1) == 2


def test_nothing_starts_while_a_driver_outside_the_queue_holds_the_store(store):
    server = Server(store, alive=lambda h: None)
    server.queue.submit(submission(1))
    log = Log.open(store, run="cli", clock=server.clock, holder=holder(9), threaded=False)
    assert server.tick() == 0
    for _ in range(5):
        server.clock.time += 6.0
        log.tend()
        assert server.tick() == 0
    log.close()
    assert server.tick() == 1


def test_a_dead_driver_outside_the_queue_does_not_hold_the_store(store):
    server = Server(store, alive=lambda h: None)
    server.queue.submit(submission(1))
    Log.open(store, run="cli", clock=server.clock, holder=holder(9), threaded=False)
    assert server.tick() == 0
    assert server.tick(PATIENCE_S + 1) == 1


def test_an_entry_that_was_given_back_waits_in_its_old_place(store):
    server = Server(store)
    for number in range(2):
        server.queue.submit(submission(number))
    server.tick()
    begin(server.queue, *server.children[0][1:], HERE)
    end(server.queue, *server.children[0][1:], "returned", "in use by run 'cli'")
    assert places(server.queue.entries()) == {1: 1, 2: 2}
    assert server.tick() == 2 and server.children[1][1] == 1 and server.queue.entry(1).deaths(0) == 1


def test_an_entry_waits_ever_longer_while_the_cluster_does_not_answer(store):
    server = Server(store)
    for number in range(2):
        server.queue.submit(submission(number))
    pauses = []
    for attempt in range(1, 9):
        pauses.append(0)
        while server.tick(1.0) < attempt:
            pauses[-1] += 1
        assert server.children[-1][1] == 1, "the entry keeps its place"
        begin(server.queue, *server.children[-1][1:], HERE)
        end(server.queue, *server.children[-1][1:], "unreachable", "nothing answers")
        entry = server.queue.entry(1)
        assert (entry.state, entry.last.error, entry.deaths(0)) == ("waiting", "nothing answers", 0)
    assert pauses == [0, 15, 30, 60, 120, 240, 300, 300]
    server.tick(1.0)
    server.tick(300.0)
    begin(server.queue, *server.children[-1][1:], HERE)
    server.children[-1][0].code = 1                          # it has reached the cluster, whose head is lost again
    server.alive = lambda holder: False
    assert server.tick() == 10
    begin(server.queue, *server.children[-1][1:], HERE)
    end(server.queue, *server.children[-1][1:], "unreachable", "nothing answers")
    assert server.queue.entry(1).unreachable() == 1
    server.tick(1.0)
    server.tick(15.0)
    begin(server.queue, *server.children[-1][1:], HERE)
    end(server.queue, *server.children[-1][1:], "done")
    assert server.queue.entry(1).unreachable() == 0 and server.tick() == 12, "the next entry does not pause"


def test_a_cancelled_entry_ends_when_the_cluster_does_not_answer(store):
    server = Server(store)
    server.queue.submit(submission(0))
    server.tick()
    begin(server.queue, *server.children[0][1:], HERE)
    server.queue.cancel(1, "operator")
    end(server.queue, *server.children[0][1:], "unreachable", "nothing answers")
    assert server.queue.entry(1).state == "cancelled"


# -- cancelling ------------------------------------------------------------------------------------------------------
def test_cancel_before_the_driver_has_begun_ends_it(store):
    server = Server(store)
    server.queue.submit(submission(1))
    server.tick()
    assert server.queue.cancel(1, "operator").state == "cancelled"
    with pytest.raises(ClaimLost):
        begin(Queue(store), *server.children[0][1:], HERE)
    assert server.queue.cancel(1, "operator").last.kind == "cancelled"
    assert len(server.queue.entry(1).events) == 3


def test_cancel_asks_a_running_driver_to_stop(store):
    server = Server(store, alive=lambda h: True)
    server.queue.submit(submission(1))
    server.tick()
    attempt = begin(server.queue, *server.children[0][1:], HERE).attempt
    entry = Queue(store).cancel(1, "operator")
    assert (entry.state, entry.stopping) == ("running", True) and asked_to_stop(store, "run-1", attempt)
    end(server.queue, *server.children[0][1:], "cancelled")
    assert states(server.queue) == ["cancelled"]


def test_a_cancelled_run_whose_driver_dies_is_not_started_again(store):
    server = Server(store, alive=lambda h: False)
    server.queue.submit(submission(1))
    server.tick()
    entry = begin(server.queue, *server.children[0][1:], holder(7))
    server.queue.append(entry, "cancelling", by="operator")   # who cancelled it was killed before the driver was asked
    server.alive = lambda h: True
    server.tick()
    assert asked_to_stop(store, "run-1", entry.attempt)
    server.alive = lambda h: False
    assert server.tick() == 1 and states(server.queue) == ["cancelled"]


def test_a_run_that_ends_while_it_is_cancelled_is_done(store):
    server = Server(store)
    server.queue.submit(submission(1))
    server.tick()
    begin(server.queue, *server.children[0][1:], HERE)
    server.queue.cancel(1, "operator")
    end(server.queue, *server.children[0][1:], "done")
    assert states(server.queue) == ["done"] and server.queue.cancel(1, "operator").state == "done"
