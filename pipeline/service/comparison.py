"""Compares two finished runs of a store for the service. The code of `tokenmill report --compare`
(`pipeline.report.compare`) does the work. This module sets the limits, and reads the runs' files, which may be damaged
or hostile.

Recipes and figures come from a few files of each run. Only the documents take long. If those of a dataset cannot be
compared in time, the comparison is answered without them, and says so.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from pipeline.base.errors import TokenmillError
from pipeline.base.visible import visible
from pipeline.plan.changes import compare_command
from pipeline.recipe.errors import RecipeError
from pipeline.recipe.marks import parse_yaml
from pipeline.report.compare import FinishedRun, common_datasets, compare_runs, dataset_section
from pipeline.report.schema import Report
from pipeline.service.answer_memory import AnswerMemory
from pipeline.service.duck import Cancelled, Stop, TooDear
from pipeline.service.outward import outward_text
from pipeline.service.problems import HttpProblem, finite, problem_of
from pipeline.service.stores import check_run, read_file
from pipeline.store.fs import Store
from pipeline.store.log import Log
from stages.scrub.pii import scrub_value

#: most bytes of a run's files: its report (a comparison takes 70 times as much memory), its recipe, and its plan and
#: list of tasks
REPORT, RECIPE, PLAN = 4 << 20, 1 << 20, 64 << 20
#: characters of remembered comparisons, written as Python values
MOST_CHARACTERS = 4 << 20
UNFINISHED = "wait for its end, or resume it"

Model = TypeVar("Model", bound=BaseModel)


class PlannedNode(BaseModel):
    """A node of a run's plan.json, with only the fields that a comparison of runs reads. The fields describe passes
    (groups of steps)."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    name: str
    kind: str
    dataset: str | None = None
    steps: list[str] = []
    deps: list[str] = []
    publishes: bool = False
    tasks: int = 0


