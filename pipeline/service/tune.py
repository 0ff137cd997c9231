"""Router: the API of the playground, which tells which documents a dataset of a finished run would have under other
thresholds.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.responses import Response

from pipeline.base.visible import visible
from pipeline.cluster.attempts import RECIPE_TEXT
from pipeline.recipe.edit import edit_recipe
from pipeline.recipe.errors import RecipeError
from pipeline.service.access import operator, viewer
from pipeline.service.cube import Cube, make_cube
from pipeline.service.duck import Busy
from pipeline.service.finished import PlaygroundError
from pipeline.service.outward import outward_text
from pipeline.service.playground import MOST, Changes, Playground
from pipeline.service.problems import HttpProblem
from pipeline.service.stores import RunOf, StoreOf, read_file
from pipeline.service.turns import Turns
from pipeline.store.fs import Store

#: requests that work at a time, requests that may wait, and the seconds for which one waits
AT_ONCE, WAITING, WAIT_S = 2, 8, 10.0
#: cubes that stay in memory
MOST_CUBES = 32
#: most documents in a list of changed ones; most bytes of a recipe, and of each file of a run that is read
MOST_LISTED, RECIPE, PLAN = 1000, 1 << 20, 256 << 20


def turn(request: Request) -> Iterator[None]:
    """A dependency of the routes for trying other thresholds. It lets only a few requests work at a time, because each
    may take much memory and time. Raises HttpProblem (503) when the request has waited too long."""
    games: Playgrounds = request.app.state.playgrounds
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(games.turns.turn(WAIT_S, "requests to the playground"))
        except Busy as e:
            raise HttpProblem(503, "Busy", e.detail, remedy=e.remedy, headers={"Retry-After": "5"}) from None
        yield


#: `turn` as a context manager, for a part of a request
one_turn = contextlib.contextmanager(turn)
router = APIRouter(prefix="/api/v1/stores/{store}/runs/{run}/datasets/{dataset}/tune", tags=["playground"],
                   dependencies=[Depends(viewer), Depends(turn)])


class RequestedChanges(BaseModel):
    """Changes to the steps of a dataset that a client wants to try. `thresholds` maps the number of a step to {decision
    key: new value}. A decision key is a setting that affects only which documents are kept. `off` lists the numbers of
    steps that are left out."""

    model_config = ConfigDict(extra="forbid")

    thresholds: dict[int, dict[str, Any]] = Field(default={}, max_length=200)
    off: list[int] = Field(default=[], max_length=200)

    def changes(self) -> Changes:
        return Changes({step: keys for step, keys in self.thresholds.items() if keys}, frozenset(self.off))


class Text(BaseModel):
    """The body of a request: a recipe as its author wrote it, and changes of settings to put into the recipe."""

    model_config = ConfigDict(extra="forbid")

    recipe: str = Field(max_length=RECIPE)
    changes: RequestedChanges


class Playgrounds:
    """A cache of playgrounds, the objects that judge the documents of a finished run under other thresholds. The most
    recently used playgrounds stay in memory, with at most `most` documents in all; a single playground stays even if it
    has more. A run whose files have changed is read anew."""

    def __init__(self, most: int = MOST) -> None:
        self._most, self.turns = most, Turns(AT_ONCE, WAITING)
        self._lock = threading.Lock()
        self._games: OrderedDict[tuple[str, str, str, bytes], Playground] = OrderedDict()
        self._cubes: OrderedDict[tuple[Any, ...], Cube] = OrderedDict()

    def get(self, store: Store, run: str, dataset: str) -> Playground:
        digest = hashlib.sha256()
        try:
            for name in ("plan.json", "tasks.parquet", "recipe.yaml"):
                digest.update(read_file(store, f"runs/{run}/{name}", PLAN))
        except FileNotFoundError:
            raise HttpProblem(409, "Not finished", f"the run '{run}' has not finished", "run",
                              "wait for its end; the playground needs all documents") from None
        key = (store.root, run, dataset, digest.digest())
        with self._lock:
            if key not in self._games:
                self._games[key] = Playground(store, run, dataset)
                while len(self._games) > 1 and sum(game.in_memory for game in self._games.values()) > self._most:
                    self._games.popitem(last=False)
                    self._cubes.clear()
            self._games.move_to_end(key)
            return self._games[key]

    def cube(self, game: Playground, changes: Changes, step: int, name: str) -> Cube:
        held = {number: {key: value for key, value in keys.items() if (number, key) != (step, name)}
                for number, keys in changes.thresholds.items()}
        # not id(game): a new playground may get the id of one that is gone
        key = (weakref.ref(game), step, name, json.dumps([held, sorted(changes.off)], sort_keys=True, default=str))
        with self._lock:
            cube = self._cubes.get(key)
        if cube is None:
            cube = make_cube(game, Changes(held, changes.off), step, name)
            with self._lock:
                self._cubes[key] = cube
                while len(self._cubes) > MOST_CUBES:
                    self._cubes.popitem(last=False)
        return cube


def requested_changes(changes: Annotated[str, Query(
        max_length=4000, description='JSON: {"thresholds": {"STEP": {"KEY": value}}, "off": [STEP]}')] = "{}",
                      ) -> Changes:
    return parse_changes(changes).changes()


def parse_changes(text: str) -> RequestedChanges:
    """Parse the JSON of changes to a dataset's steps (thresholds, steps to leave out), which a query or form field
    contains. Raises HttpProblem when it is not valid."""
    try:
        return RequestedChanges.model_validate_json(text)
    except ValidationError as e:
        raise HttpProblem(
            422, "Not valid", visible(str(e.errors()[0]["msg"])), "changes",
            'write {"thresholds": {"1": {"min_doc_words": 60}}, "off": [2]}, with numbers of steps') from None


@contextlib.contextmanager
def as_problem(status: int = 422) -> Iterator[None]:
    """A context manager that turns a PlaygroundError into an HttpProblem (an error answer) with this HTTP status."""
    try:
        yield
    except PlaygroundError as e:
        detail, _, remedy = visible(e.message).partition("; ")
        raise HttpProblem(status, "Not possible", detail, e.key, remedy) from None


def game_of(request: Request, at: StoreOf, run: RunOf, dataset: str) -> Playground:
    """Return the playground of a dataset: the object that judges the documents of a finished run under other
    thresholds. Raises HttpProblem when there can be none, for example because the run has no such dataset."""
    games: Playgrounds = request.app.state.playgrounds
    with as_problem(404):
        return games.get(at, run, dataset)


GameOf = Annotated[Playground, Depends(game_of)]
ChangesOf = Annotated[Changes, Depends(requested_changes)]


@router.get("", summary="Show what may be tuned")
def show_steps(game: GameOf) -> dict[str, Any]:
    """List the steps of the dataset and their thresholds. `off` says whether a step may be left out. `own` marks a step
    that this server cannot load (a user's own code, or a missing model), so its decisions are not known."""
    return {"run": game.run, "dataset": game.dataset, "documents": game.documents, "sample": round(game.share, 6),
            "signals_all": not game.until_drop, "steps": game.steps()}


@router.get("/answer", summary="Ask for other thresholds")
def answer(game: GameOf, changes: ChangesOf,
           exact: Annotated[bool, Query(description="from all documents, not from a sample")] = False,
           ) -> dict[str, Any]:
    """Return which documents the dataset would have under the changes:

    - documents and bytes kept, dropped and unknown, by source and language
    - how many documents change from which outcome to which
    - example documents

    If only a sample was judged, each count has an interval, which contains the true count in about 95 of 100 samples.
    """
    with as_problem():
        return game.answer(changes, exact)


@router.get("/documents", summary="List the documents that change sides")
def documents(game: GameOf, changes: ChangesOf,
              after: Annotated[int, Query(ge=0, description="documents to leave out")] = 0,
              limit: Annotated[int, Query(ge=1, le=MOST_LISTED)] = 100) -> dict[str, Any]:
    """List the ids of the documents whose side (kept or dropped) would change, or would no longer be known. Each id
    comes with the document's outcome before and after the changes. The ids come in a random order that is always the
    same. If the dataset is too big to be counted exactly, only documents of its sample are listed."""
    with as_problem():
        outcomes = game.outcomes(game.moved(changes))
    page = [{"id": id, "from": was._asdict(), "to": now._asdict()}
            for id, was, now in itertools.islice(outcomes.documents(), after, after + limit)]
    end, of = after + len(page), len(outcomes.changed())
    return {"documents": page, "of": of, "after": end if end < of else None}


@router.get("/cube", summary="Get all moves of a threshold")
def cube(request: Request, game: GameOf, changes: ChangesOf,
         step: Annotated[int, Query(ge=0, description="number of the step")],
         key: Annotated[str, Query(max_length=100)]) -> dict[str, Any]:
    """Return a table that counts the documents of a dataset by source, language and bin (range of values) of one
    threshold. The other changes stay in force. The counts for any value of the threshold are sums of cells. At a value
    between two edges of bins, the true counts lie between those at the edges."""
    games: Playgrounds = request.app.state.playgrounds
    with as_problem():
        return games.cube(game, changes, step, key).to_json()


@router.get("/recipe.yaml", summary="Save as a recipe", response_class=Response)
def save(game: GameOf, at: StoreOf, run: RunOf, changes: ChangesOf) -> Response:
    """Return the text of the run's recipe, as its author wrote it, with the changes put into it. Secrets and personal
    data are masked.

    In two cases, the changes are put into the recipe as the run used it, with all defaults and without comments:
    settings or inputs were overridden when the run was started, or the author's text cannot be changed in place.
    """
    # The text may be missing, or written in a way that cannot be changed in place (for example, a step is an alias).
    with contextlib.suppress(HttpProblem, FileNotFoundError):
        text = read_file(at, f"runs/{run}/{RECIPE_TEXT}", RECIPE).decode("utf-8", "replace")
        return _answered(outward_text(_edited(game, text, "recipe.yaml", changes), []))
    return _answered(outward_text(changed_recipe(game, at, run, changes), []))


@router.post("/recipe.yaml", summary="Put the changes into your recipe", response_class=Response,
             dependencies=[Depends(operator)])
def save_own(game: GameOf, body: Text) -> Response:
    """Put the changes into the text of the recipe that the client sends, and return the changed text. Comments and the
    order of keys stay."""
    return _answered(_edited(game, body.recipe, "recipe", body.changes.changes()))


def changed_recipe(game: Playground, at: Store, run: str, changes: Changes) -> str:
    """Return the text of a run's recipe, as the store keeps it, with the changes (other thresholds, steps left out) put
    into it."""
    text = read_file(at, f"runs/{run}/recipe.yaml", RECIPE).decode("utf-8", "replace")
    return _edited(game, text, "recipe.yaml", changes)


def _edited(game: Playground, text: str, file: str, changes: Changes) -> str:
    with as_problem():
        game.moved(changes)
    try:
        return edit_recipe(text, file, game.dataset, changes.thresholds, changes.off)
    except RecipeError as e:
        first = e.problems[0]
        detail, _, remedy = visible(first.message).partition("; ")
        raise HttpProblem(422, "Not changed", detail, ".".join(map(str, first.path)), remedy) from None


def _answered(recipe: str) -> Response:
    return Response(recipe, media_type="application/yaml",
                    headers={"Content-Disposition": 'attachment; filename="recipe.yaml"'})
