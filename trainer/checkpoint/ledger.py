"""Records which steps of the curriculum are skipped, and why: OUT/ledger.jsonl, append-only, fsynced line by line.

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

A checkpoint stores how many lines the ledger had when the checkpoint was written. If a later line is a rewind to a step
before the checkpoint's step, the checkpoint belongs to an abandoned history (it is not `sound`) and is deleted. The
line is written before the rewind is performed, so a kill in between loses nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
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
    """The ledger of a run: which steps are skipped, and why. Every rank holds its lines; only rank 0 writes them to the
    file."""

    def __init__(self, out: Path, lines: Sequence[dict[str, Any]] = (), writes: bool = False) -> None:
        self.path, self.lines, self.writes = out / NAME, list(lines), writes
        self._find()

    @classmethod
    def read(cls, out: Path) -> Ledger:
        """Read the ledger of a run, only to inspect it. Raises CheckpointError when the file is damaged."""
        path = out / NAME
        return cls(out, parse(path.read_bytes(), path) if path.exists() else ())

    @classmethod
    def open(cls, out: Path, world: World) -> Ledger:
        """Open the ledger of a run for training. Every rank must call this; rank 0 reads the file, and every rank gets
        the same lines. A last line that a kill cut off is removed."""
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
        """Return why step number `step` (from 1) is skipped; None when it is performed."""
        return next((why for first, stop, why in self.passed if first <= step < stop), None)

    @property
    def rewinds(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["event"] == "rewind"]

    def sound(self, meta: dict[str, Any]) -> bool:
        """Whether a checkpoint belongs to the current history, not to one that was abandoned by going back to an
        earlier checkpoint. `meta` is the checkpoint's metadata. Raises CheckpointError when the ledger has fewer lines
        than it had when the checkpoint was written."""
        line_count = meta["ledger"]
        if line_count > len(self.lines):
            raise CheckpointError(f"{self.path}: has {len(self.lines)} lines, the checkpoint of step "
                                       f"{meta['step']} knows of {line_count}; restore the file")
        return all(line["event"] != "rewind" or meta["step"] <= line["back"] for line in self.lines[line_count:])

    def digest(self, lines: int) -> str:
        """Return the sha256 of the first `lines` lines, without the times at which they were written."""
        entries = [{key: value for key, value in line.items() if key != "time"} for line in self.lines[:lines]]
        return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()

    def check(self, meta: dict[str, Any]) -> None:
        """Raise CheckpointError when the lines that the ledger had when a checkpoint was written have changed since:
        the training would then skip other steps. `meta` is the checkpoint's metadata."""
        if self.digest(meta["ledger"]) != meta["ledger_sha256"]:
            raise CheckpointError(f"{self.path}: its first {meta['ledger']} lines are not those that the "
                                       f"checkpoint of step {meta['step']} knows; restore the file")

    def clear(self, checkpoints: Path, world: World) -> list[str]:
        """Delete the checkpoints that belong to an abandoned history (see `sound`). Every rank must call this. Returns
        their names on rank 0, else []."""
        from trainer.checkpoint import checkpoints as ckpt  # with torch, which readers of a ledger do not need

        deleted = []
        for checkpoint in ckpt.survey(checkpoints)[0] if world.first else ():
            if not self.sound(checkpoint.meta):
                (checkpoint.folder.parent / "COMPLETE").unlink()  # before its files: no reader may see a part of them
                shutil.rmtree(checkpoint.folder.parent)
                deleted.append(checkpoint.folder.parent.name)
        world.broadcast(b"\0")  # no rank goes on to list checkpoints before they are deleted
        return deleted

    # -- adding lines ------------------------------------------------------------------------------------------------
    def declare(self, ranges: Sequence[Range], step: int) -> None:
        """Record the current value `ranges` of the setting `train.skip`, if it has changed for the steps after `step`,
        the last step of the training so far. Raises ConfigError when `ranges` names steps that have already been
        performed."""
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
        """Record the decision, made at `step`, to go back to step `back` and to skip `steps`."""
        self._append({"event": "rewind", "step": step, "steps": list(steps), "back": back, "checkpoint": checkpoint,
                      "why": why})

    def edited(self, step: int, changes: Sequence[str]) -> None:
        """Record that training resumed after step `step` with a changed curriculum; `changes` has a line per change. If
        the same is already recorded, nothing is written."""
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
        """Compute two attributes from the lines: `manual`, the ranges that train.skip names, and `passed`, all skipped
        ranges with their reasons."""
        self.manual: list[Range] = []
        for line in self.lines:
            if line["event"] == "manual":
                after = line["step"] + 1
                self.manual = [*clipped(self.manual, 0, after), *clipped(line["steps"], after, None)]
        self.passed = [(*line["steps"], f"{line['why']}: went back from step {line['step']} to {line['back']}")
                       for line in self.rewinds] + [(*r, "train.skip") for r in self.manual]


def clipped(ranges: Sequence[Sequence[int]], least: int, before: int | None) -> Iterator[Range]:
    """Yield the parts of `ranges` that lie in [least, before)."""
    for first, stop in ranges:
        first, stop = max(first, least), stop if before is None else min(stop, before)
        if first < stop:
            yield first, stop


def parse(data: bytes, path: Path) -> list[dict[str, Any]]:
    """Parse the contents of a ledger file. A last line that was cut off is ignored. Raises CheckpointError for a line
    that is not of a kind that this trainer writes."""
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
