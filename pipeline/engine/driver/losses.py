"""Judges lost attempts at a task: does the task take down its nodes (the machines it runs on), or is it lost only as
often as other tasks?

An attempt is *lost* if it ends without a fault of its task. In one case its supervisor dies, alone or with its node
(cause `lost`). In the other the machine keeps it from its work (cause `environment`: memory pressure, a killed child, a
full disk). A fixed limit on the losses of a task would end every long run on nodes that are preempted without notice:
of 10⁶ tasks that are lost in 30 % of their attempts, 66 are lost eight times in a row. Without any limit, a task that
takes its nodes down would do so until the end of the run.

The losses of a task are therefore compared with those of other attempts on the same class of nodes, since the task's
first loss. This gives two rates: losses per second of the task, and losses per second of the other attempts. A task
that runs for hours may thus be lost more often than one that runs for seconds.

If the two rates were equal, each loss would hit the task with a probability equal to its share of the time. This is the
conditional test of two Poisson rates (Przyborowski and Wilenski, Biometrika 1940). Chernoff's bound limits the
probability that chance alone hits the task so often. The task is judged to be the cause when this bound is tiny.

Losses are counted as events. A node's death is one event, however many attempts it ends and however many supervisors of
the node report it. Ten attempts that run on one node for an hour are exposed to the death of that node for one hour,
not for ten. The seconds that the other attempts ran are therefore divided by the average number of attempts that an
event ends. Attempts that were lost together with the task are left out of the other attempts' events and seconds,
because the task may have caused their loss.

On a cluster of few nodes, other tasks have hardly run without this one. After a few losses the task is therefore *held
back*. As long as other tasks wait, these run first, until they have run EVIDENCE times as long as the task did.

Two tasks that were always lost together cannot be told apart. A task therefore becomes a *suspect* well before its
limit, and the scheduler runs only one suspect at a time. An innocent suspect then finishes without the guilty task
beside it.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from pipeline.engine.messages import Failure

CAUSES = ("lost", "environment")     # kinds of failure that are losses
MAX_LOST = 8             # least number of losses to one cause for which a task is blamed
HOPELESS = 8             # a task with HOPELESS * max_lost losses while no task finished ends the run
SUSPECT = 4              # least number of losses that make a task a suspect, or hold it back
SUSPICION = math.log(1e3)    # a suspect's losses are less probable than one in a thousand
PROOF = math.log(1e9)        # a blamed task's losses are less probable than one in 10⁹: a run may judge a million tasks
SAME_DEATH_S = 10.0      # losses on one node within this time are one death, which each of its supervisors reports
EVIDENCE = 20            # times the task's own seconds: if others ran so long without loss, MAX_LOST losses are proof


@dataclass
class BaseRate:
    """Statistics of all attempts at tasks on one class of machines: for how long they ran, how many were lost to each
    cause, and in how many events. An attempt is lost if it ends without a fault of its task, for instance because its
    machine dies. The death of a machine is one event, even if it ends several attempts."""

    lost: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    _deaths: dict[str, float] = field(default_factory=dict)      # node that died lately → when it was first reported
    _running: int = 0
    _began: float = 0.0              # sum of the times at which the running attempts began
    _ended_s: float = 0.0            # run time of all attempts that have ended, in seconds

    def began(self, now: float) -> None:
        self._running += 1
        self._began += now

    def ended(self, began: float, now: float) -> None:
        self._running -= 1
        self._began -= began
        self._ended_s += now - began

    def failed(self, cause: str, attempts: int, host: str = "", now: float = 0.0) -> None:
        """Count an event, such as the death of a node, that ended `attempts` attempts at tasks. Reports that name the
        same host within SAME_DEATH_S are one event."""
        self.lost[cause] += attempts
        self._deaths = {name: time for name, time in self._deaths.items() if now - time <= SAME_DEATH_S}
        if host not in self._deaths:
            self.events[cause] += 1
        if host:
            self._deaths.setdefault(host, now)

    def seconds(self, now: float) -> float:
        """Returns the sum of the run times of all attempts on this class of machines, in seconds. An attempt that still
        runs counts up to `now`."""
        return self._ended_s + self._running * now - self._began


class TaskLosses:
    """The losses of one task, that is, its attempts that ended because a node died or the machine was at fault. `base`
    holds the statistics of all attempts on the same class of machines. The object is made at the task's first loss,
    which `base` already counts."""

    def __init__(self, base: BaseRate, now: float) -> None:
        self.count: Counter[str] = Counter()
        self.suspect = False
        self._base, self._events, self._since_s = base, base.events.copy(), base.seconds(now)
        self._after_first: Counter[str] = Counter()  # losses after the first one, by cause
        self._seconds = 0.0                          # run time of the attempts that these losses ended
        self._beside_s = 0.0                         # upper bound: those attempts and others lost with them
        self._beside_first_s = 0.0                   # upper bound: all attempts that the first loss ended
        self._fruitless = self._finished = 0         # losses since a task last finished, and tasks finished by then

    def add(self, cause: str, seconds: float, together: int, finished: int) -> None:
        """Count a loss of this task to `cause`. `seconds`: how long the lost attempt had run. `together`: the number of
        attempts that were lost at the same moment, including this one. `finished`: the number of tasks that this run
        has finished so far."""
        if self.count:
            self._after_first[cause] += 1
            self._seconds += seconds
            self._beside_s += together * seconds
        else:
            self._beside_first_s = together * seconds
        self.count[cause] += 1
        self._fruitless = 1 if finished != self._finished else self._fruitless + 1
        self._finished = finished

    def others(self, cause: str, now: float) -> tuple[int, float]:
        """Returns (events, seconds) of the other tasks, to compare this task's losses to `cause` with. `events` is the
        number of events (such as deaths of a node) that hit only other tasks. `seconds` is the time that their attempts
        ran, divided by the number of attempts that an event ends on average.

        Both count from this task's first loss on. If the other tasks have run for less time since then than this task
        has, both count from the beginning of the run."""
        size = max(1.0, self._base.lost[cause] / max(1, self._base.events[cause]))
        all_s = self._base.seconds(now) - self._beside_s
        events = self._base.events[cause] - self._after_first[cause]
        since_s = max(0.0, (all_s - self._since_s) / size)
        if since_s >= self._seconds:
            return max(0, events - self._events[cause]), since_s
        first = self.count[cause] - self._after_first[cause]
        return max(0, events - first), max(0.0, (all_s - self._beside_first_s) / size)

    def comparable(self, cause: str, now: float) -> bool:
        """Whether other tasks have run long enough to be compared with this task. One more loss of this task to `cause`
        is then evidence that the task causes its losses."""
        return self.others(cause, now)[1] >= EVIDENCE * self._seconds

    def held_back(self, now: float) -> bool:
        """Whether the task should wait while other tasks can run instead. This is so if it was lost at least SUSPECT
        times to one cause, and other tasks have not run long enough for its losses to be compared with theirs
        (`comparable`)."""
        return any(n >= SUSPECT and not self.comparable(cause, now) for cause, n in self.count.items())

    def judge(self, cause: str, now: float, max_lost: int = MAX_LOST) -> str:
        """Return why the losses of this task must end the run, or "" if the run continues. Also sets `suspect`: whether
        the task probably takes its nodes down."""
        count, (events, seconds) = self.count[cause], self.others(cause, now)
        share = self._seconds / (self._seconds + seconds) if seconds else 0.0
        self.suspect = count >= SUSPECT and improbable(count - 1, events, share, SUSPICION)
        if count >= max_lost:
            if seconds and improbable(count - 1, events, share, PROOF):
                return (f"{count} losses, {count - 1} of them in {self._seconds:.0f} s, where other tasks had {events} "
                        f"in {seconds:.0f} s: this task is the cause")
            if self._base.events[cause] == count:            # no other task was lost in this run
                return (f"{count} losses, and no other task ran for long enough to compare with: it takes its nodes "
                        f"down, or they are taken away before it can end")
        if cause == "lost" and self._fruitless >= HOPELESS * max_lost:
            return f"{self._fruitless} losses while no task finished: the run makes no progress"
        return ""


@dataclass
class History:
    """The failed attempts at one task so far in this run."""

    reasons: list[str] = field(default_factory=list)
    tracebacks: list[str] = field(default_factory=list)
    raised: tuple[str, int] | None = None        # message and row of the latest failure that the task itself raised
    exceptions: int = 0
    losses: TaskLosses | None = None

    def failed(self, failure: Failure, max_attempts: int) -> bool:
        """Note a failed attempt. Returns True if the task gets no further attempt. This is so if the error is
        permanent, if two successive attempts raised the same error at the same row, or if `max_attempts` attempts
        failed with the kind "exception"."""
        self.reasons.append(failure.message)
        if failure.traceback:
            self.tracebacks.append(failure.traceback.rstrip())
        raised = None if failure.row is None else (failure.message, failure.row)
        again, self.raised = raised is not None and raised == self.raised, raised
        self.exceptions += failure.kind == "exception"
        return again or failure.kind == "permanent" or self.exceptions >= max_attempts


def improbable(count: int, others: int, share: float, least: float) -> bool:
    """Whether a task was hit by so many events (such as deaths of a node) that chance is an improbable explanation. Of
    `count + others` events, `count` hit this task. By chance, each event hits it with probability `share`. Improbable
    means that Chernoff's bound on the probability of `count` or more hits is below exp(-least)."""
    if share <= 0.0:
        return True
    part = count / (count + others)
    if part <= share:
        return False
    exponent = part * math.log(part / share)
    if others:
        exponent += (1.0 - part) * math.log((1.0 - part) / (1.0 - share))
    return (count + others) * exponent > least
