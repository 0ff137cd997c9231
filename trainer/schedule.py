"""The learning rate as a pure function of tokens: nothing to save, nothing to get wrong on resume.

Warm-up is linear. `wsd` (MiniCPM, arXiv 2404.06395; Hägele et al., arXiv 2405.18392) holds the peak and decays at the
end: over the phases that say `lr: decay` or, where none does, over the last `decay` of all tokens. It does not rise
again: what follows a fall to 0 would learn nothing and is refused. `cosine` and `linear` fall from the end of the
warm-up to the end of the run; `constant` does not fall.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from trainer.config import ConfigError, count

#: progress in [0, 1] → share of the way from peak to floor that is left
SHAPES = {
    "linear": lambda x: 1 - x,
    "1-sqrt": lambda x: 1 - math.sqrt(x),
    "cosine": lambda x: 0.5 * (1 + math.cos(math.pi * x)),
}


@dataclass(frozen=True)
class ScheduleConfig:
    """`warmup` and `decay`: tokens ('200M') or a share of all tokens ('2%'); `floor`: share of the peak at the end."""

    kind: Literal["wsd", "cosine", "linear", "constant"] = "wsd"
    warmup: str = "2%"
    decay: str = "10%"
    shape: Literal["linear", "1-sqrt", "cosine"] = "linear"
    floor: float = 0.0

    def check(self) -> None:
        span(self.warmup, 1000)
        span(self.decay, 1000)
        if not 0 <= self.floor <= 1:
            raise ValueError(f"floor is a share of the peak, between 0 and 1, not {self.floor}")


class PhaseLike(Protocol):
    """What the schedule needs of `stages.mix.curriculum.Phase`."""

    name: str
    lr: object
    tokens: int


def span(text: str, total: int) -> int:
    """'2%' of `total` or '200M' → tokens."""
    if text.strip().endswith("%"):
        share = float(text.strip()[:-1]) / 100
        if not 0 <= share <= 1:
            raise ValueError(f"{text!r} is not between 0% and 100%")
        return round(share * total)
    return count(text)


class Schedule:
    """factor(tokens) in [0, 1], to be multiplied with the peak. A step takes it at the middle of its batch, so that the
    first and the last step are not wasted at zero and the curve does not depend on the batch size."""

    def __init__(self, config: ScheduleConfig, phases: Sequence[PhaseLike]) -> None:
        self.config = config
        self.total = sum(p.tokens for p in phases)
        self.warmup = span(config.warmup, self.total)
        #: stretches [start, stop) of tokens over which the rate falls
        self.decays: list[tuple[int, int]] = []
        at = 0
        for phase in phases:
            if phase.lr not in ("stable", "constant", "decay"):
                raise ConfigError(f"curriculum.json: phase {phase.name!r}: lr: {phase.lr!r} is not known; "
                                  f"write lr: stable or lr: decay")
            if phase.lr == "decay":
                if config.kind != "wsd":
                    raise ConfigError(f"train.schedule.kind: {config.kind} has no stretch of decay, yet phase "
                                      f"{phase.name!r} says lr: decay; use kind: wsd, or lr: stable in the phase")
                if self.decays and self.decays[-1][1] == at:
                    self.decays[-1] = (self.decays[-1][0], at + phase.tokens)
                else:
                    self.decays.append((at, at + phase.tokens))
            at += phase.tokens
        if config.kind == "wsd" and not self.decays and span(config.decay, self.total):
            self.decays.append((self.total - span(config.decay, self.total), self.total))
        if config.kind == "wsd" and config.floor == 0 and self.decays:
            at = 0
            for phase in phases:
                if at >= self.decays[0][1]:
                    raise ConfigError(f"curriculum.json: phase {phase.name!r} comes after the learning rate has fallen "
                                      f"to 0 and would learn nothing: let only the last phases say lr: decay (a phase "
                                      f"inherits it), or give train.schedule.floor")
                at += phase.tokens
        if config.kind in ("cosine", "linear"):
            self.decays.append((min(self.warmup, self.total), self.total))

    def factor(self, tokens: float) -> float:
        warm = min(1.0, tokens / self.warmup) if self.warmup else 1.0
        shape = SHAPES[self.config.kind if self.config.kind in ("cosine", "linear") else self.config.shape]
        level = 1.0
        for start, stop in self.decays:     # a second decay starts from where the first one ended
            if tokens > start:
                x = min(1.0, (tokens - start) / max(1, stop - start))
                level = self.config.floor + (level - self.config.floor) * shape(x)
        return warm * level
