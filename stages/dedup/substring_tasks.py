"""The tasks of the step `substring`, which cuts passages that occur elsewhere (`stages.dedup.substring`).

A window is a run of `length` bytes of a text. Its seed is a short run of bytes inside the window that represents it. A
part is a file of documents, and a group is a run of consecutive parts. A record names a document by the number of its
part within the group and by its row in the part. A record names a position in a text by the number of the byte there.
With `unit: tokens`, positions are numbers of tokens instead, until the task RunMap turns them into numbers of bytes. In
that case, the tasks have an argument `units`, a key of the tokenizer's content.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from stages.barrier import CUT_SCHEMA, FileRef, write_slice
from stages.dedup.fragment import bucket_of, by_part, id_text, ids_to_ints, read_side
from stages.dedup.part_texts import texts_at
from stages.dedup.token_units import TokenUnits
from stages.dedup.windows import covering, merged, windows_with
from stages.task import Counters, Cursor, Inputs, Out

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: why a passage is cut
REPEATED = "repeated"
#: windows that are held in memory at a time
CHUNK = 1 << 20

#: a seed of a group, and how often the group has it
SEED = np.dtype([("hash", "<u8"), ("n", "<u4")])
#: a seed that occurs more than once
SHARED = np.dtype([("hash", "<u8")])
#: a window. Sorted by hash, rank, id and offset, the first of equal windows is the one that stays
WINDOW = np.dtype([("hash", "<u8"), ("rank", "<u4"), ("id_hi", "<u8"), ("id_lo", "<u8"), ("offset", "<u4"),
                   ("part", "<u4"), ("row", "<u4")])
#: fields that name the first copy of a passage: its group, its document, and where it begins
_FIRST = [("of_group", "<u4"), ("of_part", "<u4"), ("of_row", "<u4"), ("of_start", "<u4")]
#: a repeated window
MATCH = np.dtype([("part", "<u4"), ("row", "<u4"), ("start", "<u4"), *_FIRST])
#: a run of repeated windows, with a digest of its bytes. It goes to the group that holds the first copy, which compares
#: the digest with that of the copy
CLAIM = np.dtype([*_FIRST[1:], ("digest", "V16"), ("group", "<u4"), ("part", "<u4"), ("row", "<u4"), ("start", "<u4"),
                  ("stop", "<u4")])
#: a passage to be cut, and the document that has the first copy
PROVED = np.dtype([("part", "<u4"), ("row", "<u4"), ("start", "<u4"), ("stop", "<u4"), ("id_hi", "<u8"),
                   ("id_lo", "<u8")])


class SeedMap:
    """Task that counts how often each seed occurs in one group. Arguments: `sides` (references to the side tables of
    the group's parts), `buckets` (number of ranges of hashes). Writes the exchange file `seeds.seg` (SEED records, in
    buckets by range of hashes)."""

    name = "substring_seed_map"
    version = 1

    @staticmethod
    def run(inputs: Inputs, cursor: Cursor, out: Out) -> Counters:
        hashes = np.zeros(0, np.uint64)
        counts = np.zeros(0, np.int64)
        for ref in inputs.args["sides"]:
            column = read_side(inputs.fetch(ref), ["seeds"])["seeds"]
            seeds = np.frombuffer(b"".join(value for value in column.to_pylist() if value), "<u8")
            hashes, counts = _counted(np.concatenate([hashes, seeds]),
                                      np.concatenate([counts, np.ones(len(seeds), np.int64)]))
        records = np.empty(len(hashes), SEED)
        records["hash"], records["n"] = hashes, np.minimum(counts, np.iinfo(np.uint32).max)
        buckets = inputs.args["buckets"]
        with out.segments("seeds.seg", SEED, buckets, key=("hash",)) as writer:
            writer.write(bucket_of(records["hash"], buckets), records)
        return {"seeds": int(counts.sum())}


def _counted(hashes: NDArray[Any], counts: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return (the different hashes, ascending; the sum of the counts of each of them). `counts` has an entry for each
    entry of `hashes`."""
    order = np.argsort(hashes)
    hashes, counts = hashes[order], counts[order]
    starts = np.flatnonzero(np.r_[True, hashes[1:] != hashes[:-1]]) if len(hashes) else np.zeros(0, np.int64)
    return hashes[starts], np.add.reduceat(counts, starts) if len(starts) else counts


