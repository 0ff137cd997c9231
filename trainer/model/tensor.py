"""Implements tensor parallelism within a node (a machine), with parameters split as in Megatron-LM (arXiv 1909.08053).

Heads and hidden units are divided among the ranks of a tensor group (the ranks that share every layer). The residual
stream is whole and equal on all of them. `enter` and `leave` are Megatron's f and g. The embedding is split along its
width, so the vocabulary size need not be divisible. For the loss, each rank has the whole output matrix and a share of
the tokens. Thus any loss function works unchanged, and no token's loss is computed twice.

A parameter is a DTensor over the mesh dimension `tensor`, split according to `PLAN`. FSDP2 splits it once more over the
data ranks (a 2-D mesh); during forward it is again a DTensor over `tensor` alone. The computation itself uses plain
tensors. Without tensor parallelism, parameters are plain tensors in forward, and functions such as `enter` and `leave`
return their input.

Ranks cannot get the same random shard from a shared seed: trainer.model.init draws whole values and slices them.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

#: (suffixes of parameter names, placement over the tensor group, explanation)
PLAN: tuple[tuple[tuple[str, ...], Placement, str], ...] = (
    (("embed.weight", "head.weight"), Shard(1), "columns: a share of the width; gathered after the look-up"),
    (("attention.q.weight", "attention.k.weight", "attention.v.weight", "attention.q.bias", "attention.k.bias",
      "attention.v.bias"), Shard(0), "rows: whole heads"),
    (("attention.o.weight",), Shard(1), "columns: the same heads; sums are all-reduced"),
    (("mlp.gate.weight", "mlp.up.weight"), Shard(0), "rows: a share of the hidden units"),
    (("mlp.down.weight",), Shard(1), "columns: the same units; sums are all-reduced"),
    (("norm.weight",), Replicate(), "on every rank"),
)


def placement(name: str) -> Placement:
    """Return how the parameter `name` is divided among a tensor group (the ranks that share every layer). Raises
    ValueError if PLAN, the table of such divisions, has no entry for the name."""
    for endings, how, _ in PLAN:
        if name.endswith(endings):
            return how
    raise ValueError(f"tensor parallelism has no plan for the parameter {name}: trainer/model/tensor.py, PLAN")


def split(model: nn.Module, mesh: DeviceMesh) -> None:
    """Divide every parameter of `model` among the ranks of `mesh`, as the table PLAN says: each becomes a DTensor over
    this one-dimensional mesh. The model must be on the meta device. Raises ValueError if a dimension does not divide by
    the number of ranks."""
    for name, parameter in list(model.named_parameters()):
        owner = model.get_submodule(name.rpartition(".")[0])
        how = placement(name)
        if isinstance(how, Shard) and parameter.shape[how.dim] % mesh.size():
            raise ValueError(f"{name} {tuple(parameter.shape)}: dimension {how.dim} does not divide by {mesh.size()}")
        distributed = nn.Parameter(distribute_tensor(parameter.detach(), mesh, [how], src_data_rank=None))
        setattr(owner, name.rpartition(".")[2], distributed)


@torch.no_grad()
def fill(parameter: Tensor, value: Tensor) -> None:
    """Copy `value` into `parameter`, in place. `value` is the whole tensor, the same on every rank. If `parameter` is a
    DTensor, only this rank's part is copied. No communication takes place.

    Tensor parallelism and FSDP2 may divide the same dimension of a tensor. FSDP2 then divides each part of the tensor
    group (the ranks that share every layer) over the data ranks, although the mesh lists the data ranks first. This
    function divides in the same order.
    """
    if not isinstance(parameter, DTensor):
        parameter.copy_(value)
        return
    mesh = parameter.device_mesh
    names = mesh.mesh_dim_names or ()
    for i in sorted(range(mesh.ndim), key=lambda i: names[i] != "tensor"):
        dim = getattr(parameter.placements[i], "dim", None)
        if dim is not None:
            parts = value.chunk(mesh.size(i), dim)
            at = mesh.get_local_rank(i)
            value = parts[at] if at < len(parts) else value.narrow(dim, 0, 0)
    parameter.to_local().copy_(value)


def copies(x: Tensor) -> int:
    """Return how many ranks hold a copy of each element of `x`; 1 for a plain tensor."""
    if not isinstance(x, DTensor):
        return 1
    return math.prod(size for size, how in zip(x.device_mesh.shape, x.placements) if how.is_replicate())


def local(weight: Tensor, gradient: Placement | None = None) -> Tensor:
    """Return this rank's part of a parameter, as a plain tensor for use in forward. `gradient` says how the gradient is
    placed over the tensor group (the ranks that share every layer); None means like the parameter."""
    if not isinstance(weight, DTensor):
        return weight
    return weight.to_local(grad_placements=None if gradient is None else (gradient,))


def full(x: Tensor) -> Tensor:
    """Return the whole value of a parameter, which may be divided among ranks, on every rank."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def replicated(weight: Tensor) -> Tensor:
    """Return the whole parameter on every rank of the tensor group (the ranks that share every layer), as a plain
    tensor for use in forward. In backward the gradients of the group's ranks are summed. If `weight` is not divided, it
    is returned unchanged."""
    if not isinstance(weight, DTensor):
        return weight
    return weight.redistribute(placements=[Replicate()]).to_local(grad_placements=(Partial(),))


