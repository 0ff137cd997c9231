"""Router: the HTML page of the playground, on which people try other thresholds for a finished run. The page shows what
the playground's API answers. It works without JavaScript: each threshold is a field of a form, and the page's address
holds all changes."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import QueryParams
from starlette.responses import RedirectResponse, Response

from pipeline.base.visible import visible
from pipeline.cluster.attempts import bad_name, facts_of, has_run
from pipeline.cluster.queue import Submission
from pipeline.service import tune
from pipeline.service.access import Operator, Viewer, form_of, viewer
from pipeline.service.html import page, path
from pipeline.service.latest import latest_with
from pipeline.service.pages import linkable
from pipeline.service.plan_page import plan_page, planned
from pipeline.service.playground import MOST, Changes, Playground
from pipeline.service.problems import HttpProblem
from pipeline.service.runs import RECIPE, run_file
from pipeline.service.session import Role
from pipeline.service.stores import RunOf, StoreOf
from pipeline.service.submit import base_of, enqueue, queue_of, request_id
from pipeline.store.fs import Store

PLACE = "/stores/{store}/runs/{run}/datasets/{dataset}/tune"
router = APIRouter(prefix=PLACE, include_in_schema=False, dependencies=[Depends(viewer), Depends(tune.turn)])
#: without `tune.turn`: planning a recipe must not keep others from the playground
run_router = APIRouter(prefix=PLACE, include_in_schema=False, dependencies=[Depends(viewer)])

latest_router = APIRouter(include_in_schema=False, dependencies=[Depends(viewer)])

#: the field that marks a form as sent, and the prefix of the names of the fields for keys
SENT, KEYS = "form", "t."
#: about the most characters of a run's name that is made from its changes
NAME = 60
#: values of a cube that the table of moves shows; groups and moves that an answer shows
MOVES, GROUPS, PAIRS = 16, 30, 30
#: the setting by which a run computes the signals of dropped documents, too
ALL_SIGNALS = "run.signals=all"


@router.get("")
def tune_page(request: Request, store: str, run: RunOf, dataset: str, game: tune.GameOf, role: Viewer,
              changes: Annotated[str, Query(max_length=4000)] = "{}", exact: bool = False,
              move: Annotated[str, Query(max_length=120)] = "") -> Response:
    """Show the playground: thresholds as fields of a form, how many documents the dataset would have, and example
    documents near the thresholds. With `move` (STEP.KEY), the page also shows the counts at other values of this
    threshold. When the form was sent, the answer redirects to a URL that contains only the changes."""
    steps, problem, answer, moves = game.steps(), None, None, None
    typed = {name: value for name, value in request.query_params.items() if name.startswith(KEYS)}
    asked = tune.RequestedChanges()
    try:
        if SENT in request.query_params:
            asked = read_form(steps, request.query_params)
            return RedirectResponse(address(store, run, dataset, asked, exact, move), 303)
        asked = tune.parse_changes(changes)
        answer = tune.answer(game, asked.changes(), exact)
        if move:
            moves = _moves(request, game, asked.changes(), steps, move)
    except HttpProblem as e:
        problem = e
    text = _written(asked)
    return page(
        request, "tune.html.j2", problem.status if problem and answer is None else 200, store=store, run=run,
        dataset=dataset, game=game, steps=[_shown(step, asked, typed, move) for step in steps], answer=answer,
        move=move, moves=moves, problem=problem.document() if problem else None, changes=text, linkable=linkable,
        changed=bool(asked.thresholds or asked.off), most_groups=GROUPS, most_moves=PAIRS, most=MOST,
        operator=role is Role.operator, roots=bool(request.app.state.settings.allowed_roots),
        api=lambda name, **query: path("api", "v1", "stores", store, "runs", run, "datasets", dataset, "tune", name,
                                       **query),
        link=lambda **more: address(store, run, dataset, **{"asked": asked, **more}))


@run_router.post("/plan")
async def plan(request: Request, store: str, at: StoreOf, run: RunOf, dataset: str, role: Operator) -> Response:
    """Show the plan of the run's recipe with the user's changes (thresholds, steps left out) put into it."""
    asked, submission = await _submission(request, at, run, dataset, role)
    if not submission.run:
        submission = replace(submission, run=await run_in_threadpool(
            _free_name, request, store, at, tune.game_of(request, at, run, dataset), asked))
    way = path("stores", store, "runs", run, "datasets", dataset, "tune", "run")
    before = await run_in_threadpool(lambda: run_file(at, run, "recipe.yaml", RECIPE).decode("utf-8", "replace"))
    return plan_page(request, store, submission, await planned(request, submission, at, before), action=way,
                     fields={"changes": _written(asked), **({"signals": "all"} if submission.overrides else {})},
                     back=("Back to the thresholds", address(store, run, dataset, asked)), changed_run=run)


@run_router.post("/run")
async def submit(request: Request, store: str, at: StoreOf, run: RunOf, dataset: str, role: Operator) -> Response:
    """Put the user's changes (thresholds, steps left out) into the run's recipe, and put this recipe into the queue of
    runs."""
    _, submission = await _submission(request, at, run, dataset, role)
    await enqueue(request, store, at, submission)
    return RedirectResponse(path("stores", store, "queue"), 303)


@latest_router.get("/stores/{store}/datasets/{dataset}/tune")
def latest(at: StoreOf, store: str, dataset: str) -> Response:
    """Redirect to the playground (the page for trying other thresholds) of the latest finished run that made the
    dataset."""
    run = latest_with(at, dataset)
    return RedirectResponse(path("stores", store, "runs", run, "datasets", dataset, "tune"), 303)


# -- the form --------------------------------------------------------------------------------------------------------
def read_form(steps: list[dict[str, Any]], query: QueryParams) -> tune.RequestedChanges:
    """Parse the fields of the playground's form into changes of thresholds and steps. A field that holds the value of
    the run is no change. Raises HttpProblem for an invalid value."""
    thresholds: dict[int, dict[str, Any]] = {}
    for step in steps:
        for key in step["keys"]:
            name = f"{KEYS}{step['step']}.{key['key']}"
            if name in query and (value := _value(key, query[name].strip())) != key["value"]:
                thresholds.setdefault(step["step"], {})[key["key"]] = value
    try:
        return tune.RequestedChanges(thresholds=thresholds, off=[int(number) for number in query.getlist("off")])
    except ValueError:
        raise HttpProblem(422, "Not valid", "the steps to leave out are named by their numbers", "off",
                          "choose them on the page") from None


def _value(key: Mapping[str, Any], text: str) -> Any:
    """Parse the text that a user typed for a setting of a step. Raises HttpProblem when the text does not fit the
    setting's type."""
    if not text and key["optional"]:
        return None
    if key["type"] == "boolean":
        return text == "true"
    try:
        value = json.loads(text) if key["type"] == "json" else int(text) if _whole(text) else float(text)
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError
    except (ValueError, RecursionError):
        what = 'JSON, such as ["en", "de"]' if key["type"] == "json" else "a number"
        raise HttpProblem(422, "Not valid", f"{key['key']} is {what}, not {text[:80]!r}", key["key"],
                          "leave the field empty for no limit" if key["optional"] else "correct the field") from None
    return value