class RunPlan(BaseModel):
    """The fields of a run's plan.json that a comparison of runs reads."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    recipe: str
    about: dict[str, Any] | None = None
    nodes: list[PlannedNode]


@dataclass(frozen=True)
class ReadRun:
    """A finished run whose files were read, and `digest`, a hash of its plan, its list of tasks and its recipe. Runs
    with the same digest kept the same documents."""

    run: FinishedRun
    digest: bytes


class Comparisons:
    """Compares finished runs. The comparison of a dataset's documents is kept in memory, because it takes long and its
    result never changes. It is forgotten when documents are taken down, because it quotes some documents."""

    def __init__(self) -> None:
        self._memory = AnswerMemory(MOST_CHARACTERS)

    def compare(self, store: Store, before: str, after: str, examples: int, stop: Stop) -> dict[str, Any]:
        """Compare two runs. Returns what `tokenmill report --compare --json` prints. A dataset whose documents could
        not be compared is missing under `documents`, and `problems` says why. Raises HttpProblem when a run cannot be
        read or has not finished, or when the two have nothing to compare."""
        if before == after:
            raise HttpProblem(422, "Nothing to compare", "both names are those of one run", "after",
                              "name two runs of the store")
        log = functools.cache(lambda: Log.read(store))               # read only if the documents are not remembered
        elsewhere = f"on a machine with the store, use {compare_command(store, before, after)}"
        one, two = (_read_run(store, name, key, elsewhere, lambda task: log().get(task))
                    for name, key in ((before, "before"), (after, "after")))
        if not common_datasets(one.run, two.run):
            raise HttpProblem(422, "Nothing to compare", f"{_made(one.run)}, and {_made(two.run)}", "after",
                              "name two runs of one recipe")
        taken_down = tuple(store.list("takedowns"))
        problems: list[dict[str, Any]] = []

        def section(dataset: str) -> dict[str, Any] | None:
            question = (store.root, one.digest, two.digest, taken_down, dataset, examples)
            answer: dict[str, Any] | None = self._memory.get(b"", question)
            if answer is not None:
                return answer
            try:
                answer = dataset_section(one.run, two.run, dataset, examples, stop.check)
            except Cancelled:
                raise
            except (TokenmillError, OSError) as e:
                problems.append(_problem(e, dataset, elsewhere))
                return None
            if not any(answer["missing"].values()):                  # a run may make missing parts anew
                self._memory.put(b"", question, answer)
            return answer

        document = compare_runs(one.run, two.run, examples, section)
        # masked like the recipe of a run: it may name addresses within a private network
        recipe = scrub_value(document["recipe"], lambda text: outward_text(text, []), keys=True)
        return {**document, "recipe": recipe, "problems": problems}


def _made(run: FinishedRun) -> str:
    return f"{visible(run.name)} made {', '.join(visible(name)[:80] for name in run.datasets()) or 'no dataset'}"


def _problem(error: Exception, dataset: str, elsewhere: str) -> dict[str, Any]:
    """Return the error message for a dataset whose documents could not be compared, as JSON. `error` is the exception
    that ended the comparison."""
    if isinstance(error, TooDear):
        error = HttpProblem(
            422, error.title, f"the documents of {visible(dataset)[:80]} could not be compared in time", "documents",
            f"ask again, as the datasets that were compared are remembered; or {elsewhere}")
    return problem_of(error).document()


# -- the files of a run ----------------------------------------------------------------------------------------------
def _read_run(store: Store, name: str, key: str, elsewhere: str, get: Callable[[str], Any]) -> ReadRun:
    """Read the files of a finished run. `get` returns the commit record of the task with a given key.

    Raises HttpProblem when the run does not exist, has not finished or has no report. Also raises it when one of the
    files is damaged or too large. The error names the parameter `key`. For a file that is too large, its message says
    with `elsewhere` how else the runs can be compared.
    """
    check_run(store, name, key)
    anew, report_anew = "run its recipe again", f"tokenmill report {name} writes it again"
    plan_text, tasks, recipe_text, report_text = (
        _file(store, name, file, most, key, remedy, elsewhere) for file, most, remedy in (
            ("plan.json", PLAN, UNFINISHED), ("tasks.parquet", PLAN, UNFINISHED), ("recipe.yaml", RECIPE, UNFINISHED),
            ("report.json", REPORT, report_anew)))
    plan = _checked(RunPlan, plan_text, name, "plan.json", key, anew)
    _checked(Report, report_text, name, "report.json", key, report_anew)
    report = finite(json.loads(report_text))
    if report["recipe"] != plan.recipe:
        raise _damaged(name, "report.json", "it is the report of another recipe", key, report_anew)
    digest = hashlib.sha256()
    for data in (plan_text, tasks, recipe_text):
        digest.update(hashlib.sha256(data).digest())
    return ReadRun(FinishedRun(store, name, plan.model_dump(), _recipe(recipe_text, name, key, anew), report, get),
                   digest.digest())


def _file(store: Store, run: str, name: str, most: int, key: str, remedy: str, larger: str) -> bytes:
    try:
        return read_file(store, f"runs/{run}/{name}", most, key, larger)
    except FileNotFoundError:
        raise HttpProblem(409, "Not finished", f"the run {run!r} has no {name}", key, remedy) from None


def _checked(model: type[Model], data: bytes, run: str, name: str, key: str, remedy: str) -> Model:
    """Parse `data`, the content of a JSON file, into an object of the class `model`. Raises HttpProblem when the data
    does not have the form of this class."""
    try:
        return model.model_validate_json(data)
    except ValidationError as e:
        first = e.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise _damaged(run, name, f"{place}: {first['msg']}", key, remedy) from None


def _recipe(data: bytes, run: str, key: str, remedy: str) -> dict[str, Any]:
    """Parse the text of a run's recipe (YAML) and return its content. Raises HttpProblem when the text is no recipe, or
    exceeds the limits of `parse_yaml`. The limits are needed because YAML with aliases can expand to values too large
    to compare."""
    try:
        recipe, _ = parse_yaml(data.decode(), "recipe.yaml")
    except (UnicodeDecodeError, RecipeError) as e:
        raise _damaged(run, "recipe.yaml", visible(str(e)), key, remedy) from None
    datasets = recipe.get("datasets") if isinstance(recipe, dict) else None
    if not isinstance(datasets, dict) or not all(
            isinstance(dataset, dict) and isinstance(dataset.get("steps", []), list) for dataset in datasets.values()):
        raise _damaged(run, "recipe.yaml", "it is not a recipe", key, remedy)
    return dict(recipe)


def _damaged(run: str, name: str, why: str, key: str, remedy: str) -> HttpProblem:
    return HttpProblem(409, "A file of the run is damaged", f"runs/{run}/{name}: {why}", key, remedy)
