"""Collects what the plot of a training shows from its metrics.jsonl: loss and learning rate of each step, skipped
steps, returns to a checkpoint (rewinds) and evaluations."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from trainer.observe.metrics import parse


class Story:
    """What the plot of a training shows, as columns of numbers. Lines of metrics.jsonl are added in the order of the
    file. When a line says that training went back to a checkpoint or began anew, the numbers of the steps that this
    undoes are removed."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        #: columns, one entry per step: number, tokens read by its end, loss (NaN: none), learning rate (NaN: skipped)
        self.number, self.tokens, self.loss, self.rate = (array("d") for _ in range(4))
        self.skips: list[tuple[float, float]] = []  # (number, tokens) of steps whose update was skipped
        self.passed: list[tuple[float, float]] = []                  # (number, tokens) of steps not performed
        self.rewinds: list[float] = []                               # tokens to which training was rewound
        self.evals: list[dict[str, Any]] = []
        self.phases: list[dict[str, Any]] = []

    def add(self, line: Mapping[str, Any]) -> None:
        event, number = line["event"], line["step"]
        if event == "start":
            self.begin()
        if event in ("resume", "rewind"):
            while self.number and self.number[-1] > number:
                for column in (self.number, self.tokens, self.loss, self.rate):
                    column.pop()
            self.evals = [e for e in self.evals if e["step"] <= number]
            self.skips, self.passed = ([at for at in marks if at[0] <= number] for marks in (self.skips, self.passed))
        if event == "rewind":
            self.rewinds.append(self.tokens[-1] if self.tokens else 0.0)
        if event in ("start", "resume"):
            self.phases = line.get("phases", [])
        if event == "eval":
            self.evals.append(dict(line))
        if event == "step":
            if line.get("skipped"):
                (self.skips if "lr" in line else self.passed).append((number, line["tokens"]))
            loss = None if line.get("skipped") else line["loss"]
            for column, value in ((self.number, number), (self.tokens, line["tokens"]), (self.loss, loss),
                                  (self.rate, line.get("lr"))):
                column.append(math.nan if value is None else value)


class StoryFile:
    """Reads a metrics.jsonl for the plot of a training. Each call of `read` reads only the lines that were added since
    the last call. So drawing the plot does not take longer with every evaluation, even after a million steps."""

    def __init__(self, path: Path) -> None:
        self.path, self.offset, self.story = path, 0, Story()

    def read(self) -> Story:
        if self.path.stat().st_size < self.offset:                   # the file was replaced
            self.offset, self.story = 0, Story()
        with open(self.path, "rb") as f:
            f.seek(self.offset)
            for text in f:
                if text.endswith(b"\n"):
                    self.offset += len(text)
                    if (line := parse(text.decode("utf-8", "replace"))) is not None:
                        self.story.add(line)
        return self.story


def story_of(path: Path) -> Story:
    """Return what the plot of a training shows, from all lines that the metrics.jsonl at `path` has now."""
    return _file(path).read()


@cache
def _file(path: Path) -> StoryFile:
    return StoryFile(path)
