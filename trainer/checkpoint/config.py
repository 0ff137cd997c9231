"""Settings of checkpoints. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainer.base.config import Count

NEVER = Count(0)


@dataclass(frozen=True)
class CheckpointConfig:
    """Settings of checkpoints. `every` is the number of steps between two checkpoints. A checkpoint is also written at
    the end of each phase of the training, and where a run is stopped. With `async`, checkpoints are written in the
    background.

    Old checkpoints are deleted, with these exceptions:

    * the latest `keep`;
    * the `keep_best` with the lowest held-out loss (`every` must then be a multiple of `train.evaluate.every`);
    * with `keep_every: 1B`, the first one at or after each multiple of 1B tokens (0: off);
    * those at the ends of phases;
    * those that another process reads;
    * up to four that are still to be scored by `evaluate.tasks`.

    `moments: bf16` stores the optimiser's moments in half the bytes. With AdamW, a checkpoint then has 8 instead of 12
    bytes per parameter. A training that resumes starts from moments rounded to 2 or 3 decimal digits. It follows an
    uninterrupted training closely, but not bit for bit.
    """

    every: int = 200
    keep: int = 2
    keep_every: Count = NEVER
    keep_best: int = 0
    async_: bool = False
    moments: Literal["fp32", "bf16"] = "fp32"

    def check(self) -> None:
        if self.every < 1 or self.keep < 1 or self.keep_best < 0:
            raise ValueError("every and keep must be at least 1, keep_best at least 0")
