"""The program that test_noise.py starts as ranks: `python -m tests.trainer.measure_ranks RUN OUT two|meshes`. Two ranks
measure gradient norms by hooks, and train; four ranks train in every arrangement."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import nn

from tests.trainer.synthetic import quiet
from trainer.data.batches import Data
from trainer.loop.run import Run, open_run
from trainer.loop.train import train
from trainer.model.attention import document_mask
from trainer.model.init import initialise
from trainer.model.loss import IGNORE
from trainer.model.transformer import Transformer
from trainer.observe.noise import MicroNorms
from trainer.parallel.world import World, gather_gradients, shard, world

#: number of rows of a step (each is a micro-batch), and number of steps
ROWS, STEPS = 8, 3
#: trainings of four ranks
MESHES = {"tensor": "{tensor: 2}", "hybrid": "{shard: hybrid, shard_size: 2}"}


def built(run: Run, here: World) -> Transformer:
    with torch.device("meta"):
        model = Transformer(run.config.model, run.vocab)
    shard(model, here, torch.float32, False)
    initialise(model, run.config.model, 7)
    return model


def loss(model: nn.Module, part, scale: torch.Tensor) -> torch.Tensor:
    return model(part.tokens, document_mask(part.positions, torch.float32), part.targets, scale, 1e-4, 2048)[0]


def sharded_norms(run: Run, here: World) -> dict[str, list[float]]:
    """Return |G_i|² of each micro-batch of this rank, as measured by the hooks; and what the hooks add up while no
    measurement runs."""
    model, data = built(run, here), Data(run.curriculum, run.store)
    micro, found, last = MicroNorms(model, here.device), [], 0.0
    scale = torch.tensor(1 / 200)
    parts = list(data.step(0, ROWS, here.rank, here.size).micro(1, here.device))
    micro.start()
    for i, part in enumerate(parts):
        gather_gradients(model, here, i == len(parts) - 1)
        loss(model, part, scale).backward()
        micro.add((part.targets != IGNORE).sum(), scale)
        found.append(micro.sums[0].item() - last)
        last = micro.sums[0].item()
    micro.take()
    micro.sums = torch.zeros_like(micro.sums)
    loss(model, parts[0], scale).backward()
    micro.add((parts[0].targets != IGNORE).sum(), scale)
    return {"micro": found, "off": micro.sums.tolist()}


def plain_norms(run: Run, rank: int, size: int) -> list[float]:
    """Return the same norms, computed by autograd on a model that is not sharded."""
    with world("cpu") as here:
        state = {name: p.detach().full_tensor() for name, p in built(run, here).named_parameters()}
    model = Transformer(run.config.model, run.vocab)
    model.load_state_dict(state, strict=False)
    found = []
    for part in Data(run.curriculum, run.store).step(0, ROWS, rank, size).micro(1, torch.device("cpu")):
        scale = torch.tensor(1 / int((part.targets != IGNORE).sum()))
        grads = torch.autograd.grad(loss(model, part, scale), list(model.parameters()))
        found.append(sum(g.square().sum().item() for g in grads))
    return found


def main(run: str, out: str, job: str = "two") -> None:
    torch.set_num_threads(1)
    with world("cpu") as here:
        if job == "two":
            opened = open_run(run, None, f"{out}/two", [])
            (Path(out) / f"norms.{here.rank}.json").write_text(json.dumps(sharded_norms(opened, here)))
            train(opened, here, STEPS, quiet)
        else:
            for name, parallel in MESHES.items():
                train(open_run(run, None, f"{out}/{name}", [f"parallel={parallel}"]), here, STEPS, quiet)


if __name__ == "__main__":
    main(*sys.argv[1:])
