"""Removing what no run names: records, with their files, of recipes that were changed and of runs that were deleted.

A finished run names its tasks in `runs/RUN/tasks.parquet`. If a run has not finished, or its list is gone, all that its
drivers committed is kept. A record that no run names is retired in the log before its files go, so that no later run
takes it for done; a later run that needs it makes the same result again. Published folders have links or copies of
their own and stay.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from pipeline.store.fs import Store
from pipeline.store.log import Log
from pipeline.store.runs import RunTasks
from pipeline.store.temp import scratch_database
from pipeline.store.view import LogView


@dataclass(frozen=True)
class Unnamed:
    """Records that no run names: how many, and the files and bytes they have in `objects/`."""

    records: int
    files: int
    bytes: int


def unnamed(store: Store, log: LogView) -> tuple[Unnamed, list[tuple[str, str]]]:
    """What could go, and the (key, attempt) of each. Memory: those pairs."""
    named = scratch_database()
    named.execute("CREATE TABLE named (key TEXT PRIMARY KEY) WITHOUT ROWID")
    runs = {path.split("/")[1] for path in store.list("runs") if path.count("/") > 1}
    unfinished = set()
    for run in sorted(runs):
        listed = store.exists(f"runs/{run}/tasks.parquet")
        if listed:
            named.executemany("INSERT OR IGNORE INTO named VALUES (?)", ((key,) for key in RunTasks(store, run).all()))
        if not (listed and _done(store, run)):
            unfinished.add(run)
    pairs, files, size = [], 0, 0
    for record in log.records():
        of_run = log.runs.get(int(record.attempt[:8]))
        if of_run in unfinished or named.execute("SELECT 1 FROM named WHERE key = ?", (record.key,)).fetchone():
            continue
        pairs.append((record.key, record.attempt))
        files += len(record.files)
        size += sum(info.bytes for info in record.files.values())
    return Unnamed(len(pairs), files, size), pairs


def remove_unnamed(store: Store, log: Log) -> Unnamed:
    """Retire and remove what no run names. `log`: ours, so no run is under way."""
    what, pairs = unnamed(store, log)
    log.retire_unnamed(pairs)
    log.collect_garbage()
    return what


def _done(store: Store, run: str) -> bool:
    """Whether the latest attempt of a run finished. A run that was changed and then stopped lists the tasks of an
    earlier attempt only, while the log has others."""
    try:
        return bool(json.loads(store.read(f"runs/{run}/progress.json"))["state"] == "done")
    except (OSError, ValueError, KeyError, TypeError):
        return False
