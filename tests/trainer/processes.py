"""Several ranks of a module of the tests, as gloo processes on ports the system chose."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]


def launch(module: str, size: int, *arguments: str, timeout: float = 150, ends: int = 0) -> list[str]:
    """`python -m module *arguments` as `size` ranks; returns what each said on stderr. Fails, with that, unless all end
    with the code `ends`."""
    meeting = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(meeting.port),
                   "WORLD_SIZE": str(size), "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1"}
    ranks = [subprocess.Popen([sys.executable, "-m", module, *arguments], cwd=ROOT, stderr=subprocess.PIPE, text=True,
                              env={**environment, "RANK": str(r)}) for r in range(size)]
    try:
        errors = [rank.communicate(timeout=timeout)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [ends] * size, "\n".join(errors)[-4000:]
    return errors
