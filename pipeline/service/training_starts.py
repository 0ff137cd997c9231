"""Starts trainings as processes, and keeps records in the store of which trainings were started.

    trainings/NAME/000001.json            a start: run, folder, options, who asked for it, which server starts it
                   000001.process.json    the process that the server then started, or why it could not
                   000001.stop.json       that somebody has asked the training to stop

The files are created by put-if-absent. If two servers start a training at the same time, one creates the file of the
next start, and the other is refused. A training runs as a process in a separate session, so it continues when the
server ends. On SIGTERM it writes a checkpoint and ends, like a training that was started by a command.

A server may die after it has written the first file and before the second. The start then counts as lost once the
server is known to be dead.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from pipeline.base.clock import SYSTEM, Clock
from pipeline.base.process import import_path
from pipeline.cluster.attempts import bad_name, utc_now
from pipeline.service.problems import HttpProblem
from pipeline.service.settings import OPERATOR_TOKEN, VIEWER_TOKEN
from pipeline.service.stores import read_file
from pipeline.service.training_files import (
    LOG,
    METRICS,
    MOST,
    QUIET_S,
    NoTraining,
    Training,
    find_trainings,
    no_links,
    standing,
    training_named,
)
from pipeline.store.fs import Store
from pipeline.store.lease import alive, identity
from trainer.base.files import training_process

#: most bytes of a record; after this many seconds without a process, a start by another machine counts as lost
RECORD, START_S = 64 << 10, 120.0
_RECORD = re.compile(r"trainings/([^/]+)/(\d{6})\.json")


@dataclass(frozen=True)
class Options:
    """The options of `tokenmill train run` with which a server can start a training."""

    overrides: tuple[str, ...] = ()
    ranks: int | None = None
    device: str = "auto"
    stop_at: int | None = None

    def arguments(self) -> list[str]:
        return [*(f"--set={assignment}" for assignment in self.overrides),
                *(("--ranks", str(self.ranks)) if self.ranks else ()), "--device", self.device,
                *(("--stop-at", str(self.stop_at)) if self.stop_at else ())]


@dataclass(frozen=True)
class Start:
    """The latest start of a training by a server: its number, its record, the record of its process, and whether
    somebody has asked the training to stop. The number is 0 if no server has ever started the training. The record of
    the process is None if there is no process yet."""

    number: int
    record: dict[str, Any]
    process: dict[str, Any] | None
    stopped: bool = False

    @property
    def options(self) -> Options:
        given = self.record.get("options") or {}
        return Options(**{**given, "overrides": tuple(given.get("overrides", ()))})


def latest_start(store: Store, name: str) -> Start:
    """Return the latest start of a training, whichever server of the store made it."""
    return _start(store, name, _numbers(store, f"trainings/{name}").get(name, 0))


def _numbers(store: Store, folder: str) -> dict[str, int]:
    """Find the records of starts in the folder `folder` of a store. Returns {name of a training: number of its latest
    start}."""
    starts = [(m[1], int(m[2])) for path in store.list(folder) if (m := _RECORD.fullmatch(path))]
    return dict(sorted(starts))


def _start(store: Store, name: str, number: int) -> Start:
    if not number:
        return Start(0, {}, None)
    return Start(number, _read(store, _path(name, number)) or {}, _read(store, _path(name, number, "process.json")),
                 store.exists(_path(name, number, "stop.json")))


def _path(name: str, number: int, ending: str = "json") -> str:
    return f"trainings/{name}/{number:06d}.{ending}"


def _read(store: Store, path: str) -> dict[str, Any] | None:
    try:
        document = json.loads(read_file(store, path, RECORD))
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def known_training(store: Store, folders: tuple[str, ...], name: str) -> tuple[Training, Start]:
    """Return the training with this name, and its latest start by a server. The training may also have been started by
    a command. The record of the start names the training's folder. This folder is used only if it is in the store's
    runs or in one of `folders`. Raises HttpProblem when there is no training of this name."""
    latest = latest_start(store, name) if bad_name(name) is None else Start(0, {}, None)
    try:
        return _recorded(store, folders, name, latest) or training_named(store, folders, name), latest
    except NoTraining as e:
        raise HttpProblem(e.status, e.title, e.detail, e.key, e.remedy) from None


def _recorded(store: Store, folders: tuple[str, ...], name: str, latest: Start) -> Training | None:
    """Return the training that the record of its latest start describes. Returns None when there is no record, or when
    its folder must not be used. The folder must be in `folders` or in the store's runs, and no file in it may be a
    link."""
    folder, run = Path(str(latest.record.get("folder"))), str(latest.record.get("run"))
    places = [Path(top) / name for top in folders]
    if store.local is not None:
        places.append(store.local / "runs" / run / "train")
    there = latest.number and bad_name(run) is None and folder in places and no_links(folder)
    return Training(name, run, folder) if there else None


def all_trainings(store: Store, folders: tuple[str, ...]) -> list[tuple[Training, Start]]:
    """Return all trainings of a store, each with its latest start by a server. These are the trainings that have a
    folder, and those that a server has started."""
    on_disk = {training.name: training for training in find_trainings(store, folders)}
    numbers = {name: n for name, n in _numbers(store, "trainings").items() if bad_name(name) is None}
    result = []
    for name in sorted(on_disk.keys() | numbers.keys())[:MOST]:
        latest = _start(store, name, numbers.get(name, 0))
        training = _recorded(store, folders, name, latest) or on_disk.get(name)
        if training is not None:                      # None: its record names a folder that must not be used
            result.append((training, latest))
    return result


def standing_now(training: Training, start: Start) -> dict[str, Any]:
    """Return the state of a training as JSON, from its files and from its latest start by a server. The field `state`
    is starting, running, done, stopped or failed. Failed means that the training has ended before its first step, and
    nobody asked it to stop."""
    document, state = standing(training), state_of(start, training.folder)
    if state in ("starting", "running"):
        document["state"] = state
    elif state == "ended" and document["state"] != "done":
        document["state"] = "stopped" if document["step"] is not None or start.stopped else "failed"
    return {**document, "run": training.run or None, "started": start.record.get("at"),
            "log": (training.folder / LOG).is_file()}


def state_of(start: Start, folder: Path, clock: Clock = SYSTEM) -> str:
    """Return the state of a training's process according to the training's latest start by a server: `running`,
    `starting` or `ended`. Returns "" when no server has started the training and no process on this machine runs it."""
    if training_process(folder) is not None:
        return "running"
    if not start.number:
        return ""
    if start.process is not None:
        if "error" in start.process:                  # the process could not be started
            return "ended"
        living = alive(start.process.get("holder") or {})
        if living is None:                            # on another machine: counts as running while its metrics grow
            path = folder / METRICS
            changed = path.stat().st_mtime if path.is_file() else _wall(start.record.get("at"))
            living = clock.wall() - changed < QUIET_S
        return ("running" if (folder / METRICS).is_file() else "starting") if living else "ended"
    living = alive(start.record.get("server") or {})
    recent = clock.wall() - _wall(start.record.get("at")) < START_S
    return "starting" if living or (living is None and recent) else "ended"


def _wall(at: Any) -> float:
    try:
        return datetime.fromisoformat(str(at)).timestamp()
    except ValueError:
        return 0.0


# -- starting and stopping -------------------------------------------------------------------------------------------
def start(store: Store, training: Training, options: Options, by: str,
          clock: Clock = SYSTEM) -> subprocess.Popen[bytes]:
    """Start a training from its latest checkpoint, or from its beginning if it has none. Raises HttpProblem when the
    training already runs, or when another server starts it. Also raises it when this machine has no torch, or when a
    file in the training's folder is a link."""
    if importlib.util.find_spec("torch") is None:
        raise HttpProblem(409,
                          "Cannot train here",
                          "the server has no torch",
                          remedy="pip install 'tokenmill[trainer]'")
    before = latest_start(store, training.name)
    if (state := state_of(before, training.folder, clock)) in ("running", "starting"):
        raise HttpProblem(409, "Is running", f"the training {training.name!r} is {state}", "training",
                          "wait for it, or stop it")
    if not no_links(training.folder):
        raise HttpProblem(409, "Not a training's folder", "it, or a file of a training in it, is a link", "training",
                          "remove the link, or choose another name")
    number = before.number + 1
    record = {"at": utc_now(clock), "by": by, "run": training.run, "folder": str(training.folder),
              "options": asdict(options), "server": identity("")}
    if not store.put_absent(_path(training.name, number), json.dumps(record).encode()):
        raise HttpProblem(409, "Is running", f"another server starts the training {training.name!r}", "training",
                          "see how it stands")
    try:
        training.folder.mkdir(parents=True, exist_ok=True)
        child = _launch(store, training, options)
    except Exception as e:                            # else the training would count as starting
        why = e.strerror if isinstance(e, OSError) else type(e).__name__
        _note(store, training.name, number, {"error": f"it could not be started: {why}"})
        raise
    _note(store, training.name, number, {"holder": identity("", child.pid)})
    return child


