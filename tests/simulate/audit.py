"""The auditor of a simulated history. It replays the commit log by its own, simple rules as it is written, and compares
what the product does with them."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pipeline.engine.driver.endings import DamageFound, TaskFailed
from pipeline.engine.messages import (
    Done,
    Event,
    Failed,
    Failure,
    Hanging,
    Hindered,
    Lost,
    Quarantined,
    Returned,
)
from pipeline.store import log as log_module
from pipeline.store.errors import StoreError
from pipeline.store.lease import LeaseHeld
from pipeline.store.log import Fenced
from pipeline.store.segment import CorruptLog
from pipeline.store.snapshot import Pack, decode
from pipeline.store.view import LogView
from tests.simulate.backend import NODES, SLOTS
from tests.simulate.plan import FILE, ROWS, STAGE, data_of

if TYPE_CHECKING:
    from pipeline.engine.driver.progress import Progress
    from pipeline.engine.driver.scheduler import Scheduler
    from pipeline.engine.task import TaskSpec
    from pipeline.store.records import PartRecord
    from tests.simulate.world import Driver, World

SEGMENT = re.compile(r"log/(\d{8})\.json")
PACK = re.compile(r"log/packs/(\d{8})-(\d{8})\.pack")
#: how many exceptions and how many losses the scheduler allows a task by default. The number of losses holds when no
#: other task is lost
EXCEPTIONS, LOST = 3, 8


class Violation(BaseException):
    """Raised if the product has broken a promise. It is not a subclass of Exception, so that the product cannot handle
    it as an error."""


class Truth:
    """What the segments of the log say, replayed in their order by a second, simple implementation of the rules."""

    def __init__(self) -> None:
        self.segments = self.epoch = 0
        self.writer = ""                                              # who opened the epoch
        self.writers: dict[int, str] = {}                             # epoch → who opened it
        self.opened = 0                                               # number of the segment that opened the epoch
        self.bytes: dict[int, bytes] = {}                             # number → the segment
        self.live: dict[str, dict[str, Any]] = {}                     # key → the record that counts
        self.retired: dict[str, dict[str, str]] = {}                  # key → contents its files had
        self.quarantined_rows: dict[str, set[int]] = defaultdict(set)    # key without a record → rows
        self.quarantined: set[str] = set()                            # document ids
        self.ever: set[str] = set()                                   # keys that have had a record

    def take(self, record: dict[str, Any]) -> None:
        self.live[record["key"]] = record
        self.ever.add(record["key"])
        self.quarantined_rows.pop(record["key"], None)
        self.quarantined |= {entry["id"] for entry in record["quarantine"]}

    def retire(self, key: str) -> None:
        self.retired[key] = contents(self.live.pop(key))


def contents(record: Mapping[str, Any]) -> dict[str, str]:
    return {name: info["content"] for name, info in record["files"].items()}


class Told:
    """What the scheduler told one driver about its attempts, and what follows from it."""

    def __init__(self) -> None:
        self.flights: dict[int, TaskSpec] = {}
        self.exceptions: Counter[str] = Counter()
        self.lost: Counter[tuple[str, str]] = Counter()              # by key and cause
        self.raised: dict[str, tuple[str, int] | None] = {}          # key → latest failure of the task itself
        self.final: set[str] = set()                                 # keys that have failed for good
        self.may: set[str] = set()                                   # keys that may have
        self.accepted = 0                                            # results that count
        self.due: set[str] = set()                                   # keys that must have a record after this step
        self.verdicts: set[tuple[str, int]] = set()                  # (key, row) that must be durable after this step
        self.appended: dict[str, tuple[str, float]] = {}             # key → attempt and time, not yet known durable
        self.hindered = 0
        self.beside = 0                                              # attempts begun beside another of the same key


class Audit:
    def __init__(self, world: World) -> None:
        self.world, self.truth = world, Truth()
        self.flipped: set[str] = set()
        self.complete = self._was_hopeless = False
        self.violation: Violation | None = None
        self._told: dict[str, Told] = defaultdict(Told)
        self._sound: set[tuple[str, bytes]] = set()                   # packs that were compared with the truth

    def broken(self, what: str) -> Violation:
        """Record a violation, and return the first one of this history. It has to be recorded, because it may be raised
        where the product swallows every error."""
        self.violation = self.violation or Violation(f"at {self.world.time:.1f} s: {what}")
        return self.violation

    def check(self) -> None:
        if self.violation is not None:
            raise self.violation

    @property
    def hopeless(self) -> bool:
        """Whether a segment is damaged or gone that no sound pack holds. Only a person can repair that."""
        objects = self.world.bucket.objects
        broken = {number for number, data in self.truth.bytes.items() if objects.get(f"log/{number:08d}.json") != data}
        hopeless = bool(broken) and not broken <= self._packed()
        self._was_hopeless |= hopeless               # stays true: a late write may restore a pack after the failure
        return hopeless

    def _packed(self) -> set[int]:
        """Return the numbers of the segments that sound packs hold."""
        return {number for path, data in self.world.bucket.objects.items() if path.startswith("log/packs/")
                for number in self._holds(path, data)}

    def _holds(self, path: str, data: bytes) -> range:
        """Return the numbers of the segments that a pack holds; none if it is damaged. Raises Violation if it holds
        other bytes than the log."""
        found = PACK.fullmatch(path)
        if found is None or data[:78] != b'{"sha256":"%s"}\n' % hashlib.sha256(data[78:]).hexdigest().encode():
            return range(0)
        held = range(int(found[1]), int(found[2]) + 1)
        if (path, data) not in self._sound:
            pack = Pack(held[0], held[-1])
            if dict(decode(pack, data, path).segments()) != {n: self.truth.bytes.get(n) for n in held}:
                raise self.broken(f"{path} holds other segments than the log")
            self._sound.add((path, data))
        return held

    def was_recorded(self, key: str) -> bool:
        return key in self.truth.ever

    # -- storage -----------------------------------------------------------------------------------------------------
    def changed(self, how: str, path: str, data: bytes, before: bytes | None, who: str) -> None:
        if match := SEGMENT.fullmatch(path):
            number = int(match[1])
            if how == "remove":
                self._removed(number, who)
            elif how != "create":
                raise self.broken(f"{who}: {how} of {path}, which is a segment of the log")
            elif number in self.truth.bytes:
                self._created_again(number, data, who)
            else:
                self._segment(number, json.loads(data)["body"], who)
                self.truth.bytes[number] = data
        elif match := PACK.fullmatch(path):
            if how == "remove":
                alone = set(self._holds(path, before or b"")) - self._packed()
                if any(f"log/{number:08d}.json" not in self.world.bucket.objects for number in alone):
                    raise self.broken(f"{who} removed {path}, which alone holds some segments")
            else:
                self._holds(path, data)
        elif path.startswith("objects/"):
            if how == "remove" and any(path == info["path"] for record in self.truth.live.values()
                                       for info in record["files"].values()):
                raise self.broken(f"{who} removed {path}, which a record names")
            if how == "replace" and before is not None and before != data and path not in self.flipped:
                raise self.broken(f"{who} wrote other bytes to {path}")

    def _removed(self, number: int, who: str) -> None:
        """Check that a segment may be removed: a sound pack must hold it. It must also not belong to the fence, because
        a fenced driver could then create a segment of this number."""
        if number not in self._packed() and not self.world.faults.count(f"{who}.remove", "later"):
            raise self.broken(f"{who} removed segment {number}, which no sound pack holds")
        if number >= self.truth.opened or json.loads(self.truth.bytes[number])["body"]["kind"] == "epoch":
            raise self.broken(f"{who} removed segment {number}, which fences others")

    def _created_again(self, number: int, data: bytes, who: str) -> None:
        """Check a segment that is created where one was removed, by a request that took effect late. It must have the
        same bytes. (`opened` checks that nobody relies on it.)"""
        if data != self.truth.bytes[number] and json.loads(data)["body"]["kind"] != "epoch":
            raise self.broken(f"{who} wrote segment {number} again, and another one")

    def _segment(self, number: int, body: dict[str, Any], who: str) -> None:
        truth = self.truth
        if number != truth.segments + 1:
            raise self.broken(f"{who} wrote segment {number} after segment {truth.segments}")
        truth.segments = number
        if body["kind"] == "epoch":
            if body["epoch"] != truth.epoch + 1 or body["holder"]["host"] != who:
                raise self.broken(f"{who} opened epoch {body['epoch']} after epoch {truth.epoch}")
            truth.epoch, truth.writer, truth.opened = body["epoch"], who, number
            truth.writers[truth.epoch] = who
            return
        if body["epoch"] != truth.epoch or who != truth.writer:
            raise self.broken(f"{who} committed in epoch {truth.epoch}, which is {truth.writer}'s")
        for record in body["records"]:
            self._record(record, who)
        for entry in body["quarantined"]:
            if entry["key"] not in truth.live:
                truth.quarantined_rows[entry["key"]].add(entry["row"])
        for key in body.get("released", ()):
            truth.quarantined_rows.pop(key, None)
        for entry in body.get("retired", ()):
            self._retire(entry, who)

    def _record(self, record: dict[str, Any], who: str) -> None:
        truth, key = self.truth, record["key"]
        if key in truth.live:
            raise self.broken(f"{who} committed a second record for {key}")
        if int(record["attempt"][:8]) != truth.epoch:
            raise self.broken(f"{who} committed attempt {record['attempt']} in epoch {truth.epoch}")
        if truth.retired.get(key, contents(record)) != contents(record):
            raise self.broken(f"{who} committed other contents for {key} than were retired")
        for path, problem in self._wrong(record):
            raise self.broken(f"{who} committed {path}, which {problem}")
        truth.take(record)

    def _wrong(self, record: dict[str, Any]) -> list[tuple[str, str]]:
        """Return (path, problem) for those files of a record that differ from what it says, although no planned fault
        explains it."""
        wrong = []
        for info in record["files"].values():
            data = self.world.bucket.objects.get(info["path"])
            if data is None:
                wrong.append((info["path"], "is not there"))
            elif info["path"] not in self.flipped and hashlib.sha256(data).hexdigest() != info["sha256"]:
                wrong.append((info["path"], "has other bytes"))
        return wrong

    def _retire(self, entry: dict[str, Any], who: str) -> None:
        record = self.truth.live.get(entry["key"])
        if record is None or record["attempt"] != entry["attempt"]:
            raise self.broken(f"{who} retired attempt {entry['attempt']} of {entry['key']}, which does not count")
        paths = {info["path"] for info in record["files"].values()}
        if not (paths & self.flipped or self._wrong(record) or self.world.faults.count(f"{who}.listing")):
            raise self.broken(f"{who} retired {entry['key']}, whose files are sound")
        self.truth.retire(entry["key"])

    # -- the log, as a driver holds it ---------------------------------------------------------------------------------
    def _current(self, driver: Driver) -> bool:
        return driver.epoch == self.truth.epoch

    def opened(self, driver: Driver) -> None:
        if self.truth.writers.get(driver.epoch) != driver.name:
            raise self.broken(f"{driver.name} believes that it holds epoch {driver.epoch}")
        for before in self.world.alive:
            if (before.epoch == driver.epoch - 1 and before.epoch and not driver.takeover
                    and not self.world.faults.count(before.name)):
                raise self.broken(f"{driver.name} took over from {before.name}, which lives")
        if self._current(driver):
            self._same_view(driver.log, driver.name)

    def _same_view(self, view: LogView | None, who: str) -> None:
        truth = self.truth
        assert view is not None
        if {r.key: r.attempt for r in view.records()} != {k: r["attempt"] for k, r in truth.live.items()}:
            raise self.broken(f"{who} replayed other records than the log holds")
        if view.quarantined([STAGE]).keys() != truth.quarantined:
            raise self.broken(f"{who} replayed other documents in quarantine than the log holds")
        for key in self.world.plan.keys:
            if view.quarantined_rows(key).keys() != truth.quarantined_rows.get(key, set()):
                raise self.broken(f"{who} replayed other verdicts for {key} than the log holds")

    def appended(self, driver: Driver, record: PartRecord, first: PartRecord) -> None:
        if first is record and record.key not in self.truth.live:
            self._told[driver.name].appended[record.key] = record.attempt, self.world.time

    def flushed(self, driver: Driver) -> None:
        """Check that every record that was appended before the flush is in the log."""
        told = self._told[driver.name]
        for key in self._uncommitted(told):
            raise self.broken(f"{driver.name}: flush returned, and {key} is not in the log")
        told.appended.clear()

    def tended(self, driver: Driver, began: float) -> None:
        """Check that no record still waits that was due at the time `began`."""
        told = self._told[driver.name]
        for key in self._uncommitted(told):
            if began - told.appended[key][1] > log_module.SEGMENT_S:
                raise self.broken(f"{driver.name}: the record for {key} still waits for its segment")

    def _uncommitted(self, told: Told) -> list[str]:
        truth = self.truth
        return [key for key, (attempt, _) in told.appended.items()
                if truth.live.get(key, {}).get("attempt") != attempt and key not in truth.retired]

    # -- the scheduler -------------------------------------------------------------------------------------------------
    def dispatched(self, driver: Driver, number: int, spec: TaskSpec, skip: Mapping[int, str]) -> None:
        told, truth = self._told[driver.name], self.truth
        if self._current(driver):
            if spec.key in truth.live:
                raise self.broken(f"{driver.name} runs {spec.label}, which is done")
            if not truth.quarantined_rows.get(spec.key, set()) <= skip.keys():
                raise self.broken(f"{driver.name} runs {spec.label} without the verdicts about its rows")
        told.beside += any(s.key == spec.key for s in told.flights.values())
        told.flights[number] = spec
        if sum(s.key == spec.key for s in told.flights.values()) > 2:
            raise self.broken(f"{driver.name} runs {spec.label} more than twice at a time")

    def told(self, driver: Driver, events: list[Event]) -> None:
        """Take in events that a driver was told. As the docstring of the scheduler says, an event about an attempt that
        does not run any more is ignored."""
        told = self._told[driver.name]
        for event in events:
            for number in _attempts(event):
                spec = told.flights.get(number)
                if spec is not None:
                    self._one(told, number, spec, event)

    def _one(self, told: Told, number: int, spec: TaskSpec, event: Event) -> None:
        match event:
            case Done():
                told.accepted += 1
                told.hindered = 0
                told.due.add(spec.key)
                told.flights = {n: s for n, s in told.flights.items() if s.key != spec.key}
                for counts in (told.exceptions, told.raised):
                    counts.pop(spec.key, None)
                told.may.discard(spec.key)
            case Quarantined(_, row):
                told.verdicts.add((spec.key, row))
            case Returned():
                del told.flights[number]
            case Failed(_, failure):
                del told.flights[number]
                self._failed(told, spec.key, failure)
            case Lost(_, message):
                del told.flights[number]
                self._failed(told, spec.key, Failure("lost", message))

    def _failed(self, told: Told, key: str, failure: Failure) -> None:
        """Decide whether a failure ends the task for good. It does if the task has raised an error too often, or was
        lost alone too often. A task that was lost together with others may have failed; `preemption` tests what the
        scheduler has to do with such tasks."""
        kind = failure.kind
        if kind == "damaged":
            return
        raised = None if failure.row is None else (failure.message, failure.row)
        if kind == "exception":
            told.exceptions[key] += 1
            if told.exceptions[key] >= EXCEPTIONS or (raised is not None and told.raised.get(key) == raised):
                told.final.add(key)
        else:
            told.lost[key, kind] += 1
            if told.lost[key, kind] >= LOST:
                alone = all(other == key for other, cause in told.lost if cause == kind)
                (told.final if alone else told.may).add(key)
            told.hindered += kind == "environment"
            if told.hindered >= LOST * NODES * SLOTS:
                told.may.add(key)
        told.raised[key] = raised

    def after_step(self, driver: Driver) -> None:
        """Check, after a step of a driver without an error, that it has done what the events of this step require."""
        told, log = self._told[driver.name], driver.log
        assert log is not None
        if told.final:
            raise self.broken(f"{driver.name} goes on though {min(told.final)} has failed for good")
        for key in told.due:
            if key not in log:
                raise self.broken(f"{driver.name} was told that {key} is done and did not append it")
        for key, row in told.verdicts:
            # a fenced driver may still know a verdict that the driver after it has withdrawn
            known = self.truth.quarantined_rows.get(key, ())
            if self._current(driver) and key not in self.truth.ever and row not in known:
                raise self.broken(f"{driver.name} went on before the verdict about row {row} of {key} was durable")
        told.due.clear()
        told.verdicts.clear()

    def ended(self, driver: Driver, error: Exception) -> None:
        """Check that a fault explains the error with which a driver has ended."""
        told, faults = self._told[driver.name], self.world.faults
        others = [d for d in self.world.drivers if d is not driver and d.epoch and d.ended > driver.began]
        match error:
            case Fenced():
                explained = self.truth.epoch > driver.epoch > 0
            case LeaseHeld():
                explained = bool(others) or any(name.endswith(":later") for name in faults.fired)
            case CorruptLog():
                explained = (any(SEGMENT.fullmatch(path) for path in self.flipped) or self.hopeless
                             or self._was_hopeless or faults.count(f"{driver.name}.listing") > 0)
            case TaskFailed():
                explained = error.spec.key in told.final | told.may
                if self._current(driver) and self.truth.quarantined_rows.get(error.spec.key):
                    raise self.broken(f"{driver.name} failed at {error.spec.label} and did not take its verdicts back")
            case DamageFound():
                explained = False
            case StoreError() | OSError():
                explained = faults.count(f"{driver.name}.") > 0
            case _:
                explained = False
        if driver.backend.running:
            raise self.broken(f"{driver.name} ended and left {len(driver.backend.running)} attempts running")
        if not explained:
            raise self.broken(f"{driver.name} ended without a reason: {type(error).__name__}: {error}") from error

    def finished(self, driver: Driver, results: Mapping[str, Any], scheduler: Scheduler, progress: Progress,
                 healed: bool) -> None:
        """Check the results of a driver that says that the plan is done."""
        told, plan, name = self._told[driver.name], self.world.plan, driver.name
        records = [*results.get("first", ()), *results.get("second", ())]
        if [r.key for r in records[:len(plan.first)]] != plan.keys or len(records) != plan.size:
            raise self.broken(f"{name} returned other records than those of its tasks")
        for record in records:
            if self.truth.live.get(record.key) != json.loads(json.dumps(record.to_json())):
                raise self.broken(f"{name} returned a record for {record.key} that the log does not hold")
            rows = set(range(ROWS)) - {entry["row"] for entry in record.quarantine}
            if record.files[FILE].sha256 != hashlib.sha256(data_of(record.key, rows)).hexdigest():
                raise self.broken(f"{name} returned a wrong result for {record.key}")
        for record in self.truth.live.values():
            for path, problem in self._wrong(record):
                raise self.broken(f"{name} ended well though {path} {problem}")
        if driver.backend.running:
            raise self.broken(f"{name} is done and left {len(driver.backend.running)} attempts running")
        if scheduler.executed != told.accepted:
            raise self.broken(f"{name} counts {scheduler.executed} tasks done of {told.accepted}")
        counts = progress.snapshot()
        if (counts["parts"], counts["done"]) != (plan.size, plan.size):
            raise self.broken(f"{name} shows {counts['done']} of {counts['parts']} parts done, of {plan.size}")
        if not healed and told.beside != sum(node["doubled"] for node in counts["nodes"].values()):
            raise self.broken(f"{name} ran {told.beside} attempts beside others and doubled other ones")
        reused = sum(node["reused"] for node in counts["nodes"].values())
        if reused != scheduler.reused or (not healed and reused + scheduler.executed != plan.size):
            raise self.broken(f"{name} counts {scheduler.executed} done and {scheduler.reused} reused of {plan.size}")
        self.complete = True

    def last(self) -> None:
        """Check the final state, when the history is over."""
        self.check()
        if not self.complete and not self.hopeless:
            ends = ", ".join(f"{d.name} {d.state} ({d.error})" for d in self.world.drivers)
            raise self.broken(f"the plan was never done: {ends}")
        if not self.hopeless:
            self.world.faults.over = True
            reader = LogView(self.world.store("reader"))
            try:
                reader.refresh()
            except Exception as error:
                raise self.broken(f"a reader: {type(error).__name__}: {error}") from error
            self._same_view(reader, "a reader")


def _attempts(event: Event) -> tuple[int, ...]:
    """Return the ids of the attempts that an event is about."""
    match event:
        case Lost(ids) | Returned(ids):
            return ids
        case Done(id) | Failed(id) | Hindered(id) | Quarantined(id):
            return (id,)
        case Hanging(status):
            return (status.id,)
    return ()
