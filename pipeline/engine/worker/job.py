"""Defines a job: an assignment (one attempt at a task) that a supervisor runs in child processes, with the state that
the supervisor keeps about it."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.engine.backends.pools import share
from pipeline.engine.messages import Answer, Assignment, Finished, Raised
from pipeline.engine.task import TaskSpec
from pipeline.engine.worker.crash_triage import CrashTriage


@dataclass
class Job:
    """An assignment (one attempt at a task) that a supervisor works on. The supervisor runs it in a child process. If
    that process dies, the job continues in another one."""

    assignment: Assignment
    triage: CrashTriage
    started: float = 0.0     # monotonic, when its first child received it
    retry_at: float = 0.0       # monotonic, when it may be tried again after an environment failure
    overtaken: int = 0       # number of later jobs of the queue that started before it
    place: tuple[int, int, int] = (-1, -1, -1)      # last position of its cursor
    since: float = 0.0       # monotonic, when its cursor got there
    reports: int = 0            # number of times it was reported as hanging there
    fresh: bool = False      # it needs a new child, because an idle one had given up rights that its stages need

    @property
    def id(self) -> int:
        return self.assignment.id

    @property
    def spec(self) -> TaskSpec:
        return self.assignment.spec

    @property
    def share(self) -> float:
        """Return the number of GPUs that the task occupies; below 1, the part of one GPU (`pools.share`)."""
        return share(self.spec.gpus) if self.spec.gpus else 0.0

    def allows(self, answer: Answer) -> bool:
        """Whether the child process that works on this job (an attempt at a task) may send this answer. A commit record
        must be of this job's task, and name only files of this attempt. A file that is reported as damaged must be
        inside the store. Without these checks, a document that took over the child could commit or remove the results
        of other tasks."""
        match answer:
            case Finished(record):
                attempt = f"{self.assignment.attempt}-"
                prefix = f"objects/{self.spec.key}/{attempt}"
                return (record.key == self.spec.key and record.node == self.spec.node
                        and record.replay_key == self.spec.replay_key and record.attempt.startswith(attempt)
                        and all(f.path.startswith(prefix) and "/" not in f.path[len(prefix):]
                                for f in record.files.values()))
            case Raised(failure):
                return not failure.path.startswith("/") and ".." not in failure.path.split("/")
        return True
