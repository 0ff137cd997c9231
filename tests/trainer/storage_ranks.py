"""The program that test_damage.py starts as two ranks, while the storage of one of them fails: `python -m
tests.trainer.storage_ranks CHECKPOINTS OUT`."""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path
from unittest import mock

from tests.trainer.synthetic import quiet
from trainer.checkpoint import checkpoints as ckpt
from trainer.checkpoint.damage import choose
from trainer.parallel.world import World, world

#: (rank whose storage fails, the file that it cannot read because its mount is stale)
CASES = ((1, "__1_0.distcp"), (1, "COMPLETE"), (0, "COMPLETE"))


def chosen(folder: Path, here: World, rank: int, file: str) -> str:
    """Let the ranks choose a checkpoint, while rank `rank` cannot read the file `file`. Returns the checkpoint or the
    error as text."""
    real = ckpt.commit if file == "COMPLETE" else ckpt.sha256

    def stale(path: Path) -> object:
        if here.rank == rank and path.name == file:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return real(path)

    with mock.patch.object(ckpt, real.__name__, stale):
        try:
            return str(choose(folder, here, quiet, lambda sound: sound[-1]))
        except Exception as error:
            return f"{type(error).__name__}: {error}"


def main(folder: str, out: str) -> None:
    with world("cpu") as here:
        lines = [chosen(Path(folder), here, *case) for case in CASES]
        (Path(out) / f"rank.{here.rank}.json").write_text(json.dumps(lines))


if __name__ == "__main__":
    main(*sys.argv[1:])
