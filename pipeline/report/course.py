"""Makes the report's sections about the course of a training. One shows the planned and the realised mixture over the
tokens, the other the losses by token stream that the trainer has written so far."""

from __future__ import annotations

import json
import math
import re
from contextlib import suppress
from typing import Any

from pipeline.store.fs import Store
from tokenizer.mixture.curriculum import Curriculum
from tokenizer.mixture.order import apportioned

#: approximate number of stretches into which the run is divided; the report gives the mixture of each
STRETCHES = 48
#: when a training has at least 2 · POINTS steps (or evaluations), the report has only every n-th of them
POINTS = 240
#: the beginning of a line of metrics.jsonl, which says whether the rest has to be read
_HEAD = re.compile(rb'\{"v": \d+, "event": "(\w+)", "step": (\d+)')


def mixture_course(curriculum: Curriculum | None) -> dict[str, Any] | None:
    """Return the mixture of the token streams over the course of the training: {at, phases, streams}. Returns None
    without a curriculum.

    The training is cut into stretches, each of which lies in one phase. `at` lists their boundaries in tokens,
    beginning with 0. `streams` has, for each stream, the tokens `planned` and `realised` in each stretch. `phases`
    lists {name, from, to} in tokens. A phase of two or more samples has at least two stretches.
    """
    if curriculum is None or not curriculum.tokens:
        return None
    ends, phases = [0], []
    streams: dict[str, dict[str, list[float]]] = {stream.name: {"planned": [], "realised": []}
                                                  for stream in curriculum.streams}
    for phase in curriculum.phases:
        begin = ends[-1]
        streams_of = apportioned(phase, [stream.name for stream in curriculum.streams])
        weights = streams_of.weights
        pieces = min(phase.samples, max(2, round(STRETCHES * phase.tokens / curriculum.tokens)))
        drawn_before, start = [0] * len(weights), 0
        for piece in range(pieces):
            stop = phase.samples * (piece + 1) // pieces
            drawn = streams_of.counts(stop)
            for number, stream in enumerate(curriculum.streams):
                streams[stream.name]["planned"].append((stop - start) * weights[number] / sum(weights) * phase.sequence)
                streams[stream.name]["realised"].append((drawn[number] - drawn_before[number]) * phase.sequence)
            ends.append(begin + stop * phase.sequence)
            drawn_before, start = drawn, stop
        phases.append({"name": phase.name, "from": begin, "to": ends[-1]})
    return {"at": ends, "phases": phases, "streams": streams}


def losses(store: Store, run: str) -> dict[str, Any] | None:
    """Read the losses of a training from train/metrics.jsonl: {steps, evals}, or None if there are none. Each entry has
    `tokens`, `loss`, the losses of its `streams` and, for a step, the learning rate `lr`. Lines are left out if the
    trainer later started again, resumed or rewound to a step before them. Of steps and of evaluations, fewer than 2 ·
    POINTS are returned, evenly spread."""
    path = f"runs/{run}/train/metrics.jsonl"
    if not store.exists(path):
        return None
    collected = LossCollector()
    with store.open(path) as file:
        for text in file:
            collected.add(text)
    points = collected.points()
    return points if points["steps"] or points["evals"] else None


class LossCollector:
    """Collects the losses of a training from the lines of its metrics.jsonl. Lines that a later start, resume or rewind
    made void are left out. Of steps and of evaluations, fewer than 2 · POINTS are kept, evenly spread."""

    def __init__(self) -> None:
        self._kept = {"step": _Thinned(), "eval": _Thinned()}

    def add(self, text: bytes) -> tuple[str, int] | None:
        """Add a line of metrics.jsonl. Returns its event, such as step, eval or rewind, and its step number. Returns
        None for a line without them, and for an incomplete line, which a killed trainer may leave."""
        head = _HEAD.match(text)
        if head is None or not text.endswith(b"\n"):
            return None
        event, step = head[1].decode(), int(head[2])
        if event in ("start", "resume", "rewind"):
            for points in self._kept.values():
                points.undo(-1 if event == "start" else step)
        elif event in self._kept and self._kept[event].wants():
            with suppress(json.JSONDecodeError):
                self._kept[event].add(step, json.loads(text))
        return event, step

    def lines(self) -> list[dict[str, Any]]:
        """Return the lines that were kept, as they were written: first those of steps, then those of evaluations."""
        return [line for points in self._kept.values() for line in points.lines()]

    def numbers(self) -> list[list[int]]:
        """Return two lists of step numbers: those of the kept lines of steps, and those of the kept lines of
        evaluations."""
        return [points.numbers() for points in self._kept.values()]

    def points(self) -> dict[str, list[dict[str, Any]]]:
        """Return {steps, evals}. Each entry has `tokens`, `loss`, the losses of its `streams` and, for a step, the
        learning rate `lr`."""
        steps, evals = ([_point(line) for line in self._kept[event].lines()] for event in ("step", "eval"))
        return {"steps": [p for p in steps if p], "evals": [p for p in evals if p]}


class _Thinned:
    """Keeps fewer than 2 · POINTS lines of one kind of event, evenly spread over a file. When it is full, it drops
    every second line. From then on it accepts only every n-th new line, and n doubles each time."""

    def __init__(self) -> None:
        self._entries: list[tuple[int, dict[str, Any]]] = []
        self._every, self._offered = 1, 0

    def wants(self) -> bool:
        self._offered += 1
        return (self._offered - 1) % self._every == 0

    def add(self, step: int, line: dict[str, Any]) -> None:
        self._entries.append((step, line))
        if len(self._entries) >= 2 * POINTS:
            self._entries = self._entries[::2]
            self._every *= 2

    def undo(self, step: int) -> None:
        """Drop the lines of all steps after `step`, because the training went back to this step."""
        self._entries = [entry for entry in self._entries if entry[0] <= step]

    def lines(self) -> list[dict[str, Any]]:
        return [line for _, line in self._entries]

    def numbers(self) -> list[int]:
        return [number for number, _ in self._entries]


def _point(line: dict[str, Any]) -> dict[str, Any] | None:
    """Return the figures of one line of metrics.jsonl as {tokens, loss, streams and, for a step, lr}. Returns None if
    the line has no loss or no number of tokens.

    `streams` maps token streams to their losses. In the line of a step, such a loss is a number; in the line of an
    evaluation, it is a mapping with the key `loss`.
    """
    loss, tokens = _number(line.get("loss")), _number(line.get("tokens"))
    if loss is None or tokens is None:
        return None
    streams = line.get("streams")
    by = {str(name): _number(value.get("loss") if isinstance(value, dict) else value)
          for name, value in (streams.items() if isinstance(streams, dict) else ())}
    rate = _number(line.get("lr"))
    return {"tokens": tokens, "loss": loss, "streams": {name: value for name, value in by.items() if value is not None},
            **({"lr": rate} if rate is not None else {})}


def _number(value: Any) -> float | None:
    return value if isinstance(value, (int, float)) and math.isfinite(value) else None