class SharedSeeds:
    """Task that finds the seeds, in one range of hashes, that occur more than once in the dataset. Arguments: `maps`
    (the files `seeds.seg`, one per group), `bucket` (number of the range). Writes the exchange file `shared.seg`
    (SHARED records in buckets by group: every group that has such a seed gets a record). The counter `seeds` is the
    number of different seeds that occur more than once, and `occurrences` how often they occur in total."""

    name = "substring_shared"
    version = 1

    @staticmethod
    def run(inputs: Inputs, cursor: Cursor, out: Out) -> Counters:
        maps = inputs.args["maps"]
        counters = {"seeds": 0, "occurrences": 0}
        with out.segments("shared.seg", SHARED, len(maps), key=("hash",)) as writer:
            for block in inputs.segments(maps, inputs.args["bucket"], whole=("hash",), numbered=True):
                starts = np.flatnonzero(np.r_[True, block["hash"][1:] != block["hash"][:-1]])
                total = np.add.reduceat(block["n"].astype(np.int64), starts)
                repeated = np.repeat(total > 1, np.diff(np.r_[starts, len(block)]))
                records = np.empty(int(repeated.sum()), SHARED)
                records["hash"] = block["hash"][repeated]
                writer.write(block["source"][repeated], records)
                counters["seeds"] += int((total > 1).sum())
                counters["occurrences"] += int(total[total > 1].sum())
        return counters


class WindowMap:
    """Task that hashes those windows of one group whose seed occurs more than once in the dataset. Arguments: `parts`
    (references to the side table and the text of each part), `shared` (the files `shared.seg`), `group` (number of the
    group), `length` (of a window), `rank` (priority of the group), `buckets` (number of ranges of hashes). Writes the
    exchange file `windows.seg` (WINDOW records, in buckets by range of hashes)."""

    name = "substring_windows"
    version = 1

    @staticmethod
    def run(inputs: Inputs, cursor: Cursor, out: Out) -> Counters:
        args = inputs.args
        shared = np.unique(np.concatenate([np.zeros(0, np.uint64), *(
            inputs.segment(ref, args["group"])["hash"] for ref in args["shared"])]))
        counters = {"documents": 0, "windows": 0}
        tokens = _tokens(args)
        pending: list[NDArray[Any]] = []
        held = 0
        order = ("hash", "rank", "id_hi", "id_lo", "offset")
        with out.segments("windows.seg", WINDOW, args["buckets"], key=order) as writer:

            def flush() -> None:
                records = np.concatenate(pending) if pending else np.zeros(0, WINDOW)
                writer.write(bucket_of(records["hash"], args["buckets"]), records)
                pending.clear()

            for part, refs in enumerate(args["parts"] if len(shared) else ()):
                table = read_side(inputs.fetch(refs["side"]), ["id", "seeds"])
                chosen = np.flatnonzero([_meets(seeds, shared) for seeds in table["seeds"].to_pylist()])
                rows = table["row"].to_numpy()[chosen]
                id_hi, id_lo = ids_to_ints(table["id"].take(pa.array(chosen)))
                for number, text in enumerate(texts_at(inputs.fetch(refs["text"]), rows)):
                    data = text.encode("utf-8", "surrogatepass")
                    units = tokens.tokens(data)[0] if tokens else np.frombuffer(data, np.uint8)
                    for hashes, starts in windows_with(units, args["length"], shared):
                        records = np.empty(len(hashes), WINDOW)
                        records["hash"], records["offset"], records["rank"] = hashes, starts, args["rank"]
                        records["id_hi"], records["id_lo"] = id_hi[number], id_lo[number]
                        records["part"], records["row"] = part, rows[number]
                        pending.append(records)
                        counters["windows"] += len(records)
                        held += len(records)
                        if held > CHUNK:
                            flush()
                            held = 0
                counters["documents"] += len(rows)
            flush()
        return counters


