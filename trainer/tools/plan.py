"""`tokenmill train plan`: what `trainer.plan` computes, printed."""

from __future__ import annotations

import argparse
from typing import Any

from trainer.arguments import of_a_run, positive


def add_parser(commands: Any) -> None:
    plan = commands.add_parser("plan", parents=[of_a_run()],
                               description="Show what training would do, without doing it.")
    plan.add_argument("--ranks", type=positive, default=1, metavar="N", help="ranks the state is sharded over")


def run(options: argparse.Namespace) -> int:
    from trainer.plan import plan
    from trainer.run import open_run

    print(plan(open_run(options.run, options.store, options.out, options.overrides), options.ranks))
    return 0
