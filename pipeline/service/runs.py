"""Router: shows stores and their runs. It returns a run's state (as JSON or as a stream of events), the log of the
run's driver (the process that leads the run), the run's reports and its recipe.
"""

from __future__ import annotations

import asyncio
import json
from bisect import bisect_right
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import HTMLResponse, PlainTextResponse, Response

from pipeline.cluster.attempts import bad_name, run_names
from pipeline.plan.changes import latest_run
from pipeline.service import audit
from pipeline.service.access import operator, viewer
from pipeline.service.conditional import UNCHANGED, IfNoneMatch, unchanged
from pipeline.service.events import Events, follow_log, follow_run, room_for_stream
from pipeline.service.log import LogPlace, read_log
from pipeline.service.outward import outward_text
from pipeline.service.problems import HttpProblem, SafeJSON
from pipeline.service.stores import KnownStore, RunOf, StoreOf, available, read_file
from pipeline.service.watch import RunState
from pipeline.store.fs import Store

router = APIRouter(prefix="/api/v1/stores", tags=["runs"], dependencies=[Depends(viewer)])

#: most bytes of a report, and of a recipe
REPORT, RECIPE = 32 << 20, 1 << 20
#: a report needs no script, and must not run one that somebody has put into the file
REPORT_POLICY = ("default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'; "
                 "frame-ancestors 'none'; sandbox")
#: the fields of each run in a list of runs
LISTED = ("run", "state", "attempt", "begun", "how", "parts", "done", "docs_read", "docs", "seconds", "eta_s",
          "error", "report")

#: how OpenAPI describes a stream of events
STREAM: dict[int | str, dict[str, Any]] = {
    200: {"description": "server-sent events, whose data is JSON", "content": {"text/event-stream": {"itemSchema": {
        "type": "object", "properties": {name: {"type": "string"} for name in ("event", "id", "data")}}}}},
    204: {"description": "it has ended, and the client knows all of it"},
}

After = Annotated[str, Query(max_length=400, description="the last name of the page before")]
Limit = Annotated[int, Query(ge=1, le=500, description="most entries of a page")]
LastEvent = Annotated[str | None, Header(alias="Last-Event-ID", max_length=100,
                                         description="the id of the last event that came")]


# -- stores ----------------------------------------------------------------------------------------------------------
@router.get("", summary="List the stores")
def list_stores(request: Request) -> dict[str, Any]:
    """List the stores of this server. `available` is false for a store whose folder has vanished."""
    return {"stores": [_store_document(name, store) for name, store in sorted(request.app.state.stores.items())]}


@router.get("/{store}", summary="Show a store")
def show_store(store: str, at: StoreOf) -> dict[str, Any]:
    """Show a store of this server. The field `latest` is the name of the run that finished last."""
    return {**_store_document(store, at), "latest": latest_run(at), "runs": len(run_names(at))}


def _store_document(name: str, store: Store) -> dict[str, Any]:
    return {"store": name, "root": store.root, "available": available(store)}


@router.get("/{store}/audit", summary="List writes", dependencies=[Depends(operator)])
def list_writes(at: StoreOf, after: After = "", limit: Limit = 100) -> dict[str, Any]:
    """List the entries of a store's audit log (who requested which write), oldest first. Operators only."""
    if "/" in after:
        raise HttpProblem(422, "Not valid", "not the id of an entry", "after",
                          "give the id of the last entry of a page")
    entries = audit.entries(at, after, limit)
    return {"entries": entries, "after": entries[-1]["id"] if len(entries) == limit else None}


# -- runs ------------------------------------------------------------------------------------------------------------
@router.get("/{store}/runs", summary="List the runs of a store")
async def list_runs(request: Request, store: str, at: StoreOf, after: After = "",
                    limit: Limit = 100) -> dict[str, Any]:
    """List the runs of a store by name, one page at a time. To get the next page, a client sends the value `after` of
    an answer. `hidden` counts folders whose names are not valid names of runs."""
    names, latest = await request.app.state.watch.runs(store, at)
    sound = [name for name in names if bad_name(name) is None]
    first = bisect_right(sound, after)
    page = sound[first:first + limit]
    states = await asyncio.gather(*(request.app.state.watch.state(store, at, name) for name in page),
                                 return_exceptions=True)
    rows: list[dict[str, Any]] = []
    for name, state in zip(page, states):
        if isinstance(state, RunState):
            rows.append({k: state.document[k] for k in LISTED if k in state.document} | {"latest": name == latest})
        elif not isinstance(state, HttpProblem):                       # a run that was removed meanwhile is left out
            raise state
    more = bool(page) and page[-1] != sound[-1]
    return {"runs": rows, "hidden": len(names) - len(sound), "after": page[-1] if more else None}


