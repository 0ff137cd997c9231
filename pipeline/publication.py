"""Publishes what the nodes of a run have finished: datasets, documents in quarantine, the tokenizer, shards (token
files) and the curriculum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from pipeline.engine.driver.sums import NodeSums
from pipeline.passes.fit_tokenizer import publish_tokenizer
from pipeline.passes.pack import publish_packed
from pipeline.passes.publish_shards import publish_shards
from pipeline.passes.streams import hide_stale, note_streams
from pipeline.plan.fresh import our_code
from pipeline.plan.indexes import WantedIndex
from pipeline.plan.nodes import Node
from pipeline.plan.planner import Planner
from pipeline.plan.tokens import TOKENIZER, StreamResult
from pipeline.recipe.model import Recipe
from pipeline.store.dataset import PassParts, is_published, publish, publish_quarantine, stream_quarantine
from pipeline.store.fs import Store
from pipeline.store.log import Log
from tokenizer.mixture.apportion import CurriculumError
from tokenizer.mixture.resolve import resolve


@dataclass(frozen=True)
class NamedRecipe:
    """A recipe and the name of its run. If several recipes run together (`run_recipes`), `suffix` is appended to the
    names under which the datasets and shards of this recipe are published. `shared` names nodes of the plan that the
    first of the recipes has, too: this recipe does not run them, but uses their results.

    `index` names a dataset whose deduplications also make indexes (`stages.dedup.index`).
    """

    run: str
    recipe: Recipe
    suffix: str = ""
    shared: frozenset[str] = frozenset()
    index: WantedIndex | None = None


def publish_dataset(store: Store, log: Log, name: str, passes: list[Node], results: Mapping[str, Any],
                    sums: Mapping[str, NodeSums]) -> None:
    """Publish a finished dataset under `name`: the kept rows of the last of its `passes` (scans over the documents),
    and the rows that any of them dropped or quarantined. Does nothing when this version of the code has published the
    same rows already."""
    # another version of the code may lay out a folder differently
    state = [our_code(), *(sums[node.name].results for node in passes)]
    if not is_published(store, name, state):
        log.flush()
        parts = [node.parts or PassParts(results[node.name].records, node.publishes) for node in passes]
        publish(store, name, parts, log.check_lease, state)
    for node in passes:
        node.parts = None


def publish_failed(store: Store, log: Log, planner: Planner, node: Node, results: Mapping[str, Any],
                   suffix: str) -> None:
    """Publish the records and documents that the passes (scans over the documents) of a dataset have quarantined so
    far. This is called before an error is raised whose message names the published folder."""
    log.flush()
    passes = [results[p.name].records for p in planner.passes[node.dataset] if p.name in results]
    publish_quarantine(store, node.dataset + suffix, chain.from_iterable(passes), log.check_lease)


def publish_lost(store: Store, log: Log, name: str, result: StreamResult) -> None:
    """Publish the documents that could not be encoded into tokens for the stream `name`, with the reasons, in the
    folder quarantine/ of the stream."""
    log.flush()
    publish_quarantine(store, stream_quarantine(name), result.encoded, log.check_lease)


def publish_tokens(one: NamedRecipe, store: Store, log: Log, results: Mapping[str, Any], warnings: list[str],
                   first_sets: Mapping[str, Any]) -> dict[str, Any]:
    """Publish the tokenizer, the shards (token files) and the curriculum of a run. Notes about the curriculum are added
    to `warnings`. Returns {stream: description of its shard sets} as `publish_shards` makes it; {} when the recipe has
    no tokenizer.

    If several recipes run together, `first_sets` is what this function returned for the first of them. The descriptions
    of streams that this recipe shares with the first one are taken from `first_sets`.
    """
    if TOKENIZER not in results:
        return {}
    recipe, tokenizer = one.recipe, results[TOKENIZER]
    publish_tokenizer(store, tokenizer)
    sets = {stream: info for stream, info in first_sets.items() if f"shards:{stream}" in one.shared}
    for shards, config in recipe.shards.items():
        result: StreamResult = results[f"shards:{shards}"]
        log.check_lease()
        published = {f"{stream}{one.suffix}": assembled for stream, assembled in result.assembled.items()}
        note_streams(store, shards + one.suffix, published)
        for stream, assembled in result.assembled.items():
            sets[stream] = publish_shards(store, stream + one.suffix, assembled, result.parts, tokenizer,
                                          check_lease=log.check_lease, source=result.source)
            sets[stream]["train"] |= publish_packed(store, sets[stream]["train"], config.longest,
                                                    result.packed.get(stream, []), check_lease=log.check_lease)
        log.check_lease()
        hide_stale(store, shards + one.suffix, published)
    if sets and recipe.curriculum is not None:
        try:
            curriculum, notes = resolve(recipe.plain(), sets, tokenizer)
        except CurriculumError as error:                 # name the run: several recipes may run together
            if not one.suffix:
                raise
            raise CurriculumError(f"{one.run}: {error}") from None
        warnings += [note for note in notes if note not in warnings]      # the check of the recipe has some already
        log.check_lease()
        store.write(f"runs/{one.run}/curriculum.json", curriculum.dumps().encode())
    return sets
