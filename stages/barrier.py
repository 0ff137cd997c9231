"""Defines barriers: steps that must see the whole dataset at once, such as deduplication.

A barrier processes no documents itself. Instead it describes work for the engine:

1. It names a stage that processes single documents. This stage runs in the pass before the barrier (a pass is a group
   of steps that run together, document by document). It writes a side table: a table with a row for each kept document,
   for instance with hashes of its text.
2. It plans waves of tasks. The tasks of a wave may run at the same time. The tasks turn the side tables into removal
   slices, one for each part (the output of one task of the pass). A removal slice is the list of the part's rows to
   drop. The slice of a barrier that edits (`edits` is true) also names passages, as ranges of bytes, to cut out of
   other rows.

After the waves, the engine runs the next pass, which reads each part together with its removal slice. The tasks pass
records on to each other in exchange files, which hold no text. The driver (the process that plans tasks and commits
their results) sees only counters and references to files, never a document.

If the pass after a barrier only fills the side table of another barrier, the pass does not write the documents again.
Instead it writes a *row set* for each part: the list of the part's rows that have been removed up to then. The other
barrier, and the pass after it, read the part without these rows. After a barrier that edits, the pass always writes the
documents, because the other barrier has to see the texts without the passages that were cut.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import pyarrow as pa

from pipeline.base.parquet import write_table
from stages.stage import Stage
from stages.task import Out

#: A reference to a file in the store, in the form used in task arguments. Of its fields, only `content` enters the keys
#: of tasks, never the path.
#: {"$ref": "objects/KEY/ATTEMPT.name", "content": "<hash of its contents>", "sha256", "bytes": n, "rows": n}
FileRef = dict[str, Any]

#: The signal (number stored with a document) that says for how many documents a kept document stands, itself included.
COUNT = "dup_count"

#: A kept document that resembles another kept document, and how similar the two are.
NEAR_DUPLICATE = pa.struct([("id", pa.string()), ("similarity", pa.float64())])

#: The columns of a removal slice. It has one row for each document of the part that the barrier drops or annotates.
#: Rows are sorted by `row`, the document's number among the kept documents of the part. `kept` is the id of the
#: document that is kept instead. If `reason` is empty, the document is kept; the row then only records its cluster and,
#: in `near`, the kept documents that it resembles. A row set has the same columns; its `kept` and `similarity` are
#: null.
SLICE_SCHEMA = pa.schema([("row", pa.uint32()), ("reason", pa.string()), ("kept", pa.string()),
                          ("similarity", pa.float64()), ("cluster", pa.string()), ("near", pa.list_(NEAR_DUPLICATE))])

#: A passage to be cut out of a document (`stages.cut.Passage`). `start` and `end` are bytes of the document's UTF-8
#: text, as the part holds it.
PASSAGE = pa.struct([("start", pa.uint64()), ("end", pa.uint64()), ("reason", pa.string()), ("match", pa.string())])

#: The columns of the removal slice of a barrier that edits. `cuts` holds the passages to be cut out of a document that
#: stays; it is null for other documents. `cluster` may be null, too.
CUT_SCHEMA = SLICE_SCHEMA.append(pa.field("cuts", pa.list_(PASSAGE)))


@dataclass(frozen=True)
class PartRef:
    """One part of the input of a barrier: the output of one task of the pass before the barrier. Parts are in the order
    in which the plan lists those tasks. Within a dataset, this is the order of the paths of the source files."""

    key: str                      # content key of the task that wrote it
    dataset: str                  # dataset or source it comes from, as named in `from:` / `priority:`
    rank: int                     # priority: 0 is kept first when documents of two datasets are duplicates
    rows: int                     # number of documents that take part in the barrier
    bytes: int                    # size of its text file
    text: FileRef                 # kept.parquet, the columns of docs/contracts.md: Documents on disk
    side: FileRef | None          # side table of the barrier's `prepare` stage: `row` (uint32), `id`, its own columns
    gone: FileRef | None = None   # row set: rows of `text` that earlier barriers removed; the side table lacks them
    counts: FileRef | None = None  # by row of `text`: for how many further documents it stands (`stages.dedup.counts`)


@dataclass(frozen=True)
class TaskDraft:
    """Describes a task for the engine to run: the import path 'module:Class' of its code (see pipeline.engine.task),
    its JSON arguments, and figures for scheduling.

    The engine reuses the result of a task under a key, which is a hash of the task's declared name, its version and
    `args`. A file in `args` enters the key by its content, not by its path. Drafts that name the same list of files
    share one list object, so that the engine stores a long list only once. Nobody may change a shared list.
    """

    task: str
    args: dict[str, Any]
    weight: int = 1               # bytes that the task will read
    label: str = ""
    memory_mb: int = 500


@dataclass(frozen=True)
class TaskResult:
    """The result of a finished task: its output files by name, and its counters."""

    files: dict[str, FileRef]
    counters: dict[str, Any] = field(default_factory=dict)


#: Results of the waves so far: wave name → results in the order of their drafts.
Done = Mapping[str, Sequence[TaskResult]]
WaveTasks = Callable[[Done], Iterable[TaskDraft]]


@dataclass(frozen=True)
class Wave:
    """One wave of a barrier's work: tasks that may run at the same time. The field `tasks` is a function that makes
    them from the results of the earlier waves.

    The function `again` is called after all tasks of the wave have ended. If it returns True, the wave runs another
    round. `tasks` then also gets the results of the previous round, under the wave's own `name`.
    """

    name: str
    tasks: WaveTasks
    again: Callable[[Done], bool] = lambda done: False


class Barrier(Stage):
    """Base class of barriers, which are steps that need all documents of a dataset at once, such as `exact` and
    `minhash`.

    A barrier that cuts passages out of documents sets `edits` to True, and its config extends `stages.cut.CutConfig`.
    The next pass carries out the cuts, and drops documents that have become too short (`stages.cut`).

    A barrier that removes documents in favour of others may list COUNT in `signals`. If a later step reads this signal,
    the planner adds tasks that count, for each kept document, the documents that were removed in its favour
    (`pipeline.plan.counts`).
    """

    @property
    def rounds(self) -> int:
        """How many removals may follow each other. It is 1 if every document that is kept instead of another one stays.
        It is 2 if A may be removed in favour of B, and B in favour of C. The counts of removed documents are passed on
        in as many rounds (`stages.dedup.counts`)."""
        return 1

    def prepare(self) -> tuple[str, dict[str, Any]]:
        """Return ('module:Class', config) of the stage that fills the barrier's side table, which has a row for each
        document.

        The stage must not change documents: between two barriers documents are not written, so a change would be lost.
        The stage runs before the first scrubber of its pass. If the barrier edits, the stage runs last in its pass
        instead, because the positions of cuts must fit the stored text.
        """
        raise NotImplementedError

    def waves(self, parts: Sequence[PartRef]) -> list[Wave]:
        """Return the waves (groups of tasks that may run at the same time) that compute the barrier's result, in the
        order in which they run. The tasks of a wave may use the results of all earlier waves."""
        raise NotImplementedError

    def slices(self, parts: Sequence[PartRef], results: Done) -> Iterable[FileRef | None]:
        """Return one reference for each part of the input, in the order of `parts`. A part is the output of one task of
        the pass before the barrier. The reference names the part's removal slice, a Parquet file with SLICE_SCHEMA (or
        CUT_SCHEMA, if the barrier edits) that lists the documents to drop, annotate or cut. The reference is None if
        the part has no such documents."""
        raise NotImplementedError


def write_slice(out: Out, name: str, table: pa.Table, meta: dict[str, Any] | None = None) -> None:
    """Write `table` as the output file `name`, and register its number of rows and its content hash in `out`. The table
    is a removal slice (rows of a part to drop) or a row set (rows of a part that are gone already). The content hash
    covers the values of the rows, not the bytes of the Parquet file."""
    write_table(table, out.path(name), write_statistics=False)
    h = hashlib.sha256()
    for batch in table.to_batches(4096):                              # lists of all rows would be large
        columns = dict(zip(batch.schema.names, (column.to_pylist() for column in batch.columns)))
        for row, reason, kept, similarity, cluster, near, cuts in zip(
                columns["row"], columns["reason"], columns["kept"], columns["similarity"], columns["cluster"],
                columns["near"], columns.get("cuts") or repeat(None)):
            similar = "" if similarity is None else similarity.hex()
            more = "".join([f"\t{n['id']}{n['similarity'].hex()}" for n in near]) if near else ""
            more += "".join(map(_cut_line, cuts)) if cuts else ""
            h.update(f"{row}\t{reason}\t{kept or ''}\t{similar}\t{cluster}{more}\n".encode())
    out.note(name, rows=table.num_rows, content=h.hexdigest(), meta=meta)


def _cut_line(passage: Mapping[str, Any]) -> str:
    """Return the line by which a passage to be cut enters the content hash of `write_slice`."""
    return "\tcut" + json.dumps([passage[name] for name in ("start", "end", "reason", "match")])
