"""Runs `tokenmill run` in a process of its own, and follows its progress by the events that it prints."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.chaos.cluster import ROOT
from tests.processes import kill_tree


class Driver:
    """A running `tokenmill run`. `module` are the words after `python -m`; another module than the command itself, such
    as ("tests.e2e.kill", POINT, N), may wrap the command."""

    def __init__(self, env: dict[str, str], recipe: Path, store: str, *more: str, address: str | None = None,
                 module: tuple[str, ...] = ("pipeline.cli",)) -> None:
        where = ["--address", address, "--workers", "8"] if address else ["--backend", "process", "--workers", "2"]
        self._process = subprocess.Popen(
            [sys.executable, "-m", *module, "run", str(recipe), "--store", store, *where, "--allow-custom-stages",
             "--json", *more], cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True)
        self.pid, self._env = self._process.pid, env
        self.events: list[dict[str, Any]] = []
        self._done: Counter[str] = Counter()
        self._news = threading.Condition()
        self._errors: list[str] = []
        self._readers = [threading.Thread(target=self._listen, daemon=True),
                         threading.Thread(target=self._hear, daemon=True)]
        for thread in self._readers:
            thread.start()

    def _listen(self) -> None:
        for line in self._process.stdout:
            with contextlib.suppress(ValueError), self._news:
                event = json.loads(line)
                self.events.append(event)
                if event["event"] == "done" and "key" in event:
                    self._done[event["node"]] += 1
                self._news.notify_all()

    def _hear(self) -> None:
        self._errors += self._process.stderr

    def done(self, phase: str = "") -> int:
        """Return how many tasks are done in nodes of the plan whose name begins with `phase`."""
        return sum(n for node, n in self._done.items() if node.startswith(phase))

    def until(self, phase: str, count: int, seconds: float = 300.0) -> None:
        """Wait until `count` tasks are done in nodes of the plan whose name begins with `phase`. Fails if the run ends
        first, or after `seconds`."""
        deadline = time.monotonic() + seconds
        with self._news:
            while self.done(phase) < count:
                self._news.wait(0.5)
                assert self._process.poll() is None, f"the run ended before task {count} of {phase}:\n{self.stderr}"
                assert time.monotonic() < deadline, f"task {count} of {phase} was not done within {seconds:.0f} s:\n" \
                                                    f"{self.where}\n{self.stderr}"

    @contextlib.contextmanager
    def held_at(self, phase: str, count: int, inside: bool = False) -> Iterator[Path]:
        """Within this context, the run stands still with `count` tasks done in nodes of the plan whose name begins with
        `phase`: no child ends its task. So a fault that the test causes here hits a run in progress, however slow the
        test is. With `inside`, each child stands still within its next document, where its death could be blamed on the
        document, and creates the file `inside.PID` in the folder that is yielded."""
        folder = Path(self._env["CHAOS_FOLDER"])
        if inside:
            (folder / "inside").touch()
        part, held = folder / ".hold", folder / "held"
        part.write_text(f"{count} {phase}")
        part.rename(folder / "hold")
        try:
            self.until(phase, count)
            deadline = time.monotonic() + 300
            with self._news:
                while not held.exists():
                    self._news.wait(0.5)
                    assert self._process.poll() is None, f"the run ended at task {count} of {phase}:\n{self.stderr}"
                    assert time.monotonic() < deadline, f"the driver holds no task:\n{self.where}\n{self.stderr}"
            yield folder
        finally:
            (folder / "inside").unlink(missing_ok=True)
            (folder / "hold").unlink(missing_ok=True)
            held.unlink(missing_ok=True)
            for file in folder.glob("inside.*"):
                file.unlink()

    def until_event(self, kind: str, wanted: Callable[[dict[str, Any]], bool] = lambda event: True,
                    seconds: float = 300.0) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        with self._news:
            while True:
                for event in self.events:
                    if event["event"] == kind and wanted(event):
                        return event
                self._news.wait(0.5)
                assert self._process.poll() is None, f"the run ended before it said '{kind}':\n{self.stderr}"
                assert time.monotonic() < deadline, f"no '{kind}' within {seconds:.0f} s"

    def send(self, signum: int) -> None:
        os.kill(self.pid, signum)

    def finish(self, seconds: float = 550.0) -> int:
        """Wait until the run ends, and return its exit code. Fails after `seconds`."""
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the run did not end within {seconds:.0f} s:\n{self.where}\n{self.stderr}") from None
        for thread in self._readers:
            thread.join(60)
        return code

    @property
    def stderr(self) -> str:
        return "".join(self._errors)[-4000:]

    @property
    def where(self) -> str:
        """The progress of the run as text, for the message of a failing test."""
        last = next((e for e in reversed(self.events) if e["event"] == "progress"), {})
        return f"{dict(self._done)}\nrunning: {last.get('running')}"

    def told(self, kind: str) -> list[dict[str, Any]]:
        return [e for e in self.events if e["event"] == kind]

    def close(self) -> None:
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGCONT)
            kill_tree(self.pid)
            self._process.wait()
        for thread in self._readers:
            thread.join(5)
        for pipe in (self._process.stdout, self._process.stderr):
            pipe.close()