def _note(store: Store, name: str, number: int, process: dict[str, Any]) -> None:
    store.put_absent(_path(name, number, "process.json"), json.dumps(process).encode())


def _launch(store: Store, training: Training, options: Options) -> subprocess.Popen[bytes]:
    run = f"{store.root}/runs/{training.run}"
    inside = store.local is not None and training.folder == store.local / "runs" / training.run / "train"
    command = [sys.executable, "-P", "-m", "pipeline.cli", "train", "run", run,
               *(() if inside else ("--out", str(training.folder))), *options.arguments()]
    environment = {k: v for k, v in os.environ.items() if k not in (OPERATOR_TOKEN, VIEWER_TOKEN)}
    # the processes that the training starts must not import packages from its folder, either
    environment |= {"PYTHONPATH": import_path(), "PYTHONSAFEPATH": "1"}
    with open(training.folder / LOG, "ab") as log:
        return subprocess.Popen(command, env=environment, cwd=training.folder, stdin=subprocess.DEVNULL, stdout=log,
                                stderr=log, start_new_session=True)


def stop(store: Store, training: Training, by: str, clock: Clock = SYSTEM) -> None:
    """Ask a training to stop. The training finishes its current step and writes a checkpoint; if it is still being set
    up, it ends at once. Raises HttpProblem when the training does not run on this machine."""
    latest = latest_start(store, training.name)
    holder = (latest.process or {}).get("holder") or {}
    pid = holder.get("pid") if alive(holder) else training_process(training.folder)
    if not isinstance(pid, int):
        state = state_of(latest, training.folder)
        if state in ("running", "starting"):
            raise HttpProblem(409, "Runs elsewhere", f"the training {training.name!r} is not a process of this machine",
                              "training", "ask the server on its machine, or send its process SIGTERM")
        raise HttpProblem(409, "Does not run", f"the training {training.name!r} does not run", "training",
                          "there is nothing to stop")
    if latest.number:
        stopped = json.dumps({"at": utc_now(clock), "by": by}).encode()
        store.put_absent(_path(training.name, latest.number, "stop.json"), stopped)
    try:
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        raise HttpProblem(409, "Does not run", "it has just ended", "training", "there is nothing to stop") from None
    except PermissionError:
        raise HttpProblem(409, "Not ours", "another user's process trains there", "training",
                          f"have that user send SIGTERM to the process {pid}") from None
