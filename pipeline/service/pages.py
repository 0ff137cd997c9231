"""Router: the HTML pages about stores, runs and documents. Each page gets its data from the functions of the JSON API,
and works without JavaScript."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any, get_args

from fastapi import APIRouter, Depends, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import HTMLResponse, Response

from pipeline.base.errors import TokenmillError
from pipeline.cluster.attempts import piece_name
from pipeline.plan.changes import comparable_run, compare_command, run_recipe_of
from pipeline.report.marks import SEARCHED, find_marks, pieces, stages_of
from pipeline.service import datasets, runs
from pipeline.service.access import Viewer, viewer
from pipeline.service.asset_figures import kept_sizes
from pipeline.service.browse import CHOSEN, MANY, BrowseView, filter_parameters
from pipeline.service.datasets import Kind, QueriesOf, filter_of
from pipeline.service.filters import SORTED_BY, STORED
from pipeline.service.html import STATIC, own_path, page, static_file
from pipeline.service.latest import NEWEST, made_datasets, runs_with
from pipeline.service.problems import HttpProblem, problem_of
from pipeline.service.session import Role
from pipeline.service.stores import RunOf, StoreOf, check_there
from pipeline.store.fs import Store

open_router = APIRouter(include_in_schema=False)
router = APIRouter(include_in_schema=False, dependencies=[Depends(viewer)])

#: runs that the first page shows of each store, and that the page of one store shows
FEW, RUNS = 10, 100
#: documents of a page, and characters of each
DOCUMENTS, EXCERPT = 50, 300
#: characters of a document that are shown: at first, and after each request for more
LENGTHS = (20_000, 200_000, 1_000_000)
#: groups that a count shows. With more than COUNTED documents, a count must be requested, as it reads all parts
GROUPS, COUNTED = 12, 1_000_000
#: for each kind, the columns by which its documents are counted
COUNTS: dict[Kind, tuple[str, ...]] = {
    "kept": ("source", "language"), "dropped": ("reason", "language"), "quarantined": ("reason", "source")}
#: ids that may be part of a URL; the id of a quarantined document may be any text
_ID = re.compile(r"[\w-][\w.:-]{0,199}", re.ASCII)
#: a year, because the URL of a static file changes with the file
KEEP = {"Cache-Control": "public, max-age=31536000, immutable"}


# -- open to all -----------------------------------------------------------------------------------------------------
@open_router.get("/login")
def login(request: Request, next: Annotated[str, Query(max_length=4000)] = "/") -> HTMLResponse:
    """Show the form in which a user types the token; `next` is the page to go to after signing in."""
    return page(request, "login.html.j2", next=own_path(next), problem=None)


@open_router.get("/static/{name}")
def static(name: str) -> Response:
    """Return a file that HTML pages load, such as a stylesheet."""
    if name not in STATIC:
        raise HttpProblem(404, "No such file", f"pages load only {', '.join(STATIC)}", "name")
    return Response(static_file(name), media_type=STATIC[name], headers=KEEP)


# -- stores and runs -------------------------------------------------------------------------------------------------
@router.get("/")
async def home(request: Request) -> HTMLResponse:
    """Show the first page of the service: all stores, each with its datasets and its first runs by name."""
    stores: dict[str, Store] = request.app.state.stores
    sections = [await _section(request, name, at, "", FEW) for name, at in sorted(stores.items())]
    return page(request, "home.html.j2", sections=sections)


@router.get("/stores/{store}")
async def store_page(request: Request, store: str, at: StoreOf, after: runs.After = "") -> HTMLResponse:
    """Show a store with its datasets and a page of its runs."""
    section = await _section(request, store, at, after, RUNS)
    finished = await request.app.state.watch.finished(store, at) if section["runs"] else []
    return page(request, "store.html.j2", section=section, after=after, finished=finished[:NEWEST])


async def _section(request: Request, name: str, at: Store, after: str, most: int) -> dict[str, Any]:
    """Return what the pages show of one store: its datasets and a page of its runs. If one of these cannot be read, its
    value is None, and `problems` says why."""
    try:
        check_there(at)
    except HttpProblem as e:
        return {"store": name, "runs": None, "latest": None, "datasets": None, "problems": [e.document()]}
    problems: list[dict[str, Any]] = []
    listed = await or_problem(runs.list_runs(request, name, at, after, most), problems)
    listing = await or_problem(run_in_threadpool(datasets.list_datasets, at), problems)
    names, latest = await request.app.state.watch.runs(name, at) if listed else ([], None)
    return {"store": name, "runs": listed, "latest": latest if latest in names else None,
            "datasets": listing and listing["datasets"], "problems": problems}


async def or_problem(work: Awaitable[dict[str, Any]], problems: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Await `work` and return its result. If it fails, add the error as JSON to the list `problems` and return None."""
    try:
        return await work
    except (HttpProblem, TokenmillError, OSError) as e:
        problems.append(problem_of(e).document())
        return None


