"""Checks and plans submitted recipes, each in a separate process.

A recipe from somebody else may take long to check (a glob over millions of files, a large model), may need much memory,
and may name code to load. The process has limits for time, memory and code, and is killed when the client disconnects.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from starlette.requests import ClientDisconnect, Request

from pipeline.base.errors import TokenmillError
from pipeline.base.process import die_with_parent, import_path, limit_data, no_core
from pipeline.base.redact import redact_json
from pipeline.cluster.attempts import bad_name
from pipeline.recipe import Recipe
from pipeline.recipe.errors import Problem as RecipeProblem
from pipeline.recipe.errors import RecipeError, key_path
from pipeline.service.dispatching import driver_options
from pipeline.service.one_request import answer_request
from pipeline.service.problems import HttpProblem
from pipeline.service.settings import OPERATOR_TOKEN, VIEWER_TOKEN, ServiceSettings
from pipeline.store.web import DIRECT

#: checks that run at a time; each takes a core and some hundred MB
AT_ONCE = 2
#: this many checks, and as many plans, may wait; further ones are refused
WAITING = 6
#: seconds, and bytes of memory, that a check may take
CHECK_S, CHECK_BYTES = 50.0, 4 << 30
#: seconds for finding out whether each source has files
FILES_S = 5.0
ELSEWHERE = "or plan it with tokenmill plan on the server's machine"
#: the result for a recipe that cannot be run, except its `problems`
NOTHING: dict[str, Any] = {"run": None, "digest": None, "plan": None, "causes": {}, "as_before": 0}
_PLACED = re.compile(r"(?P<file>[^:\n]*):(?P<line>\d+):(?P<column>\d+): (?:(?P<key>[\w.\[\]-]+): )?(?P<message>.*)",
                     re.DOTALL)
_KEYED = re.compile(r"(?P<key>[\w-]+[.\[][\w.\[\]-]+): (?P<message>.*)", re.DOTALL)


class CheckRoom:
    """Checks and plans recipes, each in a separate process and only a few at a time."""

    def __init__(self, settings: ServiceSettings) -> None:
        self._room, self._folder = asyncio.Semaphore(AT_ONCE), driver_options(settings).folder
        self._plan_room = asyncio.Semaphore(AT_ONCE - 1)          # plans are slow: one place stays free for checks
        self._inside = {False: 0, True: 0}
        self._environment = {k: v for k, v in os.environ.items() if k not in (OPERATOR_TOKEN, VIEWER_TOKEN)} | {
            DIRECT: "1", "PYTHONPATH": import_path()}

    async def check(self, client: Request, request: Mapping[str, Any]) -> dict[str, Any]:
        """Check or plan a recipe in a new process: call the module's function `check` on `request` there, and return
        its result. Raises HttpProblem when it takes too long, when the recipe cannot be planned, and when too many
        checks wait. Raises ClientDisconnect, and kills the process, when the client disconnects."""
        async def gone() -> None:
            while (await client.receive())["type"] != "http.disconnect":
                pass

        plans = request["store"] is not None
        if self._inside[plans] >= WAITING + AT_ONCE - plans:
            raise HttpProblem(503, "Busy", "too many recipes wait to be checked", remedy="try again in a few seconds",
                              headers={"Retry-After": "5"})
        self._inside[plans] += 1
        work, left = asyncio.ensure_future(self._wait_and_check(plans, request)), asyncio.ensure_future(gone())
        try:
            await asyncio.wait((work, left), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise ClientDisconnect
            return work.result()
        finally:
            self._inside[plans] -= 1
            left.cancel()
            if not work.done():
                work.cancel()
                await asyncio.wait((work,))                       # it kills its process

    async def _wait_and_check(self, plans: bool, request: Mapping[str, Any]) -> dict[str, Any]:
        async with self._plan_room if plans else contextlib.nullcontext(), self._room:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", "pipeline.service.checks", env=self._environment, cwd=self._folder,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL)
            try:
                data, _ = await asyncio.wait_for(process.communicate(json.dumps(request).encode()), CHECK_S)
            except TimeoutError:
                raise HttpProblem(422, "Takes too long", f"the recipe could not be checked within {CHECK_S:.0f} s",
                                  "recipe", f"name fewer files, {ELSEWHERE}") from None
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
        if process.returncode != 0 or not data.strip():
            raise HttpProblem(422, "Cannot be checked", "the process that checks the recipe died, probably for want of "
                              "memory", "recipe", f"name smaller models or fewer files, {ELSEWHERE}")
        result: dict[str, Any] = json.loads(data.splitlines()[-1])
        if "failed" in result:
            message, _, remedy = result["failed"].partition("; ")
            raise HttpProblem(400, "Cannot be planned", message, "recipe", remedy)
        return result


# -- in the separate process -----------------------------------------------------------------------------------------
def check(request: Mapping[str, Any]) -> dict[str, Any]:
    """Load a recipe and, if the request names a `store`, plan the recipe in that store. The inputs of the recipe must
    lie in the request's `roots`. If the request names no store, sources without a file are looked for, for
    `find_files_s` seconds, and reported as warnings.

    A recipe that was made by changing another one comes with that other recipe, `before`. When such a recipe is
    planned, warnings that `before` gets, too, are left out, because they have nothing to do with the changes.
    `as_before` is their number.

    Returns {"problems", "run", "digest", "plan", "causes", "as_before"}. Each problem has severity (error, warning),
    file, line, column, key, message and remedy. `run` is None when the recipe cannot be run. `causes` says why nodes of
    the plan are stale (`pipeline.plan.why.stale_causes`), for as many nodes as the request's `causes` asks for.
    """
    from pipeline.plan.lint import findings
    from pipeline.recipe.confine import refusals
    from pipeline.recipe.load import load_text
    from pipeline.run import run_name

    name, base = request["name"], request["base"]
    load = partial(load_text, file=f"{name}.yaml", name=name, base=base, overrides=request["overrides"],
                   inputs=request["inputs"], inputs_from=base, allow_custom=request["allow_code"],
                   confine=partial(refusals, base=base, roots=request["roots"]))
    try:
        recipe = load(request["text"])
    except RecipeError as e:
        return {**NOTHING, "problems": [_document(p) for p in e.problems]}
    warnings, texts = [_document(p, "warning") for p in findings(recipe)], list(recipe.warnings)
    plan: dict[str, Any] | None = None
    causes: dict[str, Any] = {}
    as_before = 0
    if request["store"] is not None:
        plan, causes, known = _planned(recipe, request, load)
        warnings, texts = [], [text for text in plan["warnings"] if _gist(text) not in known]
        as_before = len(plan["warnings"]) - len(texts)
    elif request["find_files_s"]:
        warnings += [_document(p, "warning") for p in without_files(recipe, request["find_files_s"])]
    run = request["run"] or run_name(recipe)
    if (why := bad_name(run)) is not None:
        return {**NOTHING, "problems": [_parts("error", "", 0, 0, "run", why)]}
    return {"problems": [*warnings, *map(_warning, texts)], "run": run, "digest": recipe.digest(), "plan": plan,
            "causes": causes, "as_before": as_before}


def _planned(recipe: Recipe, request: Mapping[str, Any],
             load: Callable[[str], Recipe]) -> tuple[dict[str, Any], dict[str, Any], set[tuple[str, str]]]:
    """Plan a recipe in the request's store. Returns three things:

    - the plan
    - why nodes of the plan are stale, for as many nodes as the request asks for
    - the gists (`_gist`) of the warnings about `before`, the recipe before its changes

    `load` makes a Recipe from the text of `before`.
    """
    from pipeline.plan.estimate import MEASURED, describe_plan, measured, open_plan
    from pipeline.plan.lint import lint
    from pipeline.plan.survey import survey
    from pipeline.plan.why import stale_causes

    plan, most = open_plan(recipe, request["store"], verify_inputs=request["verify_inputs"]), request["causes"]
    states = survey(plan.nodes, plan.log.get_all, plan.fresh, keep=most > 0)
    speeds = measured(plan.log.sample(MEASURED))
    known: set[tuple[str, str]] = set()
    if request["before"]:
        with contextlib.suppress(RecipeError):
            before = load(request["before"])
            known = {_gist(text) for text in (*before.warnings, *lint(before, speeds.stages))}
    return describe_plan(recipe, plan, states, speeds), stale_causes(plan, states, most), known


def _gist(text: str) -> tuple[str, str]:
    """Return (key, message) of a warning about a recipe, without line numbers and numbers of steps. If a step is taken
    out of the recipe, the same warning still has the same gist."""
    warning = _warning(text)
    return re.sub(r"\[\d+\]", "", warning["key"]), f"{warning['message']}; {warning['remedy']}"


def without_files(recipe: Recipe, seconds: float) -> list[RecipeProblem]:
    """Return the problems that a plan would report about sources that have no files or cannot be listed. Only problems
    that are found within `seconds` are returned. A thread may go on listing files after that; it does not keep the
    process from ending."""
    from pipeline.plan.inputs import check_patterns
    from stages.catalog import reader_class

    problems: list[RecipeProblem] = []

    def find_files() -> None:
        for name, source in recipe.sources.items():
            try:
                check_patterns(name, source.path, base=recipe.base, root=source.root,
                            suffixes=reader_class(source.read).suffixes, follow_symlinks=source.follow_symlinks)
            except Exception as e:                                # such as a folder that the server may not read
                why = str(e) if isinstance(e, TokenmillError) else (
                    f"its files cannot be listed ({type(e).__name__}); see that the server may read the folder")
                path = ("sources", name, "path")
                problems.append(RecipeProblem(recipe.mark(path), path, why))

    thread = threading.Thread(target=find_files, name="files", daemon=True)
    thread.start()
    thread.join(seconds)
    return list(problems)


def _document(problem: RecipeProblem, severity: str = "error") -> dict[str, Any]:
    return _parts(severity, problem.mark.file, problem.mark.line, problem.mark.column, key_path(problem.path),
                  problem.message)


def _warning(text: str) -> dict[str, Any]:
    """Return a warning of the linter or the planner as a problem in JSON. The text of the warning begins with a place
    (file:line:column), with a key of the recipe, or with neither."""
    if (placed := _PLACED.fullmatch(text)) is not None:
        return _parts("warning", placed["file"], int(placed["line"]), int(placed["column"]), placed["key"] or "",
                      placed["message"])
    keyed = _KEYED.fullmatch(text)
    return _parts("warning", "", 0, 0, keyed["key"] if keyed else "", keyed["message"] if keyed else text)


def _parts(severity: str, file: str, line: int, column: int, key: str, message: str) -> dict[str, Any]:
    """Return a problem of a recipe as JSON. `message` has the form `what is wrong; what to do`: the part after the
    semicolon becomes the field `remedy`."""
    what, _, remedy = message.partition("; ")
    return {"severity": severity, "file": file, "line": line, "column": column, "key": key, "message": what,
            "remedy": remedy}


def main() -> None:
    die_with_parent(os.getppid())
    no_core()
    limit_data(CHECK_BYTES)
    answer_request(_checked)


def _checked(request: Mapping[str, Any]) -> dict[str, Any]:
    try:
        result = check(request)
    except TokenmillError as e:
        result = {"failed": str(e)}
    redacted: dict[str, Any] = redact_json(result)
    return redacted


if __name__ == "__main__":
    main()
