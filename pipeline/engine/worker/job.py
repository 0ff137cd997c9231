"""An assignment as its supervisor works on it: where it stands, and what has happened to it so far."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.engine.backends.pools import share
from pipeline.engine.messages import Assignment
from pipeline.engine.task import TaskSpec
from pipeline.engine.worker.faults import CrashTriage
from pipeline.store.records import PartRecord


@dataclass
class Job:
    """An assignment on its way through one or more children."""

    assignment: Assignment
    triage: CrashTriage
    started: float = 0.0     # monotonic, when its first child got it
    rests: float = 0.0       # monotonic, until when it waits for the environment to recover
    overtaken: int = 0       # jobs that were behind it and started before it
    place: tuple[int, int, int] = (-1, -1, -1)      # of its cursor,
    since: float = 0.0       # when it moved there,
    told: int = 0            # and how often it was said that it stands there
    fresh: bool = False      # a warm child was sealed for other stages: it wants one of its own

    @property
    def id(self) -> int:
        return self.assignment.id

    @property
    def spec(self) -> TaskSpec:
        return self.assignment.spec

    @property
    def share(self) -> float:
        """The part of the devices it takes."""
        return share(self.spec.gpus) if self.spec.gpus else 0.0

    def made(self, record: PartRecord) -> bool:
        """Whether a record speaks of this task, and of files of this attempt only: whoever took a child over must not
        commit anything else."""
        prefix = f"objects/{self.spec.key}/{self.assignment.attempt}-"
        return record.key == self.spec.key and all(
            file.path.startswith(prefix) and "/" not in file.path[len(prefix):] for file in record.files.values())
