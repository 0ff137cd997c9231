"""Tells which steps of the curriculum a training has performed. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trainer.base.config import ConfigError
from trainer.checkpoint.ledger import Ledger
from trainer.observe.metrics import TURNS, scan


@dataclass(frozen=True)
class Performed:
    """Which steps of its curriculum a training has performed. Steps are numbered from 1."""

    last: int                            # number of the last step
    skipped: list[tuple[int, int]]       # ranges [first, stop) of steps up to `last` whose data was not read
    unchanged: int                       # number of steps that were computed, but whose update was skipped
    abandoned: int                       # number of steps undone by a rewind, or by a restart from an earlier step

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """The ranges [first, stop) of the steps whose data was read, in order."""
        ranges, first = [], 1
        for skipped, stop in [*self.skipped, (self.last + 1, self.last + 1)]:
            if skipped > first:
                ranges.append((first, skipped))
            first = max(first, stop)
        return ranges


def performed(out: Path) -> Performed:
    """Return what the training in the folder `out` has done. This is read from its metrics, and from its ledger (the
    list of skipped steps). Raises ConfigError when the folder holds no training."""
    path = out / "metrics.jsonl"
    if not path.exists():
        raise ConfigError(f"{path}: no such file; give the folder of a training, as in STORE/runs/RUN/train")
    last = abandoned = 0
    read: list[int] = []                 # steps that count now
    unchanged: list[int] = []

    def follow(event: str, step: int, text: str) -> bool:
        nonlocal last, abandoned, read, unchanged
        if event in TURNS:
            last = 0 if event == "start" else step
            abandoned += sum(number > last for number in read)
            read, unchanged = ([number for number in numbers if number <= last] for numbers in (read, unchanged))
        elif event == "step":
            last = step
            # a step that was skipped without being computed has no targets and no learning rate; a computed step has no
            # targets if all of its tokens are masked
            if '"targets": 0,' not in text or '"lr": ' in text:
                read.append(step)
                if '"skipped": true' in text:
                    unchanged.append(step)
        return False

    for _ in scan(path, follow):
        pass
    ledger = Ledger.read(out)
    skipped = sorted((first, min(stop, last + 1)) for first, stop, _ in ledger.passed if first <= last)
    return Performed(last, skipped, len(unchanged), abandoned)
