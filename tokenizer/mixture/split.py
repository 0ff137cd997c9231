"""Divides the share of split shards (`shards.NAME.by`) between their streams, by rules over labels such as language or
quality bucket.

An entry of a mix may be such shards, here `web`, which are split by language and bucket:

    web: 75                                                     in proportion to the tokens of each stream
    web: {share: 75, by: language, temperature: 3.3}            tokens^(1/3.3) by language (`alpha: 0.3` is the same)
    web: {share: 75, by: language, unimax: 4}                   equal by language, none read more than 4 times
    web: {share: 75, by: language, weights: {en: 3, de: 1}}     a table; labels that it leaves out are not read
    web: {share: 75, by: bucket, upsample: {b00: 0, b19: 4}}    tokens times a factor; 1 for labels left out
    web: {share: 75, by: bucket, curve: {power: 2, rate: 1}}    tokens times a factor that rises with the quality
    web: {share: 75, by: language, alpha: 0.3, within: {by: bucket, curve: {power: 2, rate: 1}}}

The rule divides the share between the labels; without a rule, it is divided in proportion to tokens. `within` divides
the part of each label between the streams with this label; without it, the part is divided in proportion to tokens.

`unimax` and a curve (by its key `cap`) limit how often tokens are read. If even these limits allow fewer tokens than
the share needs, all labels are read more often, in proportion to what the limits allow.
"""

from __future__ import annotations

import difflib
import functools
import math
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import numpy as np

from tokenizer.mixture.apportion import CurriculumError

#: rules of which a group may have at most one
RULES = ("alpha", "temperature", "unimax", "weights", "upsample", "curve")
CURVE_KEYS = ("power", "rate", "cap", "drop", "buckets")
#: fractions with a larger common denominator are rounded to multiples of 2^-GRID_BITS
GRID_BITS = 100
Sizes = Mapping[str, float]


def divide(name: str, spec: Mapping[str, Any], labels: list[str], key: str, sizes: Sizes, budget: float,
           warnings: list[str]) -> dict[str, Fraction]:
    """Return {stream: share} for the streams of the split shards `name`: how they divide what a phase (stretch of the
    training) reads from these shards. The shares sum to 1, up to rounding to multiples of 2^-GRID_BITS. Streams without
    tokens are left out.

    `spec` is the entry of the mix. `labels` are the names of the labels by which the shards are split, such as
    language. `budget` is the number of tokens that the phase reads from these shards. Warnings are appended to
    `warnings`. A CurriculumError names `key`, the path of the entry in the recipe."""
    members = {stream: size for stream, size in sizes.items() if stream.startswith(f"{name}.") and size > 0}
    if not members:
        raise CurriculumError(f"{key}: no stream of '{name}' has enough tokens for a training sample; lower "
                              f"shards.{name}.longest, or remove the entry")
    notes: dict[str, None] = {}                          # warnings; a dict, so that each is given once
    rules = {k: v for k, v in spec.items() if k != "share"}
    shares = _divide(members, len(name) + 1, rules, labels, key, budget, notes)
    if not shares:
        raise CurriculumError(f"{key}: the rules read nothing of any stream; give at least one label a weight")
    _check_tables(spec, members, len(name) + 1, key, notes)
    warnings += notes
    if math.lcm(*(share.denominator for share in shares.values())).bit_length() > GRID_BITS:
        # exact fractions of thousands of streams have a common denominator of a million digits
        shares = {stream: Fraction(round(share * 2**GRID_BITS), 2**GRID_BITS) for stream, share in shares.items()}
    return shares


