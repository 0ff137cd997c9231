"""Sets up processes, devices, meshes and sharding. A single process uses FSDP2 over a mesh too, so that there is one
code path. Tensor parallelism (trainer/model/tensor.py) is one more dimension of the mesh.

A process group is described by the environment variables RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT,
which torchrun, Slurm and the launchers in trainer/launch set. Without these variables the process is alone. The mesh is
(replicate, shard, tensor). Neighbouring ranks are in the same `tensor` group, which should not be larger than the
number of GPUs in a node.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from trainer.base.config import ConfigError
from trainer.model import tensor
from trainer.model.transformer import Transformer
from trainer.parallel.config import Every, ParallelConfig

#: operators whose results selective checkpointing keeps: matrix products, attention and collectives. All others (norms,
#: RoPE, activation functions) are cheap to recompute. Names that this torch does not have are ignored
KEPT = ("aten.mm", "aten.addmm", "aten.bmm", "aten._scaled_mm", "aten._scaled_dot_product_flash_attention",
        "aten._scaled_dot_product_efficient_attention", "aten._scaled_dot_product_cudnn_attention",
        "aten._scaled_dot_product_flash_attention_for_cpu", "aten._flash_attention_forward", "torch_attn._varlen_attn",
        "_c10d_functional.all_reduce", "_c10d_functional.all_gather_into_tensor")


@dataclass(frozen=True)
class World:
    """The ranks of a training and how they are arranged in a mesh. With tensor parallelism, the ranks of a tensor group
    share every layer and read the same samples, so the group counts as one data rank."""

    rank: int
    size: int
    device: torch.device
    parallel: ParallelConfig
    mesh: DeviceMesh                     # ([replicate,] shard[, tensor])

    @property
    def first(self) -> bool:
        """Whether this process is rank 0, which writes the shared files and prints."""
        return self.rank == 0

    def describe(self) -> str:
        """Return the number of ranks and their arrangement as text, for instance '16 ranks on cuda (replicate 2 × shard
        4 × tensor 2)'."""
        shape = " × ".join(f"{name} {n}" for name, n in self.parallel.shape(self.size).items())
        return (f"{self.size} rank{'s' if self.size > 1 else ''} on {self.device.type}"
                + (f" ({shape})" if self.size > 1 else ""))

    @property
    def data_rank(self) -> int:
        """Return the number of this rank's tensor group. The ranks of a tensor group share every layer and read the
        same samples; different groups read different samples."""
        return self.rank // self.parallel.tensor

    @property
    def data_size(self) -> int:
        return self.size // self.parallel.tensor

    @property
    def data_mesh(self) -> DeviceMesh:
        """The part of the mesh of ranks over which FSDP2 divides the model: its dimensions (shard) or (replicate,
        shard). The dimension of tensor parallelism is left out."""
        names = tuple(n for n in self.mesh.mesh_dim_names or () if n != "tensor")
        return self.mesh[names]

    def sum(self, x: Tensor) -> Tensor:
        """Sum `x` over data ranks, in place. The ranks of a tensor group (ranks that share every layer) have the same
        samples, so only the value of the first of them counts. All ranks take part in one sum, so that they get the
        same bits and make the same decisions."""
        if self.rank % self.parallel.tensor:
            x.zero_()
        dist.all_reduce(x)
        return x

    def max(self, x: Tensor) -> Tensor:
        """Replace each element of `x` by its maximum over all ranks, in place."""
        dist.all_reduce(x, dist.ReduceOp.MAX)
        return x

    def broadcast(self, data: bytes) -> bytes:
        """Return rank 0's `data` on every rank. On all ranks `data` must have the same length."""
        x = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.device)
        dist.broadcast(x, 0)
        return bytes(x.cpu().tolist())