@router.get("/stores/{store}/runs/{run}")
async def run_page(request: Request, store: str, run: str, at: StoreOf, role: Viewer) -> HTMLResponse:
    """Show the state of a run. A script loads the page again at every event of the run's stream of events."""
    state = await request.app.state.watch.state(store, at, run)
    d = state.document
    nodes = {name: node for name, node in (d.get("nodes") or {}).items() if isinstance(node, Mapping)}
    running, failures = ([row for row in d.get(name) or [] if isinstance(row, Mapping)]
                         for name in ("running", "failures"))
    tunable = await run_in_threadpool(made_datasets, at, run) if d["state"] == "done" else []
    results = await run_in_threadpool(_results, at, run) if d["state"] == "done" else {}
    # a run in a terminal that was not in the queue has written no log into the store
    has_log = d["how"] != "local" or await run_in_threadpool(at.exists, piece_name(run, d["attempt"], 1))
    return page(request, "run.html.j2", store=store, run=run, d=d, nodes=nodes, ended=state.ended, running=running,
                failures=failures, tunable=tunable, results=results, has_log=has_log, operator=role is Role.operator,
                recipe=await run_in_threadpool(_if_there, lambda: bytes(runs.recipe(run, at).body).decode()))


def _results(at: Store, run: str) -> dict[str, Any]:
    """Return what the page of a finished run shows of its datasets. These are their sizes and, if an earlier run can be
    compared with this one, three facts more: that run's name, the sizes of its datasets, and the command that compares
    the two runs."""
    results: dict[str, Any] = {"sizes": kept_sizes(at, run), "before": None, "compare": None, "sizes_before": {}}
    if (before := comparable_run(at, run)) is not None:
        results |= {"before": before, "compare": compare_command(at, before, run),
                    "sizes_before": kept_sizes(at, before)}
    return results


def _if_there(read: Callable[[], str]) -> str | None:
    """Return the result of calling `read`, or None when it raises HttpProblem because the run has no such file. For
    example, a run has no recipe before it begins."""
    try:
        return read()
    except HttpProblem:
        return None


@router.get("/stores/{store}/runs/{run}/log")
def log_page(request: Request, store: str, run: RunOf, at: StoreOf,
             place: Annotated[str, Query(alias="from", max_length=100)] = "") -> HTMLResponse:
    """Show a piece of the log of a run's driver (the process that leads the run)."""
    stretch = runs.show_log(run, at, place)
    return page(request, "log.html.j2", store=store, run=run, log=stretch, place=place)


