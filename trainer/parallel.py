"""Processes, devices and sharding: FSDP2 over one mesh, also for a single process, so that there is one code path.

A process group comes from the environment (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT: torchrun, Slurm, the
launchers in trainer/launch); without it the process is alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from trainer.config import ConfigError


@dataclass(frozen=True)
class World:
    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh

    @property
    def first(self) -> bool:
        """True in the process that writes files and prints."""
        return self.rank == 0

    def sum(self, x: Tensor) -> Tensor:
        """Sum over ranks, in place."""
        dist.all_reduce(x)
        return x

    def max(self, x: Tensor) -> Tensor:
        """Maximum over ranks, in place."""
        dist.all_reduce(x, dist.ReduceOp.MAX)
        return x

    def broadcast(self, data: bytes) -> bytes:
        """`data` of rank 0 on every rank (of equal length everywhere)."""
        x = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.device)
        dist.broadcast(x, 0)
        return bytes(x.cpu().tolist())


@contextmanager
def world(device: str) -> Iterator[World]:
    """Join the process group (gloo on CPU, NCCL on CUDA) and leave it at the end. `device`: auto, cpu or cuda."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no CUDA device; use --device cpu, or a CUDA build of torch")
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    place = torch.device("cpu")
    if device == "cuda":
        place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(place)
    backend = "nccl" if device == "cuda" else "gloo"
    if size > 1:
        dist.init_process_group(backend, rank=rank, world_size=size, timeout=timedelta(minutes=10))
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield World(rank, size, place, init_device_mesh(device, (size,)))
    finally:
        dist.destroy_process_group()


def compute_dtype(precision: str, device: torch.device) -> torch.dtype:
    """`auto`: bfloat16 on CUDA, float32 on CPU. Parameters, optimiser and reductions are float32 in either case."""
    if precision == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]


def shard(model: nn.Module, world: World, dtype: torch.dtype, compile: bool) -> None:
    """Shard a model built on the meta device, in place: each of `model.blocks` is a unit, the rest (embedding, norm,
    output: tied weights must share a unit) belongs to the root. Storage is allocated but not filled."""
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in model.blocks:
        if compile:
            block.compile(dynamic=False)
        fully_shard(block, mesh=world.mesh, mp_policy=policy)
    fully_shard(model, mesh=world.mesh, mp_policy=policy)
    model.to_empty(device=world.device)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # gradients are summed, not averaged: the loss is already divided by the global number of targets. The
            # second call keeps gloo from being asked for PREMUL_SUM, which it does not have
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def gather_gradients(model: nn.Module, last: bool) -> None:
    """Reduce gradients only after the last micro-batch of a step."""
    model.set_requires_gradient_sync(last)


def clip(model: nn.Module, most: float) -> Tensor:
    """Scale the gradients to a global norm of at most `most`; returns the norm before, 0-d, equal on all ranks."""
    norm = nn.utils.clip_grad_norm_(model.parameters(), most)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm
