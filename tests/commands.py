"""Runs `python -m MODULE ARGUMENTS` in a process of its own, without the two seconds that the imports take.

A server process imports the needed modules once, and forks for each command. It has no threads, and it imports no
module that reads the environment at import, so the fork behaves like a fresh process.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import random
import runpy
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[1]
PRELOADED = ("numpy", "pyarrow.dataset", "pyarrow.parquet", "pipeline.cli.app", "pipeline.cli.cluster",
             "pipeline.cli.runs", "pipeline.plan.planner", "pipeline.recipe", "pipeline.report.collect",
             "pipeline.run")


@functools.cache
def _server() -> subprocess.Popen[str]:
    """Start the server process of this test process. It ends when its standard input closes, and so with this
    process."""
    return subprocess.Popen([sys.executable, "-m", "tests.commands"], cwd=ROOT, stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE, text=True, env={**os.environ, "OPENBLAS_NUM_THREADS": "1",
                                                              "ARROW_DEFAULT_MEMORY_POOL": "system"})


def command(module: str, *arguments: str | Path, env: Mapping[str, str] | None = None, cwd: Path = ROOT,
            timeout: float = 600) -> subprocess.CompletedProcess[str]:
    """Run a command in a forked process, and return its result. `env` has variables that are added to the environment
    of this process. Raises AssertionError after `timeout` seconds."""
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        words = [module, *map(str, arguments)]
        server.stdin.write(json.dumps({"words": words, "env": {**os.environ, **(env or {})}, "cwd": str(cwd),
                                       "out": str(out), "err": str(err)}) + "\n")
        server.stdin.flush()
        timer = threading.Timer(timeout, server.kill)
        timer.start()
        code = server.stdout.readline()
        timer.cancel()
        if not code:
            _server.cache_clear()
            raise AssertionError(f"{words} did not end within {timeout} s: {err.read_text()}")
        return subprocess.CompletedProcess(words, int(code), out.read_text(), err.read_text())


def server_pid() -> int:
    """Return the pid of the server process. While a command runs, it is the server's only child."""
    return _server().pid


def _run(words: list[str], env: dict[str, str], cwd: str, out: str, err: str) -> NoReturn:
    for number, path, flags in ((0, os.devnull, os.O_RDONLY), (1, out, os.O_WRONLY | os.O_CREAT),
                                (2, err, os.O_WRONLY | os.O_CREAT | os.O_APPEND)):
        os.dup2(os.open(path, flags), number)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None
    random.seed()
    sys.argv = words
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    sys.exit(0)


def main() -> None:
    for module in PRELOADED:
        importlib.import_module(module)
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        if (pid := os.fork()) == 0:
            _run(**request)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