# -- documents -------------------------------------------------------------------------------------------------------
@router.get("/stores/{store}/datasets/{dataset}")
async def dataset_page(request: Request, store: str, at: StoreOf, dataset: str, queries: QueriesOf, role: Viewer,
                       count: bool = False) -> HTMLResponse:
    """Show a page of the kept, dropped or quarantined documents of a dataset, with the filter in use and counts of
    documents."""
    view = BrowseView.read(request.query_params)
    kind = _kind_of(view)
    filter = filter_of(**filter_parameters(view))
    shown = await datasets.show_dataset(request, at, dataset, queries)
    columns = shown["columns"][kind]
    problems: list[dict[str, Any]] = []
    listed = await or_problem(datasets.list_documents(
        request, at, dataset, kind, filter, queries, view.sort, view.descending, DOCUMENTS, view.after, [], EXCERPT,
        False), problems)
    counts: list[dict[str, Any]] = []
    if listed is not None and (count or shown[kind]["documents"] <= COUNTED):
        for by in COUNTS[kind]:
            counted = await or_problem(datasets.count_documents(
                request, at, dataset, kind, filter, queries, [by]), problems)
            if counted is None:                                   # another count would fail for the same reason
                break
            counts.append(counted)
    signals = [name.removeprefix("signals.") for name in columns if name.startswith("signals.")]
    return page(
        request, "dataset.html.j2", status=problems[0]["status"] if listed is None else 200, store=store, view=view,
        shown=shown, listed=listed, counts=counts, problems=problems, signals=signals, chosen=CHOSEN, groups=GROUPS,
        many=[name for name in MANY if name in columns], has_text="text" in columns, linkable=linkable,
        sorts=[STORED, *(name for name in SORTED_BY if name in columns), *(f"signals.{s}" for s in signals)],
        may_search=role is Role.operator, by=COUNTS[kind],
        tunable=await run_in_threadpool(lambda: any(runs_with(at, dataset))))


def _kind_of(view: BrowseView) -> Kind:
    """Return the kind of documents (kept, dropped or quarantined) that a page's URL names. Raises HttpProblem when
    there is no such kind."""
    kinds: tuple[Kind, ...] = get_args(Kind)
    for kind in kinds:
        if kind == view.kind:
            return kind
    raise HttpProblem(422, "Not valid", "documents are kept, dropped or quarantined", "kind", "choose one of them")


def linkable(id: Any) -> bool:
    """Return whether a document's id can be part of a URL, so that the document can have a page. The id of a
    quarantined document may be any text."""
    return isinstance(id, str) and _ID.fullmatch(id) is not None


@router.get("/stores/{store}/datasets/{dataset}/documents/{id}")
async def document_page(request: Request, store: str, at: StoreOf, dataset: str, id: str, queries: QueriesOf,
                        chars: Annotated[int, Query(ge=0, le=LENGTHS[-1])] = LENGTHS[0]) -> HTMLResponse:
    """Show one document: its text, its verdict (why it was dropped), its signals (numbers that steps computed) and its
    metadata. For a duplicate, also show the document that was kept in its place, and how the two differ."""
    facts = await datasets.show_document(request, at, dataset, id, queries, chars, False)
    row = facts["document"] or {}
    total = row.get("chars")
    text, url, unmarked = await run_in_threadpool(_marked, at, dataset, row, facts["verdict"])
    longer = next((n for n in LENGTHS if n > chars), None) if total is not None and total > chars else None
    return page(request, "document.html.j2", store=store, dataset=dataset, facts=facts, row=row, text=text,
                url=url, marked=any(is_passage for is_passage, _ in text), unmarked=unmarked, chars=chars,
                total=total, longer=longer, linkable=linkable, sources=bool(request.app.state.settings.allowed_roots))


def _marked(at: Store, dataset: str, row: Mapping[str, Any],
            verdict: Mapping[str, Any] | None) -> tuple[list[tuple[bool, str]], list[tuple[bool, str]], str]:
    """Return the text and the URL of a document in pieces, each with whether it is a passage for which a step dropped
    the document, and why no step was made to mark them ("" if one was, or never does). The settings of the step are
    those in the latest run. If the recipe names a file for it, nothing is marked (`stages_of`)."""
    text, url = row.get("text") or "", row.get("url") or ""
    run = next(runs_with(at, dataset), None) if verdict and not verdict["kept"] else None
    if run is None or verdict is None:
        return [(False, text)], [(False, url)], ""
    stage = stages_of(run_recipe_of(at, run), dataset).get(verdict["stage"])
    marks = find_marks(stage, verdict["reason"], text[:SEARCHED], row.get("language") or "", url)
    return pieces(text, marks.text), pieces(url, marks.url), stage if isinstance(stage, str) else ""
