"""Writes and reads the metrics of a training. All metrics are in the file metrics.jsonl. Some of the numbers are also
sent to views: TensorBoard, W&B and a Prometheus text file.

Every line of metrics.jsonl is a JSON object with `v` (the version of this format), `event`, `step` and `time`. An event
is start, resume, rewind, step, eval, tasks, checkpoint, alert, sample or end. New versions add keys and never rename
them. Lines are only appended. A training continues from a step k after a restart (resume), or by going back to a
checkpoint (rewind). Earlier lines about steps beyond k are then void, and `read` leaves them out.
"""

from __future__ import annotations

import json
import math
import netrc
import os
import re
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from trainer.base.config import ConfigError
from trainer.base.files import appending
from trainer.observe.prometheus import Textfile

VERSION = 1
#: events whose numbers go to TensorBoard and W&B → prefix of the names there
VIEWED = {"step": "train", "eval": "heldout", "tasks": "tasks"}


@dataclass(frozen=True)
class WandbConfig:
    """Settings of Weights & Biases (the package `wandb`). `project`, `entity` and `name` are those of the run at W&B;
    without `name`, it is called like the run folder. Without an API key (`wandb login`, WANDB_API_KEY), or with
    WANDB_MODE=offline, the metrics are recorded in the folder wandb of the training's output folder. `wandb sync` can
    send them later."""

    project: str
    entity: str | None = None
    name: str | None = None


@dataclass(frozen=True)
class MetricsConfig:
    """Settings of the views to which the numbers of metrics.jsonl are also written. `wandb` sends them to Weights &
    Biases (null: no). Two views need no setting: TensorBoard files are written if the package is installed, and the
    Prometheus file trainer.prom is always written."""

    wandb: WandbConfig | None = None


class View(Protocol):
    def void(self, step: int) -> None: ...         # drop the numbers of `step` and later steps
    def write(self, step: int, numbers: Mapping[str, float]) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


class Metrics:
    """Writes the metrics of a training to `folder`/metrics.jsonl, and sends the numbers to the views: TensorBoard, W&B
    and trainer.prom. `enabled` is True on rank 0; on other ranks nothing is written. `name` is the name of the run in
    the views, and `about` has the settings that W&B shows. Raises ConfigError when `folder` cannot be written."""

    def __init__(self, folder: Path, enabled: bool, config: MetricsConfig | None = None, name: str = "",
                 about: Mapping[str, Any] | None = None, say: Callable[[str], None] | None = None) -> None:
        self.enabled = enabled
        self.views: list[View] = []
        if not enabled:
            return
        say = say or (lambda text: print(text, file=sys.stderr))
        path = folder / "metrics.jsonl"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.file = appending(path)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written ({error.strerror}); name a folder you may write to with "
                              f"--out") from None
        self.textfile = Textfile(folder / "trainer.prom", name or folder.name)
        try:
            self.views.append(TensorBoard(folder))
        except ImportError:
            say("tensorboard is not installed: its curves are left out (metrics.jsonl has everything)")
        if config is not None and config.wandb is not None:
            try:
                self.views.append(Wandb(folder, config.wandb, name, about or {}, say))
            except ImportError:
                say("train.metrics.wandb: the package wandb is not installed: left out (pip install wandb)")

    def write(self, event: str, step: int, **values: Any) -> None:
        """Write one line of metrics.jsonl. If `event` is step or eval, the numbers in `values` are also sent to
        TensorBoard and W&B, under names such as 'train/loss' and 'heldout/loss'. Numbers in nested mappings are
        included. If `event` is tasks, the numbers in `values["scores"]` are sent ('tasks/hellaswag/bpb')."""
        if not self.enabled:
            return
        line = {"v": VERSION, "event": event, "step": step, "time": round(time.time(), 3), **values}
        self.file.write(json.dumps(line, ensure_ascii=False, default=float) + "\n")
        if event in TURNS:
            for view in self.views:
                view.void(0 if event == "start" else step + 1)
        if event in VIEWED:
            numbers = dict(flat_numbers(VIEWED[event], values["scores"] if event == "tasks" else values))
            for view in self.views:
                view.write(step, numbers)

    def export(self, **values: Any) -> None:
        """Set the values of some metrics in trainer.prom, a Prometheus text file; the other values in the file stay.
        `values` has the keys in `trainer.observe.prometheus.METRICS`."""
        if self.enabled:
            self.textfile.update({**values, "time": time.time()})
            self.textfile.write()

    def flush(self) -> None:
        if self.enabled:
            self.file.flush()
            for view in self.views:
                view.flush()

    def close(self) -> None:
        if self.enabled:
            self.file.close()
            for view in self.views:
                view.close()


