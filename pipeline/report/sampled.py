"""Chooses the parts of a dataset that the report reads, so that a report of a million tasks reads as much as one of 64.

Counters give totals. Values that no counter has (signals, addresses) are read from at most PARTS tasks of a pass, and
at most ROWS rows of each kind (kept documents, or those that one pass dropped). The tasks are those with the smallest
keys. Keys are hashes, so the choice is random, yet it is the same in each report of a run. Figures are scaled to the
totals; where everything was read, they are exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from pipeline.report.nodes import Node, batches
from pipeline.store.fs import Store
from pipeline.store.records import FileInfo

#: most tasks of a pass whose files are read, and most rows of each stratum
PARTS, ROWS = 48, 400_000


@dataclass(frozen=True)
class Stratum:
    """The documents that a dataset keeps, or those that one of its passes dropped. `total` counts them, `files` are the
    parts that are read."""

    kept: bool
    total: int
    files: tuple[FileInfo, ...]

    @property
    def quota(self) -> int:
        """Most rows that are read of each file."""
        return max(1, ROWS // max(1, len(self.files)))

    @property
    def read(self) -> int:
        return sum(min(info.rows, self.quota) for info in self.files)

    def scale(self, info: FileInfo) -> float:
        """Documents that a row which is read of this file stands for. The quota cuts each file separately, so the rows
        of a large file stand for more."""
        return info.rows / min(info.rows, self.quota) * self.total / sum(f.rows for f in self.files)

    def rows(self, store: Store, columns: list[str]) -> Iterator[tuple[pa.RecordBatch, float]]:
        """Some columns of the rows that are read, a batch at a time, and the documents that each row stands for."""
        for info in self.files:
            remaining = self.quota
            for batch in batches(store, info, columns):
                yield batch.slice(0, remaining), self.scale(info)
                remaining -= batch.num_rows
                if remaining <= 0:
                    break


def strata(passes: list[Node]) -> list[Stratum]:
    """The strata of a dataset, from its passes: what its last pass kept, and what each of its passes dropped."""
    out = []
    for node in passes:
        files = [record.files for record in node.choose(PARTS)]
        if node.publishes:
            out.append(Stratum(True, sum(s["docs"] for s in node.counters.get("kept", {}).values()),
                               _with_rows(files, "kept.parquet")))
        dropped = sum(n for stats in node.counters.get("stages", {}).values() for by in stats["dropped"].values()
                      for n in by.values())
        out.append(Stratum(False, dropped, _with_rows(files, "dropped.parquet")))
    return out


def _with_rows(files: list[dict[str, FileInfo]], name: str) -> tuple[FileInfo, ...]:
    return tuple(f[name] for f in files if name in f and f[name].rows)


def extent(parts: list[Stratum]) -> dict[str, Any]:
    """How much of the documents was read: {docs, of, exact}. If not `exact`, the figures are estimates. `uncovered`
    documents are of strata without a part that is read, so no figure has them."""
    read, total = sum(s.read for s in parts), sum(s.total for s in parts)
    uncovered = sum(s.total for s in parts if not s.files)
    return {"docs": read, "of": total, "exact": read == total, **({"uncovered": uncovered} if uncovered else {})}
