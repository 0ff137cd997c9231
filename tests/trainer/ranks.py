"""The program that test_parity.py, test_parallel.py and test_accumulate.py start as several ranks: `python -m
tests.trainer.ranks JOB STORE/runs/RUN OUT`, where JOB is one of JOBS. All jobs of a launch share one process group."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from tests.trainer.synthetic import quiet
from trainer.loop import resume
from trainer.loop import train as loop
from trainer.loop.config import SampleConfig
from trainer.loop.generate import generate
from trainer.loop.run import open_run
from trainer.model.config import ModelConfig
from trainer.model.init import initialise
from trainer.model.transformer import Transformer
from trainer.parallel.config import ParallelConfig
from trainer.parallel.world import World, arranged, clip, shard, world
from trainer.tools.doctor import copies_and_twins

#: two ranks of a tensor group can divide the model; no number of further ranks divides the halves evenly
MODEL = {"layers": 2, "width": 40, "heads": 4, "kv_heads": 2, "ffn": 54, "qk_norm": True}
#: tokens of a run of 11 steps, 6 of them in its first phase; and after how many steps trainings of it stop
TOTAL, STOP, FEW = 1920, 8, 5
#: trainings of test_parity.py and test_parallel.py: name → settings. They take STOP steps; those on four ranks, FEW
TWO = {"tensor": ["parallel.tensor=2"], "grad": ["parallel.shard=grad", "micro_batch=64"]}
FOUR = {"full": [], "none": ["parallel.shard=none", "micro_batch=32"],
        "hybrid": ["parallel.shard=hybrid", "parallel.shard_size=2"],
        "tensor-full": ["parallel.tensor=2", "micro_batch=32"],
        "tensor-none": ["parallel.tensor=2", "parallel.shard=none", "parallel.checkpointing=selective"],
        "tensor-offload": ["parallel.tensor=2", "parallel.offload=true", "parallel.checkpointing={every: 2}"],
        "tensor-compile": ["parallel.tensor=2", "parallel.checkpointing=full", "compile=true"]}

#: trainings of test_accumulate.py on four ranks, several micro-batches a step; each is of 2 steps
DEFER = "parallel.accumulate=unsharded"
ACCUMULATED = {"full": [], "full-unsharded": [DEFER], "none": ["parallel.shard=none"], "grad": ["parallel.shard=grad"],
               "hybrid": ["parallel.shard=hybrid", "parallel.shard_size=2"],
               "hybrid-unsharded": ["parallel.shard=hybrid", "parallel.shard_size=2", DEFER]}


@torch.no_grad()
def one_global_seed(model: nn.Module, config: ModelConfig, seed: int) -> None:
    """Fill a model with wrong initial values, to test that this is noticed. It does what many trainers do: all ranks
    have the same seed, and each draws values for its own shard with torch's init."""
    torch.manual_seed(seed)
    for parameter in model.parameters():
        local = parameter.to_local()                 # equal draws on all ranks of a tensor group
        if parameter.ndim > 1:
            nn.init.normal_(local, std=config.init_std)
        else:
            nn.init.ones_(local)


def built(run: str, here: World, overrides: list[str], init: Any = initialise) -> nn.Module:
    opened = open_run(run, None, None, overrides)
    with torch.device("meta"):
        model = Transformer(opened.config.model, opened.vocab)
    shard(model, here, torch.float32, False)
    init(model, opened.config.model, 7)
    return model


def initial_hashes(run: str, here: World, overrides: list[str] = []) -> dict[str, list]:  # noqa: B006
    """Return {name of a parameter: [hash of its whole initial value, number of its values on this rank]}. The whole
    values are gathered from the shards."""
    return {name: [hashlib.sha256(p.detach().full_tensor().numpy().tobytes()).hexdigest(), p.to_local().numel()]
            for name, p in built(run, here, overrides).named_parameters()}


def text(run: str, here: World, overrides: list[str]) -> list[list[int]]:
    """Let the initial model generate text: the likeliest tokens, and randomly drawn ones."""
    model = built(run, here, overrides)
    return [generate(model, [3, 5, 7], SampleConfig(tokens=6, temperature=t), 0, 1, torch.float32, here)
            for t in (0.0, 0.8)]


def poisoned(model: nn.Module, most: float, here: World) -> torch.Tensor:
    """Do what `clip` does. At the fifth call, first put a NaN into a gradient of the last rank."""
    poisoned.steps += 1
    if poisoned.steps == 5 and here.rank == here.size - 1:
        next(p for p in model.parameters() if p.to_local().numel()).grad.to_local().view(-1)[0] = torch.nan
    norm = clip(model, most, here)
    poisoned.norms.append(norm.item())
    return norm


