"""Reads OUT/worst_rows.jsonl, in which a training records the samples with the highest loss (`trainer.loop.high_loss`).
The file has two kinds of lines:

    {"v": 1, "step": 371, "sample": 2965, "stream": "web", "loss": 9.41}
    {"v": 1, "event": "from", "step": 200}

The first kind is a sample; its `loss` is null if it was not finite. The second kind means that training continued after
step 200, from a checkpoint: lines above it about later steps no longer count.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VERSION = 1
NAME = "worst_rows.jsonl"


def read_high_loss(out: Path, step: int, passed: bool = False) -> list[dict[str, Any]]:
    """Return the lines about step number `step` in a run's worst_rows.jsonl. If training went back to a checkpoint
    before the step and did not perform it again, its lines no longer count, and the result is []. With `passed`, these
    old lines are returned."""
    lines: list[dict[str, Any]] = []
    void = False
    if not (out / NAME).exists():
        return lines
    with open(out / NAME, encoding="utf-8", errors="replace") as f:
        for text in f:
            if '"event"' not in text and f'"step": {step},' not in text:
                continue
            try:
                line = json.loads(text)
            except json.JSONDecodeError:                 # cut off by a kill
                continue
            if line.get("event") == "from":
                void = void or line["step"] < step
            elif line["step"] == step:
                lines, void = [line] if void else [*lines, line], False
    return [] if void and not passed else lines
