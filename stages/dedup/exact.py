"""Removes exact duplicates, by text or by URL: the recipe step `exact`, and the stage that computes its hashes.

    - exact                        # the same text
    - {exact: {by: both}}          # first one document per URL, then one document per text

Of equal documents, the one from the first dataset in `priority:` stays. Of several from that dataset the longest stays,
and of equally long ones the one with the smallest id. The work consists of three waves of tasks; the tasks of a wave
may run at the same time. A part is a file of documents; the tasks read its side table, in which an earlier pass has
stored the hashes of its documents. If both URL and text are compared, the first two waves run for the URL and then for
the text.

    map     a group of parts     → one record per hash: the group's best document with that hash
    reduce  a range of hashes    → survivors: the document that stays for each hash that occurs more than once, sent to
                                   the groups that have such documents
    slices  survivors by group   → one removal slice (list of rows to drop) for each part

A hash that a million documents share costs only one record per group of parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa
import xxhash

from stages.barrier import Barrier, Done, FileRef, PartRef, TaskDraft, Wave, WaveTasks, write_slice
from stages.dedup.fragment import (
    SIZES,
    VERDICT,
    bucket_of,
    files_of,
    fixed_bytes,
    groups,
    ids_to_ints,
    joined,
    no_twins,
    read_segments,
    read_side,
    runs,
    slice_table,
    slices_of,
    write_segments,
)
from stages.dedup.units import same_text
from stages.stage import Stage, StageConfig, signal
from stages.task import Counters, Cursor, Inputs, Out

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from stages.document import Document

#: a hash in one group: the best document that has it (id, characters), and the number of documents that have it
HASHED = np.dtype([("hi", "<u8"), ("lo", "<u8"), ("id_hi", "<u8"), ("id_lo", "<u8"), ("chars", "<u4"), ("n", "<u4")])
#: the document that survives for a hash that occurs more than once
SURVIVOR = np.dtype([("hi", "<u8"), ("lo", "<u8"), ("id_hi", "<u8"), ("id_lo", "<u8")])
#: a document in a side table
_ROW = np.dtype([("part", "<u4"), ("row", "<u4"), *HASHED.descr])


class ExactConfig(StageConfig):
    by: Literal["text", "url", "both"] = signal("text", "what makes two documents equal")
    normalise: bool = signal(True, "texts are equal when they differ in white space and case only; else byte for byte")


def same_url(url: str) -> str:
    """Return the form in which `exact` compares URLs (RFC 3986, 6.2.2-3; the scheme as in SURT keys). http and https
    are equal, the host is in lower case without its default port, an empty path becomes "/", and the fragment is
    removed. Path and query stay unchanged."""
    url = url.strip()
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        return url
    if parts.scheme not in ("http", "https") or not host:
        return url
    place = host if port in (None, 80, 443) else f"{host}:{port}"
    return f"//{place}{parts.path or '/'}" + (f"?{parts.query}" if parts.query else "")


class ExactHash(Stage):
    """Compute the xxh3_128 hashes of a document's text and of its URL, by which `exact` finds duplicates. The hash of
    the text is empty if the setting `by` of `exact` is `url`. The hash of the URL is empty if `by` is `text`, or if the
    document has no URL."""

    name = "exact_hash"
    version = 1
    cost_ms = 0.05
    side = pa.schema([("text", pa.binary()), ("url", pa.binary()), ("chars", pa.uint32())])
    Config = ExactConfig

    def process(self, doc: Document) -> str | None:
        text = url = b""
        if self.config.by != "url":
            compared = same_text(doc.text) if self.config.normalise else doc.text
            text = xxhash.xxh3_128_digest(compared.encode("utf-8", "surrogatepass"))
        if self.config.by != "text" and (doc.url or "").strip():
            url = xxhash.xxh3_128_digest(same_url(doc.url).encode("utf-8", "surrogatepass"))
        doc.side[self.name] = {"text": text, "url": url, "chars": len(doc.text)}
        return None


class Exact(Barrier):
    """Remove documents whose text, or URL, equals that of another document, which is kept.

    Of equal documents, the one from the first dataset in `priority:` is kept; of several from that dataset the longest,
    and of equally long ones the one with the smallest id.

    With `by: both`, documents are first compared by URL, and those that remain are then compared by text. The text of
    the document that is kept for a URL therefore always survives, in that document or in an equal one. If texts were
    compared first, that text could be lost.
    """

    name = "exact"
    version = 1
    cost_ms, leaves = 0.02, 0.95
    sizes = SIZES
    Config = ExactConfig

    def prepare(self) -> tuple[str, dict[str, Any]]:
        return "stages.dedup.exact:ExactHash", self.config.model_dump(mode="json")

    def waves(self, parts: Sequence[PartRef]) -> list[Wave]:
        plan = groups(parts, self.sizes)
        ranges = self.sizes.buckets(sum(group.rows for group in plan) * HASHED.itemsize, len(plan))
        for group in plan:
            group.sides(self.name)                        # a part without a side table is refused before anything runs

        def survivors(done: Done, column: str) -> list[FileRef]:
            """Return references to the files that say which document is kept for each hash that several documents have.
            `column` says whether the hashes are those of texts or URLs. The list is empty until the tasks that compute
            these files have run."""
            return files_of(done.get(f"{column}_reduce", ()), "survivors.seg")

        def mapper(column: str, after: str | None) -> WaveTasks:
            def tasks(done: Done) -> Iterator[TaskDraft]:
                first_survivors = survivors(done, after) if after else []
                for number, group in enumerate(plan):
                    side = group.sides(self.name)
                    yield TaskDraft("stages.dedup.exact:ExactMap",
                                    {"sides": side, "column": column, "buckets": ranges, "after": after,
                                     "gone": first_survivors, "group": number if after else 0},
                                    sum(s["bytes"] for s in side),
                                    f"{group.dataset}: {column} hashes of {group.size} parts",
                                    500 + group.rows * 250 // 2**20)
            return tasks

        def reducer(column: str) -> WaveTasks:
            def tasks(done: Done) -> Iterator[TaskDraft]:
                maps, ranks = files_of(done[f"{column}_map"], "hashes.seg"), [group.rank for group in plan]
                size = sum(m["bytes"] for m in maps) // ranges
                for b in range(ranges if plan else 0):
                    yield TaskDraft("stages.dedup.exact:ExactReduce", {"maps": maps, "ranks": ranks, "bucket": b}, size,
                                    f"equal {column} hashes, range {b + 1}/{ranges}", 900)
            return tasks

        def slices(done: Done) -> Iterator[TaskDraft]:
            by_column = {column: survivors(done, column) for column in self._columns()}
            repeated = any(task.counters["repeated"] for column in by_column for task in done[f"{column}_reduce"])
            for number, group in enumerate(plan if repeated else ()):
                side = group.sides(self.name)
                yield TaskDraft("stages.dedup.exact:ExactSlices",
                                {"sides": side, "group": number, "dataset": group.dataset, "survivors": by_column},
                                sum(s["bytes"] for s in side), f"{group.dataset}: removals of {group.size} parts",
                                500 + group.rows * 250 // 2**20)

        waves, previous = [], None
        for column in self._columns():
            waves += [Wave(f"{column}_map", mapper(column, previous)), Wave(f"{column}_reduce", reducer(column))]
            previous = column
        return [*waves, Wave("slices", slices)]

    def slices(self, parts: Sequence[PartRef], results: Done) -> Iterable[FileRef | None]:
        return slices_of(groups(parts, self.sizes), results["slices"])

    def _columns(self) -> tuple[str, ...]:
        return ("url", "text") if self.config.by == "both" else (self.config.by,)


class ExactMap:
    """Task that chooses, in one group of parts (files of documents), the best document for each hash of a column (text
    or URL).

    Arguments: `sides` (references to the side tables of the group's parts, which hold the hashes), `column`, `buckets`
    (number of ranges of hashes). If documents were already compared by another column, the task also gets `after` (that
    column), `gone` (references to its files of survivors) and `group` (number of the group). Documents that the other
    column removes do not take part.

    The task writes the exchange file `hashes.seg` (HASHED records, in buckets by range of hashes).
    """

    name = "exact_map"
    version = 3

    @staticmethod
    def run(inputs: Inputs, cursor: Cursor, out: Out) -> Counters:
        args = inputs.args
        columns = [args["column"], *([args["after"]] if args["after"] else [])]
        rows, documents = [], 0
        tables = _rows(inputs, args["sides"], columns)
        losers = _losers(inputs, args["gone"], args["group"])
        for table in tables:
            candidates = table[args["column"]]
            if args["after"]:
                removed = losers(table[args["after"]])[0]
                candidates = candidates[~np.isin(_place(candidates), _place(removed))]
            rows.append(candidates)
            documents += len(candidates)
        records = _best(np.concatenate(rows)) if rows else np.zeros(0, HASHED)
        write_segments(out, "hashes.seg", records, bucket_of(records["hi"], args["buckets"]), args["buckets"],
                       ("hi", "lo"))
        return {"documents": documents, "hashes": len(records)}


class ExactReduce:
    """Task that chooses, for each hash of one range that occurs more than once, the document that stays.

    Arguments: `maps` (references to the files `hashes.seg`, one per group of parts, which are files of documents),
    `ranks` (priority of each group), `bucket` (number of the range).

    The task writes the exchange file `survivors.seg`: SURVIVOR records, in buckets by number of the group. A record
    goes to every group that has the hash. The task counts hashes, repeated hashes, removed documents, and how often the
    most frequent hash occurs. It holds only one block of records in memory at a time, whatever the size of the bucket.
    """

    name = "exact_reduce"
    version = 3

    @staticmethod
    def run(inputs: Inputs, cursor: Cursor, out: Out) -> Counters:
        args = inputs.args
        ranks = np.asarray(args["ranks"], np.int64)
        counters = {"hashes": 0, "repeated": 0, "removed": 0, "max_repeats": 0}
        with out.segments("survivors.seg", SURVIVOR, len(args["maps"])) as writer:
            for block in inputs.segments(args["maps"], args["bucket"], whole=("hi", "lo"), numbered=True):
                order = np.lexsort((block["id_lo"], block["id_hi"], -block["chars"].astype(np.int64),
                                    ranks[block["source"]], block["lo"], block["hi"]))
                block = block[order]
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
    (number of the group), `dataset`, `survivors` ({column: references to the files `survivors.seg`}). If there are two
    columns, the second column decides only about documents that stay by the first.

    The task writes `slice.PART.parquet` for every part that loses documents. The column `cluster` of a slice names the
    document that is kept.
    """

    name = "exact_slices"
    version = 1

    @staticmethod
    def run(inputs: Inputs, cursor: Cursor, out: Out) -> Counters:
        args = inputs.args
        deciders = {c: _losers(inputs, refs, args["group"]) for c, refs in args["survivors"].items()}
        removed = dict.fromkeys((f"exact_{c}" for c in deciders), 0)
        for part, table in enumerate(_rows(inputs, args["sides"], list(deciders))):
            verdicts, reasons = [], []
            decided = np.zeros(0, np.uint64)
            for column, losers in deciders.items():
                rows, kept = losers(table[column][~np.isin(_place(table[column]), decided)])
                records = np.zeros(len(rows), VERDICT)
                records["part"], records["row"], records["removed"], records["similarity"] = part, rows["row"], 1, 1.0
                for half in ("hi", "lo"):
                    records[f"kept_{half}"] = records[f"cluster_{half}"] = kept[f"id_{half}"]
                decided = np.concatenate([decided, _place(rows)])
                verdicts.append(records)
                reasons += [f"exact_{column}"] * len(records)
                removed[f"exact_{column}"] += len(records)
            joined = np.concatenate(verdicts)
            order = np.argsort(joined["row"], kind="stable")
            if len(joined):
                joined = joined[order]
                sliced = slice_table(joined["row"], joined["removed"] > 0, [reasons[i] for i in order.tolist()], joined)
                write_slice(out, f"slice.{part}.parquet", sliced)
        return {"removed": {args["dataset"]: removed}}


# -- side tables and hashes as records -------------------------------------------------------------------------------
def _rows(inputs: Inputs, sides: list[FileRef], columns: list[str]) -> Iterator[dict[str, NDArray[Any]]]:
    """Yield for each part (file of documents) {column: _ROW records of the documents that have a hash in this column}.
    `sides` refers to the side tables, which hold the hashes."""
    for part, ref in enumerate(sides):
        table = read_side(inputs.fetch(ref), ["id", "chars", *columns])
        id_hi, id_lo = ids_to_ints(table["id"])
        by_column = {}
        for column in columns:
            present, raw = fixed_bytes(table[column])
            records = np.zeros(len(raw), _ROW)
            hashes = raw.reshape(-1, 16).view(">u8")
            records["part"], records["row"], records["n"] = part, table["row"].to_numpy()[present], 1
            records["hi"], records["lo"] = hashes[:, 0], hashes[:, 1]
            records["id_hi"], records["id_lo"] = id_hi[present], id_lo[present]
            records["chars"] = table["chars"].to_numpy()[present]
            by_column[column] = records
        yield by_column


def _place(rows: NDArray[Any]) -> NDArray[np.uint64]:
    return rows["part"].astype(np.uint64) << np.uint64(32) | rows["row"].astype(np.uint64)


def _best(rows: NDArray[Any]) -> NDArray[Any]:
    """Return HASHED records, in ascending order of hash. Each names the longest document with a hash (of equally long
    ones the one with the smallest id), and says how many documents have the hash."""
    order = np.lexsort((rows["id_lo"], rows["id_hi"], -rows["chars"].astype(np.int64), rows["lo"], rows["hi"]))
    rows = rows[order]
    no_twins(rows)
    starts, sizes = runs(rows)
    best = np.empty(len(starts), HASHED)
    for field in HASHED.names or ():
        best[field] = rows[field][starts]
    best["n"] = sizes
    return best


def _losers(inputs: Inputs, refs: list[FileRef],
            group: int) -> Callable[[NDArray[Any]], tuple[NDArray[Any], NDArray[Any]]]:
    """Return a function that finds the documents to be removed in favour of a survivor.

    A survivor is the document that is kept for a hash; `refs` are the files of survivors of one column (text or URL).
    The function takes rows and returns (the rows whose hash has another document as survivor, the SURVIVOR record for
    each of these rows).
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
