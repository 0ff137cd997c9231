"""Turns the `mix` of a phase in a recipe into integer weights of streams (the tokens of one source, language or
bucket).

An entry of a mix is the weight of a stream, as in {web: 70%, code: 30%}, or a group of streams that share a weight:

    {share: 70, streams: {en: 3, de: 1}}             weights within the group
    {share: 70, streams: [en, de]}                   in proportion to the tokens that each stream has
    {share: 70, streams: [en, de], alpha: 0.3}       in proportion to tokens^0.3: small streams get more than that
    {share: 70, streams: [en, de], unimax: 4}        equal, but no stream is read more than 4 times in the phase

`alpha` is the exponent of temperature sampling (1/T; Conneau et al., arXiv 1911.02116: 0.3). `unimax` is UniMax (Chung
et al., arXiv 2304.09151): if a stream has too few tokens for an equal share, what it lacks is divided equally between
the others. If all streams of the group together have too few, their weights are in proportion to their tokens, and they
are read more often.

Shards that are split by labels have further rules (`tokenizer.mixture.split`).
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence, Set
from fractions import Fraction
from types import MappingProxyType
from typing import Any

from tokenizer.mixture.apportion import Apportionment, CurriculumError
from tokenizer.mixture.split import divide, unimax_parts

#: largest sum of the integer weights of the streams
WEIGHT_SUM = 10**8
#: keys that a group of streams may have in a mix
GROUP_KEYS = ("share", "streams", "alpha", "unimax")


def read_mix(mix: Mapping[str, Any], key: str, sizes: Mapping[str, float], tokens: int, warnings: list[str],
             splits: Mapping[str, list[str]] = MappingProxyType({})
             ) -> tuple[dict[str, int], dict[str, list[str]] | None]:
    """Convert the `mix` of a phase (stretch of the training) of `tokens` tokens into integer weights of streams (data
    sources). Returns ({stream: weight}, {group: its streams}). Streams of weight 0, and groups that have only such
    streams, are left out. Without groups, the second value is None.

    `sizes` has the number of tokens of every existing stream. The weights are in its order, and the groups are sorted
    by name. `splits` maps the names of split shards to the labels by which they are split into streams. The streams of
    such shards form a group. One of them whose weight would be below one in WEIGHT_SUM is left out, with a warning.

    Warnings are appended to `warnings`. Raises CurriculumError if an entry is wrong; the message names `key`, the path
    of the mix in the recipe."""
    inside: dict[str, tuple[Fraction, dict[str, Fraction]]] = {}
    for name, value in mix.items():
        if isinstance(value, Mapping) or name in splits:
            value = value if isinstance(value, Mapping) else {"share": value}
            inside[name] = _share(value.get("share"), f"{key}.{name}.share"), {}
        else:
            inside[name] = _share(value, f"{key}.{name}"), {_known(name, key, sizes): Fraction(1)}
    total = sum(share for share, _ in inside.values())
    if total <= 0:
        raise CurriculumError(f"{key}: at least one stream needs a weight above 0")
    if total not in (1, 100):
        warnings.append(f"{key}: weights sum to {float(total):g}, not to 100; they were normalised")
    shares: dict[str, Fraction] = {}
    groups: dict[str, list[str]] = {}
    optional: set[str] = set()
    for name, (share, parts) in inside.items():
        if not parts:
            budget = tokens * float(share / total)
            if name in splits and share:
                spec = mix[name] if isinstance(mix[name], Mapping) else {}
                parts = divide(name, spec, splits[name], f"{key}.{name}", sizes, budget, warnings)
                optional.update(parts)
            elif name not in splits:
                parts = _group(mix[name], f"{key}.{name}", sizes, budget)
            groups[name] = list(parts)
        for stream, part in parts.items():
            if stream in shares:
                raise CurriculumError(f"{key}: the phase has stream '{stream}' twice; give it one place")
            shares[stream] = share * part
    # sorted, so that the order of the lines in the recipe does not matter
    shares = {stream: shares[stream] for stream in sizes if stream in shares}
    weights = _integers(shares, [*groups.values()], key, optional)
    if small := sorted(stream for stream in optional if shares[stream] and not weights[stream]):
        warnings.append(f"{key}: not read, as their weights are below one in {WEIGHT_SUM:,}: {', '.join(small)}")
    place = {stream: i for i, stream in enumerate(sizes)}
    groups = {name: kept for name, group in sorted(groups.items())
              if (kept := sorted((stream for stream in group if weights[stream]), key=place.__getitem__))}
    return {name: weights[name] for name in sizes if weights.get(name)}, groups or None


def streams_in(mix: Mapping[str, Any]) -> list[str]:
    """Return all names of streams (data sources) in the `mix` of a phase (stretch of the training). An entry with a
    plain weight is named by its key, which may also be the name of shards that are split into streams. Of an entry that
    is a mapping, the names under its key `streams` are returned, if it has one. The mix need not be valid."""
    return [stream for name, value in mix.items() for stream in (
        [name] if not isinstance(value, Mapping)
        else value["streams"] if isinstance(value.get("streams"), (Mapping, list)) else ())]


def _group(group: Mapping[str, Any], key: str, sizes: Mapping[str, float], budget: float) -> dict[str, Fraction]:
    """Return how a group of streams (data sources) divides its share: {stream: fraction}; the fractions sum to 1.
    `budget` is the number of tokens that the phase (stretch of the training) reads from the group."""
    streams, alpha, unimax = (group.get(name) for name in ("streams", "alpha", "unimax"))
    unknown = sorted(set(group) - set(GROUP_KEYS))
    if unknown or not isinstance(streams, (Mapping, list)) or not streams:
        raise CurriculumError(f"{key}: a group is a mapping such as {{share: 70, streams: {{en: 3, de: 1}}}}, with the "
                              f"keys {', '.join(GROUP_KEYS)}; not {dict(group)}")
    for stream in streams:
        _known(stream, f"{key}.streams", sizes)
    if isinstance(streams, Mapping):
        if alpha is not None or unimax is not None:
            raise CurriculumError(f"{key}: `alpha` and `unimax` find weights, and `streams` gives them: write streams "
                                  f"as a list")
        parts = {stream: _share(weight, f"{key}.streams.{stream}") for stream, weight in streams.items()}
    elif unimax is not None:
        if alpha is not None or not _is_above_0(unimax):
            raise CurriculumError(f"{key}.unimax: a number of epochs above 0, without `alpha`; got {unimax!r}")
        parts = unimax_parts({stream: sizes[stream] for stream in streams}, budget, float(unimax))
    else:
        if alpha is not None and not (_is_above_0(alpha) or alpha == 0):
            raise CurriculumError(f"{key}.alpha: an exponent of at least 0, such as 0.3; got {alpha!r}")
        parts = {stream: Fraction(float(sizes[stream]) ** float(1 if alpha is None else alpha)) for stream in streams}
    total = sum(parts.values())
    if not total:
        raise CurriculumError(f"{key}.streams: at least one stream needs a weight above 0")
    return {stream: part / total for stream, part in parts.items()}


def _is_above_0(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def _known(name: str, key: str, sizes: Mapping[str, float]) -> str:
    """Return `name` if `sizes` has a stream (data source) of this name. Raises CurriculumError if not; the message
    suggests a similar name."""
    if name not in sizes:
        near = difflib.get_close_matches(str(name), sizes, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"shards: has {', '.join(sizes)}"
        raise CurriculumError(f"{key}: unknown stream '{name}': {hint}")
    return name


def _share(value: Any, key: str) -> Fraction:
    """Parse a weight. A percent sign is dropped: '70%' is 70, and 0.5 is 0.5; only the ratio of weights counts. Raises
    CurriculumError, which names `key`, unless the weight is a number of at least 0."""
    try:
        share = Fraction(str(value).strip().removesuffix("%"))
    except (ValueError, ZeroDivisionError):
        share = Fraction(-1)
    if isinstance(value, bool) or share < 0:
        raise CurriculumError(f"{key}: weight {value!r} is not a number >= 0")
    return share


def _integers(shares: Mapping[str, Fraction], groups: Sequence[Sequence[str]], key: str,
              optional: Set[str]) -> dict[str, int]:
    """Return integer weights of streams (data sources), in the ratio of `shares`.

    Weights that would sum to more than WEIGHT_SUM are rounded: WEIGHT_SUM is divided between the groups and the streams
    without a group, and the part of each group between its streams. Raises CurriculumError if a weight above 0 becomes
    0, except for the streams in `optional`."""
    scale = math.lcm(*(share.denominator for share in shares.values()))
    weights = {name: int(share * scale) for name, share in shares.items()}
    divisor = math.gcd(*weights.values())
    weights = {name: weight // divisor for name, weight in weights.items()}
    if sum(weights.values()) > WEIGHT_SUM:
        number = {name: i for i, name in enumerate(weights)}
        apportioned = Apportionment(list(weights.values()), [[number[name] for name in group] for group in groups])
        weights = dict(zip(weights, apportioned.counts(WEIGHT_SUM)))
        vanished = [name for name, share in shares.items() if share and not weights[name] and name not in optional]
        if vanished:
            raise CurriculumError(f"{key}: weights of {vanished} are below one in {WEIGHT_SUM:,}: raise or remove them")
    return weights