def with_poison(run: str, out: str, here: World, overrides: list[str]) -> None:
    """Train while one rank once has a NaN in its gradients. Each rank writes the gradient norms that it got to
    `out`."""
    poisoned.steps, poisoned.norms = 0, []
    with mock.patch.object(loop, "clip", poisoned):
        loop.train(open_run(run, None, f"{out}/poison", overrides), here, 8, quiet)
    (Path(out) / f"poison.{here.rank}.json").write_text(json.dumps(poisoned.norms))


def shards(run: str, out: str, here: World, overrides: list[str]) -> None:
    """Write hashes of the whole initial parameters, the text of the initial model, and the result of
    `copies_and_twins`, both for correct initial values and for those of `one_global_seed`. Each rank writes a file."""
    arrangement = arranged(here, open_run(run, None, None, overrides).config.parallel)
    found = {"init": initial_hashes(run, arrangement, overrides),
             "text": text(run, arrangement, overrides),
             # values that differ in a last bit, as sums on the ranks of a tensor group do on a GPU
             "sum": arrangement.sum(torch.tensor([0.1 + 1e-16 * here.rank], dtype=torch.float64)).tolist(),
             "sound": copies_and_twins(built(run, arrangement, overrides), arrangement),
             "mutant": copies_and_twins(built(run, arrangement, overrides, one_global_seed), arrangement)}
    (Path(out) / f"shards.{here.rank}.json").write_text(json.dumps(found))


def parity(run: str, out: str, here: World) -> None:
    """The job of test_parity.py, for two ranks."""
    (Path(out) / f"init.{here.rank}.json").write_text(json.dumps(initial_hashes(run, here)))
    for name, stop in (("two", None), ("two-then-one", FEW), ("one-then-two", None)):
        loop.train(open_run(run, None, f"{out}/{name}", []), here, stop, quiet)
    for name, overrides in TWO.items():
        loop.train(open_run(run, None, f"{out}/{name}", overrides), here, STOP, quiet)
    with mock.patch.object(resume, "initialise", one_global_seed):
        loop.train(open_run(run, None, f"{out}/mutant-two", []), here, STOP, quiet)
    shards(run, out, here, ["parallel.tensor=2"])
    with_poison(run, out, here, ["parallel.tensor=2"])


def parallel(run: str, out: str, here: World) -> None:
    """The job of test_parallel.py, for four ranks."""
    real = torch.compile
    # the same graphs as Inductor, but without compiling C++, which test_saving_memory_changes_no_loss does once
    with mock.patch.object(torch, "compile", lambda f, **options: real(f, backend="aot_eager", **options)):
        for name, overrides in FOUR.items():
            loop.train(open_run(run, None, f"{out}/{name}", overrides), here, FEW, quiet)
    shards(run, out, here, ["parallel.tensor=2", "parallel.shard=hybrid", "parallel.shard_size=1"])
    with_poison(run, out, here, ["parallel.tensor=2"])
    arranged(here, ParallelConfig())


def held(model: nn.Module) -> int:
    """Return the bytes of gradients on this rank, sharded or not."""
    tensors = []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in vars(module._get_fsdp_state()).get("_fsdp_param_groups") or \
                    [module._get_fsdp_state()._fsdp_param_group]:              # torch 2.11
                tensors.append(group._partial_reduce_output)
                for p in group.fsdp_params:
                    whole, share = getattr(p, "_unsharded_param", None), p.sharded_param.grad
                    tensors += [p.unsharded_accumulated_grad, None if whole is None else whole.grad,
                                None if share is None else share.to_local()]
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def accumulated(run: str, out: str, here: World) -> None:
    """The job of test_accumulate.py, for four ranks. Each writes the most bytes of gradients that it held between
    micro-batches, and the bytes of the gradients of all parameters."""
    most: dict[str, list[int]] = {}
    real = loop.gather_gradients
    for name, overrides in ACCUMULATED.items():
        seen = most[name] = [0, 0]

        def between(model: nn.Module, world: World, last: bool, seen: list[int] = seen) -> None:
            seen[:] = max(seen[0], held(model)), 4 * sum(p.numel() for p in model.parameters())
            real(model, world, last)

        with mock.patch.object(loop, "gather_gradients", between):
            loop.train(open_run(run, None, f"{out}/{name}", [*overrides, "micro_batch=32"]), here, 2, quiet)
    (Path(out) / f"held.{here.rank}.json").write_text(json.dumps(most))


JOBS = {"accumulated": accumulated, "parity": parity, "parallel": parallel}


def main(job: str, run: str, out: str) -> None:
    torch.set_num_threads(1)
    with world("cpu") as here:
        JOBS[job](run, out, here)


if __name__ == "__main__":
    main(*sys.argv[1:])
