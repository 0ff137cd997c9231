"""Optimisers: each module has a frozen config with its `kind` beside what it configures.

All of them keep tensors only in `.state[parameter]` (checkpoints save them by the parameter's name) and take
`optimizer.found_inf`: a 0-d device tensor that, if not 0, makes `step()` leave parameters, moments and step counters as
they were, without the host ever asking.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from trainer.base.config import ConfigError
from trainer.optim.adafactor import Adafactor, AdafactorConfig
from trainer.optim.adamw import AdamW, AdamWConfig
from trainer.optim.adamw8bit import AdamW8bit, AdamW8bitConfig
from trainer.optim.groups import grouped
from trainer.optim.lion import Lion, LionConfig
from trainer.optim.muon import Muon, MuonConfig
from trainer.parallel.world import World

#: one of them, chosen by `kind` (trainer.base.config); the first is the default
OptimizerConfig = AdamWConfig | LionConfig | MuonConfig | AdafactorConfig | AdamW8bitConfig


def build(config: OptimizerConfig, parameters: Iterable[tuple[str, nn.Parameter]], world: World,
          factor: Callable[[str], float] = lambda name: 1.0) -> torch.optim.Optimizer:
    """The optimiser over `model.named_parameters()` (sharded or not), one object whatever the kind.

    `factor` (`ModelConfig.rate`) is muP's on the rate of a parameter, by name: of optimisers that bring an update to a
    fixed size per entry. Muon's spectral scalings need none, they know the width by themselves.
    Raises ConfigError when an entry of `train.optimizer.groups` matches nothing.
    """
    named = list(parameters)
    spectral = isinstance(config, MuonConfig) and config.scaling != "moonlight"
    if isinstance(config, AdafactorConfig) and any(factor(name) != 1 for name, _ in named):
        raise ConfigError("train.model.mup: its rules are not for the relative rates of adafactor; use "
                          "train.optimizer.kind: adamw, lion or muon")
    groups = grouped(config, named, (lambda name: 1.0) if spectral else factor)
    match config:
        case AdamWConfig():
            return AdamW(groups, config)
        case LionConfig():
            return Lion(groups, config)
        case MuonConfig():
            return Muon(groups, config, world.device)
        case AdafactorConfig():
            return Adafactor(groups, config)
        case AdamW8bitConfig():
            return AdamW8bit(groups, config)


def describe(optimizer: torch.optim.Optimizer) -> str:
    """A table of the parameter groups: by which rule they learn, at which rate, and what decays."""
    width = max(28, *(len(g["name"]) + 2 for g in optimizer.param_groups))
    lines = [f"{'group':<{width}}{'rule':<11}{'tensors':>8}{'parameters':>14}{'lr':>10}{'decay':>8}"]
    for g in optimizer.param_groups:
        rule = "AdamW" if isinstance(optimizer, Muon) and g["role"] != "matrix" else type(optimizer).__name__
        lines.append(f"{g['name']:<{width}}{rule:<11}{len(g['params']):>8}{sum(p.numel() for p in g['params']):>14,}"
                     f"{g['peak']:>10.2g}{g['weight_decay']:>8.2g}")
    return "\n".join(lines)
