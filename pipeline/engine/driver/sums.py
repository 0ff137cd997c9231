"""Adds up the commit records of the tasks of a plan node, so that callers who need a few figures do not have to read a
million records.

A plan node is a group of tasks of the same kind, for example the tasks of a pass or of a barrier. The error rate of a
pass, the warnings about its sources, the progress of a resumed run and the report need only sums over the records of a
node. `Summing` adds up the records once, in plan order, when the node ends. `pipeline.plan.fresh` keeps the sums in the
store, with a hash of the node's inputs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from pipeline.store.records import Counters, PartRecord, merge_counters
from pipeline.store.temp import scratch_database


@dataclass
class BatchSums:
    """Sums over a batch of tasks, for the display of progress. A batch holds the tasks that a plan node (a group of
    tasks, such as a pass) adds to the queue together. `node` names the plan node, or one wave of it (tasks that may run
    at the same time). `weight` is the number of bytes that the tasks read."""

    node: str
    tasks: int = 0
    weight: int = 0
    docs: int = 0
    quarantined: int = 0
    input_docs: dict[str, int] = field(default_factory=dict)


@dataclass
class NodeSums:
    """Sums over all tasks of a plan node (a group of tasks, such as a pass or a barrier).

    * `counters`: for a pass, the merged counters of its tasks. For any other node, {wave: merged counters}. A wave is a
      group of tasks that may run at the same time, and each wave counts different things. If the node has no waves, its
      tasks are under "task".
    * `lost`: numbers of quarantined documents by reason. Records that could not be read are not counted.
    * `writes`: names of the files that the tasks wrote.
    * `content`: a hash over the sorted content hashes of the files that the tasks wrote; for a pass, only of
      `kept.parquet` (documents) and `gone.parquet` (row sets: lists of removed rows).
    * `results`: a hash over the tasks and the attempts that made their records, in plan order. The hash changes
      whenever a record changes.
    """

    batches: list[BatchSums] = field(default_factory=list)
    tasks: int = 0
    rows: int = 0                                  # of kept parts
    bytes: int = 0
    cpu_s: float = 0.0
    wall_s: float = 0.0
    max_rss_mb: float = 0.0
    counters: Counters = field(default_factory=dict)
    lost: dict[str, int] = field(default_factory=dict)
    writes: list[str] = field(default_factory=list)
    content: str = ""
    results: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, doc: Mapping[str, Any]) -> NodeSums:
        return cls(**{**doc, "batches": [BatchSums(**b) for b in doc["batches"]]})


class Summing:
    """Adds up the commit records of the tasks of a plan node (a group of tasks, such as a pass). Memory holds only the
    sums, because the content hashes are sorted on disk."""

    def __init__(self, node: str, kind: str) -> None:
        self._node, self._pass = node, kind == "pass"
        self.sums = NodeSums()
        self._results = hashlib.blake2b(digest_size=16)
        self._writes: set[str] = set()
        self._contents = scratch_database(1)
        self._contents.execute("CREATE TABLE content (sum TEXT)")

    def begin(self, node: str) -> None:
        """Begin a batch of tasks. `node` names the plan node (a group of tasks, such as a pass), or one wave of it
        (tasks that may run at the same time). Records that are added after this call belong to the batch."""
        self.sums.batches.append(BatchSums(node))
        self._results.update(b"batch\n")

    def add(self, record: PartRecord, weight: int = 0, origin: str = "") -> None:
        """Add the next commit record to the sums. `weight`: the bytes that its task reads. `origin`: the source or
        dataset that the task reads."""
        sums, batch, counters = self.sums, self.sums.batches[-1], record.counters
        self._results.update(f"{record.key} {record.attempt} {origin}\n".encode("utf-8", "surrogatepass"))
        batch.tasks += 1
        batch.weight += weight
        batch.docs += docs_in(record)
        merge_counters(batch.input_docs, input_docs_of(record), False)
        batch.quarantined += len(record.quarantine)
        sums.tasks += 1
        sums.cpu_s += record.cpu_s
        sums.wall_s += record.wall_s
        sums.max_rss_mb = max(sums.max_rss_mb, record.rss_mb)
        contents = []
        self._writes |= record.files.keys()
        for name, info in record.files.items():
            sums.bytes += info.bytes
            if name == "kept.parquet":
                sums.rows += info.rows
            if name in ("kept.parquet", "gone.parquet") or not self._pass:
                contents.append((info.content,))
        self._contents.executemany("INSERT INTO content VALUES (?)", contents)
        into = sums.counters
        if not self._pass:
            into = into.setdefault(self._wave(record.node), {})
        merge_counters(into, counters)
        if counters.get("quarantined"):
            self._count_lost(counters)

    def _wave(self, node: str) -> str:
        """Returns the name of the wave (a group of tasks that may run at the same time) that a record belongs to.
        Returns "task" if its plan node has no waves. `node` is what the record names: "NODE" or "NODE/WAVE". NODE may
        be another plan node than the one being summed, because two nodes may have asked for the same task."""
        if node == self._node or "/" not in node:
            return "task"
        return node.removeprefix(f"{self._node}/") if node.startswith(f"{self._node}/") else node.rpartition("/")[2]

    def _count_lost(self, counters: Counters) -> None:
        unreadable: dict[str, int] = {}
        for source in counters.get("read", {}).values():
            merge_counters(unreadable, source["bad"], False)
        for reason, n in counters["quarantined"].items():
            if n > unreadable.get(reason, 0):
                self.sums.lost[reason] = self.sums.lost.get(reason, 0) + n - unreadable.get(reason, 0)

    def end(self) -> NodeSums:
        """Return the sums. Nothing can be added afterwards."""
        rows = self._contents.execute("SELECT sum FROM content ORDER BY sum")
        self.sums.content, self.sums.results = content_hash(sum for sum, in rows), self._results.hexdigest()
        self._contents.close()
        self.sums.writes = sorted(self._writes)
        return self.sums


def content_hash(contents: Iterable[str]) -> str:
    """Returns the hash `NodeSums.content` of a plan node (a group of tasks, such as a pass). `contents` are the content
    hashes of the files that it covers, in sorted order."""
    digest = hashlib.sha256()
    for i, content in enumerate(contents):
        digest.update(("\n" * bool(i) + content).encode())
    return digest.hexdigest()


def sum_records(node: str, kind: str, records: Iterable[PartRecord]) -> NodeSums:
    """Returns the sums over the commit records of a plan node (a group of tasks, such as a pass). It is for callers
    that do not have the specs of the tasks. The bytes and sources that the tasks read are therefore missing: the only
    batch has `weight` 0, and `results` does not cover the sources."""
    summing = Summing(node, kind)
    summing.begin(node)
    for record in records:
        summing.add(record)
    return summing.end()


def docs_in(record: PartRecord) -> int:
    """Returns the number of documents that one task read, from the counters in its commit record; 0 for a task that
    reads no documents."""
    sources = record.counters.get("in")
    if isinstance(sources, dict):
        return sum(s.get("docs", 0) for s in sources.values() if isinstance(s, dict))
    docs = record.counters.get("docs", 0)
    return int(docs) if isinstance(docs, (int, float)) else 0


def input_docs_of(record: PartRecord) -> dict[str, int]:
    """Returns how many documents one task read from sources, by source. The result is empty for a task that reads the
    results of other tasks."""
    read, documents = record.counters.get("read"), record.counters.get("in")
    if not isinstance(read, dict) or not isinstance(documents, dict):
        return {}
    return {source: documents.get(source, {}).get("docs", 0) for source in read}
