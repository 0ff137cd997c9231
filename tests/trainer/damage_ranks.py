"""The program that test_damage.py starts as two ranks: `python -m tests.trainer.damage_ranks STORE/runs/RUN OUT`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from unittest import mock

import torch

from tests.trainer.synthetic import quiet
from tests.trainer.test_checkpoint import opened
from trainer.checkpoint import checkpoints as ckpt
from trainer.checkpoint.damage import choose, damage
from trainer.loop.train import train
from trainer.parallel.world import world


def main(run: str, out: str) -> None:
    torch.set_num_threads(1)
    with world("cpu") as here:
        train(opened(Path(run), Path(out)), here, 12, quiet)
        folder, read, real = Path(out) / "checkpoints", [], ckpt.sha256

        def sha256(path: Path) -> str:
            if "step_00000012" in str(path):
                read.append(path.name)
                if here.rank == 1:               # only this node reads a damaged page
                    return "0" * 64
            return real(path)

        with mock.patch.object(ckpt, "sha256", sha256):
            lines = damage(ckpt.at(folder, 12), here)
            seen = sorted(read)
            used = choose(folder, here, quiet, lambda sound: sound[-1])
        (Path(out) / f"rank.{here.rank}.json").write_text(
            json.dumps({"used": used.step, "damage": lines, "read": seen}))


if __name__ == "__main__":
    main(*sys.argv[1:])
