"""Tasks by which `minhash` compares new documents with indexes of old ones (`stages.dedup.index`).

The documents of an index stay kept, whatever new documents come. So the tasks read only those old documents that share
a band key with a new document. The waves are those of `minhash`, with two more (lookup, routes) and with another task
in the wave verify. Each entry below names a wave, what one of its tasks reads, and what the task writes:

    bands, links  as without an index
    lookup        ranges of band keys      → old documents that have them; edges from new documents to these keys
    clusters …    as without an index      (a document that shares a key only with old documents is a candidate, too)
    shingles      as without an index
    routes        old documents by group   → old documents by cluster
    verify        clusters, old documents  → removed documents, the kept ones, similarities

The graph from which clusters are computed has no old documents. Instead, it has a node for each band key that old
documents share with new ones (`stages.dedup.cluster.KEYS`). Such a key costs one edge for each group of new documents
that has it, even if a million old documents share it. Two new documents that resemble the same old one need not be in
the same cluster. A new document that is removed in favour of an old one gets the cluster of the old one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from stages.dedup.cluster import KEYS, MEMBER
from stages.dedup.fragment import NEAR, VERDICT, bucket_of, read_segments, split_place, write_segments
from stages.dedup.hashing import mix
from stages.dedup.index import ROWS, document_dtype, look_up, records_of
from stages.dedup.index_texts import OldSets
from stages.dedup.judge import ClusterJudge
from stages.dedup.lsh import EDGE
from stages.dedup.shingle_sets import ShingleSetReader
from stages.dedup.signature import MinHashSignature
from stages.dedup.survivor import DEFAULT, in_order, preference
from stages.task import Counters, Cursor, Inputs, Out

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: a band key, the first new document that has it (its place, with the part counted from the start of its group), and an
#: old document that has it: number of the index, and `document` of a KEY record
HIT = np.dtype([("place", "<u8"), ("key", "<u8"), ("index", "<u4"), ("document", "<u8")])
#: a cluster, an old document that shares a band key with one of its documents, and the key
TOUCHED = np.dtype([("root", "<u8"), ("index", "<u4"), ("document", "<u8"), ("key", "<u8")])
#: stands for the number of an old document's group among those of the new ones
_OLD = 2**32 - 1


class BandLookup:
    """Task that looks up band keys of new documents in indexes of old documents. It handles one range of keys.

    Arguments: `maps` (references to the files `bands.seg` of the new documents, one per group of parts), `firsts`
    (number of the first part of each group), `bucket` (number of the range), `indexes` (the files of keys of each
    index), and `groups` (the number of groups of each index). `groups` is under `$volatile`, which holds arguments that
    do not change the task's key.

    The task writes `hits.seg` (HIT records, in buckets by the group of the new document) and `links.seg` (EDGE records,
    which join new documents with the keys of old ones).
    """

    name = "minhash_lookup"
    version = 1

    @staticmethod
    def run(inputs: Inputs, cursor: Cursor, out: Out) -> Counters:
        args = inputs.args
        firsts = np.asarray(args["firsts"], np.uint64) << np.uint64(32)
        counters = {"keys": 0, "hits": 0, "linked": 0}
        with (out.segments("hits.seg", HIT, max(1, len(firsts))) as hit_writer,
              out.segments("links.seg", EDGE, 1) as link_writer):
            for block in inputs.segments(args["maps"], args["bucket"], whole=("key",), numbered=True):
                starts = np.flatnonzero(np.r_[True, block["key"][1:] != block["key"][:-1]])
                first, is_old = block[starts], np.zeros(len(starts), bool)
                for number, keys in enumerate(args["indexes"]):
                    at, old = look_up(inputs, keys, first)
                    _check_groups(inputs, keys, old, args["$volatile"]["groups"][number])
                    records = np.empty(len(old), HIT)
                    records["place"], records["key"] = first["place"][at], first["key"][at]
                    records["index"], records["document"] = number, old["document"]
                    hit_writer.write(first["source"][at], records)
                    is_old[at] = True
                    counters["hits"] += len(records)
                linked = block[np.repeat(is_old, np.diff(np.r_[starts, len(block)]))]
                edges = np.empty(len(linked), EDGE)
                edges["a"] = linked["place"] + firsts[linked["source"]]
                edges["b"] = np.uint64(KEYS << 32) | linked["key"] >> np.uint64(1)
                link_writer.write(np.zeros(len(edges), np.int64), edges)
                counters["keys"] += len(starts)
                counters["linked"] += len(edges)
        return counters


def _check_groups(inputs: Inputs, keys: Mapping[str, Any], records: NDArray[Any], groups: int) -> None:
    """Raise an error about a damaged file if one of the KEY records `records` names a group that its index does not
    have. The records were read from the files of keys `keys` of the index, which has `groups` groups."""
    beyond = records[records["document"] >> np.uint64(32) >= groups]
    if len(beyond):
        file = int(bucket_of(beyond["key"][:1], len(keys["files"]))[0])
        raise inputs.damaged(keys["files"][file], f"names group {int(beyond['document'][0]) >> 32} of the index, which "
                                                  f"has only {groups}")


class Routes:
    """Task that assigns old documents (those of an index) to clusters of new documents. It processes one group of new
    documents. An old document that shares a band key with a new one is assigned to the cluster of the new one.

    Arguments: `members` (references to files of MEMBER records, which say in which cluster a new document is), `hits`
    (references to files of HIT records, which pair new with old documents), `group` (number of the group of new
    documents, and of its bucket in both kinds of files), `buckets` (number of buckets of clusters). The task writes
    `touched.seg` (TOUCHED records, which name the old documents for each cluster, in buckets of clusters).
    """

    name = "minhash_routes"
    version = 1

    @staticmethod
    def run(inputs: Inputs, cursor: Cursor, out: Out) -> Counters:
        args = inputs.args
        members = np.concatenate(read_segments(inputs, args["members"], args["group"], MEMBER))
        place = members["part"].astype(np.uint64) << np.uint64(32) | members["row"].astype(np.uint64)
        order = np.argsort(place)
        hits = np.concatenate(read_segments(inputs, args["hits"], args["group"], HIT))
        records = np.empty(len(hits), TOUCHED)
        records["root"] = members["root"][order][np.searchsorted(place[order], hits["place"])]
        for field in ("index", "document", "key"):
            records[field] = hits[field]
        write_segments(out, "touched.seg", records, bucket_of(mix(records["root"]), args["buckets"]), args["buckets"],
                       ("root", "index", "document", "key"))
        return {"touched": len(records)}


class VerifyAgainst:
    """Task that decides, for one bucket of clusters, which of the new documents are removed. Old documents always stay.
    Apart from that, the task decides as `stages.dedup.verify:Verify` does.

    Its arguments are those of `Verify` and four more: `touched` (references to files of TOUCHED records), `indexes`
    (for each index its groups, and `rank`, which is added to the priorities of its documents), `signature` and
    `signature_key` (config and key of the stage that made the signatures). It writes the same files as `Verify`.
    """

    name = "minhash_verify_against"
    version = 2

    @staticmethod
    def run(inputs: Inputs, cursor: Cursor, out: Out) -> Counters:
        args = inputs.args
        ranks, judged, prefer = np.asarray(args["ranks"], np.int64), 0, args.get("prefer", DEFAULT)
        counters = {"comparisons": 0, "removed": 0, "kept": 0, "capped": 0, "max_cluster_kept": 0}
        volatile = args["$volatile"]
        tokenizer = {"tokenizer": volatile["tokenizer"]} if "tokenizer" in volatile else {}
        stage = MinHashSignature({**args["signature"], **tokenizer})
        sets, old_sets = (ShingleSetReader(inputs, args["shingles"], volatile["cache"]),
                          OldSets(inputs, stage, volatile["cache"]))
        touched = np.concatenate(read_segments(inputs, args["touched"], args["bucket"], TOUCHED))
        touched = touched[np.lexsort([touched[field] for field in reversed(TOUCHED.names or ())])]
        removed_for_old = documents_read = 0

        def write_near(source: NDArray[Any], near: NDArray[Any]) -> None:
            near_writer.write(source[source != _OLD], near[source != _OLD])

        with (out.segments("verdicts.seg", VERDICT, len(ranks)) as verdict_writer,
              out.segments("near.seg", NEAR, len(ranks)) as near_writer):
            for block in inputs.segments(args["candidates"], args["bucket"], whole=("root",), numbered=True):
                start = np.searchsorted(touched["root"], block["root"].min(), "left")
                stop = np.searchsorted(touched["root"], block["root"].max(), "right")
                old = OldDocuments(inputs, args["indexes"], touched[start:stop], prefer)
                documents_read += len(old.documents)
                rank = np.r_[ranks[block["source"]], old.rank]
                together = np.concatenate([block, old.candidates(block.dtype)])
                order = in_order((together["root"],), preference(together, rank, prefer))
                together, rank = together[order], rank[order]
                judge = JudgeAgainst(together, rank, args, sets, counters, write_near, old,
                                     order - len(block), old_sets)
                verdicts = judge.verdicts()
                removed_for_old += judge.removed_for_old
                new = together["source"] != _OLD
                verdict_writer.write(together["source"][new], verdicts[new])
                judged += int(new.sum())
        sets.close()
        return {"judged": judged, **counters, "removed_for_old": removed_for_old, "old_documents": documents_read,
                "old_texts": old_sets.read}


class OldDocuments:
    """The old documents (those of an index) that share band keys with the new documents of some clusters.

    `documents` holds one DOCUMENT record for each pair of a cluster and an old document that shares a key with it. For
    each record, `root` is the cluster, `rank` the priority of the document, and `file` the reference to the file with
    its text. `touched` holds TOUCHED records, sorted. A TOUCHED record names a cluster, an old document, and a band key
    by which they are connected. TOUCHED record i is about the record number `of[i]` of `documents`.
    """

    def __init__(self, inputs: Inputs, indexes: Sequence[Mapping[str, Any]], touched: NDArray[Any],
                 prefer: Sequence[str]) -> None:
        self.touched = touched
        same = np.ones(len(touched), bool)
        for field in ("root", "index", "document"):
            same[1:] &= touched[field][1:] == touched[field][:-1]
        same[:1] = False
        self.of = np.cumsum(~same) - 1
        each = touched[~same]
        self.root = each["root"]
        self.documents = np.zeros(len(each), document_dtype(prefer))
        self.rank = np.zeros(len(each), np.int64)
        self.file: list[Mapping[str, Any]] = [{}] * len(each)
        group, row = split_place(each["document"])
        bucket = row // ROWS
        order = np.lexsort((row, group, each["index"]))
        which = np.stack([each["index"], group, bucket], axis=1)[order]
        edges = (np.flatnonzero((which[1:] != which[:-1]).any(axis=1)) + 1).tolist()
        for start, stop in zip([0, *edges], [*edges, len(each)]) if len(each) else ():
            numbers = order[start:stop]                            # of documents in one bucket of one file
            index = indexes[int(which[start][0])]
            about = index["groups"][int(which[start][1])]
            records = records_of(inputs, about["documents"], int(which[start][2]), self.documents.dtype)
            if int((row[numbers] % ROWS).max()) >= len(records):
                raise inputs.damaged(about["documents"], "lacks a document that the files of keys name")
            self.documents[numbers] = records[row[numbers] % ROWS]
            self.rank[numbers] = index["rank"] + about["rank"]
            for number in numbers.tolist():
                self.file[number] = about["texts"]

    def candidates(self, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return a record of type `dtype` for each old document, in the form of the candidates with which `Verify`
        compares texts. The fields for band keys and the shingle set stay empty."""
        records = np.zeros(len(self.documents), dtype)
        records["root"], records["source"] = self.root, _OLD
        for field in ("id_hi", "id_lo", "chars", *(["order"] if "order" in (dtype.names or ()) else [])):
            records[field] = self.documents[field]
        return records


