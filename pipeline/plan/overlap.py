"""Refuses a dataset that would hold the same documents twice, because two of its inputs are made from the same
source."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.plan.inputs import InputError
from pipeline.recipe.model import Recipe
from stages.filter.where import Where


def check_overlaps(recipe: Recipe) -> None:
    """Raise InputError for a dataset that has two inputs made from the same source. Two such inputs are allowed if they
    select different documents. An input selects documents by its `where:`, and by `where` steps before all its other
    steps."""
    for name, dataset in recipe.datasets.items():
        for i, one in enumerate(dataset.inputs):
            for other in dataset.inputs[:i]:
                shared = _sources_of(recipe, one) & _sources_of(recipe, other)
                if shared and not _apart(recipe, one, other):
                    raise InputError(
                        f"dataset '{name}': '{other}' and '{one}' both hold documents of '{sorted(shared)[0]}', "
                        f"which would be in it twice; take one out of `from:`, or pick documents with `where:`")


def _apart(recipe: Recipe, one: str, other: str) -> bool:
    """Whether no document can be selected by both inputs. An input selects documents by its `where:`, and by `where`
    steps that come before all its other steps.

    Two different datasets made from one source may hold different values (language, signals) for the same document. For
    inputs that read such datasets, only selections by source are considered.
    """
    pairs = [(a, b) for a in _selections(recipe, one) for b in _selections(recipe, other)]
    if any(a != b and _sources_of(recipe, a) & _sources_of(recipe, b)
           for a in _inputs(recipe, one) for b in _inputs(recipe, other)):
        return any(a.source and b.source and set(a.source).isdisjoint(b.source) for a, b in pairs)
    return any(Where.disjoint_configs(a, b) for a, b in pairs)


def _inputs(recipe: Recipe, name: str) -> list[str]:
    return recipe.datasets[name].inputs if name in recipe.datasets else [name]


def _selections(recipe: Recipe, name: str) -> Iterator[Where.Config]:
    dataset = recipe.datasets.get(name)
    if dataset is not None and dataset.where:
        yield Where.Config.model_validate(dataset.where)
    for step in dataset.steps if dataset is not None else ():
        if step.name != "where":
            return
        yield Where.Config.model_validate(step.config)


def _sources_of(recipe: Recipe, name: str) -> set[str]:
    return {name} if name in recipe.sources else set(recipe.sources_of(name))
