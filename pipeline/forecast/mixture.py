"""Computes, before a run, how often the curriculum (the phases of a training) of a recipe would read every token
stream. This tells whether there will be enough tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.forecast.range import Range
from pipeline.recipe.model import Recipe
from tokenizer.mixture.mix import streams_in
from tokenizer.mixture.phases import Phase, epochs_allowed
from tokenizer.mixture.resolve import WORTHWHILE_EPOCHS, parse_count, resolve_phases


@dataclass(frozen=True)
class StreamUse:
    """How much the curriculum of a training uses a token stream: the tokens `available`, the tokens `needed`, and the
    resulting number of `epochs` (passes over the stream)."""

    stream: str
    available: Range
    needed: float
    epochs: Range


def phases(recipe: Recipe, tokens: Mapping[str, Range] | None = None) -> list[Phase]:
    """Return the phases of the recipe's curriculum (its plan of a training), each with start and length in tokens.
    Raises CurriculumError when the phases do not fit into the total.

    `tokens` holds the expected number of tokens of each stream, from which some groups of streams compute their
    weights. A stream that is missing in `tokens` counts as one token, so without `tokens` all streams count as equal.
    Split shards whose streams are not in `tokens` count as one stream."""
    if recipe.curriculum is None:
        return []
    given = {stream: has.value for stream, has in (tokens or {}).items()}
    splits = {split: recipe.shards[split].labels for split in map(recipe.split_of, given) if split is not None}
    sizes = {**dict.fromkeys(sorted(recipe.shards.keys() - splits), 1.0), **given}
    entries = recipe.plain()["curriculum"]["phases"]
    for entry in entries:
        mix = entry.get("mix") or {}
        for name, value in mix.items():
            if isinstance(value, dict) and "streams" not in value and name not in splits:
                mix[name] = value["share"]                     # split shards, of whose streams nothing is known
        for stream in {*streams_in(mix), *(entry.get("max_epochs") or {})} - splits.keys():
            sizes.setdefault(stream, 1.0)
    sizes = {stream: sizes[stream] for stream in sorted(sizes)}
    return resolve_phases(entries, parse_count(recipe.curriculum.total, "curriculum.total"), sizes, [], splits=splits)


def mixture(recipe: Recipe, tokens: Mapping[str, Range]) -> tuple[list[StreamUse], list[str]]:
    """Return how much the phases of the recipe's curriculum use every token stream, and notes. The notes name streams
    that have too few tokens, or that are read more often than is worthwhile.

    `tokens` holds the expected training tokens by stream. A stream provides slightly fewer tokens, because it is cut
    into whole windows (training sequences)."""
    if recipe.curriculum is None or not tokens:
        return [], []
    needed: dict[str, float] = dict.fromkeys([*recipe.shards, *tokens], 0.0)
    notes: dict[str, str] = {}
    for phase in phases(recipe, tokens):
        for stream, weight in phase.weights.items():
            needed.setdefault(stream, 0.0)
            needed[stream] += phase.tokens * weight / sum(phase.weights.values())
            allowed = phase.max_epochs.get(stream, 1)
            has = tokens.get(stream)
            most = epochs_allowed(allowed)
            if has is None or phase.on_exhausted == "repeat" or needed[stream] <= most * has.low:
                continue
            verb = "has" if needed[stream] > most * has.high else "may have"
            often = f"{allowed:g} epoch" + ("s" if allowed != 1 else "")
            expected = f"{has.low:,.0f}" + (f" … {has.high:,.0f}" if has.high > has.low else "")
            notes.setdefault(stream, f"curriculum: by the end of phase '{phase.name}' stream '{stream}' {verb} too few "
                             f"tokens: {needed[stream]:,.0f} are wanted, {expected} expected, "
                             f"{often} allowed; lower its weight or the total, or raise max_epochs")
    uses = []
    for stream, amount in needed.items():
        has = tokens.get(stream)
        if not amount or has is None:
            continue
        epochs = Range(*(amount / max(n, 1.0) for n in (has.value, has.high, has.low)))
        if epochs.value > epochs_allowed(WORTHWHILE_EPOCHS):
            notes.setdefault(stream, f"curriculum: stream '{stream}' would be read about {epochs.value:,.1f} times; "
                             f"beyond {WORTHWHILE_EPOCHS} epochs a repeated token is worth little (arXiv 2305.16264)")
        uses.append(StreamUse(stream, has, amount, epochs))
    return uses, list(notes.values())
