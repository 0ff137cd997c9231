"""Computes the learning rate as a pure function of the number of tokens trained on. It needs no state in checkpoints,
and a resumed run has the same rates.

The rate first rises linearly (warm-up). The curve after it depends on `kind`. The *total* is the number of tokens of
all phases (stretches of the training) that are not marked `extra`.

* `wsd` (MiniCPM, arXiv 2404.06395; Hägele et al., arXiv 2405.18392) holds the peak and then decays. It decays over the
  phases with `lr: decay` or, if there are none, over the last `decay` of the total. After a decay the rate stays low.
* `cosine` and `linear` fall from the end of the warm-up to the end of the total.
* `multistep` (DeepSeek LLM, arXiv 2401.02954) drops at milestones.
* `inverse-sqrt` falls with 1/√tokens after the warm-up.
* `constant` does not fall.

A phase may instead have a curve of its own (a mapping under its `lr`), independent of the run's schedule. The rate
first rises to the phase's own peak: from 0 in the first phase and when the optimiser is reset, else from the last rate
of the previous phase. If that last rate is above the peak, the phase begins at its peak. After the rise, the rate falls
in the phase's own shape. A phase without a curve of its own is refused if the run's rate is 0 in it, because it would
learn nothing.

A share such as 2% is a share of the total. So adding an `extra` phase does not change the rates before it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from tokenizer.mixture.curriculum import Phase
from trainer.base.config import ConfigError, count

#: shapes of a decay: progress in [0, 1] → how much of the difference between peak and floor is left, 1 to 0
SHAPES = {
    "linear": lambda x: 1 - x,
    "1-sqrt": lambda x: 1 - math.sqrt(x),
    "cosine": lambda x: 0.5 * (1 + math.cos(math.pi * x)),
    # halves the rate like MiniCPM, shifted so that it reaches the floor at the end (Megatron-LM)
    "exp": lambda x: 2 * 0.5 ** x - 1,
    "constant": lambda x: 1.0,
}


@dataclass(frozen=True)
class ScheduleConfig:
    """Settings of the learning rate over a training. They describe it as a share of its peak.

        warmup      length of the linear rise at the beginning, for every `kind`: tokens ('200M'), or a share of the
                    tokens of all phases not marked `extra` ('2%')
        decay       length of the fall at the end, for wsd, if no phase says `lr: decay`; written like `warmup`
        shape       curve of wsd's fall
        floor       the rate at the end of the fall, as a share of the peak, for wsd, cosine and linear
        milestones  for multistep: [[80%, 0.316], [90%, 0.1]] means 0.316 of the peak from 80 % of the tokens on, and
                    0.1 of it from 90 % on
        batch_rate  `sqrt` multiplies the rate by √(current batch size / final batch size of the phase) while the batch
                    size grows within a phase (Malladi et al., arXiv 2205.10287; OLMo)
    """

    kind: Literal["wsd", "cosine", "linear", "constant", "multistep", "inverse-sqrt"] = "wsd"
    warmup: str = "2%"
    decay: str = "10%"
    shape: Literal["linear", "1-sqrt", "cosine", "exp"] = "linear"
    floor: float = 0.0
    milestones: tuple[tuple[str, float], ...] | None = None
    batch_rate: Literal["sqrt"] | None = None

    def check(self) -> None:
        for key in ("warmup", "decay"):
            try:
                span(getattr(self, key), 1000)
            except ValueError as error:
                raise ValueError(f"{key}: {error}; write tokens (200M) or a share of the total (2%)") from None
        if not 0 <= self.floor <= 1:
            raise ValueError(f"floor is a share of the peak, between 0 and 1, not {self.floor}")
        if (self.kind == "multistep") != bool(self.milestones):
            raise ValueError("milestones, e.g. [[80%, 0.316], [90%, 0.1]], go with kind: multistep, and it needs them")
        for at, level in self.milestones or ():
            span(at, 1000)
            if not 0 < level <= 1:
                raise ValueError(f"milestones: the rate is a share of the peak, above 0 and at most 1, not {level}")
        if self.kind == "inverse-sqrt" and not span(self.warmup, 10**15):
            raise ValueError("kind: inverse-sqrt falls from the warm-up on and needs one")


def span(text: str, total: int) -> int:
    """Convert a length such as '2%' (of `total`) or '200M' to a number of tokens. Raises ValueError for any other
    text."""
    if text.strip().endswith("%"):
        share = float(text.strip()[:-1]) / 100
        if not 0 <= share <= 1:
            raise ValueError(f"{text!r} is not between 0% and 100%")
        return round(share * total)
    return count(text)


class Schedule:
    """The learning rate over a training. `factor(tokens)` is the rate after that many tokens, as a share of the
    optimiser's `lr`. It is in [0, 1], except in a phase (stretch of the training) whose own peak is above `lr`. A step
    uses the factor at the middle of its batch. The first and the last step therefore do not have rate 0, and the curve
    does not depend on the batch size."""

    def __init__(self, config: ScheduleConfig, phases: Sequence[Phase], lr: float) -> None:
        self.config, self.phases, self.lr = config, phases, lr
        self.starts = list(accumulate((p.tokens for p in phases), initial=0))
        self.total = sum(p.tokens for p in phases if not p.extra)
        self.warmup = span(config.warmup, self.total)
        self.milestones = sorted((span(start, self.total), level) for start, level in config.milestones or ())
        #: stretches [start, stop) of tokens over which the rate falls
        self.decays: list[tuple[int, int]] = []
        for phase, start in zip(phases, self.starts):
            if not isinstance(phase.lr, Mapping) and phase.lr not in ("stable", "constant", "decay"):
                raise ConfigError(f"curriculum.json: phase {phase.name!r}: lr: {phase.lr!r} is not known; "
                                  f"write lr: stable or lr: decay")
            if phase.lr == "decay":
                if config.kind != "wsd":
                    raise ConfigError(f"train.schedule.kind: {config.kind} has no stretch of decay, yet phase "
                                      f"{phase.name!r} says lr: decay; use kind: wsd, or lr: stable in the phase")
                if self.decays and self.decays[-1][1] == start:
                    self.decays[-1] = (self.decays[-1][0], start + phase.tokens)
                else:
                    self.decays.append((start, start + phase.tokens))
        if config.kind == "wsd" and not self.decays and span(config.decay, self.total):
            self.decays.append((self.total - span(config.decay, self.total), self.total))
        if config.kind in ("cosine", "linear"):
            self.decays.append((min(self.warmup, self.total), self.total))
        for phase, start in zip(phases, self.starts):
            if not isinstance(phase.lr, Mapping) and not self.base(start + phase.tokens / 2):
                raise ConfigError(f"curriculum.json: phase {phase.name!r} comes after the learning rate has fallen "
                                  f"to 0 and would learn nothing: let only the last phases say lr: decay (a phase "
                                  f"inherits it), give it a rate of its own, or give train.schedule.floor")

    def factor(self, tokens: float) -> float:
        index = min(bisect_right(self.starts, tokens) - 1, len(self.phases) - 1)
        phase = self.phases[index]
        level = self.inside(index, tokens)
        if self.config.batch_rate == "sqrt":
            level *= math.sqrt(phase.batch_at((tokens - self.starts[index]) / phase.sequence) / phase.batch)
        return level

    def inside(self, index: int, tokens: float) -> float:
        """Return the learning rate after `tokens` tokens, as a share of the optimiser's `lr`, without the adjustment
        for a growing batch size (`batch_rate`). `index` is that of a phase (stretch of the training). The rate follows
        the phase's own curve, or that of the whole run if it has none."""
        rate = self.phases[index].lr
        if not isinstance(rate, Mapping):
            return self.base(tokens)
        since, peak = tokens - self.starts[index], rate["peak"] / self.lr
        if since < rate["warmup"]:
            fresh = index == 0 or self.phases[index].reset_optimizer
            low = 0.0 if fresh else min(peak, self.inside(index - 1, self.starts[index]))
            return low + (peak - low) * since / rate["warmup"]
        # the planned length: an edit that cuts the phase short must not change its rates up to there
        length = self.phases[index].reserved * self.phases[index].sequence - rate["warmup"]
        floor = rate["floor"] * peak
        return floor + (peak - floor) * SHAPES[rate["shape"]](min(1.0, (since - rate["warmup"]) / max(1, length)))

    def base(self, tokens: float) -> float:
        """Return the learning rate after `tokens` tokens, as a share of the optimiser's `lr`, by the curve of the whole
        run. This curve applies in phases (stretches of the training) that have none of their own."""
        config = self.config
        warm = min(1.0, tokens / self.warmup) if self.warmup else 1.0
        if config.kind == "inverse-sqrt":
            return warm * math.sqrt(self.warmup / max(tokens, self.warmup))
        reached = [share for at, share in self.milestones if tokens >= at]
        level = reached[-1] if reached else 1.0
        shape = SHAPES[config.kind if config.kind in ("cosine", "linear") else config.shape]
        for start, stop in self.decays:     # a second decay starts from where the first one ended
            if tokens > start:
                progress = min(1.0, (tokens - start) / max(1, stop - start))
                level = config.floor + (level - config.floor) * shape(progress)
        return warm * level
