"""Several ranks of a module of the tests, as gloo processes on ports the system chose."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import torch.distributed as dist

#: A rank begins with these imported (six CPU seconds otherwise): it is forked by a server that has no threads.
PRELOADED = ["torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint", "trainer.loop.train"]


def launch(module: str, size: int, *arguments: str, timeout: float = 600, ends: int = 0) -> list[str]:
    """`module.main(*arguments)` as `size` ranks; returns what each wrote to stderr. Fails, with that, unless all end
    with the code `ends`."""
    meeting = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(meeting.port), "WORLD_SIZE": str(size),
                   "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1"}
    forked = multiprocessing.get_context("forkserver")
    forked.set_forkserver_preload(PRELOADED)
    with ExitStack() as stack:
        # files, not pipes: a rank whose pipe is full would wait for us, who wait for another, who waits for it
        logs = [stack.enter_context(tempfile.NamedTemporaryFile("r")) for _ in range(size)]
        ranks = [forked.Process(target=_rank, args=(module, arguments, log.name, {
            **os.environ, **environment, "RANK": str(r)})) for r, log in enumerate(logs)]
        deadline = time.monotonic() + timeout
        try:
            for rank in ranks:
                rank.start()
            for rank in ranks:
                rank.join(max(0.0, deadline - time.monotonic()))
        finally:
            for rank in ranks:
                if rank.pid is not None:
                    rank.kill()
                    rank.join()
        errors = [log.read() for log in logs]
    ended = [rank.exitcode for rank in ranks]
    assert ended == [ends] * size, f"{ended}\n" + "\n".join(errors)[-4000:]
    return errors


def _rank(module: str, arguments: tuple[str, ...], log: str, environment: dict[str, str]) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 2)
    os.environ.clear()
    os.environ.update(environment)
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    importlib.import_module(module).main(*arguments)