def _divide(members: Sizes, prefix: int, spec: Mapping[str, Any], labels: list[str], key: str, budget: float,
            notes: dict[str, None]) -> dict[str, Fraction]:
    """Return {stream: share} for some streams of the split shards, by the rules `spec`; {} if the rules give no stream
    a share. `members` maps these streams to their numbers of tokens. Their names have the labels from character
    `prefix` on. Warnings are added to `notes` as keys."""
    unknown = sorted(set(spec) - {"by", "within", *RULES})
    if unknown:
        raise CurriculumError(f"{key}.{unknown[0]}: unknown key of a group of split shards; there are share, by, "
                              f"within, {', '.join(RULES)}")
    by, within = spec.get("by"), spec.get("within")
    if by is not None and by not in labels:
        raise CurriculumError(f"{key}.by: the shards are split by {', '.join(labels)}, not by '{by}'")
    if within is not None and (by is None or not isinstance(within, Mapping)):
        raise CurriculumError(f"{key}.within: rules for the streams of each label, beside `by: {labels[0]}`")
    groups: dict[str, dict[str, float]] = {}
    for stream, size in members.items():
        parts = stream[prefix:].split(".")
        place = labels.index(by) if by is not None else 0
        label = ".".join(parts) if by is None else parts[place] if place < len(parts) else parts[-1]
        groups.setdefault(label, {})[stream] = size
    if within is not None:
        unread = sorted(label for label, group in groups.items()
                        if not _divide(group, prefix, within, labels, f"{key}.within", 1.0, {}))
        groups = {label: group for label, group in groups.items() if label not in unread}
        if unread:
            notes[f"{key}.within: reads nothing of {', '.join(unread)}, whose share goes to the other labels"] = None
    weights = _rule({label: sum(group.values()) for label, group in groups.items()}, spec, key, budget, notes)
    total = sum(weights.values())
    shares: dict[str, Fraction] = {}
    for label, group in groups.items():
        if not weights[label]:
            continue
        part = weights[label] / total
        inside = {stream: Fraction(1) for stream in group} if len(group) == 1 and within is None else \
            _divide(group, prefix, within or {}, labels, f"{key}.within", budget * float(part), notes)
        shares.update((stream, part * share) for stream, share in inside.items())
    return shares


def _rule(sizes: Sizes, spec: Mapping[str, Any], key: str, budget: float,
          notes: dict[str, None]) -> dict[str, Fraction]:
    """Return {label: weight}. `spec` may have one rule, whose name is one of RULES. Without a rule, the weight of a
    label is its number of tokens, which `sizes` has. Warnings are added to `notes` as keys."""
    rules = [rule for rule in RULES if spec.get(rule) is not None]
    if len(rules) > 1:
        raise CurriculumError(f"{key}: {' and '.join(rules)} are rules for the same weights; give one of them")
    rule = rules[0] if rules else "alpha"
    value = spec.get(rule)
    if rule in ("weights", "upsample"):
        table = _table(value, sizes, f"{key}.{rule}")
        if rule == "upsample":
            return {label: Fraction(size) * table.get(label, 1) for label, size in sizes.items()}
        if left_out := sorted(set(sizes) - set(table)):
            notes[f"{key}.weights: not read, as the table has no weight for them: {', '.join(left_out)}"] = None
        return {label: table.get(label, Fraction(0)) for label in sizes}
    if rule == "curve":
        return _curve(sizes, value, f"{key}.curve", budget, notes)
    number = 1 if value is None else value
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number < math.inf or (
            number == 0 and rule != "alpha"):
        raise CurriculumError(f"{key}.{rule}: a number above 0, not {value!r}")
    if rule == "unimax":
        return unimax_parts(sizes, budget, float(number))
    exponent = float(number) if rule == "alpha" else 1 / float(number)
    return {label: Fraction(size) if exponent == 1 else Fraction(float(size) ** exponent)
            for label, size in sizes.items()}


def unimax_parts(sizes: Sizes, budget: float, epochs: float) -> dict[str, Fraction]:
    """Return how `budget` tokens are divided equally between streams (data sources) of these sizes, with each stream
    read at most `epochs` times. If all streams together allow fewer tokens than `budget`, each gets as many as it
    allows, and the result sums to less."""
    parts: dict[str, Fraction] = {}
    left = Fraction(budget)
    for number, (size, stream) in enumerate(sorted((size, stream) for stream, size in sizes.items())):
        parts[stream] = min(left / (len(sizes) - number), Fraction(size) * Fraction(epochs))
        left -= parts[stream]
    return parts


def _check_tables(spec: Mapping[str, Any], members: Sizes, prefix: int, key: str, notes: dict[str, None]) -> None:
    """Add a warning to `notes` for each label in the tables of `spec` that no stream of the split shards has. It is no
    error, because a rare label gets no stream of its own. Which labels are rare is known only when all documents have
    been encoded."""
    names = {stream[prefix:] for stream in members}
    known = names | {part for name in names for part in name.split(".")}
    for rule in ("weights", "upsample"):
        for label in sorted(set(spec.get(rule) or ()) - known):
            near = difflib.get_close_matches(label, known, n=1)
            notes[f"{key}.{rule}.{label}: no stream has this label" + (f"; did you mean '{near[0]}'?" if near
                                                                     else "")] = None
    if spec.get("within"):
        _check_tables(spec["within"], members, prefix, f"{key}.within", notes)


