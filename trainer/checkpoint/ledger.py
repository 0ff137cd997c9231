"""Keeps the ledger, a file that records which steps of the curriculum are skipped, and why. The file is
OUT/ledger.jsonl (OUT is the output folder of the training). Lines are only appended, and each is fsynced.

Skipped steps are ranges [first, stop), numbered from 1 as printed. The steps after them are the same as without the
skip: step numbers, samples, tokens and the learning rate go on as in the curriculum. Which steps are performed is a
pure function of the curriculum and of two kinds of lines:

    {"v": 1, "event": "manual", "step": 1100, "steps": [[1200, 1400]], "why": "train.skip"}
        from step 1101 on, the setting `train.skip` names these steps (up to step 1100 its earlier value applies)
    {"v": 1, "event": "rewind", "step": 1630, "steps": [1520, 1720], "back": 1400, "checkpoint": "step_00001400",
     "why": "3 steps skipped within 50"}
        at step 1630 training went back to the checkpoint of step 1400 (0: to the start), to skip these steps

Lines of a third kind have no effect:

    {"v": 1, "event": "edit", "step": 800, "changes": ["phase long: new, …"]}
        training resumed at step 800 with a curriculum that differs from the checkpoint's in later steps

A checkpoint stores how many lines the ledger had when the checkpoint was written. If a later line records a rewind to a
step before the checkpoint's step, the checkpoint belongs to an abandoned history (it is not `sound`) and is deleted.
The line of a rewind is written before training goes back, so a kill between the two loses nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.base.files import sync
from trainer.base.config import CheckpointError, ConfigError

if TYPE_CHECKING:
    from trainer.parallel.world import World

VERSION = 1
NAME = "ledger.jsonl"

#: [first, stop) in step numbers, counted from 1
Range = tuple[int, int]


class Ledger:
    """The ledger of a run: the list of skipped steps with reasons, kept in a file of JSON lines. Every rank has all
    lines in memory; only rank 0 writes the file."""

    def __init__(self, out: Path, lines: Sequence[dict[str, Any]] = (), writes: bool = False) -> None:
        self.path, self.lines, self.writes = out / NAME, list(lines), writes
        self._find()

    @classmethod
    def read(cls, out: Path) -> Ledger:
        """Read the ledger of a run (the list of skipped steps) for inspection, not for training. `out` is the run's
        output folder. Without a ledger file, the ledger is empty. Raises CheckpointError when the file is damaged."""
        path = out / NAME
        return cls(out, parse(path.read_bytes(), path) if path.exists() else ())

    @classmethod
    def open(cls, out: Path, world: World) -> Ledger:
        """Open the ledger of a run (the list of skipped steps) for training. Every rank must call this; rank 0 reads
        the file, and every rank gets the same lines. If a kill cut off the last line, this line is removed from the
        file. Raises CheckpointError when another line is damaged."""
        path, data = out / NAME, b""
        if world.first and path.exists():
            data = path.read_bytes()
            if not data.endswith(b"\n"):
                data = data[:data.rfind(b"\n") + 1]
                os.truncate(path, len(data))
        size = int.from_bytes(world.broadcast(len(data).to_bytes(8, "little")), "little")
        data = world.broadcast(data if world.first else bytes(size)) if size else b""
        return cls(out, parse(data, path), world.first)

    # -- reading -----------------------------------------------------------------------------------------------------
    def why(self, step: int) -> str | None:
        """Return why step number `step` (from 1) is skipped; None when it is not skipped."""
        return next((why for first, stop, why in self.passed if first <= step < stop), None)

    @property
    def rewinds(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["event"] == "rewind"]

    def sound(self, meta: dict[str, Any]) -> bool:
        """Return whether a checkpoint belongs to the history that the training follows. It does not if training has
        since gone back to an earlier checkpoint; the checkpoint then belongs to an abandoned history. `meta` is the
        checkpoint's metadata. Raises CheckpointError when the ledger has fewer lines than it had when the checkpoint
        was written."""
        line_count = meta["ledger"]
        if line_count > len(self.lines):
            raise CheckpointError(f"{self.path}: has {len(self.lines)} lines, the checkpoint of step "
                                       f"{meta['step']} knows of {line_count}; restore the file")
        return all(line["event"] != "rewind" or meta["step"] <= line["back"] for line in self.lines[line_count:])

    def digest(self, lines: int) -> str:
        """Return the sha256 of the first `lines` lines of the ledger (the list of skipped steps). The times at which
        lines were written are left out of the hash."""
        entries = [{key: value for key, value in line.items() if key != "time"} for line in self.lines[:lines]]
        return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()

    def check(self, meta: dict[str, Any]) -> None:
        """Raise CheckpointError if the lines that the ledger (the list of skipped steps) had when a checkpoint was
        written have changed since. With changed lines the training would skip other steps. `meta` is the checkpoint's
        metadata."""
        if self.digest(meta["ledger"]) != meta["ledger_sha256"]:
            raise CheckpointError(f"{self.path}: its first {meta['ledger']} lines are not those that the "
                                       f"checkpoint of step {meta['step']} knows; restore the file")

    def clear(self, checkpoints: Path, world: World) -> list[str]:
        """Delete the checkpoints of an abandoned history, that is, those for which `sound` returns False. They are left
        over from before training went back to an earlier checkpoint. Damaged checkpoints stay, because their metadata
        may be unreadable. Every rank must call this. Returns the names of the deleted checkpoints on rank 0, else
        []."""
        from trainer.checkpoint import checkpoints as ckpt  # with torch, which readers of a ledger do not need

        deleted = []
        for checkpoint in ckpt.survey(checkpoints)[0] if world.first else ():
            if not self.sound(checkpoint.meta):
                ckpt.delete(checkpoint)
                deleted.append(checkpoint.folder.parent.name)
        world.broadcast(b"\0")  # no rank goes on to list checkpoints before they are deleted
        return deleted

    # -- adding lines ------------------------------------------------------------------------------------------------
    def declare(self, ranges: Sequence[Range], step: int) -> None:
        """Record the value `ranges` of the setting `train.skip`, the ranges of steps to skip. `step` is the last step
        of the training so far. Only ranges after it count; if they are as recorded before, no line is written. Raises
        ConfigError when `ranges` names a step up to `step` that was not skipped."""
        for first, stop in ranges:
            late = next((s for s in range(first, min(stop, step + 1)) if self.why(s) is None), None)
            if late is not None:
                raise ConfigError(f"train.skip: [{first}, {stop}]: step {late} has been performed, the checkpoint is "
                                  f"of step {step}: give steps from {step + 1} on, or start anew with another --out")
        ahead = {(first, stop) for first, stop in clipped(ranges, step + 1, None)}
        if ahead != set(clipped(self.manual, step + 1, None)):
            self._append({"event": "manual", "step": step, "steps": [list(r) for r in sorted(ahead)],
                          "why": "train.skip"})

    def rewind(self, step: int, steps: Range, back: int, checkpoint: str, why: str) -> None:
        """Record the decision that training goes back to an earlier checkpoint and then skips some steps. The decision
        is made at step `step`; training goes back to step `back`, and skips the range `steps`."""
        self._append({"event": "rewind", "step": step, "steps": list(steps), "back": back, "checkpoint": checkpoint,
                      "why": why})

    def edited(self, step: int, changes: Sequence[str]) -> None:
        """Record in the ledger (the list of skipped steps) that training resumed after step `step` with a changed
        curriculum; `changes` has a line of text per change. Nothing is written if there is no change, or if the ledger
        already has this line."""
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
        """Compute two attributes from the ledger's lines. `manual` lists the ranges of steps that the setting
        `train.skip` names; `passed` lists all ranges of skipped steps, each with the reason."""
        self.manual: list[Range] = []
        for line in self.lines:
            if line["event"] == "manual":
                after = line["step"] + 1
                self.manual = [*clipped(self.manual, 0, after), *clipped(line["steps"], after, None)]
        self.passed = [(*line["steps"], f"{line['why']}: went back from step {line['step']} to {line['back']}")
                       for line in self.rewinds] + [(*r, "train.skip") for r in self.manual]


def clipped(ranges: Sequence[Sequence[int]], least: int, before: int | None) -> Iterator[Range]:
    """Yield the parts of `ranges` (pairs of first and exclusive end) that lie in [least, before). Without `before`,
    there is no upper limit."""
    for first, stop in ranges:
        first, stop = max(first, least), stop if before is None else min(stop, before)
        if first < stop:
            yield first, stop


def parse(data: bytes, path: Path) -> list[dict[str, Any]]:
    """Parse the contents of a ledger file (the list of skipped steps). A last line that was cut off is ignored. Raises
    CheckpointError for a line that this trainer cannot have written."""
    lines = []
    for number, text in enumerate(data[:data.rfind(b"\n") + 1].splitlines(), 1):
        try:
            line = json.loads(text)
            valid = line["v"] == VERSION and line["event"] in ("manual", "rewind", "edit")
        except (ValueError, KeyError, TypeError):
            valid = False
        if not valid:
            raise CheckpointError(f"{path}: line {number} is not one this trainer writes; restore the file")
        lines.append(line)
    return lines
