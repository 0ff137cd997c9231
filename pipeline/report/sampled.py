"""Chooses the parts (files of documents) of a dataset that the report reads. The report of a run with a million tasks
therefore reads no more than the report of a run with 64 tasks.

Counters give totals. Values that no counter has (signals, addresses) are read from the files of at most PARTS tasks of
each pass (group of steps that run together). At most ROWS rows of each kind (kept documents, or documents that one pass
dropped) are read. The tasks chosen are those with the smallest keys. Keys are hashes, so the choice is random, yet it
is the same in each report of a run. Figures are scaled to the totals; if all rows were read, they are exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from pipeline.report.nodes import NodeFigures, batches
from pipeline.store.fs import Store
from pipeline.store.records import FileInfo

#: most tasks of a pass whose files are read, and most rows of each stratum
PARTS, ROWS = 48, 400_000


@dataclass(frozen=True)
class Stratum:
    """A group of documents that the report samples: those that a dataset keeps, or those that one of its passes
    dropped. `total` is the number of documents, and `files` are the files of documents that are read. At most about
    `most_rows` rows are read."""

    kept: bool
    total: int
    files: tuple[FileInfo, ...]
    most_rows: int = ROWS

    @property
    def quota(self) -> int:
        """Return how many rows the report reads at most from each of `files`."""
        return max(1, self.most_rows // max(1, len(self.files)))

    @property
    def read(self) -> int:
        return sum(min(info.rows, self.quota) for info in self.files)

    def scale(self, info: FileInfo) -> float:
        """Return the number of documents that each row read from this file represents. The limit on the rows read is
        equal for all files, so a row of a large file represents more documents."""
        return info.rows / min(info.rows, self.quota) * self.total / sum(f.rows for f in self.files)

    def rows(self, store: Store, columns: list[str]) -> Iterator[tuple[pa.RecordBatch, float]]:
        """Yield batches of the rows that are read, with these columns, and the number of documents that each row of the
        batch represents."""
        for info in self.files:
            remaining = self.quota
            for batch in batches(store, info, columns):
                yield batch.slice(0, remaining), self.scale(info)
                remaining -= batch.num_rows
                if remaining <= 0:
                    break


def strata(passes: list[NodeFigures], most_tasks: int = PARTS, most_rows: int = ROWS) -> list[Stratum]:
    """Return the groups of documents of a dataset that the report samples. One group is the documents that its last
    pass (group of steps that run together) kept. Each pass has a further group, the documents that it dropped. Of each
    group, at most about `most_rows` rows are read, from the files of at most `most_tasks` tasks."""
    out = []
    for node in passes:
        files = [record.files for record in node.choose(most_tasks)]
        if node.publishes:
            out.append(Stratum(True, sum(s["docs"] for s in node.counters.get("kept", {}).values()),
                               _with_rows(files, "kept.parquet"), most_rows))
        dropped = sum(n for stats in node.counters.get("stages", {}).values() for by in stats["dropped"].values()
                      for n in by.values())
        out.append(Stratum(False, dropped, _with_rows(files, "dropped.parquet"), most_rows))
    return out


def _with_rows(files: list[dict[str, FileInfo]], name: str) -> tuple[FileInfo, ...]:
    return tuple(f[name] for f in files if name in f and f[name].rows)


def extent(parts: list[Stratum]) -> dict[str, Any]:
    """Return how many of the documents were read: {docs, of, exact}. If `exact` is false, figures made from them are
    estimates. If no file of a group of documents is read, no figure includes the group; `uncovered` then counts its
    documents."""
    read, total = sum(s.read for s in parts), sum(s.total for s in parts)
    uncovered = sum(s.total for s in parts if not s.files)
    return {"docs": read, "of": total, "exact": read == total, **({"uncovered": uncovered} if uncovered else {})}
