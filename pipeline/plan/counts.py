"""Decides which barriers of a recipe count duplicates, that is, write the signal `dup_count` (`stages.dedup.counts`).

A barrier is a step that needs all documents at once, such as `exact`. A barrier can count if `dup_count` is among its
`signals`. It does count in two cases:

  * Something after it reads the signal: a later step of its dataset, a step of a dataset that is made from this one, or
    shards that are split by the signal.
  * A barrier before it counts. The documents then already have the signal, and it would become wrong if this barrier
    removed duplicates without counting them.

If a barrier that cannot count, such as `repeats`, comes after one that counts, it hands the counts on unchanged.

In a recipe that reads the signal nowhere, no barrier counts, and nothing about counting enters the keys of its tasks.
"""

from __future__ import annotations

from pipeline.recipe.model import Recipe
from stages.barrier import COUNT, Barrier
from stages.catalog import stage_class


def counting_steps(recipe: Recipe) -> set[tuple[str, int]]:
    """Return the barriers (deduplications) that count duplicates, and those that hand on the counts of an earlier
    barrier, as (dataset, number of the step)."""
    counting: set[tuple[str, int]] = set()
    read = {name for shards in recipe.shards.values() if f"signal.{COUNT}" in shards.labels for name in shards.inputs}
    for name in reversed(recipe.dataset_order()):
        is_read = name in read
        for number, step in reversed(list(enumerate(recipe.datasets[name].steps))):
            stage = stage_class(step.name)(dict(step.config))
            if is_read and COUNT in stage.signals:
                counting.add((name, number))
            is_read = is_read or COUNT in stage.reads()
        if is_read:
            read.update(recipe.datasets[name].inputs)
    carried: set[str] = set()                            # datasets whose documents have the signal
    for name in recipe.dataset_order():
        has = any(upstream in carried for upstream in recipe.datasets[name].inputs)
        for number, step in enumerate(recipe.datasets[name].steps):
            if has and issubclass(stage_class(step.name), Barrier):
                counting.add((name, number))
            has = has or (name, number) in counting
        if has:
            carried.add(name)
    return counting