def enter(x: Tensor, weight: Tensor) -> Tensor:
    """Begin a computation that is divided over ranks as `weight` is (Megatron's f). `x` must be whole on each rank.
    Forward returns `x` unchanged; backward sums the gradients of all ranks. If `weight` is not divided, `x` is
    returned."""
    if not isinstance(weight, DTensor):
        return x
    inside = DTensor.from_local(x, weight.device_mesh, (Replicate(),), run_check=False)
    return inside.to_local(grad_placements=(Partial(),))


def leave(x: Tensor, weight: Tensor) -> Tensor:
    """End a computation that is divided over ranks as `weight` is (Megatron's g). The result is the sum of the `x` of
    all ranks. Forward returns the sum on every rank; backward passes the gradient on unchanged. If `weight` is not
    divided, `x` is returned."""
    return _to_replicate(x, weight, Partial())


def gather(x: Tensor, weight: Tensor) -> Tensor:
    """Concatenate `x` [..., d / N] of the N ranks over which `weight` is divided. Returns [..., d] on every rank.
    Backward gives each rank its slice of the gradient."""
    return _to_replicate(x, weight, Shard(x.ndim - 1))


def _to_replicate(x: Tensor, weight: Tensor, how: Placement) -> Tensor:
    if not isinstance(weight, DTensor):
        return x
    placed = DTensor.from_local(x, weight.device_mesh, (how,), run_check=False)
    return placed.redistribute(placements=[Replicate()]).to_local()


def share(x: Tensor, weight: Tensor) -> Tensor:
    """Return this rank's block of consecutive rows of `x` [N, ...], whose rows are divided among the ranks over which
    `weight` is divided. `x` must be equal on all ranks. Backward gathers the gradients of all blocks."""
    if not isinstance(weight, DTensor):
        return x
    placed = DTensor.from_local(x, weight.device_mesh, (Replicate(),), run_check=False)
    return placed.redistribute(placements=[Shard(0)]).to_local()


def together(share: Tensor, rows: int, weight: Tensor) -> Tensor:
    """Combine the results of ranks that each worked on their own block of rows (see the function `share`). Results with
    a row for each row of the block become `rows` rows, those of all blocks. 0-d results are summed. Every rank gets the
    combined result, which has no gradient."""
    if not isinstance(weight, DTensor):
        return share
    if share.ndim == 0:
        return DTensor.from_local(share.detach(), weight.device_mesh, (Partial(),), run_check=False).full_tensor()
    shape = torch.Size((rows, *share.shape[1:]))
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(share.detach(), weight.device_mesh, (Shard(0),), run_check=False, shape=shape,
                              stride=strides).full_tensor()


class Linear(nn.Linear):
    """A variant of nn.Linear for tensor parallelism: weight [out, in] and bias [out] are divided among ranks, and
    forward computes with this rank's part."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, local(self.weight), None if self.bias is None else local(self.bias))


class Embedding(nn.Embedding):
    """A variant of nn.Embedding for tensor parallelism: each rank holds a share of the columns. The look-ups of all
    ranks are concatenated, so that every rank returns whole embeddings."""

    def forward(self, tokens: Tensor) -> Tensor:
        return gather(F.embedding(tokens, local(self.weight)), self.weight)
