"""Router: checks, plans and submits recipes, lists a store's queue of runs, and cancels and resumes runs. Everybody
with a role may look at the queue; all other requests need an operator (a user whose token allows writing)."""

from __future__ import annotations

import os
import secrets
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Path, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool

from pipeline.cluster.attempts import ask_to_stop, bad_name, facts_of, has_run, standing
from pipeline.cluster.queue import Queue, QueueEntry, Submission, places
from pipeline.recipe.load import READY, ready_recipes
from pipeline.service.access import Operator, operator, viewer
from pipeline.service.checks import FILES_S
from pipeline.service.dispatching import driver_options
from pipeline.service.outward import cluster_addresses, outward_text
from pipeline.service.problems import HttpProblem
from pipeline.service.stores import RunOf, StoreOf, check_run, named_store, read_file
from pipeline.store.fs import Store

router = APIRouter(prefix="/api/v1/stores/{store}", tags=["queue"], dependencies=[Depends(viewer)])

#: most bytes of a recipe, as in `recipe.marks`
RECIPE = 1 << 20
Line = Annotated[str, Field(max_length=4000)]
RequestId = Annotated[str | None, Header(alias="Idempotency-Key", min_length=1, max_length=200,
                                         description="the same for all tries of one request: it makes one run")]
Number = Annotated[int, Path(ge=1, le=99_999_999, description="number of an entry of the queue")]


class RecipeRequest(BaseModel):
    """The recipe that a client sends: its YAML in `recipe`, or the name of a ready-made recipe in `ready`. `overrides`
    and `inputs` mean the same as the options `--set` and `--input`. Relative paths start at the first folder that the
    server allows."""

    model_config = ConfigDict(extra="forbid")

    recipe: str | None = Field(None, max_length=RECIPE)
    ready: str | None = Field(None, max_length=100)
    name: str = Field("recipe", min_length=1, max_length=100, description="name of the recipe, from which the run gets "
                                                                          "its name")
    run: str | None = Field(None, max_length=200, description="name of the run (default: from the recipe)")
    overrides: list[Line] = Field([], max_length=200)
    inputs: list[Line] = Field([], max_length=1000)
    verify_inputs: bool = False


# -- recipes ---------------------------------------------------------------------------------------------------------
@router.post("/recipes/validate", summary="Check a recipe", dependencies=[Depends(operator), Depends(named_store)])
async def validate(request: Request, given: RecipeRequest) -> dict[str, Any]:
    """Check a recipe. Returns all errors and warnings, each with file, line, key and remedy. `valid` says whether the
    recipe can run, and `run` is the name that its run would get. A source without files is only a warning, because its
    files may still come."""
    result = await check_submission(request, submission_of(request, given), None, find_files_s=FILES_S)
    return {"valid": result["run"] is not None, **{k: result[k] for k in ("run", "digest", "problems")}}


@router.post("/recipes/plan", summary="Plan a recipe", dependencies=[Depends(operator)])
async def plan(request: Request, at: StoreOf, given: RecipeRequest) -> dict[str, Any]:
    """Return what a run of a recipe would do and cost, in the format of `tokenmill plan --json`. Nothing is run and
    nothing is written."""
    result = await check_submission(request, submission_of(request, given), at)
    refuse_errors(result)
    return {"run": result["run"], **result["plan"], "problems": result["problems"]}


# -- the queue -------------------------------------------------------------------------------------------------------
@router.get("/queue", summary="List the queue")
async def list_queue(request: Request, store: str, at: StoreOf, ended: bool = False) -> dict[str, Any]:
    """List the runs that wait, start or run, in the order of the queue. The run with `place` 1 starts next. With
    `ended`, the list begins with runs that have ended: the 500 that were submitted last, also in the order of the
    queue."""
    entries = await run_in_threadpool(queue_of(request, store).recent)
    waiting = places(entries)
    past = [entry for entry in entries if entry.ended][-500:] if ended else []
    return {"entries": [_document(request, entry, waiting) for entry in (*past, *(e for e in entries if not e.ended))]}


