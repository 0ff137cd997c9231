"""Router: the HTML page of a store's queue of runs, with a form that submits a recipe and buttons that cancel and
resume runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Depends, Request
from pydantic import ValidationError
from starlette.responses import RedirectResponse, Response

from pipeline.base.visible import visible
from pipeline.recipe.load import ready_recipes
from pipeline.service import submit
from pipeline.service.access import Operator, Viewer, form_of, viewer
from pipeline.service.html import page, path
from pipeline.service.plan_page import plan_page, planned
from pipeline.service.problems import HttpProblem
from pipeline.service.session import Role
from pipeline.service.stores import RunOf, StoreOf
from pipeline.store.fs import Store

router = APIRouter(prefix="/stores/{store}", include_in_schema=False, dependencies=[Depends(viewer)])

#: how many of the entries that have ended are shown, the latest first
ENDED = 30


@router.get("/queue")
async def queue_page(request: Request, store: str, at: StoreOf, role: Viewer, ready: str = "") -> Response:
    """Show the page of a store's queue: the runs that wait, start, run, or have ended lately. Operators also see the
    form that submits a recipe."""
    return await _queue(request, store, at, role, {"ready": ready})


@router.post("/queue/plan")
async def plan(request: Request, store: str, at: StoreOf, role: Operator) -> Response:
    """Plan the recipe that an operator has put into the form, and show the plan. If the recipe has errors, show the
    form again with these errors."""
    form = await form_of(request)
    problem, result = None, None
    try:
        given = given_of(form)
        submission = submit.submission_of(request, given, None, str(role))
        result = await planned(request, submission, at)
    except HttpProblem as e:
        problem = e
    if result is None or result["run"] is None:
        return await _queue(request, store, at, role, form, problem, result["problems"] if result else [])
    return plan_page(request, store, submission, result, action=path("stores", store, "queue"),
                     fields={"given": given.model_dump_json(ensure_ascii=True)},
                     back=("Back to the queue", path("stores", store, "queue")))


@router.post("/queue")
async def put(request: Request, store: str, at: StoreOf, role: Operator) -> Response:
    """Put the recipe whose plan the page shows into the queue of runs."""
    form = await form_of(request)
    try:
        given = submit.RecipeRequest.model_validate_json(form.get("given", ""))
    except ValidationError:
        raise HttpProblem(422, "Not valid", "the form does not contain the recipe that was planned", "given",
                          "plan it again") from None
    await submit.enqueue(request, store, at, submit.submission_of(request, given, form.get("request"), str(role)))
    return _to_queue(store)


@router.post("/queue/{number}/cancel")
async def cancel_entry(request: Request, store: str, at: StoreOf, number: submit.Number, role: Operator) -> Response:
    """Cancel a run of the queue. A run that waits never starts; a run that has begun is stopped."""
    await submit.cancel_entry(request, store, at, number, role)
    return _to_queue(store)


@router.post("/runs/{run}/cancel")
async def cancel_run(request: Request, store: str, at: StoreOf, run: str, role: Operator) -> Response:
    """Stop a run, whether it was started from the queue or by a command."""
    await submit.cancel_run(request, store, at, run, role)
    return RedirectResponse(path("stores", store, "runs", run), 303)


@router.post("/runs/{run}/resume")
async def resume_run(request: Request, store: str, at: StoreOf, run: RunOf, role: Operator) -> Response:
    """Put a run that has failed or was stopped into the queue again."""
    await submit.resume_run(request, store, at, run, role, (await form_of(request)).get("request"))
    return _to_queue(store)


# -- shared ----------------------------------------------------------------------------------------------------------
def _to_queue(store: str) -> Response:
    return RedirectResponse(path("stores", store, "queue"), 303)


def given_of(form: dict[str, str]) -> submit.RecipeRequest:
    """Return the recipe, with the name of its run and its overrides, that the fields of the submitted form contain.
    Raises HttpProblem for an invalid field."""
    fields: dict[str, Any] = {name: value for name in ("name", "run") if (value := form.get(name, "").strip())}
    for name in ("overrides", "inputs"):
        fields[name] = [line.strip() for line in form.get(name, "").splitlines() if line.strip()]
    if ready := form.get("ready"):
        fields["ready"] = ready
    if form.get("recipe", "").strip():
        fields["recipe"] = form["recipe"].replace("\r\n", "\n")
    try:
        return submit.RecipeRequest(**fields, verify_inputs="verify_inputs" in form)
    except ValidationError as e:
        first = e.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise HttpProblem(422, "Not valid", first["msg"], visible(key), "correct the field") from None


async def _queue(request: Request, store: str, at: Store, role: Role, form: dict[str, str],
                 problem: HttpProblem | None = None, problems: Sequence[dict[str, Any]] = ()) -> Response:
    """Return the HTML page of a store's queue of runs. The form of the page is filled with `form`, the fields that the
    client has sent. The page shows the errors `problem` and `problems` in these fields."""
    entries = (await submit.list_queue(request, store, at, ended=True))["entries"]
    ended = ("done", "failed", "cancelled")
    status = problem.status if problem else 422 if problems else 200
    return page(request, "queue.html.j2", status, problem.headers if problem else None, store=store, form=form,
                going=[entry for entry in entries if entry["state"] not in ended],
                ended=[entry for entry in reversed(entries) if entry["state"] in ended][:ENDED],
                operator=role is Role.operator, ready=ready_recipes(), problems=problems,
                roots=bool(request.app.state.settings.allowed_roots),
                problem=problem.document() if problem else None)
