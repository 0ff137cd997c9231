"""Exceptions that end a run before its tasks are done."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Mapping, Sequence

from pipeline.base.errors import TokenmillError
from pipeline.engine.task import TaskSpec
from pipeline.engine.worker.crash_triage import gist
from pipeline.store.errors import StoreError, remedy_of


class Interrupted(KeyboardInterrupt):
    """Raised when SIGINT or SIGTERM stopped the run. Everything committed is kept, and the next run continues from it.
    The class is not derived from Exception, so that a stage that catches Exception cannot treat the stop as an error of
    a document."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}; what was committed is kept, run again to go on")
        self.signum = signum


class TaskFailed(TokenmillError):
    """Raised when a task failed and gets no further attempt. `reasons` lists the message of every failed attempt, in
    order. `verdict` says why no further attempt is made, if `reasons` do not show it. Notes of the exception hold the
    worker's traceback or the last lines of its output."""

    def __init__(self, spec: TaskSpec, reasons: list[str], tracebacks: Sequence[str] = (), verdict: str = "") -> None:
        self.spec, self.reasons = spec, reasons
        times = f" {len(reasons)} times" if len(reasons) > 1 else ""
        latest, count = {gist(reason): reason for reason in reasons}, Counter(map(gist, reasons))
        listing = "; ".join(reason if len(latest) == 1 else f"{reason} (× {count[key]})"
                            for key, reason in latest.items())
        super().__init__(f"{spec.node}: {spec.label or spec.key} failed{times}: {listing}"
                         f"{f' ({verdict})' if verdict else ''}")
        for traceback in dict.fromkeys(tracebacks):
            self.add_note(f"in {spec.task}:\n{traceback}")


class DamageFound(StoreError):
    """Raised when tasks cannot go on because files of the store are missing or differ from their records. `paths` maps
    the path of each damaged file to the error that revealed the damage."""

    def __init__(self, paths: Mapping[str, str]) -> None:
        super().__init__(f"{len(paths)} files of the store are damaged or missing: {', '.join(sorted(paths)[:3])}"
                         f"{', …' if len(paths) > 3 else ''}; {remedy_of(paths)}")
        self.paths = dict(paths)


class CannotRun(TaskFailed):
    """Raised when no worker has the resources that a task declares. On a cluster, the run first waits for a larger node
    (`Fleet.fit_s`). The message names these resources, and what the largest node offers."""

    def __init__(self, spec: TaskSpec, why: str) -> None:
        super().__init__(spec, [why])
        self.args = (f"{spec.node}: {spec.label or spec.key} cannot run: {why}",)
