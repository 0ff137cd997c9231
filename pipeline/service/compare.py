"""Router: shows how two runs of a store differ, as JSON and as a page. It compares their recipes, their figures, and
the documents that one run kept and the other did not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, Query, Request
from markupsafe import Markup
from starlette.concurrency import run_in_threadpool
from starlette.responses import HTMLResponse, Response

from pipeline.base.visible import visible
from pipeline.cluster.attempts import bad_name
from pipeline.plan.changes import comparable_run
from pipeline.report import compare_html
from pipeline.report.compare import EXAMPLES
from pipeline.report.html import marked
from pipeline.service.access import viewer
from pipeline.service.comparison import Comparisons
from pipeline.service.datasets import QueriesOf, answer
from pipeline.service.html import page
from pipeline.service.latest import NEWEST
from pipeline.service.pages import linkable, or_problem
from pipeline.service.problems import SafeJSON
from pipeline.service.query import Queries
from pipeline.service.stores import StoreOf
from pipeline.store.fs import Store

router = APIRouter(prefix="/api/v1/stores", tags=["runs"], dependencies=[Depends(viewer)])
page_router = APIRouter(include_in_schema=False, dependencies=[Depends(viewer)])
T = TypeVar("T")

#: most examples of a kind of change
MOST_EXAMPLES = 50
Name = Annotated[str, Query(max_length=200)]


@router.get("/{store}/compare", summary="Compare two runs")
async def show_comparison(request: Request, at: StoreOf, queries: QueriesOf,
                          before: Annotated[str, Query(min_length=1, max_length=200, description="a finished run")],
                          after: Annotated[str, Query(min_length=1, max_length=200,
                                                      description="the finished run to compare it with")],
                          examples: Annotated[int, Query(ge=0, le=MOST_EXAMPLES, description="most documents that are "
                                                         "shown of each kind of change in a dataset")] = EXAMPLES,
                          ) -> Response:
    """Show how the run `after` differs from the run `before`, with the fields of `tokenmill report --compare --json`:

    - keys of the recipe
    - all figures of the reports side by side
    - the documents that only one run kept, or that have another text, with the reasons

    The first examples are the documents whose signals are nearest to the threshold that decided. Documents are read
    from the files that each run made, even if a later run has published the dataset again. If the documents of a
    dataset cannot be compared in time, the answer leaves them out, and `problems` says why.
    """
    return await _compared(request, at, queries, (before, after), examples, SafeJSON)


async def _compared(request: Request, at: Store, queries: Queries, runs: tuple[str, str], examples: int,
                    make: Callable[[dict[str, Any]], T]) -> T:
    """Compare two runs, and return the result of calling `make` on the comparison. Both happen in a thread: a large
    result takes long to convert, and other requests would have to wait."""
    comparisons: Comparisons = request.app.state.comparisons
    stop = queries.stop()

    def call() -> T:
        with queries.turn(stop):
            return make(comparisons.compare(at, *runs, examples, stop))

    return await answer(request, stop, call)


@page_router.get("/stores/{store}/compare")
async def compare_page(request: Request, store: str, at: StoreOf, queries: QueriesOf, before: Name = "",
                       after: Name = "", examples: Annotated[int, Query(ge=0, le=MOST_EXAMPLES)] = EXAMPLES,
                       ) -> HTMLResponse:
    """Show how two runs differ, and a form that chooses the runs. Without `before`, the form proposes the run before
    the run `after`."""
    finished = await request.app.state.watch.finished(store, at)
    runs = finished[:NEWEST]
    problems: list[dict[str, Any]] = []
    shown = None
    if before and after:
        shown = await or_problem(_compared(request, at, queries, (before, after), examples, _shown), problems)
    else:
        before, after = await run_in_threadpool(_proposed, at, runs, before, after)
    # the documents of the later run are published, so that they have pages
    later = next((run for run in finished if run in (before, after)), after)
    published = "before" if later == before else "after"
    return page(request, "compare.html.j2", problems[0]["status"] if problems else 200, store=store, runs=runs,
                before=before, after=after, examples=examples, most_examples=MOST_EXAMPLES, problems=problems,
                d=shown and shown["document"], shown=shown, published=published, linkable=linkable,
                marked=_marked, value=compare_html.value, figure=compare_html.figure, change=compare_html.change,
                fate=compare_html.fate, decided=compare_html.decided, rows=compare_html.ROWS,
                groups=compare_html.GROUPS)


def _proposed(at: Store, runs: list[str], before: str, after: str) -> tuple[str, str]:
    """Return the names of the two runs with which the form is filled. Names in the request come first; otherwise these
    are the latest run and the run before it."""
    after = after or next((run for run in runs if run != before), "")
    if not before and after and bad_name(after) is None:
        earlier = runs[runs.index(after) + 1:] if after in runs else runs
        before = comparable_run(at, after) or next((run for run in earlier if run != after), "")
    return before, after


def _shown(document: dict[str, Any]) -> dict[str, Any]:
    """Return the values from which the template makes the page of a comparison. The rows of its tables are chosen as
    for the page of `tokenmill report --compare --html`."""
    differ, equal = compare_html.by_difference(compare_html.overview(document))
    differ, retokenised = compare_html.without_retokenised(document, differ)
    most = compare_html.ROWS
    return {"document": document, "totals": compare_html.cut(differ, most),
            "totals_left_out": max(0, len(differ) - most), "equal": equal, "retokenised": retokenised,
            "datasets": compare_html.datasets(document), "sections": compare_html.sections(document, most)}


def _marked(text: str, other: str) -> Markup:
    return marked(visible(text), visible(other))