def _whole(text: str) -> bool:
    return text.removeprefix("-").isascii() and text.removeprefix("-").isdecimal() and len(text) < 19


def address(store: str, run: str, dataset: str, asked: tune.RequestedChanges, exact: bool = False,
            move: str = "") -> str:
    """Return the path and query of the URL of the playground (the page for trying other thresholds) of a dataset, with
    the changes `asked` filled in."""
    query = {"changes": _written(asked)} if asked.thresholds or asked.off else {}
    query |= {"exact": "true"} if exact else {}
    return path("stores", store, "runs", run, "datasets", dataset, "tune", **query, **({"move": move} if move else {}))


def _written(asked: tune.RequestedChanges) -> str:
    return json.dumps({"thresholds": asked.thresholds, "off": asked.off}, separators=(",", ":"))


def _shown(step: Mapping[str, Any], asked: tune.RequestedChanges, typed: Mapping[str, str],
           move: str) -> dict[str, Any]:
    """Return the values from which the template shows a step. For each setting, `text` is the text of the form's field,
    and `changed` says whether the user has set the field. `open` says that the page shows the step's settings
    unfolded."""
    keys = []
    for key in step["keys"]:
        name = f"{KEYS}{step['step']}.{key['key']}"
        own = asked.thresholds.get(step["step"], {})
        value = own.get(key["key"], key["value"])
        text = typed.get(name, "" if value is None else value if isinstance(value, str) else json.dumps(value))
        keys.append({**key, "name": name, "text": text, "changed": name in typed or key["key"] in own,
                     "help": _help(key), "was": "empty" if key["value"] is None else json.dumps(key["value"])})
    return {**step, "keys": keys, "left_out": step["step"] in asked.off,
            "open": any(key["changed"] or key["name"] == KEYS + move for key in keys)}


