"""Finds which deduplications of a recipe make an index of the documents that they keep, and which indexes each one
reads (`against` of a step; `stages.dedup.index`)."""

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
    """A dataset of which indexes are to be made, although no other dataset reads them, and a function that takes
    them."""

    dataset: str
    take: Callable[[list[DedupIndex]], None]


class Indexes:
    """The indexes that the deduplications of a recipe make and read.

    `made` are the nodes of the plan that make an index: those that another deduplication reads, and those of the
    dataset `wanted`. `read` maps each node that could read indexes to the names of those that it reads, in order: other
    nodes, or folders; [] if it reads none."""

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
        """Return the nodes of the plan whose indexes the node `reader` reads."""
        return [node for node in self.read.get(reader, ()) if node in self.made]

    def folders(self, reader: str, step: str) -> list[Any]:
        """Return the contents of the indexes outside the store that a node reads. They decide about its tasks."""
        indexes = [self._folders[entry, step] for entry in self.read.get(reader, ()) if (entry, step) in self._folders]
        return [[ref["content"] for keys in index.keys.values() for ref in keys["files"]]
                + [ref["content"] for group in index.groups for ref in (group["documents"], group["texts"])]
                for index in indexes]

    def of(self, reader: str, step: str, results: Mapping[str, Any]) -> list[DedupIndex]:
        """Return the indexes that a node reads. `results` holds the results of the other nodes."""
        return [results[entry].index if entry in self.made else self._folders[entry, step]
                for entry in self.read.get(reader, ())]

    def wanted(self, dataset: str, results: Mapping[str, Any]) -> list[DedupIndex]:
        """Return the indexes of a dataset. If it has a step several times, the last one counts."""
        nodes = [node for node in self.read if node in self.made and node.startswith(f"{dataset}/")]
        return list({index.step: index for index in (results[node].index for node in nodes)}.values())

    @property
    def roots(self) -> set[str]:
        """Return the folders on object storage from which indexes are read."""
        return {folder for folder, _ in self._folders if "://" in folder}


def _node(passes: Mapping[str, list[PassPlan]], name: str, step: str) -> str:
    """Return the node of the last step `step` of the dataset `name`, or `name` if it is a folder."""
    if name not in passes:
        return name
    return next(plan.barrier for plan in reversed(passes[name]) if plan.barrier and plan.barrier_name == step)
