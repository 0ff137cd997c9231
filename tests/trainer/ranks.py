"""What two ranks do for test_parity.py, in one process group: `python -m tests.trainer.ranks STORE/runs/RUN OUT`."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from unittest import mock

import torch
from torch import nn

from trainer import train as loop
from trainer.init import initialise
from trainer.model import ModelConfig, Transformer
from trainer.parallel import World, shard, world
from trainer.run import open_run


def quiet(_text: str) -> None:
    pass


@torch.no_grad()
def one_global_seed(model: nn.Module, config: ModelConfig, seed: int) -> None:
    """The mutant: what most trainers do. One seed for all, and torch's own init on whatever shard a rank holds."""
    torch.manual_seed(seed)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=config.init_std)
        else:
            nn.init.ones_(parameter)


def initial_hashes(run: str, here: World) -> dict[str, list]:
    """{name: [hash of the whole tensor, rows on this rank]} of the initial parameters, gathered from the shards."""
    opened = open_run(run, None, None, [])
    with torch.device("meta"):
        model = Transformer(opened.config.model, opened.vocab)
    shard(model, here, torch.float32, False)
    initialise(model, opened.config.model, 7)
    return {name: [hashlib.sha256(p.detach().full_tensor().numpy().tobytes()).hexdigest(), p.to_local().shape[0]]
            for name, p in model.named_parameters()}


def main(run: str, out: str) -> None:
    torch.set_num_threads(1)
    with world("cpu") as here:
        hashes = initial_hashes(run, here)
        (Path(out) / f"init.{here.rank}.json").write_text(json.dumps(hashes))
        for name, stop in (("two", None), ("two-then-one", 17), ("one-then-two", None)):
            loop.train(open_run(run, None, f"{out}/{name}", []), here, stop, quiet)
        with mock.patch.object(loop, "initialise", one_global_seed):
            loop.train(open_run(run, None, f"{out}/mutant-two", []), here, 22, quiet)


if __name__ == "__main__":
    main(*sys.argv[1:])
