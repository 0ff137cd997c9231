"""Helpers of the fuzz tests: changed bytes from a seed, and a process that reads files as a worker does."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from pipeline.engine.worker.process import THREADS


def mutate(draw: Random, data: bytearray, others: Sequence[bytes], tokens: Sequence[bytes],
           again: Sequence[int] = (1,)) -> None:
    """Change `data` at one random place: replace, remove or repeat bytes, insert a token, overwrite a piece with one of
    another file, or seldom cut off the end."""
    at, size = draw.randrange(len(data) + 1), draw.choice((1, 2, 8, 64, 1024))
    match draw.randrange(6):
        case 0:
            for k in range(at, min(len(data), at + size)):
                data[k] = draw.randrange(256)
        case 1:
            del data[at:at + size]
        case 2:
            data[at:at] = data[at:at + size] * draw.choice(again)
        case 3:
            data[at:at] = draw.choice(tokens)
        case 4:
            other = draw.choice(others)
            start = draw.randrange(len(other))
            data[at:at + size] = other[start:start + size]
        case _:
            if draw.random() < 0.2:
                del data[at:]


class Worker:
    """A process that reads files and answers, with a limit of memory (RLIMIT_DATA). The kernel counts its CPU time and
    its peak of memory.

    `code` is Python that defines `answer(data: bytes)`. `ask` returns the result of this function.
    """

    LOOP = """
import json, resource, sys
resource.setrlimit(resource.RLIMIT_DATA, (int(sys.argv[1]), resource.getrlimit(resource.RLIMIT_DATA)[1]))
{code}
while head := sys.stdin.buffer.readline():
    print(json.dumps(answer(sys.stdin.buffer.read(int(head)))), flush=True)
"""

    def __init__(self, code: str, memory: int, wall_s: float = 1200.0) -> None:
        self.wall_s = wall_s
        self.process = subprocess.Popen([sys.executable, "-c", self.LOOP.format(code=code), str(memory)],
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2],
                                        env={**os.environ, **dict.fromkeys(THREADS, "1")})

    def ask(self, data: bytes) -> Any:
        """Return the answer for `data`. Fails if the process does not answer in time, or has died."""
        assert self.process.poll() is None, "an earlier file ended the process"
        self.process.stdin.write(b"%d\n" % len(data) + data)
        self.process.stdin.flush()
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            assert selector.select(self.wall_s), "no end"
        line = self.process.stdout.readline()
        assert line, f"the process ended with {self.process.wait()}"
        return json.loads(line)

    def peak(self) -> int:
        """Return the most memory that the process has held so far, in bytes."""
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii")
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")) << 10

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
