"""The elements of a plan: nodes, the stages of their passes, and the results that later nodes use."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.engine.driver.queue import TaskRecords
from pipeline.engine.task import TaskSpec
from pipeline.store.records import PartRecord
from pipeline.store.temp import Spilled
from stages.barrier import FileRef, PartRef, TaskResult
from stages.stage import Stage

#: a running node: it yields the specs of tasks and is sent their records
Work = Generator[Iterable[TaskSpec], TaskRecords, Any]

DOCUMENTS = "pipeline.passes.documents:DocumentPass"
INDEX = "pipeline.passes.index:Index"


@dataclass(frozen=True)
class ChainStep:
    """One stage of a pass: its name, its key, and how to make it."""

    name: str
    key: str
    replay_key: str                               # its key without thresholds
    target: str
    config: dict[str, Any]
    stage: Stage
    resources: dict[str, str] = field(default_factory=dict)    # field of the config → sha256, which a worker checks

    def arg(self) -> dict[str, Any]:
        return {"name": self.name, "key": self.key,
                "$volatile": {"target": self.target, "config": self.config, "resources": self.resources}}


@dataclass
class Node:
    """A step of the plan. `deps` are names of nodes whose results `work` needs."""

    name: str
    kind: str                                     # index | pass | barrier | tokenizer | shards
    deps: tuple[str, ...]
    work: Any                                     # (results: Mapping[str, Any]) -> Work
    dataset: str = ""
    steps: tuple[str, ...] = ()                   # as shown to people
    publishes: bool = False                       # the last pass of a dataset
    batches: list[TaskRecords] = field(default_factory=list)     # the records of its tasks, filled while it runs


@dataclass
class PassResult:
    """The result of a pass: its records in plan order. They name the parts that later nodes read."""

    records: TaskRecords
    dataset: str = ""

    def parts(self) -> Iterator[tuple[PartRecord, str]]:
        """The records, each with the source or dataset that its part was read from."""
        return zip(self.records, self.records.origins, strict=True)


class SplitIndex(Mapping[str, Any]):
    """Path of a big input file → its splits, read from the store on access."""

    def __init__(self, places: dict[str, tuple[str, str]], read: Callable[[str, str], bytes]) -> None:
        """`places`: (path in the store, sha256) by input file. `read`: `Store.read_checked`."""
        self._places, self._read = places, read

    def __getitem__(self, path: str) -> list[dict[str, int]]:
        return json.loads(self._read(*self._places[path]))

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


@dataclass
class BarrierResult:
    """The result of a barrier: for every part it read, the removal slice or None. Iteration raises ValueError when a
    slice is missing: its documents would be lost."""

    parts: Sequence[PartRef]
    slices: Sequence[FileRef | None]

    def __iter__(self) -> Iterator[tuple[PartRef, FileRef | None]]:
        return zip(self.parts, self.slices, strict=True)


def spilled_parts() -> Spilled[PartRef]:
    return Spilled(encode=vars, decode=lambda doc: PartRef(**doc))


def result(record: PartRecord) -> TaskResult:
    return TaskResult({name: info.ref() for name, info in record.files.items()}, record.counters)
