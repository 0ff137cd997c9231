"""Runs a recipe (`tokenmill run`): makes a plan, runs the tasks whose results are missing, and publishes datasets,
shards (token files), curriculum and report."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

from pipeline.base.collector import rarely_collected
from pipeline.base.machine import usable_cores
from pipeline.base.redact import redact
from pipeline.cluster.attempts import asked_to_stop, code_folder, facts_of, keep_code, keep_recipe, note_attempt
from pipeline.cluster.cancellation import GRACE_S, interrupted, watching
from pipeline.engine.driver.bad_files import BadFiles
from pipeline.engine.driver.endings import TaskFailed
from pipeline.engine.driver.progress import Progress
from pipeline.engine.driver.protocols import Backend
from pipeline.engine.driver.scheduler import Scheduler
from pipeline.engine.driver.sums import NodeSums
from pipeline.heal import until_sound
from pipeline.plan.changes import run_before
from pipeline.plan.drive import PlannedRun, TooManyErrors, check_error_rate, drive_all
from pipeline.plan.fresh import FreshNodes, Results, our_code
from pipeline.plan.nodes import Node
from pipeline.plan.objects import ListingJournal
from pipeline.plan.planner import Planner
from pipeline.plan.provenance import node_ingredients, write_provenance
from pipeline.plan.tokens import token_nodes
from pipeline.publication import NamedRecipe, publish_dataset, publish_failed, publish_lost, publish_tokens
from pipeline.recipe.citation import citation
from pipeline.recipe.hub import hub_tokenizer
from pipeline.recipe.marks import parse_yaml
from pipeline.recipe.model import Recipe
from pipeline.report.collect import write_report
from pipeline.report.signals import measured
from pipeline.store.fs import Store
from pipeline.store.garbage import collect_garbage
from pipeline.store.lists import writes_to
from pipeline.store.log import Log
from pipeline.store.records import PartRecord
from pipeline.store.runs import write_tasks
from pipeline.store.tombstones import finished_tombstones

logger = logging.getLogger("tokenmill")
#: most damaged files that the report names
SHOWN = 20


@dataclass(frozen=True)
class RunSummary:
    """The result of a run: its name, the path of its store, and its main figures."""

    run: str
    store: str
    datasets: dict[str, int]            # rows
    shards: dict[str, int]              # training tokens, by stream
    executed: int                       # tasks that ran, of all recipes that ran together
    reused: int                         # tasks that had been done before, of all these recipes
    warnings: list[str]


def run_name(recipe: Recipe) -> str:
    """Return the name of a recipe's run. The name depends only on the recipe, so running the same recipe again
    continues or reuses the same run. Only letters, digits, '_', '.' and '-' are kept; other characters are replaced. So
    the name is safe as a file name and as a word in a shell."""
    stem = re.sub(r"[^\w.-]+", "-", recipe.name)[:64].strip("-.")
    return f"{stem or 'recipe'}-{recipe.digest()[:8]}"


def run_recipe(recipe: Recipe, store_root: str, *, make_backend: Callable[[Store], Backend], show: str = "quiet",
               run: str | None = None, dispatch_seed: int | None = None, takeover: bool = False,
               verify_inputs: bool = False, report: bool = True, attempt: int | None = None) -> RunSummary:
    """Run `recipe`, and return when all its results are published in the store. Raises when something failed. Every
    finished task is committed within about a second. After a failure, the next run of the same recipe does not repeat
    the committed tasks.

    - `make_backend` creates the backend, the object that runs tasks. The backend starts its workers only when there
      are tasks to run, and has stopped them on return
    - `show` is how progress is shown: rich, quiet or json
    - `run` is the name of the run (default: `run_name`)
    - `dispatch_seed` mixes the order of tasks, for tests
    - `takeover` ends another driver that owns the store
    - `verify_inputs` makes the run hash local input files; otherwise a file with unchanged size and time counts as
      unchanged
    - `report` says whether a report is written
    - `attempt` is the number of an attempt (one execution of the run) that another process has already noted in
      run.json; by default, this process notes a new attempt

    A process on any machine can stop the run with `attempts.ask_to_stop`. Running tasks then get a minute to finish,
    and Interrupted is raised.
    """
    [summary] = run_recipes([NamedRecipe(run or run_name(recipe), recipe)], store_root, make_backend=make_backend,
                            show=show, dispatch_seed=dispatch_seed, takeover=takeover, verify_inputs=verify_inputs,
                            report=report, attempt=attempt)
    return summary


def run_recipes(recipes: Sequence[NamedRecipe], store_root: str, *, make_backend: Callable[[Store], Backend],
                show: str = "quiet", dispatch_seed: int | None = None, takeover: bool = False,
                verify_inputs: bool = False, report: bool = True, attempt: int | None = None) -> list[RunSummary]:
    """Run several recipes as one plan, with one driver (the process that schedules their tasks), and return a summary
    of each run. A task that several recipes have in common runs once. Progress, and requests to stop, belong to the run
    of the first recipe. The other arguments are those of `run_recipe`."""
    store = Store(store_root)
    name = recipes[0].run
    backend = make_backend(store)                 # the backend acquires nothing before it is started
    log = Log.open(store, run=name, takeover=takeover)
    state, error, trace = "failed", None, None
    with contextlib.ExitStack() as ending:        # runs the callbacks in reverse order, even when one of them raises
        ending.callback(log.close)
        ending.enter_context(rarely_collected())
        grace_s = GRACE_S if attempt is not None else 0.0  # Ray Jobs waits longer (`cluster.jobs`)
        if attempt is None:
            attempt = facts_of(store, name).get("attempt", 0) + 1
            while asked_to_stop(store, name, attempt):  # run.json was lost, and the request is for an earlier attempt
                attempt += 1
            for one in recipes:
                note_attempt(store, one.run, attempt, "local", recipe=one.recipe.name, base=one.recipe.base,
                             before=run_before(store, one.run))

        def snapshot(doc: dict[str, Any]) -> None:
            log.check_lease()  # a driver that was taken over must not overwrite its successor's progress
            try:
                for one in recipes:                            # readers judge by the file's age
                    store.write(f"runs/{one.run}/progress.json", json.dumps({**doc, "run": one.run}).encode())
            finally:
                backend.emit(name, doc)

        progress = Progress(show, snapshot, facts={"run": name, "attempt": attempt})
        ending.callback(lambda: progress.close(state, error, trace))
        ending.callback(backend.close)
        try:
            progress.begin()
            summaries = _run(recipes, store, attempt, log, Scheduler(
                backend, log, progress, dispatch_seed=dispatch_seed, grace_s=grace_s), verify_inputs, report)
            state = "done"
            return summaries
        except (KeyboardInterrupt, SystemExit):           # Interrupted, or a signal before or after the tasks
            state = "stopped"
            raise
        except Exception as e:
            error, trace = str(e) or type(e).__name__, "".join(traceback.format_exception(e))
            raise


def _run(recipes: Sequence[NamedRecipe], store: Store, attempt: int, log: Log, scheduler: Scheduler,
         verify_inputs: bool, report: bool) -> list[RunSummary]:
    """Run the recipes in three steps: remove files that the store does not need any more; keep each recipe, its code
    and its tokenizer in the folder of its run; plan the recipes and run the tasks. When a file of the store turns out
    to be damaged, the recipes are planned and run again. Returns a summary of each run.

    Before files outside the commit log are written, `log.check_lease` is called, which raises when another process has
    taken over the store.
    """
    our_code()                                    # early: another version may be installed while sources are listed
    finished_tombstones(store)                    # before anything is written: a takedown may have to be completed
    mended = dict(collect_garbage(log).damaged)
    for one in recipes:
        recipe = one.recipe
        with interrupted(store, recipes[0].run, attempt):
            hub = hub_tokenizer(recipe)
        if hub is not None:
            recipe.pin_tokenizer(hub.pinned)
            store.write(f"{code_folder(one.run)}/{hub.path.name}", hub.path.read_bytes())
        keep_recipe(store, one.run, recipe.canonical_yaml().encode(), recipe.text)
        keep_code(store, one.run, recipe.code)
        recipe.keep_code_at(code_folder(one.run))
    for path, why in mended.items():
        logger.warning("%s %s; the task that wrote it runs again", path, why)
    return until_sound(store, log, scheduler, lambda: _plan_and_drive(
        recipes, store, attempt, log, scheduler, verify_inputs, report, mended), mended)


def _plan_and_drive(recipes: Sequence[NamedRecipe], store: Store, attempt: int, log: Log, scheduler: Scheduler,
                    verify_inputs: bool, report: bool, mended: Mapping[str, str]) -> list[RunSummary]:
    """Plan the recipes, run the tasks that have no record in the commit log, and publish the results. Returns a summary
    of each run. Raises DamageFound or DamagedFile when a file that is needed differs from its record."""
    name = recipes[0].run
    journal = ListingJournal(store, log.check_lease)
    with interrupted(store, name, attempt):
        plans = [_RunPlan(one, store, log, verify_inputs, journal) for one in recipes]
        for plan in plans[1:]:
            plan.planner.listings = plans[0].planner.listings             # each remote source is listed once
        for plan in plans:
            plan.make()
    journal.remove()
    files = {source: max(plan.files.get(source, 0) for plan in plans) for plan in plans for source in plan.files}
    bad_files = scheduler.bad_files = BadFiles(recipes[0].recipe.run.max_bad_files, sum(files.values()))
    log.check_lease()
    runs = []
    for plan in plans:
        with interrupted(store, name, attempt):
            ingredients = node_ingredients(plan.planner, plan.nodes)
        write_provenance(store, plan.one.run, plan.planner, ingredients, log.epoch)
        fresh = FreshNodes(log, ingredients, plan.planner.warnings, suffix=plan.one.suffix)
        runs.append(PlannedRun(plan.nodes, partial(plan.finished, bad_files, plans), fresh, plan.results))
    with watching(store, name, attempt, lambda: scheduler.stop(grace_s=GRACE_S)):
        try:
            drive_all(runs, scheduler)
        except TaskFailed:
            for message in (m for plan in plans for m in plan.read_badly):    # a possible cause of the failure
                logger.warning("%s", message)
            raise
    log.flush()
    log.check_lease()
    first_sets: dict[str, Any] = {}
    summaries = []
    for plan in plans:
        run, recipe = plan.one.run, plan.one.recipe
        warnings = [*recipe.warnings, *plan.planner.warnings, *bad_files.warnings(plan.read_badly),
                    *(f"{path} was damaged or missing, and was written again" for path in sorted(mended)[:SHOWN])]
        sets = publish_tokens(plan.one, store, log, plan.results, warnings, first_sets)
        first_sets = first_sets or sets
        log.check_lease()
        document = plan_document(plan.planner, plan.nodes, warnings)
        store.write(f"runs/{run}/plan.json", json.dumps(document, indent=1).encode())
        if plan.one.index is not None:
            plan.one.index.take(plan.planner.indexes.wanted(plan.one.index.dataset, plan.results))
        write_tasks(store, run, ((n.name, chain.from_iterable(b.keys for b in n.batches)) for n in plan.nodes))
        if report:
            write_report(store, run, log.get, log.check_lease, plan.sums,
                         parse_yaml(recipe.canonical_yaml(), "recipe.yaml")[0])
        summaries.append(RunSummary(run, store.root, {d: plan.sums[d].rows for d in recipe.datasets},
                                    {n: s["train"]["tokens"] for n, s in sets.items()}, scheduler.executed,
                                    scheduler.reused, warnings))
    return summaries


class _RunPlan:
    """The plan of one of the recipes that run together. The results and counters of its nodes (such as passes over a
    dataset) are added while the recipes run."""

    def __init__(self, one: NamedRecipe, store: Store, log: Log, verify_inputs: bool, journal: ListingJournal) -> None:
        self.one, self.store, self.log = one, store, log
        self.planner = Planner(one.recipe, store.read_checked, quarantined=log.quarantined, earlier=log.earlier,
                               verify_inputs=verify_inputs, put_list=writes_to(store), journal=journal,
                               tombstones=finished_tombstones(store), indexed=one.index.dataset if one.index else "")
        self.nodes: list[Node] = []
        self.files: dict[str, int] = {}                  # source → number of its files
        self.results = Results()
        self.sums: dict[str, NodeSums] = {}
        self.read_badly: dict[str, None] = {}            # warnings about sources that could not be read well

    def make(self) -> None:
        """Plan the nodes (such as passes over a dataset), and list the input files of the sources. A missing input thus
        ends the run early."""
        nodes = self.planner.nodes() + token_nodes(self.one.recipe, self.planner)
        self.nodes = [node for node in nodes if node.name not in self.one.shared]
        self.files = {s: len(self.planner.source_files(s)) for s in self.planner.sources_used()}

    def finished(self, bad_files: BadFiles, plans: Sequence[_RunPlan], node: Node, results: Results,
                 node_sums: NodeSums) -> None:
        """Publish the results of a node of the plan (such as a pass over a dataset) that has just finished. Raises an
        error if too many of its documents failed. `plans` are the plans of all recipes; those that share the node get
        its results."""
        self.sums[node.name] = node_sums
        for other in plans:
            if other is not self and self is plans[0] and node.name in other.one.shared:
                other.results.put(node.name, results[node.name])
        max_error_rate = float(self.one.recipe.run.max_error_rate)
        if node.kind == "pass":
            for source in _without_document(node_sums):
                bad_files.check_source(source, self.files.get(source, 0),
                                       _first_detail(self.store, results[node.name].records, source))
            picks = bool(self.one.recipe.datasets[node.dataset].where)
            try:
                messages = check_error_rate(node, node_sums, max_error_rate, picks=picks, suffix=self.one.suffix)
                self.read_badly.update(dict.fromkeys(messages))
            except TooManyErrors:
                publish_failed(self.store, self.log, self.planner, node, results, self.one.suffix)
                raise
        if node.publishes:
            passes = [n for n in self.nodes if n.kind == "pass" and n.dataset == node.dataset]
            publish_dataset(self.store, self.log, node.dataset + self.one.suffix, passes, results, self.sums)
        if node.kind == "shards":
            publish_lost(self.store, self.log, node.name.removeprefix("shards:") + self.one.suffix,
                          results[node.name])
            check_error_rate(node, node_sums, max_error_rate, suffix=self.one.suffix)


def _without_document(sums: NodeSums) -> list[str]:
    """Return the names of the sources from which a pass (a group of steps that run together) got no document, because
    all their records were unreadable or skipped."""
    return [name for name, counts in sums.counters.get("read", {}).items()
            if counts["records"] == sum(counts["bad"].values()) + sum(counts["skipped"].values())]


def _first_detail(store: Store, records: Iterable[PartRecord], source: str) -> str:
    """Return an error message that explains why a document of `source` was quarantined. It is the first one in the
    quarantine files that the task records `records` name. Only the first row group of each file is read. Returns ""
    when no message is found."""
    for record in records:
        if record.files["quarantine.parquet"].rows:
            info = record.files["quarantine.parquet"]
            with store.parquet(info.path, info.sha256) as file:
                for row in file.read_row_group(0, columns=["source", "detail"], use_threads=False).to_pylist():
                    if row["source"] == source and row["detail"]:
                        return row["detail"]
    return ""


def make_backend(kind: str, workers: int | None, address: str | None,
                 ship_code: bool = False) -> Callable[[Store], Backend]:
    """Return a function that creates the backend, the object that runs tasks. `kind` is 'ray' (on a Ray that this
    process starts, or on the cluster at `address`), 'process' (in child processes) or 'inline' (in this process).
    `workers` is the greatest number of child processes that run at a time; None means one per CPU. With `ship_code`,
    this machine's packages are sent to the nodes of the cluster."""
    def make(store: Store) -> Backend:
        if kind == "inline":
            from pipeline.engine.backends.inline import InlineBackend

            return InlineBackend(store)
        if kind == "process":
            from pipeline.engine.backends.local import ProcessBackend

            return ProcessBackend(store, workers)
        if address is None:
            from pipeline.base.auth import own_token

            own_token()
        from pipeline.engine.backends.ray_backend import RayBackend

        return RayBackend(store, workers=workers, address=address, ship_code=ship_code)

    return make


