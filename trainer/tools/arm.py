"""An arm of a study. A study compares several short trainings, each in a folder of its own; an arm is one of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizer.mixture.curriculum import Curriculum
    from trainer.loop.run import Run


@dataclass(frozen=True)
class Arm:
    """One of the trainings that a study compares. `settings` is the section `train:` of a recipe, with which it trains.
    `width` is the width of its model, if the study compares several widths. If the study continues from a checkpoint,
    `before` is the number of tokens and `step` the number of steps that the checkpoint had been trained for."""

    name: str
    seed: int                     # number of the seed, from 0
    run: Run
    settings: Mapping[str, Any]
    width: int | None = None
    before: int = 0
    step: int = 0

    def rung(self, share: float) -> int:
        """Return the step, counted from the beginning of the run, after which the share `share` of the steps of this
        arm (training of a study) is done."""
        return self.step + max(1, math.ceil(share * (self.run.curriculum.steps - self.step)))


def arm_of(base: Run, name: str, seed: int, settings: Mapping[str, Any], curriculum: Curriculum, folder: Path,
           width: int | None = None) -> Arm:
    """Return the arm `name` of a study (one of its trainings) with the seed `seed`. It trains like the run `base`, but
    with the given settings and curriculum. Its files are in a folder of its own below `folder`. Raises ConfigError when
    the settings are wrong."""
    from trainer.base.config import build
    from trainer.loop.config import TrainConfig

    label = name if width is None else f"{name}-width{width}"
    out = (folder / f"{label}-seed{seed}").absolute()
    config = build(TrainConfig, settings, f"{base.folder / 'recipe.yaml'}: train")
    run = replace(base, folder=out, store=base.store.absolute(), out=out, config=config, curriculum=curriculum)
    run.schedule()
    return Arm(name, seed, run, settings, width)


def place_of(folder: Path, store: str | None, out: str | None) -> tuple[str | None, str | None]:
    """Return the values of --store and --out for the training in `folder` (None: their defaults). For an arm of a
    study, --out is the folder itself, and --store the nearest folder above it that has shards, unless `store` is given.
    For other trainings, and if `out` is given, the given values are returned."""
    if out is not None or not (folder / "checkpoints").is_dir() or (folder / "train").is_dir():
        return store, out
    above = next((str(p) for p in folder.absolute().parents if (p / "shards").is_dir()), None)
    return store or above, str(folder)


def settings_of(run: Run, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the section `train:` of the recipe of `run`, with the assignments `overrides` applied to it."""
    from trainer.base.config import override, read_train

    settings = read_train(run.folder / "recipe.yaml")
    for assignment in overrides:
        override(settings, assignment)
    return settings


def check(arm: Arm) -> None:
    """Raise ConfigError when the latest checkpoint in the folder of `arm` is that of a training which `arm` cannot
    continue."""
    from trainer.base.config import ConfigError
    from trainer.checkpoint import checkpoints as ckpt
    from trainer.loop.run import differences

    checkpoint = ckpt.latest(arm.run.out / "checkpoints")
    if checkpoint and (wrong := differences(checkpoint.meta, arm.run)):
        raise ConfigError(f"{arm.run.out} holds an arm {arm.name} that is another than this one:\n  "
                          + "\n  ".join(wrong) + "\nGive this one another name, or delete that folder")


def write(arm: Arm) -> None:
    """Write the curriculum and the settings of an arm (a training of a study) to its folder, from which `tokenmill
    train run` trains it."""
    import yaml

    from trainer.base.files import replace as replace_file

    replace_file(arm.run.out / "curriculum.json", arm.run.curriculum.dumps())
    replace_file(arm.run.out / "recipe.yaml", yaml.safe_dump({"train": dict(arm.settings)}, sort_keys=True))


def finished(arm: Arm, share: float = 1.0) -> bool:
    """Return whether an arm of a study has been trained to the end of its curriculum. With a `share` below 1, return
    whether that share of its steps is done. At the end of the curriculum, all checkpoints of the arm except the last
    are deleted."""
    from trainer.checkpoint import checkpoints as ckpt

    checkpoints = ckpt.complete(arm.run.out / "checkpoints")
    if share < 1:
        return bool(checkpoints) and checkpoints[-1].step >= arm.rung(share)
    if not (arm.run.out / "summary.json").exists() or not checkpoints \
            or checkpoints[-1].meta["samples"] != arm.run.curriculum.samples:
        return False
    for old in checkpoints[:-1]:
        ckpt.delete(old)
    return True


def label(arm: Arm) -> str:
    return arm.name if arm.width is None else f"{arm.name} at width {arm.width}"
