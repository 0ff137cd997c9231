"""Reads and writes the files in a run's folder by which processes on any machine learn the run's state, read its log,
and ask it to stop. An attempt is one start of the run by a driver, the process that plans the run and commits its
tasks.

    runs/RUN/run.json        facts about the latest attempt: {"attempt", "how": job | local, "begun", "host", …}
            progress.json    the driver's latest report of its progress (`pipeline.engine.driver.progress`), with the
                             number of its attempt
            cancel.json      {"attempt"}: the attempt that is asked to stop
            log/0001-000001.txt …    output of the driver of a submitted attempt, in pieces of at most `PIECE` bytes
            recipe.yaml, recipe.text.yaml, code/    the recipe, and copies of the user's Python files (`code:` in the
                             recipe), so that the run can be resumed from any machine

A machine needs only access to the store to use these functions. The files do not decide which driver may commit; only
the commit log does. This module does not use the state that Ray reports of a job, since that state may be wrong after a
head node is lost.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from pipeline.base.clock import SYSTEM, Clock
from pipeline.base.redact import redact, redact_json
from pipeline.cluster.origin import origin
from pipeline.store.fs import Store
from pipeline.store.lease import alive

FRESH_S = 20.0           # a heartbeat at most this old comes from a living driver
AHEAD_S = 5.0            # the driver's clock may be this much ahead of the clock of this machine
WATCH_S = 12.0           # an older heartbeat is watched for two beats: its counter must advance, since clocks differ
PIECE = 64 << 10
#: most bytes in the name of a run, which is the name of a folder
LONGEST_NAME = 200
#: states that do not change by themselves
ENDED = ("done", "failed", "stopped", "died", "cancelled")
#: file in the folder of a run: the recipe as its author wrote it
RECIPE_TEXT = "recipe.text.yaml"
#: fields read from run.json and progress.json, with their types
_FACTS = {"attempt": int, **dict.fromkeys(("how", "address", "job", "error", "recipe", "base", "host", "begun",
                                          "version", "python", "author", "before"), str)}
_PROGRESS = {**dict.fromkeys(("attempt", "parts", "done"), int), "state": str, "error": str, "nodes": dict,
             "running": list, "failures": list}


@dataclass(frozen=True)
class Standing:
    """The state of a run, as the files in the store show it. `state` is one of

    * submitted: the run is a Ray job whose driver (the process that plans the run and commits its tasks) has not
      reported progress yet
    * started: the run is no Ray job, and its driver has not reported progress yet
    * running, stopping, done, failed, stopped
    * cancelled: asked to stop before the driver reported progress
    * died: the driver is gone without having reported an end
    * unknown: the run's files cannot be read

    `facts` is the content of run.json. `progress` is the content of progress.json, or {} when this attempt has not
    written it yet or it cannot be read. `error` says why the run failed; None when no error was recorded. `silent_s` is
    the number of seconds since the driver's last sign of life; None unless the run is running or stopping. `age_s` is
    the number of seconds since the driver wrote `progress`; None when that is not known."""

    run: str
    state: str
    attempt: int
    facts: dict[str, Any]
    progress: dict[str, Any]
    error: str | None = None
    silent_s: float | None = None
    age_s: float | None = None

    @property
    def ended(self) -> bool:
        return self.state in ENDED


def standing(store: Store, run: str, clock: Clock = SYSTEM) -> Standing:
    """Return the state of `run`, read from the store. This takes up to `WATCH_S` seconds when the run's driver (the
    process that schedules its tasks) is on another machine and the driver's heartbeat is old."""
    facts = facts_of(store, run)
    attempt = facts.get("attempt", 0)
    progress = _json(store, f"runs/{run}/progress.json", _PROGRESS)
    if progress == {} or (progress and not {"state", "parts", "done"} <= progress.keys()):
        return Standing(run, "unknown", attempt, facts, {})
    if not progress and not facts and store.exists(facts_name(run)):
        return Standing(run, "unknown", attempt, facts, {})
    if not progress or progress.get("attempt", attempt) < attempt:                # none, or of an earlier attempt
        state = "submitted" if facts.get("how") == "job" else "started"
        if facts and asked_to_stop(store, run, attempt):
            state = "cancelled"
        elif facts.get("error"):
            state = "failed"
        elif facts.get("how") == "local" and silence(store, run, clock) is None:
            state = "died"
        return Standing(run, state, attempt, facts, {}, facts.get("error"))
    state, silent_s = str(progress["state"]), None
    if state in ("running", "stopping"):
        silent_s = silence(store, run, clock)
        if silent_s is None:
            state = "died"
        elif asked_to_stop(store, run, attempt):
            state = "stopping"
    age_s = max(0.0, clock.wall() - progress["at"]) if isinstance(progress.get("at"), float) else None
    return Standing(run, state, progress.get("attempt", attempt), facts, progress, progress.get("error"), silent_s,
                    age_s)


