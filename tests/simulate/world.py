"""The world of a history: its time, its storage, and the drivers that come and go."""

from __future__ import annotations

import contextlib
import heapq
import random
from collections.abc import Callable, Collection, Generator, Iterator
from dataclasses import replace

from pipeline.engine.driver.endings import DamageFound
from pipeline.engine.driver.progress import Progress
from pipeline.engine.driver.scheduler import Scheduler
from pipeline.plan.drive import PlannedRun, steps
from pipeline.plan.fresh import FreshNodes
from pipeline.store import garbage
from pipeline.store.lease import Holder
from pipeline.store.log import Log
from pipeline.store.records import PartRecord
from tests.simulate.audit import Audit
from tests.simulate.backend import SimBackend
from tests.simulate.clock import VirtualClock
from tests.simulate.faults import Faults
from tests.simulate.plan import STAGE, Plan
from tests.simulate.storage import Bucket, Requests, SimStore

FAULTS_S = 1500.0            # seconds after which no more faults happen
DRIVERS = 7                  # how many at most; the last one meets no faults
LONGEST_S = 20_000.0         # seconds; a history that takes longer counts as one that hangs
MOST_ACTIONS = 20_000
TEND_S = 0.5
PROGRESS = "runs/r/progress.json"


class Killed(BaseException):
    """Raised in a simulated driver that is killed. Its cleanup may still run, but none of its calls has any effect."""


class DriverClock(VirtualClock):
    """The clock of one driver. While the driver sleeps, the world goes on."""

    def __init__(self, driver: Driver, seed: int) -> None:
        super().__init__(seed)
        self.driver = driver

    def now(self) -> float:
        return self.driver.world.time

    def wall(self) -> float:
        return super().wall() + self.driver.world.time

    def sleep(self, seconds: float) -> None:
        self.driver.point("sleep")
        self.driver.world.advance(self.driver.world.time + seconds)
        self.driver.point("slept")


class SimLog(Log):
    """The product's log, which also tells the auditor of its calls."""

    driver: Driver

    def append(self, record: PartRecord) -> PartRecord:
        first = super().append(record)
        self.driver.world.audit.appended(self.driver, record, first)
        return first

    def flush(self) -> None:
        super().flush()
        self.driver.world.audit.flushed(self.driver)

    def tend(self) -> bool:
        began = self.driver.world.time             # the process may stand still behind the product's look at the clock
        sound = super().tend()
        if sound:
            self.driver.world.audit.tended(self.driver, began)
        return sound

    def check_lease(self) -> None:
        fenced = self.driver.fenced
        super().check_lease()
        if fenced:
            raise self.driver.world.audit.broken(f"{self.driver.name} was fenced, and its log did not say so")


