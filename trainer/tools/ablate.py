"""`tokenmill train ablate RUN --arm NAME KEY=VALUE … --arm … --seeds 3 [--tokens 50M]`: which setting is better?

Variations of a run (arms) are trained and compared by their held-out losses. An arm is the training of the run with
some settings under `train:` changed. The first arm, `base`, is the unchanged run, with which the other arms are
compared. All arms read the same number of tokens. A seed changes the initial values and the order of the data in all
arms alike, so that neither affects the differences between arms of one seed.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trainer.base.arguments import of_a_run, positive
from trainer.tools import experiment_arms

if TYPE_CHECKING:
    from tokenizer.mixture.curriculum import Curriculum

BASE = "base"


def add_parser(commands: Any) -> None:
    ablate = commands.add_parser("ablate", parents=[of_a_run()],
                                 description="Train variations of a run at equal tokens, with several seeds, and "
                                             "compare what they reach on the held-out data.")
    ablate.add_argument("--arm", required=True, nargs="+", action="append", metavar=("NAME", "KEY=VALUE"),
                        dest="arms", help="an arm: its name, and the keys of train: in which it differs")
    ablate.add_argument("--tokens", type=positive, metavar="N",
                        help="end after N tokens instead of the run's (e.g. 50M)")
    experiment_arms.add_arguments(ablate)


def run(options: argparse.Namespace) -> int:
    from trainer.base.config import ConfigError
    from trainer.loop.run import open_run

    arms: dict[str, list[str]] = {BASE: []}
    for name, *changes in options.arms:
        if not re.fullmatch(r"[\w.-]+", name) or name in arms:
            raise ConfigError(f"--arm {name}: arms have names of letters, digits, '-', '_' and '.', each its own")
        if not changes:
            raise ConfigError(f"--arm {name}: in what does it differ? --arm {name} optimizer.lr=0.002")
        arms[name] = changes
    base = open_run(options.run, options.store, options.out, options.overrides)
    result = []
    for name, changes in arms.items():
        for seed in range(options.seeds):
            out = base.out / "ablate" / f"{name}-seed{seed}"
            one = open_run(options.run, options.store, str(out), [*options.overrides, *changes])
            one = replace(one, config=replace(one.config, seed=one.config.seed + seed),
                          curriculum=shortened(one.curriculum, options.tokens, seed))
            one.schedule()
            result.append(experiment_arms.Arm(name, seed, one))
    return experiment_arms.perform(options, result)


def shortened(old: Curriculum, tokens: int | None, seed: int) -> Curriculum:
    """Return a changed copy of the curriculum `old`, for a short training. It ends at the last step that ends within
    `tokens` tokens (None: it is not shortened). If `seed` is not 0, the data is read in another order."""
    from tokenizer.mixture.curriculum import cut
    from tokenizer.mixture.order import Order
    from trainer.base.config import ConfigError

    samples, remaining = 0, tokens or old.tokens
    for phase in old.phases:
        for first, stop, batch in phase.stretches:
            steps = min((stop - first) // batch, remaining // (batch * phase.sequence))
            samples += steps * batch
            remaining = remaining - steps * batch * phase.sequence if steps == (stop - first) // batch else 0
    if not samples:
        raise ConfigError(f"--tokens {tokens:,}: the first step alone has "
                          f"{old.phases[0].batch_at(0) * old.phases[0].sequence:,} tokens")
    new = replace(old, seed=old.seed + seed, phases=tuple(cut(old, samples)), order="")
    new.validate()
    return replace(new, order=Order(new).hash())
