"""Whether the tokens a recipe is expected to leave suffice for its curriculum: epochs of every stream, before a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.base.quantities import parse_count
from pipeline.plan.lint import MOST_EPOCHS
from pipeline.recipe.model import Recipe

Range = Mapping[str, float]


def mixture(recipe: Recipe, tokens: Mapping[str, Range]) -> tuple[list[dict[str, Any]], list[str]]:
    """({"stream", "available": range, "needed": tokens, "epochs": range} of every stream that is mixed in, notes).

    `tokens`: expected training tokens by stream. Shares are those of the recipe, normalised; what a stream has to give
    in whole windows is a little less than its tokens.
    """
    curriculum = recipe.curriculum
    if curriculum is None or not tokens:
        return [], []
    needed: dict[str, float] = dict.fromkeys(recipe.shards, 0.0)
    held: dict[str, Any] = {"mix": {}, "max_epochs": {}, "on_exhausted": "error"}
    notes: dict[str, str] = {}
    before = 0.0
    for phase in curriculum.phases:
        held |= {key: value for key in held if (value := getattr(phase, key)) is not None}
        end = before + phase.extra if phase.extra else _end(phase.until, curriculum.total)
        total = sum(held["mix"].values())
        for stream, weight in held["mix"].items():
            needed[stream] += (end - before) * weight / total
            allowed = held["max_epochs"].get(stream, 1)
            has = tokens.get(stream)
            if has is None or held["on_exhausted"] == "repeat" or needed[stream] <= allowed * has["low"]:
                continue
            verb = "has" if needed[stream] > allowed * has["high"] else "may have"
            often = f"{allowed:g} epoch" + ("s" if allowed != 1 else "")
            notes.setdefault(stream, f"curriculum: by the end of phase '{phase.name}' stream '{stream}' {verb} too few "
                             f"tokens: {needed[stream]:,.0f} are wanted, {has['low']:,.0f} … {has['high']:,.0f} "
                             f"expected, {often} allowed; lower its weight or the total, or raise max_epochs")
        before = end
    found = []
    for stream, wanted in needed.items():
        has = tokens.get(stream)
        if not wanted or has is None:
            continue
        epochs = {"value": _ratio(wanted, has["value"]), "low": _ratio(wanted, has["high"]),
                  "high": _ratio(wanted, has["low"])}
        if epochs["value"] > MOST_EPOCHS:
            notes.setdefault(stream, f"curriculum: stream '{stream}' would be read about {epochs['value']:.1f} times; "
                             f"beyond {MOST_EPOCHS} epochs a repeated token is worth little (arXiv 2305.16264)")
        found.append({"stream": stream, "available": dict(has), "needed": wanted, "epochs": epochs})
    return found, list(notes.values())


def _ratio(wanted: float, has: float) -> float:
    return wanted / max(has, 1.0)


def _end(until: Any, total: int) -> float:
    if isinstance(until, str) and until.strip().endswith("%"):
        return float(until.strip().rstrip("%")) / 100 * total
    return float(parse_count(until))
