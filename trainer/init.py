"""Initial values: every parameter from a generator of its own.

A sharded `nn.init` draws the same numbers on every rank of a CPU mesh, and different ones for another number of ranks;
a shared seed over tensor-parallel ranks cost SmolLM3 a trillion tokens. Here a parameter is a function of (seed, name)
alone, drawn whole and then sliced, so the model is the same for any world size, device and order.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from trainer.model import ModelConfig


def parameter_seed(seed: int, name: str) -> int:
    """63 bits from blake2b of 'seed/name'."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little") >> 1


def full_value(name: str, shape: torch.Size, config: ModelConfig, seed: int) -> Tensor:
    """The whole initial tensor of the parameter `name`, float32 on the CPU (the same on every machine)."""
    if len(shape) < 2:
        return torch.ones(shape)                                                     # the gains of the norms
    std = config.init_std
    if name.endswith((".o.weight", ".down.weight")):
        std /= (2 * config.layers) ** 0.5
    return torch.randn(shape, generator=torch.Generator().manual_seed(parameter_seed(seed, name))) * std


@torch.no_grad()
def initialise(model: nn.Module, config: ModelConfig, seed: int) -> None:
    """Fill all parameters of `model` in place, sharded (DTensor) or not. Each rank draws full tensors, one by one."""
    for name, parameter in model.named_parameters():
        value = full_value(name, parameter.shape, config, seed)
        if isinstance(parameter, DTensor):
            # src_data_rank=None: every rank slices its own copy, nothing is sent
            value = value.to(parameter.device)
            value = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None).to_local()
            parameter.to_local().copy_(value)
        else:
            parameter.copy_(value)
