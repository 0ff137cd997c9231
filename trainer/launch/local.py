"""Several ranks on this machine: one process each, the environment of torchrun, no agent and no port to collide on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

import torch.distributed as dist


def launch(arguments: Sequence[str], ranks: int) -> int:
    """Run `python -m trainer ARGUMENTS` in `ranks` processes; returns 0, or the exit code of the first that failed.

    When one fails, the others are ended. Signals go to all of them, so that each can write its share of a checkpoint.
    """
    # the store lives here, on a port the system chose; TORCHELASTIC_USE_AGENT_STORE makes every rank its client
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // ranks))
    shared = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(ranks),
              "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": threads}
    command = [sys.executable, "-m", "trainer", *arguments]
    processes = [subprocess.Popen(command, env={**shared, "RANK": str(r), "LOCAL_RANK": str(r)}, start_new_session=True)
                 for r in range(ranks)]

    def forward(number: int, _frame: object) -> None:
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    old = {n: signal.signal(n, forward) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    try:
        return wait(processes)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        for number, handler in old.items():
            signal.signal(number, handler)


def wait(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    """0 when all have ended well; otherwise the first failure's code, once the rest has ended by itself or had 10 s to
    do so (600 s when it was an orderly stop after a signal: the others may still be writing their checkpoint)."""
    failed, since = 0, 0.0
    while True:
        codes = [p.poll() for p in processes]
        if failed == 0:
            failed = next((c for c in codes if c), 0)
            since = time.monotonic()
        patience = 600 if failed > 128 else 10
        if all(c is not None for c in codes) or (failed and time.monotonic() - since > patience):
            return 128 - failed if failed < 0 else failed
        time.sleep(0.05)
