"""Router: the HTML pages for labelling documents. One page gives an overview of the labels and of people's agreement.
Another shows one document after the other, with the buttons good, bad and unsure. The buttons work without JavaScript;
with it, the keys g, b and u press them.
"""

from __future__ import annotations

from typing import Annotated, Any, get_args

from fastapi import APIRouter, Depends, Query, Request
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.responses import RedirectResponse, Response

from pipeline.service import label_routes, tune
from pipeline.service.access import Operator, Viewer, form_of, viewer
from pipeline.service.datasets import QueriesOf, answer
from pipeline.service.drawing import Draw
from pipeline.service.html import page, path
from pipeline.service.label_routes import LabelsOf
from pipeline.service.labels import NAMES, latest
from pipeline.service.latest import runs_with
from pipeline.service.pages import linkable
from pipeline.service.problems import HttpProblem
from pipeline.service.session import Role
from pipeline.service.stores import StoreOf

router = APIRouter(prefix="/stores/{store}/datasets/{dataset}", include_in_schema=False, dependencies=[Depends(viewer)])

#: the parameters of a draw, without the name of the person who labels
DRAWN_BY = ("draw", "run", "threshold", "other")
Short = Annotated[str, Query(max_length=200)]


@router.get("/labels", dependencies=[Depends(tune.turn)])
def labels_page(request: Request, store: str, dataset: str, at: StoreOf, labels: LabelsOf, role: Viewer,
                by: Short = "") -> Response:
    """Show the overview of the labels: their counts, people and their agreement, and documents on which people
    disagree. The page also has links to files for training, and a form that begins labelling."""
    runs = list(runs_with(at, dataset))
    problem, thresholds = None, []
    try:
        steps = tune.game_of(request, at, runs[0], dataset).steps() if runs else []
        thresholds = [(f"{step['step']}.{key['key']}", f"{step['step']} {step['name']}: {key['key']}")
                      for step in steps if not step["barrier"] for key in step["keys"] if key["number"]]
    except HttpProblem as e:                                          # a damaged run: documents are labelled without it
        problem = e.document()
    return page(request, "labels.html.j2", store=store, dataset=dataset, shown=label_routes.show_labels(labels),
                runs=runs, thresholds=thresholds, operator=role is Role.operator, by=by, linkable=linkable,
                problem=problem, listed=label_routes.LISTED)


@router.get("/label")
async def label_page(request: Request, store: str, dataset: str, at: StoreOf, labels: LabelsOf, queries: QueriesOf,
                     role: Operator, by: Annotated[str, Query(max_length=40)] = "", draw: Draw = "random",
                     run: Short = "", threshold: Short = "", other: Short = "", document: Short = "",
                     last: Short = "") -> Response:
    """Show the page on which a person labels one document. This is the document whose id is `document`, or else the
    next one of a draw (a selection of a run's documents). `last` is the id of the document that this person has
    labelled just before."""
    if not by.strip():
        return RedirectResponse(path("stores", store, "datasets", dataset, "labels"), 303)
    asked = {"by": by, "draw": draw, "run": run, "threshold": threshold, "other": other}
    if document:
        stop = queries.stop()
        row = await answer(request, stop, lambda: label_routes.one_document(queries, at, dataset, document, stop))
        result: dict[str, Any] = {"document": row, "run": run}
    else:
        result = await run_in_threadpool(_next, request, at, dataset, labels, by, draw, run, threshold, other)
    given = latest(await run_in_threadpool(labels.all)).get(document or last, {}).get(by)
    return page(request, "label.html.j2", store=store, dataset=dataset, asked={**asked, "run": result["run"]},
                result=result, d=result["document"], names=NAMES, again=bool(document), last=last, linkable=linkable,
                given=given.label if given else "",
                link=lambda **more: path("stores", store, "datasets", dataset, "label",
                                         **{k: v for k, v in {**asked, **more}.items() if v}))


def _next(request: Request, at: Any, dataset: str, labels: Any, *asked: Any) -> dict[str, Any]:
    with tune.one_turn(request):
        return label_routes.next_document(request, at, dataset, labels, *asked)


@router.post("/label")
async def put_label(request: Request, store: str, dataset: str, labels: LabelsOf, role: Operator) -> Response:
    """Store the label that the person's form sends for a document, and redirect to the next document."""
    form = await form_of(request)
    try:
        given = label_routes.LabelRequest.model_validate({
            name: form.get(name, "") for name in ("document", "label", "by", "text", "run")})
    except ValidationError as e:
        raise HttpProblem(422, "Not valid", e.errors()[0]["msg"], ".".join(map(str, e.errors()[0]["loc"])),
                          "load the page again") from None
    await label_routes.put_label(labels, role, given)
    asked = {name: form[name] for name in DRAWN_BY if form.get(name)}
    if asked.get("draw") not in get_args(Draw):
        asked.pop("draw", None)
    return RedirectResponse(path("stores", store, "datasets", dataset, "label", **asked, by=given.by,
                                 last=given.document), 303)