def _help(key: Mapping[str, Any]) -> str:
    """Return the help text of a setting for a reader of the page, where an empty field stands for the recipe's
    `null`."""
    text = re.sub(r"\bnull\b", "empty", str(key["help"]))
    return text if not key["optional"] or "empty" in text else f"{text}; empty: no limit" if text else "empty: no limit"


# -- the moves of one threshold --------------------------------------------------------------------------------------
def _moves(request: Request, game: Playground, changes: Changes, steps: list[dict[str, Any]],
           move: str) -> dict[str, Any]:
    """Return the values from which the template shows the table of one threshold, `move` (STEP.KEY). Each row is a
    possible value of the threshold, with the counts that the dataset would have."""
    number, _, name = move.partition(".")
    step = next((step for step in steps if str(step["step"]) == number), None)
    key = next((key for key in step["keys"] if key["key"] == name), None) if step else None
    if step is None or key is None:
        raise HttpProblem(422, "Not possible", f"there is no key {move[:80]!r} to move", "move",
                          "choose a key of the form")
    held = {place: dict(keys) for place, keys in changes.thresholds.items()}
    own = held.get(step["step"], {})
    now = own.get(name, key["value"])
    with tune.as_problem():
        cube = request.app.state.playgrounds.cube(game, changes, step["step"], name)
        stride = max(1, -(-(len(cube.edges) - 1) // MOVES))
        # a reader looks first for the value of the run and for the one that is asked about
        chosen = [value for value in (key["value"], now) if value in cube.edges]
        values = sorted({*cube.edges[:-1:stride], cube.edges[-1], *map(float, chosen)})
        counts = [cube.at(value) for value in values]
    rows = [{"value": value, "counts": count, "asked": tune.RequestedChanges(
                off=sorted(changes.off), thresholds={**held, step["step"]: {**own, name: _natural(key, value)}})}
            for value, count in zip(values, counts)]
    return {"step": step, "key": key, "field": f"{KEYS}{move}", "rows": rows, "now": now}


def _natural(key: Mapping[str, Any], value: float) -> int | float:
    return int(value) if float(value).is_integer() and key["type"] != "json" else value


# -- the name of the run ---------------------------------------------------------------------------------------------
def _free_name(request: Request, store: str, at: Store, game: Playground, asked: tune.RequestedChanges) -> str:
    """Return a name for a run with the changes `asked` which no run of the store has, and no run in its queue."""
    name = name_of(asked, {link.number: link.name for link in game.links})
    queued = {entry.run for entry in queue_of(request, store).entries()}
    names = itertools.chain([name], (f"{name}-{n}" for n in itertools.count(2)))
    return next(free for free in names if free not in queued and not has_run(at, free))


def name_of(asked: tune.RequestedChanges, steps: Mapping[int, str]) -> str:
    """Return a name for a run that says what is changed, such as `min_doc_words-150`. Changes for which the name has no
    room are counted at its end. `steps` are the names of the steps by their numbers."""
    words = [f"{key}-{'null' if value is None else value if isinstance(value, str) else json.dumps(value)}"
             for _, keys in sorted(asked.thresholds.items()) for key, value in keys.items()]
    words += [f"without-{steps.get(number, number)}" for number in sorted(asked.off)]
    words = [re.sub(r"[^\w.]+", "-", word, flags=re.ASCII).strip("-.")[:NAME] for word in words]
    name, *more = words or ["unchanged"]
    while more and len(name) + len(more[0]) < NAME:
        name = f"{name}-{more.pop(0)}"
    return f"{name}-and-{len(more)}-more" if more else name


# -- running it ------------------------------------------------------------------------------------------------------
async def _submission(request: Request, at: Store, run: str, dataset: str,
                      role: Role) -> tuple[tune.RequestedChanges, Submission]:
    """Return the changes (thresholds, steps left out) that the request's form contains, and a submission of the run's
    recipe with these changes. If the form asks for it, the submitted run computes all signals (numbers stored beside a
    text), also of dropped documents."""
    form = await form_of(request)
    asked = tune.parse_changes(form.get("changes", "{}")[:4000])

    def edited() -> str:
        with tune.one_turn(request):
            return tune.changed_recipe(tune.game_of(request, at, run, dataset), at, run, asked.changes())

    facts = await run_in_threadpool(facts_of, at, run)
    recipe = await run_in_threadpool(edited)
    name = form.get("run", "").strip()
    if name and (problem := bad_name(name)) is not None:
        raise HttpProblem(422, "Not valid", visible(problem), "run", "choose another name")
    submission = Submission(request_id(form.get("request")), name, str(role), facts.get("recipe") or "recipe",
                            facts.get("base") or base_of(request), recipe,
                            (ALL_SIGNALS,) if form.get("signals") == "all" else ())
    return asked, submission
