"""Kills a training at many lines of code, starts it again, and compares the result with a training that was not killed.
The training goes back to a checkpoint once. `python -m tests.trainer.killed_anywhere STORE/runs/RUN OUT POINTS SEED`
prints what differs.

A point is a line of the code that writes the ledger, checkpoints or worst_rows.jsonl, or that goes back to a
checkpoint, and the first, the middle or the last time that this line is reached. Each training is a forked process that
exits at its point at once, as a kill would end it.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.trainer import stability_ranks
from trainer.base import files
from trainer.checkpoint import checkpoints as checkpoint
from trainer.checkpoint import ledger
from trainer.loop import high_loss, stability
from trainer.loop import train as loop
from trainer.observe.metrics import read
from trainer.parallel.world import world

#: a place in the code: file, line
Line = tuple[str, int]
WRITERS = {module.__file__ for module in (checkpoint, files, ledger, high_loss)}
KILLED = 9
STOP = 17


def child(run: str, out: Path, kill: tuple[Line, int] | None = None, counts: Path | None = None) -> int:
    """Train in a forked process, which exits when it reaches the line `kill[0]` for the `kill[1]`-th time. Returns its
    exit code. The number of times that each line was reached is written to `counts`."""
    if pid := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    seen: dict[Line, int] = {}

    def trace(frame: FrameType, _event: str, _argument: Any) -> Any:
        name = frame.f_code.co_filename
        rewinding = (name, frame.f_code.co_name) == (stability.__file__, "rewind_to_checkpoint")
        return at_line if name in WRITERS or rewinding else None

    def at_line(frame: FrameType, event: str, _argument: Any) -> Any:
        if event == "line":
            line = frame.f_code.co_filename, frame.f_lineno
            seen[line] = seen.get(line, 0) + 1
            if kill == (line, seen[line]):
                os._exit(KILLED)
        return at_line

    try:
        with world("cpu") as here, stability_ranks.garbage(13, 14, 15, 16):
            sys.settrace(trace)
            loop.train(stability_ranks.opened(run, str(out), *stability_ranks.REWIND), here, STOP, lambda _text: None)
            sys.settrace(None)
        if counts:
            counts.write_text(json.dumps([[*line, n] for line, n in seen.items()]))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def outcome(out: Path) -> tuple[dict[int, float | None], list[dict[str, Any]]]:
    """Return (loss of every step, lines of the ledger without their times)."""
    losses = {line["step"]: line["loss"] for line in read(out / "metrics.jsonl") if line["event"] == "step"}
    lines = [json.loads(text) for text in (out / "ledger.jsonl").read_text().splitlines()]
    return losses, [{key: value for key, value in line.items() if key != "time"} for line in lines]


def main(run: str, out: str, points: int, seed: int) -> list[Any]:
    top, rng, wrong = Path(out), random.Random(seed), []
    top.mkdir(parents=True, exist_ok=True)
    assert child(run, top / "whole", counts=top / "counts.json") == 0
    losses, lines = outcome(top / "whole")
    assert lines[-1]["event"] == "rewind"
    expected = {step: pytest.approx(loss, abs=1e-5) for step, loss in losses.items()}, lines
    for name, line, times in rng.sample(json.loads((top / "counts.json").read_text()), points):
        point = (name, line), rng.choice([1, max(1, times // 2), times])
        shutil.rmtree(top / "killed", ignore_errors=True)
        codes = child(run, top / "killed", point), child(run, top / "killed")
        if codes != (KILLED, 0) or outcome(top / "killed") != expected:
            wrong.append([*point, codes])
    return wrong


def report(run: str, out: str, points: int, seed: int) -> None:
    wrong = main(run, out, points, seed)
    print(json.dumps(wrong))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    report(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
