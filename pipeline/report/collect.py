"""Makes report.json, which holds the figures of a run, from the commit records of the run's tasks and from a few of the
files they wrote.

No document is processed again. The records hold counters, which are added up, and only a few parts (files of documents)
are opened, to show samples. So apart from reading the log, neither memory nor time depends on the number of parts. All
figures except measured times can be checked by a query over the published parts; tests/e2e/test_report_figures.py does
so with DuckDB.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from pipeline.base.visible import json_text
from pipeline.engine.driver.sums import NodeSums
from pipeline.plan.changes import run_recipe_of
from pipeline.report.clusters import cluster_section
from pipeline.report.costs import pass_costs, stage_costs, task_costs
from pipeline.report.course import losses, mixture_course
from pipeline.report.documents import dataset_section, duplicate_section, funnel, source_section
from pipeline.report.domains import domain_section
from pipeline.report.graph import graph
from pipeline.report.made import made_section
from pipeline.report.marks import stages_of
from pipeline.report.nodes import NodeFigures
from pipeline.report.order import order_quality
from pipeline.report.samples import kept_samples
from pipeline.report.signals import signal_section
from pipeline.report.tokens import curriculum_of, mixture, token_counts, warnings
from pipeline.report.totals import totals
from pipeline.report.training import training
from pipeline.store.fs import Store
from pipeline.store.records import PartRecord
from pipeline.store.runs import RunTasks

Get = Callable[[str], PartRecord | None]
Sums = Mapping[str, NodeSums]

#: version of report.json
VERSION = 6


def write_report(store: Store, run: str, get: Get, check_lease: Callable[[], None] = lambda: None,
                 sums: Sums = MappingProxyType({}), recipe: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Collect the report of a run and write runs/RUN/report.{json,md,html} and STORE/report.json. Returns the content
    of report.json.

    * `get` returns the commit record of the task with a given key. It is `Log.get` in the driver (the process that
      plans a run and commits its results), and `Log.read(store).get` in any other process.
    * `check_lease` (`Log.check_lease`) is called before anything is written. It raises if another driver has taken over
      the store, which may happen while the report is collected.
    * `sums` maps names of plan nodes (passes, deduplications …) to the sums of their counters. For other nodes, all
      records are read and added up.
    * `recipe` is the recipe of the run as the driver has it. To mark words in samples, only files that this recipe
      names are opened. Without it, the recipe is read from the store, whose file names are not trusted.
    """
    document = collect(store, run, get, sums, recipe)
    write_pages(store, document, latest=True, check_lease=check_lease)
    return document


def add_training(store: Store, run: str) -> bool:
    """Write the report of a run again, with the trainer's results from runs/RUN/train.

    All other figures are copied from the run's report.json. The function therefore also works for a copy of a run on
    another cluster, without the log and the parts (files of documents). Returns False, and writes nothing, when there
    are no results of a training, or no report.json of this version.
    """
    at, section = f"runs/{run}/report.json", training(store, run)
    if section is None or not store.exists(at):
        return False
    document = json.loads(store.read(at))
    if document["version"] != VERSION:
        return False
    latest = store.exists("report.json") and json.loads(store.read("report.json"))["run"] == run
    write_pages(store, {**document, "training": section, "losses": losses(store, run)}, latest=latest)
    return True


def write_pages(store: Store, document: dict[str, Any], *, latest: bool,
                check_lease: Callable[[], None] = lambda: None) -> None:
    """Write report.json, report.md and report.html into the folder of the run, and contamination.jsonl if items of
    evaluation sets were found. With `latest`, report.json is also written to the root of the store, where it marks this
    run as the latest finished one. `check_lease` is called before anything is written. It raises if another driver (a
    process that plans and commits a run) has taken over the store."""
    from pipeline.report.card import render_card
    from pipeline.report.contamination import contamination_lines
    from pipeline.report.html import render

    page, card = render(document).encode(), render_card(document).encode()
    data = json_text(document, indent=1, sort_keys=True).encode()
    check_lease()
    if lines := contamination_lines(document):
        store.write(f"runs/{document['run']}/contamination.jsonl", lines.encode())
    store.write(f"runs/{document['run']}/report.md", card)
    store.write(f"runs/{document['run']}/report.html", page)
    if latest:
        store.write("report.json", data)
    store.write(f"runs/{document['run']}/report.json", data)     # last, as `tokenmill takedown` assumes


