"""Losses by cause: whether a task takes its nodes down, or is lost as often as other tasks on such nodes.

An attempt ends without a fault of its task when its node dies (`lost`) or when the machine keeps it from its work
(`environment`: memory pressure, a killed child, a full disk). Where nodes are preempted unannounced, a fixed number of
such losses would end every long run: of 10⁶ tasks that are lost in 30 % of their attempts, 66 are lost eight times in a
row. A task without any limit would take down one node after the other for as long as the run lasts.

So the losses of a task are compared with those of other attempts of the same class of nodes, in the time since the
task's first loss. Losses of others per second that they ran, times the seconds that this task ran, is the number it is
expected to have (the exposure of survival analysis): a task that runs for hours may be lost more often than one that
runs for seconds. Attempts that were lost together with one of this task do not count as others, because the task may
have caused that. The number of losses is taken as Poisson with that expectation, and Chernoff's bound limits the
probability of as many or more.

Two tasks that were lost together each time cannot be told apart. So a task becomes a *suspect* well before its limit,
and the scheduler runs one suspect at a time. An innocent one then finishes without the other. While a suspect waits,
losses of others show the base rate, even on a cluster of one node.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from pipeline.engine.messages import Failure

CAUSES = ("lost", "environment")     # kinds of failure that are losses
MAX_LOST = 8             # least number of losses to one cause that blame a task
HOPELESS = 8             # times MAX_LOST losses of a task end the run at any base rate, if no task finished in between
SUSPECT = 4              # least number of losses that make a task a suspect
SUSPICION = math.log(1e3)    # a suspect's losses are less probable than one in a thousand
PROOF = math.log(1e9)        # and those of a task that is blamed than one in 10⁹: a run may judge a million times


@dataclass
class BaseRate:
    """All attempts at tasks of one class of nodes: for how long they ran, and how many were lost to each cause."""

    lost: Counter[str] = field(default_factory=Counter)
    _running: int = 0
    _began: float = 0.0              # sum of the times at which the running attempts began
    _ended_s: float = 0.0            # seconds that the other attempts ran

    def began(self, now: float) -> None:
        self._running += 1
        self._began += now

    def ended(self, began: float, now: float) -> None:
        self._running -= 1
        self._began -= began
        self._ended_s += now - began

    def seconds(self, now: float) -> float:
        """The seconds that all attempts have run until now."""
        return self._ended_s + self._running * now - self._began


class Losses:
    """The losses of one task, made at its first one: `base` already counts that."""

    def __init__(self, base: BaseRate, now: float) -> None:
        self.count: Counter[str] = Counter()
        self.suspect = False
        self._base, self._lost, self._since_s = base, base.lost.copy(), base.seconds(now)
        self._together: Counter[str] = Counter()     # attempts lost in the same events since the first one
        self._seconds = 0.0                          # that attempts at the task ran since then
        self._fruitless = self._finished = 0         # losses since the last finished task, and the number of that

    def add(self, cause: str, seconds: float, together: int, finished: int) -> None:
        """Count a loss after `seconds`. `together`: attempts that were lost at once, this one included. `finished`:
        tasks that have finished in this run."""
        if self.count:
            self._together[cause] += together
            self._seconds += seconds
        self.count[cause] += 1
        self._fruitless = 1 if finished != self._finished else self._fruitless + 1
        self._finished = finished

    def expected(self, cause: str, now: float) -> float:
        """The number of losses since the first one that other attempts had in as many seconds."""
        others = self._base.lost[cause] - self._lost[cause] - self._together[cause]
        seconds = self._base.seconds(now) - self._since_s - self._seconds
        return others * self._seconds / seconds if others > 0 and seconds > 0 else 0.0

    def judge(self, cause: str, now: float, max_lost: int = MAX_LOST) -> str:
        """Why the run ends, or "". Also decides whether the task is a suspect."""
        count, expected = self.count[cause], self.expected(cause, now)
        self.suspect = count >= SUSPECT and improbable(count - 1, expected, SUSPICION)
        if count >= max_lost and improbable(count - 1, expected, PROOF):
            return (f"{count} losses, where other tasks would have {expected + 1:.1f} in the same time: this task is "
                    f"the cause")
        if cause == "lost" and self._fruitless >= HOPELESS * max_lost:
            return f"{self._fruitless} losses while no task finished: nothing gets done here"
        return ""


@dataclass
class History:
    """The failed attempts at one task so far."""

    reasons: list[str] = field(default_factory=list)
    tracebacks: list[str] = field(default_factory=list)
    raised: tuple[str, int] | None = None        # message and row of the latest failure that the task itself raised
    exceptions: int = 0
    losses: Losses | None = None

    def failed(self, failure: Failure, max_attempts: int) -> bool:
        """Note a failed attempt. Returns whether it was the task's own failure for good: one that every attempt would
        meet, the same at the same row twice in a row, or too many."""
        self.reasons.append(failure.message)
        if failure.traceback:
            self.tracebacks.append(failure.traceback.rstrip())
        raised = None if failure.row is None else (failure.message, failure.row)
        again, self.raised = raised is not None and raised == self.raised, raised
        self.exceptions += failure.kind == "exception"
        return again or failure.kind == "permanent" or self.exceptions >= max_attempts


def improbable(count: int, expected: float, least: float) -> bool:
    """Whether a Poisson number with this expectation is `count` or more with a probability below exp(-least), by
    Chernoff's bound."""
    if expected <= 0.0:
        return True
    return count > expected and count * math.log(count / expected) - count + expected > least
