"""Checks how a recipe uses sources of token files of other projects (`read: tokens`)."""

from __future__ import annotations

from collections.abc import Iterable

from pipeline.recipe.errors import KeyPath
from pipeline.recipe.model import Recipe, Source
from pipeline.recipe.problems import Checker
from stages.catalog import reader_class


def token_sources(recipe: Recipe, names: Iterable[str]) -> list[str]:
    """Return those of `names` that are sources of token files."""
    return [name for name in names if name in recipe.sources and holds_tokens(recipe.sources[name])]


def holds_tokens(source: Source) -> bool:
    """Whether a source gives tokens instead of documents."""
    return reader_class(source.read)(source.config).holds_tokens


def check_token_files(recipe: Recipe, checker: Checker) -> None:
    """Check that sources of token files go into shards and into no dataset. Shards of token files must have no other
    inputs, and neither `where` nor `by`, which look at columns that only datasets have."""
    for dataset, config in recipe.datasets.items():
        for source in token_sources(recipe, config.inputs):
            path: KeyPath = ("datasets", dataset, "from", config.inputs.index(source))
            checker.fail(path, f"'{source}' holds tokens, and a dataset is made from texts; name it under `shards:`, "
                               f"or add `decode: true` to the source")
    for name, shards in recipe.shards.items():
        if not (tokens := token_sources(recipe, shards.inputs)):
            continue
        for i, source in enumerate(shards.inputs):
            path = ("shards", name, "from", i)
            if checker.check_name(source, {**recipe.sources, **recipe.datasets}, path, "source or dataset") \
                    and source not in tokens:
                checker.fail(path, f"'{source}' holds no tokens, unlike '{tokens[0]}'; make two entries of `shards:`")
            if source in shards.inputs[:i]:
                checker.fail(path, f"'{source}' is named twice; remove one")
        for key in ("where", "by"):
            if getattr(shards, key):
                checker.fail(("shards", name, key), f"documents of token files have no columns that `{key}` could look "
                                                    f"at; remove it, or add `decode: true` to the source and make a "
                                                    f"dataset from it")