def check_device(device: str) -> None:
    """Raise ConfigError if `device` is cuda and torch sees no GPU. Commands call this before they read, fetch or start
    anything."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no CUDA device; use --device cpu, or a CUDA build of torch")


@contextmanager
def world(device: str) -> Iterator[World]:
    """Make this process a member of the process group of a training (gloo on CPU, NCCL on CUDA) within a context.
    `device` is auto, cpu or cuda. Yields a World in which the model is divided over all ranks; `arrange` makes a World
    with another arrangement. Raises ConfigError when torch sees no GPU for this rank."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    check_device(device)
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    place = torch.device("cpu")
    if device == "cuda":
        place, gpus = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))), torch.cuda.device_count()
        if place.index >= gpus:
            raise ConfigError(f"rank {rank} is number {place.index + 1} on this machine, where torch sees {gpus} GPUs"
                              f": start one rank a GPU, or see what CUDA_VISIBLE_DEVICES hides")
        torch.cuda.set_device(place)
    # on CUDA, gloo serves CPU tensors: those that are offloaded, and checkpoints written in the background
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    if size > 1:
        dist.init_process_group(backend, rank=rank, world_size=size, timeout=timedelta(minutes=10))
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield arrange(rank, size, place, ParallelConfig())
    except SystemExit:               # all ranks stop after the same step
        dist.destroy_process_group()
        raise
    except BaseException:
        # the other ranks wait in a collective. Destroying the group would hang, because with NCCL that is a collective
        # too. Abort instead, as torch asks after a failure; this process ends, and its launcher ends the other ranks
        dist.distributed_c10d._abort_process_group()
        raise
    dist.destroy_process_group()


def arrange(rank: int, size: int, device: torch.device, parallel: ParallelConfig) -> World:
    """Return a World for a training on `size` ranks, of which this process is number `rank`. Its mesh is the one that
    the settings `parallel` describe. Every rank must call this."""
    shape = parallel.shape(size)
    mesh = init_device_mesh(device.type, tuple(shape.values()), mesh_dim_names=tuple(shape))
    return World(rank, size, device, parallel, mesh)


def arranged(world: World, parallel: ParallelConfig) -> World:
    """Return a World with the ranks of `world`, arranged in the mesh that the settings `parallel` describe. Every rank
    must call this."""
    return world if parallel == world.parallel else arrange(world.rank, world.size, world.device, parallel)


def compute_dtype(precision: str, device: torch.device) -> torch.dtype:
    """Return the dtype of matrix products for the setting `precision` (auto, fp32 or bf16). `auto` is bfloat16 on CUDA
    and float32 on CPU. Parameters, optimiser and reductions are float32 with every setting."""
    if precision == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]


def compiles(choice: bool | str, device: torch.device) -> bool:
    """Return whether layers are to be compiled. `choice` is the setting: True, False or auto. `auto` compiles on CUDA
    if Triton is installed, because torch.compile fails without it."""
    if choice == "auto":
        return device.type == "cuda" and importlib.util.find_spec("triton") is not None
    return bool(choice)


def shard(model: Transformer, world: World, dtype: torch.dtype, compile: bool) -> None:
    """Divide `model`, which was built on the meta device, among the ranks, in place, by the settings of
    `world.parallel`. Each of `model.blocks` is an FSDP unit. Embedding, norm and output belong to the root, because
    tied weights must be in one unit. Storage is allocated but not filled. The order of the operations matters: tensor
    group, float8, checkpointing, compile, FSDP2."""
    parallel = world.parallel
    if parallel.tensor > 1:
        parallel.refuse(model.config)
        tensor.split(model, world.mesh["tensor"])
    if parallel.fp8:
        float8(model, world.device)
    # reductions are set to float32, because the meaning of None changed in torch 2.15
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    offload = CPUOffloadPolicy(pin_memory=world.device.type == "cuda") if parallel.offload else OffloadPolicy()
    options: dict[str, Any] = {"mesh": world.data_mesh, "mp_policy": policy, "offload_policy": offload,
                               "reshard_after_forward": False if gathered(parallel) else None}
    for i, block in enumerate(model.blocks):
        if compile and parallel.tensor > 1:      # collectives cannot be recomputed inside a graph (torch 2.13)
            block.forward = torch.compile(block.forward, dynamic=False)
        recompute(block, i, parallel.checkpointing)
        if compile and parallel.tensor == 1:     # the graph includes the recomputation, but not FSDP's hooks
            block.forward = torch.compile(block.forward, dynamic=False)
        fully_shard(block, **options)
    model.compiled = compile
    if compile:
        # there is one graph for every sequence length, number of rows and padded number of documents, with and without
        # gradients and RoPE; beyond the limit (8 by default) torch silently runs uncompiled
        torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    fully_shard(model, **options)
    model.to_empty(device="cpu" if parallel.offload else world.device)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # gradients are summed, not averaged, because the loss is already divided by the global number of targets.
            # The second call avoids PREMUL_SUM, which gloo does not have
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def uncompiled(model: Transformer) -> AbstractContextManager[Any]:
    """Return a context in which compiled layers run uncompiled. It is meant for shapes of tensors that occur only once
    and are not worth compiling for."""
    return torch.compiler.set_stance("force_eager") if model.compiled else nullcontext()


