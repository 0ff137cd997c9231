"""Streams and phases of a curriculum, as `curriculum.json` holds them: what is mixed, and when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Stream:
    """The unit of a mixture: (source, language, quality bucket) as one virtual concatenation of tokens."""

    name: str
    train: str                    # folder (or manifest) of the split=train shard set, relative to the store
    val: str | None               # of split=val; None when nothing was held out
    sha256: str                   # pins the train shard set
    val_sha256: str | None
    tokens: int                   # in split=train, EOS included
    val_tokens: int
    dtype: str                    # uint16 or uint32


@dataclass(frozen=True)
class Phase:
    """One stretch of the run with its own mixture.

    `lr` is a word of `curriculum.RATES` (how the schedule of the whole run behaves here), or a mapping {peak: the rate
    itself, warmup: tokens, shape: one of `curriculum.RATE_SHAPES`, floor: share of the peak at the end}: the rate then
    follows this curve over the tokens of the phase, and the run's schedule is not applied. `rope_theta` and
    `rope_scaling` replace the model's keys in this phase (None: those of `train.model` hold). A field with a default
    may be left out of the file.
    """

    name: str
    start: int                    # first sample number
    samples: int                  # how many; a multiple of `batch`
    reserved: int                 # samples planned when it was first resolved; more than `samples` once an edit cut it
    sequence: int                 # L: targets of a sample
    batch: int                    # sequences (samples) of a step
    weights: dict[str, int]       # stream → integer weight; streams not named give nothing
    lr: str | dict[str, Any]      # one of RATES, or a curve of its own
    max_epochs: dict[str, float]  # stream → epochs it may have been read by the end of the phase (default 1)
    on_exhausted: str             # "error" | "repeat"
    extra: bool = False           # beyond the total: percentages (a warm-up of 2%) are of the total without its tokens
    reset_optimizer: bool = False # the optimizer's moments start at zero at the phase's first step
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    ramp: list[list[int]] | None = None     # [[stop, batch], …]: smaller batches, each up to sample `stop` of the phase

    @property
    def stop(self) -> int:
        return self.start + self.samples

    @property
    def stretches(self) -> list[tuple[int, int, int]]:
        """(first, stop, batch): ranges of the phase's samples, counted from 0, that are read in steps of `batch`. There
        is one, or several when the batch grows."""
        stretches, first = [], 0
        for stop, batch in [*(self.ramp or ()), (self.samples, self.batch)]:
            stop = min(stop, self.samples)           # an edit may have cut it
            if stop > first:
                stretches.append((first, stop, batch))
            first = max(first, stop)
        return stretches

    @property
    def steps(self) -> int:
        return sum((stop - first) // batch for first, stop, batch in self.stretches)

    @property
    def whole(self) -> bool:
        """Whether its samples are a whole number of steps."""
        return all((stop - first) % batch == 0 for first, stop, batch in self.stretches)

    def batch_at(self, sample: float) -> int:
        """The batch of the step that holds sample number `sample` of the phase."""
        return next((batch for _, stop, batch in self.stretches if sample < stop), self.batch)

    @property
    def tokens(self) -> int:
        """Targets of the phase: n × L."""
        return self.samples * self.sequence
