"""Several servers, submitters and cancellers use the queue of one store, in virtual time, with faults from a seed.

Real are `Queue`, `Dispatcher`, the beginning and end of a driver, `Log` with its lease, and `Store` and `Remote` with
their retries. Object storage, time and processes are simulated. At every request, another participant may act before
the request returns, or the process that makes it may be killed: a server, a driver, or both. Such actions are nested,
as in `world`.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from pipeline.cluster.dispatch import MOST_DEATHS, ClaimLost, Dispatcher, begin, end
from pipeline.cluster.queue import ENDED, STATES, Queue, QueueEntry, Submission
from pipeline.store.errors import StoreError
from pipeline.store.lease import Holder, LeaseHeld
from pipeline.store.log import Fenced, Log
from tests.simulate.clock import VirtualClock
from tests.simulate.faults import Faults
from tests.simulate.storage import Bucket, Requests, SimStore

RUNS = 4
FAULTS_S, LONGEST_S = 900.0, 6000.0
DEEPEST = 4


class Killed(BaseException):
    """Raised in a simulated process that is killed."""


class Process:
    """A server or a driver. At each of its requests it may be killed, or others may act."""

    def __init__(self, world: World, name: str, host: str) -> None:
        self.world, self.name, self.living, self.busy = world, name, True, False
        self.holder: Holder = {"host": host, "boot": "b", "space": "s", "pid": len(world.processes) + 2,
                               "started": "1", "run": ""}
        world.processes.append(self)
        self.clock = SharedClock(world, len(world.processes))
        self.store = SimStore(Requests(world, name, self.point), self.clock)

    def point(self, what: str) -> None:
        if not self.living:
            raise Killed
        rng = self.world.rng
        if not self.world.faults.over and rng.random() < self.world.kill:
            self.living = False
            raise Killed
        if self.world.depth < DEEPEST and rng.random() < 0.1:
            self.world.depth += 1
            try:
                self.world.turn()
            finally:
                self.world.depth -= 1
        if not self.living:
            raise Killed

    def do(self, action: Callable[[], Any]) -> Any:
        """Run an action of this process, unless it is dead or in the middle of another action."""
        if self.busy or not self.living:
            return None
        self.busy = True
        try:
            return action()
        except Killed:
            return None
        except (StoreError, OSError):                # storage failed: the next turn tries again
            return None
        finally:
            self.busy = False


class SharedClock(VirtualClock):
    """The clock of a process. Sleeping lets the time of the world pass."""

    def __init__(self, world: World, seed: int) -> None:
        super().__init__(1000 * world.seed + seed)
        self.world = world

    def now(self) -> float:
        return self.world.time

    def wall(self) -> float:
        return super().wall() + self.world.time

    def sleep(self, seconds: float) -> None:
        self.world.advance(seconds)


class Server(Process):
    def __init__(self, world: World, name: str, host: str) -> None:
        super().__init__(world, name, host)
        self.host = host
        self.queue = Queue(self.store, self.clock)
        self.dispatcher = Dispatcher(self.queue, self.start, self.clock, self.holder, self.sees)

    def sees(self, holder: Any) -> bool | None:
        if holder["host"] != self.host:
            return None
        return any(p.living and p.holder["pid"] == holder["pid"] for p in self.world.processes)

    def start(self, entry: QueueEntry) -> Driver:
        self.point("start")                          # claimed, and dead before the driver is there
        claim = (entry.number, len(entry.events))
        self.world.started[claim] += 1
        return Driver(self.world, self.host, entry, claim)

    def step(self) -> None:
        self.dispatcher.tick()


class Driver(Process):
    """Does what `tokenmill resume --queued` does, but waits instead of running tasks."""

    def __init__(self, world: World, host: str, entry: QueueEntry, claim: tuple[int, int]) -> None:
        super().__init__(world, f"driver{len(world.processes)}", host)
        self.entry, self.claim, self.ended = entry, claim, False
        self.holder["run"] = entry.run
        self.queue = Queue(self.store, self.clock)
        self.log: Log | None = None
        self.outcome = ""
        self.until = 0.0

    def poll(self) -> int | None:
        return None if self.living and not self.ended else 0

    def step(self) -> None:
        try:
            self._step()
        except ClaimLost:
            self.ended = True
        except (LeaseHeld, Fenced):
            self.outcome, self.log = "returned", None
        except StoreError:
            self.living = False                      # a driver that cannot commit ends, and cannot say so either
        if self.ended:
            self.living = False

    def _step(self) -> None:
        if self.until == 0.0:
            begun = begin(self.queue, *self.claim, self.holder)
            assert begun.events[self.claim[1]].holder == self.holder     # the claim that it was started for
            self.until = self.world.time + self.world.rng.uniform(5, 120)
        elif self.outcome:
            end(self.queue, *self.claim, self.outcome)
            self.ended = True
        elif self.log is None:
            self.log = Log.open(self.store, run=self.entry.run, clock=self.clock, holder=self.holder, threaded=False)
        elif self.world.time < self.until:
            self.log.tend()
            if self.queue.entry(self.claim[0]).stopping:
                self.outcome = "cancelled"
                self.log.close()
        else:
            self.log.check_lease()
            self.world.completed[self.entry.run] += 1
            self.outcome = "done"
            self.log.close()


class World:
    def __init__(self, seed: int, kill: float = 0.002) -> None:
        self.seed, self.kill, self.time, self.depth = seed, kill, 0.0, 0
        self.rng, self.faults = random.Random(f"queue {seed}"), Faults(seed)
        self.bucket = Bucket(lambda: self.time)
        self.bucket.watch = self.audit
        self.effects: list[tuple[float, Callable[[], Any]]] = []
        self.processes: list[Process] = []
        self.events: dict[int, list[str]] = {}
        self.started: Counter[tuple[int, int]] = Counter()
        self.completed: Counter[str] = Counter()
        self.servers = [Server(self, f"server{i}", host) for i, host in enumerate(("a", "a", "b"))]
        self.wanted = [Submission(f"r{i}", f"run{i}", "operator", "n", "/b", f"text {i}") for i in range(RUNS)]
        self.cancelled: set[str] = set()

    def later(self, seconds: float, effect: Callable[[], Any]) -> None:
        self.effects.append((self.time + seconds, effect))

    def advance(self, seconds: float) -> None:
        self.time += seconds
        due = [e for e in self.effects if e[0] <= self.time]
        self.effects = [e for e in self.effects if e[0] > self.time]
        for _, effect in due:
            effect()
        self.faults.over = self.faults.over or self.time > FAULTS_S

    def audit(self, how: str, path: str, data: bytes, before: bytes | None, who: str) -> None:
        """Check every stored file: none is ever changed, and an entry only starts after those before it have ended."""
        if not path.startswith("queue/"):
            return
        assert how == "create", f"{path} was changed by {who}"
        number, event = int(path.split("/")[1]), int(path.split("/")[2][:4])
        kind = json.loads(data.partition(b"\n")[2])["event"]["kind"]
        events = self.events.setdefault(number, [])
        assert len(events) == event and (not events or events[-1] not in ENDED), f"{path} after {events}"
        if kind == "start":
            assert all(self.events[n][-1] in ENDED for n in self.events if n < number), self.events
        if kind == "running":
            assert events[-1] == "start"
        events.append(kind)

    def turn(self) -> None:
        """Let one random participant act."""
        who = self.rng.choice([p for p in self.processes if p.living] or self.servers)
        if self.rng.random() < 0.05:
            self.submit(who)
        else:
            who.do(who.step)

    def submit(self, who: Process) -> None:
        """Send a request, perhaps one that was sent before, and at times to two servers at once; or cancel a run."""
        submission = self.rng.choice(self.wanted)
        if isinstance(who, Server):
            entry = who.do(lambda: who.queue.submit(submission))
            if entry is not None and not self.faults.over and self.rng.random() < 0.05:
                self.cancelled.add(entry.run)
                who.do(lambda: who.queue.cancel(entry.number, "operator"))

    def run(self) -> None:
        while self.time < LONGEST_S:
            self.turn()
            self.advance(self.rng.uniform(0.0, 2.0))
            for server in [s for s in self.servers if not s.living]:
                if self.rng.random() < 0.1 or self.faults.over:
                    self.servers.remove(server)
                    self.servers.append(Server(self, f"{server.name}'", server.host))
            if self.faults.over and not self.effects:
                for submission in self.wanted:
                    self.servers[0].do(lambda s=submission: self.servers[0].queue.submit(s))
                if len(self.events) == RUNS and all(e[-1] in ENDED for e in self.events.values()):
                    return
        raise AssertionError(f"seed {self.seed}: not ended: {self.events}")


@pytest.mark.parametrize("first", range(0, 60, 10))
def test_every_request_runs_once_whatever_dies(first):
    for seed in range(first, first + 10):
        world = World(seed)
        world.run()
        entries = Queue(SimStore(Requests(world, "reader"), SharedClock(world, 0))).entries()
        assert sorted(e.request for e in entries) == [s.request for s in world.wanted], seed       # one a request
        assert all(count == 1 for count in world.started.values()), seed                           # one driver a claim
        for entry in entries:
            assert [e.kind for e in entry.events] == world.events[entry.number]
            if entry.state == "done":
                assert world.completed[entry.run] >= 1, seed
            elif entry.state == "cancelled":
                assert entry.run in world.cancelled, seed
            else:
                assert entry.deaths(0) >= MOST_DEATHS, seed


def test_without_faults_every_run_runs_exactly_once():
    world = World(7, kill=0.0)
    world.faults.over = True
    world.run()
    assert world.completed == {f"run{i}": 1 for i in range(RUNS)}
    assert all(STATES[e[-1]] == "done" and e.count("start") == 1 for e in world.events.values())
