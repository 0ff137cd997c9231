"""Counts how many documents each kept document stands for: the signal `dup_count`.

A document without duplicates has the count 1. When a barrier (`exact`, `minhash`) removes a document in favour of
another, the count of the removed document is added to that of the kept one. Counts therefore add up over barriers: the
count of a document that `minhash` keeps includes the exact copies of each near-duplicate that `minhash` removed.

Counts are stored in files of their own, apart from the removal slices (the lists of rows that a barrier drops). When
only a count changes, the slices stay the same, and tasks that read only slices need not run again. Waves of tasks
compute the counts after the barrier's own waves (the tasks of a wave may run at the same time). A part is a file of
documents. Each entry below names a wave, what one of its tasks reads, and what the task writes.

    documents  a group of parts   → a record for each document, by its id, and for each removed document a record that
                                    adds its count to the document that was kept instead
    sums       a range of ids     → what is added to the count of each document
    counts     a group of parts   → `counts.PART.parquet`: for each row, how many further documents it stands for

A document that was kept instead of another may itself be removed, for another property that `exact` compares. What was
added to its count then goes on to the document that was kept instead of it, in a further wave of sums.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.base.parquet import open_parquet, read_table, write_table
from stages.barrier import COUNT, Done, FileRef, PartRef, TaskDraft, Wave, WaveTasks
from stages.dedup.fragment import (
    ID,
    SIZES,
    Sizes,
    bucket_of,
    by_part,
    files_of,
    groups,
    ids_to_ints,
    read_segments,
    read_side,
    write_segments,
)
from stages.dedup.hashing import mix
from stages.task import Counters, Cursor, Inputs, Out

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: With n = 0: a document (its id, part and row), and if it was removed, the id of the document that was kept instead.
#: With n > 0: n is to be added to the count of the document with this id.
COUNTED = np.dtype([*ID, ("kept_hi", "<u8"), ("kept_lo", "<u8"), ("part", "<u4"), ("row", "<u4"), ("removed", "<u4"),
                    ("n", "<u8")])
#: a number to add to the count of a kept document (given by its part and row within its group)
ADDED = np.dtype([("part", "<u4"), ("row", "<u4"), ("n", "<u8")])
_KEY = ("id_hi", "id_lo")


def count_waves(parts: Sequence[PartRef], slices: Sequence[FileRef | None], stored: bool, rounds: int,
                sizes: Sizes = SIZES) -> list[Wave]:
    """Return the waves (groups of tasks that may run at the same time) that count how many documents each document of a
    barrier's input stands for.

    `slices` are the removal slices (rows to drop) of the parts. `stored` says whether the documents may have a
    `dup_count` from an earlier pass. `rounds` says how many removals may follow each other (`Barrier.rounds`).
    """
    plan = groups(parts, sizes)
    buckets = sizes.buckets(sum(group.rows for group in plan) * COUNTED.itemsize, len(plan))
    removes = any(ref is not None for ref in slices)

    def documents(done: Done) -> Iterator[TaskDraft]:
        for group in plan if removes else ():
            removals = slices[group.first:group.first + group.size]
            refs = [{"side": part.side, "removed": removed, "counts": part.counts,
                     "text": part.text if stored else None}
                    for part, removed in zip(group.parts, removals, strict=True)]
            yield TaskDraft("stages.dedup.counts:CountDocuments", {"parts": refs, "buckets": buckets},
                            sum(part.side["bytes"] for part in group.parts if part.side is not None),
                            f"{group.dataset}: documents of {group.size} parts", 500 + group.rows * 200 // 2**20)

    def sums(number: int) -> WaveTasks:
        def tasks(done: Done) -> Iterator[TaskDraft]:
            before = done[f"sums_{number - 1}" if number else "documents"]
            if any(result.counters["owed"] for result in before):
                listed, owed = files_of(done["documents"], "documents.seg"), files_of(before, "owed.seg")
                size = sum(ref["bytes"] for ref in [*listed, *owed]) // buckets
                for b in range(buckets):
                    yield TaskDraft("stages.dedup.counts:CountSums",
                                    {"documents": listed, "owed": owed, "bucket": b, "buckets": buckets}, size,
                                    f"counts, range {b + 1}/{buckets}", 900)
        return tasks

    def counts(done: Done) -> Iterator[TaskDraft]:
        if rounds and any(result.counters["owed"] for result in done[f"sums_{rounds - 1}"]):
            raise ValueError(f"a barrier's removals follow each other more than {rounds} times: `rounds` is too small")
        added = [ref for number in range(rounds) for ref in files_of(done[f"sums_{number}"], "added.seg")]
        for number, group in enumerate(plan):
            before = [part.counts for part in group.parts]
            if added or any(ref is not None for ref in before):
                yield TaskDraft("stages.dedup.counts:CountSlices", {"added": added, "group": number, "before": before},
                                1 << 20, f"{group.dataset}: counts of {group.size} parts")

    return [Wave("documents", documents), *[Wave(f"sums_{number}", sums(number)) for number in range(rounds)],
            Wave("counts", counts)]


class CountDocuments:
    """Task that lists the documents of one group of parts (files of documents) by id, and the counts that removed
    documents pass on to kept ones.

    Arguments: `buckets` (number of ranges of ids) and `parts`, which has references to the files of each part: `side`
    (its side table), `removed` (its removal slice), `counts` (its counts from earlier barriers) and `text` (its
    documents, needed only if they may have the signal `dup_count`). All but `side` may be null.

    The task writes two exchange files of COUNTED records. `documents.seg` has one record for each document. `owed.seg`
    has one for each removed document, with its count and the id of the document that was kept instead.
    """

    name = "count_documents"
    version = 1

    @staticmethod
    def run(inputs: Inputs, cursor: Cursor, out: Out) -> Counters:
        buckets = inputs.args["buckets"]
        documents, owed = [np.zeros(0, COUNTED)], [np.zeros(0, COUNTED)]
        for part, refs in enumerate(inputs.args["parts"]):
            side = read_side(inputs.fetch(refs["side"]), ["id"])
            rows = side["row"].to_numpy()
            records = np.zeros(len(rows), COUNTED)
            records["id_hi"], records["id_lo"] = ids_to_ints(side["id"])
            records["part"], records["row"] = part, rows
            documents.append(records)
            if refs["removed"] is None:
                continue
            removed = read_table(inputs.fetch(refs["removed"]), columns=["row", "reason", "kept"])
            removed = removed.filter(pc.and_(pc.not_equal(removed["reason"], ""), pc.is_valid(removed["kept"])))
            losers = np.searchsorted(rows, removed["row"].to_numpy())
            records["removed"][losers] = 1
            records["kept_hi"][losers], records["kept_lo"][losers] = ids_to_ints(removed["kept"])
            debts = np.zeros(len(losers), COUNTED)
            debts["id_hi"], debts["id_lo"] = records["kept_hi"][losers], records["kept_lo"][losers]
            debts["n"] = _counts_of(inputs, refs, rows)[losers]
            owed.append(debts)
        for name, blocks in (("documents.seg", documents), ("owed.seg", owed)):
            _write(out, name, np.concatenate(blocks), buckets)
        return {"documents": sum(map(len, documents)), "owed": sum(map(len, owed))}


class CountSums:
    """Task that adds up, for the documents of one range of ids, the counts of the documents that were removed in their
    favour.

    Arguments: `documents` and `owed` (references to files of COUNTED records; `documents` has one file per group of
    parts), `bucket` (number of the range), `buckets`. The task writes the sums of kept documents to `added.seg` (ADDED
    records, in buckets by number of the group). It writes the sum of a removed document to `owed.seg`, under the id of
    the document that was kept instead. Sums for ids that are not among the documents (those of old documents of an
    index) are left out. The task holds one block of records in memory at a time.
    """

    name = "count_sums"
    version = 1

    @staticmethod
    def run(inputs: Inputs, cursor: Cursor, out: Out) -> Counters:
        args = inputs.args
        passed_on, added = [np.zeros(0, COUNTED)], 0
        with out.segments("added.seg", ADDED, len(args["documents"])) as writer:
            for block in inputs.segments([*args["documents"], *args["owed"]], args["bucket"], whole=_KEY,
                                         numbered=True):
                block = block[np.lexsort((block["n"], block["id_lo"], block["id_hi"]))]      # n is 0 in documents
                starts = np.flatnonzero(np.r_[True, (block["id_hi"][1:] != block["id_hi"][:-1])
                                              | (block["id_lo"][1:] != block["id_lo"][:-1])])
                sums, first = np.add.reduceat(block["n"], starts), block[starts]
                gets = (sums > 0) & (first["n"] == 0)
                stays, goes = gets & (first["removed"] == 0), gets & (first["removed"] > 0)
                records = np.zeros(int(stays.sum()), ADDED)
                records["part"], records["row"], records["n"] = first["part"][stays], first["row"][stays], sums[stays]
                writer.write(first["source"][stays], records)
                added += len(records)
                debts = np.zeros(int(goes.sum()), COUNTED)
                debts["id_hi"], debts["id_lo"] = first["kept_hi"][goes], first["kept_lo"][goes]
                debts["n"] = sums[goes]
                passed_on.append(debts)
        _write(out, "owed.seg", np.concatenate(passed_on), args["buckets"])
        return {"added": added, "owed": sum(map(len, passed_on))}


class CountSlices:
    """Task that writes the counts of the documents of one group of parts (files of documents).

    Arguments: `added` (references to the files `added.seg`), `group` (number of the group, and of its bucket in these
    files), `before` (for each part its counts from earlier barriers, or null). The task writes `counts.PART.parquet`
    for every part with documents that stand for others. The column `row` names such a document, and `more` says for how
    many others it stands.
    """

    name = "count_slices"
    version = 1

    @staticmethod
    def run(inputs: Inputs, cursor: Cursor, out: Out) -> Counters:
        args = inputs.args
        added = dict(by_part(np.concatenate([np.zeros(0, ADDED),
                                             *read_segments(inputs, args["added"], args["group"], ADDED)])))
        for part, before in enumerate(args["before"]):
            rows, more = _read_counts(inputs, before)
            if part in added:
                rows, more = np.r_[rows, added[part]["row"]], np.r_[more, added[part]["n"]]
            unique, place = np.unique(rows, return_inverse=True)
            sums = np.zeros(len(unique), np.uint64)
            np.add.at(sums, place, more)
            if len(unique):
                name = f"counts.{part}.parquet"
                write_table(pa.table({"row": pa.array(unique, pa.uint32()), "more": pa.array(sums, pa.uint64())}),
                            out.path(name), write_statistics=False)
                content = hashlib.sha256(unique.astype("<u4").tobytes() + sums.astype("<u8").tobytes()).hexdigest()
                out.note(name, rows=len(unique), content=content)
        return {"documents": sum(map(len, added.values()))}


def _write(out: Out, name: str, records: NDArray[Any], buckets: int) -> None:
    """Write COUNTED records as an exchange file (by which a task passes records to later ones), in buckets by document
    id."""
    write_segments(out, name, records, bucket_of(mix(records["id_hi"]), buckets), buckets, _KEY)


def _read_counts(inputs: Inputs, ref: FileRef | None) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the columns `row` and `more` of the file of counts of a part. `more` says for how many further documents
    the document in `row` stands. If the part has no such file (`ref` is None), both columns are empty."""
    if ref is None:
        return np.zeros(0, np.uint32), np.zeros(0, np.uint64)
    table = read_table(inputs.fetch(ref))
    return table["row"].to_numpy(), table["more"].to_numpy()


def _counts_of(inputs: Inputs, refs: dict[str, Any], rows: NDArray[Any]) -> NDArray[np.uint64]:
    """Return the count that each document of a part had before the barrier: the number of documents for which it
    stands, itself included. `rows` holds the rows of the documents in the part, and `refs` the references to the part's
    files."""
    counts = np.ones(len(rows), np.uint64)
    if refs["text"] is not None:
        with open_parquet(inputs.fetch(refs["text"])) as file:
            signals = file.schema_arrow.field("signals").type
            if signals.get_field_index(COUNT) >= 0:
                stored = pc.struct_field(file.read(columns=[f"signals.{COUNT}"])["signals"], COUNT)
                counts = pc.fill_null(stored, 1).to_numpy().astype(np.uint64)[rows]
    counted, more = _read_counts(inputs, refs["counts"])
    left = np.isin(counted, rows)                    # the others were removed between the barriers
    counts[np.searchsorted(rows, counted[left])] += more[left]
    return counts
