"""Turns a YAML mapping into frozen dataclasses. The error for a mistyped key suggests the right key.

The dataclasses are defined in the folders of the classes they configure, in modules that import no torch
(`trainer/model/config.py`, `trainer/optim/config.py`, …); `trainer.loop.config.TrainConfig` combines them. `build` is
the only function that turns mappings into these dataclasses. `keys_of` lists their keys.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import reprlib
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, NewType, Protocol, TypeVar, Union

import yaml

from pipeline.base.errors import TokenmillError
from pipeline.base.quantities import parse_count

#: a whole number that may be written with a suffix: 16k, 0.5M, 20B, 1T
Count = NewType("Count", int)
T = TypeVar("T")
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxlist, _SHORT.maxtuple = 2, 4, 4
_SHORT.maxdict, _SHORT.maxstring, _SHORT.maxother = 4, 80, 80


class ConfigError(TokenmillError, ValueError):
    """Raised if a configuration cannot be used; the message names file, key and remedy."""

    exit_code = 2


class TrainingError(RuntimeError):
    """Raised if training cannot continue; the message says what to do."""


class CheckpointError(RuntimeError):
    """Raised if a checkpoint cannot be written, found or used; the message names the folder and the remedy."""


def count(text: str | int | float) -> int:
    """Parse a count as recipes write it: '16k' → 16000, '0.5M' → 500000, 0 → 0. Raises ValueError if `text` is not such
    a count."""
    return parse_count(text, least=0)


def build(cls: type[T], value: Any, where: str) -> T:
    """Return an instance of the frozen dataclass `cls` with the values of the mapping `value`. `where` is the file and
    key that error messages name ('recipe.yaml: train.model').

    Unknown keys, missing keys without a default and values of the wrong type raise ConfigError. A class with `PRESETS`
    (named sets of values) accepts `preset: NAME`; other keys of the mapping override the preset's values. If the class
    has a method `check()`, it is called on the instance, and a ValueError from it becomes a ConfigError. If a key is a
    keyword of Python (`for`), its field has an underscore appended (`for_`).
    """
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: expected a mapping with keys {', '.join(names(cls))}, got {shown(value)}")
    value = dict(value)
    hints = typing.get_type_hints(cls)
    fields = {field.name.removesuffix("_"): field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    presets: Mapping[str, Mapping[str, Any]] = getattr(cls, "PRESETS", {})
    if presets and "preset" in value:
        name = value.pop("preset")
        name = name if isinstance(name, str) else shown(name)
        if name not in presets:
            raise ConfigError(f"{where}.preset: unknown preset {name!r}{suggestion(name, presets)}; there are "
                              f"{', '.join(presets)}")
        value = {**presets[name], **value}
    for key in value:
        if key not in fields:
            valid = [*(["preset"] if presets else []), *fields]
            raise ConfigError(f"{where}.{key}: unknown key{suggestion(str(key), valid)}; known keys: "
                              f"{', '.join(valid)}")
    values = {fields[key].name: convert(hints[fields[key].name], item, f"{where}.{key}") for key, item in value.items()}
    missing = [n for n, field in fields.items()
               if field.name not in values and field.default is dataclasses.MISSING
               and field.default_factory is dataclasses.MISSING]
    if missing:
        raise ConfigError(f"{where}: {', '.join(missing)} must be given")
    config = cls(**values)
    if hasattr(config, "check"):
        try:
            config.check()
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from None
    return config


def convert(hint: Any, value: Any, where: str) -> Any:
    """Return `value` converted to the type `hint` of a config field. If the value does not fit the type, raises a
    ConfigError that names the key (`where`)."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        inner = [a for a in args if a is not type(None)]
        classes = [a for a in inner if dataclasses.is_dataclass(a)]
        return convert(classes[0] if classes and isinstance(value, Mapping) else inner[0], value, where)
    if origin is Literal:
        if value not in args:
            raise ConfigError(f"{where}: {shown(value)} is not one of {', '.join(map(repr, args))}"
                              f"{suggestion(value if isinstance(value, str) else shown(value), args)}")
        return value
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise ConfigError(f"{where}: expected a list, got {shown(value)}")
        kinds = [args[0]] * len(value) if len(args) == 2 and args[1] is Ellipsis else list(args)
        if len(kinds) != len(value):
            raise ConfigError(f"{where}: expected {len(kinds)} values, got {len(value)}")
        return tuple(convert(k, v, f"{where}[{i}]") for i, (k, v) in enumerate(zip(kinds, value)))
    if origin is Mapping:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where}: expected a mapping, got {shown(value)}")
        return {convert(args[0], k, where): convert(args[1], v, f"{where}.{k}") for k, v in value.items()}
    if hasattr(hint, "variants"):
        return by_kind(hint, value, where)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return build(hint, value, where)
    if hint is Count:
        try:
            return count(value)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{where}: {error}") from None
    if hint is bool and isinstance(value, bool):
        return value
    if hint is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if hint is float and not isinstance(value, bool):
        try:                             # YAML 1.1 reads 1e-3 (without a dot) as a string
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if math.isfinite(number):        # every comparison with a NaN is false, so `check` would let it pass
            return number
    if hint is str and isinstance(value, str):
        return value
    if hint is str and isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    kind = {bool: "true or false", int: "a whole number", float: "a number (20% is 0.2)", str: "a text"}.get(hint, hint)
    raise ConfigError(f"{where}: expected {kind}, got {shown(value)}")


