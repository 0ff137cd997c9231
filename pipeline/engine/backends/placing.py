"""Places assignments (attempts at tasks) with the supervisors of a cluster. A supervisor is an actor that runs tasks in
child processes on a node (a machine of the cluster)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import groupby

from pipeline.engine.backends.nodes import WorkerSlot
from pipeline.engine.backends.pools import best_first, most_room
from pipeline.engine.messages import Assignment
from pipeline.engine.task import ResourceRequest


class Placement:
    """Keeps the assignments (attempts at tasks) that the scheduler has handed out, and which supervisor has which of
    them. A supervisor runs tasks on a node. `usable` returns the supervisors that take tasks at the moment.

    All assignments that were submitted together are placed together (`place`). A search through all supervisors for
    each single assignment would take most of the driver's time on a cluster with hundreds of supervisors.
    """

    def __init__(self, usable: Callable[[], list[WorkerSlot]]) -> None:
        self._usable = usable
        self._submitted: list[Assignment] = []        # those that no supervisor has yet
        self._keys: dict[int, str] = {}               # id of an open assignment → its task key
        self._open: Counter[str] = Counter()          # task key → number of its open assignments

    def submit(self, assignment: Assignment) -> None:
        self._submitted.append(assignment)

    def place(self) -> None:
        """Give each submitted assignment (attempt at a task) to the supervisor (an actor that runs tasks) that has most
        room for it."""
        submitted, self._submitted = self._submitted, []
        for kind, assignments in groupby(submitted, key=lambda a: a.spec.kind):
            usable = self._usable()
            choice = best_first(usable, kind)
            for assignment in assignments:
                key = assignment.spec.key
                # `choice` does not notice that `_apart` adds an assignment. This does no harm: before the scheduler
                # submits a second attempt it calls `room_for`, which places all others, so the attempt is placed alone
                slot = self._apart(usable, kind, key) if key in self._open else next(choice)
                self._keys[assignment.id] = key
                self._open[key] += 1
                slot.add(assignment.id, kind)
                slot.unsent.append(assignment)

    def _apart(self, usable: list[WorkerSlot], kind: ResourceRequest, key: str) -> WorkerSlot:
        """Returns the supervisor (an actor that runs tasks) for a second attempt at a slow task. The supervisor that
        runs the first attempt may be the reason why the task is slow, so another supervisor is chosen if one has
        room."""
        fitting = most_room(usable, kind)
        return next((p for p in fitting if p.room(kind) and all(self._keys[i] != key for i in p.open)), fitting[0])

    def settle(self, slot: WorkerSlot, ids: Iterable[int]) -> set[int]:
        """Remove the assignments (attempts at tasks) `ids` from a supervisor (an actor that runs tasks). Returns the
        ids of those that the supervisor had; other ids are ignored."""
        removed = slot.remove(ids)
        for key in (self._keys.pop(id) for id in removed):
            self._open[key] -= 1
            if not self._open[key]:
                del self._open[key]
        return removed
