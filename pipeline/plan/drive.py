"""Runs a plan: starts every node whose inputs exist, sends its tasks to the scheduler, and publishes finished nodes.

The driver holds no documents, and only the tasks and records in flight. Every node continues as soon as its own tasks
are done, independent of other nodes. The tasks of all nodes share the workers, largest first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from typing import Any

from pipeline.base.errors import TokenmillError
from pipeline.engine.driver.scheduler import Scheduler
from pipeline.engine.task import TaskSpec
from pipeline.plan.nodes import DOCUMENTS, Node, PassResult, Work
from pipeline.store.dataset import stream_quarantine
from pipeline.store.records import FileInfo, PartRecord, merge_counters


class TooManyErrors(TokenmillError):
    """More documents of a pass or a token stream failed than `run.max_error_rate` allows: bad code, not bad data."""


def drive(nodes: list[Node], scheduler: Scheduler, finished: Callable[[Node, Any], None]) -> dict[str, Any]:
    """Run all nodes. Returns their results by name. `finished` is called with each node and its result when the node
    ends."""
    # closed here even after a second signal: the scheduler must end before the caller continues
    with contextlib.closing(steps(nodes, scheduler, finished)) as going:
        while True:
            try:
                next(going)
            except StopIteration as stop:
                results: dict[str, Any] = stop.value
                return results


def steps(nodes: list[Node], scheduler: Scheduler,
          finished: Callable[[Node, Any], None]) -> Generator[None, None, dict[str, Any]]:
    """`drive` as a generator: each item is one step of the scheduler."""
    results: dict[str, Any] = {}
    waiting = list(nodes)
    active: dict[int, tuple[Node, Work]] = {}             # by number of the batch the node waits for

    def go_on(node: Node, work: Work, records: Any) -> None:
        """Resume the node up to its next batch of tasks, or its end."""
        try:
            specs = next(work) if records is None else work.send(records)
        except StopIteration as stop:
            results[node.name] = stop.value
            finished(node, stop.value)
            return
        awaited = any(node.name in other.deps for other in nodes)
        active[scheduler.add(specs, awaited).number] = (node, work)

    with scheduler:
        while waiting or active:
            ready = [n for n in waiting if all(d in results for d in n.deps)]
            waiting = [n for n in waiting if n not in ready]
            for node in ready:
                go_on(node, node.work(results), None)
            if not ready:
                if not active:
                    raise RuntimeError(f"nodes wait for each other: {', '.join(n.name for n in waiting)}")
                scheduler.step()
                for batch, records in scheduler.finished():
                    node, work = active.pop(batch.number)
                    node.batches.append(records)
                    go_on(node, work, records)
                yield
        scheduler.check_stop()
    return results


#: attempt name of a record that stands for a part that does not exist yet: it has no rows
PENDING = "pending"


@dataclass
class NodeState:
    """The state of a node, as far as the log and the plan show it.

    `fresh` tasks are done, `stale` tasks have to run, `pending` tasks wait for a part of the pass before them. `more`:
    further tasks may follow. `unknown`: the tasks are not known before the inputs are complete. `replayed` counts the
    stale tasks that reuse unchanged results of an earlier pass (`passes.replay`). `weight` is the bytes the stale tasks
    read, `weight_fresh` those of the fresh tasks.
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
    """Find what would run: drive every node until it needs a record that the log does not have.

    A document pass maps parts one to one, so it can be planned before all of its inputs exist. Nodes that need complete
    inputs (barriers, tokenizer, shards) cannot.
    """
    states: list[NodeState] = []
    results: dict[str, Any] = {}
    for node in nodes:
        state = NodeState(node)
        states.append(state)
        missing_inputs = [d for d in node.deps if d not in results]
        before = [results[d] for d in node.deps if isinstance(results.get(d), PassResult)]
        state.pending = sum(r.attempt == PENDING for result in before for r in result.records)
        if missing_inputs or (state.pending and node.kind != "pass"):
            state.unknown, state.pending = True, 0
            continue
        work, records = node.work(results), None
        while True:
            try:
                specs = list(next(work) if records is None else work.send(records))
            except StopIteration as stop:
                results[node.name] = stop.value
                break
            committed = [get(s.key) for s in specs]
            missing = [s for s, r in zip(specs, committed) if r is None]
            state.fresh += len(committed) - len(missing)
            state.stale += len(missing)
            state.replayed += sum("replay" in s.args.get("$volatile", ()) for s in missing)
            state.weight += sum(s.weight for s in missing)
            state.weight_fresh += sum(s.weight for s, r in zip(specs, committed) if r is not None)
            state.tasks += specs
            state.records += [r for r in committed if r is not None]
            if missing and any(s.task != DOCUMENTS for s in missing):
                state.more = node.kind not in ("index", "pass")
                break
            records = Known([_pending(s) if r is None else r for s, r in zip(specs, committed)],
                            [s.origin for s in specs])
        if state.pending and isinstance(results.get(node.name), PassResult):
            known = results[node.name].records
            results[node.name].records = Known([*known, *[_pending(None)] * state.pending],
                                               [*known.origins, *[""] * state.pending])
    return states


