"""Starts processes in which torch is already imported, so that they start fast: ranks that run a module of the tests,
and other processes. Ports are chosen by the system."""

from __future__ import annotations

import atexit
import importlib
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch.distributed as dist

from trainer.loop import task_watcher
from trainer.tools import arm_processes

#: A process begins with these imported (six CPU seconds otherwise): it is forked by a server that has no threads.
PRELOADED = ["torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint", "torch.utils.tensorboard",
             "trainer.loop.train"]


def begin(target: Callable[..., object], *arguments: object, log: str = os.devnull, **environment: str) -> BaseProcess:
    """Start `target(*arguments)`, a function of a module, in a process of its own. Its output goes to the file `log`.
    """
    forked = multiprocessing.get_context("forkserver")
    forked.set_forkserver_preload(PRELOADED)
    process = forked.Process(target=_run, args=(target, arguments, log, {**os.environ, **environment}))
    process.start()
    atexit.register(process.kill)       # one that a failed test left stopped: multiprocessing would wait for it at exit
    return process


def _run(target: Callable[..., object], arguments: tuple[object, ...], log: str, environment: dict[str, str]) -> None:
    forkserver._forkserver.ensure_running = lambda: None       # so that this process starts others by the same server
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.clear()
    os.environ.update(environment)
    target(*arguments)


class Forked:
    """Stands in for subprocess.Popen where `python -m trainer ARGUMENTS` is started. `target(ARGUMENTS)` runs in the
    process; by default it is the command itself."""

    def __init__(self, command: list[str], env: dict[str, str], stdout: Any = None,
                 target: Callable[[list[str]], object] | None = None, **_: object) -> None:
        log = os.devnull if stdout is None else stdout.name
        self.process = begin(target or run_command, command[3:], log=log, **env)
        self.pid: int = self.process.pid

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self) -> int | None:
        self.process.join()
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        with suppress(ProcessLookupError):                             # as Popen does when the process has just ended
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.process.kill()


def module_with(popen: Callable[..., Any]) -> SimpleNamespace:
    """Return a stand-in for the module subprocess, of which product code uses Popen alone."""
    return SimpleNamespace(Popen=popen, DEVNULL=subprocess.DEVNULL, STDOUT=subprocess.STDOUT)


def forked_arms() -> Any:
    """Return a context in which the trainings of a study, and the processes that score their checkpoints, are forks in
    which torch is imported."""
    return mock.patch.object(arm_processes, "subprocess", module_with(partial(Forked, target=_arm)))


def _arm(arguments: list[str]) -> None:
    task_watcher.subprocess = module_with(Forked)
    run_command(arguments)


def run_command(arguments: list[str]) -> None:
    from trainer.__main__ import main

    sys.exit(main(arguments))


def launch(module: str, size: int, *arguments: str, timeout: float = 600, ends: int = 0) -> list[str]:
    """Run `module.main(*arguments)` as `size` ranks. Returns what each rank printed. Fails, and shows that,
    unless all ranks end with the exit code `ends`."""
    meeting = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(meeting.port), "WORLD_SIZE": str(size),
                   "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1"}
    ranks: list[BaseProcess] = []
    with ExitStack() as stack:
        # files, not pipes: a rank whose pipe is full would wait for us, and all other ranks for this rank
        logs = [stack.enter_context(tempfile.NamedTemporaryFile("r")) for _ in range(size)]
        deadline = time.monotonic() + timeout
        try:
            for r, log in enumerate(logs):
                ranks.append(begin(_main, module, arguments, log=log.name, RANK=str(r), **environment))
            for rank in ranks:
                rank.join(max(0.0, deadline - time.monotonic()))
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()
        errors = [log.read() for log in logs]
    ended = [rank.exitcode for rank in ranks]
    assert ended == [ends] * size, f"{ended}\n" + "\n".join(errors)[-4000:]
    return errors


def _main(module: str, arguments: tuple[str, ...]) -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    importlib.import_module(module).main(*arguments)
