"""Removes exact duplicates, by text, URL or metadata: the recipe step `exact`.

    - exact                                    # the same text
    - {exact: {by: both}}                      # first one document per URL, then one document per text
    - {exact: {by: [meta.doi, no-space]}}      # first one per DOI, then one per text without its white space

Of equal documents, one stays: the one that the setting `prefer` puts first (`stages.dedup.survivor`). By default this
is the document from the first dataset in `priority:`. If that dataset has several of the equal documents, the longest
of them stays, and of equally long ones the one with the smallest id.

A part is a file of documents. An earlier pass has stored the hashes of a part's documents in a side table beside the
part (`stages.dedup.exact_hash`). Tasks then work in three waves; the tasks of a wave may run at the same time. If
documents are compared by several properties, the first two waves run for each property in turn. Each entry below names
a wave, what one of its tasks reads, and what the task writes.

    map     a group of parts     → one record per hash: the group's best document with that hash
    reduce  a range of hashes    → survivors: the document that stays for each hash that occurs more than once, sent to
                                   the groups that have such documents
    slices  survivors by group   → a removal slice (list of rows to drop) for each part that loses documents

A hash that a million documents share costs only one record per group of parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from pydantic import field_validator, model_validator

from pipeline.base.errors import TokenmillError
from stages.barrier import COUNT, Done, FileRef, PartRef, TaskDraft, TaskResult, Wave, WaveTasks, write_slice
from stages.dedup.exact_hash import ExactConfig
from stages.dedup.exact_index import index_wave, lookup_wave, old_hashes
from stages.dedup.fragment import (
    SIZES,
    VERDICT,
    PartGroup,
    bucket_of,
    files_of,
    groups,
    no_twins,
    runs,
    slice_table,
    slices_of,
    write_segments,
)
from stages.dedup.hashed import SURVIVOR, best, hashed_dtype, losers_of, place_of, rows_of
from stages.dedup.index import (
    HASH,
    OLD,
    DedupIndex,
    IndexedBarrier,
    against_setting,
    as_list,
    check_preference,
    fine_buckets,
    key_files,
)
from stages.dedup.survivor import in_order, preference, signals
from stages.stage import keyed_settings
from stages.task import Counters, Cursor, Inputs, Out


class NoSuchMetadata(TokenmillError):
    """Raised when the step `exact` is to compare documents by a key of their metadata, and no document has a value
    under that key."""


def reason(column: str) -> str:
    """Return the reason under which a document is dropped that equals a kept one in the property `column`."""
    return "exact_meta" if column.startswith("meta.") else f"exact_{column.replace('-', '_')}"


class Exact(IndexedBarrier):
    """Remove documents whose text, URL or metadata equals that of another document, which is kept.

    `by` names what must be equal: `text` (but for white space and case), `bytes` (the text byte for byte), `no-space`
    (the text without white space, but for case), `url`, or `meta.KEY`, a value of the documents' metadata. With a list
    of properties, documents are compared by the first property, and the remaining documents by the next.

    Of equal documents, the one from the first dataset in `priority:` is kept. If that dataset has several of them, the
    longest is kept, and of equally long ones the one with the smallest id. The setting `prefer` replaces this order of
    preference.

    With `by: both`, documents are first compared by URL, and those that remain are then compared by text. If a URL has
    several texts, the text of the document that is kept for the URL therefore always survives, in that document or in
    one with an equal text. If texts were compared first, that text could be lost.
    """

    name = "exact"
    version = 1
    cost_ms, leaves = 0.02, 0.95
    signals = (COUNT,)
    sizes = SIZES

    class Config(ExactConfig):
        against: tuple[str, ...] = against_setting()

        _listed = field_validator("against", mode="before")(as_list)

        @model_validator(mode="after")
        def _old_documents_stay(self) -> Exact.Config:
            check_preference(self.against, self.prefer)
            return self

    def reads(self) -> dict[str, str]:
        return dict.fromkeys(signals(self.config.prefer), "prefer")

    @property
    def rounds(self) -> int:
        return len(self.config.columns)       # a document that is kept for one property may be removed for the next

    def prepare(self) -> tuple[str, dict[str, Any]]:
        return "stages.dedup.exact_hash:ExactHash", {name: value for name, value in keyed_settings(self.config).items()
                                                if name in ExactConfig.model_fields}

    def _ranges(self, plan: Sequence[PartGroup]) -> int:
        """Return the number of ranges into which the hashes of documents are divided. One task compares the hashes of
        one range."""
        size = hashed_dtype(self.config.prefer).itemsize
        return self.sizes.buckets(sum(group.rows for group in plan) * size, len(plan))

    def waves(self, parts: Sequence[PartRef], against: Sequence[DedupIndex] = ()) -> list[Wave]:
        plan = groups(parts, self.sizes)
        columns, prefer = self.config.columns, list(self.config.prefer)
        ranges = self._ranges(plan)
        for group in plan:
            group.sides(self.name)                        # a part without a side table is refused before anything runs

        def survivors(done: Done, column: str) -> list[FileRef]:
            """Return references to the files of survivors for the property `column`. These files say which document is
            kept for each hash that several documents have. The list is empty until the tasks that write these files
            have run."""
            return files_of(done.get(f"{column}_reduce", ()), "survivors.seg")

        def mapper(column: str, before: Sequence[str]) -> WaveTasks:
            def tasks(done: Done) -> Iterator[TaskDraft]:
                gone = {earlier: survivors(done, earlier) for earlier in before}
                for number, group in enumerate(plan):
                    side = group.sides(self.name)
                    yield TaskDraft("stages.dedup.exact:ExactMap",
                                    {"sides": side, "column": column, "buckets": ranges, "gone": gone,
                                     "group": number if gone else 0, "prefer": prefer},
                                    sum(s["bytes"] for s in side),
                                    f"{group.dataset}: {column} hashes of {group.size} parts",
                                    500 + group.rows * 250 // 2**20)
            return tasks

        def reducer(column: str) -> WaveTasks:
            def tasks(done: Done) -> Iterator[TaskDraft]:
                self._check_documents(column, done[f"{column}_map"], plan)
                maps, ranks = files_of(done[f"{column}_map"], "hashes.seg"), [group.rank for group in plan]
                size = sum(m["bytes"] for m in maps) // ranges
                for b in range(ranges if plan else 0):
                    old = old_hashes(done, column, b)
                    args = {"maps": maps, "ranks": [*ranks, OLD], "old": old} if old else {"maps": maps, "ranks": ranks}
                    yield TaskDraft("stages.dedup.exact:ExactReduce", {**args, "bucket": b, "prefer": prefer}, size,
                                    f"equal {column} hashes, range {b + 1}/{ranges}", 900)
            return tasks

        def slices(done: Done) -> Iterator[TaskDraft]:
            by_column = {column: survivors(done, column) for column in columns}
            repeated = any(task.counters["repeated"] for column in by_column for task in done[f"{column}_reduce"])
            for number, group in enumerate(plan if repeated else ()):
                side = group.sides(self.name)
                yield TaskDraft("stages.dedup.exact:ExactSlices",
                                {"sides": side, "group": number, "dataset": group.dataset, "survivors": by_column},
                                sum(s["bytes"] for s in side), f"{group.dataset}: removals of {group.size} parts",
                                500 + group.rows * 250 // 2**20)

        waves = []
        for number, column in enumerate(columns):
            waves += [Wave(f"{column}_map", mapper(column, columns[:number])),
                      *([lookup_wave(column, against, ranges, prefer)] if against else []),
                      Wave(f"{column}_reduce", reducer(column))]
        return [*waves, Wave("slices", slices)]

    def index_waves(self, parts: Sequence[PartRef], slices: Sequence[FileRef | None], done: Done) -> list[Wave]:
        plan = groups(parts, self.sizes)
        ranks, ranges, buckets = [group.rank for group in plan], self._ranges(plan), self._buckets(plan)
        return [index_wave(column, done, ranks, ranges, buckets, list(self.config.prefer))
                for column in self.config.columns]

    def _buckets(self, plan: Sequence[PartGroup]) -> int:
        """Return the number of buckets in each file of the index that this step makes."""
        return fine_buckets(sum(group.rows for group in plan), HASH, self._ranges(plan))

    def index(self, parts: Sequence[PartRef], done: Done, ranks: int) -> DedupIndex:
        buckets = self._buckets(groups(parts, self.sizes))
        keys = {column: key_files(done[f"{column}_index"], buckets) for column in self.config.columns}
        first = done[f"{self.config.columns[0]}_index"]
        return DedupIndex(self.name, self.index_settings(), ranks, keys, [],
                          sum(task.counters["keys"] for task in first))

    @staticmethod
    def _check_documents(column: str, maps: Sequence[TaskResult], plan: Sequence[PartGroup]) -> None:
        """Raise NoSuchMetadata if `column` is a key of the metadata under which none of the documents has a value.
        Nothing is raised if there are no documents."""
        if column.startswith("meta.") and any(group.rows for group in plan) and not any(
                task.counters["hashed"] for task in maps):
            raise NoSuchMetadata(f"exact.by: no document of {', '.join(dict.fromkeys(g.dataset for g in plan))} has "
                                 f"{column}; name a key that their `meta` has")

    def slices(self, parts: Sequence[PartRef], results: Done) -> Iterable[FileRef | None]:
        return slices_of(groups(parts, self.sizes), results["slices"])


class ExactMap:
    """Task that chooses, in one group of parts (files of documents), the best document for each hash of a column. A
    column holds the hashes of one property, such as the text or the URL.

    Arguments: `sides` (references to the side tables of the group's parts, which hold the hashes), `column`, `buckets`
    (number of ranges of hashes), `prefer` (which document is best), `gone` ({column: references to the files of
    survivors of that column} for each column by which documents were compared before) and `group` (number of the
    group). Documents that an earlier column removes do not take part.

    The task writes the exchange file `hashes.seg` (HASHED records, in buckets by range of hashes). It counts the
    documents that have a hash (`hashed`), how many of these take part, and the different hashes.
    """

    name = "exact_map"
    version = 4

    @staticmethod
    def run(inputs: Inputs, cursor: Cursor, out: Out) -> Counters:
        args = inputs.args
        column, prefer = args["column"], args["prefer"]
        rows, hashed = [], 0
        deciders = {earlier: losers_of(inputs, refs, args["group"]) for earlier, refs in args["gone"].items()}
        for table in rows_of(inputs, args["sides"], [column, *deciders], prefer):
            hashed += len(table[column])
            decided = np.zeros(0, np.uint64)
            for earlier, losers in deciders.items():
                removed = losers(table[earlier][~np.isin(place_of(table[earlier]), decided)])[0]
                decided = np.concatenate([decided, place_of(removed)])
            rows.append(table[column][~np.isin(place_of(table[column]), decided)])
        records = best(np.concatenate(rows), prefer) if rows else np.zeros(0, hashed_dtype(prefer))
        write_segments(out, "hashes.seg", records, bucket_of(records["hi"], args["buckets"]), args["buckets"],
                       ("hi", "lo"))
        return {"documents": sum(map(len, rows)), "hashes": len(records), "hashed": hashed}


class ExactReduce:
    """Task that chooses, for each hash of one range that occurs more than once, the document that stays.

    Arguments: `maps` (references to the files `hashes.seg`, one per group of parts; a part is a file of documents),
    `ranks` (priority of each group), `bucket` (number of the range), `prefer` (which document stays). If there are
    indexes of old documents, `old` refers to the file of `ExactLookup`, and the last of `ranks` is its priority.

    The task writes the exchange file `survivors.seg`: SURVIVOR records, in buckets by number of the group. A record
    goes to every group that has the hash. The task counts hashes, repeated hashes, removed documents, and how often the
    most frequent hash occurs. It holds only one block of records in memory at a time, whatever the size of the bucket.
    """

    name = "exact_reduce"
    version = 4

    @staticmethod
    def run(inputs: Inputs, cursor: Cursor, out: Out) -> Counters:
        args = inputs.args
        ranks = np.asarray(args["ranks"], np.int64)
        counters = {"hashes": 0, "repeated": 0, "removed": 0, "max_repeats": 0}
        maps = [*args["maps"], *args.get("old", ())]
        with out.segments("survivors.seg", SURVIVOR, len(maps)) as writer:
            for block in inputs.segments(maps, args["bucket"], whole=("hi", "lo"), numbered=True):
                block = block[in_order((block["hi"], block["lo"]),
                                       preference(block, ranks[block["source"]], args["prefer"]))]
                no_twins(block)
                starts, sizes = runs(block)
                count = np.add.reduceat(block["n"], starts)
                repeated = np.repeat(count > 1, sizes)
                survivor = np.repeat(starts, sizes)[repeated]
                records = np.empty(len(survivor), SURVIVOR)
                for field in SURVIVOR.names or ():
                    records[field] = block[field][survivor]
                writer.write(block["source"][repeated], records)
                counters["hashes"] += len(starts)
                counters["repeated"] += int((count > 1).sum())
                counters["removed"] += int((count - 1).sum())
                counters["max_repeats"] = max(counters["max_repeats"], int(count.max()))
        return counters


class ExactSlices:
    """Task that writes the removal slices (lists of rows to drop) of one group of parts (files of documents).

    Arguments: `sides` (references to the side tables of the group's parts, which hold hashes of the documents), `group`
    (number of the group), `dataset`, `survivors` ({column: references to the files `survivors.seg`}). If there are
    several columns, a document that an earlier column removes does not take part in the comparison by a later one.

    The task writes `slice.PART.parquet` for every part that loses documents. The column `cluster` of a slice names the
    document that is kept.
    """

    name = "exact_slices"
    version = 1

    @staticmethod
    def run(inputs: Inputs, cursor: Cursor, out: Out) -> Counters:
        args = inputs.args
        deciders = {c: losers_of(inputs, refs, args["group"]) for c, refs in args["survivors"].items()}
        removed = dict.fromkeys(map(reason, deciders), 0)
        for part, table in enumerate(rows_of(inputs, args["sides"], list(deciders))):
            verdicts, reasons = [], []
            decided = np.zeros(0, np.uint64)
            for column, losers in deciders.items():
                rows, kept = losers(table[column][~np.isin(place_of(table[column]), decided)])
                records = np.zeros(len(rows), VERDICT)
                records["part"], records["row"], records["removed"], records["similarity"] = part, rows["row"], 1, 1.0
                for half in ("hi", "lo"):
                    records[f"kept_{half}"] = records[f"cluster_{half}"] = kept[f"id_{half}"]
                decided = np.concatenate([decided, place_of(rows)])
                verdicts.append(records)
                reasons += [reason(column)] * len(records)
                removed[reason(column)] += len(records)
            joined = np.concatenate(verdicts)
            order = np.argsort(joined["row"], kind="stable")
            if len(joined):
                joined = joined[order]
                sliced = slice_table(joined["row"], joined["removed"] > 0, [reasons[i] for i in order.tolist()], joined)
                write_slice(out, f"slice.{part}.parquet", sliced)
        return {"removed": {args["dataset"]: removed}}
