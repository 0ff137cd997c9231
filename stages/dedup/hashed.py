"""The records by which `exact` compares documents: the hashes of side tables, the best document of each hash, and the
documents that are removed in favour of another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from stages.barrier import FileRef
from stages.dedup.fragment import fixed_bytes, ids_to_ints, joined, no_twins, read_segments, read_side, runs
from stages.dedup.survivor import in_order, order_field, preference, stored
from stages.task import Inputs

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: a hash in one group: the best document that has it (id, characters; with the numbers of `survivor.order_field`, if
#: `prefer` needs any), and the number of documents that have it
HASHED = np.dtype([("hi", "<u8"), ("lo", "<u8"), ("id_hi", "<u8"), ("id_lo", "<u8"), ("chars", "<u4"), ("n", "<u4")])
#: the document that survives for a hash that occurs more than once
SURVIVOR = np.dtype([("hi", "<u8"), ("lo", "<u8"), ("id_hi", "<u8"), ("id_lo", "<u8")])


def hashed_dtype(prefer: Sequence[str]) -> np.dtype[Any]:
    """Return the dtype of HASHED records. If the preferences `prefer` compare dates or signals, the records have the
    field `order`, which holds a number for each of these preferences (`stages.dedup.survivor`)."""
    return np.dtype([*HASHED.descr, *order_field(prefer)])


def rows_of(inputs: Inputs, sides: list[FileRef], columns: list[str],
          prefer: Sequence[str] = ()) -> Iterator[dict[str, NDArray[Any]]]:
    """Yield a dict for each part (file of documents): {column: records}. A column holds the hashes of one property,
    such as the URL, and there is a record for each document with a hash. A record has the fields of `hashed_dtype`, and
    the document's `part` and `row`. `sides` refers to the side tables, which hold the hashes."""
    dtype = np.dtype([("part", "<u4"), ("row", "<u4"), *hashed_dtype(prefer).descr])
    for part, ref in enumerate(sides):
        table = read_side(inputs.fetch(ref), ["id", "chars", *columns, *(["order"] if stored(prefer) else [])])
        id_hi, id_lo = ids_to_ints(table["id"])
        by_column = {}
        for column in columns:
            present, raw = fixed_bytes(table[column])
            records = np.zeros(len(raw), dtype)
            hashes = raw.reshape(-1, 16).view(">u8")
            records["part"], records["row"], records["n"] = part, table["row"].to_numpy()[present], 1
            records["hi"], records["lo"] = hashes[:, 0], hashes[:, 1]
            records["id_hi"], records["id_lo"] = id_hi[present], id_lo[present]
            records["chars"] = table["chars"].to_numpy()[present]
            if stored(prefer) and len(raw):
                records["order"] = fixed_bytes(table["order"])[1].view("<u8")[present]
            by_column[column] = records
        yield by_column


def place_of(rows: NDArray[Any]) -> NDArray[np.uint64]:
    return rows["part"].astype(np.uint64) << np.uint64(32) | rows["row"].astype(np.uint64)


def best(rows: NDArray[Any], prefer: Sequence[str]) -> NDArray[Any]:
    """Return one HASHED record for each hash that occurs in `rows`, in ascending order of hash. The record names the
    document that is preferred among those with this hash, and says how many documents have the hash. All rows must have
    the same priority."""
    rows = rows[in_order((rows["hi"], rows["lo"]), preference(rows, 0, prefer))]
    no_twins(rows)
    starts, sizes = runs(rows)
    records = np.empty(len(starts), hashed_dtype(prefer))
    for field in records.dtype.names or ():
        records[field] = rows[field][starts]
    records["n"] = sizes
    return records


def losers_of(inputs: Inputs, refs: list[FileRef],
            group: int) -> Callable[[NDArray[Any]], tuple[NDArray[Any], NDArray[Any]]]:
    """Return a function that finds the documents to be removed in favour of a survivor.

    A survivor is the document that is kept for a hash. All hashes are of one property, such as the text or the URL.
    `refs` are the files of the survivors; each file has a bucket for every group of parts (files of documents), and the
    bucket number `group` is read. The returned function takes rows of documents of this group. It returns (the rows to
    be removed, the SURVIVOR record of the document that stays for each of them).
    """
    segments = read_segments(inputs, refs, group, SURVIVOR)
    survivors = np.concatenate(segments) if segments else np.zeros(0, SURVIVOR)
    survivors = survivors[np.lexsort((survivors["lo"], survivors["hi"]))]
    hashes = joined(survivors)

    def losers(rows: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        if not len(survivors) or not len(rows):
            return rows[:0], survivors[:0]
        row_hashes = joined(rows)
        places = np.minimum(np.searchsorted(hashes, row_hashes), len(hashes) - 1)
        winners = survivors[places]
        other = (winners["id_hi"] != rows["id_hi"]) | (winners["id_lo"] != rows["id_lo"])
        replaced = (hashes[places] == row_hashes) & other
        return rows[replaced], winners[replaced]

    return losers
