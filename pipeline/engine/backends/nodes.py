"""The nodes of a cluster and the supervisors on them, as the driver sees them. A supervisor is an actor that runs tasks
in child processes on a node (a machine of the cluster)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pipeline.engine.backends.fingerprint import Fingerprint
from pipeline.engine.backends.pools import OWN_MB, Capacity, ResourceShape
from pipeline.engine.messages import Assignment, TaskStatus
from pipeline.engine.task import ResourceRequest

NOTHING = ResourceShape(0, 0, 0)


@dataclass(frozen=True)
class Host:
    """A node of the cluster: its resources, and the resources that other programs have reserved there (`others`).

    On a cluster, supervisors (actors that run tasks) reserve their memory. `largest_mb` is then None, and a task may
    declare at most `memory_mb` less OWN_MB (the supervisor's own memory). On a single machine, memory is not reserved
    but measured. `largest_mb` is then the most memory that a task may declare when it runs alone on the node.
    """

    id: str
    name: str
    cpus: int
    memory_mb: int
    gpus: int = 0
    others: ResourceShape = NOTHING
    draining: bool = False
    largest_mb: int | None = None

    @property
    def largest(self) -> int:
        return self.memory_mb - OWN_MB if self.largest_mb is None else self.largest_mb

    def clamp(self, kind: ResourceRequest) -> ResourceRequest:
        """Returns the request `kind` of a task, with its memory lowered if necessary, so that this node can have a
        supervisor (an actor that runs tasks) for it. The memory is lowered only where memory is measured and not
        reserved, and only for a task that needs at most `largest_mb`. The task then runs alone in its supervisor, and
        may use up to `largest_mb`."""
        if kind.memory_mb > self.largest or self.largest_mb is None:
            return kind
        return kind._replace(memory_mb=max(1, min(kind.memory_mb, self.memory_mb - OWN_MB)))


@dataclass
class WorkerSlot(Capacity):
    """A supervisor (an actor that runs tasks in child processes on a node), as the driver sees it. It gets tasks while
    it is `ready`, but none while it is `leaving` or does not answer (`late`)."""

    host: str = ""
    number: int = 0                  # number among our supervisors on that node
    shape: ResourceShape = NOTHING
    ready: bool = False
    leaving: bool = False
    late: bool = False
    drained: bool = False            # its node is about to be removed
    fingerprint: Fingerprint | None = None                       # from its Ready event
    started: float = 0.0
    idle_since: float = 0.0
    served: bool = False             # it has had a task
    running: tuple[TaskStatus, ...] = ()                         # its latest StatusReport
    unsent: list[Assignment] = field(default_factory=list)       # assignments for its next poll
    actor: Any = None
    poll: Any = None                 # the poll in flight, None if there is none
    polled: float = 0.0              # when `poll` began

    def add(self, id: int, kind: ResourceRequest) -> None:
        super().add(id, kind)
        self.served = True

    @property
    def usable(self) -> bool:
        return self.ready and not self.leaving and not self.late
