"""Checks the names of the keys under `train:` in a recipe, the kind of optimizer and the preset of the model. The
trainer checks the other values. It would also refuse a wrong name, but only after all data has been made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeline.recipe.errors import shown
from trainer.base.config import keys_of, keys_of_others
from trainer.loop.config import TrainConfig
from trainer.model.config import ModelConfig
from trainer.optim.config import OptimizerConfig, kinds

if TYPE_CHECKING:
    from pipeline.recipe.problems import Checker


def check_train(train: dict[str, Any], checker: Checker) -> None:
    _check_keys(train, ("train",), keys_of(TrainConfig, "train"), checker)
    optimizer = train.get("optimizer", {})
    if isinstance(optimizer, dict):
        kind = str(optimizer.get("kind", OptimizerConfig.DEFAULT))
        if checker.check_name(kind, kinds(), ("train", "optimizer", "kind"), "kind"):
            for key, problem in keys_of_others(kinds(), kind, optimizer).items():
                checker.fail(("train", "optimizer", key), problem)
    model = train.get("model", {})
    if not isinstance(model, dict):
        checker.fail(("train", "model"), f"must be a mapping, e.g. model: {{preset: 135m}}; got {shown(model)}")
    elif "preset" in model:
        checker.check_name(str(model["preset"]), ModelConfig.PRESETS, ("train", "model", "preset"), "preset")


def _check_keys(mapping: dict[str, Any], path: tuple[str, ...], allowed: dict[str, list[str]],
                checker: Checker) -> None:
    """Add a problem for each unknown key of `mapping` and of the mappings inside it. `path` is the path of `mapping` in
    the recipe, and `allowed` lists the known keys under each path."""
    for key, value in mapping.items():
        inner = (*path, str(key))
        if checker.check_name(str(key), allowed[".".join(path)], inner, "key") and isinstance(value, dict) \
                and ".".join(inner) in allowed:
            _check_keys(value, inner, allowed, checker)