def silence(store: Store, run: str, clock: Clock = SYSTEM) -> float | None:
    """Return the seconds since the driver of `run` (the process that schedules its tasks) wrote its last heartbeat.
    Returns None when the driver has ended, when the store's latest driver runs another run, or when the heartbeat
    cannot be read.

    If the driver runs on this machine, its process is looked up. A large result then means that the driver is suspended
    or hangs. A driver on another machine counts as alive if its heartbeat is recent. If it is not, this function
    watches it for up to `WATCH_S` seconds; the driver counts as alive if the heartbeat's counter advances."""
    name, beat = latest_heartbeat(store)
    holder = beat.get("holder")
    if not isinstance(holder, dict) or beat.get("closed") or holder.get("run") != run:
        return None
    beat_at = beat.get("at", 0)
    if not isinstance(beat_at, (int, float)):                          # a damaged heartbeat counts as none
        return None
    living, since = alive(holder), clock.wall() - beat_at
    if living is not None:
        return max(0.0, since) if living else None
    if -AHEAD_S <= since <= FRESH_S:
        return max(0.0, since)
    deadline = clock.now() + WATCH_S
    while clock.now() < deadline:
        clock.sleep(min(1.0, WATCH_S / 10))
        now = _json(store, name) or {}
        if now.get("counter") != beat.get("counter"):
            return None if now.get("closed") else 0.0
    return None


def driver_of(store: Store) -> dict[str, Any]:
    """Describe the latest driver of the store, the process that scheduled its latest run, as {host, pid, run, …}.
    Returns {} when the store has had no driver, or its heartbeat cannot be read."""
    holder = latest_heartbeat(store)[1].get("holder")
    return holder if isinstance(holder, dict) else {}


def latest_heartbeat(store: Store) -> tuple[str, dict[str, Any]]:
    """Return the path and the content of the heartbeat file of the store's latest driver (the process that schedules a
    run). Returns ("", {}) when the store has had no driver.

    The content has `counter`, `closed` (whether the driver has ended its work), `holder` (the driver's host, pid, run,
    …) and `at` (seconds since 1970). It is {} when the file cannot be read."""
    names = sorted(store.list("log/heartbeat"))
    return (names[-1], _json(store, names[-1]) or {}) if names else ("", {})


def progress_of(store: Store, run: str) -> dict[str, Any]:
    """Return the contents of progress.json, the latest report of the run's progress; {} when the file is missing or
    cannot be read."""
    return _json(store, f"runs/{run}/progress.json", _PROGRESS) or {}


