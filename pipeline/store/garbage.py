"""Garbage collection: files that no record names, and records that no run names.

A record that no run names is one of a recipe that was changed or of a run that was deleted.

A finished run names its tasks in `runs/RUN/tasks.parquet`. If a run has not finished, or its list is gone, all that its
drivers committed is kept. A record that no run names is retired in the log before its files go, so that no later run
takes it for done; a later run that needs it makes the same result again. Published folders have links or copies of
their own and stay.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from pipeline.store.disk import leftovers
from pipeline.store.fs import Store
from pipeline.store.lists import FOLDER as LISTS
from pipeline.store.log import Log, heartbeat_name
from pipeline.store.runs import RunTasks
from pipeline.store.temp import scratch_database
from pipeline.store.view import LogView

VERIFY_EVERY = 1000      # files that are removed between two checks that this driver is not fenced


# -- files that no record names ---------------------------------------------------------------------------------------
class Swept(NamedTuple):
    """What `collect_garbage` did: files and emptied folders it removed, and the files of records that are gone or have
    another size than they should, with what is wrong with each."""

    files: int
    folders: int
    damaged: dict[str, str]


def collect_garbage(log: Log, verify_every: int = VERIFY_EVERY) -> Swept:
    """Remove three kinds of files: those of attempts of older epochs that no record names, lists of files for tasks
    (written again when they are wanted), and temporary files of writers that died. Retire records whose files are
    gone or have another size. Call it before tasks run: a folder it empties may be the one a task uploads into.

    It is safe at any time. An attempt of an older epoch that is not in the log never gets there, since its driver
    is fenced. Attempts of this epoch or a later one are not touched. A driver that is fenced removes nothing.
    Memory grows with the files that are removed, not with those that are there.
    """
    store = log.store
    log.flush()
    garbage, folders = [], []
    damaged: dict[str, str] = {}                          # path of a file → what is wrong with it
    seen = scratch_database()
    seen.execute("CREATE TABLE seen (key TEXT PRIMARY KEY) WITHOUT ROWID")
    for key, files in _objects(store):                    # objects/KEY/ATTEMPT.name
        record = log.get(key)
        named = {info.path: info.bytes for info in record.files.values()} if record else {}
        if record:
            seen.execute("INSERT OR IGNORE INTO seen VALUES (?)", (key,))
            damaged |= _differing(named, {f"objects/{key}/{file}": size for file, size in files.items()})
        old = []
        for file in files:
            whose = file.split("-")[0]
            if f"objects/{key}/{file}" not in named and (f"objects/{key}" == LISTS or (
                    len(whose) == 8 and whose.isdigit() and int(whose) < log.epoch)):
                old.append(f"objects/{key}/{file}")
        garbage += old
        if len(old) == len(files):
            folders.append(key)
    for record in log.records():
        if not seen.execute("SELECT 1 FROM seen WHERE key = ?", (record.key,)).fetchone():
            damaged |= _differing({info.path: info.bytes for info in record.files.values()}, {})
    beats = [path for path in store.list("log/heartbeat") if path < heartbeat_name(log.epoch)]
    if store.local is not None:
        garbage += leftovers(store.local, store.local / heartbeat_name(log.epoch))
    log.retire_files(damaged)

    def still_ours(names: Iterable[str]) -> Iterator[str]:
        # listing and removing take time: by now lists and folders may belong to the driver after this one
        for n, name in enumerate(names):
            if n % verify_every == 0:
                log.verify()
            yield name

    store.remove_all(still_ours([*garbage, *beats]))
    emptied = 0
    if store.local is not None:
        for key in still_ours(folders):
            with contextlib.suppress(OSError):            # in use
                os.rmdir(store.local / "objects" / key)
                emptied += 1
    return Swept(len(garbage), emptied, damaged)


def _objects(store: Store) -> Iterator[tuple[str, dict[str, int]]]:
    """Folders below objects/ with the names and sizes of their files, in any order on a disk: a sorted list of a
    million of them would be memory."""
    if store.local is None:
        pairs = ((*entry.path.removeprefix("objects/").partition("/")[::2], entry.size)
                 for entry in store.entries("objects"))
        for key, some in groupby(pairs, lambda pair: pair[0]):
            yield key, {file: size for _, file, size in some}
        return
    with contextlib.suppress(FileNotFoundError), os.scandir(store.local / "objects") as folders:
        for folder in folders:
            sizes: dict[str, int] = {}
            with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as files:
                for f in files:
                    with contextlib.suppress(FileNotFoundError):
                        sizes[f.name] = f.stat().st_size
                yield folder.name, sizes


def _differing(named: Mapping[str, int], there: Mapping[str, int]) -> dict[str, str]:
    """Files of a record that are gone or have another size, with what is wrong with each."""
    return {path: "is gone" if path not in there else f"has {there[path]:,} bytes instead of {size:,}"
            for path, size in named.items() if there.get(path) != size}


# -- records that no run names ----------------------------------------------------------------------------------------
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
    collect_garbage(log)
    return what


def _done(store: Store, run: str) -> bool:
    """Whether the latest attempt of a run finished. A run that was changed and then stopped lists the tasks of an
    earlier attempt only, while the log has others."""
    try:
        return bool(json.loads(store.read(f"runs/{run}/progress.json"))["state"] == "done")
    except (OSError, ValueError, KeyError, TypeError):
        return False