def gathered(parallel: ParallelConfig) -> bool:
    """Return whether the setting `parallel.shard` keeps the whole parameters of layers in memory between micro-batches:
    from the first forward of a step to the end of its last backward. Otherwise, each layer's parameters are gathered
    twice for each micro-batch, in forward and in backward."""
    return parallel.shard in ("grad", "none")


def recompute(block: nn.Module, layer: int, how: str | Every) -> None:
    """Make backward recompute activations of `block` instead of keeping them. `how` is the setting
    `parallel.checkpointing`: none, selective (only cheap operations are recomputed), full (all operations), or every k
    layers (all operations in one of k layers). `layer` is the number of the block."""
    if how == "none" or (isinstance(how, Every) and layer % how.every):
        return
    forward = block.forward
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if how == "selective":
        options["context_fn"] = _selective

    def checkpointed(*inputs: Any) -> Any:
        return checkpoint(forward, *inputs, **options)

    # an attribute, not a wrapper module, because the names of parameters must not change (initial values, checkpoints)
    block.forward = checkpointed


def _selective() -> Any:
    saved = {getattr(getattr(torch.ops, space), name).default for space, name in (k.split(".") for k in KEPT)
            if hasattr(getattr(torch.ops, space), name)}

    def policy(_context: Any, operator: Any, *_args: Any, **_options: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def float8(model: nn.Module, device: torch.device) -> None:
    """Make torchao compute the layers' matrix products in float8, by changing `model` in place. Matrices with a
    dimension that 16 does not divide stay in the compute dtype. Raises ConfigError if torchao is not installed, or if
    `device` is no GPU of compute capability 8.9 or later."""
    try:
        from torchao.float8 import convert_to_float8_training
    except ImportError:
        raise ConfigError("train.parallel.fp8: needs the package torchao; pip install torchao, or take the key "
                          "out") from None
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        raise ConfigError("train.parallel.fp8: needs a GPU of compute capability 8.9 or later (L40S, H100, H200, B200)")
    convert_to_float8_training(model, module_filter_fn=lambda layer, name: name.startswith("blocks.") and not (
        layer.in_features % 16 or layer.out_features % 16))


def reshard(model: nn.Module) -> None:
    """Free the whole parameters that a forward without backward leaves in memory. As long as they are there,
    `named_parameters` does not return the sharded ones. They are the parameters of the root module and, with `shard:
    grad` or `none`, those of all layers."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def gather_gradients(model: nn.Module, world: World, last: bool) -> None:
    """Set how the gradients of the next micro-batch are reduced over ranks in backward, according to the setting
    `accumulate`. `last` is whether this micro-batch is the last of its step."""
    if not isinstance(model, FSDPModule):
        raise TypeError(f"{type(model).__name__} is not sharded yet: call `shard` first")
    deferred = world.parallel.accumulate == "unsharded"
    model.set_requires_gradient_sync(last or not deferred)
    model.set_requires_all_reduce(last)  # controls the sum over copies; the call before controls the sum over shards
    if gathered(world.parallel):
        model.set_reshard_after_backward(last)       # nothing changes the parameters between micro-batches


@torch.no_grad()
def clip(model: nn.Module, most: float, world: World) -> Tensor:
    """Scale all gradients of the model down if their global norm is greater than `most`. Returns the norm before
    scaling, 0-d float32 on the device. It is equal on all ranks, and NaN if any gradient is. Gradients that several
    ranks hold as copies (hybrid sharding, gains of norms in a tensor group) count once."""
    by_copies: dict[int, list[Tensor]] = {}
    for parameter in model.parameters():
        if parameter.grad is not None:
            by_copies.setdefault(tensor.copies(parameter.grad), []).append(tensor.local(parameter.grad))
    # only device tensors are used, because sending a number from the host would make the host wait
    squares = [torch.stack(torch._foreach_norm(group)).float().square().sum() / copies
               for copies, group in by_copies.items()]
    total = functools.reduce(torch.add, squares).to(world.device)
    dist.all_reduce(total)
    norm = total.sqrt()
    for group in by_copies.values():
        torch._foreach_mul_(group, (most / (norm + 1e-6)).clamp(max=1.0).to(group[0].device))
    return norm
