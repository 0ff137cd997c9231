"""Finds what a run would do, without running a task. Every node of the plan (a pass, a barrier …) is a generator that
yields tasks and is sent the records of their results. Here it is sent the records that the log has, until one is
missing.

The tasks of a node that is fresh as a whole (`pipeline.plan.fresh`: all tasks have results) are not checked one by one.
The task specs of other nodes are read one after the other; only the keys of finished tasks are kept, on disk.
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
    """The state of a node of the plan: how many of its tasks are done, and how many have to run.

    * `fresh`: tasks that are done
    * `stale`: tasks that have to run
    * `pending`: tasks that wait for a part that the pass before them has not written yet
    * `more`: further tasks may follow that are not known yet
    * `unknown`: no task can be known before all inputs exist
    * `replayed`: stale tasks that reuse unchanged results of an earlier pass (`passes.replay`)
    * `weight`, `weight_fresh`: bytes that the stale tasks and the fresh tasks read
    * `sums`: the sums over the records of the fresh tasks
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
        self.pending: dict[str, int] = {}             # pass → number of its parts that do not exist yet
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
        """Run the generator of a node with the records that the log has for its tasks. Stop when the generator ends, or
        needs a record that the log does not have. The tasks are counted in `state` as done or to be run."""
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
        """Count the tasks of a batch, `specs`, in `state` as fresh (done) or stale (to be run), and add the records of
        the fresh ones to `summing`. Returns these records, and whether the node must stop here, because stale tasks
        have no records.

        A document pass goes on without them: each of its tasks makes one part, so later passes can be planned for the
        parts that exist.
        """
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
    """Return the states of the nodes of a plan, in their order. `get` returns the records that the log has for the
    keys of tasks, as {key: record}. With `keep`, each state also lists the tasks that have to run.

    A document pass makes one part (file of documents) from each part that it reads, so it can be planned before all of
    its inputs exist. Other nodes (barriers, tokenizer, shards) can be planned only when their inputs are complete.
    """
    surveyor = _Survey(get, fresh, keep)
    return [surveyor.state(node) for node in nodes]