def _meets(seeds: bytes | None, shared: NDArray[np.uint64]) -> bool:
    """Return whether one of a document's seeds (uint64, as bytes) is among the seeds `shared`, which are sorted."""
    hashes = np.frombuffer(seeds or b"", "<u8")
    places = np.minimum(np.searchsorted(shared, hashes), len(shared) - 1)
    return bool((shared[places] == hashes).any())


def _tokens(args: dict[str, Any]) -> TokenUnits | None:
    """Return what turns texts into tokens for the step, or None if the step compares bytes. `args` are the arguments of
    a task."""
    return TokenUnits(args["$volatile"]["tokenizer"]) if "units" in args else None


class FirstWindows:
    """Task that finds the first copy of each repeated window, for the windows in one range of hashes. Arguments: `maps`
    (the files `windows.seg`, one per group), `bucket` (number of the range), `length` (of a window). Writes the
    exchange file `repeated.seg` (MATCH records, one for each further copy, in buckets by the group of that copy). A
    copy that overlaps the first one, as in a long run of one character, does not count."""

    name = "substring_first"
    version = 1

    @staticmethod
    def run(inputs: Inputs, cursor: Cursor, out: Out) -> Counters:
        args = inputs.args
        first: NDArray[Any] | None = None              # the first window with the hash that the last block ended with
        windows = repeated = 0
        with out.segments("repeated.seg", MATCH, len(args["maps"]), key=("part", "row", "start")) as writer:
            for block in inputs.segments(args["maps"], args["bucket"], numbered=True):
                windows += len(block)
                if first is not None:
                    block = np.concatenate([first, block])
                new = np.r_[True, block["hash"][1:] != block["hash"][:-1]]
                leader = np.maximum.accumulate(np.where(new, np.arange(len(block)), 0))
                leaders = block[leader]
                overlaps = (block["source"] == leaders["source"]) & (block["part"] == leaders["part"]) \
                    & (block["row"] == leaders["row"]) \
                    & (block["offset"].astype(np.int64) < leaders["offset"].astype(np.int64) + args["length"])
                later = ~new & ~overlaps
                records = np.empty(int(later.sum()), MATCH)
                for field, name in (("part", "part"), ("row", "row"), ("start", "offset")):
                    records[field] = block[name][later]
                    records[f"of_{field}"] = leaders[name][later]
                records["of_group"] = leaders["source"][later]
                writer.write(block["source"][later], records)
                repeated += len(records)
                first = block[leader[-1:]].copy()
        return {"windows": windows, "repeated": repeated}


class RunMap:
    """Task that joins the repeated windows of one group to runs (stretches of text), and drops the runs whose bytes
    other runs cover. (A long row of dashes would otherwise give one run for each dash, because all windows in it have
    the same first copy.) Arguments: `records` (the files `repeated.seg`), `group` (number of the group), `groups`
    (number of all groups), `parts` (as for WindowMap), `length` (of a window). Writes the exchange file `claims.seg`
    (CLAIM records, each a run with a hash of its bytes, in buckets by the group of the first copy)."""

    name = "substring_runs"
    version = 2

    @staticmethod
    def run(inputs: Inputs, cursor: Cursor, out: Out) -> Counters:
        args = inputs.args
        claimed = 0
        tokens = _tokens(args)
        with out.segments("claims.seg", CLAIM, args["groups"], key=("of_part", "of_row")) as writer:
            for part, runs in _by_part(_needed(_runs(inputs, args))):
                claims = np.empty(len(runs), CLAIM)
                for field in ("of_part", "of_row", "of_start", "part", "row", "start"):
                    claims[field] = runs[field]
                claims["stop"], claims["group"] = runs["stop"], args["group"]
                _digest(inputs, args["parts"][part]["text"], claims, tokens)
                writer.write(runs["of_group"], claims)
                claimed += len(claims)
        return {"runs": claimed}


_RUN = np.dtype([*MATCH.descr, ("stop", "<u4")])


