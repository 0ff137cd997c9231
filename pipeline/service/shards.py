"""Router: shows the token shards of a store, where documents are in them, and which documents a training step or a
window (training sample) reads."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Path, Query, Request

from pipeline.report.tokens import mixture
from pipeline.service.access import viewer
from pipeline.service.datasets import QueriesOf, Unmasked, allow_unmasked, answer
from pipeline.service.shard_sets import (
    NoShards,
    SetName,
    add_documents,
    curriculum_of,
    facts,
    find,
    set_names,
    window,
)
from pipeline.service.stores import StoreOf
from pipeline.store.fs import Store
from tokenizer.mixture.steps import rows_of, step_at

router = APIRouter(prefix="/api/v1/stores/{store}/shards", tags=["shards"], dependencies=[Depends(viewer)])

Run = Annotated[str, Query(max_length=200, description="whose curriculum (default: that of the latest run)")]
Number = Annotated[int, Path(ge=0, le=1 << 40)]
StepNumber = Annotated[int, Path(ge=1, le=1 << 40, description="as the training prints it, from 1")]
Length = Annotated[int, Query(ge=1, le=1 << 24, description="tokens of a window")]
Split = Literal["train", "val"]
#: rows of a step that an answer has, unless the client asks for another number
ROWS = 10
Limit = Annotated[int, Query(ge=1, le=50, description="rows (windows) of the step")]
After = Annotated[int, Query(ge=0, le=1 << 30, description="`next` of the answer before")]
Details = Annotated[bool, Query(description="signals, metadata and an excerpt of each document, too")]


@router.get("", summary="List the shards of a store")
async def list_shards(request: Request, at: StoreOf, queries: QueriesOf, run: Run = "") -> dict[str, Any]:
    """List the shard sets (the token shards of one stream and split) with their tokens and tokenizer. Also show the
    order in which a run's curriculum (plan of training phases) reads them: its phases with the tokens of each
    stream."""
    stop = queries.stop()

    def call() -> dict[str, Any]:
        with queries.turn(stop):                      # manifests and curricula may have hundreds of megabytes
            return {"sets": [facts(at, name) for name in set_names(at)], "order": _order(at, run)}

    return await answer(request, stop, call)


def _order(store: Store, run: str) -> dict[str, Any] | None:
    planned = curriculum_of(store, run)
    if planned is None:
        return None
    name, curriculum = planned
    rows = mixture(curriculum)
    return {"run": name, "hash": curriculum.order, "seed": curriculum.seed, "steps": curriculum.steps,
            "samples": curriculum.samples, "tokens": curriculum.tokens, "phases": [
                {"name": phase.name, "steps": phase.steps, "samples": phase.samples, "tokens": phase.tokens,
                 "sequence": phase.sequence, "batch": phase.batch, "lr": phase.lr,
                 "streams": [{k: row[k] for k in ("stream", "planned", "realised", "tokens", "epochs")}
                             for row in rows if row["phase"] == phase.name]} for phase in curriculum.phases]}


@router.get("/find", summary="Find a document in the shards")
async def find_document(
        request: Request, at: StoreOf, queries: QueriesOf,
        id: Annotated[str, Query(min_length=1, max_length=200, description="id of a document, or its beginning")],
        stream: Annotated[str, Query(max_length=64)] = "", split: Split | None = None,
        run: Run = "") -> dict[str, Any]:
    """Find documents in the shards by the beginning of their ids. Returns the range of tokens of each document in each
    stream, the windows (training samples) with these tokens, and the steps that read these windows."""
    stop = queries.stop()

    def call() -> dict[str, Any]:
        with queries.turn(stop):
            return find(queries, at, id, stop, stream=stream, split=split or "", run=run)

    return await answer(request, stop, call)


@router.get("/steps/{step}", summary="Show the documents of a step")
async def show_step(request: Request, at: StoreOf, queries: QueriesOf, step: StepNumber, run: Run = "",
                    after: After = 0, limit: Limit = ROWS, details: Details = False,
                    unmasked: Unmasked = False) -> dict[str, Any]:
    """Show the windows (training samples) that a training step reads, and the documents in them. They are computed from
    the curriculum, so the step may be one that no training has reached yet. `next` is the value of `after` for more
    rows of the step's batch."""
    await allow_unmasked(request, at, unmasked, {"step": step, "run": run[:100]})
    stop = queries.stop()

    def call() -> dict[str, Any]:
        planned = curriculum_of(at, run)
        if planned is None:
            raise NoShards("the latest run has made no curriculum", "run", "name a run that makes shards")
        name, curriculum = planned
        samples = step_at(curriculum, step)
        if samples is None:
            raise NoShards(f"there is no step {step:,}; the curriculum has {curriculum.steps:,}", "step",
                           "give a smaller number")
        with queries.turn(stop):
            rows = rows_of(curriculum, samples)[after:after + limit]
            absent = add_documents(queries, at, curriculum, rows, details, not unmasked, stop)
        end = after + len(rows)
        return {"run": name, "step": step, "steps": curriculum.steps, "phase": curriculum.phases[samples.phase].name,
                "samples": [samples.first, samples.stop], "rows": rows, "next": end if end < samples.batch else None,
                "not_at_hand": absent}

    return await answer(request, stop, call)


@router.get("/{stream}/{split}", summary="Show a shard set")
async def show_set(request: Request, at: StoreOf, queries: QueriesOf, stream: str, split: Split) -> dict[str, Any]:
    """Show a shard set: its numbers of documents and tokens, its tokenizer, and the dataset that it was made from."""
    stop = queries.stop()
    return await answer(request, stop, lambda: facts(at, SetName(stream, split)))


@router.get("/{stream}/{split}/windows/{number}", summary="Show the documents of a window")
async def show_window(request: Request, at: StoreOf, queries: QueriesOf, stream: str, split: Split, number: Number,
                      length: Length, details: Details = False, unmasked: Unmasked = False) -> dict[str, Any]:
    """Show the documents in a window (training sample) of `length` tokens. `number` is the window's number in the
    stream, from 0. If the documents of the stream are packed into rows, it is the number of a packed row."""
    await allow_unmasked(request, at, unmasked, {"stream": stream[:100], "window": number})
    stop = queries.stop()

    def call() -> dict[str, Any]:
        with queries.turn(stop):
            return window(queries, at, SetName(stream, split), number, length, details, not unmasked, stop)

    return await answer(request, stop, call)