def plan_document(planner: Planner, nodes: list[Node], warnings: list[str]) -> dict[str, Any]:
    """Return the content of plan.json: the nodes of the plan (such as a pass over a dataset), each after the nodes that
    it depends on. Reports are made from plan.json and from tasks.parquet, which lists the tasks. The field `measures`
    of a node says which signals (numbers stored beside a text) each of its steps computes, and which bounds the step's
    thresholds set for these signals."""
    measures = {p.name: [measured(s.name, s.stage) for s in p.chain if s.stage.signals or s.stage.bounds()]
                for passes in planner.passes.values() for p in passes}
    return {
        "version": 1,
        "recipe": planner.recipe.digest(),
        "about": citation(planner.recipe),
        "warnings": warnings,
        "unconfined": planner.unconfined,
        "sources": {name: {"files": len(files), "bytes": files.bytes}
                    for name, files in planner.files.items()},
        "nodes": [{"name": n.name, "kind": n.kind, "dataset": n.dataset, "deps": n.upstream, "steps": list(n.steps),
                   "publishes": n.publishes, "tasks": sum(map(len, n.batches)),
                   **({"against": [redact(name) for name in n.against]} if n.against else {}),
                   **({"measures": measures[n.name]} if n.name in measures else {})} for n in nodes],
    }


def default_workers() -> int:
    """Return the default number of child processes of a run: one for each core that this process may use."""
    return usable_cores()
