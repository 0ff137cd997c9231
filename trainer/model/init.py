"""Draws the initial value of every parameter from a random generator of its own.

The generator's seed depends only on the seed of the training and the name of the parameter. A value is drawn whole and
then sliced, so the model is the same for any world size, device and order of parameters. `nn.init` does not guarantee
this: on sharded parameters it draws the same numbers on every rank of a CPU mesh, and other numbers when the number of
ranks changes. SmolLM3 had to discard a training of a trillion tokens, because its tensor-parallel ranks shared a seed.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from trainer.model.config import ModelConfig, role
from trainer.model.tensor import fill


def parameter_seed(seed: int, name: str) -> int:
    """Return the seed of a parameter's random generator: 63 bits of the blake2b hash of the text 'seed/name'."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little") >> 1


def full_value(name: str, shape: torch.Size, config: ModelConfig, seed: int) -> Tensor:
    """Return the initial value of the whole parameter `name`, also if ranks hold only parts of it, as float32 on the
    CPU. The value depends only on the arguments, so it is the same on every machine."""
    kind = role(name)
    if kind == "vector":
        return torch.zeros(shape) if name.endswith(".bias") else torch.ones(shape)   # gains of norms start at 1
    std = config.init_std
    if kind == "matrix":
        std /= config.width_ratio ** 0.5
    if name.endswith((".o.weight", ".down.weight")):
        std /= (2 * config.layers) ** 0.5
    return torch.randn(shape, generator=torch.Generator().manual_seed(parameter_seed(seed, name))) * std


@torch.no_grad()
def initialise(model: nn.Module, config: ModelConfig, seed: int) -> None:
    """Fill all parameters of `model` with their initial values, in place. Parameters may be sharded (DTensor) or not.
    Each rank draws the whole of every parameter, one parameter at a time, and keeps its part."""
    for name, parameter in model.named_parameters():
        fill(parameter, full_value(name, parameter.shape, config, seed))
