"""The index of a deduplication: what `exact` or `minhash` kept of a dataset, so that later documents can be compared
with it (`against: old`) without reading the old documents again.

Old documents come before all new ones, as if their datasets stood first in `priority:`. So an old document is never
removed in favour of a new one, and the decision about it never changes. A new document is removed if, and only if, one
run over all documents, with the old datasets first in `priority:`, would remove it. For this, an index needs only
documents that its deduplication kept:

  * `exact` keeps one document of each hash of a property, and the index names it. A later property or step may remove
    this document. Its hash then still removes new documents, as in one run over all.
  * `minhash` compares a document only with documents that were *kept* before it and share a band key with it. If a new
    document resembles only an old one that was removed, it is kept, as it would be in one run over all.

An index thus belongs to a step of a dataset, not to the dataset, and is made from what the step kept, before later
steps. A run never changes it. `tokenmill dedup forget` writes the files of an index again without documents that were
taken down, in its folder.

The files of an index are ordinary outputs of tasks. Buckets of exchange files and blocks of texts have checksums of
their own, so that a task reads and checks only those that its documents need:

    keys.seg       of each range of keys: KEY records (minhash: the band keys of kept documents) or HASH records
                   (exact: hashes of a property), sorted, in buckets of about BUCKET_BYTES
    documents.seg  of each group of files of old documents: DOCUMENT records, ROWS in a bucket (only minhash)
    texts.bin      of each group: the compared texts, compressed in blocks (only minhash; `stages.dedup.index_texts`)
    ids.parquet    of each group: the ids, by which a takedown finds the index (`pipeline.takedown`; only minhash,
                   because the index of `exact` holds no text)

`DedupIndex` lists these files and the settings of the step that made the index. A step that reads the index must have
the same settings. The tasks that make an index run after those of the deduplication itself (`index_waves`), and only if
something reads the index. They do not change the keys of the old dataset's results, so no other task runs again when a
new dataset is added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.base.files import file_sha256
from stages.barrier import Barrier, Done, FileRef, PartRef, TaskResult, Wave
from stages.catalog import load
from stages.dedup.fragment import ID, bucket_of, files_of, joined
from stages.dedup.survivor import order_field
from stages.stage import library_versions, python_version, role_of, signal
from stages.task import Inputs

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: bytes of keys in a bucket, which are read together
BUCKET_BYTES = 256 << 10
#: the priority of old documents, before that of all others
OLD = -1
#: documents in a bucket of `documents.seg`
ROWS = 4096
#: a band key, and an old document that has it: number of the group in the index << 32 | row of the group's documents
KEY = np.dtype([("key", "<u8"), ("document", "<u8")])
#: a hash of a property, and the old document that stays for it
HASH = np.dtype([("hi", "<u8"), ("lo", "<u8"), *ID])


def document_dtype(prefer: Sequence[str]) -> np.dtype[Any]:
    """Return the dtype of a DOCUMENT record, which describes an old document. Its fields are the document's id, the id
    that names its cluster, its number of characters, and the place of its text (`stages.dedup.index_texts`). If the
    preferences `prefer` compare dates or signals, numbers for these follow."""
    return np.dtype([*ID, ("cluster_hi", "<u8"), ("cluster_lo", "<u8"), ("chars", "<u4"), ("number", "<u4"),
                     ("offset", "<u8"), ("size", "<u8"), ("sum", "<u8"), *order_field(prefer)])


@dataclass(frozen=True)
class DedupIndex:
    """Describes an index, that is, what a deduplication kept of a dataset.

    `step` is the name of the deduplication, and `settings` are its settings and versions. `ranks` is the number of
    priorities that its documents have; priorities are numbered from 0. `keys` describes the files of keys of each
    property, as {property: {"files": one for each range, "buckets": number of buckets in each file}}. The only property
    of `minhash` is `bands`. `groups` has an entry for each group of documents of `minhash`, with its priority and its
    files; it is empty for `exact`. `documents` is the number of kept documents that have band keys (`minhash`), or of
    hashes of the first property (`exact`).
    """

    step: str
    settings: dict[str, Any]
    ranks: int
    keys: dict[str, dict[str, Any]]
    groups: list[dict[str, Any]]
    documents: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def as_list(given: Any) -> Any:
    """Return [name] for a single name, and any other value unchanged. With this function, a setting may be one name or
    a list of names."""
    return [given] if isinstance(given, str) else given


def check_preference(against: Sequence[str], prefer: Sequence[str]) -> None:
    """Raise ValueError if `against` is given and the first of the preferences `prefer` is not `priority`. Otherwise a
    new document could replace one of an index, which may have been published long ago."""
    if against and prefer[:1] != ("priority",):
        raise ValueError("against: old documents stay, whatever the new ones are; begin prefer with priority, or "
                         "leave against out and deduplicate all documents in one dataset")


def against_setting() -> Any:
    return signal((), "datasets of the recipe, or folders made by `tokenmill dedup index`, with whose documents these "
                      "are also compared; those old documents always stay", added=True)


class IndexedBarrier(Barrier):
    """A deduplication that can make an index of the documents that it keeps, and compare documents with such
    indexes."""

    @property
    def no_index(self) -> str:
        """Return why the step can make no index, and which setting to change; "" if it can make one. A step can make
        none if what it keeps depends on later documents."""
        return ""

    def waves(self, parts: Sequence[PartRef], against: Sequence[DedupIndex] = ()) -> list[Wave]:
        raise NotImplementedError

    def index_waves(self, parts: Sequence[PartRef], slices: Sequence[FileRef | None], done: Done) -> list[Wave]:
        """Return the waves (groups of tasks that may run at the same time) that make an index of the kept documents.
        `done` holds the results of the deduplication's own waves, and `slices` its removal slices."""
        raise NotImplementedError

    def index(self, parts: Sequence[PartRef], done: Done, ranks: int) -> DedupIndex:
        """Return the index that `index_waves` has made. `done` holds the results of these waves, and `ranks` is the
        number of priorities of the documents."""
        raise NotImplementedError

    def index_settings(self) -> dict[str, Any]:
        """Return the settings and versions that two deduplications must have in common for one to use the index of the
        other."""
        stage = load(self.prepare()[0])(self.prepare()[1])
        settings = {name: value for name, value in self.config.model_dump(mode="json").items() if name != "against"}
        for name in settings:
            if settings[name] is not None and role_of(type(self.config), name) == "resource":
                settings[name] = file_sha256(settings[name])
        versions = {"Python": python_version(), self.name: self.version, stage.name: stage.version,
                    **library_versions(stage.libraries)}
        return {**settings, **{f"version of {name}": version for name, version in versions.items()}}


