"""Decides which documents of a cluster are really near-duplicates, by comparing their sets of word n-grams.

A cluster comes from locality-sensitive hashing (LSH), so its documents are only candidates for removal. If A shares a
band of its MinHash signature with B, and B shares a band with C, all three are in one cluster, even if A and C differ.
A template that thousands of pages share also puts these pages into one cluster, whatever else they contain (in Marin's
audit of July 2026, 859,092 documents became 2). This module goes through the documents of a cluster in order (priority
of their dataset, longest first, id; or as `prefer` says). It compares each document with those that it has kept so far
and that share a band key with it. It removes the document if one of the following holds for a kept one:

    - Their Jaccard similarity is at least `verify`.
    - The kept document has at least as many n-grams as the other one, and at least the share `containment` of the
      other's n-grams.

It keeps all other documents of the cluster.

The similarity is |A and B| / |A or B|, where A and B are the sets of word n-grams of the two stored texts, as 64-bit
hashes. Before that, the texts are cut after `max_chars` characters and simplified. With the setting `boilerplate`, both
sets may lose n-grams that many documents of a source have (`stages.dedup.boilerplate`). Without this setting, anyone
can recompute the similarity from the kept and the dropped text, as `stages.dedup.explain` does. Band keys are computed
before personal data is scrubbed, while texts are stored and compared after it. The text behind a document's band keys
and the text that is compared may thus differ in an e-mail address, for example, but both come from the same page.

Texts are never passed from task to task. For each group of parts (files of documents), one task reads the texts of its
candidates once and writes their shingle sets (hashes of word n-grams) to one file, ordered by cluster. A judging task
reads a bucket of clusters from these files, through a cache of limited size. In a cluster of any size, a document is
compared with at most `max_comparisons` others (a count, not a time limit). A document for which these comparisons find
no duplicate is kept.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from pipeline.base.parquet import open_parquet
from stages.dedup.boilerplate import Boilerplate, Remainders
from stages.dedup.cluster import MEMBER
from stages.dedup.fragment import (
    CONTAINED,
    NEAR,
    SIMILAR,
    VERDICT,
    bucket_of,
    by_part,
    fixed_bytes,
    id_text,
    ids_to_ints,
    read_segments,
    read_side,
    write_segments,
)
from stages.dedup.hashing import distinct, jaccard, mix
from stages.dedup.shingle_sets import ShingleSetReader, ShingleSetWriter
from stages.dedup.signature import MinHashSignature
from stages.dedup.survivor import DEFAULT, in_order, order_field, preference
from stages.document import DuplicateId
from stages.task import Counters, Cursor, Inputs, Out

if TYPE_CHECKING:
    from numpy.typing import NDArray


#: similarity from which two kept documents are recorded as near-duplicates of each other
RESEMBLING = 0.5
#: a removal: number of the removed candidate, why it is removed, its similarity to the kept one, number of the kept one
_REMOVAL = np.dtype([("removed", "<i8"), ("code", "<u4"), ("similarity", "<f8"), ("kept", "<i8")])


def candidate(bands: int, prefer: Sequence[str] = DEFAULT) -> np.dtype[Any]:
    """Return the dtype of the record of a candidate for removal, which is a document in a cluster. `bands` is the
    number of the document's band keys (hashes of the bands of its MinHash signature). If the preferences `prefer`
    compare dates or signals, the record has the field `order` (`stages.dedup.survivor`).

    `root` identifies the cluster: it is the smallest place (part << 32 | row; a part is a file of documents) of the
    cluster's documents. Then follow the document's part and row within its group of parts, its id, its length in
    characters, and its band keys. Its shingle set (hashes of word n-grams) consists of `count` values from value
    `offset` on in the group's `shingles.bin`. `sum` is the xxh3-64 of the bytes of the set.
    """
    return np.dtype([("root", "<u8"), ("part", "<u4"), ("row", "<u4"), ("id_hi", "<u8"), ("id_lo", "<u8"),
                     ("chars", "<u4"), ("count", "<u4"), ("offset", "<u8"), ("sum", "<u8"), ("bands", "<u8", (bands,)),
                     *order_field(prefer)])


def contained(similarity: float, size: int, other_size: int) -> float:
    """Return the share of a set of `size` values that is in a set of `other_size` values, from their Jaccard
    similarity."""
    common = round(similarity * (size + other_size) / (1 + similarity))
    return common / size if size else 0.0


class Shingles:
    """Task that computes the shingle sets (hashes of word n-grams) of those documents in one group of parts (files of
    documents) that are candidates for removal.

    Arguments: `members` (references to files of MEMBER records, which name the candidates and their clusters), `group`
    (number of the group, and of its bucket in the files of MEMBER records), `parts` (for each part of the group
    references to its side table and its text), `signature` and `signature_key` (config and key of the stage that made
    the signatures), `buckets` (number of buckets of clusters), `texts` (whether shingle sets are needed), `chunk`
    (bytes of shingles that are collected before they are ordered and written).

    The task writes the exchange file `candidates.seg`, in buckets of clusters. If `texts` is true, it also writes
    `shingles.bin`, which holds each set as sorted unique uint64, little-endian.
    """

    name = "minhash_shingles"
    version = 3

    @staticmethod
    def run(inputs: Inputs, cursor: Cursor, out: Out) -> Counters:
        args = inputs.args
        stage = MinHashSignature({**args["signature"], **args.get("$volatile", {})})
        dtype = candidate(stage.config.bands, stage.config.prefer)
        members = np.concatenate(read_segments(inputs, args["members"], args["group"], MEMBER))
        sets = ShingleSetWriter(out.path("shingles.bin"), args["chunk"]) if args["texts"] else None
        blocks = []
        for part, members_of_part in by_part(members):
            refs = args["parts"][part]
            records = np.zeros(len(members_of_part), dtype)
            for field in ("root", "part", "row"):
                records[field] = members_of_part[field]
            columns = ["id", "bands", "chars", *(["language"] if stage.config.words == "language" else []),
                       *(["order"] if "order" in (dtype.names or ()) else [])]
            side = read_side(inputs.fetch(refs["side"]), columns, members_of_part["row"])
            records["id_hi"], records["id_lo"] = ids_to_ints(side["id"])
            records["chars"] = side["chars"].to_numpy()
            records["bands"] = fixed_bytes(side["bands"])[1].view("<u8")
            if "order" in columns:
                records["order"] = fixed_bytes(side["order"])[1].view("<u8")
            blocks.append(records)
            if sets is not None:
                languages = side["language"].to_pylist() if "language" in columns else repeat("")
                texts = utf8_at(inputs.fetch(refs["text"]), members_of_part["row"])
                for root, text, language in zip(records["root"].tolist(), texts, languages):
                    sets.add(root, distinct(stage.shingles_of(text, language)[0]))
        candidates = np.concatenate(blocks) if blocks else np.zeros(0, dtype)
        if sets is not None:
            candidates["count"], candidates["offset"], candidates["sum"] = sets.close()
        buckets = args["buckets"]
        write_segments(out, "candidates.seg", candidates, bucket_of(mix(candidates["root"]), buckets), buckets,
                       ("root",))
        return {"candidates": len(candidates), "shingles": sets.written if sets is not None else 0}


def texts_at(path: str, rows: NDArray[Any]) -> Iterator[str]:
    """Yield the texts of the given rows (ascending) of a part, as `utf8_at` does, but as strings."""
    return (data.tobytes().decode() for data in utf8_at(path, rows))


def utf8_at(path: str, rows: NDArray[Any]) -> Iterator[NDArray[np.uint8]]:
    """Yield the texts of the given rows (ascending) of a part, a Parquet file of documents at `path`, as UTF-8. Row
    groups that hold none of these rows are not read. Raises ValueError at the end if the part has fewer rows."""
    first = rows_read = 0
    with open_parquet(path) as file:
        for number in range(file.num_row_groups):
            stop = first + file.metadata.row_group(number).num_rows
            rows_up_to = int(np.searchsorted(rows, stop))
            if rows_up_to > rows_read:
                column = file.read_row_group(number, columns=["text"], use_threads=False)["text"]
                column.validate(full=True)             # the kernels read beyond the end of a text that is no UTF-8
                texts = column.combine_chunks().cast(pa.large_binary())
                places = np.frombuffer(texts.buffers()[1], np.int64)[texts.offset:]
                data = np.frombuffer(texts.buffers()[2] or b"", np.uint8)
                for row in (rows[rows_read:rows_up_to] - first).tolist():
                    yield data[places[row]:places[row + 1]]
            first, rows_read = stop, rows_up_to
    if rows_read < len(rows):
        raise ValueError(f"a part has {first} rows, but its side table speaks of row {int(rows[rows_read])}")


class Verify:
    """Task that decides, for one bucket of clusters of near-duplicates, which documents are removed.

    Arguments: `candidates` (references to the files `candidates.seg`, one per group of parts), `shingles` (for each
    group a reference to its file of shingle sets, or null if texts are not compared), `ranks` (priority of each group),
    `bucket` (number of the bucket), `bands` (number of bands of a signature), `verify` (smallest similarity that
    removes a document; 0: similarities do not decide, and one document of a cluster stays), `max_comparisons` (most
    comparisons for one document), and if they are set, `containment`, `prefer` (as in the recipe), `boilerplate`
    (arguments of `Boilerplate`) and `record` (with `verify` 0, the similarity of each removed document to the kept one
    is noted). `$volatile` holds arguments that do not change the task's key; here this is `cache`, the bytes of shingle
    sets that are held in memory.

    The task writes two exchange files, both in buckets by number of the group. `verdicts.seg` has a VERDICT record for
    every document of every cluster. `near.seg` is about pairs of kept documents that were compared and whose similarity
    is at least RESEMBLING: each document of a pair gets a NEAR record that names the other one. Memory holds a block of
    candidates, the largest cluster, the cache of shingle sets, and with `boilerplate` MEMORY_MB more
    (`stages.dedup.boilerplate`).
    """

    name = "minhash_verify"
    version = 4

    @staticmethod
    def run(inputs: Inputs, cursor: Cursor, out: Out) -> Counters:
        args = inputs.args
        ranks, judged, prefer = np.asarray(args["ranks"], np.int64), 0, args.get("prefer", DEFAULT)
        counters = {"comparisons": 0, "removed": 0, "kept": 0, "capped": 0, "max_cluster_kept": 0}
        sets = ShingleSetReader(inputs, args["shingles"], args["$volatile"]["cache"])
        with (out.segments("verdicts.seg", VERDICT, len(ranks)) as verdict_writer,
              out.segments("near.seg", NEAR, len(ranks)) as near_writer):
            for block in inputs.segments(args["candidates"], args["bucket"], whole=("root",), numbered=True):
                rank = ranks[block["source"]]
                order = in_order((block["root"],), preference(block, rank, prefer))
                block, rank = block[order], rank[order]
                judge = ClusterJudge(block, block["source"], rank, args, sets, counters)
                verdict_writer.write(block["source"], judge.verdicts())
                near_writer.write(*judge.near_records())
                judged += len(block)
        sets.close()
        return {"judged": judged, **counters}


class ClusterJudge:
    """Decides which documents of a cluster are removed, one cluster after another. Its methods name a document by its
    row number in the sorted array `candidates`."""

    def __init__(self, candidates: NDArray[Any], file: NDArray[Any], rank: NDArray[Any], args: dict[str, Any],
                 sets: ShingleSetReader, counters: dict[str, int]) -> None:
        self.candidates, self.sets, self.counters = candidates, sets, counters
        self.threshold, self.cap = float(args["verify"]), int(args["max_comparisons"])
        self.containment, self.record = float(args.get("containment", 0.0)), bool(args.get("record"))
        #: whether documents are decided in the order of `place`
        self.by_place = tuple(args.get("prefer", DEFAULT)) == DEFAULT
        self.last_rank = int(rank.max(initial=0))
        #: (priority, negative length) of each candidate; the candidates of a cluster are ordered by this pair and then
        #: by id, if `prefer` has its default
        self.place = list(zip(rank.tolist(), (-candidates["chars"].astype(np.int64)).tolist()))
        self.bands, self.counts = candidates["bands"], candidates["count"].tolist()
        #: where the shingle set of each candidate is: arguments of `ShingleSetReader.get`
        self.where = list(zip(file.tolist(), candidates["offset"].tolist(), self.counts, candidates["sum"].tolist()))
        self.boilerplate = Boilerplate(**args["boilerplate"]) if args.get("boilerplate") else None
        #: compares documents of the cluster without its boilerplate; None if it has none
        self.remainders: Remainders | None = None
        self.near: list[tuple[int, int, float]] = []
        self.removals: list[tuple[int, int, float, int]] = []          # values of _REMOVAL

    def verdicts(self) -> NDArray[Any]:
        """Decide about all candidates, and return a VERDICT record for each."""
        candidates, root = self.candidates, self.candidates["root"]
        starts = np.flatnonzero(np.r_[True, root[1:] != root[:-1]])
        sizes = np.diff(np.r_[starts, len(root)])
        by_id = np.lexsort((candidates["id_lo"], candidates["id_hi"], root))
        ids = candidates[["root", "id_hi", "id_lo"]][by_id]
        twice = np.flatnonzero(ids[1:] == ids[:-1])
        if len(twice):
            raise DuplicateId(id_text(*ids[["id_hi", "id_lo"]][twice[0]]))
        for start, size in zip(starts.tolist(), sizes.tolist()):
            self.judge_cluster(start, start + size)
        removals = np.array(self.removals, _REMOVAL)
        removed = removals["removed"]
        verdicts = np.zeros(len(candidates), VERDICT)
        for field in ("part", "row"):
            verdicts[field] = candidates[field]
        verdicts["removed"][removed], verdicts["similarity"][removed] = removals["code"], removals["similarity"]
        for half in ("hi", "lo"):
            verdicts[f"kept_{half}"][removed] = candidates[f"id_{half}"][removals["kept"]]
            verdicts[f"cluster_{half}"] = np.repeat(ids[f"id_{half}"][starts], sizes)
        return verdicts

    def judge_cluster(self, start: int, stop: int, index: dict[int, list[int]] | None = None) -> None:
        """Decide about the candidates [start, stop). `index` may hold documents that were kept before, by band key."""
        index = {} if index is None else index
        survivors = 0
        if self.boilerplate is not None:
            left_out = self.boilerplate.of(self.candidates["source"][start:stop], lambda i: self._set(start + i))
            self.remainders = Remainders(left_out, self._set) if len(left_out) else None
        for i in range(start, stop):
            twin, similarity, near = self._twin(i, start, index)
            if twin is not None:
                is_similar = not self.threshold or similarity >= self.threshold
                self.removals.append((i, SIMILAR if is_similar else CONTAINED, similarity, twin))
                continue
            survivors += 1
            self.near += ((i, j, s) for j, s in near)
            if self.threshold and i + 1 < stop:
                for key in self.bands[i].tolist():
                    if self.by_place:
                        index.setdefault(key, []).append(i)
                    else:
                        insort(index.setdefault(key, []), i, key=self.place.__getitem__)
        self.counters["kept"] += survivors
        self.counters["removed"] += stop - start - survivors
        self.counters["max_cluster_kept"] = max(self.counters["max_cluster_kept"], survivors)

    def near_records(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the pairs of kept documents that resemble each other, as (number of the group, NEAR record) for each
        document of each pair."""
        i, j = (np.array([pair[side] for pair in self.near], np.int64) for side in (0, 1))
        own, resembled = np.r_[i, j], np.r_[j, i]
        records = np.zeros(len(own), NEAR)
        for field in ("part", "row"):
            records[field] = self.candidates[field][own]
        for field in ("id_hi", "id_lo"):
            records[field] = self.candidates[field][resembled]
        records["similarity"] = np.tile(np.array([similarity for _, _, similarity in self.near]), 2)
        return self.candidates["source"][own], records

    def _twin(self, i: int, start: int,
              index: dict[int, list[int]]) -> tuple[int | None, float, list[tuple[int, float]]]:
        """Look for a kept document that is similar enough for document `i` to be removed. `start` is the first document
        of the cluster, and `index` holds the kept documents by band key. If `verify` is 0, `start` is that document for
        all others, and the similarity is NaN unless it is to be noted (`record`).

        Returns (the kept document, or None if `i` stays; the similarity of the two; the kept documents that `i`
        resembles, with similarities). Documents that share the most bands with `i` are compared first, and of these the
        ones that were kept first.
        """
        if not self.threshold:
            if i == start:
                return None, 0.0, []
            return start, jaccard(self._set(i), self._set(start)) if self.record else float("nan"), []
        near: list[tuple[int, float]] = []
        shared: dict[int, int] = {}
        for key in self.bands[i].tolist() if index else ():
            if kept := index.get(key):
                for j in kept if len(kept) <= self.cap else self._nearest(kept, i):
                    shared[j] = shared.get(j, 0) + 1
        compared = 0
        size = self.counts[i]
        for j in sorted(shared, key=lambda j: (-shared[j], j)):
            other_size = self.counts[j]
            fits = bool(self.containment) and size <= other_size           # the kept one may contain it
            if (not fits and self.remainders is None
                    and min(size, other_size) / max(size, other_size, 1) < self.threshold):
                continue                               # no two sets of these sizes reach that similarity
            if compared == self.cap:
                self.counters["capped"] += 1
                break
            compared += 1
            self.counters["comparisons"] += 1
            similarity = (jaccard(self._set(i), self._set(j)) if self.remainders is None
                          else self.remainders.similarity(i, j))
            if similarity >= self.threshold or (fits and contained(similarity, size, other_size) >= self.containment):
                return j, similarity, []
            if similarity >= RESEMBLING:
                near.append((j, similarity))
        return None, 0.0, near

    def _nearest(self, kept: Sequence[int], i: int) -> Iterable[int]:
        """Choose those documents from `kept` (kept documents with one band key, by priority and then by length) that
        are nearest to document `i` in length: around the place that `i` has in its own priority up to `cap` documents
        on each side, and around the place that it would have in each other priority up to half as many (rounded up).
        Priorities that come after all kept documents are left out."""
        nearest: dict[int, None] = {}
        rank, length = self.place[i]
        for priority in range((rank if self.by_place else self.last_rank) + 1):
            middle = bisect_left(kept, (priority, length), key=self.place.__getitem__)
            reach = self.cap if priority == rank else (self.cap + 1) // 2
            nearest.update(dict.fromkeys(kept[max(0, middle - reach):middle + reach]))
        return nearest

    def _set(self, i: int) -> NDArray[np.uint64]:
        return self.sets.get(*self.where[i])
