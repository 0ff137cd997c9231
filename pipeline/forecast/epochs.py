"""Says how often the training of a recipe would read each stream if the streams had given numbers of tokens. No token
has to exist for that, and no input is read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.base.errors import TokenmillError
from pipeline.base.humanize import count
from pipeline.base.quantities import parse_count
from pipeline.recipe.errors import nearest
from pipeline.recipe.model import Recipe
from tokenizer.mixture.curriculum import Curriculum
from tokenizer.mixture.realised import plan
from tokenizer.mixture.resolve import resolve

#: R*_D, the half-life of repeated tokens (Muennighoff et al., arXiv 2305.16264, 6.1)
HALF_LIFE = 15.387756


class BadTokens(TokenmillError):
    """The numbers of tokens that were given do not fit the recipe."""


@dataclass(frozen=True)
class PhaseUse:
    """What one phase of a training reads of one stream. `share` is the stream's part of the phase, and `tokens` are
    those that the phase reads. `epochs` counts readings of the stream from the start of the training to the end of the
    phase, `allowed` is their limit (None: none), and `worth` says how much of new tokens the read ones are worth."""

    phase: str
    stream: str
    share: float
    tokens: int
    epochs: float
    allowed: float | None
    worth: float

    @property
    def exhausted(self) -> bool:
        return self.allowed is not None and self.epochs > self.allowed


def worth(epochs: float) -> float:
    """Return what tokens that are read `epochs` times are worth, as a share of as many new tokens: U + U·R*·(1 −
    exp(−R/R*)) for U unique tokens and R = epochs − 1 repetitions (arXiv 2305.16264, equation 5)."""
    return 1.0 if epochs <= 1 else (1 + HALF_LIFE * (1 - math.exp((1 - epochs) / HALF_LIFE))) / epochs


def given_tokens(texts: list[str], recipe: Recipe) -> dict[str, int]:
    """Parse `web=8T,code=1T`, the number of tokens of each stream of the recipe. Raises BadTokens if a stream is
    missing, unknown or named twice, or if a number is none."""
    tokens: dict[str, int] = {}
    for part in (part.strip() for text in texts for part in text.split(",") if part.strip()):
        name, _, number = part.partition("=")
        if name not in recipe.shards:
            raise BadTokens(f"--tokens {part}: the recipe has no shards '{name}': {nearest(name, recipe.shards)}")
        if name in tokens:
            raise BadTokens(f"--tokens {part}: '{name}' is named twice")
        try:
            tokens[name] = parse_count(number)
        except ValueError as e:
            raise BadTokens(f"--tokens {part}: {e}") from None
    if missing := sorted(set(recipe.shards) - set(tokens)):
        raise BadTokens(f"--tokens: give the tokens of {', '.join(missing)}, too, such as {missing[0]}=1T")
    return tokens


def phase_uses(recipe: Recipe, tokens: Mapping[str, int]) -> tuple[list[PhaseUse], list[str]]:
    """Return what each phase of the recipe's curriculum reads of each stream, and notes. `tokens` are the training
    tokens of each stream. A stream that runs out is no error here. Raises CurriculumError if the curriculum is wrong
    in another way, and BadTokens if the recipe has none."""
    if recipe.curriculum is None:
        raise BadTokens("--tokens: the recipe has no curriculum, so it mixes nothing; add `curriculum:`")
    plain = recipe.plain()
    repeating = {**plain["curriculum"], "phases": [{**phase, "on_exhausted": "repeat"}
                                                   for phase in plain["curriculum"]["phases"]]}
    curriculum, notes = resolve({**plain, "curriculum": repeating}, _shard_sets(tokens), _TOKENIZER)
    limits = _limits(recipe, curriculum)
    uses = [PhaseUse(row["phase"], row["stream"], row["share"], row["tokens"], row["epochs"],
                     limits[row["phase"]].get(row["stream"], 1.0) if limits[row["phase"]] is not None else None,
                     worth(row["epochs"])) for row in plan(curriculum)]
    return uses, notes


#: stands for the tokenizer that will be made
_TOKENIZER = {"sha256": "", "vocab_size": 0, "eos": 0, "path": ""}


def _shard_sets(tokens: Mapping[str, int]) -> dict[str, dict[str, Any]]:
    """Return what stands for the shards that will be made."""
    return {name: {"tokenizer": "", "dtype": "", "train": {"path": "", "sha256": "", "tokens": number}, "val": None}
            for name, number in tokens.items()}


def _limits(recipe: Recipe, curriculum: Curriculum) -> dict[str, Any]:
    """Return by phase how often streams may be read: {stream: epochs}, or None where all may be read again and
    again."""
    limits: dict[str, Any] = {}
    rule = "error"
    for written, phase in zip(recipe.curriculum.phases if recipe.curriculum else (), curriculum.phases):
        rule = written.on_exhausted or rule
        limits[phase.name] = None if rule == "repeat" else phase.max_epochs
    return limits


def as_document(uses: list[PhaseUse], notes: list[str]) -> dict[str, Any]:
    return {"mixture": [{**asdict(use), "exhausted": use.exhausted} for use in uses], "notes": notes}


def as_lines(uses: list[PhaseUse], notes: list[str]) -> list[str]:
    """Return the lines of a table for a terminal."""
    rows = [("phase", "stream", "share", "tokens", "epochs", "worth", "")]
    for use in uses:
        note = f"too few tokens: {use.allowed:g} epochs are allowed" if use.exhausted else ""
        rows.append((use.phase, use.stream, f"{use.share:.3%}", count(use.tokens), f"{use.epochs:.2f}",
                     f"{use.worth:.0%}", note))
    width = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(size) if column in (0, 1, 6) else cell.rjust(size)
                       for column, (cell, size) in enumerate(zip(row, width))).rstrip() for row in rows]
    return [*lines, *(f"note: {note}" for note in notes)]