class TensorBoard:
    """Writes TensorBoard files to `folder`/tensorboard. Raises ImportError where torch.utils.tensorboard cannot be
    imported."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.open: Callable[..., SummaryWriter] = partial(SummaryWriter, str(folder / "tensorboard"))
        self.writer: SummaryWriter | None = None

    def void(self, step: int) -> None:
        if self.writer is None:
            self.writer = self.open(purge_step=step)
            return
        # no new file is begun: TensorBoard reads files in the order of their names, which is arbitrary within a second
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        self.writer._get_file_writer().add_event(Event(step=step, session_log=SessionLog(status=SessionLog.START)))

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self.writer = self.writer or self.open()
        for name, number in numbers.items():
            self.writer.add_scalar(name, number, step)

    def flush(self) -> None:
        if self.writer is not None:
            self.writer.flush()

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()


@dataclass
class Wandb:
    """Sends metrics to Weights & Biases (W&B): one W&B run for each output folder, continued after restarts. The API
    key is never asked for and never shown. An error never ends the training: at the first one, sending is switched off.
    Raises ImportError where wandb cannot be imported."""

    folder: Path
    config: WandbConfig
    name: str
    about: Mapping[str, Any]
    say: Callable[[str], None]
    run: Any = field(default=None, init=False)

    def __post_init__(self) -> None:
        import wandb

        identity = self.folder / "wandb.id"
        if not identity.exists():
            identity.write_text(secrets.token_hex(8))
        mode = os.environ.get("WANDB_MODE") or ("online" if logged_in() else "offline")
        try:
            self.run = wandb.init(
                project=self.config.project, entity=self.config.entity, name=self.config.name or self.name or None,
                id=identity.read_text().strip(), resume="allow", dir=str(self.folder), config=dict(self.about),
                mode=mode, settings=wandb.Settings(console="off", silent=True, save_code=False))
            # a resume may go back to an earlier step, but W&B's own step counter cannot go back
            self.run.define_metric("step")
            self.run.define_metric("*", step_metric="step")
        except Exception as error:
            self.give_up(error)
        else:
            self.say(f"W&B: {self.config.project}, " + (mode if mode != "offline" else
                     f"offline (no API key); `wandb sync {self.folder / 'wandb'}/offline-run-*` sends it"))

    def give_up(self, error: Exception) -> None:
        self.run = None                                  # the error's text is not shown: it may contain the API key
        self.say(f"W&B failed ({type(error).__name__}): left out from here on; metrics.jsonl has everything")

    def void(self, step: int) -> None:
        """Called when the numbers from `step` on no longer count, because training goes back to a checkpoint. Does
        nothing, because W&B cannot delete numbers: its curves keep the old points beside the new ones."""

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        if self.run is not None:
            try:
                self.run.log({**numbers, "step": step})
            except Exception as error:
                self.give_up(error)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        if self.run is not None:
            try:
                self.run.finish()
            except Exception as error:
                self.give_up(error)


def logged_in() -> bool:
    """Return whether the package wandb would find an API key (`wandb login` writes it to .netrc). Without a key, wandb
    would prompt for it."""
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    try:
        return bool(os.environ.get("WANDB_API_KEY")) or \
            netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def flat_numbers(prefix: str, values: Mapping[str, Any]) -> list[tuple[str, float]]:
    result = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            result += flat_numbers(f"{prefix}/{key}", value)
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            result.append((f"{prefix}/{key}", float(value)))
    return result


#: (event, step, text of a line) → whether `scan` is to yield the line. Called before the line is parsed, because
#: parsing takes most of the time
Selects = Callable[[str, int, str], bool]
HEAD = re.compile(r'\{"v": \d+, "event": "(\w+)", "step": (\d+)')
#: events that make earlier lines void
TURNS = ("start", "resume", "rewind")


def scan(path: Path, selects: Selects | None = None) -> Iterator[dict[str, Any]]:
    """Yield the lines of a metrics.jsonl, parsed, one at a time, because the file of a million steps has gigabytes.
    Lines about steps that were undone later, by a restart or by going back to a checkpoint, are included. Lines that a
    kill cut off are left out. Without a file, nothing is yielded.

    `selects` is called for each line before it is parsed; only lines for which it returns True are yielded. Two kinds
    of lines are yielded in any case: the last line of the file, and lines that do not begin as this module writes them.
    """
    if not path.exists():
        return
    text, selected = "", True
    with open(path, encoding="utf-8", errors="replace") as f:       # a kill may cut a line inside a character
        for text in f:
            head = HEAD.match(text)
            selected = selects is None or head is None or selects(head[1], int(head[2]), text)
            if selected and (line := parse(text)) is not None:
                yield line
    if not selected and (line := parse(text)) is not None:
        yield line


def parse(text: str) -> dict[str, Any] | None:
    """Parse a line of metrics.jsonl. Returns None for text that is no such line, for instance because a kill has cut it
    off."""
    try:
        line = json.loads(text)
    except json.JSONDecodeError:
        return None
    return line if isinstance(line, dict) and "event" in line and "step" in line else None


def read(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics.jsonl that still count (see `standing`). Lines that a kill cut off are left out."""
    return standing(scan(path))


def standing(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return `lines` (of metrics.jsonl) without those about steps that were undone. A line `start` undoes all earlier
    lines. A line `resume` or `rewind` to step k undoes earlier lines about steps after k."""
    result: list[dict[str, Any]] = []
    for line in lines:
        if line["event"] == "start":
            result = []
        elif line["event"] in TURNS:
            result = [old for old in result if old["step"] <= line["step"]]
        result.append(line)
    return result
