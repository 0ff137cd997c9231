"""Lists the published parts (Parquet files) of a dataset anew for every query, and verifies each part before DuckDB
reads it.

DuckDB 2.0 ignores the checksums of Parquet pages: from a file with one flipped bit it returns wrong rows without an
error. So the bytes of a part are compared with the sha256 in the dataset's manifest before DuckDB opens it. (For other
readers, `Store.checked` does this.)

A hash is remembered for as long as the file's size and times stay the same. So a server hashes each part once, at 2
GB/s on one core. A query in stored order reads, and hence hashes, only the parts that it needs.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeAlias

from pipeline.base.parquet import open_parquet
from pipeline.base.scratch import Scratch
from pipeline.base.visible import visible
from pipeline.service.duck import Busy, QueryError, QueryLimits, Stop, TooDear
from pipeline.store.dataset import manifest
from pipeline.store.errors import GONE, OTHER_BYTES, DamagedFile
from pipeline.store.fs import Store, StoreError
from pipeline.store.parts import signal_names

#: what a user calls the documents of a dataset, and the folder they are in
FOLDERS = {"kept": "datasets", "dropped": "dropped", "quarantined": "quarantine"}
DATASET = re.compile(r"(shards=)?[A-Za-z0-9][A-Za-z0-9_.@-]{0,127}")        # the names of a recipe, and of its streams
_PART = re.compile(r"part-[0-9]{6,}-[0-9a-f]{1,64}\.parquet")
#: hashes that are remembered, and bytes that are hashed between two checks of the time limit
REMEMBERED, PIECE = 1 << 20, 1 << 22


#: path, device, inode, size, time of the last change of the bytes (mtime), time of the last change of all (ctime)
Identity: TypeAlias = tuple[str, int, int, int, int, int]


class PublishedPart(NamedTuple):
    """What the manifest of a dataset says about one of its parts (data files): path, task, rows, bytes and hash."""

    path: str                     # below the store
    key: str                      # of the task that made it
    node: str
    rows: int
    bytes: int
    sha256: str


class StillChecking(Busy):
    """Raised when the time limit of a query was too short to compare all parts (data files) of a big dataset with their
    hashes."""

    title = "The parts are still being checked"


class Changed(StoreError):
    """Raised when the parts (data files) of a dataset were replaced while a query read them. The query is then repeated
    on the new parts."""


def published(store: Store, kind: str, dataset: str) -> list[PublishedPart]:
    """Return the parts (data files) of a dataset that are published at present, in the order of the manifest. `kind` is
    a key of FOLDERS: kept, dropped or quarantined documents. Raises NoDataset when the store has no such dataset, and
    DamagedFile when the manifest is damaged."""
    if kind not in FOLDERS:
        raise QueryError(f"there are no documents of kind '{visible(kind)[:40]}'", "kind",
                         f"it is one of: {', '.join(FOLDERS)}")
    if not DATASET.fullmatch(dataset):
        raise NoDataset(f"'{visible(dataset)[:80]}' is not the name of a dataset", "dataset",
                        "see the list of datasets")
    folder = f"{FOLDERS[kind]}/{dataset}"
    try:
        table = manifest(store, dataset, FOLDERS[kind])
        columns = [table[name].to_pylist() for name in ("part", "key", "node", "rows", "bytes", "sha256")]
    except DamagedFile:
        raise
    except KeyError as e:
        raise DamagedFile(f"{folder}/.manifest", f"has no column {e}") from None
    except StoreError as e:
        remedy = str(e).partition("; ")[2]      # the first half names a folder on the server
        raise NoDataset(f"there is no dataset '{dataset}' here", "dataset", remedy) from None
    if odd := [name for name in columns[0] if not _PART.fullmatch(name or "")]:
        raise DamagedFile(f"{folder}/.manifest", f"names a part '{visible(str(odd[0]))[:80]}'")
    return [PublishedPart(f"{folder}/{name}", *rest) for name, *rest in zip(*columns)]


def hash_of(parts: Sequence[PublishedPart]) -> bytes:
    """Return a hash of a list of parts (data files of a dataset). If two lists have the same hash, they hold the same
    documents in the same order."""
    text = repr([tuple(part) for part in parts])
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


class NoDataset(QueryError):
    """Raised when the store has no such dataset."""

    status = 404
    title = "No such dataset"


class Checked:
    """Provides the parts (data files) of datasets as files on this machine, after comparing their bytes with the hashes
    in the dataset's manifest."""

    def __init__(self, limits: QueryLimits) -> None:
        self._limits = limits
        self._hashes: dict[Identity, str] = {}
        self._columns: dict[str, tuple[str, ...]] = {}
        self._lock = threading.Lock()
        self._scratch: Scratch | None = None

    @contextlib.contextmanager
    def folder(self) -> Iterator[str]:
        """A context manager that yields a new temporary folder on this machine. If the server is killed, the next
        server removes its folders."""
        with self._lock:
            if self._scratch is None:
                self._scratch = Scratch()
        with tempfile.TemporaryDirectory(prefix="query-", dir=self._scratch.path) as folder:
            yield folder

    @contextlib.contextmanager
    def files(self, store: Store, parts: Sequence[PublishedPart], stop: Stop) -> Iterator[list[str]]:
        """A context manager that yields the paths of verified files, one for each part (data file of a dataset), in the
        order of the parts. Raises DamagedFile when the bytes of a file do not match its hash. When the context ends, it
        raises Changed if a part was replaced in between.

        DuckDB would treat wildcard characters in a store's path as a pattern. So the paths go through a link to the
        folder of the parts.
        """
        with self.folder() as folder:
            if store.local is None:
                yield self._fetched(store, parts, folder, stop)
                return
            before = self.check(store, parts, stop)
            links: dict[str, str] = {}
            for part in parts:
                if (of := os.path.dirname(part.path)) not in links:
                    links[of] = os.path.join(folder, str(len(links)))
                    os.symlink(store.at(of), links[of])
            yield [os.path.join(links[os.path.dirname(part.path)], os.path.basename(part.path)) for part in parts]
            for part, identity in zip(parts, before):
                if _identity(part, identity[0])[:-1] != identity[:-1]:     # without ctime: a new hard link changes it
                    raise Changed(f"{part.path} was replaced while it was read; try again")

    def check(self, store: Store, parts: Sequence[PublishedPart], stop: Stop) -> list[Identity]:
        """Compare the parts (data files of a dataset) of a store on a local disk with their hashes, in several threads.
        Returns the identity (path, inode, size and times) of each file, and an empty list for a store in object
        storage. Raises DamagedFile when a file is missing or its bytes differ, and StillChecking when the time limit is
        exceeded."""
        if store.local is None:
            return []
        inside(store, parts)
        paths = [store.at(part.path) for part in parts]
        try:
            with ThreadPoolExecutor(self._limits.threads) as pool:
                new = [(part, path) for part, path in zip(parts, paths) if _identity(part, path) not in self._hashes]
                list(pool.map(lambda both: self._check(both[0], both[1], stop), new))
                return [self._check(part, path, stop) for part, path in zip(parts, paths)]
        except TooDear:
            done = sum(_identity(part, path) in self._hashes for part, path in zip(parts, paths))
            raise StillChecking(f"{done:,} of {len(parts):,} parts were compared with their hashes so far", "dataset",
                                "ask again: what was compared is remembered; stored order reads fewer parts") from None

    def _check(self, part: PublishedPart, path: str, stop: Stop) -> Identity:
        """Compare a part (data file of a dataset) on a local disk with its hash. Returns the identity (path, inode,
        size and times) of the file. Raises DamagedFile when its bytes differ."""
        stop.check()
        identity = _identity(part, path)
        sha256 = self._hashes.get(identity)
        if sha256 is None:
            digest = hashlib.sha256()
            try:
                with open(path, "rb", buffering=0) as f:
                    while piece := f.read(PIECE):
                        stop.check()
                        digest.update(piece)
            except FileNotFoundError as e:
                raise DamagedFile(part.path, GONE) from e
            sha256 = digest.hexdigest()
            with self._lock:
                while len(self._hashes) >= REMEMBERED:
                    del self._hashes[next(iter(self._hashes))]
                self._hashes[identity] = sha256
        if sha256 != part.sha256:
            raise DamagedFile(part.path, OTHER_BYTES)
        return identity

    def _fetched(self, store: Store, parts: Sequence[PublishedPart], folder: str, stop: Stop) -> list[str]:
        """Fetch parts (data files of a dataset) from object storage to this machine, and return the paths of the local
        files. Files in this machine's cache are not fetched again. Raises TooDear when the parts are larger than a
        query may fetch."""
        size = sum(part.bytes for part in parts)
        if size > self._limits.fetched_bytes:
            raise TooDear(f"the query reads {size / 1e9:.1f} GB from object storage, and the limit is "
                          f"{self._limits.fetched_bytes / 1e9:.1f} GB",
                          remedy="browse in stored order, or serve a copy of the store on a disk")
        paths = []
        for part in parts:
            stop.check()
            paths.append(store.checked(part.path, part.sha256, folder, size=part.bytes))
        return paths

    def columns(self, store: Store, parts: Sequence[PublishedPart], stop: Stop) -> list[tuple[str, ...]]:
        """Return the names of the columns of each part (data file of a dataset). A signal (a number computed for each
        document) is named 'signals.NAME'. Only one part of each plan node is opened, because the tasks of a node run
        the same steps and write the same columns."""
        of_node: dict[str, tuple[str, ...]] = {}
        for part in parts:
            if part.node not in of_node:
                names = self._columns.get(part.sha256)
                if names is None:
                    try:
                        with self.files(store, [part], stop) as [path], open_parquet(path) as file:
                            schema = file.schema_arrow
                    except FileNotFoundError as e:                # replaced since it was compared
                        raise DamagedFile(part.path, GONE) from e
                    names = tuple(schema.names)
                    if "signals" in names:
                        names += tuple(f"signals.{name}" for name in signal_names(schema))
                    with self._lock:
                        self._columns[part.sha256] = names
                of_node[part.node] = names
        return [of_node[part.node] for part in parts]


def inside(store: Store, parts: Sequence[PublishedPart]) -> None:
    """Raise DamagedFile when the folder of the parts (data files of a dataset) is a link to a place outside the store.
    Otherwise whoever may write to the store could make this server read other files."""
    top = os.path.realpath(store.at(""))
    for folder in {part.path.rpartition("/")[0] for part in parts}:
        if not os.path.realpath(store.at(folder)).startswith(top + os.sep):
            raise DamagedFile(folder, "is a link to elsewhere")


def _identity(part: PublishedPart, path: str) -> Identity:
    try:
        info = os.lstat(path)
    except FileNotFoundError as e:
        raise DamagedFile(part.path, GONE) from e
    if not stat.S_ISREG(info.st_mode):
        raise DamagedFile(part.path, "is not a file")
    return path, info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns
