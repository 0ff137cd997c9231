"""Builds the optimiser of a training from its settings.

Every optimiser fulfils two conditions. It keeps only tensors in `.state[parameter]`, because checkpoints save these by
the parameter's name. And it can be told to cancel a step: if the 0-d device tensor `optimizer.found_inf` is not 0,
`step()` leaves parameters, moments and step counters unchanged. The host never reads this tensor, and so never waits
for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from trainer.base.config import ConfigError
from trainer.optim.config import OptimizerConfig
from trainer.optim.groups import grouped
from trainer.parallel.world import World


def build(config: OptimizerConfig, parameters: Iterable[tuple[str, nn.Parameter]], world: World,
          factor: Callable[[str], float] = lambda name: 1.0) -> torch.optim.Optimizer:
    """Build one optimiser for all of `parameters`, the pairs of `model.named_parameters()` (sharded or not).

    `factor` (`ModelConfig.rate`) takes a parameter's name and returns the factor that muP applies to its learning rate.
    It is not used with Muon's spectral scalings, whose updates already depend on the width. Raises ConfigError when an
    entry of `train.optimizer.groups` matches no parameter, or when muP has no rule for the optimiser.
    """
    pairs = list(parameters)
    rule = config.mup_rule()
    if rule == "unknown" and any(factor(name) != 1 for name, _ in pairs):
        raise ConfigError(f"train.model.mup: its rules are not for the relative rates of {config.kind}; use "
                          "another train.optimizer.kind")
    return config.build(grouped(config, pairs, (lambda name: 1.0) if rule == "inherent" else factor), world.device)


def skip_when(optimizer: torch.optim.Optimizer, found_inf: Tensor | None) -> None:
    """Make the next steps of the optimiser change nothing if `found_inf` (0-d, on the device) is not 0. With None,
    steps take effect unconditionally. The attribute `found_inf` of optimisers is a convention of torch's `GradScaler`;
    no type declares it."""
    optimizer.found_inf = found_inf  # type: ignore[attr-defined]


def describe(optimizer: torch.optim.Optimizer) -> str:
    """Return a table of the parameter groups as text, with each group's optimiser rule, peak learning rate and weight
    decay."""
    width = max(28, *(len(g["name"]) + 2 for g in optimizer.param_groups))
    lines = [f"{'group':<{width}}{'rule':<11}{'tensors':>8}{'parameters':>14}{'lr':>10}{'decay':>8}"]
    for g in optimizer.param_groups:
        rule = type(optimizer).__name__
        if g["role"] != "matrix":
            rule = getattr(optimizer, "REST", rule)
        lines.append(f"{g['name']:<{width}}{rule:<11}{len(g['params']):>8}{sum(p.numel() for p in g['params']):>14,}"
                     f"{g['peak']:>10.2g}{g['weight_decay']:>8.2g}")
    return "\n".join(lines)