class SimScheduler(Scheduler):
    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Do nothing: a simulated driver must not install signal handlers in this process."""
        yield


class Driver:
    """A simulated process that runs the plan. `resume` lets it go on to its next step."""

    def __init__(self, world: World, number: int, takeover: bool) -> None:
        self.world, self.name, self.takeover = world, f"driver{number}", takeover
        self.state = "alive"                       # killed, failed, done
        self.error: Exception | None = None
        self.began, self.ended = world.time, float("inf")
        self.waiting = False                       # whether it waits in the backend; then the thread of its log may run
        self.collecting = False                    # whether it collects the segments of the log
        self.calls = 0
        self.log: SimLog | None = None
        self.epoch = 0
        self.clock = DriverClock(self, number)
        self.backend = SimBackend(self)
        self.store = SimStore(Requests(world, self.name, self.point), self.clock)
        self.scheduler: Scheduler | None = None
        self._fates = self._plan_fates(random.Random(f"{world.faults.seed} fate {self.name}"))
        self._life = self._live()
        world.later(0.0, self.resume)

    def _plan_fates(self, rng: random.Random) -> dict[int, tuple[str, float]]:
        """Decide at which of its calls the driver is killed or paused, as {number of the call: (kill or pause,
        seconds)}."""
        fates = {}
        for _ in range(3):
            at, pause = int(10 ** rng.uniform(0.3, 3.2)), rng.random() < .5
            length = rng.choice((3.0, 25.0, 60.0)) * rng.uniform(.5, 1.5)
            if rng.random() < .45:
                fates[at] = ("pause", length) if pause else ("kill", 0.0)
        return fates

    @property
    def holder(self) -> Holder:
        """The identity of the driver for the lease. No driver can see the processes of another one, so a driver learns
        from heartbeats whether the holder lives."""
        return {"host": self.name, "boot": "b", "space": "s", "pid": 1, "started": "1", "run": self.name}

    @property
    def fenced(self) -> bool:
        return 0 < self.epoch < self.world.audit.truth.epoch

    def point(self, what: str) -> None:
        """Called at each call of clock, storage or backend. Here the process may be killed, or stand still."""
        self._see_that_it_lives()
        self.calls += 1
        fate, seconds = self._fates.pop(self.calls, ("", 0.0))
        if fate and self.world.faults.happens(f"{self.name}#{self.calls}:{fate}"):
            if fate == "kill":
                self.kill()
            else:
                waiting, self.waiting = self.waiting, False
                if seconds > 15:
                    self.world.later(1.0, self.world.start)      # somebody notices, and tries to go on
                self.world.advance(self.world.time + seconds)
                self.waiting = waiting
            self._see_that_it_lives()

    def _see_that_it_lives(self) -> None:
        if self.state != "alive":
            raise Killed

    def kill(self) -> None:
        self._end("killed")

    def discard(self) -> None:
        """End what is left of the driver when the history is over. Its cleanup has no effect."""
        self.state = "killed" if self.state == "alive" else self.state
        with contextlib.suppress(Killed):
            self._life.close()

    def _end(self, state: str) -> None:
        self.state, self.ended = state, self.world.time
        self.world.later(self.world.faults.random("restart").choice((0.5, 5.0, 40.0)), self.world.start)

    def wait(self, timeout: float, ready: Callable[[], bool]) -> None:
        self.waiting = True
        self.world.advance(self.world.time + timeout, lambda: ready() or self.state != "alive")
        self.waiting = False
        self._see_that_it_lives()

    def resume(self) -> None:
        if self.state != "alive":
            return
        try:
            next(self._life)
        except Killed:
            return
        except StopIteration:
            self._end("done")
        except Exception as e:
            if self.state != "alive":                # an earlier error, which its cleanup raised once more
                return
            self.error = e
            self._end("failed")
            self.world.audit.ended(self, e)
        else:
            self.world.audit.after_step(self)
            self.world.later(0.0, self.resume)

    def tend(self) -> None:
        """Do what the background thread of the log does. It acts while the driver waits; both stand still together."""
        if self.state != "alive" or self.log is None:
            return
        self.world.later(TEND_S, self.tend)
        if self.waiting:
            self.waiting = False
            with contextlib.suppress(Killed):
                self.log.tend()
            self.waiting = True

    def _offer_again(self, log: SimLog) -> None:
        """Append a second record for a key, as a caller may do. The first record must be returned."""
        if first := next(log.records(), None):
            again = log.append(replace(first, attempt=f"{self.epoch:08d}-00000000", files={}))
            if again != first:
                raise self.world.audit.broken(f"{self.name} was given another record for {first.key} than the first")

    def _collect(self, log: SimLog) -> None:
        """Sometimes do what `store gc` does with the log."""
        if self.world.faults.random("gc").random() < .7:
            self.collecting = True
            garbage.remove_packed_segments(log, verify_every=2)
            self.collecting = False

    def _live(self) -> Generator[None, None, None]:
        """Do what `pipeline.run` does, as far as it is simulated."""
        world = self.world
        log = SimLog.open(self.store, takeover=self.takeover, clock=self.clock, holder=self.holder, threaded=False,
                          segment_records=world.segment_records, pack_segments=world.pack_segments)
        log.driver, self.log, self.epoch = self, log, log.epoch
        world.audit.opened(self)
        world.later(TEND_S, self.tend)
        yield
        with contextlib.ExitStack() as ending:
            ending.callback(log.close)

            def snapshot(doc: dict) -> None:
                log.check_lease()
                self.store.write(PROGRESS, repr(doc["nodes"]).encode())

            progress = Progress("quiet", snapshot, clock=self.clock)
            scheduler = self.scheduler = SimScheduler(
                self.backend, log, progress, straggler_s=5.0, clock=self.clock)
            healed = dict(garbage.collect_garbage(log, verify_every=2).damaged)
            self._collect(log)
            self._offer_again(log)
            yield
            while True:
                try:
                    nodes = world.plan.nodes(log.quarantined([STAGE]))
                    run = PlannedRun(nodes, lambda *_: None, FreshNodes(log, {}, []))
                    yield from steps([run], scheduler)
                    results = run.results
                    break
                except DamageFound as e:
                    log.check_lease()
                    if not log.retire_files(e.paths):
                        raise
                    healed.update(e.paths)
                    scheduler.plan_again()
            log.flush()
            log.check_lease()
            world.audit.finished(self, results, scheduler, progress, bool(healed))
            self._collect(log)


class World:
    """One history. `run` raises Violation when the product breaks a promise."""

    def __init__(self, seed: int, tasks: int, only: Collection[str] | None = None) -> None:
        self.faults = Faults(seed, only)
        self.plan = Plan.of(seed, tasks)
        self.time = 0.0
        self.bucket = Bucket(lambda: self.time)
        self.audit = Audit(self)
        self.bucket.watch = self.audit.changed
        self.drivers: list[Driver] = []
        self._later: list[tuple[float, int, Callable[[], object]]] = []
        self._serial = self._actions = 0
        self.segment_records = 1000                # or 2, so that few records fill a segment
        self.pack_segments = 1000                  # or 3, so that few segments fill a pack

    # -- time --------------------------------------------------------------------------------------------------------
    def later(self, seconds: float, action: Callable[[], object]) -> None:
        self._serial += 1
        heapq.heappush(self._later, (self.time + seconds, self._serial, action))

    def advance(self, until: float, ready: Callable[[], bool] = lambda: False) -> None:
        """Let time pass until `until`, or until `ready` returns true, and perform all actions that are due
        meanwhile."""
        while not ready():
            if not self._later or self._later[0][0] > until:
                self.time = max(self.time, until)
                return
            at, _, action = heapq.heappop(self._later)
            self.time = max(self.time, at)
            self._actions += 1
            if self.time > LONGEST_S or self._actions > MOST_ACTIONS:
                raise self.audit.broken("the history does not end")
            action()

    def store(self, who: str) -> SimStore:
        """Return the storage for an observer, whose calls are never interrupted."""
        return SimStore(Requests(self, who), VirtualClock())

    # -- drivers -----------------------------------------------------------------------------------------------------
    @property
    def alive(self) -> list[Driver]:
        return [d for d in self.drivers if d.state == "alive"]

    def start(self, takeover: bool | None = None) -> None:
        """Start another driver, unless the work is done."""
        if self.audit.complete or len(self.drivers) > DRIVERS:
            return
        if takeover is None:
            takeover = self.faults.random("takeover").random() < .4
        if len(self.drivers) == DRIVERS or self.time > FAULTS_S:
            self.faults.over = True
            takeover = True
        self.drivers.append(Driver(self, len(self.drivers), takeover))

    def _flip(self) -> None:
        """Flip a bit of a stored file: of an object or of the file of a node, seldom of the log."""
        rng = self.faults.random("flip")
        top = rng.choices(("objects/", "nodes/", "log/0"), (.6, .3, .1))[0]
        paths = [p for p in sorted(self.bucket.objects) if p.startswith(top)]
        path = rng.choice(paths) if paths else ""
        bit = rng.randrange(1 << 16)
        if path and self.faults.happens(f"flip#{path}:flip"):
            self.bucket.flip(path, bit)
            self.audit.flipped.add(path)

    def _harm_pack(self) -> None:
        """Lose a pack, flip a bit of it, or cut off its end. This does not happen while somebody relies on having just
        verified the pack."""
        rng = self.faults.random("harm")
        paths = [p for p in sorted(self.bucket.objects) if p.startswith("log/packs/")]
        how, bit = rng.choice(("lost", "flip", "torn")), rng.randrange(1 << 16)
        path = rng.choice(paths) if paths else ""
        if not path or any(d.collecting for d in self.alive) or not self.faults.happens(f"harm#{path}:{how}"):
            return
        if how == "lost":
            del self.bucket.objects[path]
        elif how == "flip":
            self.bucket.flip(path, bit)
        else:
            self.bucket.objects[path] = self.bucket.objects[path][:-1 - bit % 100]
        _ = self.audit.hopeless                    # it remembers whether it was

    def run(self) -> None:
        before, rng = random.getstate(), self.faults.random("world")
        random.seed(self.faults.seed)              # the jitter of `store.retry`
        self.start(takeover=False)
        for _ in range(rng.choice((0, 0, 1))):     # somebody does not know that there is one
            self.later(rng.uniform(0.0, 40.0), self.start)
        for _ in range(rng.choice((0, 0, 0, 1, 2))):
            self.later(rng.uniform(1.0, 40.0), self._flip)
        self.segment_records = rng.choice((2, 1000))
        rng = self.faults.random("packs")
        self.pack_segments = rng.choice((2, 3, 4, 1000))
        for _ in range(rng.choice((0, 1, 2, 4))):
            self.later(rng.uniform(5.0, 100.0), self._harm_pack)
        try:
            while self.alive or not (self.audit.complete or self.audit.hopeless or len(self.drivers) > DRIVERS):
                if not self._later:
                    break
                self.advance(self._later[0][0])
                self.audit.check()
            self.audit.last()
        finally:
            random.setstate(before)
            for driver in self.drivers:
                driver.discard()
