"""Router: shows the assets of a run, as JSON and as a page. An asset is a node of the run's plan (a source, pass,
deduplication, token stream …) with its results. For each asset, the answer says:

- whether the results are fresh or stale
- what the run has made, and what this cost
- what it would cost now
- what the checks of the published documents found
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Depends, Request
from markupsafe import Markup
from starlette.concurrency import run_in_threadpool
from starlette.responses import HTMLResponse

from pipeline.base.visible import visible
from pipeline.report.dag import draw
from pipeline.report.graph import compared
from pipeline.service.access import Viewer, viewer
from pipeline.service.asset_checks import dataset_checks
from pipeline.service.asset_figures import Figures, documents_of, read_figures
from pipeline.service.datasets import QueriesOf, answer
from pipeline.service.html import page
from pipeline.service.pages import or_problem
from pipeline.service.plans import Plans, plan_key
from pipeline.service.problems import HttpProblem
from pipeline.service.session import Role
from pipeline.service.stores import RunOf, StoreOf
from pipeline.service.submit import check_submission, kept_submission, queue_of, refuse_errors
from pipeline.store.fs import Store

router = APIRouter(prefix="/api/v1/stores", tags=["runs"], dependencies=[Depends(viewer)])
page_router = APIRouter(include_in_schema=False, dependencies=[Depends(viewer)])

#: most stale nodes for which the plan says why they are stale
CAUSES = 20
#: the states of a node in a plan, and its state without a plan; the results of a check, the worst first
STATES, UNKNOWN, RESULTS = ("fresh", "partly", "stale", "waits"), "unknown", ("failed", "warning", "passed")
#: the fields of a node that both the report's graph and the plan have
NODE = ("name", "kind", "steps", "tasks")


@router.get("/{store}/runs/{run}/assets", summary="Show the assets of a run")
async def show_assets(request: Request, store: str, run: RunOf, at: StoreOf, role: Viewer,
                      queries: QueriesOf) -> dict[str, Any]:
    """Show the nodes of a run's plan, and which node hands documents to which. `problems` says why a part of the answer
    is missing.

    `state` says whether the store has the results that the run's recipe would make now:

    - fresh: all of them
    - partly: some of them
    - stale: none of them
    - waits: this is known only when other nodes are done
    - unknown

    To find out the states, the recipe must be planned. This is done for operators only; others get the state unknown.
    """
    problems: list[dict[str, Any]] = []
    stop = queries.stop()

    def call() -> dict[str, Any]:
        with queries.turn(stop):
            figures = read_figures(at, run)
            return {"figures": figures, "checks": dataset_checks(at, figures, stop)}

    stored = await or_problem(answer(request, stop, call), problems)
    planned = await or_problem(_planned(request, store, at, run, role), problems)
    figures, checks = (stored["figures"], stored["checks"]) if stored else (None, {})
    plan, causes = (planned["plan"], planned["causes"]) if planned else (None, {})
    documents = documents_of(figures) if figures else {}
    costs = {node.name: node.model_dump(include={"cpu_s", "bytes"}) for node in figures.lineage} if figures else {}
    rows = {row["name"]: row for row in plan["nodes"]} if plan else {}
    nodes, edges = _graph(figures, plan)
    assets = [{**_asset(node, rows.get(name := node["name"])), "documents": documents.get(name),
               "cost": costs.get(name), "causes": causes.get(name, []), "checks": checks.get(name, [])}
              for node in nodes]
    return {"store": store, "run": run, "report": figures is not None, "planned": plan is not None, "nodes": assets,
            "edges": edges, "total": plan and plan["total"], "changes": plan and plan["changes"], "problems": problems}


async def _planned(request: Request, store: str, at: Store, run: str, role: Role) -> dict[str, Any]:
    """Plan the recipe that the store keeps for a run, like the route `recipes/plan`, and return the plan. If the recipe
    and the log of finished tasks have not changed, a plan that is less than KEPT_S seconds old is returned instead.

    Raises HttpProblem when the sender is no operator, when the recipe cannot be planned, or when this takes too long.
    Planning may take half of the time limit of a request.
    """
    if role is not Role.operator:
        raise HttpProblem(403, "Operators only",
                          "to find out what is fresh, the recipe is planned, which reads its inputs", "Authorization",
                          "ask for an operator's token to see the states and what a run would cost now")
    entries = await run_in_threadpool(queue_of(request, store).entries)
    submission = await run_in_threadpool(kept_submission, request, at, run, str(role), entries)
    plans: Plans = request.app.state.plans
    key = await run_in_threadpool(plan_key, at, submission)
    if (kept := plans.get(key)) is not None:
        return kept
    most = request.app.state.settings.request_s / 2
    try:
        result = await asyncio.wait_for(check_submission(request, submission, at, CAUSES), most)
    except TimeoutError:
        raise HttpProblem(503, "Takes too long", f"the recipe could not be planned within {most:.0f} s", "recipe",
                          "try again when the server is less busy, or use tokenmill plan on its machine") from None
    refuse_errors(result)
    plans.put(key, result)
    return result


# -- what was made, and what would be --------------------------------------------------------------------------------
def _graph(figures: Figures | None, plan: Mapping[str, Any] | None) -> tuple[list[dict[str, Any]],
                                                                            list[dict[str, Any]]]:
    """Return the nodes and edges of a run's graph: first those in the run's report, then those that only the new plan
    has. A pass that follows a barrier (a deduplication) has an edge from the barrier, but none from the passes before
    the barrier, as in the report."""
    nodes = [node.model_dump(include=set(NODE)) for node in figures.graph.nodes] if figures else []
    edges = [edge.model_dump(by_alias=True, exclude_none=True) for edge in figures.graph.edges] if figures else []
    known, rows = {node["name"] for node in nodes}, plan["nodes"] if plan else []
    barriers = {row["name"] for row in rows if row["kind"] == "barrier"}
    planned = {row["name"] for row in rows}
    for row in rows:
        if row["name"] not in known:
            edges += compared(nodes, row["name"], row["steps"], row.get("against", []), planned)
            nodes.append({**{key: row[key] for key in NODE if key in row}, "tasks": row["partitions"] or 0})
            deps = [dep for dep in row["deps"] if dep in barriers] or row["deps"]
            edges += [{"from": dep, "to": row["name"]} for dep in deps]
    return nodes, edges


def _asset(node: Mapping[str, Any], row: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a node of the graph with facts from `row`, its row of the plan. The facts are its state, its numbers of
    tasks, and what running it would cost now. The numbers of tasks are None if they are not known yet.

    The state of a node without a row is unknown. For the curriculum and the folder of an index, it is None. These never
    have a row: every run writes the curriculum anew, and no run writes such a folder.
    """
    if row is None:
        state = None if node["kind"] in ("curriculum", "folder") else UNKNOWN
        return {**node, "state": state, "fresh": None, "stale": None, "pending": None, "cost_now": None}
    tasks = {key: row[key] if row["partitions"] is not None else None for key in ("fresh", "stale", "pending")}
    return {**node, "state": row["status"], **tasks, "cost_now": {key: row[key] for key in ("cpu_s", "disk_bytes")}}