@router.get("/{store}/runs/{run}", summary="Show a run", responses=UNCHANGED)
async def show_run(request: Request, store: str, run: str, at: KnownStore,
                   if_none_match: IfNoneMatch = None) -> Response:
    """Show the state of a run, with the fields of `tokenmill status --json`. The ETag is the id of the run's latest
    event. A client that polls should send it as If-None-Match, and gets 304 while nothing has changed."""
    state: RunState = await request.app.state.watch.state(store, at, run)
    tag = f'"{state.id}"'
    return unchanged(if_none_match, tag) or Response(state.data, media_type="application/json", headers={"ETag": tag})


@router.get("/{store}/runs/{run}/events", summary="Follow a run", response_class=Response, responses=STREAM)
async def run_events(request: Request, store: str, run: str, at: KnownStore, last: LastEvent = None) -> Response:
    """Stream events `progress`, each with the whole state of a run, and an event `end` when the run ends. A client that
    was cut off sends the id of its last event; it gets the state again only if it has changed. The answer is 204 if the
    run has ended and the client has its final state."""
    state: RunState = await request.app.state.watch.state(store, at, run)
    if state.ended and last == state.id:
        return Response(status_code=204)
    room_for_stream(request.app)
    return Events(request.app, follow_run(request.app, store, at, run, last))


# -- the driver's log ------------------------------------------------------------------------------------------------
@router.get("/{store}/runs/{run}/log", summary="Read the driver's log")
def show_log(run: RunOf, at: StoreOf,
             place: Annotated[str, Query(alias="from", max_length=100,
                                         description="`next` of the answer before; empty for the beginning")] = "",
             ) -> dict[str, Any]:
    """Return a piece of the log of a run's driver (the process that leads the run). Without `from`, the piece begins
    with the log of the latest attempt (one execution of the run). `next` is where the next piece begins, and `complete`
    says that nothing follows."""
    stretch = read_log(at, run, LogPlace.parse(place, "from"))
    return {"run": run, "attempt": stretch.next.attempt, "text": stretch.text, "next": str(stretch.next),
            "complete": stretch.complete}


@router.get("/{store}/runs/{run}/log/events", summary="Follow the driver's log", response_class=Response,
            responses=STREAM)
async def log_events(request: Request, store: str, run: RunOf, at: StoreOf, last: LastEvent = None) -> Response:
    """Stream the log of a run's driver (the process that leads the run) as events `log`, each with a piece of `text`.
    An event `end` follows when the run ends. A client that was cut off sends the id of its last event, and the stream
    continues after that piece. The answer is 204 if nothing follows."""
    place = LogPlace.parse(last or "", "Last-Event-ID")
    first = await run_in_threadpool(read_log, at, run, place)
    if first.complete and not first.text and place is not None:
        return Response(status_code=204)
    room_for_stream(request.app)
    return Events(request.app, follow_log(request.app, at, run, place))


# -- reports ---------------------------------------------------------------------------------------------------------
@router.get("/{store}/runs/{run}/report.html", summary="Open the report", response_class=HTMLResponse)
def report_page(run: RunOf, at: StoreOf) -> Response:
    """Return the report of a run as an HTML page. Browsers show it in a sandbox, so that no script in the file runs."""
    return Response(run_file(at, run, "report.html", REPORT), media_type="text/html",
                    headers={"Content-Security-Policy": REPORT_POLICY})


@router.get("/{store}/runs/{run}/report.json", summary="Read the report")
def report_data(run: RunOf, at: StoreOf) -> Response:
    """Return the figures of a run's report as JSON."""
    data = run_file(at, run, "report.json", REPORT)
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        raise HttpProblem(409, "Damaged report", f"runs/{run}/report.json is not JSON", "run",
                          "tokenmill report writes it again") from None
    return SafeJSON(document)


@router.get("/{store}/runs/{run}/recipe.yaml", summary="Read the recipe", response_class=PlainTextResponse)
def recipe(run: RunOf, at: StoreOf) -> Response:
    """Return the recipe of a run as text. Secrets and personal data in it are masked."""
    text = run_file(at, run, "recipe.yaml", RECIPE).decode("utf-8", "replace")
    return Response(outward_text(text, []), media_type="text/plain")


def run_file(store: Store, run: str, name: str, most: int) -> bytes:
    """Read a file in the folder of a run. Raises HttpProblem when the file is missing, or larger than `most` bytes."""
    try:
        return read_file(store, f"runs/{run}/{name}", most)
    except FileNotFoundError:
        raise HttpProblem(404, "Not there yet", f"the run {run!r} has no {name}", "run",
                          "a report is written when the run is done") from None