class Known(list[PartRecord]):
    """Records in memory, with `origins` as `engine.driver.queue.TaskRecords` has them."""

    def __init__(self, records: Iterable[PartRecord], origins: Iterable[str]) -> None:
        super().__init__(records)
        self.origins = list(origins)


def _pending(spec: TaskSpec | None) -> PartRecord:
    """A record that stands for a part that does not exist yet: later passes find no rows in it."""
    key, node = (spec.key, spec.node) if spec else ("", "")
    return PartRecord(key, DOCUMENTS, node, PENDING, {"kept.parquet": FileInfo("", 0, "", "")}, {})


def check_error_rate(node: Node, records: Iterable[PartRecord], allowed: float, *, picks: bool = False) -> list[str]:
    """Raise TooManyErrors when a pass, or the encoding of a token stream, lost more than ten documents, and more than
    `allowed` (a share) of its documents, to errors. Unreadable records do not count as such errors. Instead, warnings
    are returned about sources that lost more than `allowed` of their records or gave no document at all. `picks`: a
    `where` selects among the documents of the sources."""
    reasons: dict[str, int] = {}
    sources: dict[str, dict[str, Any]] = {}
    seen = 0
    for record in records:
        seen += sum(s["docs"] for s in record.counters.get("in", {}).values())
        if node.kind == "shards":                # its documents are the encoded ones plus the lost ones
            seen += sum(record.counters[split]["docs"] for split in ("train", "val"))
            seen += sum(record.counters["quarantined"].values())
        read = record.counters.get("read", {})
        merge_counters(sources, read)
        unreadable: dict[str, int] = {}
        for source in read.values():
            merge_counters(unreadable, source["bad"])
        for reason, n in record.counters.get("quarantined", {}).items():
            if n > unreadable.get(reason, 0):
                reasons[reason] = reasons.get(reason, 0) + n - unreadable.get(reason, 0)
    lost = sum(reasons.values())
    if seen and lost > max(10, allowed * seen):
        folder = stream_quarantine(node.name.removeprefix("shards:")) if node.kind == "shards" else node.dataset
        raise TooManyErrors(
            f"{node.name}: {lost} of {seen} documents failed ({lost / seen:.1%}, allowed {allowed:.1%}): "
            f"{_listing(reasons)}. `tokenmill inspect {folder} --quarantined` shows them; fix the stage, or raise "
            f"`run.max_error_rate`")
    warnings = [_reading(node, name, read, allowed, picks) for name, read in sources.items()]
    return [*filter(None, warnings), *(_lost(name, read["lost"]) for name, read in sources.items() if "lost" in read)]


def _reading(node: Node, source: str, read: dict[str, Any], allowed: float, picks: bool) -> str:
    """A warning about a source with too many unreadable records, or without documents; "" for any other."""
    total, bad, skipped = read["records"], sum(read["bad"].values()), sum(read["skipped"].values())
    where = (f"look at `tokenmill inspect {node.dataset} --quarantined` and see that `read:` of the source and its "
             f"settings fit its files")
    if total == bad + skipped and not (picks and not bad):
        why = _listing({**read["skipped"], **read["bad"]}) or "its files hold none"
        return f"source '{source}' gave no document, {total} records were read ({why}); {where}"
    if bad > allowed * total:
        return (f"source '{source}': {bad} of {total} records could not be read ({bad / total:.1%}): "
                f"{_listing(read['bad'])}; {where}")
    return ""


def _lost(source: str, columns: dict[str, dict[str, int]]) -> str:
    """A warning about values of a source that no document keeps."""
    listed = [f"'{name}' ({_listing(columns[name])})" for name in sorted(columns)]
    more = f", and {len(listed) - 8} more" if len(listed) > 8 else ""
    return (f"source '{source}': not kept are values of {', '.join(listed[:8])}{more}; list the columns you want under "
            f"`keep:` of the source, or make them smaller before")


def _listing(reasons: dict[str, int]) -> str:
    return ", ".join(f"{r} × {n}" for r, n in sorted(reasons.items(), key=lambda x: (-x[1], x[0]))[:8])
