"""Barrier stages: steps that must see the whole dataset (deduplication). They are plan fragments, not code that runs.

A barrier names the per-document stage that computes its side table in the pass before it. It also makes the waves of
tasks that turn the side tables into a removal slice for every part. The engine runs the waves and then the next pass,
which reads each part together with its slice. Text never enters the exchange. The driver sees only references to parts
and counters, never a document.

If the pass after a barrier only fills the side table of another barrier, it does not write the documents again. It
leaves a *row set*, the rows of the part that are gone by then, and the next barrier and pass use the part as it is.
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

#: A reference to a file in the store, in the form used in task arguments. Only `content` enters keys, never the path.
#: {"$ref": "objects/KEY/ATTEMPT.name", "content": "<hash of what it says>", "sha256", "bytes": n, "rows": n}
FileRef = dict[str, Any]

#: A kept document that resembles another kept one, and how much.
NEAR_DUPLICATE = pa.struct([("id", pa.string()), ("similarity", pa.float64())])

#: The columns of a removal slice: one row for each document of the part that the barrier says something about, sorted
#: by `row`, which counts the part's kept rows. An empty `reason` keeps the document and only records its cluster and,
#: in `near`, the kept documents it resembles. A row set has the same columns; `kept` and `similarity` are null.
SLICE_SCHEMA = pa.schema([("row", pa.uint32()), ("reason", pa.string()), ("kept", pa.string()),
                          ("similarity", pa.float64()), ("cluster", pa.string()), ("near", pa.list_(NEAR_DUPLICATE))])


@dataclass(frozen=True)
class PartRef:
    """One part of the barrier's input, in plan order (source path order within a dataset)."""

    key: str                      # content key of the task that made it
    dataset: str                  # dataset or source it comes from, as named in `from:` / `priority:`
    rank: int                     # priority: 0 is kept first when documents of two datasets are duplicates
    rows: int                     # documents that take part
    bytes: int                    # of its text file
    text: FileRef                 # kept.parquet, the columns of docs/contracts.md: Documents on disk
    side: FileRef | None          # side table of the barrier's `prepare` stage: `row` (uint32), `id`, its own columns
    gone: FileRef | None = None   # row set: rows of `text` that are gone; the side table does not have them


@dataclass(frozen=True)
class TaskDraft:
    """A task to run: import path 'module:Class' (see pipeline.engine.task), JSON arguments, and a size for scheduling.

    The key is derived by the engine from (task, task version, args) with file paths left out. Drafts that name the same
    files share one list object of them, which must not be changed: the engine stores a long list once.
    """

    task: str
    args: dict[str, Any]
    weight: int = 1               # bytes it will read
    label: str = ""
    memory_mb: int = 500


@dataclass(frozen=True)
class TaskResult:
    """What a finished task left: its files by name, and its counters."""

    files: dict[str, FileRef]
    counters: dict[str, Any] = field(default_factory=dict)


#: Results of the waves so far: wave name → results in the order of their drafts.
Done = Mapping[str, Sequence[TaskResult]]
WaveTasks = Callable[[Done], Iterable[TaskDraft]]


@dataclass(frozen=True)
class Wave:
    """Tasks that may run at the same time, made from the results of earlier waves. A finished wave is repeated while
    `again` returns True. It then finds its own last results under its name."""

    name: str
    tasks: WaveTasks
    again: Callable[[Done], bool] = lambda done: False


class Barrier(Stage):
    """Base of barrier stages (exact, minhash)."""

    def prepare(self) -> tuple[str, dict[str, Any]]:
        """(target 'module:Class', config) of the per-document stage that fills the side table. It must not change a
        document: between two barriers none is written, and the change would be lost."""
        raise NotImplementedError

    def waves(self, parts: Sequence[PartRef]) -> list[Wave]:
        """The fragment, in order. Later waves may use the results of all earlier ones."""
        raise NotImplementedError

    def slices(self, parts: Sequence[PartRef], results: Done) -> Iterable[FileRef | None]:
        """For each part its removal slice (Parquet, SLICE_SCHEMA), or None when it is untouched."""
        raise NotImplementedError


def write_slice(out: Out, name: str, table: pa.Table, meta: dict[str, Any] | None = None) -> None:
    """Write a removal slice or a row set and note its rows. Its content hash is over the rows, not over the Parquet
    bytes."""
    write_table(table, out.path(name), write_statistics=False)
    h = hashlib.sha256()
    for row in (row for batch in table.to_batches(4096) for row in batch.to_pylist()):       # a list of all is large
        similarity = "" if row["similarity"] is None else row["similarity"].hex()
        h.update(f"{row['row']}\t{row['reason']}\t{row['kept'] or ''}\t{similarity}\t{row['cluster']}"
                 f"{''.join(chr(9) + n['id'] + n['similarity'].hex() for n in row['near'] or ())}\n".encode())
    out.note(name, rows=table.num_rows, content=h.hexdigest(), meta=meta)
