"""Which steps of the curriculum are not performed, and why: OUT/ledger.jsonl, append-only, fsynced line by line.

The position in the data never moves. A skip is a range of steps [first, stop), numbered from 1 as they are printed,
that are skipped: step numbers, samples, tokens and the learning rate go on as the curriculum says. Two kinds of
lines, and what has been done is a pure function of the curriculum and of them:

    {"v": 1, "event": "manual", "step": 1100, "steps": [[1200, 1400]], "why": "train.skip"}
        from step 1100 on, `train.skip` says this (what it said before holds for the steps up to there)
    {"v": 1, "event": "rewind", "step": 1630, "steps": [1520, 1720], "back": 1400, "checkpoint": "step_00001400",
     "why": "3 steps skipped within 50"}
        at step 1630 it went back to the checkpoint of step 1400 (0: to the start), to skip these steps

    {"v": 1, "event": "edit", "step": 800, "changes": ["phase long: new, …"]}
        at step 800, where it resumed, the curriculum ahead was another than at the checkpoint

A checkpoint remembers how many lines there were. One of a later step than a rewind went back to, written before that
rewind, belongs to an abandoned history: it is not `sound`. So a kill between writing the line and rewinding loses
nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pipeline.base.files import sync
from trainer.base.config import ConfigError
from trainer.checkpoint import checkpoints as ckpt
from trainer.parallel.world import World

VERSION = 1
NAME = "ledger.jsonl"

#: [first, stop) of step numbers, from 1
Range = tuple[int, int]


class Ledger:
    """The lines of a run's ledger. Every rank holds them; only the first writes."""

    def __init__(self, out: Path, lines: Sequence[dict[str, Any]] = (), writes: bool = False) -> None:
        self.path, self.lines, self.writes = out / NAME, list(lines), writes
        self._find()

    @classmethod
    def read(cls, out: Path) -> Ledger:
        """The ledger of a run, for inspection. Raises CheckpointError when it is damaged."""
        path = out / NAME
        return cls(out, parse(path.read_bytes(), path) if path.exists() else ())

    @classmethod
    def open(cls, out: Path, world: World) -> Ledger:
        """The ledger of a run as the first rank reads it, on every rank. What a kill left of a line is cut off."""
        path, data = out / NAME, b""
        if world.first and path.exists():
            data = path.read_bytes()
            if not data.endswith(b"\n"):
                data = data[:data.rfind(b"\n") + 1]
                os.truncate(path, len(data))
        size = int.from_bytes(world.broadcast(len(data).to_bytes(8, "little")), "little")
        data = world.broadcast(data if world.first else bytes(size)) if size else b""
        return cls(out, parse(data, path), world.first)

    # -- what it says ------------------------------------------------------------------------------------------------
    def why(self, step: int) -> str | None:
        """Why step number `step` (from 1) is not performed; None when it is."""
        return next((why for first, stop, why in self.passed if first <= step < stop), None)

    @property
    def rewinds(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["event"] == "rewind"]

    def sound(self, meta: dict[str, Any]) -> bool:
        """Whether a checkpoint belongs to the history in force, not to one that a rewind abandoned. Raises
        CheckpointError when it counts more lines than the ledger has."""
        known = meta["ledger"]
        if known > len(self.lines):
            raise ckpt.CheckpointError(f"{self.path}: has {len(self.lines)} lines, the checkpoint of step "
                                       f"{meta['step']} knows of {known}; restore the file")
        return all(line["event"] != "rewind" or meta["step"] <= line["back"] for line in self.lines[known:])

    def digest(self, lines: int) -> str:
        """sha256 of the first `lines` lines, whenever they were written."""
        entries = [{key: value for key, value in line.items() if key != "time"} for line in self.lines[:lines]]
        return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()

    def check(self, meta: dict[str, Any]) -> None:
        """Raise CheckpointError when the lines that a checkpoint counts are not those it was written with: the training
        would skip other steps."""
        if self.digest(meta["ledger"]) != meta["ledger_sha256"]:
            raise ckpt.CheckpointError(f"{self.path}: its first {meta['ledger']} lines are not those that the "
                                       f"checkpoint of step {meta['step']} knows; restore the file")

    def clear(self, checkpoints: Path, world: World) -> list[str]:
        """Delete the checkpoints that are not sound; every rank calls it. Returns their names (on the first rank)."""
        gone = []
        for found in ckpt.survey(checkpoints)[0] if world.first else ():
            if not self.sound(found.meta):
                (found.folder.parent / "COMPLETE").unlink()          # readers must stop seeing it before its files go
                shutil.rmtree(found.folder.parent)
                gone.append(found.folder.parent.name)
        world.broadcast(b"\0")                                       # no rank lists checkpoints before this
        return gone

    # -- what is added to it -----------------------------------------------------------------------------------------
    def declare(self, given: Sequence[Range], done: int) -> None:
        """From step `done` on, `train.skip` is `given`. Raises ConfigError for steps that have been performed."""
        for first, stop in given:
            late = next((s for s in range(first, min(stop, done + 1)) if self.why(s) is None), None)
            if late is not None:
                raise ConfigError(f"train.skip: [{first}, {stop}]: step {late} has been performed, the checkpoint is "
                                  f"of step {done}: give steps from {done + 1} on, or start anew with another --out")
        ahead = {(first, stop) for first, stop in clipped(given, done + 1, None)}
        if ahead != set(clipped(self.manual, done + 1, None)):
            self._append({"event": "manual", "step": done, "steps": [list(r) for r in sorted(ahead)],
                          "why": "train.skip"})

    def rewind(self, step: int, steps: Range, back: int, checkpoint: str, why: str) -> None:
        """At `step` it is decided to go back to step `back` and to skip `steps`."""
        self._append({"event": "rewind", "step": step, "steps": list(steps), "back": back, "checkpoint": checkpoint,
                      "why": why})

    def edited(self, step: int, changes: Sequence[str]) -> None:
        """From `step` on the curriculum is another; once said, also when it resumes from there again."""
        line = {"event": "edit", "step": step, "changes": list(changes)}
        if changes and not any(line.items() <= old.items() for old in self.lines):
            self._append(line)

    def _append(self, line: dict[str, Any]) -> None:
        line = {"v": VERSION, **line}
        if self.writes:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "ab") as f:
                f.write(json.dumps({**line, "time": round(time.time(), 3)}, ensure_ascii=False).encode() + b"\n")
                f.flush()
                os.fsync(f.fileno())
            sync(self.path.parent)
        self.lines.append(line)
        self._find()

    def _find(self) -> None:
        """Derive from the lines: `manual` ranges, and `passed`, all ranges with their reasons."""
        self.manual: list[Range] = []
        for line in self.lines:
            if line["event"] == "manual":
                after = line["step"] + 1
                self.manual = [*clipped(self.manual, 0, after), *clipped(line["steps"], after, None)]
        self.passed = [(*line["steps"], f"{line['why']}: went back from step {line['step']} to {line['back']}")
                       for line in self.rewinds] + [(*r, "train.skip") for r in self.manual]


def clipped(ranges: Sequence[Sequence[int]], least: int, before: int | None) -> Iterator[Range]:
    """What of `ranges` lies in [least, before)."""
    for first, stop in ranges:
        first, stop = max(first, least), stop if before is None else min(stop, before)
        if first < stop:
            yield first, stop


def parse(data: bytes, path: Path) -> list[dict[str, Any]]:
    """The whole lines of a ledger."""
    lines = []
    for number, text in enumerate(data[:data.rfind(b"\n") + 1].splitlines(), 1):
        try:
            line = json.loads(text)
            known = line["v"] == VERSION and line["event"] in ("manual", "rewind", "edit")
        except (ValueError, KeyError, TypeError):
            known = False
        if not known:
            raise ckpt.CheckpointError(f"{path}: line {number} is not one this trainer writes; restore the file")
        lines.append(line)
    return lines