# -- the page --------------------------------------------------------------------------------------------------------
@page_router.get("/stores/{store}/runs/{run}/assets")
async def assets_page(request: Request, store: str, run: RunOf, at: StoreOf, role: Viewer,
                      queries: QueriesOf) -> HTMLResponse:
    """Show the assets of a run: their graph as a picture, and all facts about them in tables."""
    document = await show_assets(request, store, run, at, role, queries)
    states = Counter(node["state"] for node in document["nodes"] if node["state"])
    return page(request, "assets.html.j2", store=store, run=run, d=document, results=RESULTS,
                states=[(word, states[word]) for word in (*STATES, UNKNOWN) if states[word]],
                picture=await run_in_threadpool(_picture, document))


def _picture(document: Mapping[str, Any]) -> Markup | None:
    """Draw the graph of a run's nodes as SVG. Returns None when the graph has no edges, or too many nodes."""
    nodes = []
    for node in document["nodes"]:
        dropped = (node["documents"] or {}).get("dropped")
        nodes.append({**{key: node[key] for key in NODE}, **({"dropped": dropped} if dropped else {}),
                      **({"state": node["state"]} if node["state"] else {})})
    svg = draw({"nodes": nodes, "edges": document["edges"]})
    return None if svg is None else Markup(visible(svg))          # `tag` has escaped all names in it
