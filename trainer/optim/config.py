"""Settings of optimisers, and the list of optimisers. Imports no torch.

An optimiser is one file of this folder, `trainer/optim/NAME.py`. The file has a frozen dataclass with the settings
(`kind: Literal["NAME"]`), whose method `build` returns the optimiser. `kinds` lists these files. Because they import
torch, `kinds` does not import them, but reads the names of the settings from the source text. A recipe can thus be
checked where torch is not installed, and only the optimiser that a recipe names is imported.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import trainer.optim
from trainer.base.config import ConfigError
from trainer.model.config import Role

if TYPE_CHECKING:
    import torch

#: how muP's factor on the learning rate of a matrix relates to an optimiser. "applies": updates have a fixed size per
#: entry, so the rate is multiplied by the factor. "inherent": updates already depend on the width, so it is not.
#: "unknown": rates are relative to the size of the parameter, and muP has no rule for them
MupRule = Literal["applies", "inherent", "unknown"]


@dataclass(frozen=True)
class OptimizerKind:
    """The description of an optimiser in trainer/optim, made without importing it: the optimiser's name, the name of
    the class of its settings, and the names of the settings."""

    name: str
    config_class: str
    keys: tuple[str, ...]

    def load(self) -> type[OptimizerConfig]:
        """Import the optimiser's module (and torch) and return the class of its settings."""
        return getattr(importlib.import_module(f"trainer.optim.{self.name}"), self.config_class)


@dataclass(frozen=True)
class Override:
    """Settings for the parameters whose name matches the regular expression `match`, in place of those of the
    optimiser. `lr` is a factor on the learning rate; `weight_decay` replaces the weight decay (null: unchanged)."""

    match: str
    lr: float = 1.0
    weight_decay: float | None = None

    def check(self) -> None:
        try:
            re.compile(self.match)
        except re.error as error:
            raise ValueError(f"match: {self.match!r} is no regular expression: {error}") from None
        if self.lr < 0 or (self.weight_decay or 0) < 0:
            raise ValueError(f"lr (a factor) and weight_decay of {self.match!r} must be ≥ 0")


@dataclass(frozen=True)
class OptimizerConfig:
    """Settings that every optimiser has, and methods that describe an optimiser. Each optimiser has a class of
    settings, which derives from this class (or from `Moments`), sets `kind` to the name of the optimiser's file, and
    defines `build`.

        lr            the peak learning rate; the schedule multiplies it by a factor
        embedding_lr  the peak for the embedding (null: the same as for norms and biases)
        weight_decay  applies to matrices, including an untied output. Embeddings (also when tied to the output), norms
                      and biases are not decayed, because that does not help (SmolLM3, OLMo 2)
        groups        overrides rates and decay of parameters by name; the first entry that matches a name counts

    A row of the embedding moves only when its token occurs, so a short run needs a far higher `embedding_lr` (nanochat:
    10 to 100 times higher). On 0.3 M tokens of a mixed corpus, `embedding_lr` 0.02 with `lr` 0.001 gave a held-out loss
    of 5.97 nats; 0.002 for both gave 7.02.
    """

    DEFAULT: ClassVar[str] = "adamw"

    kind: str = ""
    lr: float = 1e-3
    embedding_lr: float | None = None
    weight_decay: float = 0.1
    groups: tuple[Override, ...] | None = None

    @classmethod
    def variants(cls) -> Mapping[str, OptimizerKind]:
        """Return {kind: description} for all optimisers, where `kind` is the name by which a recipe chooses the
        optimiser. `trainer.base.config.build` calls this."""
        return kinds()

    def check(self) -> None:
        if self.lr <= 0 or (self.embedding_lr is not None and self.embedding_lr <= 0) or self.weight_decay < 0:
            raise ValueError("lr and embedding_lr must be > 0, weight_decay ≥ 0")

    def peak(self, role: Role) -> float:
        """Return the peak learning rate of the parameters that have the role `role` in the model."""
        return self.embedding_lr if role == "embedding" and self.embedding_lr is not None else self.lr

    def mup_rule(self) -> MupRule:
        """Return whether this optimiser applies muP's factor on the learning rate of a matrix: "applies"; "inherent"
        (it does not, because its updates already depend on the width); or "unknown" (muP has no rule for it)."""
        return "applies"

    def state_bytes(self, parameters: int, matrices: int, width: int) -> float:
        """Return an estimate of the bytes of the optimiser's state, which `tokenmill train plan` prints. The model has
        `parameters` parameters; `matrices` of them are in hidden matrices of `width` columns. This method counts two
        moments in float32 per parameter. The settings of an optimiser with another state override it."""
        return 8.0 * parameters

    def stored_bytes(self, parameters: int, matrices: int, width: int, half: bool) -> float:
        """Return an estimate of the bytes of the optimiser's state in a checkpoint. The model has `parameters`
        parameters; `matrices` of them are in hidden matrices of `width` columns. With `half`, float32 tensors of the
        state are stored as bfloat16."""
        return self.state_bytes(parameters, matrices, width) * (0.5 if half else 1)

    def build(self, groups: list[dict[str, Any]], device: torch.device) -> torch.optim.Optimizer:
        """Build the optimiser that these settings describe. `groups` are parameter groups as torch.optim takes them,
        made by `trainer.optim.groups.grouped`."""
        raise NotImplementedError


@dataclass(frozen=True)
class Moments(OptimizerConfig):
    """Settings that all variants of AdamW share. `betas` are the decay factors of the two moments. `eps` is added to
    the divisor of an update, so that the update stays finite."""

    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8

    def check(self) -> None:
        super().check()
        if self.eps <= 0 or not all(0 <= b < 1 for b in self.betas):
            raise ValueError("eps must be > 0, betas in [0, 1)")


@functools.cache
def kinds() -> Mapping[str, OptimizerKind]:
    """Return all optimisers in trainer/optim as {name: description}. A file NAME.py in this folder is an optimiser if
    it has a class with a field `kind: Literal["NAME"]`. The files are not imported."""
    bases = {cls.__name__: tuple(f.name for f in dataclasses.fields(cls)) for cls in (OptimizerConfig, Moments)}
    result: dict[str, OptimizerKind] = {}
    for path in sorted(path for folder in trainer.optim.__path__ for path in Path(folder).glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8"), str(path)).body:
            if isinstance(node, ast.ClassDef):
                fields = {field.target.id: ast.unparse(field.annotation) for field in node.body
                          if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)}
                if fields.get("kind") == f"Literal[{path.stem!r}]":
                    names = [ast.unparse(base) for base in node.bases]
                    if not set(names) <= bases.keys():
                        raise ConfigError(f"{path}: {node.name} derives from {', '.join(names)}; settings of an "
                                          f"optimiser derive from {' or '.join(bases)}, so that they can be read "
                                          f"without torch")
                    inherited = [key for name in names for key in bases[name]]
                    own = [key for key, hint in fields.items() if not hint.startswith("ClassVar")]
                    result[path.stem] = OptimizerKind(path.stem, node.name, tuple(dict.fromkeys([*inherited, *own])))
    return result


def default() -> OptimizerConfig:
    """Return the settings of the optimiser that is used for a recipe without `train.optimizer`. Imports torch."""
    return kinds()[OptimizerConfig.DEFAULT].load()()
