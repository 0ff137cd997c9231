"""The samples that one training step reads."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """Samples [first, first + batch) of one phase; `number` counts from 0 over the whole run."""

    number: int
    phase: int
    first: int
    batch: int
    tokens: int               # number of targets before this step

    @property
    def stop(self) -> int:
        return self.first + self.batch
