"""Runs a plan: starts every node whose inputs are there, sends its tasks to the scheduler, publishes what is finished.

The driver holds task records, never documents. Nodes advance together: the tasks that all startable nodes want next go
to the scheduler as one batch, largest first, so independent sources share the workers.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

from pipeline.engine.task import FileInfo, PartRecord, TaskSpec
from pipeline.plan.passes import DOCUMENTS, Node, PassResult
from pipeline.store.dataset import stream_quarantine

#: runs specs and gives their records in the same order
Execute = Callable[[list[TaskSpec]], list[PartRecord]]


class TooManyErrors(Exception):
    """More documents of a pass or a token stream failed than `run.max_error_rate` allows: bad code, not bad data."""


def drive(nodes: list[Node], execute: Execute, finished: Callable[[Node, Any], None]) -> dict[str, Any]:
    """Run all nodes; returns their results by name. `finished` is called with each node as it ends."""
    results: dict[str, Any] = {}
    waiting = list(nodes)
    active: list[_Active] = []
    while waiting or active:
        moved = True
        while moved:                      # as far as everybody gets without new records
            moved = False
            for node in [n for n in waiting if all(d in results for d in n.deps)]:
                waiting.remove(node)
                active.append(_Active(node, node.work(results)))
            for work in [w for w in active if w.ready]:
                work.advance()
                moved = True
                if work.done:
                    active.remove(work)
                    results[work.node.name] = work.result
                    finished(work.node, work.result)
        if waiting and not active:
            raise RuntimeError(f"nodes wait for each other: {', '.join(n.name for n in waiting)}")
        records = execute([s for w in active for s in w.specs]) if active else []
        for work in active:
            work.records, records = records[:len(work.specs)], records[len(work.specs):]
            work.ready = True
    return results


@dataclass
class _Active:
    node: Node
    generator: Generator[list[TaskSpec], list[PartRecord], Any]
    records: list[PartRecord] | None = None       # None: not started
    specs: list[TaskSpec] = field(default_factory=list)
    result: Any = None
    ready: bool = True
    done: bool = False

    def advance(self) -> None:
        """To the next batch of tasks it wants, or to its end."""
        try:
            self.specs = next(self.generator) if self.records is None else self.generator.send(self.records)
        except StopIteration as stop:
            self.result, self.done, self.specs = stop.value, True, []
        self.ready = not self.done and not self.specs
        self.records = []
        self.node.keys += [s.key for s in self.specs]


#: attempt name of a record that stands for a part of a pass which has still to be made: it holds no rows
PENDING = "pending"


@dataclass
class NodeState:
    """What `plan` knows of a node.

    `fresh` tasks are done, `stale` ones have to run, `pending` ones wait for a part of the pass before them, `more`
    may follow those; `unknown`: nothing can be said before its inputs are complete. `replayed` of the stale ones take
    over what is unchanged of an earlier pass (`tasks.replay`). `weight` is the bytes the stale tasks read,
    `weight_fresh` those of the fresh ones.
    """

    node: Node
    fresh: int = 0
    stale: int = 0
    pending: int = 0
    weight: int = 0
    weight_fresh: int = 0
    replayed: int = 0
    more: bool = False
    unknown: bool = False
    tasks: list[TaskSpec] = field(default_factory=list)
    records: list[PartRecord] = field(default_factory=list)


def survey(nodes: list[Node], get: Callable[[str], PartRecord | None]) -> list[NodeState]:
    """What would run: every node driven as far as the log's records carry it.

    A document pass maps parts one to one, so it can be looked at though some of its inputs are still to be made; what
    needs its inputs whole (barriers, tokenizer, shards) cannot.
    """
    states, results = [], {}
    for node in nodes:
        state = NodeState(node)
        states.append(state)
        missing_inputs = [d for d in node.deps if d not in results]
        before = [results[d] for d in node.deps if isinstance(results.get(d), PassResult)]
        state.pending = sum(r.attempt == PENDING for result in before for r in result.records)
        if missing_inputs or (state.pending and node.kind != "pass"):
            state.unknown, state.pending = True, 0
            continue
        work = _Active(node, node.work(results))
        while True:
            work.advance()
            if work.done:
                results[node.name] = work.result
                break
            found = [get(s.key) for s in work.specs]
            missing = [s for s, r in zip(work.specs, found) if r is None]
            state.fresh += len(found) - len(missing)
            state.stale += len(missing)
            state.replayed += sum("replay" in s.args.get("$volatile", ()) for s in missing)
            state.weight += sum(s.weight for s in missing)
            state.weight_fresh += sum(s.weight for s, r in zip(work.specs, found) if r is not None)
            state.tasks += work.specs
            state.records += [r for r in found if r is not None]
            if missing and any(s.task != DOCUMENTS for s in missing):
                state.more = node.kind not in ("index", "pass")
                break
            work.records = [_pending(s) if r is None else r for s, r in zip(work.specs, found)]
        if state.pending and isinstance(results.get(node.name), PassResult):
            results[node.name].records += [_pending(None)] * state.pending
            results[node.name].source_of += [""] * state.pending
    return states


def _pending(spec: TaskSpec | None) -> PartRecord:
    """Stands for a part that has still to be made: later passes find no rows in it."""
    key, node = (spec.key, spec.node) if spec else ("", "")
    return PartRecord(key, DOCUMENTS, node, PENDING, {"kept.parquet": FileInfo("", 0, "", "")}, {})


def check_error_rate(node: Node, records: list[PartRecord], allowed: float) -> None:
    """Raise when a pass, or the encoding of a token stream, lost more than `allowed` of its documents to errors (reader
    errors do not count)."""
    reasons: dict[str, int] = {}
    seen = 0
    for record in records:
        seen += sum(s["docs"] for s in record.counters.get("in", {}).values())
        if node.kind == "shards":                # documents of these are the encoded ones, and the lost ones
            seen += sum(record.counters[split]["docs"] for split in ("train", "val"))
            seen += sum(record.counters["quarantined"].values())
        unreadable = {r for read in record.counters.get("read", {}).values() for r in read["bad"]}
        for reason, n in record.counters.get("quarantined", {}).items():
            if reason not in unreadable:
                reasons[reason] = reasons.get(reason, 0) + n
    lost = sum(reasons.values())
    if seen and lost > max(10, allowed * seen):
        listing = ", ".join(f"{r} × {n}" for r, n in sorted(reasons.items(), key=lambda x: -x[1])[:8])
        folder = stream_quarantine(node.name.removeprefix("shards:")) if node.kind == "shards" else node.dataset
        raise TooManyErrors(
            f"{node.name}: {lost} of {seen} documents failed ({lost / seen:.1%}, allowed {allowed:.1%}): {listing}. "
            f"Look at quarantine/{folder}/, mend the stage, or raise `run.max_error_rate`")
