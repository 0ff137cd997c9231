"""Decides which documents of clusters of near-duplicates are removed, one cluster after another, by the rules that
`stages.dedup.verify` explains."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from stages.dedup.boilerplate import Boilerplate, Remainders
from stages.dedup.fragment import CONTAINED, NEAR, SIMILAR, VERDICT, id_text, most_similar
from stages.dedup.hashing import mix
from stages.dedup.sets import jaccard, judge_clusters
from stages.dedup.shingle_sets import ShingleSetReader
from stages.dedup.survivor import DEFAULT
from stages.document import DuplicateId

if TYPE_CHECKING:
    from numpy.typing import NDArray


#: similarity from which two kept documents are recorded as near-duplicates of each other
RESEMBLING = 0.5
#: a removal: number of the removed candidate, why it is removed, its similarity to the kept one, number of the kept one
_REMOVAL = np.dtype([("removed", "<i8"), ("code", "<u4"), ("similarity", "<f8"), ("kept", "<i8")])
#: two kept candidates that resemble each other: their numbers and their similarity
_PAIR = np.dtype([("candidate", "<i8"), ("other", "<i8"), ("similarity", "<f8")])
#: pairs of resembling documents that are held before they are written, Python tuples of up to 240 bytes
HELD = 1 << 16
#: most documents of a cluster about which a kernel decides; the pairs of its documents must fit into memory
SMALL = 32


def contained(similarity: float, size: int, other_size: int) -> float:
    """Return the share of the values of one set that another set also has, computed from the Jaccard similarity of the
    two. The sets have `size` and `other_size` values."""
    common = round(similarity * (size + other_size) / (1 + similarity))
    return common / size if size else 0.0


class ClusterJudge:
    """Decides which documents of clusters of near-duplicates are removed, one cluster after another.

    The methods name a document by its row number in the array `candidates`. This array is sorted by cluster, and within
    a cluster by the order in which documents are decided. Pairs of kept documents that resemble each other are written
    by `write_near`, which gets two arrays: the number of a document's group, and a NEAR record about the document. At
    most about HELD pairs are held before they are written.
    """

    def __init__(self, candidates: NDArray[Any], file: NDArray[Any], rank: NDArray[Any], args: dict[str, Any],
                 sets: ShingleSetReader, counters: dict[str, int],
                 write_near: Callable[[NDArray[Any], NDArray[Any]], None]) -> None:
        self.candidates, self.sets, self.counters = candidates, sets, counters
        self.threshold, self.cap = float(args["verify"]), int(args["max_comparisons"])
        self.containment, self.record = float(args.get("containment", 0.0)), bool(args.get("record"))
        #: whether documents are decided in the order of `place`
        self.by_place = tuple(args.get("prefer", DEFAULT)) == DEFAULT
        self.file, self.rank, self.last_rank = file, rank, int(rank.max(initial=0))
        self.bands, self.counts = candidates["bands"], candidates["count"].tolist()
        self.boilerplate = Boilerplate(**args["boilerplate"]) if args.get("boilerplate") else None
        #: compares documents of the cluster without its boilerplate; None if it has none
        self.remainders: Remainders | None = None
        #: largest cluster about which a kernel decides: in larger clusters, limits of the search or boilerplate, which
        #: the kernel does not know, could change the result
        self.small = min(SMALL, self.cap + 1, self.boilerplate.smallest_limit if self.boilerplate else SMALL)
        if not self.threshold:
            self.small = 0
        self._write_near = write_near
        self._near: list[tuple[int, int, float]] = []                  # values of _PAIR
        self.removals: list[tuple[int, int, float, int]] = []          # values of _REMOVAL
        #: what the kernel decided: _PAIR and _REMOVAL records
        self._small_near, self._small_removals = [np.zeros(0, _PAIR)], [np.zeros(0, _REMOVAL)]

    @cached_property
    def place(self) -> list[tuple[int, int]]:
        """Return (priority, negative number of characters) for each candidate. The default of `prefer` orders the
        candidates of a cluster by this pair, and then by id."""
        return list(zip(self.rank.tolist(), (-self.candidates["chars"].astype(np.int64)).tolist()))

    @cached_property
    def where(self) -> list[tuple[int, int, int, int]]:
        """Return, for each candidate, where its shingle set is stored, as the arguments of `ShingleSetReader.get`."""
        columns = (self.candidates[field].tolist() for field in ("offset", "count", "sum"))
        return list(zip(self.file.tolist(), *columns))

    def verdicts(self) -> NDArray[Any]:
        """Decide about all candidates. Returns a VERDICT record for each, in order, which says whether the candidate is
        removed and in whose favour."""
        candidates, root = self.candidates, self.candidates["root"]
        starts = np.flatnonzero(np.r_[True, root[1:] != root[:-1]])
        sizes = np.diff(np.r_[starts, len(root)])
        by_id = np.lexsort((candidates["id_lo"], candidates["id_hi"], root))
        ids = candidates[["root", "id_hi", "id_lo"]][by_id]
        twice = np.flatnonzero(ids[1:] == ids[:-1])
        if len(twice):
            raise DuplicateId(id_text(*ids[["id_hi", "id_lo"]][twice[0]]))
        is_small = sizes <= self.small
        for chunk in self._chunks(starts[is_small], sizes[is_small]):
            self._judge_small(*chunk)
        for start, size in zip(starts[~is_small].tolist(), sizes[~is_small].tolist()):
            self.judge_cluster(start, start + size)
        self._flush_near()
        removals = np.concatenate([*self._small_removals, np.array(self.removals, _REMOVAL)])
        removed = removals["removed"]
        verdicts = np.zeros(len(candidates), VERDICT)
        for field in ("part", "row"):
            verdicts[field] = candidates[field]
        verdicts["removed"][removed], verdicts["similarity"][removed] = removals["code"], removals["similarity"]
        for half in ("hi", "lo"):
            verdicts[f"kept_{half}"][removed] = candidates[f"id_{half}"][removals["kept"]]
            verdicts[f"cluster_{half}"] = np.repeat(ids[f"id_{half}"][starts], sizes)
        return verdicts

    def _chunks(self, starts: NDArray[np.int64],
                sizes: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Divide clusters into chunks, and yield (the first candidate of each cluster, the size of each cluster) for
        every chunk. The shingle sets of a chunk are read at once, so its size is limited. Chunks follow the order in
        which files hold the sets. The pairs of documents count towards the size, because for short texts they take more
        memory than the sets."""
        order = np.argsort(mix(self.candidates["root"][starts]))
        starts, sizes = starts[order], sizes[order]
        before = np.r_[0, np.cumsum(8 * self.candidates["count"].astype(np.int64))]
        ends = np.cumsum(before[starts + sizes] - before[starts] + _PAIR.itemsize * (sizes * (sizes - 1) // 2))
        edges = (np.flatnonzero(np.diff(ends // self.sets.chunk_bytes)) + 1).tolist()
        for first, stop in zip([0, *edges], [*edges, len(starts)]) if len(starts) else ():
            yield starts[first:stop], sizes[first:stop]

    def _judge_small(self, starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> None:
        """Decide about small clusters, all at once, by a compiled function. `starts` holds the first candidate of each
        cluster, and `sizes` its number of candidates."""
        stops = np.cumsum(sizes)
        members = np.arange(stops[-1]) + np.repeat(starts - (stops - sizes), sizes)
        candidates = self.candidates[members]
        values, offsets = self.sets.read(self.file[members], candidates)
        decided = judge_clusters(stops - sizes, stops, np.ascontiguousarray(candidates["bands"]), values, offsets,
                                 candidates["count"].astype(np.int64), self.threshold, self.containment, RESEMBLING)
        gone = np.flatnonzero(decided.twins >= 0)
        removals, pairs = np.empty(len(gone), _REMOVAL), np.empty(len(decided.near), _PAIR)
        removals["removed"], removals["kept"] = members[gone], members[decided.twins[gone]]
        removals["similarity"] = decided.similarities[gone]
        removals["code"] = np.where(removals["similarity"] >= self.threshold, SIMILAR, CONTAINED)
        pairs["candidate"], pairs["other"] = members[decided.near].T
        pairs["similarity"] = decided.near_similarities
        self._small_removals.append(removals)
        self._small_near.append(pairs)
        if sum(map(len, self._small_near)) >= HELD:
            self._flush_near()
        self._count(len(members) - len(gone), len(gone), decided.most_kept)
        self.counters["comparisons"] += decided.comparisons

    def _count(self, kept: int, removed: int, most_kept: int) -> None:
        self.counters["kept"] += kept
        self.counters["removed"] += removed
        self.counters["max_cluster_kept"] = max(self.counters["max_cluster_kept"], most_kept)

    def judge_cluster(self, start: int, stop: int, index: dict[int, list[int]] | None = None) -> None:
        """Decide about a cluster: the candidates from `start` up to, but not including, `stop`. `index` holds documents
        that are already kept, by band key; documents that this call keeps are added to it."""
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
            self._near += ((i, j, s) for j, s in near)
            if len(self._near) >= HELD:
                self._flush_near()
            if self.threshold and i + 1 < stop:
                for key in self.bands[i].tolist():
                    if self.by_place:
                        index.setdefault(key, []).append(i)
                    else:
                        insort(index.setdefault(key, []), i, key=self.place.__getitem__)
        self._count(survivors, stop - start - survivors, survivors)

    def _flush_near(self) -> None:
        """Write the collected pairs of kept documents that resemble each other, as a NEAR record for each document of a
        pair, and drop the pairs from memory. Pages of one template form very many pairs, but a removal slice names only
        a few for each document. So only the most similar ones are written."""
        pairs = np.concatenate([*self._small_near, np.array(self._near, _PAIR)])
        self._near, self._small_near = [], [np.zeros(0, _PAIR)]
        i, j = pairs["candidate"], pairs["other"]
        own, resembled = np.r_[i, j], np.r_[j, i]
        records = np.zeros(len(own), NEAR)
        for field in ("part", "row"):
            records[field] = self.candidates[field][own]
        for field in ("id_hi", "id_lo"):
            records[field] = self.candidates[field][resembled]
        records["similarity"] = np.tile(pairs["similarity"], 2)
        written = most_similar(own, records)
        self._write_near(self.candidates["source"][own[written]], records[written])

    def _twin(self, i: int, start: int,
              index: dict[int, list[int]]) -> tuple[int | None, float, list[tuple[int, float]]]:
        """Look for a kept document in whose favour document `i` is removed. Returns (this document, or None if `i`
        stays; the similarity of the two; (kept document, similarity) for each kept document that resembles `i`, if `i`
        stays).

        `index` holds the kept documents by band key, and `start` is the first document of the cluster. Documents that
        share the most bands with `i` are compared first, and of these the one that comes first in the cluster.

        If `verify` is 0, every document but the first is removed in favour of `start`. The similarity is then NaN,
        unless `record` asks for it.
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
        """Choose the documents from `kept` that are nearest to document `i` in length, so that not all need to be
        compared. `kept` holds kept documents with one band key, sorted by priority and then by length.

        For each priority, the documents on either side of the place where the length of `i` belongs are chosen: up to
        `cap` longer and `cap` shorter ones for the priority of `i`, and up to half as many (rounded up) for any other.
        """
        nearest: dict[int, None] = {}
        rank, length = self.place[i]
        for priority in range((rank if self.by_place else self.last_rank) + 1):
            middle = bisect_left(kept, (priority, length), key=self.place.__getitem__)
            reach = self.cap if priority == rank else (self.cap + 1) // 2
            nearest.update(dict.fromkeys(kept[max(0, middle - reach):middle + reach]))
        return nearest

    def _set(self, i: int) -> NDArray[np.uint64]:
        return self.sets.get(*self.where[i])
