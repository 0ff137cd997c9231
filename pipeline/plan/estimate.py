"""Estimates a run before it starts: the numbers of finished and remaining tasks, bytes read, CPU time and disk space.

Speeds and sizes are measured on the runs that the store holds. For a store without runs, the constants of this module
are used. They were measured on one core of a 2-vCPU Xeon (AVX-512) over real web pages. CPU time is a sum over cores;
divide it by the number of workers to estimate the wall-clock time.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.base.machine import usable_cores
from pipeline.base.redact import redact
from pipeline.plan.changes import changes
from pipeline.plan.fresh import FreshNodes
from pipeline.plan.lint import lint
from pipeline.plan.nodes import DOCUMENTS, Node
from pipeline.plan.planner import Planner
from pipeline.plan.provenance import node_ingredients
from pipeline.plan.survey import NodeState, survey
from pipeline.plan.tokens import TOKENIZER, token_nodes
from pipeline.recipe import Recipe
from pipeline.store.fs import Store, StoreError
from pipeline.store.log import Log
from pipeline.store.records import PartRecord
from pipeline.store.view import LogView
from stages.catalog import load
from stages.stage import SAMPLE_BYTES, Stage

#: bytes of text per CPU-second when training a tokenizer, when making shards, and in a step that declares no speed
TOKENIZER_SPEED, SHARD_SPEED, UNKNOWN_SPEED = 4e6, 8e6, 5e6
#: CPU time of a pass that replays verdicts (processes only the documents whose verdict changes), as a share of the CPU
#: time of the whole pass, when about one verdict of ten changes
REPLAYED = 0.2
#: CPU seconds that a child process takes to load the steps of a pass before its first task: libraries, models and
#: compiled functions. The first run of an installation also compiles these functions, which takes some seconds more
START_CPU_S = 0.8
#: COMPRESSED: bytes that a pass writes per byte of text (Parquet, zstd). READ_SPEED: bytes that a pass reads per
#: CPU-second. INFLATE_SPEED: bytes that a task inflates per CPU-second to find where a big file can be split.
COMPRESSED, READ_SPEED, INFLATE_SPEED = 0.45, 3e8, 5e8
#: Bytes written per byte of text. BARRIER_BYTES: by barriers, into files with which their tasks exchange data.
#: SHARD_BYTES: for shards (16-bit tokens for about four bytes of text each, written once by partition and once
#: assembled, and the tables).
BARRIER_BYTES, SHARD_BYTES = 0.06, 1.1
#: most records that speeds are measured from
MEASURED = 10_000
#: a measurement over less text, or less CPU time, than this is ignored
LEAST_BYTES, LEAST_CPU = 1e6, 0.05


@dataclass
class Speeds:
    """Speeds and sizes measured on finished tasks. `stages` maps the name of a step or node to the bytes of text that
    it takes per CPU-second. `remaining` maps it to the bytes of text left per byte read. For a step that was not
    measured, `of` returns the values that the step's class declares, or UNKNOWN_SPEED if it declares no speed.
    `compressed` is the number of bytes stored per byte of text."""

    stages: dict[str, float] = field(default_factory=dict)
    remaining: dict[str, float] = field(default_factory=dict)
    compressed: float = COMPRESSED

    def of(self, name: str, stage: Stage) -> tuple[float, float]:
        """Returns (bytes per CPU-second, bytes of text left per byte read) of a step. `name` is the step's name in the
        counters of records (`ChainStep.name`), from which speeds were measured."""
        declared = SAMPLE_BYTES * 1000 / stage.cost_ms if stage.cost_ms else UNKNOWN_SPEED
        return self.stages.get(name, declared), self.remaining.get(name, stage.leaves)


def measured(records: Iterable[PartRecord], *, least_bytes: float = LEAST_BYTES,
             least_cpu: float = LEAST_CPU) -> Speeds:
    """Compute speeds from the records of finished tasks in a store. Stages are measured by the CPU time that they
    recorded themselves. Barriers, shards and the tokenizer are measured by the CPU time of whole tasks. A step or node
    that took at most `least_bytes` of text or `least_cpu` CPU seconds is left out."""
    stages: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])       # bytes in, bytes out, CPU seconds
    nodes: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])             # bytes of text, CPU seconds
    docs = text = stored = stored_text = 0.0
    pass_name = load(DOCUMENTS).name
    for record in records:
        counters = record.counters
        if record.task != pass_name:
            _count_node(nodes, record, text / max(docs, 1))
            continue
        for label, stats in counters.get("stages", {}).items():
            into = stages[label.partition(":")[2]]
            for i, name in enumerate(("bytes_in", "bytes_out", "cpu_s")):
                into[i] += stats[name]
        for kept in counters.get("kept", {}).values():
            docs, text = docs + kept["docs"], text + kept["bytes"]
        for name in ("kept.parquet", "dropped.parquet"):
            if name in record.files and "text_bytes" in record.files[name].meta:
                stored += record.files[name].bytes
                stored_text += record.files[name].meta["text_bytes"]
    speeds = Speeds()
    for name, (size, out, cpu) in stages.items():
        if size > least_bytes and cpu > least_cpu:
            speeds.stages[name], speeds.remaining[name] = size / cpu, out / size
    for name, (size, cpu) in nodes.items():
        if size > least_bytes and cpu > least_cpu:
            speeds.stages[name] = size / cpu
    if stored_text > least_bytes:
        speeds.compressed = stored / stored_text
    return speeds


def _count_node(nodes: dict[str, list[float]], record: PartRecord, bytes_per_document: float) -> None:
    """Add the bytes that a finished task read, and its CPU seconds, to its entry in `nodes`: {kind: [bytes, CPU
    seconds]}. Only the tasks of a barrier such as deduplication (`deduped/minhash.1/bands`), of shards
    (`shards:web/encode`) and of the tokenizer are counted."""
    top, _, wave = record.node.partition("/")
    if top == TOKENIZER:
        if not wave:                                 # the training task, and the bytes it has read
            nodes["tokenizer"][0] += record.counters.get("bytes", 0)
        nodes["tokenizer"][1] += record.cpu_s
        return
    if not wave:
        return                                       # an index task: its speed is INFLATE_SPEED
    if top.startswith("shards:"):
        read = sum(record.counters[s]["bytes"] for s in ("train", "val") if s in record.counters)
        into = nodes["shards"]
    else:
        read = record.counters.get("documents", 0) * bytes_per_document
        into = nodes[wave.partition(".")[0]]
    into[0] += read
    into[1] += record.cpu_s


@dataclass(frozen=True)
class Plan:
    """The plan of a recipe for a store: the nodes to run, and the store's log, which tells which of their results
    exist."""

    store: Store
    log: LogView
    planner: Planner
    nodes: list[Node]
    fresh: FreshNodes


def open_plan(recipe: Recipe, store_root: str, *, verify_inputs: bool = False) -> Plan:
    """Make the plan of a recipe for the store at `store_root`. Nothing is written, and the store need not exist. With
    `verify_inputs`, input files are identified by hashes of their contents."""
    store = Store(store_root)
    if store.local is not None and store.local.exists() and not store.local.is_dir():
        raise StoreError(f"{store.root} is a file, not a store; choose another --store")
    log = Log.read(store)
    planner = Planner(recipe, store.read_checked, quarantined=log.quarantined, earlier=log.earlier,
                      verify_inputs=verify_inputs)
    nodes = planner.nodes() + token_nodes(recipe, planner)
    return Plan(store, log, planner, nodes, FreshNodes(log, node_ingredients(planner, nodes), planner.warnings))


def survey_recipe(recipe: Recipe, store_root: str, *, verify_inputs: bool = False) -> dict[str, Any]:
    """Make the plan of a recipe for the store at `store_root`, and return its description (`describe_plan`). Nothing is
    written, and the store need not exist. With `verify_inputs`, input files are identified by their contents."""
    plan = open_plan(recipe, store_root, verify_inputs=verify_inputs)
    speeds = measured(plan.log.sample(MEASURED))
    return describe_plan(recipe, plan, survey(plan.nodes, plan.log.get_all, plan.fresh), speeds)


def describe_plan(recipe: Recipe, plan: Plan, states: Iterable[NodeState], speeds: Speeds) -> dict[str, Any]:
    """Describe the plan of a recipe as a JSON document. It has the inputs, the nodes, the names of the nodes that would
    run, and the settings changed since the latest run. Each node (pass, barrier …) is listed with its steps,
    partitions, fresh (finished) and stale (unfinished) tasks, bytes, CPU time and disk space. `states` are those of all
    nodes of the plan (`survey`), and `speeds` are those that the estimates take."""
    store, planner = plan.store, plan.planner
    inputs = {}
    for name in planner.sources_used():
        files, expansion = planner.source_files(name), planner.expansion(name)
        inputs[name] = {"reader": recipe.sources[name].read, "files": len(files), "bytes": files.bytes,
                        "expected": int(sum(f.size * expansion(f.path) for f in files))}
    flow = Flow(recipe, planner, speeds, inputs)
    rows = [flow.row(state) for state in states]
    for row in rows:
        if facts := flow.barriers[row["name"]].facts() if row["name"] in flow.barriers else []:
            row["facts"] = facts
    return {
        "recipe": recipe.name, "digest": recipe.digest(), "store": store.root, "inputs": inputs, "nodes": rows,
        "warnings": [*recipe.warnings, *lint(recipe, speeds.stages), *planner.warnings],
        "reruns": {r["name"]: {"tasks": r["stale"], "of": r["fresh"] + r["stale"] + r["pending"]}
                   for r in rows if r["stale"]},
        "waits": [r["name"] for r in rows if r["pending"] or r["status"] == "waits"],
        "unchanged": [r["name"] for r in rows if r["status"] == "fresh" and r["partitions"]],
        "changes": changes(recipe, store),
        "measured": sorted(speeds.stages),
        "total": {"tasks_fresh": sum(r["fresh"] for r in rows), "tasks_stale": sum(r["stale"] for r in rows),
                  "bytes_in": sum(i["bytes"] for i in inputs.values()),
                  "cpu_s": round(sum(r["cpu_s"] for r in rows), 1),
                  "disk_bytes": sum(r["disk_bytes"] for r in rows)},
    }


class Flow:
    """Estimates how many bytes of text of each source are left after each node of a plan (pass, barrier …), and what
    each node costs. `row` must be called for all nodes in the order of the plan. For a finished pass, the sizes that
    its tasks recorded are used. A node that waits for other nodes is estimated as if all of its tasks had to run."""

    def __init__(self, recipe: Recipe, planner: Planner, speeds: Speeds, inputs: Mapping[str, Any]) -> None:
        self.plans = {p.name: p for plans in planner.passes.values() for p in plans}
        self.barriers = {name: barrier for name, (_, barrier, _, _) in planner.barriers.items()}
        self.recipe, self.target, self.speeds, self.inputs = recipe, planner.target, speeds, inputs
        self.text: dict[str, dict[str, float]] = {}
        self.cores = usable_cores()

    def row(self, state: NodeState) -> dict[str, Any]:
        """Return the line of the plan for one node (pass, barrier …), as a dict. `partitions` is None while the number
        of the node's tasks is not known. `status` is fresh (all tasks have results), stale (no task has one), partly
        (some tasks have one) or waits. A node waits if its tasks are not known yet, or if all of them wait for parts of
        an earlier pass."""
        node = state.node
        total = state.fresh + state.stale + state.pending
        if state.unknown or (state.pending and not state.fresh and not state.stale):
            status = "waits"
        elif not state.stale and not state.pending:
            status = "fresh"
        else:
            status = "partly" if state.fresh else "stale"
        cpu, disk, bytes_in = self._cost(node, state, status)
        if state.stale:
            cpu *= 1 - (1 - REPLAYED) * state.replayed / state.stale
        share = 0.0 if status == "fresh" else 1.0
        if status == "partly" and not state.pending:
            share = state.weight / max(state.weight + state.weight_fresh, 1)
        elif status == "partly":
            share = 1 - state.fresh / total
        return {"name": node.name, "kind": node.kind, "deps": node.upstream,
                **({"against": [redact(name) for name in node.against]} if node.against else {}),
                "steps": list(node.steps),
                "publishes": node.publishes, "status": status, "partitions": None if state.unknown else total,
                "fresh": state.fresh, "stale": state.stale, "pending": state.pending, "more": state.more,
                "replayed": state.replayed,
                "expected_partitions": self._expected(node, bytes_in) if state.unknown else None,
                "bytes_in": int(bytes_in), "cpu_s": round(cpu * share + self._starting(state, status), 1),
                "disk_bytes": int(disk * share)}

    def _starting(self, state: NodeState, status: str) -> float:
        """Return the CPU seconds that child processes take to load the steps of a pass. The estimate assumes one child
        process per core, but no more than the pass has unfinished tasks."""
        if state.node.kind != "pass" or status == "fresh":
            return 0.0
        return START_CPU_S * min(max(state.stale + state.pending, 1), self.cores)

    def _expected(self, node: Node, bytes_in: float) -> int | None:
        """Return the approximate number of partitions (inputs of single tasks) of a pass that reads sources; None for
        any other node. `bytes_in` is the number of bytes that the pass reads. The exact number is known only when the
        big files have been indexed."""
        plan = self.plans.get(node.name)
        if plan is None or any(kind != "source" for kind, _ in plan.inputs):
            return None
        return max(1, math.ceil(bytes_in / self.target))

    def _cost(self, node: Node, state: NodeState, status: str) -> tuple[float, float, float]:
        """Returns (CPU seconds, bytes written, bytes read) for all tasks of a node, finished or not."""
        if node.kind == "index":
            bytes_in, source = state.weight + state.weight_fresh, node.name.removeprefix("index:")
            self.text[node.name] = {source: float(self.inputs[source]["bytes"])}         # read by shards of tokens
            return bytes_in / INFLATE_SPEED, 0.0, bytes_in
        if node.kind == "pass":
            return self._pass(node, state, status)
        size = sum(b for d in node.deps for s, b in self.text.get(d, {}).items() if self._takes(node, s))
        if node.kind == "barrier":
            return size / self.speeds.of(node.steps[0], self.barriers[node.name])[0], size * BARRIER_BYTES, size
        if node.kind == "tokenizer":
            trained = self.recipe.tokenizer.train if self.recipe.tokenizer else None
            size = min(size, trained.sample_bytes if trained else 0)
            return size / self.speeds.stages.get("tokenizer", TOKENIZER_SPEED), 0.0, size
        return size / self.speeds.stages.get("shards", SHARD_SPEED), size * SHARD_BYTES, size

    def _takes(self, node: Node, source: str) -> bool:
        shards = self.recipe.shards.get(node.name.removeprefix("shards:")) if node.kind == "shards" else None
        selected = shards.where.get("source") if shards else None
        return not selected or source in selected

    def _pass(self, node: Node, state: NodeState, status: str) -> tuple[float, float, float]:
        plan = self.plans[node.name]
        sizes: dict[str, float] = defaultdict(float)
        for kind, name in plan.inputs:
            text = {name: float(self.inputs[name]["expected"])} if kind == "source" else self.text.get(name, {})
            for source, size in text.items():
                if source in plan.where.get("source", [source]):
                    sizes[source] += size
        bytes_in = size = sum(sizes.values())
        cpu = bytes_in / READ_SPEED
        if plan.barrier is not None:
            size *= self.speeds.of(plan.barrier_name, self.barriers[plan.barrier])[1]
        written = size if plan.rewrites else bytes_in - size     # a row set is small, but removed documents are written
        for step in plan.chain:
            speed, ratio = self.speeds.of(step.name, step.stage)
            cpu += size / speed
            size *= ratio
            if step.stage.extracts:
                written = size                        # documents that an extractor drops have no text to store
        self.text[node.name] = {s: b * size / bytes_in for s, b in sizes.items()} if bytes_in else {}
        if status == "fresh":
            exact = state.sums.counters.get("kept", {})
            self.text[node.name] = {source: kept["bytes"] for source, kept in exact.items()}
        return cpu, written * self.speeds.compressed, bytes_in
