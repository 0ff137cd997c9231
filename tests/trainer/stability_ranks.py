"""Trainings with loss spikes, which test_stability.py runs on one rank and on two: `python -m
tests.trainer.stability_ranks STORE/runs/RUN OUT`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np
import torch

from trainer.data.batches import Batch, Data
from trainer.loop import train as loop
from trainer.loop.run import Run, open_run
from trainer.model.loss import IGNORE
from trainer.model.transformer import Transformer
from trainer.parallel.world import World, world

#: settings with which the detector of outliers knows after a few steps what is usual
QUICK = ("evaluate.every=1000", "log_every=7", "checkpoint.every=6", "checkpoint.keep=9", "stability.window=8",
         "stability.warm=6", "stability.sigma=4.5", "stability.worst_rows=3")
REWIND = (*QUICK, "stability.sigma=null", "stability.rewind={trigger: {loss_above: 0.4, for: 2}, skip: 6, budget: 2}")


def opened(run: str, out: str, *overrides: str) -> Run:
    return open_run(run, None, out, [*QUICK, *overrides])


@contextmanager
def garbage(*steps: int) -> Iterator[None]:
    """Within this context, the targets of these steps (numbered from 1) are random, on all ranks. The run must be that
    of `synthetic.make_run`."""
    read = Data.step

    def spoiled(self: Data, first: int, batch: int, rank: int, size: int) -> Batch:
        made = read(self, first, batch, rank, size)
        if any(s.first == first and s.number + 1 in steps for s in run_steps(self)):
            rows, length = made.targets.shape
            sample = first + rank + size * torch.arange(rows)
            other = torch.stack([torch.from_numpy(np.random.default_rng(s).integers(1, 97, length))
                                 for s in sample.tolist()])
            made.targets[:] = torch.where(made.targets == IGNORE, IGNORE, other)
        return made

    with mock.patch.object(Data, "step", spoiled):
        yield


def run_steps(data: Data):
    return Run(None, None, None, data.curriculum, None).steps()           # type: ignore[arg-type]


@contextmanager
def poisoned(here: World, rank: int, step: int) -> Iterator[None]:
    """Within this context, the loss of step `step` is NaN on rank `rank`. Each step must be one micro-batch."""
    forward, seen = Transformer.forward, []

    def spoiled(self, *arguments, **options):
        objective, *rest = forward(self, *arguments, **options)
        seen.extend([1] * torch.is_grad_enabled())
        return (objective * float("nan") if torch.is_grad_enabled() and len(seen) == step and here.rank == rank
                else objective), *rest

    with mock.patch.object(Transformer, "forward", spoiled):
        yield


def scenarios(run: str, out: str, here: World) -> None:
    """Train three times, into folders of OUT: with a NaN on one rank, with a spike, and with a rewind. On two ranks,
    the training is killed during the rewind, and then started again."""
    def train(name: str, stop: int | None, *overrides: str) -> None:
        loop.train(opened(run, f"{out}/{name}", *overrides), here, stop, lambda _text: None)

    with poisoned(here, here.size - 1, 9):
        train("poisoned", 10)
    with garbage(14):
        train("spike", 16)
    with garbage(13, 14, 15, 16):
        if here.size == 1:
            train("rewind", 18, *REWIND)
            return
        with mock.patch.object(loop, "restore", side_effect=died), mock.patch.object(loop.Ledger, "clear", keeps):
            try:
                # the first start restores nothing, so a process that dies in `restore` dies while it goes back
                train("rewind", 18, *REWIND)
            except Died:
                pass
            else:
                raise AssertionError("it never went back")
        train("rewind", 18, *REWIND)


class Died(BaseException):
    """Stands in for a kill. The training must not catch it."""


alive = loop.restore
cleared = loop.Ledger.clear


def died(found, *rest):
    if found is None:
        return alive(found, *rest)
    raise Died


def keeps(self, *_):
    """Stands in for `Ledger.clear`: the training is killed before it deletes anything."""
    return []


def main(run: str, out: str) -> None:
    torch.set_num_threads(1)
    with world("cpu") as here:
        scenarios(run, out, here)


if __name__ == "__main__":
    main(*sys.argv[1:])
