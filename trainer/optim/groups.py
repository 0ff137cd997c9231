"""Makes parameter groups, which decide the learning rate, the weight decay and the kind of update of each parameter.
Also has the base class of optimisers that work on sharded parameters (`MoveOptimizer`), and functions that they use."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainer.base.config import ConfigError
from trainer.model.config import Role, role
from trainer.model.tensor import local
from trainer.optim.config import OptimizerConfig

#: role of parameters → name of their group, in the order in which groups are printed
NAMES: dict[Role, str] = {"matrix": "matrices", "output": "output", "embedding": "embedding",
                          "vector": "norms and biases"}


def grouped(config: OptimizerConfig, parameters: Iterable[tuple[str, nn.Parameter]],
            factor: Callable[[str], float]) -> list[dict[str, Any]]:
    """Return the parameter groups of an optimiser, as torch.optim takes them. Each group has four additional keys:
    `name`, `role` (the role of its parameters in the model), `peak` (the learning rate that the schedule multiplies)
    and `weight_decay`.

    `factor` takes a parameter's name and returns the factor that muP applies to its learning rate. Raises ConfigError
    when an entry of `config.groups` (overrides by name) matches no parameter."""
    pairs = list(parameters)
    result: dict[tuple[str, float], dict[str, Any]] = {}
    rules = config.groups or ()
    for rule in rules:
        if not any(re.search(rule.match, name) for name, _ in pairs):
            raise ConfigError(f"train.optimizer.groups: match: {rule.match!r} matches no parameter; there are "
                              f"{', '.join(name for name, _ in pairs[:12])}{', …' if len(pairs) > 12 else ''}")
    for name, parameter in pairs:
        kind = role(name)
        label, rate = NAMES[kind], config.peak(kind) * factor(name)
        # a step shrinks a parameter by rate · decay; muP keeps this product (as in its authors' package `mup`)
        decay = config.weight_decay / factor(name) if kind in ("matrix", "output") else 0.0
        own = next((rule for rule in rules if re.search(rule.match, name)), None)
        if own is not None:
            label, rate = f"{label} /{own.match}/", rate * own.lr
            decay = decay if own.weight_decay is None else own.weight_decay
        group = result.setdefault((label, rate), {"name": label, "role": kind, "params": [], "weight_decay": decay,
                                                 "peak": rate, "lr": rate})
        group["params"].append(parameter)
    order = list(NAMES)
    return sorted(result.values(), key=lambda g: order.index(g["role"]))


def like(p: Tensor, x: Tensor, *shape: int) -> Tensor:
    """Make a tensor that is divided among the ranks like the parameter `p`, from `x`, this rank's part of it. `shape`
    is the shape of the whole tensor (default: that of `p`). If `p` is a plain tensor, the result is `x` itself,
    otherwise a DTensor."""
    return sharded_like(p, x, *shape) if isinstance(p, DTensor) else x


def sharded_like(p: DTensor, x: Tensor, *shape: int) -> DTensor:
    size = torch.Size(shape) if shape else p.shape
    return DTensor.from_local(x, p.device_mesh, p.placements, run_check=False, shape=size,
                              stride=torch.empty(size, device="meta").stride())


def performed(optimizer: torch.optim.Optimizer, device: torch.device) -> Tensor:
    """Return 1 if the present step of the optimiser takes effect, and 0 if the flag `optimizer.found_inf` cancels it.
    The result is 0-d float32 on `device`. Updates are multiplied by it, so that the host need not read the flag."""
    found_inf = getattr(optimizer, "found_inf", None)
    return torch.ones((), device=device) if found_inf is None else (found_inf == 0).float().reshape(()).to(device)


def gradients(params: Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients of parameters as plain tensors: of each gradient, the part that this rank holds. Parameters
    without a gradient are left out."""
    return [local(p.grad) for p in params if p.grad is not None]


class MoveOptimizer(torch.optim.Optimizer):
    """Base class of this trainer's own optimisers, which implement `move`. `step` calls `move` once per parameter
    group, with the parameters that have a gradient."""

    def __init__(self, groups: list[dict[str, Any]], config: OptimizerConfig) -> None:
        super().__init__(groups, {"lr": config.lr, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self.move(params, group["lr"], group["weight_decay"], performed(self, local(params[0]).device))

    def move(self, params: list[Tensor], lr: float, decay: float, go: Tensor) -> None:
        """Update `params`, the parameters of one group that have a gradient, and their state. `decay` is the weight
        decay. `go` is a 0-d tensor: 1, or 0 if the step is cancelled. A cancelled step must change nothing."""
        raise NotImplementedError
