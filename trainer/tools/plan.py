"""`tokenmill train plan`: prints phases, sizes, memory and FLOPs of a training before it runs. The text comes from
`trainer.tools.sizes`."""

from __future__ import annotations

import argparse
import math
from typing import Any

from trainer.base.arguments import of_a_run, positive


def add_parser(commands: Any) -> None:
    plan = commands.add_parser("plan", parents=[of_a_run()],
                               description="Show what training would do, without doing it.")
    plan.add_argument("--ranks", type=positive, default=1, metavar="N", help="ranks (GPUs) to train on")
    plan.add_argument("--gpu", metavar="NAME", help="the device, e.g. H100 (default: this machine's, or H200)")
    plan.add_argument("--memory", metavar="SIZE", help="memory of a device, e.g. 141GB (default: that of --gpu)")
    plan.add_argument("--mfu", type=float, default=0.4, metavar="SHARE",
                      help="share of the device's peak that training reaches (default: 0.4)")
    plan.add_argument("--price", type=float, metavar="DOLLARS", help="price of a GPU for an hour")


def run(options: argparse.Namespace) -> int:
    import torch

    from trainer.base.config import ConfigError
    from trainer.loop.run import open_run
    from trainer.observe.mfu import PEAKS
    from trainer.tools.memory import MEMORY, device_named, parse_bytes
    from trainer.tools.sizes import Machine, plan

    if not 0 < options.mfu <= 1:
        raise ConfigError(f"--mfu {options.mfu:g}: a share of the peak, between 0 and 1")
    if options.price is not None and not 0 < options.price < math.inf:
        raise ConfigError(f"--price {options.price:g}: dollars of a GPU for an hour, more than 0")
    if options.gpu:
        name = device_named(options.gpu, PEAKS)
        memory = MEMORY.get(name)
    elif torch.cuda.is_available():
        name = torch.cuda.get_device_name()
        memory = float(torch.cuda.get_device_properties(0).total_memory)
    else:
        name, memory = Machine.name, Machine.memory
    machine = Machine(name, parse_bytes(options.memory) if options.memory else memory, PEAKS.get(name), options.mfu,
                      options.price)
    training = open_run(options.run, options.store, options.out, options.overrides)
    print(plan(training, options.ranks, machine, measured=True))
    return 0
