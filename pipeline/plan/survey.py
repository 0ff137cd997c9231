"""Finds what a run would do, without running a task. Every node (a pass, a barrier …) is driven as far as the log has
records of its tasks.

The tasks of a node that is fresh as a whole (`pipeline.plan.fresh`) are not looked at. The task specs of other nodes
are read one after the other; only the keys of finished tasks are kept, on disk.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

from pipeline.engine.driver.queue import Get, TaskRecords, TaskTable
from pipeline.engine.driver.sums import NodeSums, Summing
from pipeline.engine.task import TaskSpec
from pipeline.plan.fresh import FreshNodes, Results
from pipeline.plan.nodes import DOCUMENTS, Node
from pipeline.store.temp import Spilled

#: specs read at a time
CHUNK = 1000


@dataclass
class NodeState:
    """The state of a node, as far as the log and the plan show it.

    `fresh` tasks are done, `stale` tasks have to run, `pending` tasks wait for a part of the pass before them. `more`:
    it is possible that further tasks follow. `unknown`: which tasks there are is known only when all inputs exist.
    `replayed` counts the stale tasks that reuse unchanged results of an earlier pass (`passes.replay`). `weight` is the
    number of bytes that the stale tasks read, `weight_fresh` that of the fresh tasks. `sums` are the sums over the
    fresh tasks' records.
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
    stale_tasks: Sequence[TaskSpec] = ()           # if `survey` was asked to keep them
    sums: NodeSums = field(default_factory=NodeSums)


class _Survey:
    def __init__(self, get: Get, fresh: FreshNodes | None, keep: bool) -> None:
        self.get, self.fresh, self.keep = get, fresh, keep
        self.results = Results()
        self.pending: dict[str, int] = {}             # of the passes: parts that do not exist yet
        self.table, self.batches = TaskTable(), 0

    def state(self, node: Node) -> NodeState:
        state = NodeState(node)
        state.pending = sum(self.pending.get(dep, 0) for dep in node.deps)
        if any(dep not in self.results for dep in node.deps) or (state.pending and node.kind != "pass"):
            state.unknown, state.pending = True, 0
            return state
        node_fresh = self.fresh.find(node) if self.fresh and not state.pending else None
        if self.fresh is not None and node_fresh is not None:
            state.sums, state.fresh = node_fresh.sums, node_fresh.sums.tasks
            state.weight_fresh = sum(b.weight for b in node_fresh.sums.batches)
            self.results.put_later(node.name, partial(self.fresh.made_again, node, self.results, node_fresh.batches))
        else:
            self._walk(node, state)
        return state

    def _walk(self, node: Node, state: NodeState) -> None:
        """Drive a node until it ends or needs a record that the log does not have."""
        if self.keep:
            state.stale_tasks = Spilled(encode=TaskSpec.to_json, decode=TaskSpec.from_json)
        summing = Summing(node.name, node.kind)
        work, records = node.work(self.results), None
        while True:
            try:
                specs = next(work) if records is None else work.send(records)
            except StopIteration as stop:
                self.results.put(node.name, stop.value)
                break
            records, ends = self._batch(state, specs, summing)
            if ends:
                state.more = node.kind not in ("index", "pass")
                break
        state.sums = summing.end()
        if node.kind == "pass":
            self.pending[node.name] = state.stale + state.pending
        if self.fresh and node.name in self.results and not (state.stale or state.pending):
            self.fresh.ended(node, state.sums)

    def _batch(self, state: NodeState, specs: Iterable[TaskSpec], summing: Summing) -> tuple[TaskRecords, bool]:
        """Count the tasks of a batch as fresh or stale. Returns the records of the fresh ones, and whether the node
        must stop here because it needs the others, too. A document pass need not stop: it makes one part from each
        part, so that later passes can be planned for the parts that exist."""
        self.batches += 1
        size, name, ends, specs = 0, "", False, iter(specs)
        while chunk := list(islice(specs, CHUNK)):
            if not name:
                name = chunk[0].node
                summing.begin(name)
            fresh, records = [], self.get([spec.key for spec in chunk])
            for spec in chunk:
                record = records.get(spec.key)
                if record is not None:
                    fresh.append(spec)
                    state.weight_fresh += spec.weight
                    summing.add(record, spec.weight, spec.origin)
                    continue
                state.stale += 1
                state.weight += spec.weight
                state.replayed += "replay" in spec.args.get("$volatile", ())
                ends = ends or spec.task != DOCUMENTS
                if isinstance(state.stale_tasks, Spilled):
                    state.stale_tasks.append(spec)
            self.table.add(self.batches, size, fresh)
            size += len(fresh)
            state.fresh += len(fresh)
        if not name:
            summing.begin("")
        return self.table.records(self.batches, size, self.get, name), ends


def survey(nodes: list[Node], get: Get, fresh: FreshNodes | None = None, *, keep: bool = False) -> list[NodeState]:
    """The states of the nodes, in their order. `get` returns the record that the log has for a key, or None. With
    `keep` the states list the stale tasks.

    A document pass makes one part from each part, so it can be planned before all of its inputs exist. Nodes that need
    complete inputs (barriers, tokenizer, shards) cannot.
    """
    surveyor = _Survey(get, fresh, keep)
    return [surveyor.state(node) for node in nodes]