@router.get("/queue/{number}", summary="Show an entry of the queue")
async def show_entry(request: Request, store: str, at: StoreOf, number: Number) -> dict[str, Any]:
    """Show an entry of the queue and its events so far, such as its submission, its start and its end."""
    queue = queue_of(request, store)
    entry = await run_in_threadpool(_entry, queue, number)
    waiting = places(await run_in_threadpool(queue.recent))
    return {**_document(request, entry, waiting), "events": [
        {"kind": e.kind, "at": e.at, **({"by": e.by} if e.by else {}), **({"attempt": e.attempt} if e.attempt else {})}
        for e in entry.events]}


@router.post("/queue", summary="Submit a recipe", status_code=202)
async def submit(request: Request, store: str, at: StoreOf, role: Operator, given: RecipeRequest,
                 key: RequestId = None) -> dict[str, Any]:
    """Check a recipe and put it into the queue. A client should send a header `Idempotency-Key`. If the answer is lost,
    the client repeats the request with the same key. It then gets the existing entry of the queue, and no second run
    starts."""
    return await enqueue(request, store, at, submission_of(request, given, key, str(role)))


@router.post("/queue/{number}/cancel", summary="Cancel an entry of the queue", status_code=202)
async def cancel_entry(request: Request, store: str, at: StoreOf, number: Number, role: Operator) -> dict[str, Any]:
    """Cancel an entry of the queue. A waiting run never starts. A run that has begun gets a minute to finish its tasks,
    and everything that it has committed is kept. An entry that has ended does not change."""
    queue = queue_of(request, store)
    entry = await run_in_threadpool(_entry, queue, number)
    entry = await run_in_threadpool(queue.cancel, number, str(role))
    return _document(request, entry, places(await run_in_threadpool(queue.entries)))


# -- runs ------------------------------------------------------------------------------------------------------------
@router.post("/runs/{run}/cancel", summary="Cancel a run", status_code=202)
async def cancel_run(request: Request, store: str, at: StoreOf, run: str, role: Operator) -> dict[str, Any]:
    """Stop a run, whether it was started through the queue or by a command."""
    queue = queue_of(request, store)
    entries = [e for e in await run_in_threadpool(queue.entries) if e.run == run and not e.ended]
    if not entries:                                               # a run that waits has no folder yet
        await run_in_threadpool(check_run, at, run)
    for entry in entries:
        await run_in_threadpool(queue.cancel, entry.number, str(role))
    if not entries:
        current = await run_in_threadpool(standing, at, run)
        if current.ended:
            raise HttpProblem(409, "Has ended", f"the run {run!r} is {current.state}", "run",
                              "there is nothing to cancel")
        await run_in_threadpool(ask_to_stop, at, run, current.attempt)
    return {"run": run, "entries": [entry.number for entry in entries]}


@router.post("/runs/{run}/resume", summary="Resume a run", status_code=202)
async def resume_run(request: Request, store: str, at: StoreOf, run: RunOf, role: Operator,
                     key: RequestId = None) -> dict[str, Any]:
    """Put a run that has failed, was stopped or has died into the queue again, with the recipe that the store keeps.
    Tasks whose results were committed are not repeated. A run that is already in the queue keeps its place. A run that
    is done is refused, because its datasets would replace those that a later run has published."""
    queue = queue_of(request, store)
    entries = await run_in_threadpool(queue.entries)
    known = next((e for e in entries if e.run == run and not e.ended), None)
    if known is not None:
        return _document(request, known, places(entries))
    current = await run_in_threadpool(standing, at, run)
    if current.state in ("running", "stopping"):
        raise HttpProblem(409, "Is running", f"the run {run!r} is {current.state} outside the queue", "run",
                          "wait for it, or cancel it")
    if current.state == "done":
        raise HttpProblem(409, "Is done", f"the run {run!r} is done, nothing of it is left to do", "run",
                          "submit its recipe again to run it on inputs that have changed")
    submission = await run_in_threadpool(kept_submission, request, at, run, str(role), entries, key)
    refuse_errors(await check_submission(request, submission, None))
    return await put_submission(request, store, submission, run)


