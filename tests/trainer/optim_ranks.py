"""The program that test_optim.py and test_muon.py start as several ranks: `python -m tests.trainer.optim_ranks WHAT OUT
[RUN]`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.trainer.synthetic import quiet
from trainer.base.config import build
from trainer.loop import train as loop
from trainer.loop.config import TrainConfig
from trainer.loop.run import open_run
from trainer.model.config import ModelConfig
from trainer.model.init import initialise
from trainer.model.tensor import local
from trainer.model.transformer import Transformer
from trainer.optim import build as optim
from trainer.parallel.world import World, shard, world

MODEL = ModelConfig(layers=2, width=36, heads=3, kv_heads=1, ffn=51, qk_norm=True)
#: every kind of optimiser, with learning rates that change the weights visibly in a few steps
KINDS = {"adamw": {"lr": 0.01}, "lion": {"lr": 0.002}, "muon": {"lr": 0.01}, "adafactor": {"lr": 0.05},
         "adamw8bit": {"lr": 0.01}}
#: (rows, cols, how many): tall, wide, a number of rows that no number of ranks divides, fewer rows than ranks
SHAPES = {"tall": (96, 32, 5), "wide": (32, 96, 3), "uneven": (13, 26, 7), "short": (3, 8, 2)}
MUON = {"kind": "muon", "lr": 0.1, "adamw_lr": 0.1, "weight_decay": 0.1, "scaling": "kellerjordan"}


def configured(**keys):
    return build(TrainConfig, {"model": {"preset": "tiny"}, "optimizer": keys}, "test: train").optimizer


def put(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return `value` divided among the ranks like `parameter`."""
    if not isinstance(parameter, DTensor):
        return value.clone()
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)


def whole(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


# -- skipped steps -------------------------------------------------------------------------------------------------
def skips(here: World, kind: str) -> dict[str, bool]:
    """Perform some steps of a sharded model, one of which is skipped and has NaN in its gradients on rank 0. Compare
    with the same steps without the skipped one. Returns {what was compared: whether it is equal}."""
    with torch.device("meta"):
        models = [Transformer(MODEL, 97) for _ in range(2)]
    optimizers = []
    for model in models:
        shard(model, here, torch.float32, False)
        initialise(model, MODEL, 7)
        optimizers.append(optim.build(configured(kind=kind, **KINDS[kind]), model.named_parameters(), here))

    def step(model, optimizer, number: int, found: float, spoilt: bool = False) -> None:
        for i, p in enumerate(model.parameters()):
            g = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * number + i))
            p.grad = put(p, g)
            if spoilt and here.first:
                local(p.grad).fill_(float("nan"))
        optimizer.found_inf = torch.tensor(found)
        optimizer.step()
        optimizer.zero_grad()

    plain, skipping = zip(models, optimizers)
    step(*skipping, 9, 1.0, spoilt=True)             # the very first: nothing is allocated yet
    for number in (1, 2):
        step(*plain, number, 0.0)
        step(*skipping, number, 0.0)
    tensors = [x for p in skipping[0].parameters() for x in (p, *skipping[1].state[p].values())]
    before = [local(x).detach().clone() for x in tensors]
    step(*skipping, 3, 1.0, spoilt=True)
    step(*skipping, 4, 2.5)                          # a finite gradient that the rule rejects as an outlier
    untouched = all(torch.equal(a, local(x)) for a, x in zip(before, tensors))
    for pair in (plain, skipping):
        step(*pair, 5, 0.0)
    same = [torch.equal(local(a), local(b)) for x, y in zip(models[0].parameters(), models[1].parameters())
            for a, b in zip((x, *optimizers[0].state[x].values()), (y, *optimizers[1].state[y].values()))]
    moved = not all(torch.equal(a, local(x)) for a, x in zip(before, tensors))
    return {"untouched": untouched, "as if it had not been": all(same), "others move": moved,
            "only tensors": all(isinstance(v, torch.Tensor) for p in skipping[0].parameters()
                                for v in skipping[1].state[p].values())}


