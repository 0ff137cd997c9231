"""The samples that one training step reads."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """One step of a training: which samples it reads. They are the samples [first, first + batch), all of one phase
    (stretch of the training). `number` counts steps from 0 over the whole run; `phase` is the index of the phase."""

    number: int
    phase: int
    first: int
    batch: int
    tokens: int               # number of targets before this step

    @property
    def stop(self) -> int:
        return self.first + self.batch
