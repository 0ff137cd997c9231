"""Checks the setting `against` of the deduplications of a recipe. The setting lists older datasets, and folders with
deduplication indexes; the deduplication also removes documents that are already in one of these (`stages.dedup.index`).
"""

from __future__ import annotations

import os

from pipeline.recipe.errors import KeyPath, nearest
from pipeline.recipe.model import Dataset, Recipe, Step
from pipeline.recipe.problems import Checker
from pipeline.store.index_folder import NoIndex, overlap, read_index
from stages.catalog import stage_class
from stages.dedup.index import DedupIndex, IndexedBarrier, differing


def check_against(recipe: Recipe, checker: Checker) -> None:
    """Check every setting `against` of a recipe: the datasets and folders that it lists must exist and be comparable.
    Problems are added to `checker`. Paths of folders, which are relative to the recipe's folder, become absolute, in
    place."""
    for name, dataset in recipe.datasets.items():
        for number, step in enumerate(dataset.steps):
            if not issubclass(stage_class(step.name), IndexedBarrier):
                continue
            entries, indexes = step.config["against"], dict[str, DedupIndex]()
            for i, entry in enumerate(entries):
                at: KeyPath = ("datasets", name, "steps", number, step.name, "against", i)
                if entry in entries[:i]:
                    checker.fail(at, f"'{entry}' is named twice; remove one")
                elif entry in recipe.datasets:
                    _check_dataset(recipe, checker, name, step, entry, at)
                else:
                    entries[i] = _check_folder(recipe, checker, step, entry, indexes, at)


def _check_dataset(recipe: Recipe, checker: Checker, name: str, step: Step, old: str, at: KeyPath) -> None:
    """Check that the deduplication `step` of the dataset `name` can compare its documents with those of the dataset
    `old`. If not, add a problem at the key `at`. There are three cases:

    * `name` is made from `old`.
    * Both read the same source, and no `where:` selects documents of it.
    * `old` has no such step, or only one with other settings.
    """
    if old in _before(recipe, name):
        checker.fail(at, f"'{name}' is made from '{old}', whose documents it would be compared with; remove '{old}' "
                         f"here, or from `from:`")
        return
    shared = set(recipe.sources_of(name)) & set(recipe.sources_of(old))
    picks = any(recipe.datasets[one].where for one in (*_before(recipe, name), *_before(recipe, old)))
    if shared and not picks:
        checker.fail(at, f"'{name}' and '{old}' both read the source '{min(shared)}', whose documents would be "
                         f"compared with themselves; give each a source of its own")
        return
    steps = [earlier for earlier in recipe.datasets[old].steps if earlier.name == step.name]
    if not steps:
        checker.fail(at, f"'{old}' has no step '{step.name}', whose index could be read; add it to '{old}', or remove "
                         f"'{old}' here")
    elif other := differing(_barrier(steps[-1]).index_settings(), _barrier(step).index_settings()):
        checker.fail(at, f"the step '{step.name}' of '{old}' has {other}; give both steps the same settings")


def _check_folder(recipe: Recipe, checker: Checker, step: Step, entry: str, indexes: dict[str, DedupIndex],
                  at: KeyPath) -> str:
    """Check that the folder `entry` has a deduplication index that `step` can read. If it has none, add a problem at
    the key `at`. The index is added to `indexes`, which holds those of the earlier entries: two indexes must not hold
    the same documents. Returns the full path of the folder."""
    path = entry if "://" in entry else os.path.join(checker.base, os.path.expanduser(entry))
    if entry in recipe.sources:
        checker.fail(at, f"'{entry}' is a source; name a dataset that is made from it")
    elif "://" not in entry and not os.path.isdir(path):
        checker.fail(at, f"'{entry}' is neither a dataset nor a folder with an index ({path}): "
                         f"{nearest(entry, recipe.datasets)}")
    else:
        try:
            index = read_index(path, step.name)
            if other := differing(index.settings, _barrier(step).index_settings()):
                checker.fail(at, f"the index was made with {other}; give the step the same settings, or make the index "
                                 f"again with `tokenmill dedup index`")
            for before, earlier in indexes.items():
                if overlap(index, earlier):
                    checker.fail(at, f"'{entry}' holds documents that '{before}' holds, too; name one of the two")
            indexes[entry] = index
        except NoIndex as e:
            checker.fail(at, str(e))
    return path


def _barrier(step: Step) -> IndexedBarrier:
    barrier = stage_class(step.name)(dict(step.config))
    assert isinstance(barrier, IndexedBarrier)
    return barrier


def _before(recipe: Recipe, name: str) -> set[str]:
    """Return the dataset `name` and all datasets that it is made from."""
    dataset: Dataset | None = recipe.datasets.get(name)
    return {name, *(one for upstream in dataset.inputs for one in _before(recipe, upstream))} if dataset else set()
