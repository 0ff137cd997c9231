"""Bugs that are planted in the product on purpose. The simulator has to find every one of them."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from unittest import mock


@dataclass(frozen=True)
class Mutant:
    """A planted bug. The text `old`, which must be once in the source of `target` ('module:function' or
    'module:Class.function'), is replaced by `new`.

    `seed` is that of a history that shows the bug. It is tried first, only to save time."""

    name: str
    target: str
    old: str
    new: str
    seed: int = 0

    @contextlib.contextmanager
    def planted(self) -> Iterator[None]:
        module, _, place = self.target.partition(":")
        cls, _, function = place.rpartition(".")
        owner = importlib.import_module(module)
        owner = getattr(owner, cls) if cls else owner
        original = vars(owner)[function]
        source = textwrap.dedent(inspect.getsource(original))
        if source.count(self.old) != 1:
            raise LookupError(f"mutant '{self.name}': {self.target} has {source.count(self.old)} times {self.old!r}")
        made: dict[str, object] = {}
        exec(compile(source.replace(self.old, self.new), self.target, "exec"), original.__globals__, made)
        with mock.patch.object(owner, function, made[function]):
            yield


LOG, VIEW, SCHEDULER = "pipeline.store.log:Log.", "pipeline.store.view:LogView.", \
    "pipeline.engine.driver.scheduler:Scheduler."
FRESH = "pipeline.plan.fresh:FreshNodes."
LOSSES = "pipeline.engine.driver.losses:"
SNAPSHOT, PACKED = "pipeline.store.snapshot:", "pipeline.store.packed:PackedRecords."
PROGRESS, REMOTE = "pipeline.engine.driver.progress:Progress.", "pipeline.store.remote:Remote."

MUTANTS = [
    # -- commits
    Mutant("a refused creation counts as ours", REMOTE + "put_absent", "return self.read(path) == data",
           'return self.read(path) == data or path.startswith("log/0")'),
    Mutant("another's segment counts as ours", "pipeline.store.segment:create",
           'return None if existing["nonce"] == body["nonce"] else existing', "return None"),
    Mutant("a fenced driver goes on behind the other's segments", LOG + "flush",
           "raise self._fenced(other)", "self.refresh(); continue"),
    Mutant("a fresh heartbeat stands for the creation", LOG + "flush",
           "other = segment.create(self.store, *self._sending, self._clock)",
           "other = segment.create(self.store, *self._sending, self._clock) "
           "if self._clock.now() - self._beaten >= HEARTBEAT_S else "
           "self.store.write(segment_name(number), segment.encode_segment(self._sending[1]))"),
    Mutant("flush returns before it writes", LOG + "flush", "while self._uncommitted:",
           "while self._uncommitted and self._clock.now() - self._oldest >= SEGMENT_S:"),
    Mutant("a takeover does not read what came meanwhile", LOG + "_begin", "self.refresh()",
           'self.refresh() if not number else setattr(self, "segments", number)', seed=24),
    Mutant("a takeover keeps the epoch", LOG + "_begin", '"epoch": self.epoch + 1', '"epoch": max(1, self.epoch)'),
    Mutant("a living driver is not waited for", "pipeline.store.lease:wait_until_free",
           "range(math.ceil(PATIENCE_S / step))", "range(1)", seed=27),
    Mutant("a fenced driver is not told", LOG + "check_lease", "if self.store.exists(name):", "if False:"),
    Mutant("a record waits for the next one", LOG + "tend", "self.flush()", "pass"),
    # -- what the log says
    Mutant("the latest record counts", VIEW + "_add_record", "INSERT OR IGNORE INTO record",
           "INSERT OR REPLACE INTO record"),
    Mutant("a retired record counts still", VIEW + "_retire",
           'self._db.execute("DELETE FROM record WHERE key = ?", (record.key,))', "pass", seed=15),
    Mutant("the quarantine is forgotten", VIEW + "_settle_quarantine", "self._quarantine_document(entry)", "pass"),
    Mutant("a released row is skipped again", VIEW + "_apply", "self._quarantined_rows.pop(key, None)", "pass"),
    Mutant("verdicts are not replayed", VIEW + "_apply", "self._quarantine_row(entry)", "pass"),
    Mutant("a node stays fresh though a record is retired", FRESH + "find",
           "self._log.retired_at <= segment", "0 <= segment"),
    Mutant("files of records are garbage", "pipeline.store.garbage:collect_garbage",
           'if f"objects/{key}/{file}" not in named and (', "if ("),
    # -- snapshots of the log
    Mutant("a damaged pack is believed", SNAPSHOT + "decode", "if data[:offset] !=", "if False and data[:offset] !="),
    Mutant("a record of a pack begins a byte too early", SNAPSHOT + "_PackBuilder.add", "place += len(record) + 2",
           "place += len(record) + 1"),
    Mutant("the segment behind a pack is left out", VIEW + "_replay_packs", "self.segments = self.packed = first - 1",
           "self.segments = self.packed = first"),
    Mutant("segments between packs are left out", VIEW + "_sound",
           "snapshot.build(first, self._read_segments(first, next_first - 1), self.store)", "()"),
    Mutant("a segment that is gone ends the log", VIEW + "_read_segments",
           "raise CorruptLog(", "return; raise CorruptLog(", seed=44),
    Mutant("quarantines of a pack's records are forgotten", VIEW + "_replay_packs",
           "self._settle_quarantine(facts(data_of), data_of)", "pass"),
    Mutant("a retired record of a pack counts still", VIEW + "_retire",
           "self._packed.drop(record.key, number)", "pass"),
    Mutant("a task has a record in a pack and gets another", VIEW + "_add_record",
           "if self._packed.find(fact.key) is not None:", "if False:"),
    Mutant("what is built anew never counts in a pack", PACKED + "drop", "self._counts[later] = True", "pass"),
    Mutant("a pack is relied on without being read", "pipeline.store.garbage:packed_segments",
           "segments = snapshot.read(store, pack).segments()",
           "segments = [(n, store.read(segment_name(n))) for n in range(pack.first, pack.last + 1)\n"
           "                        if segment_name(n) in there]", seed=17),
    Mutant("epochs are removed", "pipeline.store.garbage:packed_segments",
           """decode_segment(data, name)["kind"] != "epoch" and""", ""),
    Mutant("segments of the own epoch are removed", "pipeline.store.garbage:packed_segments",
           "number < before and", ""),
    Mutant("a driver that came too late takes the place of a removed segment", LOG + "_begin",
           "if not self.store.exists(epoch_mark(next_epoch)):", "if True:", seed=24),
    # -- the scheduler
    Mutant("a lost attempt counts as a failed one", LOSSES + "History.failed", 'failure.kind == "exception"', "True",
           seed=12),
    Mutant("a lost attempt stays in flight", SCHEDULER + "_handle", 'self._failed(self._flights.end(ids),',
           'self._failed([self._flights[i] for i in ids if i in self._flights],'),
    Mutant("attempts are named after the driver before", SCHEDULER + "_dispatch",
           "attempt_name(self.log.epoch, id)", "attempt_name(max(1, self.log.epoch - 1), id)"),
    Mutant("a task may fail for ever", LOSSES + "History.failed", "self.exceptions >= max_attempts", "False", seed=39),
    Mutant("a finished attempt stays in flight", SCHEDULER + "_commit", "self._flights.end([id, *twins])", "pass"),
    Mutant("the other attempt goes on", SCHEDULER + "_commit", 'self.backend.cancel(twins)', "pass", seed=32),
    Mutant("a failed run leaves its attempts", SCHEDULER + "__exit__",
           "self.backend.cancel(list(self._flights))", "pass", seed=13),
    Mutant("a returned task is forgotten", SCHEDULER + "_handle",
           "self._repeat(self._flights.end(ids))", "self._flights.end(ids)", seed=14),
    Mutant("a task is repeated beside its other attempt", SCHEDULER + "_repeat",
           "if not self._flights.attempts(key):", "if True:", seed=116),
    Mutant("two attempts lost together are repeated twice", SCHEDULER + "_repeat",
           "{f.spec.key: f.spec for f in flights}.items()", "[(f.spec.key, f.spec) for f in flights]", seed=188),
    Mutant("a verdict is not logged", SCHEDULER + "_quarantine",
           "self.log.quarantine(spec.key, row, stage, reason)", "pass"),
    Mutant("a verdict waits for its segment", SCHEDULER + "step",
           "any(isinstance(e, Quarantined) for e in events) or ", ""),
    Mutant("an attempt does not hear of verdicts", SCHEDULER + "_dispatch",
           "skip = self.log.quarantined_rows(spec.key)", "skip = {}"),
    Mutant("a failed task keeps its verdicts", SCHEDULER + "step", "self.log.release(key)", "pass"),
    Mutant("damage is found and nobody hears of it", SCHEDULER + "step", "raise DamageFound(self._damaged)", "return"),
    # -- counts
    Mutant("a new plan counts what was reused twice", SCHEDULER + "plan_again", "self.reused = 0", "pass"),
    Mutant("progress forgets what was there", PROGRESS + "planned", "node.done += 1\n", "pass\n"),
]

#: bugs that only many preemptions show (`preemption`)
PREEMPTION_MUTANTS = [
    Mutant("losses of others do not matter", LOSSES + "TaskLosses.judge",
           "improbable(count - 1, events, share, PROOF)", "True"),
    Mutant("a task may take down any number of nodes", LOSSES + "TaskLosses.judge",
           "if count >= max_lost:", "if False:"),
    Mutant("a task's losses count as those of others", LOSSES + "TaskLosses.add",
           "self._after_first[cause] += 1", "pass"),
    Mutant("every attempt that a node takes along is an event", LOSSES + "BaseRate.failed",
           "self.events[cause] += 1", "self.events[cause] += attempts"),
    Mutant("every supervisor of a node reports a death of its own", LOSSES + "BaseRate.failed",
           "if host not in self._deaths:", "if True:"),
    Mutant("nobody is held back", LOSSES + "TaskLosses.held_back", "n >= SUSPECT and", "False and"),
    Mutant("a long task is judged as a short one", LOSSES + "TaskLosses.add",
           "self._seconds += seconds", "self._seconds += 1.0"),
    Mutant("suspects run together", SCHEDULER + "_may_start",
           "if self._trial in self._flights or", "if"),
    Mutant("an announced preemption counts", SCHEDULER + "_handle", "self._repeat(self._flights.end(ids))",
           'self._failed(self._flights.end(ids), Failure("lost", "drained"))'),
    Mutant("a lost attempt takes its verdicts along", SCHEDULER + "_dispatch",
           "skip = self.log.quarantined_rows(spec.key)", "skip = {}"),
]
