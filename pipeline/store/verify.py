"""Reads a whole store, compares every file with its recorded size and hash, and repairs damage where possible.

`verify_store` reads these files once each: the commit log, the files that it names (`objects/`), argument lists of
tasks, published folders, and shard sets with their manifests. A published part that is a hard link to a file in
`objects/` is not read again.

If a verification is interrupted, the next one continues it: it skips the files named by the log that were already read.
If the records of the log have changed since, it begins anew. `verify.json` in the store records the progress.

`repair`, which needs the lease of the log, makes the next run write damaged files again. It retires (withdraws) the
records of these files, and removes damaged copies and argument lists. It never removes:

- imported shards, because no run can write them again
- manifests. The next run replaces its own manifests anyway. A manifest that this version of Tokenmill cannot read may
  be intact: another version may have made the shard set, and a training run may still use it

The log consists of segments and of packs, each of which compacts many segments. A damaged segment is restored from a
pack that holds it, and a damaged pack is rebuilt from its segments. A damaged segment that no pack holds cannot be
restored. The log is replayed before the verification begins, and the replay raises an error that names such a segment.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

from pipeline.store import snapshot
from pipeline.store.dataset import MANIFEST, manifest
from pipeline.store.errors import OTHER_BYTES, DamagedFile, StoreError
from pipeline.store.fs import Store
from pipeline.store.lists import FOLDER as LISTS
from pipeline.store.log import Log
from pipeline.store.view import LogView
from tokenizer.shards.layout import MANIFEST as SHARDS
from tokenizer.shards.layout import Manifest, ShardError
from tokenizer.shards.packed import Packing

#: file with the progress of a verification
PROGRESS = "verify.json"
#: files read at a time, bytes per read, and files between two records of the progress
THREADS, BLOCK, NOTE = 4, 4 << 20, 256
#: name of a manifest of packed rows
_PACKED = re.compile(r"packed(-[0-9a-f]{16})?\.json")
#: folders of published parts
PUBLISHED = ("datasets", "dropped", "quarantine")


@dataclass(frozen=True)
class File:
    """A file of the store, with its recorded size (-1: not recorded) and hash."""

    path: str
    bytes: int
    sha256: str


@dataclass
class Verified:
    """Results of a verification of the store so far: the number of files read, their total bytes, and the damaged files
    (path → what is wrong)."""

    files: int = 0
    bytes: int = 0
    damaged: dict[str, str] = field(default_factory=dict)


def verify_store(store: Store, log: LogView,
                 on_progress: Callable[[Verified, int], None] = lambda done, total: None, *,
                 batch: int = NOTE) -> Verified:
    """Verify every file of the store, and return the results. After every `batch` files, `on_progress` is called with
    the results so far and the total bytes of all files that the log names.

    A file that has several names (hard links) is read only once. To know such a file again, the function keeps its
    inode number in memory.
    """
    done = _resumed(store, log)
    of_the_log = snapshot.damage(store)                       # read anew: a driver may have repaired the log since
    done.damaged = {path: why for path, why in done.damaged.items() if not path.startswith("log/")} | of_the_log
    total = sum(info.bytes for record in log.records() for info in record.files.values())
    inodes: set[tuple[int, int]] = set()
    skip = done.files
    with ThreadPoolExecutor(THREADS) as pool:
        files = _recorded(store, log)
        for file in islice(files, skip):
            _remember(store, file, inodes)
        while group := list(islice(files, batch)):
            for file, wrong in zip(group, pool.map(lambda file: problem(store, file), group)):
                _remember(store, file, inodes)
                done.files += 1
                done.bytes += file.bytes
                if wrong:
                    done.damaged[file.path] = wrong
            with contextlib.suppress(StoreError):               # a read-only store can be verified, too
                store.write(PROGRESS, json.dumps({"state": log.state(), **vars(done)}).encode())
            on_progress(done, total)
        for path, wrong in _manifests(store):
            done.damaged[path] = wrong
        published = (file for file in _published(store, done.damaged) if not _is_link(store, file, inodes))
        while group := list(islice(published, batch)):
            for file, wrong in zip(group, pool.map(lambda file: problem(store, file), group)):
                done.files += 1
                done.bytes += file.bytes
                if wrong:
                    done.damaged[file.path] = wrong
            on_progress(done, total)
    with contextlib.suppress(StoreError, OSError):
        store.remove(PROGRESS)
    return done


class Repaired(NamedTuple):
    """Result of `repair`: the number of commit records that were retired (withdrawn), of damaged copies removed, and of
    log files restored. `lost` lists the paths of the log files that cannot be restored. `imported` lists the damaged
    files in imported shard sets (sets of token files), which no run can write again."""

    retired: int
    removed: int
    restored: int
    lost: list[str]
    imported: list[str]


def repair(store: Store, log: Log, damaged: Mapping[str, str]) -> Repaired:
    """Retire (withdraw) the records of damaged files and remove damaged copies, so that the next run writes them again.
    Restore damaged files of the commit log. Manifests (lists of the files of a folder) and imported shards are kept.
    `damaged` maps paths to descriptions of the damage, as in `Verified`."""
    retired, removed, restored, lost = log.retire_files(damaged), 0, 0, []
    folders = _imported(store, damaged)
    imported = [path for path in sorted(damaged) if path.rpartition("/")[0] in folders and not _is_manifest(path)]
    for path in sorted(damaged):                              # segments sort before packs, which are rebuilt from them
        if path.startswith("log/"):
            log.check_lease()
            if snapshot.restore(store, path):
                restored += 1
            else:
                lost.append(path)
        elif path.startswith(LISTS + "/") or not (path.startswith("objects/") or _is_manifest(path)
                                                  or path in imported):
            log.check_lease()
            store.remove(path)
            removed += 1
    return Repaired(retired, removed, restored, lost, imported)


def problem(store: Store, file: File) -> str:
    """Describe what is wrong with a file; "" when it has the recorded size and hash."""
    digest, size = hashlib.sha256(), 0
    try:
        with store.open(file.path) as f:
            while block := f.read(BLOCK):
                digest.update(block)
                size += len(block)
    except FileNotFoundError:
        return "is gone"
    except OSError as e:
        if e.errno != errno.EIO:                   # EIO is a bad sector: go on to find other damage
            raise
        return f"cannot be read ({e.strerror})"
    if file.bytes >= 0 and size != file.bytes:
        return f"has {size:,} bytes instead of {file.bytes:,}"
    return "" if digest.hexdigest() == file.sha256 else OTHER_BYTES


def _recorded(store: Store, log: LogView) -> Iterator[File]:
    """Yield the files that the valid records of the commit log name, in the order of the log."""
    for record in log.records():
        for info in record.files.values():
            yield File(info.path, info.bytes, info.sha256)


def _published(store: Store, damaged: Mapping[str, str]) -> Iterator[File]:
    """Yield the files of the store that the commit log does not name: argument lists of tasks, parts (files) of
    published folders, files of shard sets (sets of token files), and files of packed rows. Files whose manifest is in
    `damaged` ({path: description of the damage}) are left out."""
    for entry in store.entries(LISTS):
        yield File(entry.path, entry.size, entry.path.removeprefix(LISTS + "/").partition(".")[0])
    for kind in PUBLISHED:
        for name in _folders(store, kind, MANIFEST):
            if f"{kind}/{name}/{MANIFEST}" not in damaged:
                rows = manifest(store, name, kind).select(["part", "bytes", "sha256"]).to_pylist()
                yield from (File(f"{kind}/{name}/{row['part']}", row["bytes"], row["sha256"]) for row in rows)
    for path in _shard_manifests(store):
        if path not in damaged:
            folder = path.rpartition("/")[0]
            for shard in _shard_set(store, path).shards:
                yield from (File(f"{folder}/{getattr(shard, kind)}", -1, sha) for kind, sha in shard.sums().items())
    for path in _packings(store):
        if path not in damaged:
            folder = path.rpartition("/")[0]
            yield from (File(f"{folder}/{file.file}", -1, file.sha256) for file in _packing(store, path).files)


def _manifests(store: Store) -> Iterator[tuple[str, str]]:
    """Yield (path, reason) for each manifest (list of the files of a published folder or shard set) that cannot be
    read."""
    for kind in PUBLISHED:
        for name in _folders(store, kind, MANIFEST):
            try:
                manifest(store, name, kind)
            except DamagedFile as e:
                yield e.path, e.why
    for paths, read in ((_shard_manifests(store), _shard_set), (_packings(store), _packing)):
        for path in paths:
            try:
                read(store, path)
            except (ShardError, ValueError) as e:
                yield path, f"cannot be read ({e})"


def _shard_set(store: Store, path: str) -> Manifest:
    return Manifest.loads(store.read(path), path)


def _packings(store: Store) -> list[str]:
    """Return the paths of all manifests of packed rows (training samples made of whole documents), which lie beside the
    shards."""
    return [path for path in store.list("shards") if _is_packing(path)]


def _packing(store: Store, path: str) -> Packing:
    return Packing.loads(store.read(path), path)


def _imported(store: Store, damaged: Mapping[str, str]) -> set[str]:
    """Return the folders of imported shard sets (sets of token files that no run made) whose manifests can be read."""
    return {path.rpartition("/")[0] for path in _shard_manifests(store)
            if path not in damaged and _shard_set(store, path).imported}


def _folders(store: Store, kind: str, marker: str) -> list[str]:
    return sorted({path.split("/")[1] for path in store.list(kind) if path.endswith("/" + marker)})


def _shard_manifests(store: Store) -> list[str]:
    """Return the paths of all manifests (lists of the files) of shard sets (sets of token files). They include
    manifests of earlier states of a set, which a training may still use."""
    return [path for path in store.list("shards") if _is_manifest(path) and not _is_packing(path)]


def _is_manifest(path: str) -> bool:
    name = path.rpartition("/")[2]
    return name in (MANIFEST, SHARDS) or _is_packing(path) or (name.startswith("shards-") and name.endswith(".json"))


def _is_packing(path: str) -> bool:
    return _PACKED.fullmatch(path.rpartition("/")[2]) is not None


def _resumed(store: Store, log: LogView) -> Verified:
    """Return the results of an interrupted verification of the store, from which a new verification continues. They are
    empty when there was no interrupted verification, or when the records of the log have changed since."""
    try:
        doc: dict[str, Any] = json.loads(store.read(PROGRESS))
        if doc.pop("state") == log.state():
            return Verified(**doc)
    except (OSError, ValueError, TypeError, KeyError):
        pass
    return Verified()


def _remember(store: Store, file: File, inodes: set[tuple[int, int]]) -> None:
    if store.local is not None:
        try:
            info = (store.local / file.path).stat()
        except FileNotFoundError:
            return
        if info.st_nlink > 1:
            inodes.add((info.st_dev, info.st_ino))


def _is_link(store: Store, file: File, inodes: set[tuple[int, int]]) -> bool:
    """Whether the file is a hard link to a file that was already read. `inodes` holds (device, inode) of the files read
    so far."""
    if store.local is None:
        return False
    try:
        info = (store.local / file.path).stat()
    except FileNotFoundError:
        return False
    return (info.st_dev, info.st_ino) in inodes
