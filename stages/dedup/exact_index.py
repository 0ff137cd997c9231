"""Tasks by which `exact` makes an index of the documents that it keeps, and compares documents with indexes
(`stages.dedup.index`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from stages.dedup.fragment import bucket_of, id_text, runs
from stages.dedup.hashed import hashed_dtype
from stages.dedup.index import HASH, found
from stages.dedup.survivor import in_order, preference
from stages.document import DuplicateId
from stages.task import Counters, Cursor, Inputs, Out

if TYPE_CHECKING:
    from numpy.typing import NDArray


class ExactLookup:
    """Task that looks the hashes of one range up in the indexes of old documents.

    Arguments: `maps` (references to the files `hashes.seg` of the new documents), `bucket` (number of the range),
    `ranges`, `indexes` (for each index its files of keys of the compared property), `prefer`.

    The task writes the exchange file `hashes.seg`, whose only records are in the bucket of the range. For each hash
    that an old document has, it has a HASHED record that names the old document. The first index that has a hash
    decides. `ExactReduce` reads the file as if it came from a group of documents of the first priority.
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
                    at, old = found(inputs, keys, wanted)
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
    """Raise DuplicateId if a new document is one of the old ones."""
    alike = new[np.isin(new["id_hi"], old["id_hi"])]
    twice = set(alike[["id_hi", "id_lo"]].tolist()).intersection(old[["id_hi", "id_lo"]].tolist())
    if twice:
        raise DuplicateId(id_text(*min(twice)))


class ExactIndex:
    """Task that writes the hashes of one range, and the document that stays for each, into one file of an index.

    Arguments: `maps` and `old` (references to the files `hashes.seg` of the documents and, if there are any, of old
    documents, which are left out), `ranks` (the priority of each file), `bucket` (number of the range), `ranges`,
    `buckets` (number of buckets of the file), `prefer`. The task writes the exchange file `keys.seg` (HASH records).
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
