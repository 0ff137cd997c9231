"""Asks Ray's autoscaler for more nodes, by keeping placeholder tasks pending in Ray for the work that has no room."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray

from pipeline.engine.backends.pools import OWN_MB, share
from pipeline.engine.task import ResourceRequest


@ray.remote(max_retries=0)
def _pending_task() -> None:
    """A placeholder for work without room, which makes the autoscaler add nodes. It ends at once when it gets room, and
    ends with the driver. A standing request (`ray.autoscaler.sdk.request_resources`) would outlive the driver."""


class PendingDemand:
    """Keeps placeholder tasks pending in Ray. `shown`: the pending placeholders for each kind of task."""

    def __init__(self) -> None:
        self.shown: dict[ResourceRequest, list[Any]] = {}

    def show(self, demand: Mapping[ResourceRequest, int]) -> None:
        """Add or cancel placeholders until each kind of task has as many pending as `demand` says."""
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
