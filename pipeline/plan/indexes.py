"""Finds which deduplications of a recipe make an index, and which indexes each deduplication reads. An index holds
hashes and texts of the documents that a deduplication keeps. Another deduplication reads it to compare its documents
with these older ones (`against` of a step; `stages.dedup.index`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.plan.pass_plans import PassPlan
from pipeline.store.index_folder import read_index
from stages.barrier import Barrier
from stages.dedup.index import DedupIndex, IndexedBarrier


@dataclass(frozen=True)
class WantedIndex:
    """A request for the deduplication indexes of `dataset`, which are to be made although no other dataset reads them.
    `take` is called with the finished indexes."""

    dataset: str
    take: Callable[[list[DedupIndex]], None]


class Indexes:
    """The deduplication indexes (hashes and texts of kept documents) that the deduplications of a recipe make and read.

    `made` holds the nodes of the plan that make an index: those whose index another deduplication reads, and those of
    the dataset `wanted`. `read` maps each deduplication node to the places of the indexes that it reads, in order. A
    place is another node of the plan, or a folder with an index that was made before."""

    def __init__(self, passes: Mapping[str, list[PassPlan]],
                 barriers: Mapping[str, tuple[str, Barrier, list[str], list[str]]], wanted: str = "") -> None:
        self._folders: dict[tuple[str, str], DedupIndex] = {}
        self.read: dict[str, list[str]] = {}
        self.made: set[str] = set()
        for name, plans in passes.items():
            for plan in plans:
                barrier = barriers[plan.barrier][1] if plan.barrier else None
                if plan.barrier is None or not isinstance(barrier, IndexedBarrier):
                    continue
                if name == wanted and not barrier.no_index:
                    self.made.add(plan.barrier)
                self.read[plan.barrier] = [_node(passes, entry, plan.barrier_name) for entry in barrier.config.against]
        self.made.update(node for nodes in self.read.values() for node in nodes if node in barriers)
        for node, entries in self.read.items():
            for entry in entries:
                if entry not in barriers:
                    step = barriers[node][1].name
                    self._folders[entry, step] = read_index(entry, step)

    def nodes(self, reader: str) -> list[str]:
        """Return those nodes of the plan whose deduplication indexes the node `reader` reads. Indexes in folders are
        not included."""
        return [node for node in self.read.get(reader, ()) if node in self.made]

    def folders(self, reader: str, step: str) -> list[Any]:
        """Return, for each index outside the store that the node `reader` reads, the hashes of its files. These hashes
        enter the keys of the node's tasks. `step` is the name of the node's deduplication."""
        indexes = [self._folders[entry, step] for entry in self.read.get(reader, ()) if (entry, step) in self._folders]
        return [[ref["content"] for keys in index.keys.values() for ref in keys["files"]]
                + [ref["content"] for group in index.groups for ref in (group["documents"], group["texts"])]
                for index in indexes]

    def of(self, reader: str, step: str, results: Mapping[str, Any]) -> list[DedupIndex]:
        """Return the deduplication indexes that the node `reader` reads, in order. `step` is the name of its
        deduplication, and `results` holds the results of the nodes that make indexes."""
        return [results[entry].index if entry in self.made else self._folders[entry, step]
                for entry in self.read.get(reader, ())]

    def wanted(self, dataset: str, results: Mapping[str, Any]) -> list[DedupIndex]:
        """Return the deduplication indexes of a dataset, one for each name of a step. If the dataset has several steps
        of one name, the index of the last one is returned. `results` holds the results of the nodes."""
        nodes = [node for node in self.read if node in self.made and node.startswith(f"{dataset}/")]
        return list({index.step: index for index in (results[node].index for node in nodes)}.values())

    @property
    def roots(self) -> set[str]:
        """Return the folders on object storage from which deduplication indexes are read."""
        return {folder for folder, _ in self._folders if "://" in folder}


def _node(passes: Mapping[str, list[PassPlan]], name: str, step: str) -> str:
    """Return the node of the plan for the last deduplication `step` of the dataset `name`. If no dataset has this name,
    it is the folder of an index and is returned unchanged."""
    if name not in passes:
        return name
    return next(plan.barrier for plan in reversed(passes[name]) if plan.barrier and plan.barrier_name == step)
