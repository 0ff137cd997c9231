"""Defines the Prometheus metrics of a run: their names, their meaning, and how to compute them from a progress
snapshot.

`samples` computes the values from the snapshot that `Progress` writes to `runs/RUN/progress.json`. The Ray backend
exports them on the metrics port of the driver's machine (`RayBackend.emit`). Only the driver exports metrics.

The number of time series is small, because no label names a partition, a file or a worker. The labels are the run, the
*kind* of plan node (pass, barrier, …), and the state of tasks or the outcome of documents.

The metrics serve monitoring only: every driver starts its counters at zero, and they vanish when the driver ends. The
store keeps the lasting facts of a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import nan
from typing import Any

#: kinds of nodes, as in `plan.nodes.Node.kind`
KINDS = ("index", "pass", "barrier", "tokenizer", "shards")
OUTCOMES = ("in", "kept", "dropped", "quarantined")


@dataclass(frozen=True)
class Metric:
    """The definition of a Prometheus metric. `kind` is "gauge" (a present value) or "counter" (events since this driver
    started)."""

    name: str
    kind: str
    help: str
    labels: tuple[str, ...] = ("run",)

    @property
    def exported(self) -> str:
        """Return the metric's name on Ray's metrics port, for dashboards and alerts: Ray puts `ray_` before custom
        metrics, and `_total` after counters."""
        return f"ray_{self.name}{'_total' if self.kind == 'counter' else ''}"


ACTIVE = Metric("tokenmill_run_active", "gauge", "1 while the driver works, 0 at its end")
SLOTS = Metric("tokenmill_slots", "gauge", "Tasks that can run at the same time")
ETA = Metric("tokenmill_eta_seconds", "gauge", "Estimated seconds until the tasks known so far are done; NaN: unknown")
BYTES_LEFT = Metric("tokenmill_bytes_left", "gauge", "Bytes that the tasks known so far have still to read")
DOCS_PER_SECOND = Metric("tokenmill_documents_per_second", "gauge", "Documents read per second: sum over the plan "
                         "nodes at work, each averaged since its start")
TASKS = Metric("tokenmill_tasks", "gauge", "Tasks known so far, by state: waiting, running, done (reused ones among "
               "them), reused", ("run", "kind", "state"))
COMPLETED = Metric("tokenmill_tasks_completed", "counter", "Tasks run and committed", ("run", "kind"))
FAILED = Metric("tokenmill_attempts_failed", "counter", "Attempts at tasks that failed or were lost", ("run", "kind"))
RETRIED = Metric("tokenmill_attempts_retried", "counter", "Attempts at tasks that were started again", ("run", "kind"))
STRAGGLERS = Metric("tokenmill_stragglers", "counter", "Second attempts beside suspiciously slow tasks",
                    ("run", "kind"))
DOCUMENTS = Metric("tokenmill_documents", "counter", "Documents of finished tasks, by outcome: in, kept, "
                   "dropped, quarantined", ("run", "kind", "outcome"))
BYTES = Metric("tokenmill_bytes", "counter", "Bytes read by finished tasks", ("run", "kind"))
NODES_LOST = Metric("tokenmill_nodes_lost", "counter", "Supervisors that died, with or without their machine")

METRICS = (ACTIVE, SLOTS, ETA, BYTES_LEFT, DOCS_PER_SECOND, TASKS, COMPLETED, FAILED, RETRIED, STRAGGLERS, DOCUMENTS,
           BYTES, NODES_LOST)

Sample = tuple[Metric, dict[str, str], float]


def kind_of(node: str) -> str:
    """Returns the kind of a plan node (a group of tasks): index, pass, barrier, tokenizer or shards. The kind follows
    from the node's name."""
    head, colon, _ = node.partition(":")
    if colon and head in ("index", "tokenizer", "shards"):
        return head
    return "barrier" if "/" in node else "pass"


def outcomes(counters: Mapping[str, Any]) -> dict[str, int]:
    """Returns {outcome: number of documents} of one task, from the counters of a pass (which runs stages on documents)
    or of an encoding task. All numbers are zero for tasks of other kinds.

    Records that a reader could not read count as `quarantined`, although they never became documents. The outcomes may
    therefore add up to more than the number of documents read (`in`).
    """
    passed, encoded = "stages" in counters, "quarantined" in counters and "train" in counters
    if not passed and not encoded:
        return dict.fromkeys(OUTCOMES, 0)
    quarantined = sum(counters["quarantined"].values())
    if encoded:                                               # documents are kept either for training or validation
        kept = counters["train"]["docs"] + counters["val"]["docs"]
        return {"in": kept + quarantined, "kept": kept, "dropped": 0, "quarantined": quarantined}
    documents, kept = (sum(source["docs"] for source in counters[key].values()) for key in ("in", "kept"))
    dropped = sum(n for stage in counters["stages"].values()
                  for sources in stage["dropped"].values() for n in sources.values())
    return {"in": documents, "kept": kept, "dropped": dropped, "quarantined": quarantined}


def samples(run: str, snapshot: Mapping[str, Any], nodes_lost: int = 0) -> Iterator[Sample]:
    """Yield (metric, labels, value) for every metric of a run. `snapshot` is the run's progress snapshot
    (`Progress.snapshot`)."""
    active = snapshot["state"] in ("running", "stopping")
    eta = snapshot["eta_s"] if active else 0
    yield ACTIVE, {"run": run}, float(active)
    yield SLOTS, {"run": run}, float(snapshot["slots"] if active else 0)
    yield ETA, {"run": run}, nan if eta is None else float(eta)
    yield BYTES_LEFT, {"run": run}, float(snapshot["bytes_left"])
    yield NODES_LOST, {"run": run}, float(nodes_lost)
    at_work = {task["node"] for task in snapshot["running"]}
    yield DOCS_PER_SECOND, {"run": run}, float(sum(n["docs_per_s"] for name, n in snapshot["nodes"].items()
                                                   if name in at_work))
    for kind in KINDS:
        # kinds that have not begun are zero: Prometheus does not see a counter's first value as an increase
        nodes = {name: n for name, n in snapshot["nodes"].items() if kind_of(name) == kind}
        labels = {"run": run, "kind": kind}

        def total(key: str, nodes: Mapping[str, Any] = nodes) -> float:
            return float(sum(n[key] for n in nodes.values()))

        running = float(sum(task["node"] in nodes for task in snapshot["running"]))
        done, reused = total("done"), total("reused")
        for state, value in (("waiting", max(0.0, total("parts") - done - running)), ("running", running),
                             ("done", done), ("reused", reused)):
            yield TASKS, {**labels, "state": state}, value
        yield COMPLETED, labels, done - reused
        yield FAILED, labels, total("failed_attempts")
        yield RETRIED, labels, total("retried")
        yield STRAGGLERS, labels, total("doubled")
        yield BYTES, labels, total("bytes_run")
        if kind in ("pass", "shards"):
            for outcome in OUTCOMES:
                yield (DOCUMENTS, {**labels, "outcome": outcome},
                       float(sum(n["documents_run"][outcome] for n in nodes.values())))
