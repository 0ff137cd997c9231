"""What a corpus is cited by: the ready recipe it was made with, its version, and what was changed about it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pipeline.recipe.errors import KeyPath, RecipeError, key_path
from pipeline.recipe.load import READY, load_recipe, ready_recipes, value_at
from pipeline.recipe.marks import parse_yaml
from pipeline.recipe.model import Recipe

#: keys of a recipe that say what goes in, what it is, or how it is run, and nothing about how documents are made
_NOT_MADE_BY = {"about", "wants", "input", "run", "sources"}


def citation(recipe: Recipe) -> dict[str, Any] | None:
    """`about:` of the recipe with `changed`: the keys that differ from the ready recipe of this name and version, None
    where Tokenmill has no such recipe to compare with. None for a recipe that says nothing about itself.

    Files the recipe wants from the command are no change, nor are the inputs, datasets that are left out (`until`) and
    how it is run (but for `run.signals`, which decides what is stored).
    """
    if recipe.about is None:
        return None
    return {**recipe.about.model_dump(mode="json"), "changed": _changed(recipe)}


def _changed(recipe: Recipe) -> list[str] | None:
    assert recipe.about is not None
    if recipe.about.name not in ready_recipes():
        return None
    ours = _named(recipe.plain())
    whole = parse_yaml((READY / f"{recipe.about.name}.yaml").read_text(encoding="utf-8"), recipe.about.name)[0]
    known = [name for name in whole["datasets"] if name in recipe.datasets]
    try:
        wanted = [f"{key}={json.dumps(value_at(ours, key), ensure_ascii=False)}" for key in whole.get("wants") or ()
                  if key.split(".")[1] in known]
        ready = load_recipe(recipe.about.name, [f"until={json.dumps(known)}", *wanted], inputs=["any"])
    except RecipeError:                                # what it wants is not where it stands in the ready one
        return None
    if ready.about != recipe.about:
        return None
    return sorted(set(_differences(_named(ready.plain()), ours)))


def _named(doc: dict[str, Any]) -> dict[str, Any]:
    """A recipe with its steps as `{name: settings}`, without what does not make documents."""
    out = {k: v for k, v in doc.items() if k not in _NOT_MADE_BY}
    out["run"] = {"signals": doc["run"]["signals"]}
    for dataset in out["datasets"].values():
        dataset["steps"] = [{step["name"]: step["config"]} for step in dataset["steps"]]
    out["readers"] = {name: [source["read"], source["config"]] for name, source in doc["sources"].items()}
    return out


def _differences(theirs: Any, ours: Any, path: KeyPath = ()) -> Iterator[str]:
    """Keys at which two plain values differ; a list of another length, or a step of another name, is one key."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for key in theirs.keys() | ours.keys():
            yield from _differences(theirs.get(key), ours.get(key), (*path, key))
    elif isinstance(theirs, list) and isinstance(ours, list) and len(theirs) == len(ours):
        for i, (a, b) in enumerate(zip(theirs, ours)):
            yield from _differences(a, b, (*path, i))
    elif theirs != ours:
        yield key_path(path)