def _table(value: Any, sizes: Sizes, key: str) -> dict[str, Fraction]:
    if not isinstance(value, Mapping) or not value:
        raise CurriculumError(f"{key}: numbers by label, such as {{{next(iter(sizes))}: 2}}, not {value!r}")
    table = {}
    for label, number in value.items():
        try:
            table[str(label)] = Fraction(str(number).strip().removesuffix("%"))
        except (ValueError, ZeroDivisionError):
            table[str(label)] = Fraction(-1)
        if isinstance(number, bool) or table[str(label)] < 0:
            raise CurriculumError(f"{key}.{label}: weight {number!r} is not a number >= 0")
    return table


def _curve(sizes: Sizes, value: Any, key: str, budget: float, notes: dict[str, None]) -> dict[str, Fraction]:
    """Return {label: tokens}: how many tokens a phase (stretch of the training) of `budget` tokens reads from each
    quality bucket, as OLMo 3 mixes its vigintiles (twentieths of a source by quality).

    A bucket is read f times, where f is the mean of C·x^power·e^(rate·x) over the bucket. x rises from 0 (worst text)
    to 1 (best). C is chosen so that the tokens read sum to `budget`. The curve is 0 for x below `drop`, so buckets
    below `drop` are not read. Labels that are not buckets are not read either.

    Each bucket is read at most `cap` times. If this limit leaves fewer tokens than `budget`, the result sums to less,
    and a warning says so. Warnings are added to `notes` as keys."""
    unknown = sorted(set(value) - set(CURVE_KEYS)) if isinstance(value, Mapping) else []
    if not isinstance(value, Mapping) or unknown:
        raise CurriculumError(f"{key}: a mapping such as {{power: 2, rate: 1}}, with the keys {', '.join(CURVE_KEYS)}; "
                              f"not {value!r}")
    settings = {"power": 1, "rate": 0, "cap": 7, "drop": 0, "buckets": 20, **value}
    least = {"power": 0, "rate": -100, "drop": 0, "cap": 1e-6, "buckets": 2}
    most = {"power": 100, "rate": 100, "drop": 0.999, "cap": 1e6, "buckets": 1000}
    for name, number in settings.items():
        if isinstance(number, bool) or not isinstance(number, int | float) or not least[name] <= number <= most[name]:
            raise CurriculumError(f"{key}.{name}: a number from {least[name]:g} to {most[name]:g}, not {number!r}")
    count, cap = int(settings["buckets"]), float(settings["cap"])
    heights: dict[str, float] = {}
    for label in sizes:
        number = int(label[1:]) if re.fullmatch(r"b\d+", label) else -1
        if number >= count:
            raise CurriculumError(f"{key}.buckets: there are {count}, and '{label}' is beyond them; say how many "
                                  f"buckets the scores were cut into")
        if number >= 0:
            heights[label] = curve_mean(number / count, (number + 1) / count, *(float(settings[k]) for k in (
                "power", "rate", "drop")))
    if left_out := sorted(set(sizes) - set(heights)):
        notes[f"{key}: not read, as they are no buckets: {', '.join(left_out)}"] = None
    factors = dict.fromkeys(sizes, 0.0)
    left, open_labels = float(budget), sorted((label for label, height in heights.items() if height > 0),
                                              key=lambda label: (-heights[label], label))
    for number, label in enumerate(open_labels):       # the highest bucket reaches the cap first
        scale = left / math.fsum(sizes[other] * heights[other] for other in open_labels[number:])
        if scale * heights[label] <= cap:
            factors.update((other, scale * heights[other]) for other in open_labels[number:])
            break
        factors[label] = cap
        left -= cap * sizes[label]
    else:
        notes[f"{key}: even {cap:g} times the tokens of each bucket are {budget - left:,.0f} of the {budget:,.0f} that "
              f"the phase reads of them; each is read more often, in proportion"] = None
    return {label: Fraction(sizes[label] * factor) for label, factor in factors.items()}


@functools.cache
def curve_mean(start: float, stop: float, power: float, rate: float, drop: float) -> float:
    """Return the mean of the curve x^power·e^(rate·x) for x from `start` to `stop`. The curve is 0 for x below
    `drop`."""
    begin = max(start, drop)
    if begin >= stop:
        return 0.0
    nodes, weights = _gauss()
    x = begin + (stop - begin) * (nodes + 1) / 2
    return float(math.fsum(weights * x ** power * np.exp(rate * x)) / 2 * (stop - begin) / (stop - start))


@functools.cache
def _gauss() -> tuple[np.ndarray, np.ndarray]:
    """Return 64 points in [-1, 1] and their weights, for numerical integration (Gauss-Legendre quadrature)."""
    nodes, weights = np.polynomial.legendre.leggauss(64)
    return nodes, weights
