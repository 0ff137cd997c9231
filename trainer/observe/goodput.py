"""Accounts for wall time: every second since the first start of a training belongs to exactly one cause. (If a training
is killed before its first checkpoint, counting begins anew.)

Goodput is the share of the wall time that was spent on steps whose result is kept (Google Cloud's ML Productivity
Goodput). A stop watch always runs for one cause, so that the causes sum to the wall time. The seconds by cause are
written to metrics.jsonl as part of its lines (the goodput record). After a kill, the next process reads them from
there. It counts the time between the two processes as `restart`, and moves the time of steps after the checkpoint to
`lost`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from trainer.observe.metrics import standing

#: cause → its name in printed lines
CAUSES = {
    "training": "training",               # forward, backward, optimiser of steps whose result is kept
    "warmup": "compile and warm-up",      # the first step of a process, and the first of another shape
    "data": "waiting for data",
    "evaluation": "evaluation",
    "checkpoint": "checkpoints",
    "setup": "set-up",                    # from the start of a process to its first step
    "restart": "restarts",                # from the last line of a process to the start of the next
    "lost": "steps lost",                 # skipped, or done again after a kill or a rewind
}
#: causes that belong to steps: when steps are lost, their time moves to `lost`
OF_STEPS = ("training", "warmup", "data")


class Goodput:
    """Counts the wall time of a training by cause, such as training, evaluation or restart, in seconds. All processes
    of the training are included, also those before a restart. `peak` is the highest possible FLOP/s of all devices
    together (None: unknown)."""

    def __init__(self, peak: float | None = None) -> None:
        self.seconds = dict.fromkeys(CAUSES, 0.0)
        self.flops = self.capacity = 0.0
        self.peak, self.cause = peak, "setup"
        self.since, self.began = time.perf_counter(), time.time()

    def enter(self, cause: str) -> None:
        """Count the time from now on under `cause`, until this method is called with another cause."""
        now = time.perf_counter()
        self.seconds[self.cause] += now - self.since
        self.capacity += (now - self.since) * (self.peak or 0.0)
        self.cause, self.since = cause, now

    @contextmanager
    def of(self, cause: str) -> Iterator[None]:
        before = self.cause
        self.enter(cause)
        try:
            yield
        finally:
            self.enter(before)

    def move(self, seconds: float, source: str, target: str) -> None:
        """Move `seconds` of wall time from the cause `source`, under which they were counted, to the cause `target`. If
        fewer seconds are counted under `source`, only these are moved."""
        seconds = min(max(0.0, seconds), self.seconds[source])
        self.seconds[source] -= seconds
        self.seconds[target] += seconds

    def record(self) -> dict[str, Any]:
        """Return a record of the wall time so far, which is stored in a line of metrics.jsonl under "goodput".

        The record has the seconds by cause and three more fields. `flops` is the model FLOPs of steps whose result is
        kept. `capacity` is the FLOPs that the devices could have done (0: unknown). `at` is the time of the record,
        because the line may be written later.
        """
        self.enter(self.cause)
        return {**{cause: round(s, 3) for cause, s in self.seconds.items()},
                "flops": self.flops, "capacity": self.capacity, "at": round(time.time(), 3)}

    @property
    def wall(self) -> float:
        return sum(self.seconds.values())

    @property
    def share(self) -> float:
        return self.seconds["training"] / self.wall if self.wall else 0.0

    def mfu(self) -> float | None:
        """Return the wall MFU: model FLOPs of steps whose result is kept, divided by the FLOPs that the devices could
        have done in the whole wall time. None if the peak of the devices is unknown."""
        return self.flops / self.capacity if self.capacity else None

    def resume(self, lines: Sequence[dict[str, Any]], step: int) -> None:
        """Add the wall time of former processes of this training when it resumes after step `step`. `lines` are the
        lines of metrics.jsonl that these processes wrote, including those about steps that were later undone. The time
        of the steps after `step` is counted as lost."""
        last = latest(lines)
        if last is None:
            return
        recorded, alive = at(last), max(last["time"], lines[-1]["time"])
        gap = max(0.0, self.began - alive)
        for cause in CAUSES:
            self.seconds[cause] += last["goodput"].get(cause, 0.0)
        # time of the former process after its last record: checkpoints count as `checkpoint`, other time as lost
        unrecorded = max(0.0, self.began - recorded - gap)
        written = sum(line.get("seconds", 0.0) for line in lines if line["event"] == "checkpoint"
                      and "goodput" in line and at(line) >= recorded)
        self.seconds["checkpoint"] += min(written, unrecorded)
        self.seconds["restart"] += gap
        self.seconds["lost"] += max(0.0, unrecorded - written)
        self.flops += last["goodput"].get("flops", 0.0)
        self.capacity += last["goodput"].get("capacity", 0.0) + (gap + unrecorded) * (self.peak or 0.0)
        self.rewind(lines, step)

    def rewind(self, lines: Sequence[dict[str, Any]], step: int) -> None:
        """Count the time of the steps after `step` as lost, because training goes back to this step. `lines` are the
        lines of metrics.jsonl. How much time the steps up to `step` took is known from the latest record of wall time
        in the lines about them. All other time of steps (training, warm-up and waits for data) is lost."""
        line = latest([line for line in standing(lines) if line["step"] <= step])
        before = line["goodput"] if line else {}
        self.enter(self.cause)
        for cause in OF_STEPS:
            self.move(self.seconds[cause] - before.get(cause, 0.0), cause, "lost")
        self.flops = before.get("flops", 0.0)

    def describe(self) -> str:
        """Return the wall time by cause as text: '1:02:10 of wall time: training 91.2%, evaluation 3.1%, …'. The
        largest share comes first; shares below 0.05 % are left out."""
        self.enter(self.cause)
        parts = [f"{CAUSES[cause]} {seconds / self.wall:.1%}" for cause, seconds in
                 sorted(self.seconds.items(), key=lambda item: -item[1]) if seconds / max(self.wall, 1e-9) >= 0.0005]
        return f"{clock(self.wall)} of wall time: " + ", ".join(parts)

    def summary(self) -> dict[str, Any]:
        """Return the part of summary.json about wall time: {"wall_s", "share" (of training), "wall_mfu", "seconds":
        {cause: s}}. The seconds of all causes sum to the wall time."""
        self.enter(self.cause)
        return {"wall_s": round(self.wall, 3), "share": self.share, "wall_mfu": self.mfu(),
                "seconds": {cause: round(s, 3) for cause, s in self.seconds.items()}}


def at(line: Mapping[str, Any]) -> float:
    """Return the time, in seconds since 1970, at which the record of wall time (goodput) in a line of metrics.jsonl was
    taken."""
    return line["goodput"].get("at", line["time"])


def latest(lines: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the one of `lines` (of metrics.jsonl) whose record of wall time (goodput) is the latest; None if no line
    has such a record. It need not be the last line, because a checkpoint's line is written when the checkpoint is
    complete, with a record from when it began."""
    return max((line for line in lines if "goodput" in line), key=at, default=None)


def clock(seconds: float) -> str:
    """Format a number of seconds as text: 93 → '1:33', 7260 → '2:01:00', 200000 → '2d 7:33:20'."""
    minutes, seconds_part = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours}:{minutes:02}:{seconds_part:02}"
    return f"{hours}:{minutes:02}:{seconds_part:02}" if hours else f"{minutes}:{seconds_part:02}"
