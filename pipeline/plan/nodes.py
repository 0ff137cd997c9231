"""Defines the elements of a plan: nodes, the stages of their passes, and the results that later nodes use. A node is a
group of tasks, such as a pass (steps that run together) or a barrier (a step that needs all documents at once)."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.engine.driver.queue import TaskRecords
from pipeline.engine.task import TaskSpec
from pipeline.plan.file_list import SourceFile
from pipeline.store.dataset import PassParts
from pipeline.store.records import PartRecord
from pipeline.store.temp import Spilled, path_bytes, path_of, scratch_database
from stages.barrier import FileRef, PartRef, TaskResult
from stages.dedup.index import DedupIndex
from stages.stage import Stage

#: a running node: it yields the specs of tasks and is sent their records
Work = Generator[Iterable[TaskSpec], TaskRecords, Any]

DOCUMENTS = "pipeline.passes.documents:DocumentPass"
INDEX = "pipeline.passes.index:Index"
UNITS = "pipeline.passes.index:ListUnits"


@dataclass(frozen=True)
class ChainStep:
    """One stage of a pass (steps that run together). `key` is a hash of everything that decides what the stage does to
    a document, such as its name, version, settings and files."""

    name: str
    key: str
    replay_key: str                               # its key without thresholds
    target: str
    config: dict[str, Any]
    stage: Stage
    resources: dict[str, str] = field(default_factory=dict)    # field of the config → sha256, which a worker checks

    def arg(self) -> dict[str, Any]:
        return {"name": self.name, "key": self.key,
                "$volatile": {"target": self.target, "config": self.config, "resources": self.resources}}


@dataclass
class Node:
    """A node of the plan, which is a group of tasks. It is the indexing of a source, a pass (steps that run together),
    a barrier (a step that needs all documents at once), the tokenizer, or the shards of a stream.

    `work(results)` returns the generator that yields the tasks, and `deps` are the names of the nodes whose results it
    needs. `inputs` returns, as JSON, everything else that decides which tasks the node has and what the keys of the
    tasks are. If `inputs` is None, every plan checks all tasks of the node one by one.
    """

    name: str
    kind: str                                     # index | pass | barrier | tokenizer | shards
    deps: tuple[str, ...]
    work: Any                                     # (results: Mapping[str, Any]) -> Work
    dataset: str = ""
    steps: tuple[str, ...] = ()                   # as shown to people
    publishes: bool = False                       # the last pass of a dataset
    inputs: Callable[[], Any] | None = None
    against: tuple[str, ...] = ()                 # nodes and folders whose index a barrier reads
    batches: list[TaskRecords] = field(default_factory=list)     # the records of its tasks, filled while it runs
    parts: PassParts | None = None                # files to publish; noted when a pass ends, until they are published

    @property
    def upstream(self) -> list[str]:
        """The names of the nodes from which the node gets its documents. These are its `deps`, except those of which it
        only reads a deduplication index."""
        return [name for name in self.deps if name not in self.against]


@dataclass(frozen=True)
class Kept:
    """The documents that one task of a pass (steps that run together) kept: the rows of the file `text`, without the
    rows that the file `gone` lists as removed."""

    record: PartRecord
    origin: str                                   # source or dataset that its part was read from
    text: FileRef
    rows: int                                     # documents that are left
    bytes: int                                    # of the text file
    gone: FileRef | None = None
    counts: FileRef | None = None                 # for how many documents the rows stand (`stages.dedup.counts`)


@dataclass
class PassResult:
    """The result of a pass (steps that run together): the records of its tasks in plan order. `parts` yields the
    documents that each task kept; later nodes read them."""

    records: TaskRecords
    dataset: str = ""
    of: BarrierResult | None = None               # the barrier's result, if the pass wrote row sets and no text

    def parts(self) -> Iterator[Kept]:
        if self.of is None:
            for (_, origin, _), record in self.records.with_tasks():
                text = record.files["kept.parquet"]
                yield Kept(record, origin, text.ref(), text.rows, text.bytes)
            return
        read = ((part, counts) for part, _, counts in self.of.counted() if part.rows)
        for (part, counts), ((_, origin, _), record) in zip(read, self.records.with_tasks(), strict=True):
            gone = record.files["gone.parquet"]
            yield Kept(record, origin, part.text, gone.meta["kept"], part.bytes, gone.ref() if gone.rows else None,
                       counts)


class SplitIndex(Mapping[str, Any]):
    """Maps the path of each big input file that can be split to its splits (the pieces that separate tasks read). The
    splits are read from the store on access; their paths in the store are kept in a database on disk."""

    def __init__(self, places: Iterable[tuple[str, str, str]], read: Callable[[str, str], bytes]) -> None:
        """Make the map from `places`, one tuple for each big input file. It has the path of the input file, and the
        path and the sha256 of a file in the store that lists where the input file's splits begin. `read`
        (`Store.read_checked`) reads such a file."""
        self._read = read
        self._db = scratch_database(1)
        self._db.execute("CREATE TABLE place (file BLOB PRIMARY KEY, path TEXT, sha256 TEXT) WITHOUT ROWID")
        self._db.executemany("INSERT INTO place VALUES (?, ?, ?)", ((path_bytes(f), *place) for f, *place in places))
        self._size: int = self._db.execute("SELECT count(*) FROM place").fetchone()[0]

    def __getitem__(self, path: str) -> list[dict[str, int]]:
        place = self._size and self._db.execute("SELECT path, sha256 FROM place WHERE file = ?",
                                                (path_bytes(path),)).fetchone()
        if not place:
            raise KeyError(path)
        splits: list[dict[str, int]] = json.loads(self._read(*place))
        return splits

    def __iter__(self) -> Iterator[str]:
        for (file,) in self._db.execute("SELECT file FROM place ORDER BY file").fetchall():
            yield path_of(file)

    def __len__(self) -> int:
        return self._size


class Units:
    """The files of a source, in lists of files that must be read together. Iteration reads these lists from the store,
    from the file at `path` with the hash `sha256`. `files` are all files of the source."""

    def __init__(self, files: Iterable[SourceFile], read: Callable[[str, str], bytes], path: str, sha256: str) -> None:
        self._files, self._read, self._path, self._sha256 = files, read, path, sha256

    def __iter__(self) -> Iterator[list[SourceFile]]:
        files = {file.path: file for file in self._files}
        for unit in json.loads(self._read(self._path, self._sha256)):
            yield [files[path] for path in unit]


@dataclass
class BarrierResult:
    """The result of a barrier, a step such as deduplication that needs all documents at once. For each part (file of
    documents) that the barrier read, it has a removal slice (a list of the rows to drop) or None. Iteration raises
    ValueError when `slices` is shorter or longer than `parts`, because documents would be lost."""

    parts: Sequence[PartRef]
    slices: Sequence[FileRef | None]
    counts: Sequence[FileRef | None] | None = None   # by part, for how many documents its rows stand; None: not counted
    index: DedupIndex | None = None                  # of the documents that stay, if a later deduplication reads it

    def __iter__(self) -> Iterator[tuple[PartRef, FileRef | None]]:
        return zip(self.parts, self.slices, strict=True)

    def counted(self) -> Iterator[tuple[PartRef, FileRef | None, FileRef | None]]:
        """Yield (part, removal slice, counts) for each part. `counts` is a file with the number of documents that each
        row stands for, or None. If this barrier does not count duplicates, it is the file that came with the part from
        an earlier barrier."""
        counts = (part.counts for part in self.parts) if self.counts is None else self.counts
        return zip(self.parts, self.slices, counts, strict=True)


def spilled_parts() -> Spilled[PartRef]:
    return Spilled(encode=vars, decode=lambda doc: PartRef(**doc))


def result(record: PartRecord) -> TaskResult:
    return TaskResult({name: info.ref() for name, info in record.files.items()}, record.counters)
