"""Finds out where the labels of split shards (`shards.NAME.by`) come from."""

from __future__ import annotations

from typing import Any

from pipeline.recipe.errors import nearest
from pipeline.recipe.model import Recipe
from pipeline.recipe.problems import Checker
from stages.catalog import reader_class, stage_class


def label_sources(recipe: Recipe, name: str) -> list[dict[str, Any]]:
    """Return where the labels of a document are found, for the shards `name`, which are split by these labels. The
    result has the form that `pipeline.passes.labels.ShardLabels` takes; it is [] if the shards are not split.

    The label `bucket` means the signal of the shards' datasets whose name ends in `_bucket`. Raises ValueError if there
    is not exactly one such signal. Also raises it for a label `signal.NAME` if no step or source of these datasets
    writes the signal.
    """
    written = signals_written(recipe, recipe.shards[name].inputs)
    sources: list[dict[str, Any]] = []
    for item in recipe.shards[name].by or ():
        label = item if isinstance(item, str) else next(iter(item))
        kind, _, key = label.partition(".")
        if kind == "bucket":
            buckets = sorted(signal for signal in written if signal.endswith("_bucket"))
            if len(buckets) != 1:
                raise ValueError(f"`bucket` must be one signal, and {'none' if not buckets else ', '.join(buckets)} "
                                 f"can be meant; " + ("write which one: signal." + buckets[0] if buckets else
                                 "add the step `buckets` to a dataset, or name another label"))
            kind, key = "signal", buckets[0]
        if kind == "signal":
            if key not in written:
                raise ValueError(f"no step before writes a signal '{key}': {nearest(key, written)}")
            sources.append({"signal": key, **({} if isinstance(item, str) else {"edges": item[label]})})
        else:
            sources.append({"meta": key} if kind == "meta" else {"column": kind})
    return sources


def signals_written(recipe: Recipe, inputs: list[str]) -> set[str]:
    """Return the signals (numbers stored beside a text) that documents of these sources and datasets may have."""
    signals: set[str] = set()
    for name in inputs:
        if name in recipe.sources:
            source = recipe.sources[name]
            signals |= set(reader_class(source.read)(source.config).signals)
        else:
            dataset = recipe.datasets[name]
            signals |= signals_written(recipe, dataset.inputs)
            for step in dataset.steps:
                signals |= set(stage_class(step.name)(dict(step.config)).signals)
    return signals


def check_splits(recipe: Recipe, checker: Checker) -> None:
    """Check the labels by which shards are split. Add problems for other shards whose name may be that of one of their
    streams, and for `min_tokens` of shards that are not split."""
    for name, shards in recipe.shards.items():
        if shards.min_tokens is not None and shards.by is None:
            checker.fail(("shards", name, "min_tokens"), "only split shards have labels with few tokens; add `by:`, or "
                                                         "remove this key")
        if shards.by is None:
            continue
        if len(set(shards.labels)) < len(shards.labels):
            checker.fail(("shards", name, "by"), "a label is named twice; remove one")
        for other in recipe.shards:
            if other.startswith(f"{name}."):
                checker.fail(("shards", other), f"'{other}' may be the name of a stream of '{name}', which is split; "
                                                f"give these shards another name")
        try:
            label_sources(recipe, name)
        except ValueError as e:
            checker.fail(("shards", name, "by"), str(e))
