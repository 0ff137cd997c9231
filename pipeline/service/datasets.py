"""Router: shows the datasets of a store, pages of their documents, counts, histograms, and single documents."""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

import pyarrow.compute as pc
from fastapi import APIRouter, Depends, Query, Request
from starlette.concurrency import run_in_threadpool

from pipeline.service import audit
from pipeline.service.access import require_operator, viewer
from pipeline.service.documents import document, shown
from pipeline.service.duck import Cancelled, QueryError, Stop
from pipeline.service.filters import STORED, Filter, SignalRange, SortOrder, place_value
from pipeline.service.parts import FOLDERS, NoDataset, published
from pipeline.service.problems import HttpProblem
from pipeline.service.query import DocumentKind, Queries
from pipeline.service.session import Role
from pipeline.service.shard_sets import dataset_names
from pipeline.service.stores import StoreOf
from pipeline.store.dataset import MANIFEST, MANIFEST_SCHEMA
from pipeline.store.fs import Store
from stages.scrub.pii import scrub_text, scrub_value
from stages.scrub.rows import MARGIN

T = TypeVar("T")
router = APIRouter(prefix="/api/v1/stores/{store}/datasets", tags=["datasets"], dependencies=[Depends(viewer)])

Kind = Literal["kept", "dropped", "quarantined"]
Values = Annotated[list[str], Query(max_length=100, description="one of these values; may be given several times")]
Text = Annotated[str, Query(max_length=1000)]
#: columns of a page unless others are asked for
SHOW = ("url", "source", "language", "reason", "stage", "signals", "text")
SHOW_QUARANTINED = ("source", "file", "record", "stage", "reason", "detail", "bytes")
Unmasked = Annotated[bool, Query(description="show personal data; operators only, and noted in the audit log")]


def filter_of(source: Values = [], reason: Values = [], stage: Values = [], language: Values = [],  # noqa: B006
              domain: Text = "", text: Text = "", id: Text = "",
              signal: Annotated[list[str], Query(
                  max_length=20, description="NAME:LEAST:MOST, either bound may be left out: `quality:0.5:`")] = [],  # noqa: B006
              ) -> Filter:
    """Return the filter (conditions on documents) that the query parameters of a request describe."""
    return Filter(tuple(source), tuple(reason), tuple(stage), tuple(language), domain,
                  tuple(_range(value) for value in signal), text, id)


def _range(value: str) -> SignalRange:
    name, *bounds = value.rsplit(":", 2)
    try:
        least, most = (float(b) if b.strip() else None for b in bounds)
        if any(b is not None and not math.isfinite(b) for b in (least, most)):
            raise ValueError
    except ValueError:
        raise HttpProblem(422, "Not valid", "a range of a signal is NAME:LEAST:MOST with finite numbers", "signal",
                          "leave a bound out where there is none: quality:0.5:") from None
    return SignalRange(name, least, most)


FilterOf = Annotated[Filter, Depends(filter_of)]


def queries_of(request: Request) -> Queries:
    """Return the object that runs the queries of this server."""
    queries: Queries = request.app.state.queries
    return queries


QueriesOf = Annotated[Queries, Depends(queries_of)]