def differing(index: dict[str, Any], step: dict[str, Any]) -> str:
    """Return a text that names the settings in which an index differs from the step that is to read it, with both
    values; "" if none differ."""
    return ", ".join(f"{name}: {index.get(name)} instead of {step.get(name)}" for name in sorted({*index, *step})
                     if index.get(name) != step.get(name))


# -- making ----------------------------------------------------------------------------------------------------------
def fine_buckets(rows: int, dtype: np.dtype[Any], ranges: int) -> int:
    """Return the number of buckets, at least 1, of a file of keys. There are `ranges` such files, which hold `rows`
    records of type `dtype` in all."""
    return max(1, -(-rows * dtype.itemsize // (ranges * BUCKET_BYTES)))


def key_files(results: Sequence[TaskResult], buckets: int) -> dict[str, Any]:
    """Return the entry of `DedupIndex.keys` for one property. `results` are those of the tasks that wrote its files of
    keys, each with `buckets` buckets."""
    return {"files": files_of(results, "keys.seg"), "buckets": buckets}


# -- reading ---------------------------------------------------------------------------------------------------------
def records_of(inputs: Inputs, ref: FileRef, bucket: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return the records of one bucket of a file of an index. Raises an error about a damaged file if the records are
    not of the type `dtype`."""
    records = inputs.segment(ref, bucket)
    if records.dtype != dtype:
        raise inputs.damaged(ref, f"holds other records than this file of an index does ({records.dtype})")
    return records


def look_up(inputs: Inputs, keys: dict[str, Any], wanted: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Look up keys in the files of one property of an index, which `keys` describes (`DedupIndex.keys`).

    `wanted` holds the keys, sorted, as records with the field `key` (for KEY records) or the fields `hi` and `lo` (for
    HASH records). Returns two arrays with an entry for each record of the index that has a wanted key: the number of
    the key in `wanted`, and the record. Only buckets in whose range a wanted key lies are read.
    """
    field, *rest = ("key",) if "key" in (wanted.dtype.names or ()) else ("hi", "lo")
    files, buckets = keys["files"], keys["buckets"]
    if not files or not len(wanted):
        return np.zeros(0, np.int64), np.zeros(0, HASH if rest else KEY)
    places = bucket_of(wanted[field], len(files) * buckets)
    numbers, records = [], []
    edges = (np.flatnonzero(np.diff(places)) + 1).tolist()
    for start, stop in zip([0, *edges], [*edges, len(places)]):
        file, bucket = divmod(int(places[start]), buckets)
        stored = records_of(inputs, files[file], bucket, HASH if rest else KEY)
        ordered, keys_wanted = (stored[field], wanted[field][start:stop]) if not rest else (
            joined(stored), joined(wanted[start:stop]))
        first, last = np.searchsorted(ordered, keys_wanted), np.searchsorted(ordered, keys_wanted, side="right")
        lengths = last - first
        # the positions first[i], first[i] + 1 … last[i] - 1 of every key
        positions = np.repeat(first - np.cumsum(lengths) + lengths, lengths) + np.arange(int(lengths.sum()))
        numbers.append(np.repeat(np.arange(start, stop), lengths))
        records.append(np.array(stored[positions]))
    return np.concatenate(numbers), np.concatenate(records)