# -- Muon ----------------------------------------------------------------------------------------------------------
def starts(rows: int, cols: int, many: int) -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
    """Return random matrices, and their gradients for three steps."""
    g = torch.Generator().manual_seed(rows)
    values = [torch.randn(rows, cols, generator=g) for _ in range(many)]
    return values, [[torch.randn(rows, cols, generator=g) for _ in range(many)] for _ in range(3)]


def moved(parameters: list[nn.Parameter], gradients: list[list[torch.Tensor]], here: World,
          **keys) -> tuple[list[torch.Tensor], int]:
    """Perform a step of Muon for each of `gradients`. Returns (the whole matrices after them, the number of
    all-to-alls)."""
    optimizer = optim.build(configured(**{**MUON, **keys}), [(f"blocks.{i}.w.weight", p) for i, p in
                                                             enumerate(parameters)], here)
    with mock.patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as calls:
        for step in gradients:
            for p, g in zip(parameters, step):
                p.grad = put(p, g)
            optimizer.step()
    return [whole(p.detach()) for p in parameters], calls.call_count


#: number of ranks → layout → mesh and placements
LAYOUTS = {2: {"fsdp": ((2,), [Shard(0)])},
           4: {"fsdp": ((4,), [Shard(0)]), "hybrid": ((2, 2), [Replicate(), Shard(0)]),
               "rowwise": ((2, 2), [Shard(0), Shard(1)])}}


def muon(here: World, out: Path) -> None:
    """Perform steps of Muon for matrices in every layout and, on four ranks, with tensor parallelism under FSDP2. Rank
    0 writes the results to `out`."""
    made, calls = {}, {}
    for layout, (mesh_shape, placements) in LAYOUTS[here.size].items():
        mesh = init_device_mesh("cpu", mesh_shape)
        for name, (rows, cols, many) in SHAPES.items():
            values, gradients = starts(rows, cols, many)
            parameters = [nn.Parameter(distribute_tensor(v, mesh, placements)) for v in values]
            made[f"{layout} {name}"], calls[f"{layout} {name}"] = moved(parameters, gradients, here)
    if here.size == 4:
        made["tensor parallel"] = tensor_parallel(here)
    if here.first:
        torch.save(made, out / "muon.pt")
        (out / "muon.json").write_text(json.dumps(calls))


def tensor_parallel(here: World) -> list[torch.Tensor]:
    """Perform steps for two matrices that tensor parallelism and FSDP2 divide together: one by columns, one by rows."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    pair = nn.Sequential(nn.Linear(26, 13, bias=False), nn.Linear(13, 26, bias=False))
    parallelize_module(pair, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(pair, mesh=mesh["data"])
    out = []
    for p, shape in zip(pair.parameters(), ((13, 26, 1), (26, 13, 1))):
        values, gradients = starts(*shape)
        with torch.no_grad():
            local(p).copy_(local(put(p, values[0])))
        out += moved([p], gradients, here)[0]
    return out


def trainings(run: str, out: Path, here: World) -> None:
    for kind, keys in KINDS.items():
        sets = ["optimizer={}", f"optimizer.kind={kind}", *(f"optimizer.{k}={v}" for k, v in keys.items())]
        loop.train(open_run(run, None, f"{out}/{kind}", sets), here, 5, quiet)


def main(what: str, out: str, run: str = "") -> None:
    torch.set_num_threads(1)
    with world("cpu") as here:
        if what == "muon":
            muon(here, Path(out))
        else:
            found = {kind: skips(here, kind) for kind in KINDS}
            (Path(out) / f"skips.{here.rank}.json").write_text(json.dumps(found))
            trainings(run, Path(out), here)
            muon(here, Path(out))


if __name__ == "__main__":
    main(*sys.argv[1:])
