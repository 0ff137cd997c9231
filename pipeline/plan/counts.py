"""Decides which barriers of a recipe count duplicates: which write the signal `dup_count` (`stages.dedup.counts`).

A barrier is a step that needs all documents at once, such as `exact`. One that can count (`dup_count` is among its
`signals`) does so if

  * something behind it reads the signal: a later step of its dataset, a step of a dataset that is made from this one,
    or shards that are split by the signal; or
  * a barrier before it counts, because its documents carry the signal, which would otherwise become wrong.

A barrier of another kind, such as `repeats`, that stands behind one that counts hands the counts on.

The keys of all tasks of a recipe that reads the signal nowhere are those that they would be without this module.
"""

from __future__ import annotations

from pipeline.recipe.model import Recipe
from stages.barrier import COUNT, Barrier
from stages.catalog import stage_class


def counting_steps(recipe: Recipe) -> set[tuple[str, int]]:
    """Return the barriers that count duplicates or hand counts on, as (dataset, number of the step)."""
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
