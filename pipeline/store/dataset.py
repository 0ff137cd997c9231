"""Published datasets: folders of Parquet parts that anything can read, with a manifest that lists the parts.

    datasets/NAME/part-ORDER-KEY.parquet  .manifest           kept documents
    dropped/NAME/                                             dropped documents, in files of the same kinds
    quarantine/NAME/                                          quarantined documents and bad records
        quarantine/shards=STREAM/                             documents that could not be encoded for a token stream

A part is a hard link to a file that a task wrote, or, on object storage, a copy of that file. The manifest is Parquet,
too, with one row per part. Its name begins with a dot and has no suffix. Pandas, pyarrow, Hugging Face datasets and
Spark skip such a name, and a glob over `*.parquet` never matches it. So all of them find only parts in the folder.

On a local disk the new folder is built elsewhere and exchanged for the old one in one step. (Where the file system
cannot do this, the folder is missing for a moment.) So at any moment, even after a crash, the parts that match
`datasets/NAME/part-*.parquet` are those that the manifest beside them lists.

On object storage new parts are written first, then the manifest, and then old parts are removed. So a reader that
follows the manifest is always right. A reader that uses the glob is right unless a publication is in progress or was
interrupted; the next run completes an interrupted one.

A driver (the process that schedules a run) may lose the store to another driver. The commit log then refuses its
commits, but nothing refuses its publications. So a driver checks several times that it still has the lease (the right
to use the store):

- on a disk, before it begins to publish, before it exchanges the folders, and after the exchange. If it has lost the
  lease by the last check, it undoes the exchange. Each publication is built in a folder of its own, so two drivers
  never mix their files
- on object storage, before it begins, after every VERIFY_PARTS parts, and before it writes the manifest
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from pipeline.base.clock import SYSTEM
from pipeline.base.files import file_sha256
from pipeline.base.parquet import parquet_writer
from pipeline.base.scratch import Scratch
from pipeline.store.errors import GONE, DamagedFile
from pipeline.store.fs import Store, StoreError, cannot_write, make_folder, swap_folders, sync
from pipeline.store.records import PartRecord
from pipeline.store.temp import Spilled

#: the manifest's name begins with a dot and does not end with `.parquet`: otherwise `datasets.load_dataset` of the
#: folder would take it for a part
MANIFEST, QUARANTINE = ".manifest", "quarantine.parquet"
#: folders of a store that hold published folders
KINDS = ("datasets", "dropped", "quarantine")
#: columns of a manifest; it has neither names of attempts nor times, so that equal data has equal manifests
MANIFEST_SCHEMA = pa.schema([
    ("part", pa.string()),                     # file name in this folder
    ("key", pa.string()), ("node", pa.string()),               # key and node of the task that wrote the file
    ("rows", pa.int64()), ("bytes", pa.int64()), ("text_bytes", pa.int64()),
    ("sha256", pa.string()), ("content", pa.string()),         # of the file; of its rows (docs/contracts.md: Identity)
    ("sources", pa.list_(pa.string())),        # sources that the task read
])
#: rows of a manifest held in memory while it is written
MANIFEST_ROWS = 1 << 13
#: sums of `_part_sum` are taken modulo this number
_SUM = 1 << 128
#: parts between two checks, while parts are copied, that this driver still holds the log's lease
VERIFY_PARTS = 1000

class PartToPublish(NamedTuple):
    """A part (a Parquet file of documents) to publish: its file in `objects/`, and its columns in the manifest (the
    table of the folder's parts). `ManifestWriter.add` chooses the name that the part gets in the published folder."""

    path: str
    key: str
    node: str
    rows: int
    bytes: int
    text_bytes: int
    sha256: str
    content: str
    sources: list[str]


class PassParts:
    """The parts (files of documents) that a dataset gets from one of its passes (groups of steps that run together).
    These are the files `dropped.parquet` and `quarantine.parquet` of all tasks of the pass. If the pass is the `last`
    of the dataset, the files `kept.parquet` are parts, too.

    The list of the parts is on disk, in the order in which the records of the tasks were added. A driver calls `add`
    while it sums up the counters of the records, so that each of millions of records is decoded only once.
    """

    def __init__(self, records: Iterable[PartRecord] = (), last: bool = True) -> None:
        files = (QUARANTINE, "dropped.parquet", *(("kept.parquet",) if last else ()))
        self.files: dict[str, Spilled[PartToPublish]] = {file: _parts() for file in files}
        for record in records:
            self.add(record)

    def add(self, record: PartRecord) -> None:
        sources = sorted(record.counters.get("in") or record.counters.get("sources", {}))
        for file, parts in self.files.items():
            if (info := record.files.get(file)) is not None:
                parts.append(PartToPublish(info.path, record.key, record.node, info.rows, info.bytes,
                                           info.meta.get("text_bytes", 0), info.sha256, info.content, sources))


def publish(store: Store, name: str, passes: Sequence[PassParts],
            check_lease: Callable[[], None] = lambda: None, state: Sequence[str] = ()) -> None:
    """Publish a dataset and replace an earlier publication of that name. `passes` holds the parts of each of its passes
    (groups of steps that run together).

    The published files are `kept.parquet` of the last pass, and `dropped.parquet` and `quarantine.parquet` of all
    passes. `state` identifies the records of all passes. It is stored, so that `is_published` can tell later whether
    the records have changed.

    Only the process that holds the lease of the commit log (the right to append) may call this. If it has lost the
    lease, `check_lease` (`Log.check_lease`) raises, and the folder being published keeps its old list of parts.
    """
    folders = {f"quarantine/{name}": [parts.files[QUARANTINE] for parts in passes],
               f"dropped/{name}": [parts.files["dropped.parquet"] for parts in passes],
               f"datasets/{name}": [passes[-1].files["kept.parquet"]]}
    sums = {folder: _publish(store, folder, chain.from_iterable(parts), check_lease)
            for folder, parts in folders.items()}
    if state:
        with contextlib.suppress(OSError, StoreError):           # the next run publishes again
            store.write(_published(name), json.dumps({"state": list(state), "folders": sums}).encode())


def is_published(store: Store, name: str, state: Sequence[str]) -> bool:
    """Whether `publish` published this dataset with this `state`, and the published folders have not changed since.
    Each folder's manifest (the list of its files) must have the same bytes, and the files must have the same names and
    sizes. On a disk, each file must also still be a hard link. If the result is True, a run need not link millions of
    files again."""
    try:
        document = json.loads(store.read(_published(name)))
        if document["state"] != list(state):
            return False
        return all(_sums_of(store, folder) == sums for folder, sums in document["folders"].items())
    except (OSError, ValueError, LookupError, TypeError):
        return False


def _published(name: str) -> str:
    return f"nodes/{name}.published"


def _sums_of(store: Store, folder: str) -> list[str]:
    """Compute two checksums of a published folder as it is now. The first is the hash of its manifest (the list of its
    parts), the second a sum over the names and sizes of the parts. If the folder is unchanged, they equal the values
    that `_publish` returned."""
    total = 0
    if store.local is None:
        for entry in store.entries(folder):
            if entry.path != f"{folder}/{MANIFEST}":
                total += _part_sum(entry.path.removeprefix(f"{folder}/"), entry.size)
    else:
        with os.scandir(store.local / folder) as entries:
            for file in entries:
                info = file.stat()
                if file.name != MANIFEST:
                    total += _part_sum(file.name, info.st_size if info.st_nlink > 1 else -1)
    return [hashlib.sha256(store.read(f"{folder}/{MANIFEST}")).hexdigest(), f"{total % _SUM:x}"]


def _part_sum(name: str, size: int) -> int:
    """Return a hash of a part's file name and size, as a number. The sum of these numbers over a folder does not depend
    on the order in which the folder's files are listed."""
    return int.from_bytes(hashlib.blake2b(f"{size} {name}".encode("utf-8", "surrogateescape"), digest_size=16).digest())


def stream_quarantine(stream: str) -> str:
    """Return the name of the folder, in `quarantine/`, for documents that could not be encoded for this token stream.
    The name contains '=', which names of datasets must not, so no dataset has the same name."""
    return f"shards={stream}"


def publish_quarantine(store: Store, name: str, records: Iterable[PartRecord],
                       check_lease: Callable[[], None] = lambda: None) -> None:
    """Publish the files `quarantine.parquet` that these commit records name, and no other files, in the folder
    quarantine/NAME/."""
    _publish(store, f"quarantine/{name}", PassParts(records, last=False).files[QUARANTINE], check_lease)


def _parts() -> Spilled[PartToPublish]:
    return Spilled(encode=list, decode=lambda row: PartToPublish(*row))


def _publish(store: Store, folder: str, parts: Iterable[PartToPublish], check_lease: Callable[[], None]) -> list[str]:
    """Publish `parts` (Parquet files of documents) as one folder. Returns the hash of the folder's manifest (the list
    of its parts), and a sum over the names and sizes of its parts (`_part_sum`), both as hexadecimal strings."""
    check_lease()
    publish_parts = _replace if store.local is not None else _update
    return publish_parts(store, folder, parts, check_lease)


def published_folders(store: Store) -> list[str]:
    """Return the published folders of a store (datasets/NAME, dropped/NAME, …), sorted."""
    return sorted(path.removesuffix(f"/{MANIFEST}") for kind in KINDS for path in store.list(kind)
                  if path.endswith(f"/{MANIFEST}"))


def published_parts(store: Store, folder: str) -> list[PartToPublish]:
    """Return the parts (Parquet files) of a published folder, in the order of its manifest (the table of its parts).
    Their paths are those in the published folder."""
    rows = store.table(f"{folder}/{MANIFEST}").to_pylist()
    return [PartToPublish(f"{folder}/{row.pop('part')}", **row) for row in rows]


def publish_again(store: Store, folder: str, parts: Iterable[PartToPublish], check_lease: Callable[[], None]) -> None:
    """Publish a folder again, with some of its parts replaced. The earlier version is removed at once. (After an
    ordinary publication on a disk, the earlier version stays until the next publication.)"""
    _publish(store, folder, parts, check_lease)
    remove_earlier(store, folder)


def remove_earlier(store: Store, folder: str) -> None:
    """Remove the earlier and the unfinished versions of `folder` that its publications have left below `.publish/`."""
    if store.local is not None:
        target = store.local / ".publish" / folder
        for leftover in target.parent.glob(f"{target.name}~*"):
            shutil.rmtree(leftover)


def part_name(order: int, key: str) -> str:
    return f"part-{order:06d}-{key[:12]}.parquet"


def _replace(store: Store, folder: str, parts: Iterable[PartToPublish], check_lease: Callable[[], None]) -> list[str]:
    """Publish a folder on a local disk. The folder is built below `.publish/`, where no glob over datasets finds it,
    and then exchanged for the old folder.

    The old folder is kept below `.publish/` until the next publication. A reader that is listing it at the moment of
    the exchange would otherwise see files vanish. The old folder takes no disk space, since its files are hard links to
    files in `objects/`.
    """
    assert store.local is not None
    target = store.local / folder
    place = f".publish/{folder}"
    for leftover in (store.local / place).parent.glob(f"{target.name}*"):
        if leftover.name.partition("~")[0] == target.name:
            shutil.rmtree(leftover, ignore_errors=True)
    place += f"~{SYSTEM.new_id()}"
    aside = store.local / place
    try:
        make_folder(aside)
        make_folder(target.parent)
        with ManifestWriter(aside / MANIFEST) as manifest:
            for part in parts:
                link_committed(store, part.path, f"{place}/{manifest.add(part)}")
        sums = manifest.sums()
        sync(aside / MANIFEST)
        sync(aside)
        check_lease()
        _put_in_place(aside, target, check_lease)
        return sums
    except BaseException as e:
        shutil.rmtree(aside, ignore_errors=True)
        if isinstance(e, (OSError, StoreError)):
            check_lease()               # the folder may be missing because another driver took over
        if isinstance(e, OSError):
            raise cannot_write(target, e) from e
        raise


def _put_in_place(aside: Path, target: Path, check_lease: Callable[[], None]) -> None:
    """Move the new folder `aside` to the path `target`, in exchange for an older folder there. If `check_lease` then
    raises because another driver has taken over the store, the older folder is restored."""
    inode, replaces = aside.stat().st_ino, target.exists()
    if replaces:
        swap_folders(aside, target)
    else:
        os.rename(aside, target)
    sync(target.parent)
    try:
        check_lease()
    except BaseException:
        with contextlib.suppress(OSError):
            if target.stat().st_ino == inode:
                if replaces:
                    swap_folders(aside, target)
                else:
                    os.rename(target, aside)
        raise


def _update(store: Store, folder: str, parts: Iterable[PartToPublish], check_lease: Callable[[], None]) -> list[str]:
    """Publish a folder on object storage. First the server copies the missing parts, many at a time. Then the manifest
    is written, and then parts that the manifest does not list are removed. Memory holds the names and sizes of the
    parts that the folder had before."""
    present = {entry.path.removeprefix(f"{folder}/"): entry.size for entry in store.entries(folder)}
    with Scratch() as scratch:
        local = Path(scratch.path, MANIFEST)
        with ManifestWriter(local) as manifest:
            def missing() -> Iterator[tuple[str, str]]:
                for n, part in enumerate(parts, 1):
                    part_file = manifest.add(part)
                    if n % VERIFY_PARTS == 0:      # copying may take hours, and another driver may have taken the log
                        check_lease()
                    # the name identifies the content, but a truncated copy would have another size
                    if present.pop(part_file, None) != part.bytes:
                        yield part.path, f"{folder}/{part_file}"
            try:
                store.copy_all(missing())
            except FileNotFoundError as e:
                raise DamagedFile(store.relative(e.filename), GONE) from e
        sums = manifest.sums()
        check_lease()
        store.remote.upload(str(local), f"{folder}/{MANIFEST}")         # 100 MB for a million parts
    present.pop(MANIFEST, None)
    store.remove_all(f"{folder}/{name}" for name in present)
    return sums


def link_committed(store: Store, path: str, to: str) -> None:
    """Give the file `path`, which a committed task wrote, a second name `to`. If another file has the name `to`, such
    as a damaged copy, that file is replaced. Raises DamagedFile when `path` is missing."""
    try:
        store.link(path, to, anew=True)
    except FileNotFoundError as e:
        raise DamagedFile(path, GONE) from e
    except OSError as e:
        raise cannot_write(store.at(to), e) from e


class ManifestWriter:
    """Writes a manifest, the Parquet table of the parts of a published folder. Use it as a context manager, and call
    `add` for each part. Rows are written in blocks."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer = parquet_writer(path, MANIFEST_SCHEMA)
        self._rows: list[tuple[Any, ...]] = []
        self._parts = self._total = 0

    def add(self, part: PartToPublish) -> str:
        """Add a part (a Parquet file of documents) to the manifest. Returns the name that the part must have in the
        published folder."""
        name = part_name(self._parts, part.key)
        self._parts += 1
        self._total += _part_sum(name, part.bytes)
        self._rows.append((name, *part[1:]))                    # `path` is not in the manifest
        if len(self._rows) == MANIFEST_ROWS:
            self._flush()
        return name

    def sums(self) -> list[str]:
        """Return the hash of the manifest, and the sum over the names and sizes of its parts. `_sums_of` computes the
        same values from the published folder. Call this only after the context has ended."""
        return [file_sha256(self._path), f"{self._total % _SUM:x}"]

    def _flush(self) -> None:
        self._writer.write_table(pa.table(list(map(list, zip(*self._rows))), schema=MANIFEST_SCHEMA))
        self._rows = []

    def __enter__(self) -> ManifestWriter:
        return self

    def __exit__(self, *_: object) -> None:
        if self._rows:
            self._flush()
        self._writer.close()


# -- reading ---------------------------------------------------------------------------------------------------------
def manifest(store: Store, name: str, kind: str = "datasets") -> pa.Table:
    """Return the manifest of a published dataset: the table of its parts (columns: MANIFEST_SCHEMA). `kind` is
    datasets, dropped or quarantine. Raises StoreError when no such folder is published, and DamagedFile when the
    manifest cannot be read."""
    try:
        return store.table(f"{kind}/{name}/{MANIFEST}")
    except FileNotFoundError:
        names = sorted({p.split("/")[1] for p in store.list(kind) if p.endswith("/" + MANIFEST)})
        raise StoreError(f"there is no dataset '{name}' in {store.at(kind)}; "
                         + (f"it has: {', '.join(names)}" if names else "nothing is published there yet")) from None


def iter_batches(store: Store, folder: str, columns: list[str] | None = None,
                 batch_rows: int = 512) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a published folder ('datasets/NAME', 'dropped/NAME', …), part by part in the order of its
    manifest (the list of its parts). Raises DamagedFile when the bytes of a part differ from the hash in the
    manifest."""
    kind, _, name = folder.partition("/")
    parts = manifest(store, name, kind)
    for part, sha256 in zip(parts["part"].to_pylist(), parts["sha256"].to_pylist()):
        with store.parquet(f"{folder}/{part}", sha256) as file:
            for group in range(file.num_row_groups):
                yield from file.iter_batches(batch_rows, row_groups=[group], columns=columns, use_threads=False)


def iter_rows(store: Store, folder: str, columns: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the rows of a published folder ('datasets/NAME', 'dropped/NAME', …), each as a dict {column: value}. Raises
    DamagedFile when the bytes of a file differ from their recorded hash."""
    for batch in iter_batches(store, folder, columns, 64):
        yield from batch.to_pylist()
