"""Defines the streams (token data to read) and phases (stretches of a training) of a curriculum, as `curriculum.json`
stores them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Stream:
    """One source of training data that a mixture gives a weight: the tokens of a source, language or quality bucket.
    All shards (files) of the stream are read as if they were one file."""

    name: str
    train: str                    # folder (or manifest) of the split=train shard set, relative to the store
    val: str | None               # the same for split=val; None when nothing was held out
    sha256: str                   # sha256 that pins the train shard set
    val_sha256: str | None
    tokens: int                   # of split=train, EOS included
    val_tokens: int
    dtype: str                    # uint8, uint16 or uint32
    from_phase: str | None = None # name of the first phase that may read the stream; left out of the file if any may
    packing: str | None = None    # sha256 of packed rows, which are read instead of windows (`tokenizer.shards.packed`)
    rows: int = 0                 # number of these rows; each has `longest` targets
    filled: int = 0               # number of their targets that are not padding
    #: sha256 of earlier versions of the train shard set, in which `tokenmill takedown` has overwritten documents
    replaces: tuple[str, ...] = ()

    def supers(self, longest: int) -> int:
        """Return the number of super-windows of the stream: blocks of `longest` tokens. A shorter block at its end is
        never read. If the stream has packed rows (training samples of whole documents), each row is a super-window."""
        return max(0, self.tokens - 1) // longest if self.packing is None else self.rows

    def padding(self, longest: int) -> float:
        """Return the share of the stream's targets that are padding. It is 0 unless the stream is read as packed rows
        (training samples of whole documents)."""
        return 0.0 if self.packing is None or not self.rows else 1 - self.filled / (self.rows * longest)


#: by how much a limit of more than one epoch may be exceeded
TOLERANCE = 0.01


def epochs_allowed(limit: float) -> float:
    """Return how often a stream (data source) may be read if `max_epochs` is `limit`. A limit above 1 may be exceeded
    by 1 %, because a rule such as `unimax: 4` plans exactly 4 epochs, and rounding to integer weights and whole windows
    may add a little. With a limit of up to 1, no token is read twice."""
    return limit * (1 + TOLERANCE) if limit > 1 else limit


@dataclass(frozen=True)
class Phase:
    """One stretch of the training with its own mixture of streams.

    `lr` is a word or a mapping. A word (one of `curriculum.RATES`) says how the learning-rate schedule of the whole run
    behaves in this phase. A mapping is a learning-rate curve of the phase's own, and replaces the run's schedule. It
    has the keys `peak` (the highest rate), `warmup` (in tokens), `shape` (one of `curriculum.RATE_SHAPES`) and `floor`
    (share of the peak at the end).

    `rope_theta` and `rope_scaling`, if given, replace those of `train.model` in this phase. A field with a default may
    be left out of the file."""

    name: str
    start: int                    # number of the first sample
    samples: int                  # number of samples, a whole number of steps
    reserved: int                 # `samples` as first resolved; larger than `samples` once an edit cut the phase
    sequence: int                 # L: targets per sample
    batch: int                    # sequences (samples) per step
    weights: dict[str, int]       # stream → integer weight; a stream not named is not read
    lr: str | dict[str, Any]      # one of RATES, or a mapping (its own curve)
    max_epochs: dict[str, float]  # stream → most epochs it may have been read by the end of the phase (default 1)
    on_exhausted: str             # "error" | "repeat"
    extra: bool = False           # beyond the run's total: percentages (a warm-up of 2%) do not count its tokens
    reset_optimizer: bool = False # the optimizer's moments start at zero at the phase's first step
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    ramp: list[list[int]] | None = None     # [[stop, batch], …]: smaller batches, each up to sample `stop` of the phase
    groups: dict[str, list[str]] | None = None    # group → its streams, which together get the sum of their weights
    made: dict[str, Any] | None = None      # split shards → their labels, and their entry of the mix

    @property
    def stop(self) -> int:
        return self.start + self.samples

    @property
    def stretches(self) -> list[tuple[int, int, int]]:
        """Return the ranges of the phase's samples that are read with one batch size, as [(first, stop, batch), …].
        Samples are counted from 0 at the start of the phase, and `batch` is the number of samples per step. There is
        one range, or several if the batch size grows within the phase."""
        stretches, first = [], 0
        for stop, batch in [*(self.ramp or ()), (self.samples, self.batch)]:
            stop = min(stop, self.samples)           # an edit may have cut the phase before this stop
            if stop > first:
                stretches.append((first, stop, batch))
            first = max(first, stop)
        return stretches

    @property
    def steps(self) -> int:
        return sum((stop - first) // batch for first, stop, batch in self.stretches)

    @property
    def has_whole_steps(self) -> bool:
        """Whether the phase's samples make a whole number of steps."""
        return all((stop - first) % batch == 0 for first, stop, batch in self.stretches)

    def batch_at(self, sample: float) -> int:
        """Return the batch size, in samples, of the step that reads sample number `sample`. Samples are counted from
        the start of the phase (this stretch of the training)."""
        return next((batch for _, stop, batch in self.stretches if sample < stop), self.batch)

    @property
    def tokens(self) -> int:
        """Number of targets (tokens to predict) of the phase: its samples times its sequence length."""
        return self.samples * self.sequence
