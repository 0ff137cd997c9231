"""The Ray actor in which a supervisor runs on a node of a Ray cluster. A supervisor runs tasks in child processes."""

from __future__ import annotations

import os
from typing import Any

import ray

from pipeline.engine.messages import ASSIGNMENTS, encode
from pipeline.engine.worker.limits import ProcessLimits
from pipeline.engine.worker.supervisor import Supervisor


@ray.remote(max_restarts=0, max_task_retries=0)
class SupervisorActor:
    """A Ray actor that wraps a `Supervisor`, which runs tasks in child processes of one node. The assignments (attempts
    at tasks) that it receives and the events that it returns are encoded as JSON (`engine.messages`). `folder` is the
    working directory of its processes; None keeps the one that Ray has given the actor."""

    def __init__(self, store: str, slots: int, limits: dict[str, Any], folder: str | None = None,
                 **options: Any) -> None:
        if folder is not None:
            os.chdir(folder)
        devices = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        self._supervisor = Supervisor(store, slots, ProcessLimits(**limits), devices=devices, **options)

    def poll(self, assignments: list[dict[str, Any]], timeout: float, linger: float) -> list[dict[str, Any]]:
        events = self._supervisor.poll([ASSIGNMENTS.decode(a) for a in assignments], timeout, linger)
        return [encode(e) for e in events]

    def cancel(self, ids: list[int]) -> None:
        self._supervisor.cancel(ids)

    def close(self) -> None:
        self._supervisor.close()
