"""Computes how often the training of a recipe would read each stream if the streams had given numbers of tokens. A
stream is the token files of one source, language or bucket. The tokens need not exist yet, and no input is read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.base.errors import TokenmillError
from pipeline.base.humanize import count
from pipeline.base.quantities import parse_count
from pipeline.forecast.mixture import mixture, phases
from pipeline.forecast.range import exactly
from pipeline.recipe.errors import nearest
from pipeline.recipe.model import Recipe
from tokenizer.mixture.phases import epochs_allowed

#: R*_D, the half-life of repeated tokens (Muennighoff et al., arXiv 2305.16264, 6.1)
HALF_LIFE = 15.387756


class BadTokens(TokenmillError):
    """Raised when the given numbers of tokens do not fit the recipe."""


@dataclass(frozen=True)
class PhaseUse:
    """Says how much one phase of a training reads of one stream (a set of token files). `share`: the fraction of the
    phase that comes from the stream. `tokens`: how many tokens of the stream the phase reads.

    `epochs`: how often the stream is read from the start of the training to the end of the phase. `allowed`: the most
    epochs that the phase allows; None means any number. `worth`: how much the tokens of these epochs are worth, as a
    fraction of as many tokens without repetition (function `worth`).
    """

    phase: str
    stream: str
    share: float
    tokens: int
    epochs: float
    allowed: float | None
    worth: float

    @property
    def exhausted(self) -> bool:
        return self.allowed is not None and self.epochs > epochs_allowed(self.allowed)


def worth(epochs: float) -> float:
    """Return how much the tokens of a stream are worth if a training reads the stream `epochs` times. The worth is a
    fraction of that of equally many tokens without repetition. U unique tokens that are repeated R = epochs − 1 times
    are worth U + U·R*·(1 − exp(−R/R*)) tokens (arXiv 2305.16264, equation 5); R* is HALF_LIFE."""
    return 1.0 if epochs <= 1 else (1 + HALF_LIFE * (1 - math.exp((1 - epochs) / HALF_LIFE))) / epochs


def given_tokens(texts: list[str], recipe: Recipe, known: Mapping[str, int] | None = None) -> dict[str, int]:
    """Parse the number of tokens of each stream of the recipe. Each of `texts` is `web=8T,code=1T`, or the name of a
    table. A table is a text file with a stream and its number on each line, separated by a comma, a tab or spaces. Its
    first line may be the header `stream tokens`. Shards that are split by labels may have several streams:
    `web.en=5T,web.de=1T`. `known` has numbers for streams that `texts` may leave out; a number in `texts` takes
    precedence.

    Raises BadTokens if a stream is missing, unknown or named twice, or if a number is invalid. Also raises it if both
    split shards and their streams have numbers, or if a table cannot be read."""
    tokens: dict[str, int] = {}
    for where, name, number in (entry for text in texts for entry in _entries(text)):
        if name not in recipe.shards and recipe.split_of(name) is None:
            raise BadTokens(f"{where}: there are no shards '{name}': {nearest(name, recipe.shards)}")
        if name in tokens:
            raise BadTokens(f"{where}: '{name}' is named twice")
        try:
            tokens[name] = parse_count(number)
        except ValueError as e:
            raise BadTokens(f"{where}: {e}") from None
    tokens = {**(known or {}), **tokens}
    by_label = {split for split in map(recipe.split_of, tokens) if split is not None}
    if both := sorted(by_label & set(tokens)):
        raise BadTokens(f"--tokens: '{both[0]}' and its streams are given; give the tokens of one or the other")
    if missing := sorted(set(recipe.shards) - set(tokens) - by_label):
        raise BadTokens(f"--tokens: give the tokens of {', '.join(missing)}, too, such as {missing[0]}=1T")
    return tokens


def _entries(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield (place for error messages, stream, number of tokens as text) for each stream in `text`. This is a value of
    the option --tokens: `web=8T,code=1T`, or the name of a table."""
    if "=" in text or not text.strip():
        for part in (part.strip() for part in text.split(",") if part.strip()):
            name, _, number = part.partition("=")
            yield f"--tokens {part}", name.strip(), number.strip()
        return
    try:
        lines = Path(text).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise BadTokens(f"--tokens {text}: neither STREAM=COUNT nor a table that can be read "
                        f"({e.strerror if isinstance(e, OSError) else 'it is not UTF-8'})") from None
    for place, line in enumerate(lines, 1):
        cells = line.replace(",", " ").split()
        if cells and not (place == 1 and cells == ["stream", "tokens"]):
            if len(cells) != 2:
                raise BadTokens(f"{text}:{place}: a line has a stream and its number of tokens, such as: web 8T")
            yield f"{text}:{place}", cells[0], cells[1]


def phase_uses(recipe: Recipe, tokens: Mapping[str, int]) -> tuple[list[PhaseUse], list[str]]:
    """Return how much each phase of the recipe's curriculum reads of each stream, and notes for the user. `tokens` are
    the training tokens of each stream. A training reads a little less of a stream, because the stream is cut into whole
    windows (training sequences).

    Raises BadTokens if the recipe has no curriculum or `tokens` lacks a stream of the mixture, and CurriculumError if
    the curriculum is wrong in another way. A stream may run out; this raises no error here."""
    if recipe.curriculum is None:
        raise BadTokens("--tokens: the recipe has no curriculum, so it mixes nothing; add `curriculum:`")
    sizes = {stream: exactly(float(number)) for stream, number in tokens.items()}
    read: dict[str, float] = dict.fromkeys(tokens, 0.0)
    uses = []
    for phase in phases(recipe, sizes):
        for stream, weight in phase.weights.items():
            if stream not in tokens:
                raise BadTokens(f"--tokens: the mixture names '{stream}'; give its tokens, too: {stream}=1T")
            share = weight / sum(phase.weights.values())
            read[stream] += share * phase.tokens
            epochs = read[stream] / tokens[stream]
            allowed = None if phase.on_exhausted == "repeat" else phase.max_epochs.get(stream, 1.0)
            uses.append(PhaseUse(phase.name, stream, share, round(share * phase.tokens), epochs, allowed,
                                 worth(epochs)))
    return uses, mixture(recipe, sizes)[1]


def as_document(uses: list[PhaseUse], notes: list[str]) -> dict[str, Any]:
    return {"mixture": [{**asdict(use), "exhausted": use.exhausted} for use in uses], "notes": notes}


def as_lines(uses: list[PhaseUse], notes: list[str]) -> list[str]:
    """Return the lines of a table of `uses` for a terminal, and a line for each of `notes`."""
    rows = [("phase", "stream", "share", "tokens", "epochs", "worth", "")]
    for use in uses:
        note = f"too few tokens: max_epochs is {use.allowed:g}" if use.exhausted else ""
        rows.append((use.phase, use.stream, f"{use.share:.3%}", count(use.tokens), f"{use.epochs:,.2f}",
                     f"{use.worth:.0%}", note))
    width = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(size) if column in (0, 1, 6) else cell.rjust(size)
                       for column, (cell, size) in enumerate(zip(row, width))).rstrip() for row in rows]
    return [*lines, *(f"note: {note}" for note in notes)]