def collect(store: Store, run: str, get: Get, sums: Sums = MappingProxyType({}),
            recipe: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the content of report.json. Its sections are described in the docstrings of the functions that make them,
    and the arguments in that of `write_report`."""
    plan, nodes = nodes_of(store, run, get, sums)
    passes = [n for n in nodes if n.kind == "pass"]
    stages = partial(stages_of, run_recipe_of(store, run) if recipe is None else recipe, files=recipe is not None)
    curriculum = curriculum_of(store, run)
    tokens = token_counts(store, nodes, curriculum)
    document = {
        "version": VERSION, "run": run, "recipe": plan["recipe"], "about": plan["about"],
        "made": made_section(store, run),
        "missing_records": sum(n["tasks"] for n in plan["nodes"]) - sum(n.tasks for n in nodes),
        "names": names(plan, passes, tokens),
        "sources": {name: source_section(name, info, passes) for name, info in plan["sources"].items()},
        "funnel": funnel(plan["sources"], passes, tokens),
        "datasets": {n.dataset: dataset_section(store, [p for p in passes if p.dataset == n.dataset],
                                                stages(n.dataset or ""))
                     for n in passes if n.publishes},
        "signals": {n.dataset: signal_section(store, [p for p in passes if p.dataset == n.dataset])
                    for n in passes if n.publishes},
        "domains": {n.dataset: domain_section(store, [p for p in passes if p.dataset == n.dataset])
                    for n in passes if n.publishes},
        "graph": graph(nodes, tokens, curriculum),
        "samples": {n.dataset: kept_samples(store, n) for n in passes if n.publishes},
        "licences": {n.dataset: n.counters.get("licences", {}) for n in passes if n.publishes},
        "duplicates": [duplicate_section(store, n, nodes) for n in nodes if n.kind == "barrier"],
        "clusters": [cluster_section(store, n, nodes) for n in nodes if n.kind == "barrier"],
        "tokens": tokens,
        "mixture": mixture(curriculum),
        "order": curriculum.order if curriculum else None,
        "course": mixture_course(curriculum), "losses": losses(store, run),
        "order_quality": order_quality(curriculum, store),
        "training": training(store, run),
        "passes": pass_costs(passes), "stages": stage_costs(passes), "tasks": task_costs(nodes),
        "lineage": [n.lineage() for n in nodes],
        "warnings": plan["warnings"],
    }
    document["warnings"] = warnings(document)
    document["totals"] = totals(document)
    return document


def nodes_of(store: Store, run: str, get: Get,
             sums: Sums = MappingProxyType({})) -> tuple[dict[str, Any], list[NodeFigures]]:
    """Return the content of a run's plan.json, and the nodes of the plan (passes, deduplications …) with the summed
    counters of their tasks. `get` returns the commit record of a task by its key, and `sums` are those of
    `write_report`."""
    plan = json.loads(store.read(f"runs/{run}/plan.json"))
    tasks = RunTasks(store, run)
    return plan, [NodeFigures(n, partial(_committed, tasks, n["name"], get), sums.get(n["name"]),
                              partial(_smallest, tasks, n["name"], get)) for n in plan["nodes"]]


def _smallest(tasks: RunTasks, node: str, get: Get, n: int) -> list[PartRecord]:
    """Return the commit records of those `n` tasks of a node of the plan that have the smallest keys."""
    keys = dict.fromkeys(heapq.nsmallest(2 * n, tasks.keys(node)))       # a task that was asked for twice occurs twice
    return [record for key in list(keys)[:n] if (record := get(key)) is not None]


def _committed(tasks: RunTasks, node: str, get: Get) -> Iterator[PartRecord]:
    """Yield the commit records of the tasks of a node of the plan, in plan order. Tasks without a record are left
    out."""
    return (record for key in tasks.keys(node) if (record := get(key)) is not None)


def names(plan: dict[str, Any], passes: list[NodeFigures], tokens: dict[str, Any]) -> dict[str, list[str]]:
    """Return the names of sources, datasets and token streams as lists in plan order, because the keys of a JSON object
    have no order. `final` lists the datasets from which no other dataset is made."""
    datasets = [n.dataset for n in passes if n.publishes]
    inputs = {d for n in passes for d in n.deps if d != n.dataset}
    return {"sources": list(plan["sources"]), "datasets": datasets, "streams": list(tokens),
            "final": [d for d in datasets if d not in inputs]}
