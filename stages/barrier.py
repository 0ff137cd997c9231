"""Barrier stages: steps that must see the whole dataset at once, such as deduplication.

A barrier processes no documents itself. It describes tasks, which the engine runs:

1. It names a per-document stage. In the pass before the barrier, this stage writes a side table: rows beside the kept
   documents, for instance their hashes. (A pass is a group of steps that run together, document by document.)
2. It plans waves of tasks. The tasks of a wave may run at the same time. They turn the side tables into one removal
   slice for every part: the list of rows to drop. (A part is the output of one task of the pass.)

After the waves, the engine runs the next pass, which reads each part together with its removal slice. The exchange
files, by which the tasks pass records on to each other, hold no text. The driver, the process that plans and commits,
sees only counters and references to files, never a document.

If the pass after a barrier only fills the side table of another barrier, it does not write the documents again. It
writes a *row set*: the list of the part's rows that are gone by then. The next barrier and the pass after it read the
same part again, without these rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from pipeline.base.parquet import write_table
from stages.stage import Stage
from stages.task import Out

#: A reference to a file in the store, in the form used in task arguments. Of its fields, only `content` enters the keys
#: of tasks, never the path.
#: {"$ref": "objects/KEY/ATTEMPT.name", "content": "<hash of its contents>", "sha256", "bytes": n, "rows": n}
FileRef = dict[str, Any]

#: A kept document that resembles another kept one, and how much.
NEAR_DUPLICATE = pa.struct([("id", pa.string()), ("similarity", pa.float64())])

#: The columns of a removal slice. It has one row for each document of the part that the barrier drops or annotates.
#: Rows are sorted by `row`, the document's number among the kept documents of the part. `kept` is the id of the
#: document that is kept instead. If `reason` is empty, the document is kept; the row then only records its cluster and,
#: in `near`, the kept documents that it resembles. A row set has the same columns; its `kept` and `similarity` are
#: null.
SLICE_SCHEMA = pa.schema([("row", pa.uint32()), ("reason", pa.string()), ("kept", pa.string()),
                          ("similarity", pa.float64()), ("cluster", pa.string()), ("near", pa.list_(NEAR_DUPLICATE))])


@dataclass(frozen=True)
class PartRef:
    """One part of the barrier's input, in plan order (source path order within a dataset)."""

    key: str                      # content key of the task that wrote it
    dataset: str                  # dataset or source it comes from, as named in `from:` / `priority:`
    rank: int                     # priority: 0 is kept first when documents of two datasets are duplicates
    rows: int                     # number of documents that take part in the barrier
    bytes: int                    # size of its text file
    text: FileRef                 # kept.parquet, the columns of docs/contracts.md: Documents on disk
    side: FileRef | None          # side table of the barrier's `prepare` stage: `row` (uint32), `id`, its own columns
    gone: FileRef | None = None   # row set: rows of `text` that earlier barriers removed; the side table lacks them


@dataclass(frozen=True)
class TaskDraft:
    """Describes a task to run: the import path 'module:Class' of its code (see pipeline.engine.task), its JSON
    arguments, and figures for scheduling.

    The engine derives the task's key from its declared name, its version and `args`, with the paths of files left out.
    Drafts that name the same list of files share one list object, so that the engine stores a long list only once. That
    list must not be changed.
    """

    task: str
    args: dict[str, Any]
    weight: int = 1               # bytes it will read
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
    """Tasks that may run at the same time. `tasks` makes them from the results of the earlier waves.

    When all tasks of the wave have ended and `again` returns True, the wave runs once more. `tasks` then gets the
    results of the wave's previous round, too, under the wave's own `name`.
    """

    name: str
    tasks: WaveTasks
    again: Callable[[Done], bool] = lambda done: False


class Barrier(Stage):
    """Base class of barriers (exact, minhash): steps that need all documents of a dataset at once."""

    def prepare(self) -> tuple[str, dict[str, Any]]:
        """Return ('module:Class', config) of the per-document stage that fills the barrier's side table. This stage
        must not change documents: between two barriers documents are not written, so a change would be lost."""
        raise NotImplementedError

    def waves(self, parts: Sequence[PartRef]) -> list[Wave]:
        """Return the waves of tasks that compute the barrier's result, in order. A wave may use the results of all
        earlier waves."""
        raise NotImplementedError

    def slices(self, parts: Sequence[PartRef], results: Done) -> Iterable[FileRef | None]:
        """Return one entry for each part, in order: its removal slice (a Parquet file with SLICE_SCHEMA), or None if
        the barrier drops and annotates none of its documents."""
        raise NotImplementedError


def write_slice(out: Out, name: str, table: pa.Table, meta: dict[str, Any] | None = None) -> None:
    """Write a removal slice or a row set, and register its number of rows and its content hash in `out`. The hash
    covers the values of the rows, not the Parquet bytes."""
    write_table(table, out.path(name), write_statistics=False)
    h = hashlib.sha256()
    for row in (row for batch in table.to_batches(4096) for row in batch.to_pylist()):   # a list of all rows is large
        similarity = "" if row["similarity"] is None else row["similarity"].hex()
        h.update(f"{row['row']}\t{row['reason']}\t{row['kept'] or ''}\t{similarity}\t{row['cluster']}"
                 f"{''.join(chr(9) + n['id'] + n['similarity'].hex() for n in row['near'] or ())}\n".encode())
    out.note(name, rows=table.num_rows, content=h.hexdigest(), meta=meta)