# -- shared ----------------------------------------------------------------------------------------------------------
async def enqueue(request: Request, store: str, at: Store, submission: Submission) -> dict[str, Any]:
    """Check a submission (a recipe to run), put it into the queue, and return the entry of the queue as JSON. Raises
    HttpProblem when the recipe has errors or the name of the run is taken."""
    entries = await run_in_threadpool(queue_of(request, store).entries)
    known = next((e for e in entries if e.request == submission.request), None)
    if known is not None:                    # a repeated request is not checked: its inputs may be gone by now
        return {**await put_submission(request, store, submission, submission.run or known.run), "problems": []}
    await _refuse_taken(at, submission.run, entries)
    result = await check_submission(request, submission, None)
    refuse_errors(result)
    entries = await run_in_threadpool(queue_of(request, store).entries)       # the check took time, so read again
    if all(e.request != submission.request for e in entries):
        await _refuse_taken(at, submission.run, entries)
    entry = await put_submission(request, store, submission, result["run"])
    return {**entry, "problems": result["problems"]}


def submission_of(request: Request, given: RecipeRequest, key: str | None = None, by: str = "") -> Submission:
    """Turn the recipe that a client has sent into a submission, the form in which the queue stores a recipe to run.
    Raises HttpProblem when the recipe or its options are not valid."""
    if (given.recipe is None) == (given.ready is None):
        raise HttpProblem(422, "Not valid", "give the text of a recipe, or the name of a ready one", "recipe",
                          "send either `recipe` or `ready`")
    text, name = given.recipe or "", given.name
    if given.ready is not None:
        if given.ready not in ready_recipes():
            raise HttpProblem(404, "No such recipe", f"there is no ready recipe {given.ready!r}", "ready",
                              f"there are: {', '.join(ready_recipes())}")
        text, name = (READY / f"{given.ready}.yaml").read_text(encoding="utf-8"), given.ready
    if not name.isprintable() or "/" in name:
        raise HttpProblem(422, "Not valid", "the name of a recipe is one word without '/'", "name", "choose another")
    return Submission(request_id(key), given.run or "", by, name, base_of(request), text,
                      tuple(given.overrides), tuple(given.inputs), given.verify_inputs)


def request_id(sent: str | None) -> str:
    """Return the id `sent`, by which a client marks a request and its repetitions. If the client has sent no valid id,
    return a new one."""
    return sent if sent and len(sent) <= 200 else secrets.token_hex(16)


def base_of(request: Request) -> str:
    """Return the folder to which relative paths in submitted recipes refer."""
    return driver_options(request.app.state.settings).folder or os.sep


def kept_submission(request: Request, at: Store, run: str, by: str, entries: list[QueueEntry],
                    key: str | None = None) -> Submission:
    """Return the submission (recipe with its options) that resumes a run. `entries` are the entries of the queue. If
    this run was submitted through the queue, its latest submission is used. Otherwise the submission is made from
    recipe.yaml in the run's folder. Raises HttpProblem when the run keeps no recipe."""
    earlier = next((e for e in reversed(entries) if e.run == run), None)
    key = request_id(key)
    if earlier is not None:
        before = queue_of(request, request.path_params["store"]).submission(earlier.number)
        return Submission(key, run, by, before.name, before.base, before.text, before.overrides, before.inputs,
                          before.verify_inputs, resumes=True)
    facts = facts_of(at, run)
    try:
        text = read_file(at, f"runs/{run}/recipe.yaml", RECIPE).decode("utf-8", "replace")
    except FileNotFoundError:
        raise HttpProblem(404, "No recipe", f"the run {run!r} keeps no recipe", "run",
                          "submit its recipe again") from None
    return Submission(key, run, by, facts.get("recipe") or "recipe", facts.get("base") or base_of(request), text,
                      resumes=True)


