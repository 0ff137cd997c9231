"""Asks Ray's autoscaler for more nodes. For waiting tasks that no node has room for, it keeps placeholder tasks with
the same needs pending in Ray."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray

from pipeline.engine.backends.pools import OWN_MB, share
from pipeline.engine.task import ResourceRequest


@ray.remote(max_retries=0)
def _pending_task() -> None:
    """A placeholder for a task for which the cluster has no room. While the placeholder is pending in Ray, the
    autoscaler adds nodes. The placeholder ends as soon as it gets room, and also when the driver ends.
    (`ray.autoscaler.sdk.request_resources` is not used, because such a request would outlive the driver.)"""


class PendingDemand:
    """Keeps placeholder tasks pending in Ray, so that the autoscaler adds nodes. `shown` lists the pending placeholders
    of each kind of task, as Ray's references to them."""

    def __init__(self) -> None:
        self.shown: dict[ResourceRequest, list[Any]] = {}

    def show(self, demand: Mapping[ResourceRequest, int]) -> None:
        """Start or cancel placeholder tasks in Ray, so that `demand[kind]` placeholders are pending for each kind of
        task (tasks that declare the same resources)."""
        for kind in {*self.shown, *demand}:
            pending = self.shown.pop(kind, [])
            if pending:
                _, pending = ray.wait(pending, num_returns=len(pending), timeout=0)
            count = demand.get(kind, 0)
            for ref in pending[count:]:
                ray.cancel(ref)
            need = {"num_cpus": 0 if kind.gpus else 1, "num_gpus": share(kind.gpus) if kind.gpus else 0,
                    "memory": kind.memory_mb + OWN_MB << 20}
            pending = pending[:count] + [_pending_task.options(**need).remote() for _ in range(count - len(pending))]
            if pending:
                self.shown[kind] = pending
