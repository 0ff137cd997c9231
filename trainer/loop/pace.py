"""Decides during which steps another process may compute beside the training, so that it delays the training only a
little.

How much the process delays steps depends on the machine: free cores, memory bandwidth, a shared GPU. So the delay is
measured, by comparing steps during which the process is paused with steps during which it runs. The training has a
budget of delay. Every step adds a share of its duration to the budget, and the measured delay is subtracted. While the
budget is negative, the process is paused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from statistics import fmean

#: the usual time of a step is its mean over so many intervals (of one or more steps) without the process
USUAL = 128
#: number of such intervals before the process runs, and whenever the usual time is measured again
LEAST = 10
#: number of steps with the process after which the usual time is measured again
AGAIN = 50
#: the budget is at most what this many steps add to it
SAVED = 1000


class Pace:
    """Decides whether another process may compute beside a training. After each interval of steps, `runs` says whether
    the process may run during the next one. `share` is the largest delay, relative to the time of the steps without the
    process. This limit holds over a long time, but single steps may be delayed more."""

    def __init__(self, share: float) -> None:
        self.share, self.runs = share, False
        self.begin(None)

    def begin(self, shape: Hashable) -> None:
        """Forget all measured times, and begin to measure steps of the given `shape` (sequence length and batch size).
        Called when the shape changes, because the time of a step depends on it."""
        self.shape, self.runs = shape, False
        self.usual = deque[float](maxlen=USUAL)
        self.budget, self.run_steps, self.measured = 0.0, 0, 0

    def add(self, shape: Hashable, seconds: float, steps: int) -> bool:
        """Take into account that the last `steps` steps, of the given shape, took `seconds` in all. Returns whether the
        other process may run during the next steps."""
        if shape != self.shape:
            self.begin(shape)
            return self.runs
        self.budget += self.share * seconds
        if self.runs:
            self.run_steps += steps
            self.budget -= seconds - steps * fmean(self.usual)      # negative differences count, too: they are noise
        else:
            self.usual.append(seconds / steps)
            self.measured += 1
        self.budget = min(self.budget, self.share * SAVED * fmean(self.usual))
        if self.run_steps >= AGAIN:
            self.run_steps = self.measured = 0
        self.runs = self.measured >= LEAST and self.budget >= 0
        return self.runs