def _json(store: Store, path: str, kinds: Mapping[str, type] | None = None) -> dict[str, Any] | None:
    """Read a JSON object from the store. Returns None when there is no such file. Returns {} when the file cannot be
    read, or when a field does not have the type that `kinds` names for it. A field may also be null, unless its type is
    int."""
    try:
        document = json.loads(store.read(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(document, dict) or not all(isinstance(document[k], kind) for k, kind in (kinds or {}).items()
                                                 if k in document and (document[k] is not None or kind is int)):
        return {}
    return document


def status_document(store: Store, current: Standing) -> dict[str, Any]:
    """Return the state of a run as a JSON document. `tokenmill status --json` prints it, and the service shows it."""
    progress = {k: v for k, v in current.progress.items() if k not in ("run", "attempt", "state", "error")}
    report = f"runs/{current.run}/report.html"
    return {"run": current.run, "state": current.state, "attempt": current.attempt, "error": current.error,
            "silent_s": current.silent_s, "age_s": current.age_s,
            "how": current.facts.get("how"), "address": current.facts.get("address"), "job": current.facts.get("job"),
            "begun": current.facts.get("begun"), "store": store.root, **progress,
            "report": f"{store.root}/{report}" if store.exists(report) else None}


# -- names -----------------------------------------------------------------------------------------------------------
def run_names(store: Store) -> list[str]:
    """Return the sorted names of the store's runs. A folder below runs/ counts as a run if it holds a file."""
    if store.local is not None:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(store.local / "runs") as entries:
            folders = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
            return sorted(name for name in folders if has_run(store, name))
        return []
    return sorted({p.split("/")[1] for p in store.list("runs") if p.count("/") >= 2})


def has_run(store: Store, run: str) -> bool:
    """Whether the store has a run named `run`, that is, a file in the run's folder. The caller must have checked the
    name with `bad_name`."""
    return next(store.list(f"runs/{run}"), None) is not None


def bad_name(name: str) -> str | None:
    """Return the reason why `name` cannot be the name of a run; None when it can. The name of a run is also the name of
    a folder and a word on a command line, and is shown on one line."""
    if "/" in name or name in ("", ".", ".."):
        return "the name of a run is the name of a folder; leave out '/'"
    if not name.isprintable() or name[0] in "-." or len(name.encode("utf-8", "replace")) > LONGEST_NAME:
        return (f"the name of a run is the name of a folder: at most {LONGEST_NAME} bytes on one line, not beginning "
                f"with '-' or '.'")
    return None


# -- attempts --------------------------------------------------------------------------------------------------------
def facts_name(run: str) -> str:
    return f"runs/{run}/run.json"


def facts_of(store: Store, run: str) -> dict[str, Any]:
    """Return the contents of run.json, the facts about the run's latest attempt; {} when the file is missing or cannot
    be read."""
    return _json(store, facts_name(run), _FACTS) or {}


def note_attempt(store: Store, run: str, attempt: int, how: str, **facts: Any) -> dict[str, Any]:
    """Write run.json for a new attempt (start) of a run, and return its content. `how` is "job" when the attempt runs
    as a Ray job, and "local" when it runs on this machine. `facts` are added to the content. Secrets are masked."""
    document = {"run": run, "attempt": attempt, "how": how, "host": socket.gethostname(), "begun": utc_now(),
                **origin(), **facts}
    document = redact_json(document)
    store.write(facts_name(run), json.dumps(document, indent=1, sort_keys=True).encode())
    return document


def note_refusal(store: Store, run: str, attempt: int, error: str) -> None:
    """Record in run.json why an attempt (start) of a run failed. `standing` shows this error if the attempt never
    reported progress. Does nothing when a later attempt has begun."""
    facts = facts_of(store, run)
    if facts.get("attempt") == attempt:
        facts = redact_json({**facts, "error": error})
        store.write(facts_name(run), json.dumps(facts, indent=1, sort_keys=True).encode())


def utc_now(clock: Clock = SYSTEM) -> str:
    """Return the current time (UTC) in a readable form, e.g. '2026-11-21T08:05:16Z'."""
    return datetime.fromtimestamp(clock.wall(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


# -- cancel ----------------------------------------------------------------------------------------------------------
def ask_to_stop(store: Store, run: str, attempt: int) -> None:
    """Ask this attempt (start) of a run to stop, by writing cancel.json. The driver, which schedules the attempt's
    tasks, looks for the file every few seconds."""
    store.write(f"runs/{run}/cancel.json", json.dumps({"attempt": attempt, "at": utc_now()}).encode())


def asked_to_stop(store: Store, run: str, attempt: int) -> bool:
    """Whether this attempt (start) of a run was asked to stop. A request for an earlier attempt does not count."""
    return (_json(store, f"runs/{run}/cancel.json") or {}).get("attempt") == attempt


# -- the driver's log ------------------------------------------------------------------------------------------------
def piece_name(run: str, attempt: int, piece: int) -> str:
    return f"runs/{run}/log/{attempt:04d}-{piece:06d}.txt"


class LogReader:
    """Reads the log of one attempt (start) of a run from its beginning. Each call of `more` continues where the
    previous call stopped. `check` is called with the path of every piece (file) of the log before the piece is read;
    its exceptions are passed on."""

    def __init__(self, store: Store, run: str, attempt: int, check: Callable[[str], None] = lambda piece: None) -> None:
        self.store, self.run, self.attempt, self._check = store, run, attempt, check
        self.piece, self.offset = 1, 0

    def more(self) -> Iterator[str]:
        """Yield the text that was added to the log since the last call."""
        while True:
            self._check(piece_name(self.run, self.attempt, self.piece))
            try:
                data = self.store.read(piece_name(self.run, self.attempt, self.piece))
            except FileNotFoundError:
                return
            if len(data) > self.offset:
                start, self.offset = self.offset, len(data)               # a caller may stop at the yield
                yield data[start:].decode("utf-8", "replace")             # pieces grow by whole characters
            if not self.store.exists(piece_name(self.run, self.attempt, self.piece + 1)):
                return
            if self.store.size(piece_name(self.run, self.attempt, self.piece)) == self.offset:   # the piece is complete
                self.piece, self.offset = self.piece + 1, 0


# -- the recipe, and the user's own code -----------------------------------------------------------------------------
def keep_recipe(store: Store, run: str, recipe: bytes, text: str | None) -> None:
    """Write two files to the folder of a run. The file recipe.yaml gets `recipe`, the complete recipe in canonical
    form. The file recipe.text.yaml gets `text`, the recipe as its author wrote it, with secrets masked. If `text` is
    None, it gets `recipe`, too.

    An existing recipe.text.yaml stays as it is if recipe.yaml already holds `recipe`. A run that is resumed from
    recipe.yaml thus keeps the author's text."""
    written = f"runs/{run}/{RECIPE_TEXT}"
    path = f"runs/{run}/recipe.yaml"
    if not (store.exists(written) and store.exists(path) and store.read(path) == recipe):
        store.write(written, recipe if text is None else redact(text).encode())
    store.write(path, recipe)


def keep_code(store: Store, run: str, files: Sequence[str]) -> None:
    """Copy the Python files that the recipe lists under `code:` into the folder of the run."""
    for path in files:
        with open(path, "rb") as f:
            store.write(f"{code_folder(run)}/{os.path.basename(path)}", f.read())


def code_folder(run: str) -> str:
    return f"runs/{run}/code"


def kept_code(store: Store, run: str, names: Sequence[str], scratch: str) -> list[str]:
    """Return the paths, on this machine, of the Python files that `keep_code` copied to the folder of the run, in the
    order of `names`. From object storage the files are downloaded to the folder `scratch`. A file that was never copied
    has a path in the result, too, but does not exist."""
    result = []
    for name in names:
        path = f"{code_folder(run)}/{os.path.basename(name)}"
        if store.local is not None:
            result.append(store.at(path))
            continue
        target = os.path.join(scratch, os.path.basename(name))       # keeps the module's name
        with contextlib.suppress(FileNotFoundError):
            data = store.read(path)
            with open(target, "wb") as f:
                f.write(data)
        result.append(target)
    return result