class JudgeAgainst(ClusterJudge):
    """Decides which new documents of each cluster are removed. The old documents of a cluster (those of an index) are
    always kept. Among the candidates of a cluster, the old documents come first. `number` holds for each candidate its
    number among the old documents `old`, or a negative number if the candidate is a new document."""

    def __init__(self, candidates: NDArray[Any], rank: NDArray[Any], args: dict[str, Any], sets: ShingleSetReader,
                 counters: dict[str, int], write_near: Callable[[NDArray[Any], NDArray[Any]], None],
                 old: OldDocuments, number: NDArray[np.int64], old_sets: OldSets) -> None:
        super().__init__(candidates, candidates["source"], rank, args, sets, counters, write_near)
        self.old, self.number, self.old_sets = old, number, old_sets
        self.removed_for_old = self.small = 0      # no kernel decides: it cannot read old documents
        self.counts = _Sizes(self)
        self.position = np.empty(len(old.documents), np.int64)             # of each old document among the candidates
        is_old = number >= 0
        self.position[number[is_old]] = np.flatnonzero(is_old)

    def judge_cluster(self, start: int, stop: int, index: dict[int, list[int]] | None = None) -> None:
        root = self.candidates["root"][start]
        touched = slice(*np.searchsorted(self.old.touched["root"], [root, root + np.uint64(1)]).tolist())
        keys, positions = self.old.touched["key"][touched].tolist(), self.position[self.old.of[touched]].tolist()
        index = {}
        for i in sorted(range(len(keys)), key=lambda i: (self.place[positions[i]], positions[i])):
            index.setdefault(keys[i], []).append(positions[i])
        super().judge_cluster(start + int((self.number[start:stop] >= 0).sum()), stop, index)

    def verdicts(self) -> NDArray[Any]:
        verdicts = super().verdicts()
        for removed, _, _, kept in self.removals:
            if (number := int(self.number[kept])) >= 0:
                for half in ("cluster_hi", "cluster_lo"):
                    verdicts[half][removed] = self.old.documents[half][number]
                self.removed_for_old += 1
        return verdicts

    def _set(self, i: int) -> NDArray[np.uint64]:
        number = int(self.number[i])
        if number < 0:
            return super()._set(i)
        return self.old_sets.get(self.old.file[number], self.old.documents[number])


class _Sizes(list[int]):
    """List of the size of the shingle set of each candidate. The size for an old document is found by reading the
    document's text, because an index does not hold it: most old documents are never compared."""

    def __init__(self, judge: JudgeAgainst) -> None:
        super().__init__(judge.candidates["count"].tolist())
        self._judge = judge

    def __getitem__(self, i: Any) -> Any:
        return super().__getitem__(i) if self._judge.number[i] < 0 else len(self._judge._set(i))
