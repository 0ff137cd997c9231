"""Joins a node of plan.json with the records of its tasks. Every section of the report is collected from such nodes.

The report reads the files that the run's own records name, not the published folders, which may by now belong to
another run. Published parts are the same files under other names (`store.dataset.publish`), so a query over them can
check every figure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa

from pipeline.engine.driver.sums import NodeSums, sum_records
from pipeline.store.fs import Store
from pipeline.store.records import FileInfo, PartRecord


class Node:
    """A node of the plan with its records and the sums of their counters. A pass has one sum. Other nodes have one per
    wave, because each wave counts other things."""

    def __init__(self, doc: dict[str, Any], records: Callable[[], Iterator[PartRecord]],
                 sums: NodeSums | None = None) -> None:
        """`records()` iterates over the node's records in plan order. It is called repeatedly, because there may be
        millions of records and none is kept in memory. Without `sums`, the counters are added up here."""
        self.name, self.kind, self.dataset = doc["name"], doc["kind"], doc["dataset"]
        self.steps, self.deps, self.publishes = doc["steps"], doc["deps"], doc["publishes"]
        self.records = records
        sums = sums or sum_records(self.name, self.kind, records())
        self.counters, self.content = sums.counters, sums.content
        self.writes = sums.writes                      # names of the files its tasks wrote
        self.tasks, self.bytes = sums.tasks, sums.bytes
        self.cpu_s, self.wall_s, self.max_rss_mb = sums.cpu_s, sums.wall_s, sums.max_rss_mb

    def files(self, name: str) -> Iterator[FileInfo]:
        """The files of this name, with rows, that the node's tasks wrote, in plan order."""
        return (r.files[name] for r in self.records() if name in r.files and r.files[name].rows)

    def lineage(self) -> dict[str, Any]:
        """Returns the node's inputs and a hash of its output. The hash covers the sorted `content` hashes of its kept
        parts or row sets, and for nodes other than passes those of all files. The order of the parts therefore does not
        matter."""
        return {"name": self.name, "kind": self.kind, "deps": self.deps, "steps": self.steps, "tasks": self.tasks,
                "bytes": self.bytes, "cpu_s": round(self.cpu_s, 2), "content": self.content}


def batches(store: Store, info: FileInfo, columns: list[str], rows: int = 1 << 14) -> Iterator[pa.RecordBatch]:
    """Reads some columns of a Parquet file, a batch at a time. `columns` may name fields of a struct
    ('signals.pii_ips')."""
    with store.parquet(info.path, info.sha256) as file:
        yield from file.iter_batches(batch_size=rows, columns=columns, use_threads=False)


def take(store: Store, info: FileInfo, rows: list[int], columns: list[str]) -> dict[int, dict[str, Any]]:
    """Reads single rows of a part, by row number. Only their row groups are read, one at a time (a few MB of text
    each)."""
    out: dict[int, dict[str, Any]] = {}
    with store.parquet(info.path, info.sha256) as parquet:
        first = 0
        for group in range(parquet.metadata.num_row_groups):
            stop = first + parquet.metadata.row_group(group).num_rows
            wanted = sorted(r for r in rows if first <= r < stop)
            if wanted:
                table = parquet.read_row_group(group, columns=columns, use_threads=False)
                out.update(zip(wanted, table.take([r - first for r in wanted]).to_pylist()))
            first = stop
    return out