def _runs(inputs: Inputs, args: dict[str, Any]) -> Iterator[NDArray[Any]]:
    """Yield the runs of repeated windows of a group, in blocks, sorted by position in the group. In a run, each window
    begins one byte after the previous window, and the first copy of each window begins one byte after that of the
    previous window."""
    open_run = np.zeros(0, _RUN)                       # the last run, which the next block may continue
    for block in inputs.segments(args["records"], args["group"]):
        windows = np.zeros(len(block), _RUN)
        for field in MATCH.names or ():
            windows[field] = block[field]
        windows["stop"] = windows["start"] + args["length"]
        runs = np.concatenate([open_run, windows])
        step = np.ones(len(runs), bool)
        for field in ("part", "row", "of_group", "of_part", "of_row"):
            step[1:] &= runs[field][1:] == runs[field][:-1]
        last = runs["stop"].astype(np.int64) - args["length"]                 # where the last window begins
        ahead = last - runs["start"]
        step[1:] &= runs["start"][1:] == last[:-1] + 1
        step[1:] &= runs["of_start"][1:] == runs["of_start"][:-1] + ahead[:-1] + 1
        step[0] = False
        starts = np.flatnonzero(~step)
        joined = runs[starts].copy()
        joined["stop"] = runs["stop"][np.r_[starts[1:], len(runs)] - 1]
        yield joined[:-1]
        open_run = joined[-1:]
    yield open_run


def _needed(blocks: Iterator[NDArray[Any]]) -> Iterator[NDArray[Any]]:
    """Leave out runs (stretches of repeated windows, as `_runs` yields them) whose bytes other runs cover. `blocks` are
    arrays of runs, sorted by text and position. The runs that are yielded cover the same bytes as all runs together."""
    held = np.zeros(0, _RUN)                           # the last two runs: the last one may not be needed
    for block in blocks:
        runs = np.concatenate([held, block])
        texts = runs["part"].astype(np.uint64) << np.uint64(32) | runs["row"].astype(np.uint64)
        runs = runs[covering(texts, runs["start"].astype(np.int64), runs["stop"].astype(np.int64))]
        yield runs[:-2]
        held = runs[-2:]
    yield held


def _by_part(blocks: Iterator[NDArray[Any]]) -> Iterator[tuple[int, NDArray[Any]]]:
    """Yield (number of a part, all records of this part) from blocks of records. The blocks must be sorted by part
    (file of documents)."""
    pending: list[NDArray[Any]] = []
    for block in blocks:
        for part, records in by_part(block):
            if pending and pending[0]["part"][0] != part:
                yield int(pending[0]["part"][0]), np.concatenate(pending)
                pending = []
            pending.append(records)
    if pending:
        yield int(pending[0]["part"][0]), np.concatenate(pending)


def _digest(inputs: Inputs, text: FileRef, claims: NDArray[Any], tokens: TokenUnits | None,
            copy: str = "") -> None:
    """Set the field `digest` of each CLAIM record to the BLAKE2b hash of a passage's bytes. The bytes are read from the
    file `text` of a part. With `tokens`, the records give the positions of the passage as numbers of tokens; these are
    replaced by numbers of bytes.

    A record names two passages. By default, the hash is that of the repeated passage, from `start` to `stop` in the
    document `row`. If `copy` is "of_", it is that of the first copy: as many bytes from `of_start` on, in the document
    `of_row`. The records must be sorted by the row of the passage that is hashed.
    """
    row, start = f"{copy}row", f"{copy}start"
    rows = np.unique(claims[row])
    stops = np.searchsorted(claims[row], rows, side="right").tolist()
    place = 0
    for data, stop in zip(texts_at(inputs.fetch(text), rows), stops, strict=True):
        encoded = data.encode("utf-8", "surrogatepass")
        own = claims[place:stop]
        if tokens is not None:
            places = tokens.tokens(encoded)[1]
            for field in (start,) if copy else ("start", "stop"):
                own[field] = places[own[field]]
        body = memoryview(encoded)
        for i, (begin, size) in enumerate(zip(own[start].tolist(), (own["stop"] - own["start"]).tolist())):
            own["digest"][i] = np.void(hashlib.blake2b(body[begin:begin + size], digest_size=16).digest())
        place = stop


