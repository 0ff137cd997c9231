"""Commit records: the entries of the commit log, one for each finished task.

A record holds the task's counters, which are nested dicts of numbers. When the counters of two tasks are merged,
numbers under the same keys are added. For outermost keys that begin with `max_`, the larger number is taken instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stages.task import Counters as Counters

#: Stands in place of a stage's number when a process died while it read a row, before any stage saw the row. The number
#: also says from which file the row was read: READING - n for the task's input file number n, counted from 0.
READING = -2


@dataclass
class FileInfo:
    """A file that a task wrote, as the task's commit record describes it.

    `sha256` is the hash of the file's bytes. `content` is a hash of the data in the file. For documents, for example,
    it is a hash of the rows that does not depend on how Parquet encodes them. If the task computes no such hash,
    `content` is the same as `sha256`.
    """

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
    """The commit record of a finished task: its key, the files it wrote, its counters, and the documents it
    quarantined. A worker sends this record to the driver, which appends it to the commit log. The documents themselves
    stay in the files."""

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
    replay_key: str = ""               # copied from the task's spec (`TaskSpec.replay_key`)

    def to_json(self) -> dict[str, Any]:
        """Return the record as a dict that can be written as JSON. The dict shares the record's counters, quarantine
        and meta, because copying them would take most of a commit's time."""
        return {**vars(self), "files": {name: dict(vars(info)) for name, info in self.files.items()}}

    @classmethod
    def from_json(cls, doc: Mapping[str, Any]) -> PartRecord:
        return cls(**{**doc, "files": {k: FileInfo(**v) for k, v in doc["files"].items()}})


def merge_counters(into: Counters, other: Mapping[str, Any], maxima: bool = True) -> Counters:
    """Merge the counters `other` into `into`, which is changed and returned. Numbers are added, and dicts are merged.
    With `maxima`, the larger number is kept for outermost keys that begin with `max_`. Nested numbers are always added,
    because the keys of nested dicts are names of sources or languages, and such a name may begin with `max_`, too
    (`max_Latn`)."""
    for k, v in other.items():
        if isinstance(v, dict):
            merge_counters(into.setdefault(k, {}), v, False)
        elif k not in into:
            into[k] = v
        elif maxima and k.startswith("max_"):
            into[k] = max(into[k], v)
        else:
            into[k] += v
    return into
