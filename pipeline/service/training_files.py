"""Reads the folders that `tokenmill train` writes: which trainings exist, their states, losses and spikes. Needs no
torch.

A metrics.jsonl may have gigabytes. Its lines are read once; later calls read only the lines that were added. What is
kept of them in memory is bounded. If the first reading takes longer than a query may, the request is refused, and the
next request continues the reading.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
import threading
from collections import OrderedDict, deque
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.base.clock import SYSTEM
from pipeline.cluster.attempts import bad_name
from pipeline.report.course import LossCollector
from pipeline.report.training import latest_scores
from pipeline.service.duck import Busy, QueryError, Stop, TooDear
from pipeline.store.fs import Store
from trainer.base.files import PID, training_process

METRICS, SUMMARY, TASKS = "metrics.jsonl", "summary.json", "tasks.jsonl"
#: the file in the folder of a training that takes what it prints when a server has started it
LOG = "train.log"
#: the files in the folder of a training that the service reads or writes
FILES = (METRICS, SUMMARY, TASKS, LOG, PID, "ledger.jsonl", "worst_rows.jsonl")
#: the last step of a metrics.jsonl is searched in this many bytes at its end, and the latest scores on tasks in so many
#: bytes at the end of a tasks.jsonl, whose rows are in the order of their steps
TAIL, TASKS_TAIL = 256 << 10, 1 << 20
#: most files whose losses stay in memory, and most trainings of a list
REMEMBERED, MOST = 64, 1000
#: a spike is a step that was skipped, or whose loss is at least SIGMA standard deviations above the mean of the last
#: WINDOW steps before it in its phase that were no spikes; of these there must be LEAST. The latest SPIKES are kept
SIGMA, WINDOW, LEAST, SPIKES = 6.0, 128, 16, 100
#: the time limit is checked after this many lines; most bytes of a line
LINES, LONGEST = 2000, 1 << 20
#: a training without a process on this machine counts as running until it has written no line for this many seconds
QUIET_S = 600.0
_LOSS = re.compile(rb'"loss": (null|NaN|-?[\d.]+(?:e[-+]?\d+)?)')
_PHASE = re.compile(rb'"phase": "((?:[^"\\]|\\.)*)"')


class NoTraining(QueryError):
    """Raised when the store has no such training."""

    status = 404
    title = "No such training"


class Unreadable(QueryError):
    """Raised when the files of a training are damaged, or do not contain what was asked for."""

    status = 409
    title = "It cannot be told"


class StillReading(Busy):
    """Raised when the time of one query did not suffice to read all metrics of a long training."""

    title = "The metrics are still being read"


class Training(NamedTuple):
    """A training: its name in the store, the run whose shards it reads ("" if it is not known), and its folder."""

    name: str
    run: str
    folder: Path


def find_trainings(store: Store, folders: tuple[str, ...]) -> list[Training]:
    """Find the trainings in the runs of a store (RUN/train) and in `folders` (each subfolder with a metrics.jsonl).
    Links are not followed, and a training whose folder holds a link in place of a file is left out. If several
    trainings have one name, only the first counts: trainings in runs come before those in `folders`. At most MOST
    trainings are returned, the first by name."""
    by_name: dict[str, Training] = {}
    places = [(store.local / "runs", "train")] if store.local is not None else []
    for top, below in (*places, *((Path(folder), "") for folder in folders)):
        for name in _folders(top):
            folder = top / name / below
            if bad_name(name) is None and (folder / METRICS).is_file() and no_links(folder):
                by_name.setdefault(name, Training(name, name if below else "", folder))
    return [by_name[name] for name in sorted(by_name)][:MOST]


def no_links(folder: Path) -> bool:
    """Return True if neither `folder` nor any file in it that the service reads or writes is a link, pipe or device. By
    a link, whoever may write to the folder could make this server read other files."""
    if folder.is_symlink():
        return False
    for name in FILES:
        try:
            if not stat.S_ISREG((folder / name).lstat().st_mode):
                return False
        except FileNotFoundError:
            continue
        except OSError:
            return False
    return True


def _folders(top: Path) -> list[str]:
    try:
        with os.scandir(top) as entries:
            return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def training_named(store: Store, folders: tuple[str, ...], name: str) -> Training:
    """Return the training of this name. Raises NoTraining when there is none."""
    training = next((t for t in find_trainings(store, folders) if t.name == name), None)
    if training is None:
        raise NoTraining("the store has no training of this name", "training", "see the list of trainings")
    return training


def standing(training: Training) -> dict[str, Any]:
    """Return the state of a training, read from its files: {training, run, state, here, step, steps, tokens, loss,
    phase, begun, changed}. `state` is running, done or stopped, and `here` says whether a process on this machine runs
    the training. A training on another machine counts as running until its metrics have not grown for QUIET_S seconds.
    """
    path = training.folder / METRICS
    last, begun = _last_step(path), _first(path)
    changed = _changed(path)
    pid = training_process(training.folder)
    done = (training.folder / SUMMARY).is_file()
    elsewhere = (training.folder / "trainer.pid").is_file() and SYSTEM.wall() - changed < QUIET_S
    state = "running" if pid is not None else "done" if done else "running" if elsewhere else "stopped"
    phases = begun.get("phases")
    steps = [p.get("steps") for p in (phases if isinstance(phases, list) else ()) if isinstance(p, dict)]
    return {"training": training.name, "run": training.run or None, "state": state, "here": pid is not None,
            "step": last.get("step"), "steps": sum(n for n in steps if isinstance(n, int)) or None,
            "tokens": last.get("tokens"), "loss": last.get("loss"), "phase": last.get("phase"),
            "begun": begun.get("time"), "changed": changed or None}


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _first(path: Path) -> dict[str, Any]:
    try:
        with open(path, "rb") as f:
            return _parsed(f.readline(TAIL))
    except OSError:
        return {}


def _last_step(path: Path) -> dict[str, Any]:
    """Return the content of the last line of a metrics.jsonl that describes a step, or {} when there is none. Only the
    end of the file is read."""
    try:
        with open(path, "rb") as f:
            f.seek(max(0, f.seek(0, os.SEEK_END) - TAIL))
            lines = f.read().splitlines()
    except OSError:
        return {}
    return next((line for text in reversed(lines) if b'"event": "step"' in text[:40] and (line := _parsed(text))), {})


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return line if isinstance(line, dict) else {}


def summary_of(training: Training) -> dict[str, Any] | None:
    """Return the summary that a training has written at its end, or None when there is none or it is damaged."""
    try:
        with open(training.folder / SUMMARY, "rb") as f:
            return _parsed(f.read(1 << 20)) or None
    except OSError:
        return None


def task_scores(training: Training) -> list[dict[str, Any]]:
    """Return the scores of a training's last scored checkpoint, one for each benchmark task; [] if no checkpoint has
    been scored."""
    try:
        with open(training.folder / TASKS, "rb") as f:
            f.seek(max(0, f.seek(0, os.SEEK_END) - TASKS_TAIL))
            return latest_scores(f.read(TASKS_TAIL))
    except OSError:
        return []


# -- losses ----------------------------------------------------------------------------------------------------------
class LossWindow:
    """The losses of the last WINDOW steps of a training, with their mean and standard deviation. Both are computed from
    running sums, because a training of a million steps needs them a million times."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque()
        self._origin = self._sum = self._squares = 0.0        # of (loss - `_origin`), for precision
        self._added = 0

    def add(self, loss: float) -> None:
        self._losses.append(loss)
        removed = self._losses.popleft() if len(self._losses) > WINDOW else None
        if self._added % WINDOW == 0:                         # anew, so that rounding errors do not add up
            self._origin = loss
            self._sum = sum(x - loss for x in self._losses)
            self._squares = sum((x - loss) ** 2 for x in self._losses)
        else:
            for value, sign in ((loss, 1), (removed, -1)):
                if value is not None:
                    self._sum += sign * (value - self._origin)
                    self._squares += sign * (value - self._origin) ** 2
        self._added += 1

    def mean_and_sigma(self) -> tuple[float | None, float | None]:
        """Return the mean and the standard deviation of the losses, or (None, None) if there are fewer than LEAST."""
        n = len(self._losses)
        if n < LEAST:
            return None, None
        return self._origin + self._sum / n, math.sqrt(max(0.0, self._squares - self._sum ** 2 / n) / (n - 1))


