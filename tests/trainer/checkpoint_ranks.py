"""Programs that test_reshard.py starts as several ranks: `python -m tests.trainer.checkpoint_ranks WHAT STORE/runs/RUN
OUT`. Also a training that is killed, for test_checkpoint.py and test_async_checkpoint.py."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.trainer.synthetic import quiet
from trainer.__main__ import main as command
from trainer.checkpoint import checkpoints as ckpt
from trainer.checkpoint import saver as saving
from trainer.loop.run import open_run
from trainer.loop.train import train
from trainer.parallel.world import World, world

SET = ["log_every=1000", "evaluate.every=1000", "checkpoint.every=3", "checkpoint.async=true"]
#: sizes of a model that two ranks of a tensor group can divide
SPLIT = ["model.width=32", "model.heads=4", "model.kv_heads=2", "model.ffn=64"]


def failing(run: str, out: str, here: World) -> None:
    """Train while the second rank cannot write its share of the second checkpoint. Every rank must get an error and
    end."""
    real, real_poll, calls = saving.FileSystemWriter, saving.Saver.poll, []

    class Full(real):
        def write_data(self, plan, planner):
            raise OSError(28, "No space left on device")

    def writer(path: Path):
        calls.append(path)
        return (Full if len(calls) == 2 and here.rank == 1 else real)(path)

    def poll(saver: saving.Saver) -> None:             # the second has failed by the next step
        if saver.writing is not None and len(calls) == 2:
            saver.writing.thread.join()
        real_poll(saver)

    try:
        with mock.patch.object(saving, "FileSystemWriter", writer), mock.patch.object(saving.Saver, "poll", poll):
            train(open_run(run, None, f"{out}/failing", SET), here, 13, quiet)
    except ckpt.CheckpointError as error:
        Path(f"{out}/failing.{here.rank}").write_text(str(error))


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Dying(saving.FileSystemWriter):
    """A FileSystemWriter that kills the process when half of each file is on disk."""

    def write_data(self, plan, planner):
        super().write_data(plan, planner).wait()
        for path in Path(self.path).iterdir():
            os.truncate(path, path.stat().st_size // 2)
        die()


def killed(where: str, arguments: list[str]) -> None:
    """Run a training that is killed in its second checkpoint. `where` says when: `data` (while the files are written),
    `commit` (before it is committed) or `committed` (after it)."""
    calls: list[object] = []

    def second(real: Callable[..., Any], last: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            calls.append(arguments)
            return (last if len(calls) == 2 else real)(*arguments, **options)
        return call

    name, last = {"data": ("FileSystemWriter", Dying), "commit": ("put_absent", die),
                  "committed": ("retain", die)}[where]
    with mock.patch.object(saving, name, second(getattr(saving, name), last)):
        command(arguments)


def main(what: str, run: str, out: str) -> None:
    torch.set_num_threads(1)
    with world("cpu") as here:
        if what == "two":
            train(open_run(run, None, f"{out}/reshard", SET), here, 8, quiet)
            train(open_run(run, None, f"{out}/tensor", [*SET, *SPLIT, "parallel.tensor=2"]), here, 4, quiet)
            failing(run, out, here)
        else:
            train(open_run(run, None, f"{out}/reshard", SET), here, None, quiet)


if __name__ == "__main__":
    main(*sys.argv[1:])
