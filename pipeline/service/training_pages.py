"""Router: the HTML pages about trainings."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import HTMLResponse

from pipeline.cluster.attempts import run_names
from pipeline.service import shards, training_control, trainings
from pipeline.service.access import Viewer, viewer
from pipeline.service.datasets import QueriesOf
from pipeline.service.html import page
from pipeline.service.session import Role
from pipeline.service.stores import StoreOf
from pipeline.store.fs import Store

#: states in which a page reloads itself
GOING = ("starting", "running")
#: most runs from which the page offers to start a training
RUNS = 200
router = APIRouter(include_in_schema=False, dependencies=[Depends(viewer)])


@router.get("/stores/{store}/trainings")
async def trainings_page(request: Request, store: str, at: StoreOf) -> HTMLResponse:
    """Show the list of the trainings of a store, with their states."""
    listed = await run_in_threadpool(trainings.list_trainings, request, store, at)
    return page(request, "trainings.html.j2", store=store, listed=listed, runs=await run_in_threadpool(_runs, at),
                named=bool(trainings.folders_of(request, store)),
                going=any(training["state"] in GOING for training in listed["trainings"]))


def _runs(store: Store) -> list[str]:
    """Return the names of the runs of a store that have a curriculum (an order in which shards are read), sorted by
    name. Only the RUNS runs whose names come last are considered."""
    return [name for name in run_names(store)[-RUNS:] if store.exists(f"runs/{name}/curriculum.json")]


@router.get("/stores/{store}/trainings/{training}")
async def training_page(request: Request, store: str, at: StoreOf, training: str, queries: QueriesOf,
                        role: Viewer) -> HTMLResponse:
    """Show the state of a training, its curves and its spikes."""
    shown = await trainings.show_training(request, store, at, training, queries)
    log = ""
    if shown["log"] and role is Role.operator:
        known, _ = await run_in_threadpool(training_control.known_training, request, store, at, training)
        log = await run_in_threadpool(training_control.printed, known, training_control.PAGE_BYTES)
    return page(request, "training.html.j2", store=store, shown=shown, training=training, log=log,
                going=shown["state"] in GOING)


@router.get("/stores/{store}/trainings/{training}/step")
async def spike_page(request: Request, store: str, at: StoreOf, training: str, queries: QueriesOf,
                     step: Annotated[int, Query(ge=1, le=1 << 40)], run: shards.Run = "") -> HTMLResponse:
    """Show the loss of a training step beside the losses of the steps around it. Also show the documents in those rows
    of the step's batch that have the highest loss."""
    shown = await trainings.explain_step(request, store, at, training, step, queries, run, None, trainings.ROWS, False)
    return page(request, "spike.html.j2", store=store, shown=shown, training=training)
