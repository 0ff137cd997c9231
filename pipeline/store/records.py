"""Commit records: the data that a finished task leaves in the log.

Counters are nested dicts of numbers. To merge two of them, leaves are added up; for outermost keys that begin with
`max_` the maximum is taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stages.task import Counters as Counters

#: The stage of a quarantined row that killed the process while it was being read. READING stands for the task's first
#: input file, and READING - n for input file number n, counted from 0.
READING = -2


@dataclass
class FileInfo:
    """A file that a task wrote, as committed. `content` is a hash of what the file says: of canonical rows for document
    parts, otherwise the sha256 of the bytes. `sha256` is the hash of its bytes."""

    path: str
    bytes: int
    sha256: str
    content: str
    rows: int = 0
    meta: dict[str, Any] = field(default_factory=dict)

    def ref(self) -> dict[str, Any]:
        return {"$ref": self.path, "content": self.content, "sha256": self.sha256, "bytes": self.bytes,
                "rows": self.rows}


@dataclass
class PartRecord:
    """The commit record of a task: the only thing that travels through Ray and into the log."""

    key: str
    task: str                          # name of the task
    node: str
    attempt: str
    files: dict[str, FileInfo]
    counters: Counters
    quarantine: list[dict[str, Any]] = field(default_factory=list)  # {row, id, stage, stage_key, reason, file?}
    cpu_s: float = 0.0
    wall_s: float = 0.0
    rss_mb: float = 0.0
    replay_key: str = ""               # that of its spec

    def to_json(self) -> dict[str, Any]:
        """The record as a dict that can be written as JSON. It shares counters, quarantine and meta with the record,
        because copying them would take most of a commit's time."""
        return {**vars(self), "files": {name: dict(vars(info)) for name, info in self.files.items()}}

    @classmethod
    def from_json(cls, doc: Mapping[str, Any]) -> PartRecord:
        return cls(**{**doc, "files": {k: FileInfo(**v) for k, v in doc["files"].items()}})


def merge_counters(into: Counters, other: Mapping[str, Any], maxima: bool = True) -> Counters:
    """Merge `other` into `into` (in place): numbers are added, `max_*` takes the maximum, dicts are merged. Keys of
    nested dicts are names (sources, languages such as `max_Latn`), so their values are always added."""
    for k, v in other.items():
        if isinstance(v, dict):
            merge_counters(into.setdefault(k, {}), v, False)
        elif k in into:
            into[k] = max(into[k], v) if maxima and k.startswith("max_") else into[k] + v
        else:
            into[k] = v
    return into
