"""Mixtures of known trainings that come with Tokenmill: curricula to plan with, and to copy into a recipe."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pipeline.base.quantities import parse_count
from pipeline.forecast.epochs import BadTokens
from pipeline.recipe.errors import nearest
from pipeline.recipe.load import load_text
from pipeline.recipe.model import Recipe
from tokenizer.mixture.mix import streams_in

FOLDER = Path(__file__).resolve().parents[1] / "mixtures"


@dataclass(frozen=True)
class PublishedMixture:
    """A mixture from a file NAME.yaml in FOLDER. The file has the keys `about` and `curriculum` of a recipe. Its key
    `tokens` gives the published numbers of tokens of streams; they may be missing for some streams."""

    name: str
    text: str                     # of the file
    tokens: dict[str, int]
    recipe: Recipe                # with the curriculum, and with shards that have no data


def ready_mixtures() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load_mixture(name: str) -> PublishedMixture:
    """Load a mixture that comes with Tokenmill. Raises BadTokens if there is none of this name."""
    if name not in ready_mixtures():
        raise BadTokens(f"--mixture {name}: there is no such mixture: {nearest(name, ready_mixtures())}")
    text = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    document: dict[str, Any] = yaml.safe_load(text)
    phases = document["curriculum"]["phases"]
    streams = sorted({stream for phase in phases for stream in streams_in(phase.get("mix") or {})})
    longest = max(phase.get("sequence", 1) for phase in phases)
    recipe = {"version": 1, "sources": {"nothing": {"read": "text", "path": "nothing/*.txt"}},
              "datasets": {"texts": {"from": "nothing", "steps": ["exact"]}},
              "tokenizer": {"train": {"kind": "bpe", "vocab": 300, "from": "texts", "sample": "1MB"}},
              "shards": {stream: {"from": "texts", "longest": longest} for stream in streams},
              "curriculum": document["curriculum"]}
    tokens = {stream: parse_count(number) for stream, number in (document.get("tokens") or {}).items()}
    return PublishedMixture(name, text, tokens,
                            load_text(yaml.safe_dump(recipe), name, name=name, base=".", inputs_from="."))
