"""Functions that the deduplication steps `exact`, `minhash`, `repeats` and `substring` have in common.

They handle parts (files of documents), groups of parts, side tables (hashes of a part's documents), and removal slices
(lists of rows to drop from a part).

In one deduplication a document is identified by its *place*: ``part << 32 | row``, a uint64, half the size of a
document id. A task that reads one group of parts numbers the parts from the start of the group. Its result can thus be
reused when other groups change. Later tasks add the number of the group's first part.

Places depend on how the documents are divided into parts, but no result of a deduplication may depend on this division.
The order of documents, the choice of the kept ones and the names of clusters are therefore determined by ids
(docs/contracts.md: Identity).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.base.parquet import read_table
from stages.barrier import NEAR_DUPLICATE, SLICE_SCHEMA, FileRef, PartRef, TaskResult
from stages.document import DuplicateId
from stages.task import Inputs, Out

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Sizes:
    """The sizes that decide how the work of a deduplication is divided into tasks.

    Which documents are removed never depends on these sizes. The contents of exchange files, by which a task passes
    records to later tasks, do depend on these sizes. A size that affects such a file is therefore part of the key of
    the task that writes the file (the hash under which the task's result is reused).
    """

    #: Limits of a group of parts: bytes of text and documents. They bound the memory of a map task: ~1 GB at 14 bands.
    group_bytes: int = 4 << 30
    group_rows: int = 1_000_000
    #: Bytes of exchange records in a bucket, which one reduce task reads, and fewest bytes that a reduce task should
    #: read from one map task on average. Reading smaller pieces from object storage takes too many requests, so if
    #: there are many groups of parts, buckets are larger. Reduce tasks read a bucket in sorted blocks, so their memory
    #: does not grow with the bucket.
    bucket_bytes: int = 128 << 20
    segment_bytes: int = 128 << 10
    #: Most edges from which a single task computes the clusters (its peak is 60 bytes per edge). For more edges,
    #: several tasks do so in rounds.
    one_task_edges: int = 30_000_000
    #: Edges that a task holds before it reduces them to a forest.
    folded_edges: int = 4_000_000
    #: Bytes of edge files that one task of the first round reads.
    spread_bytes: int = 1 << 30
    #: Bytes of shingles that a task collects before it orders them by cluster and writes them, and bytes of shingles
    #: that a task `Verify` holds.
    shingle_chunk_bytes: int = 128 << 20
    shingle_cache_bytes: int = 256 << 20

    def buckets(self, total_bytes: int, writers: int) -> int:
        """Return the number of buckets into which records are divided. The records of all buckets together have
        `total_bytes` bytes. `writers` tasks write them, and one task reads each bucket."""
        return max(1, min(-(-total_bytes // self.bucket_bytes),
                          total_bytes // (max(writers, 1) * self.segment_bytes)))


#: used by every barrier; tests pass smaller ones
SIZES = Sizes()

ID = [("id_hi", "<u8"), ("id_lo", "<u8")]
#: the value of each byte as a hexadecimal digit in lower case, or 255
_DIGITS = np.full(256, 255, np.uint8)
for _digit in "0123456789abcdef":
    _DIGITS[ord(_digit)] = int(_digit, 16)
#: why a document is removed: it resembles the kept document, or the kept document contains it
SIMILAR, CONTAINED = 1, 2
#: the verdict about a document: its part and row within its group, why it is removed (0 if it stays), its similarity to
#: the kept document, the id of the kept document, and the id that names the cluster
VERDICT = np.dtype([("part", "<u4"), ("row", "<u4"), ("removed", "<u4"), ("similarity", "<f8"),
                    ("kept_hi", "<u8"), ("kept_lo", "<u8"), ("cluster_hi", "<u8"), ("cluster_lo", "<u8")])
#: a kept document (its part and row within its group) and the id of another kept document that it resembles
NEAR = np.dtype([("part", "<u4"), ("row", "<u4"), ("id_hi", "<u8"), ("id_lo", "<u8"), ("similarity", "<f8")])
#: most documents that a slice names as similar to one kept document
_MOST_NEAR = 16


@dataclass(frozen=True)
class PartGroup:
    """A group of consecutive parts (files of documents) of one dataset, which one task reads."""

    all_parts: Sequence[PartRef]   # all parts of the barrier's input, which may be on disk
    first: int                     # number of its first part among them
    size: int                      # parts
    dataset: str
    rank: int
    rows: int
    bytes: int

    @property
    def parts(self) -> Sequence[PartRef]:
        return self.all_parts[self.first:self.first + self.size]

    def sides(self, barrier: str) -> list[FileRef]:
        """Return a reference to the side table (hashes of the documents) of each part (file of documents) of the group.
        Raises ValueError if a part has no side table. The message names the first such part, and the deduplication step
        `barrier`."""
        for part in self.parts:
            if part.side is None:
                raise ValueError(f"{barrier}: part {part.key} of '{part.dataset}' has no side table; the pass before "
                                 f"'{barrier}' must run its prepare stage")
        return [p.side for p in self.parts if p.side is not None]


def groups(parts: Sequence[PartRef], sizes: Sizes = SIZES) -> list[PartGroup]:
    """Cut a list of parts (files of documents), in order, into groups. All parts of a group belong to one dataset and
    have one priority. They hold at most `group_bytes` of text and `group_rows` documents, except that a single part may
    be larger.

    Where a group ends depends mostly on the keys of its own parts, so that an added part changes its own group and
    seldom any other group. For this, a group that is at least half full ends at the next part whose key has a hash in a
    certain range, which is true of one part in four.
    """
    max_bytes, max_rows = sizes.group_bytes, sizes.group_rows
    out: list[PartGroup] = []
    owner = ("", 0)                                # dataset and rank of the group
    count = size = rows = first = 0

    def close() -> None:
        nonlocal count, size, rows, first
        if count:
            out.append(PartGroup(parts, first, count, *owner, rows, size))
        first, count, size, rows = first + count, 0, 0, 0

    for part in parts:
        is_other = owner != (part.dataset, part.rank)
        if is_other or (count and (size + part.bytes > max_bytes or rows + part.rows > max_rows)):
            close()
        owner = part.dataset, part.rank
        count, size, rows = count + 1, size + part.bytes, rows + part.rows
        fullness = max(size / max_bytes, rows / max_rows)
        if fullness >= 1 or (fullness >= 0.5 and hashlib.blake2b(part.key.encode(), digest_size=1).digest()[0] < 64):
            close()
    close()
    return out


def bucket_of(keys: NDArray[np.uint64], buckets: int) -> NDArray[np.int64]:
    """Return the number of the bucket that each 64-bit key belongs to. Buckets are ranges of equal width, so they hold
    equally many keys only if keys are spread evenly, as hashes are. Sorted keys have ascending buckets."""
    return (((keys >> np.uint64(32)) * np.uint64(buckets)) >> np.uint64(32)).astype(np.int64)


def places(part: int, rows: NDArray[Any]) -> NDArray[np.uint64]:
    return np.uint64(part << 32) | rows.astype(np.uint64)


def split_place(place: NDArray[np.uint64]) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """Return (the number of the part, the number of the row) of documents, each given by its place, part << 32 | row. A
    part is a file of documents."""
    return (place >> np.uint64(32)).astype(np.uint32), (place & np.uint64(0xFFFFFFFF)).astype(np.uint32)


# -- exchange files --------------------------------------------------------------------------------------------------
def write_segments(out: Out, name: str, records: NDArray[Any], bucket: NDArray[Any] | None = None, buckets: int = 1,
                   key: Sequence[str] = ()) -> None:
    """Write an exchange file, by which a task passes records to later tasks. `bucket` holds the number of the bucket of
    each record (default: all records in one bucket). Within a bucket, records are sorted by the fields `key`; without
    `key`, they keep their order."""
    if bucket is None:
        bucket = np.zeros(len(records), np.int64)
    with out.segments(name, records.dtype, buckets, key=key) as writer:
        writer.write(bucket, records)


def read_segments(inputs: Inputs, refs: Sequence[FileRef], bucket: int, dtype: np.dtype[Any]) -> list[NDArray[Any]]:
    """Return the records of one bucket, as one array for each of the exchange files `refs` (by which earlier tasks pass
    on records). The arrays are copies that may be changed."""
    return [np.array(inputs.segment(ref, bucket), dtype) for ref in refs]


# -- ids and side tables ---------------------------------------------------------------------------------------------
def ids_to_ints(ids: pa.Array | pa.ChunkedArray) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Return (the high 64 bits, the low 64 bits) of document ids, which are 32 hex digits. Raises ValueError for any
    other form of id, because its order as text would differ from its order as a number."""
    column = (ids.combine_chunks() if isinstance(ids, pa.ChunkedArray) else ids).cast(pa.large_string())
    ends = np.frombuffer(column.buffers()[1] or bytes(8), np.int64)[column.offset:column.offset + len(column) + 1]
    digits = _DIGITS[np.frombuffer(column.buffers()[2] or b"", np.uint8)[ends[0]:ends[-1]]]
    if column.null_count or (np.diff(ends) != 32).any() or (digits > 15).any():
        strange = next((id_text for id_text in column.to_pylist() if not _is_id(id_text)), None)
        raise ValueError(f"document id {strange!r} is not 32 lower-case hex digits (see stages.document.document_id)")
    both = (digits[::2] << 4 | digits[1::2]).view(">u8").reshape(-1, 2).astype(np.uint64)
    return both[:, 0].copy(), both[:, 1].copy()


def _is_id(text: object) -> bool:
    return isinstance(text, str) and len(text) == 32 and all(c in "0123456789abcdef" for c in text)


def id_text(hi: int, lo: int) -> str:
    return f"{int(hi):016x}{int(lo):016x}"


def id_texts(hi: NDArray[np.uint64], lo: NDArray[np.uint64]) -> list[str]:
    """Return document ids as 32 hex digits, given their high and low 64 bits."""
    both = np.empty((len(hi), 2), ">u8")
    both[:, 0], both[:, 1] = hi, lo
    digits = both.tobytes().hex()
    return [digits[i:i + 32] for i in range(0, len(digits), 32)]


def fixed_bytes(column: pa.ChunkedArray) -> tuple[NDArray[np.bool_], NDArray[np.uint8]]:
    """Return (which values of a binary column are neither null nor empty, as a mask; these values as uint8[values,
    width]). All values that are not empty must have the same length, `width`."""
    masks, blocks = [], []
    for chunk in column.chunks:
        present = pc.fill_null(pc.greater(pc.binary_length(chunk), 0), False)
        masks.append(present.to_numpy(zero_copy_only=False))
        values = chunk.filter(present)
        if len(values):
            data = b"".join(values.to_pylist())
            blocks.append(np.frombuffer(data, np.uint8).reshape(len(values), -1))
    mask = np.concatenate(masks) if masks else np.zeros(0, bool)
    return mask, np.concatenate(blocks) if blocks else np.zeros((0, 0), np.uint8)


def read_side(path: str, columns: list[str], rows: NDArray[Any] | None = None) -> pa.Table:
    """Read columns of a side table (a table that a stage wrote beside the documents of a part). `rows` (sorted, unique)
    holds the numbers of the documents whose rows are read; each of them must be in the table. Without `rows`, all rows
    are read."""
    table = read_table(path, columns=["row", *columns])
    if rows is None:
        return table
    stored = table["row"].to_numpy()
    positions = np.searchsorted(stored, rows)
    if len(rows) and (positions[-1] >= len(stored) or not np.array_equal(stored[positions], rows)):
        raise ValueError("a side table does not hold the rows its part was deduplicated by: the store is damaged")
    return table.take(pa.array(positions))


# -- records sorted by hash ------------------------------------------------------------------------------------------
def runs(sorted_rows: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Find the runs of equal hashes (fields `hi` and `lo`) in rows that are sorted by hash. Returns (the start of each
    run, the length of each run)."""
    if not len(sorted_rows):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    hi, lo = sorted_rows["hi"], sorted_rows["lo"]
    starts = np.flatnonzero(np.r_[True, (hi[1:] != hi[:-1]) | (lo[1:] != lo[:-1])])
    return starts, np.diff(np.r_[starts, len(hi)])


def no_twins(rows: NDArray[Any], *fields: str) -> None:
    """Raise DuplicateId if two rows have the same hash, the same document id, and the same values of `fields`. The rows
    must be sorted by hash, id and `fields`."""
    equal = np.ones(max(len(rows) - 1, 0), bool)
    for field in ("hi", "lo", "id_hi", "id_lo", *fields):
        equal &= rows[field][1:] == rows[field][:-1]
    if len(twins := np.flatnonzero(equal)):
        raise DuplicateId(id_text(rows["id_hi"][twins[0]], rows["id_lo"][twins[0]]))


def joined(rows: NDArray[Any]) -> NDArray[np.bytes_]:
    """Return each 128-bit hash (fields `hi` and `lo` of the rows) as one value of 16 bytes, big-endian."""
    both = np.empty((len(rows), 2), ">u8")
    both[:, 0], both[:, 1] = rows["hi"], rows["lo"]
    return both.view("S16").ravel()


# -- removal slices --------------------------------------------------------------------------------------------------
def most_similar(documents: NDArray[Any], near: NDArray[Any]) -> NDArray[np.int64]:
    """Choose the NEAR records that are written about each document: those of the _MOST_NEAR most similar other
    documents. Of equally similar ones, those with the smallest ids are chosen. documents[n] is the document that record
    near[n] is about. Returns the numbers of the chosen records, sorted by document, then from the most to the least
    similar."""
    order = np.lexsort((near["id_lo"], near["id_hi"], -near["similarity"], documents))
    starts = np.searchsorted(documents[order], documents[order])              # where the records of its document begin
    return order[np.arange(len(order)) - starts < _MOST_NEAR]


def slice_table(rows: NDArray[Any], removed: NDArray[np.bool_], reason: str | Sequence[str],
                verdicts: NDArray[Any], near: NDArray[Any] | None = None) -> pa.Table:
    """Return the removal slice (with SLICE_SCHEMA) of one part, from the verdicts on its documents.

    Each document has an entry in three arrays, which are sorted by row: `rows` (its row), `removed` (whether it is
    dropped) and `verdicts` (its VERDICT record). `reason` is one text for all documents, or a list with one for each.
    `near` holds the part's NEAR records, each of which names a kept document that resembles a document of the part. The
    slice names the most similar of these for each document.
    """
    beside: dict[int, list[dict[str, Any]]] = {}
    if near is not None and len(near):
        near = near[most_similar(near["row"], near)]
        resembled = zip(near["row"].tolist(), id_texts(near["id_hi"], near["id_lo"]), near["similarity"].tolist())
        for row, id, similar in resembled:
            beside.setdefault(row, []).append({"id": id, "similarity": similar})
    reasons = [reason] * len(rows) if isinstance(reason, str) else list(reason)
    similarity = verdicts["similarity"]
    return pa.table({
        "row": pa.array(rows, pa.uint32()),
        "reason": pa.array([text if dropped else "" for text, dropped in zip(reasons, removed)], pa.string()),
        "kept": pa.array(id_texts(verdicts["kept_hi"], verdicts["kept_lo"]), pa.string(), mask=~removed),
        "similarity": pa.array(similarity, pa.float64(), mask=np.isnan(similarity) | ~removed),
        "cluster": pa.array(id_texts(verdicts["cluster_hi"], verdicts["cluster_lo"]), pa.string()),
        "near": pa.array([beside.get(row) for row in rows.tolist()], pa.list_(NEAR_DUPLICATE)),
    }, schema=SLICE_SCHEMA)


def slices_of(all_groups: Sequence[PartGroup], results: Sequence[TaskResult],
              kind: str = "slice") -> Iterator[FileRef | None]:
    """Yield, for every part (file of documents) of the groups in order, a reference to the part's removal slice (the
    list of rows to drop), or None if the part has none. `results` holds for each group the result of the task that
    wrote the slices of its parts. If `results` is empty, no part has a slice. If `kind` is "counts", the references are
    to the parts' files of counts (`stages.dedup.counts`) instead."""
    for number, group in enumerate(all_groups):
        files: Mapping[str, FileRef] = results[number].files if results else {}
        for i in range(group.size):
            yield files.get(f"{kind}.{i}.parquet")


def files_of(results: Iterable[TaskResult], name: str) -> list[FileRef]:
    """Return, for each of the task results, its file called `name`."""
    return [r.files[name] for r in results]


def by_part(records: NDArray[Any]) -> Iterator[tuple[int, NDArray[Any]]]:
    """Divide records by part (file of documents). A record has the fields `part` (number of the part) and `row`. Yields
    (number of the part, its records, sorted by row) for each part that has records."""
    ordered = records[np.lexsort((records["row"], records["part"]))]
    edges = np.flatnonzero(np.diff(ordered["part"])) + 1
    for piece in np.split(ordered, edges):
        if len(piece):
            yield int(piece["part"][0]), piece
