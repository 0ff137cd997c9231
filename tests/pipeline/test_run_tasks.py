"""The list of the tasks of a run: each node's keys are returned in order, whichever row groups hold them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pyarrow as pa

from pipeline.base.parquet import parquet_writer
from pipeline.store.fs import Store
from pipeline.store.runs import SCHEMA, RunTasks, write_tasks

#: names whose order by code point differs from that of most languages, and one that is the beginning of others
NAMES = ["pass:web", "pass:web-2", "pass:wéb", "pass:網", "pass:\U0001f600", "barrier", "read", "z", "Z", "tokens"]


def keys(node: str, n: int) -> list[str]:
    """Return `n` keys of a node, and the first of them once more."""
    some = [hashlib.sha256(f"{node}/{i}".encode()).hexdigest()[:32] for i in range(n)]
    return [*some, some[0]]


def test_each_node_reads_back_the_keys_written_for_it(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    written = {name: keys(name, 1 + 7 * place) for place, name in enumerate(NAMES)}
    write_tasks(store, "r", written.items())
    tasks = RunTasks(store, "r")
    assert {name: list(tasks.keys(name)) for name in NAMES} == written
    assert list(tasks.keys("pass")) == []
    assert list(tasks.all()) == [key for some in written.values() for key in some]


def test_a_row_group_of_several_nodes_gives_each_its_own_keys(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    (tmp_path / "runs/r").mkdir(parents=True)
    rows = [(name, key) for turn in range(3) for name in NAMES for key in keys(f"{name}/{turn}", 2)]
    names = pa.array([name for name, _ in rows]).dictionary_encode()
    with parquet_writer(str(tmp_path / "runs/r/tasks.parquet"), SCHEMA) as writer:
        writer.write_table(pa.table([names, pa.array([bytes.fromhex(key) for _, key in rows], pa.binary(16))],
                                    schema=SCHEMA))
    tasks = RunTasks(store, "r")
    for name in NAMES:
        assert list(tasks.keys(name)) == [key for node, key in rows if node == name]
