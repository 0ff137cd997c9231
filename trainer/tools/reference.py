"""Writes the list of all settings in docs/training.md, from the classes that define the settings. It is run as `python
-m trainer.tools.reference FILE`.

The list is between two marks in the page. `make docs` writes it, and a test checks that the page is up to date.
"""

from __future__ import annotations

import json
import re
import sys
import typing
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any

from pipeline.base.generated import replace_generated
from trainer.loop.config import TrainConfig
from trainer.optim.config import OptimizerConfig, kinds

BETWEEN = re.compile(r"(?<=<!-- settings: `make docs` writes them -->\n).*?(?=<!-- end of settings -->)", re.S)
REQUIRED = "(required)"


def settings(config: type[Any], prefix: str = "", value: Any = None) -> Iterator[tuple[str, str]]:
    """Yield (key as written after `--set`, default) for every setting of the class `config` and of the classes nested
    in it. If `value`, an instance of the class, is given, its values are the defaults. `prefix` is put before each
    key."""
    hints = typing.get_type_hints(config)
    for field in fields(config):
        key = prefix + field.name.removesuffix("_")  # from_, for_ and async_ stand for words that Python reserves
        default = getattr(value, field.name) if value is not None else _default(field)
        inner = [t for t in (hints[field.name], *typing.get_args(hints[field.name])) if is_dataclass(t)]
        if field.name == "optimizer":
            yield from optimizers(key)
            continue
        if not inner or not (is_dataclass(default) or default is MISSING):
            yield key, REQUIRED if default is MISSING else json.dumps(default).strip('"')
        for kind in inner:
            yield from settings(typing.cast("type[Any]", kind), f"{key}.", default if is_dataclass(default) else None)


def optimizers(prefix: str) -> Iterator[tuple[str, str]]:
    """Yield (key, default) for the settings of optimisers: first those that all optimisers share, then for each
    optimiser those that it adds or whose default it changes. `prefix` is put before each key."""
    common = dict(settings(OptimizerConfig, f"{prefix}."))
    yield f"{prefix}.kind", OptimizerConfig.DEFAULT
    yield from ((key, default) for key, default in common.items() if key != f"{prefix}.kind")
    for name, kind in sorted(kinds().items()):
        for key, default in settings(kind.load(), f"{prefix}."):
            if key != f"{prefix}.kind" and common.get(key) != default:
                yield f"{key} (kind: {name})", default


def _default(field: Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default


def rewrite(page: str) -> str:
    """Return the text `page` with its list of settings replaced by that of the current config classes. Raises
    ValueError if the page does not have the two marks exactly once."""
    rows = list(settings(TrainConfig))
    width = max(len(key) for key, _ in rows)
    text = "".join(f"{key:<{width}}  {default}\n" for key, default in rows)
    return replace_generated(page, BETWEEN, f"```text\n{text}```\n", "the list of settings")


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(rewrite(path.read_text(encoding="utf-8")), encoding="utf-8")