class CheckRuns:
    """Task that checks whether repeated passages really equal their first copies, for the first copies in one group. It
    compares hashes of the passages' bytes. Arguments: `records` (the files `claims.seg`), `group`, `groups`, `parts`
    (as for RunMap). Writes the exchange file `proved.seg` (PROVED records, in buckets by the group of the repeated
    passage). The counter `refuted` is the number of passages whose windows have equal hashes but whose bytes differ;
    they are not cut."""

    name = "substring_check"
    version = 1

    @staticmethod
    def run(inputs: Inputs, cursor: Cursor, out: Out) -> Counters:
        args = inputs.args
        counters = {"proved": 0, "refuted": 0}
        tokens = _tokens(args)
        with out.segments("proved.seg", PROVED, args["groups"], key=("part", "row", "start")) as writer:
            for block in inputs.segments(args["records"], args["group"]):
                for part in np.unique(block["of_part"]).tolist():
                    claims = block[block["of_part"] == part]
                    copies = claims.copy()
                    refs = args["parts"][part]
                    _digest(inputs, refs["text"], copies, tokens, "of_")
                    rows, place = np.unique(claims["of_row"], return_inverse=True)
                    id_hi, id_lo = ids_to_ints(read_side(inputs.fetch(refs["side"]), ["id"], rows)["id"])
                    equal = copies["digest"] == claims["digest"]
                    records = np.empty(int(equal.sum()), PROVED)
                    for field in ("part", "row", "start", "stop"):
                        records[field] = claims[field][equal]
                    records["id_hi"], records["id_lo"] = id_hi[place][equal], id_lo[place][equal]
                    writer.write(claims["group"][equal], records)
                    counters["proved"] += len(records)
                    counters["refuted"] += len(claims) - len(records)
        return counters


class SubstringSlices:
    """Task that writes the removal slices (lists of passages to cut) of the documents of one group. Arguments:
    `records` (the files `proved.seg`), `group`, `groups` (as for RunMap), `dataset` (its name), `merge` (the setting of
    the step). Writes `slice.PART.parquet` for every part with passages to cut."""

    name = "substring_slices"
    version = 1

    @staticmethod
    def run(inputs: Inputs, cursor: Cursor, out: Out) -> Counters:
        args = inputs.args
        documents = passages = size = 0
        for part, records in _by_part(inputs.segments(args["records"], args["group"])):
            rows = np.unique(records["row"])
            cuts = []
            for own in np.split(records, np.searchsorted(records["row"], rows[1:])):
                cuts.append(cuts_of(own, args["merge"]))
                size += sum(cut["end"] - cut["start"] for cut in cuts[-1])
            columns = {"row": rows, "reason": [""] * len(rows), "cuts": cuts}
            nulls = [None] * len(rows)
            table = pa.table({name: columns.get(name, nulls) for name in CUT_SCHEMA.names}, CUT_SCHEMA)
            write_slice(out, f"slice.{part}.parquet", table)
            documents, passages = documents + len(rows), passages + sum(map(len, cuts))
        return {"cut": {args["dataset"]: {"documents": documents, "passages": passages, "bytes": size}}}


def cuts_of(records: NDArray[Any], merge: float) -> list[dict[str, Any]]:
    """Return the passages to cut out of one document. `records` are the document's PROVED records, sorted by where they
    begin; their passages may overlap, and are joined. A result names the document with the first copy of the passage's
    beginning."""
    spans: list[tuple[int, int]] = []
    match: dict[int, str] = {}
    for record in records:
        start, stop = int(record["start"]), int(record["stop"])
        if spans and start <= spans[-1][1]:
            spans[-1] = spans[-1][0], max(stop, spans[-1][1])
            continue
        spans.append((start, stop))
        match[start] = id_text(record["id_hi"], record["id_lo"])
    return [{"start": start, "end": end, "reason": REPEATED, "match": match[start]}
            for start, end in merged(spans, merge)]
