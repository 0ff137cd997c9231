"""`tokenmill train ablate`: which setting, or which data, is better?

Variations of a training (arms) are compared by their held-out losses. All arms read the same number of tokens, or of
bytes if their tokenizers differ. A seed changes the initial values and the order of the data in all arms alike, so that
neither affects the differences between arms of one seed.

* `ablate RUN --arm NAME KEY=VALUE …`: an arm is the training of the run with some settings under `train:` changed. The
  first arm, `base`, is the unchanged run, with which the other arms are compared.
* `ablate RUN RUN …`: an arm is a run, with its own curriculum and shards. All are trained with the settings of the
  first run.
* `ablate --data RECIPE …`: each recipe, or variant of a recipe, is first made into a run. Then the runs are compared as
  above. This needs the pipeline, and is done by `pipeline.study`.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from trainer.base.arguments import of_a_run, positive
from trainer.tools import experiment_arms
from trainer.tools.arm import arm_of, settings_of
from trainer.tools.arm_table import BITS, NATS, TASKS
from trainer.tools.arm_tasks import check_config, too_few

if TYPE_CHECKING:
    from tokenizer.mixture.curriculum import Curriculum
    from tokenizer.mixture.phases import Phase
    from trainer.loop.run import Run
    from trainer.tools.arm import Arm

BASE = "base"


def add_parser(commands: Any) -> None:
    ablate = commands.add_parser("ablate", parents=[of_a_run(several=True)],
                                 description="Train variations of a run, or runs with different data, at equal tokens "
                                             "with several seeds, and compare what they reach on held-out data.")
    ablate.add_argument("--arm", nargs="+", action="append", metavar=("NAME", "KEY=VALUE"), default=[],
                        dest="arms", help="an arm: its name, and the keys of train: in which it differs")
    ablate.add_argument("--tokens", type=positive, metavar="N",
                        help="end after N tokens instead of the run's (e.g. 50M)")
    ablate.add_argument("--on", metavar="STREAM", help="judge by the held-out data of this stream, in bits per byte "
                                                       "(default: of all streams that hold out the same in all arms)")
    ablate.add_argument("--widths", metavar="W,W,…", help="train every arm with models of these widths; the settings "
                                                          "are those of the smallest, or of the width model.mup (muP)")
    experiment_arms.add_arguments(ablate)
    data = experiment_arms.add_data_arguments(ablate, "compare the data of these recipes, which run as one plan")
    data.add_argument("--held-out", nargs="+", metavar="DATASET|FILE",
                      help="text by which variants are judged: a dataset of the recipe, or files; nothing of it is "
                           "trained on")
    data.add_argument("--tokenizers", action="store_true", help="let each variant make its own tokenizer, and read "
                                                                "equal numbers of bytes")


def run(options: argparse.Namespace) -> int:
    from pathlib import Path

    from trainer.base.config import ConfigError
    from trainer.loop.run import open_run

    if options.data or options.vary:
        raise ConfigError(experiment_arms.NEEDS_PIPELINE)
    if not options.runs or (options.arms and len(options.runs) > 1) or not (options.arms or len(options.runs) > 1):
        raise ConfigError("what is compared? A RUN with at least one --arm NAME KEY=VALUE, or several RUNs, or --data "
                          "RECIPE RECIPE")
    bases = [open_run(one, options.store, options.out, options.overrides) for one in options.runs]
    if options.arms:
        variants = [(name, bases[0], changes) for name, changes in arms_of(options.arms).items()]
    else:
        variants = [(name, base, []) for name, base in zip(names_of(options.runs), bases)]
    folder = (Path(options.out) if options.out else bases[0].out) / "ablate"
    budgets = tokens_of([base for _, base, _ in variants], options.tokens)
    result = []
    for width in widths_of(options.widths):
        for (name, base, changes), tokens in zip(variants, budgets):
            settings = settings_of(bases[0], [*options.overrides, *changes])
            if width is not None:
                settings["model"] = scaled(settings, width, widths_of(options.widths)[0] or 0)
            for seed in range(options.seeds):
                curriculum = shortened(base.curriculum, tokens, seed)
                seeded = {**settings, "seed": settings.get("seed", 0) + seed}
                result.append(arm_of(base, name, seed, seeded, curriculum, folder, width))
    if len(set(budgets)) == 1 and len({arm.run.curriculum.tokens for arm in result}) > 1:
        raise ConfigError("the runs have steps of different sizes, so that they cannot read equal numbers of tokens; "
                          "give their phases the same sequence and batch")
    unit = BITS if options.on or len(bases) > 1 else NATS
    return experiment_arms.perform(options, result, sources=source_of(options.on, result), unit=unit)


def source_of(stream: str | None, arms: Sequence[Arm]) -> dict[str, list[str]] | None:
    """Return the source that --on asks for, {stream: [stream]}; None if `stream` is None, because --on is not given. A
    source is a row of the table that compares the arms of a study, with its streams. Raises ConfigError when an arm has
    no held-out data of the stream."""
    from trainer.base.config import ConfigError

    if stream is None:
        return None
    for arm in arms:
        names = experiment_arms.held_out(arm.run.curriculum)
        if stream not in names:
            raise ConfigError(f"--on {stream}: the arm {arm.name} has no held-out data of this stream; it has some of: "
                              f"{', '.join(names) or 'none'}")
    return {stream: [stream]}


def check_recipe(options: argparse.Namespace, settings: Mapping[str, Any], phases: Sequence[Phase]) -> None:
    """Check the options of `ablate --data` before the data of the study is made. `settings` is the section `train:` of
    the recipe, and `phases` are those of its curriculum. Raises ConfigError for options that cannot be used."""
    from trainer.base.config import ConfigError, build
    from trainer.loop.config import TrainConfig

    step = phases[0].batch_at(0) * phases[0].sequence
    if options.tokens and options.tokens < step:
        raise ConfigError(f"--tokens {options.tokens:,}: the first step alone has {step:,} tokens")
    widths = [width for width in widths_of(options.widths) if width is not None]
    for width in widths:
        scaled(settings, width, widths[0])
    experiment_arms.refuse_contradictions(options)
    tasks = build(TrainConfig, settings, "train").evaluate.tasks
    check_config(tasks, options.by)
    if tasks is not None and options.by == TASKS and (message := too_few(tasks, phases)):
        raise ConfigError(f"--by tasks: {message}")


def arms_of(given: Sequence[Sequence[str]]) -> dict[str, Sequence[str]]:
    """Parse the values of `--arm`, each a name and the settings that the arm (a training to compare) changes. Returns
    {name of the arm: its changed settings}. The first arm is `base`, the unchanged training. Raises ConfigError for a
    name that cannot be used, and for an arm without changes."""
    from trainer.base.config import ConfigError

    arms: dict[str, Sequence[str]] = {BASE: []}
    for name, *changes in given:
        if not re.fullmatch(r"[\w.-]+", name) or name in arms:
            raise ConfigError(f"--arm {name}: arms have names of letters, digits, '-', '_' and '.', each its own")
        if not changes:
            raise ConfigError(f"--arm {name}: in what does it differ? --arm {name} optimizer.lr=0.002")
        arms[name] = changes
    return arms


def names_of(runs: Sequence[str]) -> list[str]:
    """Return the names under which `runs` are compared: the last part of each path. If all are variants of one study,
    STUDY@NAME, the names are only what follows the @. Raises ConfigError when two names are equal."""
    from trainer.base.config import ConfigError

    names = [run.rstrip("/").rpartition("/")[2] for run in runs]
    if len({name.partition("@")[0] for name in names}) == 1 and all("@" in name for name in names):
        names = [name.partition("@")[2] for name in names]
    if len(set(names)) < len(names):
        raise ConfigError("runs are told apart by their names, and two have the same")
    return names


def tokens_of(bases: Sequence[Run], most: int | None) -> list[int]:
    """Return how many tokens to train each of the runs `bases` on. All read equally many tokens: those of the shortest
    run, or `most` if that is fewer. If their tokenizers differ, they read equally many bytes of text instead, and
    `most` counts tokens of the first run."""
    if len({base.curriculum.tokenizer.sha256 for base in bases}) == 1:
        return [min([base.curriculum.tokens for base in bases] + ([most] if most else []))] * len(bases)
    sizes = [bytes_per_token(base) for base in bases]
    budget = min([base.curriculum.tokens * size for base, size in zip(bases, sizes)]
                 + ([most * sizes[0]] if most else []))
    return [int(budget / size) for size in sizes]


def bytes_per_token(run: Run) -> float:
    """Return how many bytes of text a token of a run stands for, averaged over all tokens that the run is trained
    on."""
    from tokenizer.shards.reader import ShardSet

    sizes = {}
    for stream in run.curriculum.streams:
        manifest = ShardSet(run.store / stream.train, stream.sha256).manifest
        sizes[stream.name] = manifest.text_bytes / max(1, manifest.tokens)
    total = 0.0
    for phase in run.curriculum.phases:
        weights = sum(phase.weights.values())
        total += phase.tokens * sum(weight / weights * sizes[name] for name, weight in phase.weights.items())
    return total / run.curriculum.tokens


def widths_of(given: str | None) -> Sequence[int | None]:
    """Parse the value of `--widths`, widths of models with commas between them. Returns the widths in ascending order.
    Returns [None] without the option; the model then has the width in the settings."""
    from trainer.base.config import ConfigError

    if given is None:
        return [None]
    if not re.fullmatch(r"\d+(,\d+)*", given):
        raise ConfigError(f"--widths {given}: write widths with commas between them, e.g. --widths 128,256")
    return sorted({int(width) for width in given.split(",")})


def scaled(settings: Mapping[str, Any], width: int, narrowest: int) -> dict[str, Any]:
    """Return the section `model:` of `settings` (the section `train:`), changed to the width `width`. Heads keep their
    size; the number of heads and the number of hidden units grow with the width.

    The learning rates stay as they are, because the trainer adapts them by `mup`, the width for which they were found.
    This is the value in the settings, or `narrowest` if they have none. Raises ConfigError when muP has no rule for the
    optimiser, or when the number of heads of keys and values would not be a whole number.
    """
    from trainer.base.config import ConfigError, build
    from trainer.loop.config import TrainConfig

    config = build(TrainConfig, settings, "train")
    model = config.model
    if config.optimizer.mup_rule() == "unknown":
        raise ConfigError("--widths: muP has no rule for this optimiser; take another one, or leave out --widths")
    groups, left = divmod(model.kv_heads * width, model.width)
    if left or not groups:
        step = model.width // math.gcd(model.kv_heads, model.width)
        raise ConfigError(f"--widths {width}: a model of width {model.width} has {model.kv_heads} groups of heads that "
                          f"share keys and values, so a width is a multiple of {step}")
    ffn = max(8, round(model.ffn * width / model.width / 8) * 8)
    return {**asdict(model), "width": width, "heads": groups * (model.heads // model.kv_heads), "kv_heads": groups,
            "head_dim": model.dim, "ffn": ffn, "mup": model.mup or narrowest}


def shortened(old: Curriculum, tokens: int | None, seed: int) -> Curriculum:
    """Return a changed copy of the curriculum `old`, for a short training. It ends at the last step that ends within
    `tokens` tokens (None: it is not shortened). If `seed` is not 0, the data is read in another order. Raises
    ConfigError when the first step alone has more tokens."""
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
