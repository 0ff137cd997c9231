"""Implements Muon (K. Jordan 2024; Moonlight, arXiv 2502.16982). The update of a hidden matrix is its orthogonalised
momentum. Embedding, output, norms and biases learn by AdamW inside the same optimiser.

Orthogonalising needs the whole matrix, but FSDP2 gives a rank only some of its rows. Each matrix therefore gets an
owner, which is one of the ranks that share its rows. All matrices of one shape (in one parameter group) are handled
together:

* an all-to-all sends the owners their matrices;
* a batched Newton–Schulz iteration works on all matrices of an owner;
* a second all-to-all sends the rows back.

These are two collectives per shape and step, whatever the number of matrices; torch.optim.Muon on sharded parameters
needs more than ten per matrix. The work is divided among the ranks, and the momentum stays sharded. With hybrid
sharding, the copies of the model have equal gradients, and each copy does the same work.

There are no owners if tensor parallelism splits a matrix by columns, or if both it and FSDP2 split the matrix. Every
rank then gathers the whole matrix and does all the work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from trainer.model.config import Role
from trainer.model.tensor import local
from trainer.optim.adamw import AdamW
from trainer.optim.config import Moments, MupRule
from trainer.optim.groups import gradients, performed, sharded_like

#: coefficients of the quintic iteration (K. Jordan); it is steepest at 0, and singular values end between 0.7 and 1.2
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
#: largest number of matrices per call of the iteration, which bounds the memory of its intermediate products
BATCH = 8

#: factor on the update of a [rows, cols] matrix; the singular values of the update are about 1
SCALINGS: dict[str, Callable[[int, int], float]] = {
    "naive": lambda rows, cols: 1.0,
    "kellerjordan": lambda rows, cols: max(1.0, rows / cols) ** 0.5,
    "mup": lambda rows, cols: (rows / cols) ** 0.5,
    "moonlight": lambda rows, cols: 0.2 * max(rows, cols) ** 0.5,
}


@dataclass(frozen=True)
class MuonConfig(Moments):
    """Settings of Muon, which updates only the hidden matrices; the other parameters are updated by AdamW.

        lr        peak learning rate of the hidden matrices
        adamw_lr  peak learning rate of output, norms and biases, and of the embedding if `embedding_lr` is not given
                  (null: `lr`, which only `moonlight` permits)
        scaling   sets the size of updates. With `moonlight`, updates are as large as AdamW's, so rate and decay for
                  AdamW can be used. `kellerjordan`, `mup` (spectral: a rate found at one width holds at other widths)
                  and `naive` need an `lr` of about 0.02
        momentum  the share of the momentum that a step keeps
        nesterov  whether to orthogonalise a mean of gradient and momentum, in which the momentum has the weight
                  `momentum`, instead of the momentum itself
        steps     number of Newton–Schulz steps

    `betas` and `eps` are settings of AdamW.
    """

    kind: Literal["muon"] = "muon"
    adamw_lr: float | None = None
    scaling: Literal["moonlight", "kellerjordan", "mup", "naive"] = "moonlight"
    momentum: float = 0.95
    nesterov: bool = True
    steps: int = 5

    def check(self) -> None:
        super().check()
        if self.adamw_lr is None and self.scaling != "moonlight":
            raise ValueError(f"scaling: {self.scaling} has another unit than AdamW: give adamw_lr, the peak of what is "
                             f"no hidden matrix")
        if self.adamw_lr is not None and self.adamw_lr <= 0:
            raise ValueError("adamw_lr must be > 0")
        if not 0 <= self.momentum < 1 or self.steps < 1:
            raise ValueError("momentum must be in [0, 1), steps ≥ 1")

    def peak(self, role: Role) -> float:
        if role == "matrix":
            return self.lr
        other = self.lr if self.adamw_lr is None else self.adamw_lr
        return self.embedding_lr if role == "embedding" and self.embedding_lr is not None else other

    def mup_rule(self) -> MupRule:
        return "applies" if self.scaling == "moonlight" else "inherent"

    def state_bytes(self, parameters: int, matrices: int, width: int) -> float:
        return 8.0 * parameters - 4.0 * matrices

    def build(self, groups: list[dict[str, Any]], device: torch.device) -> Muon:
        return Muon(groups, self, device)


def newton_schulz(x: Tensor, steps: int) -> Tensor:
    """Orthogonalise each of the k matrices of x [k, rows, cols]: bring all its singular values near 1, i.e. turn
    U·S·Vᵀ into about U·Vᵀ. The result has x's dtype."""
    a, b, c = COEFFICIENTS
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Muon(AdamW):
    """The optimiser Muon. Parameter groups with the role "matrix" are updated by Muon, the other groups by AdamW. For a
    matrix p, `state[p]` has the key momentum, a tensor sharded like p.

    Matrices are exchanged and orthogonalised on `device`, also when parameters are offloaded to host memory. On a GPU
    this uses bfloat16, which is enough because the iteration corrects itself; on a CPU it uses float32, because half
    precision is slow there.
    """

    #: name of the update rule of groups that have another role than "matrix"
    REST = "AdamW"

    def __init__(self, groups: list[dict[str, Any]], config: MuonConfig, device: torch.device) -> None:
        super().__init__(groups, config)
        self.config, self.device = config, device
        self.dtype = torch.float32 if device.type == "cpu" else torch.bfloat16

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        every = self.param_groups
        self.param_groups = [g for g in every if g["role"] != "matrix"]
        try:
            super().step()
        finally:
            self.param_groups = every
        assigned = 0
        for group in every:
            alike: dict[Any, list[Tensor]] = {}
            for p in group["params"] if group["role"] == "matrix" else ():
                if p.grad is not None:
                    layout = (p.device_mesh, tuple(p.placements)) if isinstance(p, DTensor) else ()
                    alike.setdefault((p.shape, *layout), []).append(p)
            for params in alike.values():
                self._move(params, group["lr"], group["weight_decay"], assigned)
                assigned += len(params)

    def _move(self, params: list[Tensor], lr: float, decay: float, first: int) -> None:
        """Do one step of Muon for the matrices `params`, which have the same shape and are divided among ranks in the
        same way. `first` is the number of matrices to which this step has already assigned owners (the ranks that
        orthogonalise them)."""
        for p in params:
            if "momentum" not in self.state[p]:
                self.state[p]["momentum"] = torch.zeros_like(p)
        values = [local(p) for p in params]
        go = performed(self, values[0].device)
        momenta = [local(self.state[p]["momentum"]) for p in params]
        # a skipped step (`go` 0) interpolates the momentum with itself, which leaves it exactly unchanged
        inputs = [torch.where(go > 0, g, m) for g, m in zip(gradients(params), momenta)]
        torch._foreach_lerp_(momenta, inputs, 1 - self.config.momentum)
        directions = torch._foreach_lerp(inputs, momenta, self.config.momentum) if self.config.nesterov else momenta
        updates = self._orthogonal(params, [d.to(self.device, self.dtype) for d in directions], first)
        rows, cols = params[0].shape
        scale = lr * SCALINGS[self.config.scaling](rows, cols)
        torch._foreach_mul_(values, 1 - lr * decay * go)
        moves = torch._foreach_mul([u.to(v.device, v.dtype) for u, v in zip(updates, values)], -scale * go)
        torch._foreach_add_(values, moves)

    def _orthogonal(self, params: list[Tensor], parts: list[Tensor], first: int) -> list[Tensor]:
        """Orthogonalise matrices that are divided among ranks like `params`, or not divided. `parts` are this rank's
        parts of the matrices. Returns this rank's parts of the results. If each matrix is orthogonalised on one rank,
        the first matrix goes to rank `first` modulo the number of ranks, and each further one to the next rank."""
        p = params[0]
        if not isinstance(p, DTensor):
            return list(self._iterate(torch.stack(parts)).unbind())
        split = [i for i, place in enumerate(p.placements) if not place.is_replicate() and p.device_mesh.size(i) > 1]
        if not split:
            return list(self._iterate(torch.stack(parts)).unbind())
        place = p.placements[split[0]]
        if len(split) == 1 and type(place) is Shard and place.dim == 0:
            return self._through_owners(parts, p.shape[0], p.device_mesh.get_group(split[0]), first)
        # matrices are split along two mesh dimensions (tensor parallelism) or along columns, so every rank gathers them
        # and does all the work
        matrices = torch.stack([sharded_like(p, part).full_tensor() for part in parts])
        return [distribute_tensor(u, p.device_mesh, p.placements, src_data_rank=None).to_local()
                for u in self._iterate(matrices)]

    def _through_owners(self, parts: list[Tensor], rows: int, group: dist.ProcessGroup, first: int) -> list[Tensor]:
        """Orthogonalise matrices of `rows` rows, each on one rank of `group` (its owner). Each of `parts` [r, cols] has
        this rank's rows of one matrix, divided as by torch.chunk (the last ranks may have none). Returns the same rows
        of the orthogonalised matrices. The first matrix goes to rank `first` modulo the number of ranks, and each
        further one to the next rank."""
        size, rank, cols = group.size(), group.rank(), parts[0].shape[1]
        share = -(-rows // size)
        heights = [max(0, min(share, rows - r * share)) for r in range(size)]
        owned = [range((r - first) % size, len(parts), size) for r in range(size)]
        own_rows, own_matrices = heights[rank], len(owned[rank])
        by_owner = [len(indices) * own_rows * cols for indices in owned]
        by_rows = [own_matrices * height * cols for height in heights]
        send = torch.cat([parts[i].flatten() for indices in owned for i in indices])
        received = send.new_empty(sum(by_rows))
        dist.all_to_all_single(received, send, by_rows, by_owner, group=group)
        matrices = torch.cat([x.view(own_matrices, height, cols)
                              for x, height in zip(received.split(by_rows), heights)], 1)
        matrices = self._iterate(matrices)
        back = torch.cat([x.flatten() for x in matrices.split(heights, 1)])
        returned = torch.empty_like(send)
        dist.all_to_all_single(returned, back, by_owner, by_rows, group=group)
        out: dict[int, Tensor] = {}
        for indices, x in zip(owned, returned.split(by_owner)):
            out.update(zip(indices, x.view(len(indices), own_rows, cols)))
        return [out[i] for i in range(len(parts))]

    def _iterate(self, matrices: Tensor) -> Tensor:
        if not len(matrices):
            return matrices
        return torch.cat([newton_schulz(batch, self.config.steps) for batch in matrices.split(BATCH)])
