"""Joins each node of plan.json (a pass, a deduplication, the shards of a token stream …) with the commit records of its
tasks. The sections of the report are made from these nodes.

The report reads the files that the run's own records name. It does not read the published folders, because a later run
may have replaced their files. Published parts (files of documents) are the same files under other names
(`store.dataset.publish`), so every figure can be checked by a query over the published parts.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pyarrow as pa

from pipeline.engine.driver.sums import NodeSums, sum_records
from pipeline.store.fs import Store
from pipeline.store.records import FileInfo, PartRecord


class NodeFigures:
    """A node of the plan (a pass, a deduplication …) with the records of its tasks and the sums of their counters. The
    counters of a pass (a group of steps that run together) are added up over all tasks. The counters of other nodes are
    added up by wave (a group of tasks of one kind), because the tasks of different waves count different things."""

    def __init__(self, doc: dict[str, Any], records: Callable[[], Iterator[PartRecord]], sums: NodeSums | None = None,
                 choose: Callable[[int], list[PartRecord]] | None = None) -> None:
        """Make a node from its description `doc` in plan.json. `records()` iterates over the commit records of the
        node's tasks in plan order. It is called each time they are needed, because millions of records may not fit into
        memory. Without `sums`, the counters of all records are added up by this method. `choose(n)` returns the records
        of the n tasks with the smallest keys, without reading other records."""
        self.name, self.kind, self.dataset = doc["name"], doc["kind"], doc["dataset"]
        self.steps, self.deps, self.publishes = doc["steps"], doc["deps"], doc["publishes"]
        self.against = doc.get("against", [])    # barriers and folders with whose indexes the documents were compared
        self.measures: list[dict[str, Any]] = doc.get("measures", [])        # signals and bounds of its stages
        self.records = records
        self.choose = cache(choose or (lambda n: heapq.nsmallest(n, records(), key=lambda record: record.key)))
        sums = sums or sum_records(self.name, self.kind, records())
        self.counters, self.content = sums.counters, sums.content
        self.writes = sums.writes                      # names of the files its tasks wrote
        self.tasks, self.bytes = sums.tasks, sums.bytes
        self.cpu_s, self.wall_s, self.max_rss_mb = sums.cpu_s, sums.wall_s, sums.max_rss_mb

    def files(self, name: str) -> Iterator[FileInfo]:
        """Yield the files with this name that the node's tasks wrote, in plan order. Files without rows are left
        out."""
        return (r.files[name] for r in self.records() if name in r.files and r.files[name].rows)

    def lineage(self) -> dict[str, Any]:
        """Return the inputs, the costs and an output hash of this node of the plan, for the section `lineage` of the
        report. The hash is made from the sorted `content` hashes of the output files, so it does not depend on their
        order. If the node is a pass over documents, only the files with the kept documents (or with the numbers of
        their rows) count."""
        return {"name": self.name, "kind": self.kind, "deps": self.deps, "steps": self.steps, "tasks": self.tasks,
                "bytes": self.bytes, "cpu_s": round(self.cpu_s, 2), "content": self.content}


def batches(store: Store, info: FileInfo, columns: list[str], rows: int = 1 << 14) -> Iterator[pa.RecordBatch]:
    """Yield the columns `columns` of a Parquet file, in batches of up to `rows` rows. `columns` may name fields of a
    struct ('signals.pii_ips')."""
    with store.parquet(info.path, info.sha256) as file:
        yield from file.iter_batches(batch_size=rows, columns=columns, use_threads=False)


def take(store: Store, info: FileInfo, rows: list[int], columns: list[str]) -> dict[int, dict[str, Any]]:
    """Read single rows of a part (file of documents). Returns {row number: {column: value}}. Only the row groups that
    hold these rows are read, one at a time (a few MB of text each)."""
    out: dict[int, dict[str, Any]] = {}
    with store.parquet(info.path, info.sha256) as parquet:
        first = 0
        for group in range(parquet.metadata.num_row_groups):
            stop = first + parquet.metadata.row_group(group).num_rows
            in_group = sorted(r for r in rows if first <= r < stop)
            if in_group:
                table = parquet.read_row_group(group, columns=columns, use_threads=False)
                out.update(zip(in_group, table.take([r - first for r in in_group]).to_pylist()))
            first = stop
    return out
