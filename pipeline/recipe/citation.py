"""Computes the citation of a corpus. It names the ready recipe (one that comes with Tokenmill) by which the corpus was
made, the version of that recipe, and the keys that were changed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pipeline.recipe.errors import KeyPath, RecipeError, key_path
from pipeline.recipe.load import READY, load_recipe, ready_recipes, value_at
from pipeline.recipe.marks import parse_yaml
from pipeline.recipe.model import Recipe

#: keys of a recipe that do not affect how documents are made: inputs, descriptions, and how the recipe runs. The
#: readers of `sources` and `run.signals` do, and `_named` puts them back
_NOT_MADE_BY = {"about", "wants", "input", "run", "sources"}


def citation(recipe: Recipe) -> dict[str, Any] | None:
    """Return how to cite a corpus made with `recipe`: the fields of its `about:`, and `changed`. Returns None for a
    recipe without `about:`.

    `changed` lists the keys whose values differ from the ready recipe (one that comes with Tokenmill) with the same
    `about:`. It is None when there is no such ready recipe, or the two recipes cannot be compared. Some differences do
    not count as changes: files that the recipe asks for under `wants:`, inputs, datasets left out with `until=NAME`,
    and settings of `run:` (except `run.signals`, which decides what is stored).
    """
    if recipe.about is None:
        return None
    return {**recipe.about.model_dump(mode="json"), "changed": _changed(recipe)}


def _changed(recipe: Recipe) -> list[str] | None:
    assert recipe.about is not None
    if recipe.about.name not in ready_recipes():
        return None
    own = _named(recipe.plain())
    document = parse_yaml((READY / f"{recipe.about.name}.yaml").read_text(encoding="utf-8"), recipe.about.name)[0]
    datasets = [name for name in document["datasets"] if name in recipe.datasets]
    try:
        overrides = [f"{key}={json.dumps(value_at(own, key), ensure_ascii=False)}"
                     for key in document.get("wants") or ()
                     if key.split(".")[1] in datasets]
        ready = load_recipe(recipe.about.name, [f"until={json.dumps(datasets)}", *overrides], inputs=["any"])
    except RecipeError:                                # the recipe lacks keys that the ready one lists under `wants:`
        return None
    if ready.about != recipe.about:
        return None
    return sorted(set(_differences(_named(ready.plain()), own)))


def _named(doc: dict[str, Any]) -> dict[str, Any]:
    """Return the recipe `doc` as plain values for a comparison. Steps become `{name: settings}`, and sources become
    their readers with settings. The keys in _NOT_MADE_BY are left out, because differences in them do not count as
    changes."""
    out = {k: v for k, v in doc.items() if k not in _NOT_MADE_BY}
    out["run"] = {"signals": doc["run"]["signals"]}
    for dataset in out["datasets"].values():
        dataset["steps"] = [{step["name"]: step["config"]} for step in dataset["steps"]]
    out["readers"] = {name: [source["read"], source["config"]] for name, source in doc["sources"].items()}
    return out


def _differences(other: Any, own: Any, path: KeyPath = ()) -> Iterator[str]:
    """Yield the keys at which the plain values `other` and `own` differ. Lists of different lengths count as one
    difference. Where two steps at the same position have different names, both names are yielded."""
    if isinstance(other, dict) and isinstance(own, dict):
        for key in other.keys() | own.keys():
            yield from _differences(other.get(key), own.get(key), (*path, key))
    elif isinstance(other, list) and isinstance(own, list) and len(other) == len(own):
        for i, (a, b) in enumerate(zip(other, own)):
            yield from _differences(a, b, (*path, i))
    elif other != own:
        yield key_path(path)
