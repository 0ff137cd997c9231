"""The plan of a simulated run: tasks that read rows, and tasks that read what the first ones wrote."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.engine.task import TaskSpec
from pipeline.plan.nodes import Node, Work
from pipeline.store.records import PartRecord

ROWS = 6
STAGE = "stage"                      # key of the stage that quarantines
FILE = "kept"


def digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def data_of(key: str, rows: Iterable[int]) -> bytes:
    """Return what the task `key` writes for these rows. It depends on nothing else."""
    rows = sorted(rows)
    return json.dumps([key, rows]).encode() + b"." * (7 * len(rows))


@dataclass(frozen=True)
class Plan:
    """The plan. `first` has, for each task of the first node, the rows that crash. `second` has, for each task of the
    second node, which of those tasks it reads. `failing` is a task that fails for a while whatever is done, and how."""

    first: tuple[frozenset[int], ...]
    second: tuple[tuple[int, ...], ...]
    failing: tuple[str, str] = ("", "")

    @staticmethod
    def of(seed: int, tasks: int) -> Plan:
        rng = random.Random(f"{seed} plan")
        second = max(1, tasks // 4) if tasks > 1 else 0
        first = tasks - second
        crashes = [frozenset({rng.randrange(ROWS)} if rng.random() < .2 else ()) for _ in range(first)]
        reads = [tuple(sorted(rng.sample(range(first), min(first, rng.randint(1, 3))))) for _ in range(second)]
        failing = "", ""
        if rng.random() < .2:
            number = rng.randrange(first)
            failing = f"first/{number}", rng.choice(("exception", "same", "environment"))
            crashes[number] |= {rng.randrange(ROWS)}
        return Plan(tuple(crashes), tuple(reads), failing)

    @property
    def size(self) -> int:
        return len(self.first) + len(self.second)

    @property
    def keys(self) -> list[str]:
        """The keys of the tasks of the first node. The keys of the second depend on what these write."""
        return [digest(f"first/{i}")[:32] for i in range(len(self.first))]

    def crashing(self, label: str) -> frozenset[int]:
        """Return the rows that kill the child in the task with this label."""
        node, number = label.split("/")
        return self.first[int(number)] if node == "first" else frozenset()

    def nodes(self, quarantined: Mapping[str, Mapping[str, Any]]) -> list[Node]:
        """Return the nodes of the plan. `quarantined` has the entries of the log about quarantined documents, by
        document id."""
        def rows(_: Mapping[str, Any]) -> Work:
            specs = []
            for i in range(len(self.first)):
                label = f"first/{i}"
                skip = [row for row in range(ROWS) if f"{label}/{row}" in quarantined]
                specs.append(TaskSpec(digest(label)[:32], "sim:Rows", "first", {"skip": skip}, label=label,
                                      weight=1 + i % 3, order=i))
            return (yield specs)

        def sums(results: Mapping[str, Any]) -> Work:
            before: list[PartRecord] = list(results["first"])
            specs = []
            for i, reads in enumerate(self.second):
                label, refs = f"second/{i}", [before[n].files[FILE].ref() for n in reads]
                key = digest([label, [ref["content"] for ref in refs]])[:32]
                specs.append(TaskSpec(key, "sim:Sums", "second", {"inputs": refs}, label=label, order=i))
            return (yield specs)

        return [Node("first", "pass", (), rows, inputs=lambda: self.keys),
                Node("second", "pass", ("first",), sums, inputs=lambda: self.second)]
