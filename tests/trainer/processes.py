"""Several ranks of a module of the tests, as gloo processes on ports the system chose."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path

import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]


def launch(module: str, size: int, *arguments: str, timeout: float = 600, ends: int = 0) -> list[str]:
    """`python -m module *arguments` as `size` ranks; returns what each said on stderr. Fails, with that, unless all end
    with the code `ends`."""
    meeting = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(meeting.port),
                   "WORLD_SIZE": str(size), "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1"}
    with ExitStack() as stack:
        # files, not pipes: a rank whose pipe is full would wait for us, who wait for another, who waits for it
        said = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(size)]
        ranks = [subprocess.Popen([sys.executable, "-m", module, *arguments], cwd=ROOT, stderr=log,
                                  env={**environment, "RANK": str(r)}) for r, log in enumerate(said)]
        try:
            with suppress(subprocess.TimeoutExpired):
                for rank in ranks:
                    rank.wait(timeout)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        for log in said:
            log.seek(0)
        errors = [log.read() for log in said]
    ended = [rank.returncode for rank in ranks]
    assert ended == [ends] * size, f"{ended}\n" + "\n".join(errors)[-4000:]
    return errors
