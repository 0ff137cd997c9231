"""Garbage collection in a store. It removes three things:

- files that no commit record (the log entry of a finished task) names
- commit records that no run names
- segments (files) of the commit log that are also in a snapshot (a compacted copy)

A record that no run names comes from a recipe that was changed or from a run that was deleted. A finished run names its
tasks in `runs/RUN/tasks.parquet`. If a run has not finished, or has no such file, all records that its drivers
committed are kept.

A record is retired (withdrawn in the log) before its files are removed, so that a later run that needs the result
computes it again. Published folders are not affected, because their parts are hard links or copies.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from pipeline.store import snapshot
from pipeline.store.disk import leftovers
from pipeline.store.fs import Store
from pipeline.store.lease import heartbeat_name
from pipeline.store.lists import FOLDER as LISTS
from pipeline.store.log import Log, epoch_mark
from pipeline.store.runs import RunTasks
from pipeline.store.segment import CorruptLog, decode_segment, segment_name
from pipeline.store.temp import scratch_database
from pipeline.store.view import LogView

logger = logging.getLogger("tokenmill")
#: folder of the files that `pipeline.plan.fresh` and `pipeline.store.dataset` write to recognise that nothing has
#: changed since
NODES = "nodes"
VERIFY_EVERY = 1000      # files removed between two checks of the lease


# -- files that no record names ---------------------------------------------------------------------------------------
class Swept(NamedTuple):
    """Result of `collect_garbage`: the numbers of removed files (heartbeats not counted) and of removed empty folders.
    Also the recorded files that are missing or have the wrong size (path → description of the damage)."""

    files: int
    folders: int
    damaged: dict[str, str]


def collect_garbage(log: Log, verify_every: int = VERIFY_EVERY) -> Swept:
    """Remove garbage from the store, and retire (withdraw) records whose files are missing or have another size than
    recorded. Call this before tasks run, because it may remove an empty folder that a task is about to upload into.

    An epoch is the term of one driver, the process that schedules tasks. Garbage is:

    - files that attempts of earlier epochs wrote and that no record names. Such an attempt can no longer be committed,
      because its driver has lost the log to this driver
    - argument lists of tasks (`pipeline.store.lists`), which are written again when needed
    - heartbeats of earlier epochs
    - temporary files whose writers are dead

    If this driver has itself lost the log, it stops after at most `verify_every` further files. Memory grows with the
    number of files to remove, not with the number that exist.
    """
    store = log.store
    log.flush()
    garbage, folders = [], []
    damaged: dict[str, str] = {}                          # path of a file → what is wrong with it
    database = scratch_database()
    database.execute("CREATE TABLE seen (key TEXT PRIMARY KEY) WITHOUT ROWID")
    for key, files in _objects(store):                    # objects/KEY/ATTEMPT.name
        record = log.get(key)
        named = {info.path: info.bytes for info in record.files.values()} if record else {}
        if record:
            database.execute("INSERT OR IGNORE INTO seen VALUES (?)", (key,))
            damaged |= _differing(named, {f"objects/{key}/{file}": size for file, size in files.items()})
        old = []
        for file in files:
            epoch = file.split("-")[0]
            if f"objects/{key}/{file}" not in named and (f"objects/{key}" == LISTS or (
                    len(epoch) == 8 and epoch.isdigit() and int(epoch) < log.epoch)):
                old.append(f"objects/{key}/{file}")
        garbage += old
        if len(old) == len(files):
            folders.append(key)
    for record in log.records():
        if not database.execute("SELECT 1 FROM seen WHERE key = ?", (record.key,)).fetchone():
            damaged |= _differing({info.path: info.bytes for info in record.files.values()}, {})
    beats = [path for path in store.list("log/heartbeat") if path < heartbeat_name(log.epoch)]
    if store.local is not None:
        garbage += leftovers(store.local, store.local / heartbeat_name(log.epoch))
    log.retire_files(damaged)

    store.remove_all(_while_lease_holds(log, [*garbage, *beats], verify_every))
    emptied = 0
    if store.local is not None:
        for key in _while_lease_holds(log, folders, verify_every):
            with contextlib.suppress(OSError):            # not empty: in use
                os.rmdir(store.local / "objects" / key)
                emptied += 1
    return Swept(len(garbage), emptied, damaged)


def _while_lease_holds(log: Log, names: Iterable[str], verify_every: int) -> Iterator[str]:
    """Yield the names of files and folders to remove, as long as this process holds the lease of the log (the right to
    change the store). Another process that has taken over the store may use these files. So the lease is checked before
    the first name and then every `verify_every` names."""
    for n, name in enumerate(names):
        if n % verify_every == 0:
            log.check_lease()
        yield name


def _objects(store: Store) -> Iterator[tuple[str, dict[str, int]]]:
    """Yield (name of a folder in objects/, {name of a file in it: bytes}). On a disk the folders come in any order,
    because sorting a million of them would take memory."""
    if store.local is None:
        pairs = ((*entry.path.removeprefix("objects/").partition("/")[::2], entry.size)
                 for entry in store.entries("objects"))
        for key, group in groupby(pairs, lambda pair: pair[0]):
            yield key, {file: size for _, file, size in group}
        return
    with contextlib.suppress(FileNotFoundError), os.scandir(store.local / "objects") as folders:
        for folder in folders:
            sizes: dict[str, int] = {}
            with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as files:
                for f in files:
                    with contextlib.suppress(FileNotFoundError):
                        sizes[f.name] = f.stat().st_size
                yield folder.name, sizes


def _differing(named: Mapping[str, int], existing: Mapping[str, int]) -> dict[str, str]:
    """Compare the file sizes that a record states (`named`: path → bytes) with the sizes of the files that exist
    (`existing`). Returns path → description of the damage for each file that is missing or has another size."""
    return {path: "is gone" if path not in existing else f"has {existing[path]:,} bytes instead of {size:,}"
            for path, size in named.items() if existing.get(path) != size}


# -- segments that a snapshot holds -----------------------------------------------------------------------------------
def packed_segments(store: Store, before: int) -> list[str]:
    """Return the names of the segments (files of the log) that may be removed: those with a number below `before` that
    an undamaged pack (a file of compacted segments) holds. Each pack is read and verified first.

    The first segment of each epoch (the term of one driver) is kept. By finding this segment, a driver notices at its
    next append that another driver has taken the log over.
    """
    there = set(store.list("log"))
    names: dict[str, None] = {}
    for pack in snapshot.listed(store):
        try:
            segments = snapshot.read(store, pack).segments()
            for number, data in segments:
                name = segment_name(number)
                if decode_segment(data, name)["kind"] != "epoch" and number < before and name in there:
                    names[name] = None
        except CorruptLog as e:
            logger.warning("%s. Its segments are kept", e)
    return list(names)


def remove_packed_segments(log: Log, verify_every: int = VERIFY_EVERY) -> int:
    """Remove the segments (files of the log) that `packed_segments` names, and return their number. This process must
    hold the lease of `log` (the right to append). A reader that misses a removed segment reads the pack (file of
    compacted segments) that holds it (`LogView.refresh`). The docstring of `pipeline.store.log` explains why the
    removal is safe for other drivers that append."""
    store, names = log.store, packed_segments(log.store, log.opened)
    if names:
        marked = set(store.list("log/epochs"))
        marks = (mark for epoch in range(1, log.epoch + 1) if (mark := epoch_mark(epoch)) not in marked)
        for _ in store.map(lambda mark: store.put_absent(mark, b"{}\n"), marks):
            pass
    return store.remove_all(_while_lease_holds(log, names, verify_every))


# -- records that no run names ----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Unnamed:
    """Totals of the commit records that no run names: the number of records, and the number and bytes of their files in
    `objects/`."""

    records: int
    files: int
    bytes: int


def unnamed(store: Store, log: LogView) -> tuple[Unnamed, list[tuple[str, str]]]:
    """Find the commit records that no run names in its list of tasks. Returns their totals, and a list with (key,
    attempt) for each record. Memory grows with this list."""
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
    """Retire (withdraw) the commit records that no run names in its list of tasks, and remove their files. This process
    must hold the lease of `log` (the right to append), so that no run is in progress. Returns the totals of what was
    removed."""
    what, pairs = unnamed(store, log)
    log.retire_unnamed(pairs)
    if pairs:                             # the files of fresh nodes (`pipeline.plan.fresh`) are older than the log now
        store.remove_all(list(store.list(NODES)))
    collect_garbage(log)
    return what


def _done(store: Store, run: str) -> bool:
    """Whether a run had finished when it last reported progress. The task list of an unfinished run cannot be used. It
    may come from an earlier start with another recipe, and may lack tasks that have been committed since."""
    try:
        return bool(json.loads(store.read(f"runs/{run}/progress.json"))["state"] == "done")
    except (OSError, ValueError, KeyError, TypeError):
        return False
