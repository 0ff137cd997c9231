"""What happened, step by step: a JSONL file is the truth, TensorBoard a view of it.

Every line is a JSON object with `event` (start, resume, step, eval, checkpoint, sample, end) and `step`. The file is
only appended to: after a resume at step k, what was written for steps beyond k is void, and `read` leaves it out.
"""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

from trainer.config import ConfigError

VERSION = 1


class Metrics:
    """Appends to `folder`/metrics.jsonl and, where torch.utils.tensorboard can be imported, to `folder`/tensorboard.
    Only rank 0 writes (`enabled`)."""

    def __init__(self, folder: Path, enabled: bool) -> None:
        self.enabled, self.board = enabled, None
        if not enabled:
            return
        path = folder / "metrics.jsonl"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            torn = path.exists() and path.stat().st_size > 0 and path.read_bytes()[-1:] != b"\n"
            self.file = open(path, "a", encoding="utf-8")  # noqa: SIM115  closed by close()
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written ({error.strerror}); name a folder you may write to with "
                              f"--out") from None
        if torn:                                         # a kill in the middle of a line
            self.file.write("\n")
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            print("tensorboard is not installed: metrics go to metrics.jsonl only", file=sys.stderr)
        else:
            self.board = SummaryWriter(str(folder / "tensorboard"))

    def write(self, event: str, step: int, **values: Any) -> None:
        """One line. Numbers (also in nested mappings) of step and eval events go to TensorBoard under 'event/key'."""
        if not self.enabled:
            return
        line = {"v": VERSION, "event": event, "step": step, "time": round(time.time(), 3), **values}
        self.file.write(json.dumps(line, ensure_ascii=False, default=float) + "\n")
        if self.board is not None and event in ("step", "eval"):
            for name, number in numbers("train" if event == "step" else "heldout", values):
                self.board.add_scalar(name, number, step)

    def flush(self) -> None:
        if self.enabled:
            self.file.flush()
            if self.board is not None:
                self.board.flush()

    def close(self) -> None:
        if self.enabled:
            self.file.close()
            if self.board is not None:
                self.board.close()


def numbers(prefix: str, values: dict[str, Any]) -> list[tuple[str, float]]:
    found = []
    for key, value in values.items():
        if isinstance(value, dict):
            found += numbers(f"{prefix}/{key}", value)
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            found.append((f"{prefix}/{key}", float(value)))
    return found


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that count: no torn lines, and none that a later start or resume made void."""
    lines: list[dict[str, Any]] = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        if line["event"] == "start":
            lines = []
        elif line["event"] == "resume":
            lines = [old for old in lines if old["step"] <= line["step"]]
        lines.append(line)
    return lines