class Variants(Protocol):
    """A config class that has several variants, for instance one per optimiser. The key `kind` of the configuration
    chooses a variant; only the chosen variant's class is imported."""

    DEFAULT: ClassVar[str]

    @classmethod
    def variants(cls) -> Mapping[str, Variant]: ...


class Variant(Protocol):
    """One of the variants of a config class, for instance the settings of one optimiser. `keys` lists the variant's
    keys without importing its class; `load` imports the class and returns it."""

    @property
    def keys(self) -> tuple[str, ...]: ...

    def load(self) -> type: ...


def by_kind(cls: type[Variants], value: Any, where: str) -> Any:
    """Build a config from the mapping `value`, whose key `kind` chooses one of several variants, for instance an
    optimiser. Without `kind`, the variant is `cls.DEFAULT`. Raises ConfigError as `build` does; if a key of the mapping
    belongs only to other variants, the message names their kinds."""
    kinds = cls.variants()
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: expected a mapping with kind: {', '.join(kinds)}, got {shown(value)}")
    kind = value.get("kind", cls.DEFAULT)
    if not isinstance(kind, str) or kind not in kinds:
        raise ConfigError(f"{where}.kind: {shown(kind)} is not one of {', '.join(kinds)}"
                          f"{suggestion(shown(kind), kinds)}")
    for key, problem in keys_of_others(kinds, kind, value).items():
        raise ConfigError(f"{where}.{key}: {problem}")
    return build(kinds[kind].load(), value, where)


def keys_of_others(kinds: Mapping[str, Variant], kind: str, keys: Iterable[str]) -> dict[str, str]:
    """Find keys of a config that belong to another variant, for instance to another optimiser. `kinds` has all
    variants, and `kind` is the chosen one. Returns {key: error message} for those of `keys` that other variants have
    and `kind` lacks. No variant's module is imported."""
    result = {}
    for key in keys:
        others = [name for name, variant in kinds.items() if key in variant.keys]
        if others and kind not in others:
            result[key] = (f"belongs to kind: {' and '.join(others)}, not to {kind}; remove it, or write kind: "
                           f"{others[0]}")
    return result


def keys_of(cls: type, path: str) -> dict[str, list[str]]:
    """List the keys that a config and its nested mappings may have, by path: {'train': ['model', …], 'train.model': …}.
    For a class with variants, the list has the keys of all variants. No variant's module is imported."""
    if hasattr(cls, "variants"):
        keys = list(dict.fromkeys(key for variant in cls.variants().values() for key in variant.keys))
    else:
        keys = [*(["preset"] if hasattr(cls, "PRESETS") else []), *names(cls)]
    result = {path: keys}
    for field, hint in typing.get_type_hints(cls).items():
        for inner in typing.get_args(hint) or (hint,):
            if isinstance(inner, type) and dataclasses.is_dataclass(inner):
                result |= keys_of(inner, f"{path}.{field.removesuffix('_')}")
    return result


def shown(value: Any) -> str:
    """Format a value for an error message. Long texts are shortened in the middle. Only a few items of long or deeply
    nested lists and mappings are shown: a few lines of YAML with aliases can stand for a value too large for memory."""
    return _SHORT.repr(value)


def suggestion(word: str, names: Any) -> str:
    """Return '; did you mean NAME?' for the one of `names` that is most like `word`, or '' if none is similar."""
    close = difflib.get_close_matches(word, [str(k) for k in names], n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def names(cls: type) -> list[str]:
    """List a config's keys as written in a recipe, for instance `async` for the field `async_`."""
    return [f.name.removesuffix("_") for f in dataclasses.fields(cls)]


def override(mapping: dict[str, Any], assignment: str) -> None:
    """Apply one assignment `a.b=value`, as given with `--set`, to the nested `mapping` (a recipe's `train:` section),
    in place. The value is YAML. Mappings on the way that are missing are made, and `train.` before the key is ignored.
    Raises ConfigError if the assignment cannot be applied."""
    key, sign, text = assignment.partition("=")
    if not sign or not key:
        raise ConfigError(f"--set {assignment}: write it as key=value, e.g. --set optimizer.lr=0.001")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {assignment}: {error}") from None
    *path, last = key.removeprefix("train.").split(".")
    for part in path:
        mapping = mapping.setdefault(part, {})
        if not isinstance(mapping, dict):
            raise ConfigError(f"--set {assignment}: {part} is not a mapping")
    mapping[last] = value


def read_train(recipe: Path) -> dict[str, Any]:
    """Read the `train:` mapping of a run's recipe.yaml, the only part of the recipe that the trainer reads. Raises
    ConfigError if the file or the mapping is missing, or is not YAML."""
    try:
        document = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{recipe}: no such file; give a run folder that `tokenmill run` has finished") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{recipe}: not YAML: {' '.join(str(error).split())}") from None
    train = (document or {}).get("train") if isinstance(document, dict) else None
    if train is None or train == {}:             # the recipe of a run without `train:` is stored with an empty one
        raise ConfigError(f"{recipe}: no `train:` section; add one, e.g. train: {{model: {{preset: demo}}}}")
    if not isinstance(train, dict):
        raise ConfigError(f"{recipe}: train: expected a mapping, got {shown(train)}")
    return train