async def answer(request: Request, stop: Stop, call: Callable[[], T]) -> T:
    """Run `call` in a thread and return its result. When the client disconnects or the request times out, `stop` tells
    `call` to end. Raises HttpProblem when the query fails."""
    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    work, left = asyncio.ensure_future(run_in_threadpool(call)), asyncio.ensure_future(gone())
    work.add_done_callback(lambda done: done.cancelled() or done.exception())     # else asyncio may log its error
    try:
        await asyncio.wait((work, left), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            stop.cancel()
        return await asyncio.shield(work)
    except Cancelled as e:
        raise HttpProblem(e.status, e.title, e.detail, remedy=e.remedy) from None
    except QueryError as e:
        raise HttpProblem(e.status, e.title, e.detail, e.key, e.remedy,
                          {"Retry-After": "5"} if e.status == 503 else None) from e
    finally:
        stop.cancel()
        left.cancel()


async def allow_unmasked(request: Request, store: Store, unmasked: bool, what: dict[str, Any]) -> None:
    """Allow only operators to ask for unmasked personal data. If `unmasked` is set, raise HttpProblem for any other
    sender, and note the request in the audit log."""
    if unmasked:
        require_operator(request)
        entry = {**await audit.request_entry(request), "unmasked": what}
        await run_in_threadpool(audit.note_write, store, entry)


def may_search(request: Request, filter: Filter) -> None:
    """Raise HttpProblem when the sender is a viewer and the filter searches in texts. Otherwise a viewer could find out
    masked personal data letter by letter, from the number of documents found or the existence of a next page."""
    if filter.text and request.state.role is not Role.operator:
        raise HttpProblem(403, "Operators only", "a search in texts could tell which personal data they hold", "text",
                          "leave the filter out, or ask for an operator's token")


# -- datasets --------------------------------------------------------------------------------------------------------
@router.get("", summary="List the datasets of a store")
def list_datasets(at: StoreOf) -> dict[str, Any]:
    """List the published datasets, with the number of their documents."""
    return {"datasets": [_sizes(at, name) for name in dataset_names(at)]}


@router.get("/{dataset}", summary="Show a dataset")
async def show_dataset(request: Request, at: StoreOf, dataset: str, queries: QueriesOf) -> dict[str, Any]:
    """Show the size of a dataset, and the columns that its documents have. The column of a signal (a number computed
    for each document) is `signals.NAME`."""
    stop = queries.stop()

    def call() -> dict[str, Any]:
        published(at, "kept", dataset)
        columns = {}
        for kind in FOLDERS:
            try:
                columns[kind] = queries.columns(DocumentKind(at, kind, dataset), stop)
            except NoDataset:
                columns[kind] = []
        return {**_sizes(at, dataset), "columns": columns}

    return await answer(request, stop, call)


def _sizes(store: Store, dataset: str) -> dict[str, Any]:
    sizes: dict[str, Any] = {"dataset": dataset}
    for kind, folder in FOLDERS.items():
        try:
            table = store.table(f"{folder}/{dataset}/{MANIFEST}")
        except FileNotFoundError:                                 # a copy of the store may lack what was dropped
            table = MANIFEST_SCHEMA.empty_table()
        sizes[kind] = {"documents": pc.sum(table["rows"]).as_py() or 0, "parts": table.num_rows,
                       "text_bytes": pc.sum(table["text_bytes"]).as_py() or 0}
    return sizes


@router.get("/{dataset}/{kind}", summary="List documents")
async def list_documents(
        request: Request, at: StoreOf, dataset: str, kind: Kind, filter: FilterOf, queries: QueriesOf,
        sort: Annotated[str, Query(max_length=200, description="stored, a column, or signals.NAME")] = STORED,
        descending: bool = False, limit: Annotated[int, Query(ge=1, le=200)] = 50,
        after: Annotated[str, Query(max_length=8000, description="`next` of the page before")] = "",
        show: Annotated[list[str], Query(max_length=20, description="columns to show")] = [],  # noqa: B006
        chars: Annotated[int, Query(ge=0, le=2000, description="characters of the text to show")] = 400,
        unmasked: Unmasked = False) -> dict[str, Any]:
    """Return one page of documents. `next` is the position of the following page, or null if there is none. Only
    operators may filter by `text`.

    With `text`, a page may have fewer documents than `limit` although there are more. Documents are left out if the
    text occurs only in their personal data, unless this data is shown.
    """
    may_search(request, filter)
    columns = tuple(show) or (SHOW if kind != "quarantined" else SHOW_QUARANTINED)
    await allow_unmasked(request, at, unmasked, {"dataset": dataset, "kind": kind})
    stop = queries.stop()

    def call() -> dict[str, Any]:
        page = queries.page(DocumentKind(at, kind, dataset), filter, SortOrder(sort, descending), limit, stop, after,
                            columns, chars + MARGIN)
        if sort in ("language", "date") and page.next and not unmasked and _personal(place_value(page.next)):
            raise HttpProblem(
                403, "Operators only", "the page ends at a value that holds personal data, and the next one "
                "would begin there", "sort", "sort by another column")
        rows = [shown(row, not unmasked, chars, filter.text) for row in page.rows]
        return {"documents": [row for row in rows if row is not None], "next": page.next, "parts": page.parts,
                "of": page.documents}

    return await answer(request, stop, call)


def _personal(value: Any) -> bool:
    return isinstance(value, str) and scrub_text(value) != value


@router.get("/{dataset}/{kind}/counts", summary="Count documents")
async def count_documents(
        request: Request, at: StoreOf, dataset: str, kind: Kind, filter: FilterOf, queries: QueriesOf,
        by: Annotated[list[str], Query(min_length=1, max_length=2,
                                       description="source, reason, stage, language, domain")]) -> dict[str, Any]:
    """Count documents and bytes of text for each value of one column, or for each pair of values of two columns.
    Returns the 1,000 groups with the most documents. Only operators may filter by `text`."""
    may_search(request, filter)
    stop = queries.stop()

    def call() -> dict[str, Any]:
        counts = queries.counts(DocumentKind(at, kind, dataset), filter, by, stop)
        groups = [{**group, **{name: scrub_value(group[name]) for name in by}} for group in counts["groups"]]
        return {**counts, "groups": groups}

    return await answer(request, stop, call)


@router.get("/{dataset}/{kind}/histogram", summary="Histogram of a signal")
async def histogram(
        request: Request, at: StoreOf, dataset: str, kind: Kind, filter: FilterOf, queries: QueriesOf,
        of: Annotated[str, Query(max_length=200, description="name of the signal")],
        bins: Annotated[int, Query(ge=1, le=400)] = 40,
        least: Annotated[float | None, Query(allow_inf_nan=False)] = None,
        most: Annotated[float | None, Query(allow_inf_nan=False)] = None) -> dict[str, Any]:
    """Count the documents of a dataset by their values of a signal (a number computed for each document), in bins. Only
    operators may filter by `text`."""
    may_search(request, filter)
    stop = queries.stop()
    return await answer(request, stop, functools.partial(
        queries.histogram, DocumentKind(at, kind, dataset), filter, of, bins, stop, least, most))


@router.get("/{dataset}/documents/{id}", summary="Show a document")
async def show_document(
        request: Request, at: StoreOf, dataset: str, id: str, queries: QueriesOf,
        chars: Annotated[int, Query(ge=0, le=1_000_000, description="characters of the text to show")] = 100_000,
        unmasked: Unmasked = False) -> dict[str, Any]:
    """Show a document: its row, its verdict (why it was dropped), its entries in quarantine, and its places in the
    shards. For a duplicate, also show the document that was kept in its place, and how the two texts differ."""
    await allow_unmasked(request, at, unmasked, {"dataset": dataset, "id": id[:100]})
    stop = queries.stop()
    return await answer(request, stop,
                        functools.partial(document, queries, at, dataset, id, not unmasked, chars, stop))