async def check_submission(request: Request, submission: Submission, plan_in: Store | None,
                           causes: int = 0, find_files_s: float = 0.0, before: str = "") -> dict[str, Any]:
    """Check a submission (a recipe to run) in a separate process. Returns the result of
    `pipeline.service.checks.check`.

    - `plan_in`: also plan the recipe in this store
    - `causes`: say why up to this many nodes of the plan are stale
    - `find_files_s`: for so many seconds, also check whether the sources of the recipe have files
    - `before`: the text of another recipe, if the planned recipe was made by changing that one; warnings that both get
      are left out
    """
    options = driver_options(request.app.state.settings)
    result: dict[str, Any] = await request.app.state.checks.check(request, {
        "text": submission.text, "name": submission.name, "base": submission.base, "run": submission.run,
        "overrides": submission.overrides, "inputs": submission.inputs, "verify_inputs": submission.verify_inputs,
        "roots": options.roots, "allow_code": options.allow_code, "store": plan_in.root if plan_in else None,
        "causes": causes, "find_files_s": find_files_s, "before": before})
    return result


def refuse_errors(result: dict[str, Any]) -> None:
    errors = [p for p in result["problems"] if p["severity"] == "error"]
    if errors:
        first = errors[0]
        more = f" (and {len(errors) - 1} more; recipes/validate lists all)" if len(errors) > 1 else ""
        raise HttpProblem(422, "The recipe has an error", f"{first['file']}:{first['line']}: {first['message']}{more}",
                          first["key"], first["remedy"])


async def _refuse_taken(at: Store, run: str, entries: list[QueueEntry]) -> None:
    """Raise HttpProblem when the name `run`, which a client has chosen, is taken. It is taken if the store has a run of
    this name, or the queue has an entry of this name that has not ended. An empty `run` means that the client has
    chosen none. Names that no run can have are left to `check_submission`: they could lead out of the store."""
    if bad_name(run) is not None:
        return
    there: bool = await run_in_threadpool(has_run, at, run)
    if there:
        raise HttpProblem(409, "Name is taken", f"there is a run {run!r}, whose results another recipe would replace",
                          "run", "leave `run` out, choose another name, or resume that run")
    if any(e.run == run and not e.ended for e in entries):
        raise HttpProblem(409, "Name is taken", f"the run {run!r} of another submission is in the queue", "run",
                          "leave `run` out, choose another name, or cancel that run")


async def put_submission(request: Request, store: str, submission: Submission, run: str) -> dict[str, Any]:
    """Put a submission (a recipe to run) into the queue of a store under the run's name `run`, and return the new entry
    of the queue as JSON."""
    submission = Submission(**{**submission.__dict__, "run": run})
    queue = queue_of(request, store)
    entry = await run_in_threadpool(queue.submit, submission)
    return _document(request, entry, places(await run_in_threadpool(queue.entries)))


def queue_of(request: Request, store: str) -> Queue:
    queue: Queue = request.app.state.queues[store]
    return queue


def _entry(queue: Queue, number: int) -> QueueEntry:
    entry = next((e for e in queue.recent() if e.number == number), None)
    if entry is None:
        raise HttpProblem(404, "No such entry", f"the queue has no entry {number}", "number", "list the queue")
    return entry


def _document(request: Request, entry: QueueEntry, waiting: dict[int, int]) -> dict[str, Any]:
    """Return an entry of the queue as JSON for clients. It contains no process, host or address."""
    addresses = cluster_addresses({"address": request.app.state.settings.address})
    return {"number": entry.number, "run": entry.run, "recipe": entry.name, "state": entry.state,
            "place": waiting.get(entry.number), "stopping": entry.stopping, "by": entry.by, "resumes": entry.resumes,
            "submitted": entry.events[0].at, "changed": entry.last.at, "attempt": entry.attempt or None,
            "error": outward_text(entry.last.error, addresses) if entry.last.error else None}
