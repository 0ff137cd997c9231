"""Starts several ranks on this machine, each as a process. The processes get the environment variables that torchrun
would set; unlike with torchrun, there is no agent process and no fixed port."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from pipeline.base.clock import SYSTEM, Clock
from trainer.base.arguments import say
from trainer.base.config import ConfigError
from trainer.base.interrupts import end_with_parent as end_with_parent
from trainer.base.interrupts import stopping
from trainer.loop.threads import cores
from trainer.parallel.world import check_device

#: seconds that the other ranks have to end by themselves: FAILED_S after a rank has failed, STOPPED_S after a rank has
#: stopped in an orderly way on a signal (the others may still be writing their share of a checkpoint)
FAILED_S, STOPPED_S = 10, 600


def launch(arguments: Sequence[str], ranks: int, device: str, threads: Callable[[str], int] | None = None,
           clock: Clock = SYSTEM) -> int:
    """Run `python -m trainer ARGUMENTS` in `ranks` processes. Returns 0, or the exit code of the first failed process.

    `device` is auto, cpu or cuda. `threads(device)` returns the number of CPU threads of a rank (default: its share of
    the cores); OMP_NUM_THREADS takes precedence. Raises ConfigError when there are fewer GPUs than ranks.

    When one rank fails, the other ranks are ended. Signals are forwarded to all ranks, so that each can write its share
    of a checkpoint. When this process is killed, the ranks get SIGTERM, so that no old rank trains beside the ranks of
    the next start.
    """
    check_device(device)                          # checked once here, not in every rank
    if device != "cpu" and torch.cuda.is_available() and ranks > torch.cuda.device_count():
        raise ConfigError(f"--ranks {ranks}: a rank takes a GPU, and this machine has {torch.cuda.device_count()}; ask "
                          f"for fewer, or train on the CPU with --device cpu")
    # this process hosts the store by which ranks connect; TORCHELASTIC_USE_AGENT_STORE makes every rank a client of it
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    share = os.environ.get("OMP_NUM_THREADS")
    if not share:
        cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
        share = str(threads("cuda" if cuda else "cpu") if threads else max(1, int(cores()) // ranks))
    shared = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(ranks),
              "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": share, "LOCAL_WORLD_SIZE": str(ranks)}
    processes: list[subprocess.Popen[bytes]] = []
    caught: list[int] = []

    def forward(number: int, _frame: object) -> None:
        caught.append(number)
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    old = {n: signal.signal(n, forward) for n in stopping()}
    try:
        for rank in range(ranks):
            processes.append(subprocess.Popen([sys.executable, "-m", "trainer", *arguments], start_new_session=True,
                                              env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                                              preexec_fn=end_with_parent))
            for number in caught:                 # signals that came while it was being started did not reach it
                processes[-1].send_signal(number)
        return wait(processes, clock)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        for number, handler in old.items():
            signal.signal(number, handler)


def wait(processes: Sequence[subprocess.Popen[bytes]], clock: Clock = SYSTEM) -> int:
    """Wait until all `processes` have ended. Returns 0, or the exit code of the first process that failed (128 + n when
    signal n ended it). After a failure, the other processes get at most FAILED_S seconds to end, or STOPPED_S seconds
    when the failure was an orderly stop."""
    failed, since = 0, 0.0
    while True:
        codes = [p.poll() for p in processes]
        if not failed and (failed := next((code for code in codes if code), 0)):
            since = clock.now()
            if failed < 0:                                   # a killed rank could not print a message itself
                say(f"error: rank {codes.index(failed)} was ended by {signal.Signals(-failed).name}"
                    f"{' (the system does that when memory runs out)' if failed == -signal.SIGKILL else ''}; the "
                    f"other ranks are ended, too", sys.stderr)
        patience = STOPPED_S if failed > 128 else FAILED_S
        if all(code is not None for code in codes) or (failed and clock.now() - since > patience):
            return 128 - failed if failed < 0 else failed
        clock.sleep(0.05)
