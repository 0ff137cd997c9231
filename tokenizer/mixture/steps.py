"""Computes the steps of a training and the windows (samples) that they read, from the curriculum alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tokenizer.mixture.apportion import CurriculumError
from tokenizer.mixture.curriculum import Curriculum
from tokenizer.mixture.order import Order


@dataclass(frozen=True)
class TrainingStep:
    """One step of a training. It reads samples [first, first + batch), which all belong to one phase (stretch of the
    training). `number` counts steps from 0 over the whole run; `phase` is the index of the phase."""

    number: int
    phase: int
    first: int
    batch: int
    tokens: int               # number of targets before this step

    @property
    def stop(self) -> int:
        return self.first + self.batch


def steps(curriculum: Curriculum, sample: int = 0) -> Iterator[TrainingStep]:
    """Yield the steps from sample number `sample` to the end, in O(1) memory. Raises CurriculumError when `sample` is
    not the first sample of a step."""
    number = tokens = 0
    for p, phase in enumerate(curriculum.phases):
        for first, stop, batch in phase.stretches:
            done = min(max(sample - phase.start - first, 0), stop - first)
            if done % batch:
                raise CurriculumError(f"sample {sample} is inside a step of phase {phase.name!r} (batch {batch})")
            for i in range(done // batch, (stop - first) // batch):
                yield TrainingStep(number + i, p, phase.start + first + i * batch, batch,
                                   tokens + i * batch * phase.sequence)
            number, tokens = number + (stop - first) // batch, tokens + (stop - first) * phase.sequence


def step_at(curriculum: Curriculum, number: int) -> TrainingStep | None:
    """Return the step that is printed as number `number` (from 1), or None if the curriculum has no such step."""
    before = tokens = 0
    for p, phase in enumerate(curriculum.phases):
        for first, stop, batch in phase.stretches:
            count, i = (stop - first) // batch, number - 1 - before
            if 0 <= i < count:
                return TrainingStep(number - 1, p, phase.start + first + i * batch, batch,
                                    tokens + i * batch * phase.sequence)
            before, tokens = before + count, tokens + (stop - first) * phase.sequence
    return None


def step_of(curriculum: Curriculum, sample: int) -> int:
    """Return the number (from 1) of the step that reads sample number `sample`. Raises CurriculumError if the
    curriculum has no such sample."""
    number = 0
    for phase in curriculum.phases:
        for first, stop, batch in phase.stretches:
            if 0 <= sample < phase.start + stop:
                return number + (sample - phase.start - first) // batch + 1
            number += (stop - first) // batch
    raise CurriculumError(f"sample {sample} is not one of the curriculum's, 0 to {curriculum.samples - 1}")


def readers_of(curriculum: Curriculum, stream: str, first: int, last: int, length: int) -> list[dict[str, Any]]:
    """Return where a training reads windows `first` to `last` (inclusive) of a stream (data source). Each reading is a
    mapping {step (from 1), phase, sample, window, epoch}, in the order of the training. Windows have `length` tokens.
    Phases (stretches of the training) with another sequence length are left out."""
    order, ratio = Order(curriculum), curriculum.longest // length
    result = []
    for p, phase in enumerate(curriculum.phases):
        if phase.sequence != length:
            continue
        samples = order.samples_of(order.names.index(stream), first // ratio, last // ratio + 1, p)
        for sample, window, epoch in zip(*(column.tolist() for column in samples.get(p, ()))):
            if first <= window <= last and sample < phase.stop:
                result.append({"step": step_of(curriculum, sample), "phase": phase.name, "sample": sample,
                               "window": window, "epoch": epoch})
    return sorted(result, key=lambda r: r["sample"])


def rows_of(curriculum: Curriculum, step: TrainingStep) -> list[dict[str, Any]]:
    """Return what a step reads: a mapping for each row (sample) of its batch, {row (from 1), sample, stream, epoch,
    window, tokens}. `window` is the number of the row's window in its stream (data source), and `tokens` is its length
    L."""
    at = Order(curriculum).locate(step.first, step.stop)
    return [{"row": i + 1, "sample": step.first + i, "stream": curriculum.streams[stream].name, "epoch": epoch,
             "window": window, "tokens": length}
            for i, (stream, epoch, window, length) in enumerate(zip(*(column.tolist() for column in (
                at.stream, at.epoch, at.window, at.sequence))))]