class MetricsFile:
    """Reads the metrics.jsonl of one training, and keeps its losses, phases, spikes and rewinds (returns to a
    checkpoint) in memory."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock, self._readings = path, threading.Lock(), 0
        self._begin(None)

    def _begin(self, inode: int | None) -> None:
        self._inode, self._offset = inode, 0
        self._readings += 1
        self.losses, self.starts = LossCollector(), list[dict[str, Any]]()
        self._turns = 0                                       # starts, resumes and rewinds so far
        self.spikes: deque[dict[str, Any]] = deque(maxlen=SPIKES)
        self.rewinds: deque[dict[str, Any]] = deque(maxlen=SPIKES)
        self._phase, self._before = b"", LossWindow()

    def read(self, stop: Stop) -> MetricsFile:
        """Read the lines of the file that were added since the last call. Raises StillReading when the time is up; the
        next call continues from there. Raises Unreadable for a line of LONGEST bytes or more, and FileNotFoundError
        when the file is gone."""
        with self._lock:
            info = self._path.stat()
            if info.st_ino != self._inode or info.st_size < self._offset:
                self._begin(info.st_ino)
            with open(self._path, "rb") as f:
                f.seek(self._offset)
                for number in count():
                    if number % LINES == LINES - 1:
                        self._check(stop, info.st_size)
                    text = f.readline(LONGEST)
                    if len(text) == LONGEST:
                        raise Unreadable("its metrics hold a line of more than 1 MB, so they are damaged", "training",
                                         "remove that line")
                    if not text.endswith(b"\n"):
                        break
                    self._add(text)
                    self._offset += len(text)
            return self

    def _check(self, stop: Stop, size: int) -> None:
        try:
            stop.check()
        except TooDear:
            raise StillReading(f"{self._offset:,} of {size:,} bytes were read so far", "training",
                               "ask again: what was read is remembered") from None

    def _add(self, text: bytes) -> None:
        head = self.losses.add(text)
        if head is None:
            return
        event, step = head
        self._turns += event in ("start", "resume", "rewind")
        if event in ("start", "resume"):
            self.starts = [*(self.starts if event == "resume" else []), _parsed(text)][-1:]
            kept = [s for s in self.spikes if s["step"] <= (step if event == "resume" else -1)]
            self.spikes = deque(kept, SPIKES)
            self._phase, self._before = b"", LossWindow()
        elif event == "rewind":
            line = _parsed(text)
            self.rewinds.append({"to": step, "steps": line.get("steps"), "why": line.get("why")})
        elif event == "step":
            self._judge(step, text)

    def _judge(self, step: int, text: bytes) -> None:
        """Record a training step as a spike if it was skipped, or if its loss is far above the losses of earlier steps.
        `text` is the step's line of the metrics."""
        match = _LOSS.search(text)
        loss = float(match[1]) if match and match[1] not in (b"null", b"NaN") else None
        phase = _PHASE.search(text)
        if phase is not None and phase[1] != self._phase:     # a new phase has another mixture, and so another loss
            self._phase, self._before = phase[1], LossWindow()
        mean, sigma = self._before.mean_and_sigma() if loss is not None else (None, None)
        distance = (loss - mean) / sigma if loss is not None and mean is not None and sigma else None
        skipped = b'"skipped": true' in text
        if skipped or (distance is not None and distance >= SIGMA):
            line = _parsed(text)
            self.spikes.append({"step": step, "tokens": line.get("tokens"), "loss": loss, "mean": mean,
                                "distance": distance, "skipped": skipped, "why": line.get("why")})
        elif loss is not None:
            self._before.add(loss)

    @property
    def plot(self) -> str:
        """An id that changes when the plot of the losses would look different. In a long file only some steps are
        plotted, so most new lines do not change the plot or the id.

        The id is a hash of the numbers of the plotted steps. A step may be written again with another loss when the
        training starts again, resumes or rewinds, or when the file is replaced. So the hash also covers how often this
        has happened.
        """
        shown = json.dumps([self._inode, self._readings, self._turns, self.starts, self.losses.numbers()])
        return hashlib.blake2b(shown.encode(), digest_size=8).hexdigest()

    @property
    def phases(self) -> list[dict[str, Any]]:
        """The phases of the training, each with the numbers of tokens at which the phase begins and ends. The names are
        those of the training's last start."""
        given = self.starts[-1].get("phases") if self.starts else None
        result, at = [], 0
        for phase in given if isinstance(given, list) else ():
            if isinstance(phase, dict) and isinstance(phase.get("tokens"), int):
                result.append({"name": str(phase.get("name")), "from": at, "to": at + phase["tokens"],
                               "steps": phase.get("steps"), "lr": phase.get("lr"), "weights": phase.get("weights")})
                at += phase["tokens"]
        return result


class MetricsFiles:
    """Keeps in memory the metrics (losses, spikes …) of the trainings that clients have asked for most recently, each
    in a MetricsFile object."""

    def __init__(self) -> None:
        self._files: OrderedDict[Path, MetricsFile] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, training: Training, stop: Stop) -> MetricsFile:
        """Return the metrics of a training, up to date: the lines that were added to the file are read first. Raises
        NoTraining when its metrics.jsonl does not exist."""
        path = training.folder / METRICS
        with self._lock:
            file = self._files.setdefault(path, MetricsFile(path))
            self._files.move_to_end(path)
            while len(self._files) > REMEMBERED:
                self._files.popitem(last=False)
        try:
            return file.read(stop)
        except FileNotFoundError:
            raise NoTraining("the training has gone", "training", "see the list of trainings") from None
