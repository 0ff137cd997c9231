"""Tasks by which `exact` makes an index of the documents that it keeps, and compares new documents with the indexes of
earlier runs (`stages.dedup.index`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from stages.barrier import Done, FileRef, TaskDraft, Wave
from stages.dedup.fragment import bucket_of, files_of, id_text, runs
from stages.dedup.hashed import hashed_dtype
from stages.dedup.index import HASH, OLD, DedupIndex, look_up
from stages.dedup.survivor import in_order, preference
from stages.document import DuplicateId
from stages.task import Counters, Cursor, Inputs, Out

if TYPE_CHECKING:
    from numpy.typing import NDArray


def lookup_wave(column: str, against: Sequence[DedupIndex], ranges: int, prefer: Sequence[str]) -> Wave:
    """Return the wave (a group of tasks that may run at the same time) that looks up the hashes of new documents in the
    indexes `against`. `column` names the property that is hashed, and `ranges` is the number of ranges of hashes."""
    def tasks(done: Done) -> Iterator[TaskDraft]:
        maps = files_of(done[f"{column}_map"], "hashes.seg")
        args = {"maps": maps, "ranges": ranges, "indexes": [index.keys[column] for index in against], "prefer": prefer}
        for b in range(ranges if maps else 0):
            yield TaskDraft("stages.dedup.exact_index:ExactLookup", {**args, "bucket": b},
                            sum(ref["bytes"] for ref in maps) // ranges, f"old {column} hashes, range {b + 1}/{ranges}",
                            900)

    return Wave(f"{column}_lookup", tasks)


def old_hashes(done: Done, column: str, bucket: int) -> list[FileRef]:
    """Return [reference to the file that names the old documents with hashes of one range], or [] if there are no
    indexes. `bucket` is the number of the range."""
    lookups = done.get(f"{column}_lookup", ())
    return files_of(lookups[bucket:bucket + 1], "hashes.seg")


def index_wave(column: str, done: Done, ranks: Sequence[int], ranges: int, buckets: int, prefer: Sequence[str]) -> Wave:
    """Return the wave (a group of tasks that may run at the same time) that writes the files of an index for the
    property `column`. `done` holds the results of the deduplication, `ranks` the priority of each of its groups, and
    `buckets` the number of buckets of a file."""
    def tasks(_: Done) -> Iterator[TaskDraft]:
        maps = files_of(done[f"{column}_map"], "hashes.seg")
        args = {"maps": maps, "ranks": [*ranks, OLD], "ranges": ranges, "buckets": buckets, "prefer": prefer}
        for b in range(ranges if maps else 0):
            yield TaskDraft("stages.dedup.exact_index:ExactIndex",
                            {**args, "bucket": b, "old": old_hashes(done, column, b)},
                            sum(ref["bytes"] for ref in maps) // ranges,
                            f"index of {column} hashes, range {b + 1}/{ranges}", 900)

    return Wave(f"{column}_index", tasks)


class ExactLookup:
    """Task that looks up hashes of new documents in the indexes of old documents. It handles one range of hashes.

    Arguments: `maps` (references to the files `hashes.seg` of the new documents), `bucket` (number of the range),
    `ranges` (number of ranges of hashes), `indexes` (for each index its files of keys of the compared property),
    `prefer` (which of several documents stays; it decides which fields HASHED records have).

    The task writes the exchange file `hashes.seg`. The file has a bucket for each range, and only the bucket of this
    task's range has records. For each hash of the new documents that an index has, a HASHED record names the old
    document. If several indexes have the hash, the first of them decides. `ExactReduce` reads the file as if it were
    the file of one more group of documents, which comes before all others in priority. So the old document stays.
    """

    name = "exact_lookup"
    version = 1

    @staticmethod
    def run(inputs: Inputs, cursor: Cursor, out: Out) -> Counters:
        args = inputs.args
        hits = 0
        dtype = hashed_dtype(args["prefer"])
        with out.segments("hashes.seg", dtype, args["ranges"], key=("hi", "lo")) as writer:
            for block in inputs.segments(args["maps"], args["bucket"], whole=("hi", "lo")):
                starts, _ = runs(block)
                wanted = block[starts]
                for keys in args["indexes"]:
                    at, old = look_up(inputs, keys, wanted)
                    _check_ids(block, old)
                    records = np.zeros(len(old), dtype)
                    for field in HASH.names or ():
                        records[field] = old[field]
                    records["n"] = 1
                    writer.write(np.full(len(records), args["bucket"]), records)
                    hits += len(records)
                    wanted = np.delete(wanted, at)
        return {"hits": hits}


def _check_ids(new: NDArray[Any], old: NDArray[Any]) -> None:
    """Raise DuplicateId if one of the new documents has the same id as one of the old ones."""
    alike = new[np.isin(new["id_hi"], old["id_hi"])]
    twice = set(alike[["id_hi", "id_lo"]].tolist()).intersection(old[["id_hi", "id_lo"]].tolist())
    if twice:
        raise DuplicateId(id_text(*min(twice)))


class ExactIndex:
    """Task that writes the hashes of one range into one file of an index. Each hash comes with the document that stays
    for it, that is, the preferred one of all documents that have the hash.

    Arguments: `maps` (references to the files `hashes.seg` of the documents), `old` (reference to the file `hashes.seg`
    of old documents, if there are any; their hashes are left out of the index), `ranks` (the priority of each of these
    files), `bucket` (number of the range), `ranges` (number of ranges), `buckets` (number of buckets of the file that
    is written), `prefer` (which of several documents stays). The task writes the exchange file `keys.seg` (HASH
    records).
    """

    name = "exact_index"
    version = 1

    @staticmethod
    def run(inputs: Inputs, cursor: Cursor, out: Out) -> Counters:
        args = inputs.args
        ranks, total = np.asarray(args["ranks"], np.int64), 0
        with out.segments("keys.seg", HASH, args["buckets"], key=("hi", "lo")) as writer:
            for block in inputs.segments([*args["maps"], *args["old"]], args["bucket"], whole=("hi", "lo"),
                                         numbered=True):
                order = in_order((block["hi"], block["lo"]),
                                 preference(block, ranks[block["source"]], args["prefer"]))
                block = block[order]
                stay = block[runs(block)[0]]
                stay = stay[stay["source"] < len(args["maps"])]
                records = np.empty(len(stay), HASH)
                for field in HASH.names or ():
                    records[field] = stay[field]
                place = bucket_of(records["hi"], args["ranges"] * args["buckets"])
                writer.write(place - args["bucket"] * args["buckets"], records)
                total += len(records)
        return {"keys": total}
