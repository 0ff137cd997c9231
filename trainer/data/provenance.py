"""Records the provenance of a checkpoint: the data, its order, the code and the machine.

A hash chain records which data the model has seen, and in which order. After each performed step, h = blake2b(h ‖
number of the step ‖ first sample ‖ batch ‖ hash of the step's samples as (stream, epoch, window)), with numbers as
little-endian u64. The chain is a pure function of the curriculum and of the skipped steps, so `tokenmill train verify`
can compute it again and compare.
"""

from __future__ import annotations

import functools
import hashlib
import platform
import struct
import subprocess
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from tokenizer.mixture.order import Order
from tokenizer.mixture.steps import TrainingStep

#: value of the hash chain before the first step
GENESIS = bytes(16)
#: number of samples whose windows are computed at once; it bounds memory and does not affect the hash
CHUNK = 1 << 16


def chain(order: Order, steps: Iterable[TrainingStep], before: bytes = GENESIS,
          passed: Callable[[int], str | None] = lambda _number: None) -> bytes:
    """Extend a hash chain by `steps`, which must be consecutive. The chain is a hash over all data that a training has
    read, in order. `before` is its value before these steps; its value after them is returned (16 bytes). `passed` is
    called with a step's number, from 1, and returns why the step was skipped, or None. Skipped steps do not change the
    chain."""
    waiting: list[TrainingStep] = []
    for step in steps:
        waiting.append(step)
        if step.first + step.batch - waiting[0].first >= CHUNK:
            before, waiting = _links(order, waiting, before, passed), []
    return _links(order, waiting, before, passed)


def _links(order: Order, steps: list[TrainingStep], value: bytes, passed: Callable[[int], str | None]) -> bytes:
    if not steps:
        return value
    first = steps[0].first
    at = order.locate(first, steps[-1].first + steps[-1].batch)
    rows = np.stack([at.stream, at.epoch, at.window], axis=1).astype("<u8")
    for step in steps:
        if passed(step.number + 1) is None:
            windows = rows[step.first - first:step.first - first + step.batch].tobytes()
            value = hashlib.blake2b(value + struct.pack("<3Q", step.number + 1, step.first, step.batch)
                                + hashlib.blake2b(windows, digest_size=16).digest(), digest_size=16).digest()
    return value


@functools.cache
def code() -> dict[str, str | None]:
    """Return the identity of the trainer's code: {"sha256": hash over the names and contents of trainer/**/*.py,
    "package": version of the installed package or None, "commit": commit of the git checkout that has the code or
    None}."""
    folder = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        name, content = path.relative_to(folder).as_posix(), hashlib.sha256(path.read_bytes())
        digest.update(f"{name} {content.hexdigest()}\n".encode())
    commit = None
    if (folder.parent / ".git").exists():
        try:
            git = subprocess.run(["git", "-C", str(folder.parent), "rev-parse", "HEAD"], capture_output=True,
                                  text=True, timeout=10, check=False)
            commit = git.stdout.strip() or None
        except (OSError, subprocess.TimeoutExpired):
            pass
    try:
        package = metadata.version("tokenmill")
    except metadata.PackageNotFoundError:
        package = None
    return {"sha256": digest.hexdigest(), "package": package, "commit": commit}


def machine(device: str) -> dict[str, Any]:
    """Describe the machine that trains: versions of torch and Python, the `device`, the number of CPU threads."""
    import torch

    return {"torch": torch.__version__, "python": platform.python_version(), "device": device,
            "threads": torch.get_num_threads()}
