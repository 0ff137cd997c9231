"""Router: the HTML pages about token shards."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import HTMLResponse

from pipeline.service import shards
from pipeline.service.access import viewer
from pipeline.service.datasets import QueriesOf
from pipeline.service.html import page
from pipeline.service.stores import StoreOf

router = APIRouter(include_in_schema=False, dependencies=[Depends(viewer)])


@router.get("/stores/{store}/shards")
async def shards_page(request: Request, store: str, at: StoreOf, queries: QueriesOf, run: shards.Run = "",
                      id: Annotated[str, Query(max_length=200)] = "") -> HTMLResponse:
    """Show the shard sets of a store, and the order in which a run's curriculum reads them. With `id`, also show where
    documents are in the shards."""
    listed = await shards.list_shards(request, at, queries, run)
    places: dict[str, Any] | None = None
    if id.strip():
        places = await shards.find_document(request, at, queries, id.strip(), run=run)
    return page(request, "shards.html.j2", store=store, listed=listed, run=run, id=id.strip(), places=places)


@router.get("/stores/{store}/shards/step")
async def step_page(request: Request, store: str, at: StoreOf, queries: QueriesOf,
                    step: Annotated[int, Query(ge=1, le=1 << 40)], run: shards.Run = "",
                    after: shards.After = 0) -> HTMLResponse:
    """Show the documents that a training step reads, a few rows (training samples) of its batch at a time."""
    shown = await shards.show_step(request, at, queries, step, run, after, shards.ROWS, details=True)
    return page(request, "step.html.j2", store=store, shown=shown, run=run, after=after)


@router.get("/stores/{store}/shards/{stream}/{split}/windows/{number}")
async def window_page(request: Request, store: str, at: StoreOf, queries: QueriesOf, stream: str, split: shards.Split,
                      number: shards.Number, length: shards.Length) -> HTMLResponse:
    """Show the documents in a window (the tokens of one training sample)."""
    shown = await shards.show_window(request, at, queries, stream, split, number, length, details=True)
    return page(request, "window.html.j2", store=store, shown=shown)
