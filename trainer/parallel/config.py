"""Defines the settings of how the model is distributed over the ranks. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainer.base.config import ConfigError
from trainer.model.config import ModelConfig

Sharding = Literal["full", "grad", "hybrid", "none"]
Checkpointing = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class Every:
    """Activation checkpointing of some layers only: of every `every` consecutive layers, the first layer recomputes its
    activations in backward, and the other layers keep theirs."""

    every: int

    def check(self) -> None:
        if self.every < 1:
            raise ValueError("every must be at least 1")


@dataclass(frozen=True)
class ParallelConfig:
    """Settings of how the model is distributed over the ranks. Only `fp8` changes the losses by more than rounding.

    `shard` says what is divided over the data ranks:

    * `full` divides parameters, gradients and optimiser state (FSDP2, ZeRO-3).
    * `grad` does the same, but a layer's parameters stay gathered from its first forward in a step to the end of the
      step's last backward (ZeRO-2: faster, more memory).
    * `hybrid` is `full` within groups of `shard_size` data ranks (a node); the groups are copies of each other (HSDP).
    * `none` divides nothing: every rank holds everything, as in DDP.

    `tensor` is the number of ranks, within a node, that share every layer. They see the same samples and count as one
    data rank.

    `checkpointing` says which activations backward recomputes instead of keeping: `none`, `selective` (norms, RoPE,
    activation functions), `full` (whole layers) or `{every: k}` (one of every k layers).

    `accumulate` says where the gradients of a step's micro-batches are added up. With `sharded`, the gradients of every
    micro-batch are reduced, and a rank keeps its share. Copies of the model (`hybrid`, `none`) exchange gradients only
    after the last micro-batch. With `unsharded`, every rank keeps whole gradients (4 bytes per parameter) and reduces
    once per step.

    `offload` keeps sharded parameters, gradients and optimiser state in host memory. `fp8` computes the layers' matrix
    products in float8, except for matrices with a dimension that 16 does not divide. It needs torchao and a GPU of
    compute capability 8.9 or later (L40S, H100), and does not go with `tensor` > 1.
    """

    shard: Sharding = "full"
    shard_size: int = 0
    tensor: int = 1
    checkpointing: Checkpointing | Every = "none"
    accumulate: Literal["sharded", "unsharded"] = "sharded"
    offload: bool = False
    fp8: bool = False

    def check(self) -> None:
        if self.tensor < 1 or self.shard_size < 0:
            raise ValueError("tensor must be at least 1, shard_size at least 0")
        if (self.shard == "hybrid") != (self.shard_size > 0):
            raise ValueError("shard_size: N (ranks that share one copy, e.g. the GPUs of a node) goes with "
                             "shard: hybrid, and shard: hybrid with it")
        if self.fp8 and self.tensor > 1:
            raise ValueError("fp8 and tensor > 1 do not go together: torchao's layers know nothing of divided weights")

    def shape(self, ranks: int) -> dict[str, int]:
        """Return the sizes of the mesh in which `ranks` ranks are arranged: {dimension: size}. Raises ConfigError when
        the sizes in the settings do not divide `ranks`."""
        data, remainder = divmod(ranks, self.tensor)
        if remainder:
            raise ConfigError(f"train.parallel.tensor: {self.tensor} does not divide {ranks} ranks")
        size = {"hybrid": self.shard_size, "none": 1}.get(self.shard, data)
        if data % size:
            raise ConfigError(f"train.parallel.shard_size: {size} does not divide {data} data ranks ({ranks} ranks, "
                              f"tensor: {self.tensor})")
        shape = {"replicate": data // size} if self.shard in ("hybrid", "none") else {}
        return {**shape, "shard": size, **({"tensor": self.tensor} if self.tensor > 1 else {})}

    def refuse(self, model: ModelConfig) -> None:
        """Raise ConfigError if `model` cannot be divided over the ranks of a tensor group (`tensor` ranks that share
        every layer), for instance because its heads cannot be divided equally."""
        for key in ("heads", "kv_heads", "ffn", "width"):
            if getattr(model, key) % self.tensor:
                raise ConfigError(f"train.parallel.tensor: {self.tensor} does not divide train.model.{key} "
                                  f"({getattr(model, key)})")
