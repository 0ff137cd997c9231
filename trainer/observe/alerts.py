"""Checks six alert rules on the measurements of a training. When the condition of a rule becomes true, its alert is
raised once; when the condition becomes false, the alert is cleared once.

An alert is printed and written as a line `event: alert` to metrics.jsonl. A gauge in trainer.prom is 1 while the alert
is raised. Prometheus' Alertmanager, or another reader of these files, notifies people. No rule stops a training; only
`trainer.loop.stability` does.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

RULES = ("throughput", "evaluation", "tasks", "spikes", "data_wait", "checkpoint")
#: the speed is compared with the median of the last INTERVALS log intervals, once there are ENOUGH of them
INTERVALS, ENOUGH = 50, 8
#: rules whose limits may be above 1; the limits of the other rules are shares
NO_SHARES = ("evaluation", "tasks", "checkpoint")
#: measures of tasks of which less is better
LOWER = frozenset({"bpb"})
#: number of the last steps that the spike score covers (as in OLMo-core's stability monitor)
SCORED = 1000


@dataclass(frozen=True)
class AlertsConfig:
    """Limits above which an alert is raised; null turns an alert off.

        throughput  relative drop of tokens/s below the median of the last 50 intervals between printed lines. Only
                    intervals of the same phase (stretch of the training) are compared, and only once there are 8 of
                    them
        evaluation  by how many nats the held-out loss of a stream (data source) exceeds its lowest value so far
        tasks       by how many standard errors (of the difference) the score of a checkpoint on a task is worse than
                    the best so far. There is no alert if the standard errors are 0 or unknown
        spikes      share of the last 1,000 steps whose loss or gradient norm was not finite or more than
                    `stability.sigma` standard deviations above the mean
        data_wait   share of the time since the last printed line that was spent waiting for batches. It is not checked
                    at the first line of a phase
        checkpoint  minutes without a checkpoint
    """

    throughput: float | None = 0.2
    evaluation: float | None = 0.1
    tasks: float | None = 3.0
    spikes: float | None = 0.01
    data_wait: float | None = 0.1
    checkpoint: float | None = 120.0

    def check(self) -> None:
        for rule in RULES:
            limit = getattr(self, rule)
            if limit is not None and not 0 < limit < (math.inf if rule in NO_SHARES else 1):
                raise ValueError(f"{rule} must be above 0" + ("" if rule in NO_SHARES else " and below 1 (a share)")
                                 + ", or null for no alert")


@dataclass(frozen=True)
class Alert:
    """The event that an alert began (`on` is True) or ended. `rule` is the name of the alert's rule; `text` says what
    was observed."""

    rule: str
    on: bool
    text: str


class Alerts:
    """Checks the alert rules of a training. The methods `step`, `interval`, `evaluation` and `tasks` take new
    observations, and return the alerts that begin or end because of them. `lines` are the lines of metrics.jsonl from
    former processes of this training; the lowest held-out losses and the best scores so far are taken from them."""

    def __init__(self, config: AlertsConfig, lines: Sequence[Mapping[str, Any]] = ()) -> None:
        self.config = config
        self.standing: dict[str, str] = {}
        self.speeds: deque[float] = deque(maxlen=INTERVALS)
        self.phase: str | None = None
        self.best: dict[str, float] = {}
        self.outliers: deque[bool] = deque(maxlen=SCORED)
        self.regressed: dict[str, str] = {}
        #: for each task, (step, row) of its best score; tasks whose latest score has fallen → what was observed
        self.best_scores: dict[str, tuple[int, Mapping[str, Any]]] = {}
        self.fallen: dict[str, str] = {}
        for line in lines:
            if line["event"] == "eval":
                self.evaluation(line["streams"])
            elif line["event"] == "tasks":
                self.tasks(line["step"], line["main"])

    def step(self, outlier: bool) -> list[Alert]:
        """Check the rule about loss spikes. Called for every step. `outlier` is whether the step's loss or gradient
        norm was not finite or too high, according to `SpikeDetector`. Returns the alerts that begin or end."""
        self.outliers.append(outlier)
        limit = self.config.spikes
        return self.settle("spikes", limit is not None and self.spike_score > limit,
                           f"loss or gradient norm of {sum(self.outliers)} of the last {len(self.outliers)} steps was "
                           f"out of all proportion")

    @property
    def spike_score(self) -> float:
        """The number of outliers in loss or gradient norm among the last SCORED steps, divided by SCORED. It is divided
        by SCORED even if the training has performed fewer steps."""
        return sum(self.outliers) / SCORED

    def interval(self, phase: str, speed: float, data_share: float, since_checkpoint: float) -> list[Alert]:
        """Check the rules on throughput, waits for data and checkpoints, and return the alerts that begin or end.
        Called whenever a line of metrics is printed. `phase` is the name of the present phase (stretch of the
        training). `speed` is in tokens/s, `data_share` is the share of time spent waiting for data, `since_checkpoint`
        is in seconds."""
        if phase != self.phase:                      # the speed depends on sequence length and batch
            self.phase = phase
            self.speeds.clear()
        usual = median(self.speeds) if len(self.speeds) >= ENOUGH else None
        self.speeds.append(speed)
        limit = self.config.throughput
        slow = limit is not None and usual is not None and speed < (1 - limit) * usual
        alerts = self.settle("throughput", slow, _throughput(speed, usual or speed, slow))
        limit = self.config.data_wait
        alerts += self.settle("data_wait", limit is not None and len(self.speeds) > 1 and data_share > limit,
                             f"{data_share:.0%} of the time is spent waiting for data; `soak` tells what the loader "
                             f"can do")
        limit = self.config.checkpoint
        return alerts + self.settle("checkpoint", limit is not None and since_checkpoint > 60 * limit,
                                   f"no checkpoint for {since_checkpoint / 60:.0f} minutes: what a crash costs; "
                                   f"checkpoint.every says how often")

    def evaluation(self, streams: Mapping[str, Mapping[str, Any]]) -> list[Alert]:
        """Check the rule about rising held-out loss. Called at every evaluation; `streams` has the results for each
        stream (data source). The alert begins when the loss of a stream is above its lowest value so far by more than
        the limit. It ends when this is the case for no stream. Returns the alerts that begin or end."""
        for name, values in streams.items():
            loss = values["loss"]
            best = min(loss, self.best.get(name, math.inf))
            self.best[name] = best
            if self.config.evaluation is not None and loss > best + self.config.evaluation:
                self.regressed[name] = f"{name} {loss:.3f}, its best was {best:.3f}"
            else:
                self.regressed.pop(name, None)
        return self.settle("evaluation", bool(self.regressed), "held-out loss has risen: "
                           + ("; ".join(self.regressed.values()) or "no more"))

    def tasks(self, step: int, scores: Mapping[str, Mapping[str, Any]]) -> list[Alert]:
        """Check the rule about falling scores on benchmark tasks. Called for each checkpoint that was scored, with its
        `step`; `scores` has "measure", "value" and "stderr" for each task. The alert begins when the score of a task is
        worse than its best score so far by more than the limit. It ends when this is the case for no task. Returns the
        alerts that begin or end."""
        for name, row in scores.items():
            at, best = self.best_scores.get(name, (step, row))
            if best["measure"] != row["measure"]:            # the task has changed
                at, best = step, row
            fall = (best["value"] - row["value"]) * (-1 if row["measure"] in LOWER else 1)
            noise = math.hypot(row["stderr"] or 0.0, best["stderr"] or 0.0)
            self.best_scores[name] = (step, row) if fall < 0 else (at, best)
            if self.config.tasks is not None and fall > self.config.tasks * noise > 0:
                self.fallen[name] = (f"{name} {row['measure']} {row['value']:.4f} ± {noise:.4f} at step {step:,}, its "
                                     f"best was {best['value']:.4f} at step {at:,}")
            else:
                self.fallen.pop(name, None)
        return self.settle("tasks", bool(self.fallen), "scores on tasks have fallen: "
                           + ("; ".join(self.fallen.values()) or "no more"))

    def settle(self, rule: str, holds: bool, text: str) -> list[Alert]:
        """Record whether the condition of `rule` holds now. If this has changed since the last call, returns [the alert
        that begins or ends], else []. `text` says what was observed."""
        if holds == (rule in self.standing):
            return []
        if holds:
            self.standing[rule] = text
        else:
            del self.standing[rule]
        return [Alert(rule, holds, text)]


def _throughput(speed: float, usual: float, slow: bool) -> str:
    """Say how the speed compares with the usual one (both in tokens/s). If it is low, also say what that means for the
    training, and where its cause can be seen."""
    if not slow:
        return f"{speed:,.0f} tokens/s, usual are {usual:,.0f}"
    return (f"{speed:,.0f} tokens/s, {1 - speed / usual:.0%} below the usual {usual:,.0f}: the training takes longer, "
            f"but its result is not affected. Other programs may use this machine (see top, nvidia-smi); data_wait_ms "
            f"and straggler in metrics.jsonl show slow reading and slow ranks")
