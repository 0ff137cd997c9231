"""Finds the settings of a recipe that differ from those of the latest finished run in a store, to show them to people.
If that run was of another recipe, there is nothing to show. Which results are stale (have to be made again) does not
depend on these differences; `pipeline.store.content_keys` decides it."""

from __future__ import annotations

import json
import shlex
from typing import Any

import yaml

from pipeline.cluster.attempts import bad_name, facts_of
from pipeline.recipe import Recipe
from pipeline.recipe.errors import key_path
from pipeline.store.fs import Store

#: with more differences than this, the latest run was of another recipe
MOST = 40


def latest_run(store: Store) -> str | None:
    """Return the name of the run that the store's report.json describes, which is the latest finished one. None when no
    run has finished in the store, or report.json cannot be read."""
    try:
        return str(json.loads(store.read("report.json"))["run"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def run_recipe_of(store: Store, run: str) -> dict[str, Any]:
    """Return the recipe of a run (its recipe.yaml) as plain values; {} when the run has no readable recipe."""
    try:
        document = yaml.safe_load(store.read(f"runs/{run}/recipe.yaml"))
    except (OSError, yaml.YAMLError):
        return {}
    return document if isinstance(document, dict) else {}


def run_before(store: Store, run: str) -> str:
    """Return the name of the run that is the latest finished one when `run` begins, or "" if there is none. The caller
    notes the name in the run.json of `run`. A finished run may be started again while it is the latest one; the name
    that its earlier attempt noted is then returned."""
    latest = latest_run(store)
    return str(facts_of(store, run).get("before", "")) if latest == run else latest or ""


def compare_command(store: Store, before: str, run: str) -> str:
    """Return the shell command (`tokenmill report --compare …`) that compares the run `run` of a store with the earlier
    run `before`."""
    return shlex.join(["tokenmill", "report", "--compare", before, run, "--store", store.root])


def comparable_run(store: Store, run: str) -> str | None:
    """Return the name of the run with which `run` can be compared: the latest run that was finished when `run` began.
    Returns None if there was none, or if the store no longer has its files. Also returns None if the names of the two
    runs' datasets differ."""
    before: str = facts_of(store, run).get("before", "")
    if before == run or bad_name(before) is not None or not store.exists(f"runs/{before}/tasks.parquet"):
        return None
    first, second = (run_recipe_of(store, name).get("datasets") for name in (before, run))
    if not isinstance(first, dict) or not isinstance(second, dict) or first.keys() != second.keys():
        return None
    return before


def changes(recipe: Recipe, store: Store) -> dict[str, Any] | None:
    """Return the settings that changed since the latest finished run, as {"run", "settings": [{"key", "was", "now"}]}.
    `was` or `now` is None where the key is missing. Locations of inputs are not compared, because no result depends on
    them.

    Returns None when no run has finished, or when the latest run was of another recipe. It counts as another recipe if
    the names of its sources or datasets differ, or more than MOST settings.
    """
    run = latest_run(store)
    if run is None:
        return None
    was, now = run_recipe_of(store, run), yaml.safe_load(recipe.canonical_yaml())
    if any(was.get(section, {}).keys() != now[section].keys() for section in ("sources", "datasets")):
        return None
    for doc in (was, now):
        for source in doc["sources"].values():
            source.pop("path", None)
            source.pop("root", None)
    differences: list[dict[str, Any]] = []
    _compare(was, now, (), differences)
    return {"run": run, "settings": differences} if len(differences) <= MOST else None


def _compare(was: Any, now: Any, path: tuple[str | int, ...], differences: list[dict[str, Any]]) -> None:
    if isinstance(was, dict) and isinstance(now, dict):
        for key in [*now, *(k for k in was if k not in now)]:
            _compare(was.get(key), now.get(key), (*path, key), differences)
    elif isinstance(was, list) and isinstance(now, list) and len(was) == len(now) and _steps(was) == _steps(now):
        for i, (a, b) in enumerate(zip(was, now)):
            _compare(a, b, (*path, i), differences)
    elif was != now:
        differences.append({"key": key_path(path), "was": was, "now": now})


def _steps(items: list[Any]) -> list[Any]:
    """Return the names of the steps or phases in a list of a recipe. Two such lists with equal names are compared item
    by item; all other lists are compared as a whole."""
    return [i.get("name", sorted(i)) if isinstance(i, dict) else None for i in items]
