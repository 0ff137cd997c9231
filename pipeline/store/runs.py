"""Writes and reads the list of a run's tasks: runs/RUN/tasks.parquet in the store, with one row per task in the order
of the plan.

A row holds the task's key and the name of its plan node (a pass over a dataset, a deduplication, the shards of a stream
…). There may be millions of tasks. So they are not in plan.json, which describes the nodes, but in this file, which is
read a few thousand rows at a time.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.base.parquet import parquet_writer
from pipeline.base.scratch import Scratch
from pipeline.store.fs import Store

SCHEMA = pa.schema([("node", pa.dictionary(pa.int32(), pa.string())), ("key", pa.binary(16))])
ROWS = 1 << 14


def write_tasks(store: Store, run: str, nodes: Iterable[tuple[str, Iterable[str]]]) -> None:
    """Write the list of tasks of a run to runs/RUN/tasks.parquet. `nodes` yields, in the order of the plan, (name of a
    plan node, keys of its tasks). A plan node is a group of tasks, such as a pass over a dataset. Memory does not grow
    with the number of tasks, because the list is first written to a temporary file of 16 bytes per task."""
    with Scratch() as scratch:
        local = os.path.join(scratch.path, "tasks.parquet")
        with parquet_writer(local, SCHEMA) as writer:
            for name, keys in nodes:
                for chunk in _chunks(keys):
                    names = pa.DictionaryArray.from_arrays(pa.array([0] * len(chunk), pa.int32()), [name])
                    writer.write_table(pa.table([names, pa.array([bytes.fromhex(k) for k in chunk], pa.binary(16))],
                                                schema=SCHEMA))
        store.replace(local, f"runs/{run}/tasks.parquet")


def _chunks(keys: Iterable[str]) -> Iterator[list[str]]:
    chunk: list[str] = []
    for key in keys:
        chunk.append(key)
        if len(chunk) == ROWS:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


class RunTasks:
    """Reads the keys (hashes that identify tasks) of a run's tasks from the file that `write_tasks` wrote."""

    def __init__(self, store: Store, run: str) -> None:
        self._store, self._path = store, f"runs/{run}/tasks.parquet"

    def keys(self, node: str) -> Iterator[str]:
        """Yield the keys of the tasks of one plan node (such as a pass over a dataset), in the order of the plan. A
        task that the node asked for twice occurs twice."""
        with self._store.parquet(self._path) as file:
            for group in range(file.num_row_groups):  # iterating over all groups at once would buffer them all
                names = file.metadata.row_group(group).column(0).statistics
                if names is not None and names.has_min_max and not names.min <= node <= names.max:
                    continue                          # hundreds of nodes would each read the keys of all
                tasks = file.read_row_group(group, use_threads=False)
                of_node = tasks.filter(pc.equal(tasks.column("node").cast(pa.string()), node))
                yield from (key.hex() for key in of_node.column("key").to_pylist())

    def all(self) -> Iterator[str]:
        """Yield the keys of all tasks of the run, in the order of the plan."""
        with self._store.parquet(self._path) as file:
            for group in range(file.num_row_groups):
                keys = file.read_row_group(group, ["key"], use_threads=False)["key"]
                yield from (key.hex() for key in keys.to_pylist())
