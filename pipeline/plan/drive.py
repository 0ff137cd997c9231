"""Runs a plan: starts every node whose inputs exist, sends its tasks to the scheduler, and publishes finished nodes. A
node is a group of tasks: a pass (steps that run together, document by document), a barrier (a step that needs all
documents at once), the tokenizer, or the shards of a stream.

The driver (the process that runs this module) holds no documents, only the tasks in progress and the records of their
results. A node continues as soon as its own tasks are done, independent of other nodes. The tasks of all nodes share
the workers; the largest tasks run first. A node whose tasks all have results in the store (`pipeline.plan.fresh`) ends
at once.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pipeline.base.errors import TokenmillError
from pipeline.engine.driver.scheduler import Scheduler
from pipeline.engine.driver.sums import NodeSums, Summing
from pipeline.plan.fresh import FreshNodes, Results
from pipeline.plan.nodes import Node, Work
from pipeline.store.dataset import PassParts, stream_quarantine
from pipeline.store.tombstones import TAKEN_DOWN


class TooManyErrors(TokenmillError):
    """Raised when more documents failed in a pass or in the encoding of a token stream than `run.max_error_rate`
    allows. In this case the code is more likely to be wrong than the data."""


#: called with each node that ends, the results so far, and the sums over the records of its tasks
Finished = Callable[[Node, Results, NodeSums], None]


@dataclass(eq=False)
class PlannedRun:
    """The nodes of one recipe's plan, as `drive_all` runs them. `finished` is called for each node that ends. A node is
    not run if `fresh` finds that the store already has the results of all its tasks.

    `results` are those of the nodes that have ended. If a node is left out because another run has the same node, the
    caller puts its result there.
    """

    nodes: list[Node]
    finished: Finished
    fresh: FreshNodes | None = None
    results: Results = field(default_factory=Results)

    @property
    def warnings(self) -> list[str]:
        """The list to which nodes add warnings while they are planned."""
        return self.fresh.warnings if self.fresh else []


def drive(nodes: list[Node], scheduler: Scheduler, finished: Finished, fresh: FreshNodes | None = None) -> Results:
    """Run the nodes of a plan and return their results by name. A node is a group of tasks, such as a pass (steps that
    run together). `finished` is called for each node that ends. `fresh` finds nodes whose results are in the store
    already; they are not run."""
    run = PlannedRun(nodes, finished, fresh)
    drive_all([run], scheduler)
    return run.results


def drive_all(runs: Sequence[PlannedRun], scheduler: Scheduler) -> None:
    """Run the plans of several recipes as one, until all their nodes have ended. The tasks of the plans share the
    workers of `scheduler`, and a task that several plans ask for runs once."""
    # closed here even when a second signal interrupts: the scheduler must end before the caller continues
    with contextlib.closing(steps(runs, scheduler)) as going:
        for _ in going:
            pass


def steps(runs: Sequence[PlannedRun], scheduler: Scheduler) -> Generator[None, None, None]:
    """Run plans, as `drive_all` does, but yield after each step of the scheduler (one round in which it starts and
    collects tasks). The caller may do other work in between."""
    waiting = [(run, node) for run in runs for node in run.nodes]
    active: dict[int, tuple[PlannedRun, Node, Work]] = {}         # by number of the batch the node waits for
    warnings: dict[int, list[str]] = defaultdict(list)            # those that each node has added, by its `id`

    def begin(run: PlannedRun, node: Node) -> None:
        node_fresh = run.fresh.find(node) if run.fresh else None
        if run.fresh is None or node_fresh is None:
            go_on(run, node, node.work(run.results), None)
            return
        node.batches += node_fresh.batches
        scheduler.reuse(node_fresh.sums)
        run.results.put_later(node.name, partial(run.fresh.made_again, node, run.results, node_fresh.batches))
        run.finished(node, run.results, node_fresh.sums)

    def go_on(run: PlannedRun, node: Node, work: Work, records: Any) -> None:
        """Resume the generator of a node with the commit records of its previous batch of tasks (None at first). The
        generator runs until it yields its next batch of tasks, which goes to the scheduler, or ends."""
        before = len(run.warnings)
        try:
            specs = next(work) if records is None else work.send(records)
        except StopIteration as stop:
            warnings[id(node)] += run.warnings[before:]
            run.results.put(node.name, stop.value)
            sums = _sums(node)
            run.finished(node, run.results, sums)
            if run.fresh:
                run.fresh.ended(node, sums, warnings[id(node)])
            return
        warnings[id(node)] += run.warnings[before:]
        awaited = any(node.name in other.deps for other in run.nodes)
        active[scheduler.add(specs, awaited).number] = (run, node, work)

    with scheduler:
        while waiting or active:
            ready = [(run, node) for run, node in waiting if all(d in run.results for d in node.deps)]
            waiting = [pair for pair in waiting if pair not in ready]
            for run, node in ready:
                begin(run, node)
            if not ready:
                if not active:
                    raise RuntimeError(f"nodes wait for each other: {', '.join(n.name for _, n in waiting)}")
                scheduler.step()
                for batch, records in scheduler.finished():
                    run, node, work = active.pop(batch.number)
                    node.batches.append(records)
                    go_on(run, node, work, records)
                yield
        scheduler.check_stop()


def _sums(node: Node) -> NodeSums:
    """Return the sums of the counters of all tasks of a node that has ended. The record of every task is read for this.
    For a pass, the files that its dataset publishes are noted in `Node.parts` at the same time."""
    summing = Summing(node.name, node.kind)
    parts = node.parts = PassParts(last=node.publishes) if node.kind == "pass" else None
    for batch in node.batches:
        summing.begin(batch.node)
        for (_, origin, weight), record in batch.with_tasks():
            summing.add(record, weight, origin)
            if parts is not None:
                parts.add(record)
    return summing.end()


def check_error_rate(node: Node, sums: NodeSums, allowed: float, *, picks: bool = False,
                     suffix: str = "") -> list[str]:
    """Raise TooManyErrors when a pass, or the encoding of a token stream, lost too many documents to errors. Too many
    are more than ten that are also more than the share `allowed` of its documents. Documents that a takedown left out
    do not count as lost, nor do records of input files that could not be read.

    Returns warnings about the sources that were read (`_reading`, `_unkept_values`). `picks` says that the pass selects
    documents by a `where`. `suffix` is appended to the name under which the dataset is published.
    """
    if node.kind == "shards":                    # its documents are the encoded ones plus the lost ones
        encoded = sums.counters.get("encode", {})
        documents = sum(encoded.get(split, {}).get("docs", 0) for split in ("train", "val"))
        documents += sum(encoded.get("quarantined", {}).values())
    else:
        documents = sum(s["docs"] for s in sums.counters.get("in", {}).values())
    sources, reasons = sums.counters.get("read", {}), sums.lost
    lost = sum(n for reason, n in reasons.items() if reason != TAKEN_DOWN)
    if documents and lost > max(10, allowed * documents):
        folder = stream_quarantine(node.name.removeprefix("shards:")) if node.kind == "shards" else node.dataset
        folder += suffix
        raise TooManyErrors(
            f"{node.name}: {lost} of {documents} documents failed ({lost / documents:.1%}, allowed {allowed:.1%}): "
            f"{_listing(reasons)}. `tokenmill inspect {folder} --quarantined` shows them; fix the stage, or raise "
            f"`run.max_error_rate`")
    warnings = [_reading(node.dataset + suffix, name, read, allowed, picks) for name, read in sources.items()]
    return [*filter(None, warnings),
            *(_unkept_values(name, read["lost"]) for name, read in sources.items() if "lost" in read)]


def _reading(dataset: str, source: str, read: dict[str, Any], allowed: float, picks: bool) -> str:
    """Return a warning about a source that yielded no document, or of whose records more than the share `allowed` could
    not be read; otherwise "". `read` has the counts of records.

    `picks` says that a `where` selects documents, for example those of other sources. A source that yielded none then
    gets no warning, unless records could not be read.
    """
    total, bad, skipped = read["records"], sum(read["bad"].values()), sum(read["skipped"].values())
    where = (f"look at `tokenmill inspect {dataset} --quarantined` and see that `read:` of the source and its "
             f"settings fit its files")
    if total == bad + skipped and not (picks and not bad):
        why = _listing({**read["skipped"], **read["bad"]}) or "its files hold none"
        return f"source '{source}' gave no document, {total} records were read ({why}); {where}"
    if bad > allowed * total:
        return (f"source '{source}': {bad} of {total} records could not be read ({bad / total:.1%}): "
                f"{_listing(read['bad'])}; {where}")
    return ""


def _unkept_values(source: str, columns: dict[str, dict[str, int]]) -> str:
    """Return a warning that documents could not keep some column values of a source. `columns` counts these values by
    column and reason."""
    listed = [f"'{name}' ({_listing(columns[name])})" for name in sorted(columns)]
    more = f", and {len(listed) - 8} more" if len(listed) > 8 else ""
    return (f"source '{source}': documents cannot keep some values of {', '.join(listed[:8])}{more}; list the columns "
            f"that you want under `keep:` of the source, or make their values smaller")


def _listing(reasons: dict[str, int]) -> str:
    return ", ".join(f"{r} × {n}" for r, n in sorted(reasons.items(), key=lambda x: (-x[1], x[0]))[:8])
