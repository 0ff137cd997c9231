"""Turns the `curriculum` section of a recipe into the contents of curriculum.json: shares (70%), counts with suffixes
(14B) and keys inherited from an earlier phase become numbers of samples and integer weights."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from fractions import Fraction
from types import MappingProxyType
from typing import Any

from pipeline.base import quantities
from tokenizer.mixture.curriculum import (
    RATE_KEYS,
    Curriculum,
    CurriculumError,
    Phase,
    Stream,
    TokenizerRef,
    check_rate,
    is_number,
)
from tokenizer.mixture.mix import read_mix
from tokenizer.mixture.order import Order
from tokenizer.mixture.phases import epochs_allowed

#: share of padding in packed rows from which on a warning is given
MUCH_PADDING = 0.01
#: beyond this many epochs, repeated data hardly helps (Muennighoff et al., arXiv 2305.16264)
WORTHWHILE_EPOCHS = 4


def parse_count(value: Any, key: str) -> int:
    """Parse a count such as '14B' (see `pipeline.base.quantities.parse_count`). Raises a CurriculumError that names
    `key`, the recipe's key."""
    try:
        return quantities.parse_count(value)
    except ValueError as e:
        raise CurriculumError(f"{key}: {value!r} is not a number of tokens: {e}") from None


def resolve(recipe: Mapping[str, Any], shard_sets: Mapping[str, Mapping[str, Any]],
            tokenizer: Mapping[str, Any]) -> tuple[Curriculum, list[str]]:
    """Turn the curriculum of a recipe into the one that the trainer reads. Returns (curriculum, warnings for the author
    of the recipe).

    `recipe` has the keys `curriculum` and perhaps `shards` (for `longest`, `by` and `from_phase`), with YAML values.
    `shard_sets` maps the name of a stream to the result of `pipeline.passes.publish_shards.publish_shards` for it.
    `tokenizer` has the keys sha256, vocab_size, eos and path. Streams are sorted by name, so that the order of samples
    does not depend on the order of lines in the recipe. Raises a CurriculumError that names the key of the recipe.
    """
    spec = recipe["curriculum"]
    warnings: list[str] = []
    names = sorted(shard_sets)
    if not names:
        raise CurriculumError("shards: at least one stream is needed")
    shards = recipe.get("shards") or {}
    splits = {name: split_labels(entry["by"]) for name, entry in shards.items() if (entry or {}).get("by")}
    entries = {name: shards.get(next((split for split in splits if name.startswith(f"{split}.")), name)) or {}
               for name in names}
    streams = tuple(replace(_stream(name, shard_sets[name], tokenizer), from_phase=entries[name].get("from_phase"))
                    for name in names)
    total = parse_count(spec.get("total"), "curriculum.total")
    lengths = [parse_count(shards[name]["longest"], f"shards.{name}.longest") for name in splits]
    sizes = stream_sizes(streams, splits, max(lengths, default=0))
    phases = resolve_phases(spec.get("phases") or (), total, sizes, warnings, splits=splits)
    if not phases:
        raise CurriculumError("curriculum.phases: at least one phase is needed")
    phase_tokens = sum(phase.tokens for phase in phases if not phase.extra)
    if abs(phase_tokens - total) > 0.01 * total:
        warnings.append(f"curriculum.total: whole steps of the phases make {phase_tokens:,} tokens, not {total:,}")
    longest = _longest(shards, [*names, *splits], max(p.sequence for p in phases))
    ref = TokenizerRef(**{f.name: tokenizer[f.name] for f in fields(TokenizerRef)})
    curriculum = Curriculum(int(spec.get("seed", 0)), ref, longest, streams, tuple(phases), "")
    curriculum.validate()
    order = Order(curriculum)
    for s, name in enumerate(names):
        epochs = order.used[-1][s] / order.supers[s] if order.supers[s] else 0
        if epochs > epochs_allowed(WORTHWHILE_EPOCHS):
            warnings.append(f"stream '{name}' is read {epochs:.1f} times; beyond {WORTHWHILE_EPOCHS} epochs repeated "
                            f"data hardly helps (arXiv 2305.16264)")
    for stream in streams:
        if stream.padding(longest) > MUCH_PADDING:
            warnings.append(f"shards.{stream.name}.packing: {stream.padding(longest):.1%} of its rows of {longest:,} "
                            f"tokens are padding, which costs as much time as text; leave `packing` out, or give the "
                            f"shards a larger `longest`")
    unused = [s.name for s in streams if s.tokens and not any(p.weights.get(s.name) for p in phases)]
    if unused:
        warnings.append(f"curriculum: no phase draws from {', '.join(unused)}")
    return replace(curriculum, order=order.hash()), warnings


def stream_sizes(streams: Sequence[Stream], splits: Mapping[str, list[str]], longest: int) -> dict[str, int]:
    """Return the number of tokens of each stream (data source). `splits` names the shards that are divided into streams
    by labels. One of their streams counts as empty if it has at most `longest` tokens: phases reserve blocks of
    `longest` tokens, each with the token after it, and so small a stream has none."""
    return {s.name: 0 if s.tokens <= longest and any(s.name.startswith(f"{name}.") for name in splits) else s.tokens
            for s in streams}


def resolve_phases(entries: Sequence[Mapping[str, Any]], total: int, sizes: Mapping[str, float], warnings: list[str],
                   existing: Sequence[Phase] = (), where: str = "curriculum.phases",
                   splits: Mapping[str, list[str]] = MappingProxyType({})) -> list[Phase]:
    """Return the phases (stretches of the training) for `entries` of a recipe's `curriculum.phases`. The new phases
    come after the phases `existing`.

    `until` of an entry counts tokens from the start of the run. Percentages are shares of `total` tokens. `sizes` has
    the number of tokens of every existing stream. `splits` has the labels of the shards that are split into streams.

    An entry inherits the keys that it does not give from the entry before it, and the first entry from the last of
    `existing`. There are four exceptions: `name`, `until`, `extra` and `reset_optimizer`. Of a `batch` that grows, the
    largest size is inherited. After an entry whose `lr` is a curve of its own, `lr` must be given.

    Warnings are appended to `warnings`. Raises CurriculumError if an entry is wrong; the message begins with
    `where`."""
    phases: list[Phase] = []
    previous = existing[-1] if existing else None
    entry: dict[str, Any] = {"lr": "stable", "max_epochs": {}, "on_exhausted": "error"}
    if previous is not None:
        entry = {"sequence": previous.sequence, "batch": previous.batch * previous.sequence, "mix": previous.weights,
                 "lr": previous.lr, "max_epochs": previous.max_epochs, "on_exhausted": previous.on_exhausted,
                 "rope_theta": previous.rope_theta, "rope_scaling": previous.rope_scaling}
    end, start = sum(phase.tokens for phase in existing), previous.stop if previous else 0
    for number, own_keys in enumerate(entries):
        key = f"{where}[{number}]"
        if own_keys.get("lr") is None and isinstance(entry["lr"], Mapping):
            raise CurriculumError(f"{key}.lr is missing: the phase before has a learning rate of its own, which is not "
                                  f"inherited; write lr: stable, or {{peak: …, warmup: …, shape: …}} again")
        not_inherited = {"name": None, "until": None, "extra": None, "reset_optimizer": False}
        entry = {**entry, **not_inherited, **{item: value for item, value in own_keys.items() if value is not None}}
        for required in ("name", "sequence", "batch", "mix"):
            if entry.get(required) is None:
                raise CurriculumError(f"{key}.{required} is missing")
        if str(entry["name"]) in {phase.name for phase in (*existing, *phases)}:
            raise CurriculumError(f"{key}.name: two phases would be called '{entry['name']}'; give it another name")
        extra = entry["extra"] is not None
        if extra == (entry["until"] is not None):
            raise CurriculumError(f"{key}: `until` says where in the total it ends, `extra` how many tokens it has "
                                  f"beyond it: give one of them" if extra else f"{key}.until is missing")
        target = end + parse_count(entry["extra"], f"{key}.extra") if extra else \
            _until(entry["until"], total, f"{key}.until")
        sequence = parse_count(entry["sequence"], f"{key}.sequence")
        if target <= end:
            raise CurriculumError(f"{key}.until: {entry['until']} is not after the phase before it")
        ramp, batch = _batches(entry["batch"], sequence, target - end, f"{key}.batch", warnings)
        grown = ramp[-1][0] if ramp else 0
        partial = grown % batch
        full_batches = round((target - end - partial * sequence) / (batch * sequence))
        samples = partial + max(grown // batch + 1, full_batches) * batch
        if isinstance(entry["batch"], Mapping):     # the next phase does not grow again: it inherits the largest size
            entry["batch"] = max(parse_count(size, f"{key}.batch") for size in entry["batch"].values())
        weights, groups, made = (previous.weights, previous.groups, previous.made) \
            if previous is not None and entry["mix"] is previous.weights \
            else (*read_mix(entry["mix"], f"{key}.mix", sizes, samples * sequence, warnings, splits),
                  _made(entry["mix"], splits))
        scaling = entry.get("rope_scaling")
        phases.append(Phase(
            str(entry["name"]), start, samples, samples, sequence, batch, weights,
            own_rate(entry["lr"], samples * sequence, f"{key}.lr"),
            _epochs(entry["max_epochs"] or {}, f"{key}.max_epochs", sizes, splits), str(entry["on_exhausted"]), extra,
            entry["reset_optimizer"], _float(entry.get("rope_theta")),
            dict(scaling) if isinstance(scaling, Mapping) else scaling, ramp, groups, made))
        end, start = end + phases[-1].tokens, phases[-1].stop
    return phases


def _batches(value: Any, sequence: int, tokens: int, key: str,
             warnings: list[str]) -> tuple[list[list[int]] | None, int]:
    """Convert the `batch` of a phase (stretch of the training) in a recipe into the fields `ramp` and `batch` of
    `Phase`. The phase has `tokens` tokens.

    `value` is a number of tokens per step such as '0.5M'. If the batch size grows within the phase, `value` is a
    mapping such as {0: 64k, 100M: 128k, 1B: 0.5M}: each key says after how many tokens of the phase a batch size
    begins.

    The point where a batch size begins is rounded to whole steps of the size before it. If each size is a multiple of
    the one before it, the point is rounded to a multiple of the new size instead. It is counted in samples from the
    start of the phase. The phase then has as many samples as if it had the last batch size from the start."""
    table = value if isinstance(value, Mapping) else {0: value}
    try:
        rows = sorted((quantities.parse_count(begin, least=0), begin) for begin in table)
    except ValueError as e:
        raise CurriculumError(f"{key}: {e}") from None
    if not rows or rows[0][0]:
        raise CurriculumError(f"{key}: a batch that grows begins at 0, e.g. {{0: 64k, 100M: 128k, 1B: 0.5M}}")
    sizes = []
    for _, begin in rows:
        tokens_of_step = parse_count(table[begin], f"{key}.{begin}" if isinstance(value, Mapping) else key)
        sizes.append(max(1, round(tokens_of_step / sequence)))
        if sizes[-1] * sequence != tokens_of_step:
            warnings.append(f"{key}: {tokens_of_step:,} tokens are no multiple of sequence {sequence:,}; a step has "
                            f"{sizes[-1]} sequences = {sizes[-1] * sequence:,} tokens")
    ramp: list[list[int]] = []
    start = 0
    for (begin, _), size, larger in zip(rows[1:], sizes, sizes[1:]):
        if larger <= size or not 0 < begin < tokens:
            raise CurriculumError(f"{key}: batches grow, each from a later token of the phase on, before its end at "
                                  f"{tokens:,}; got {dict(value)}")
        aligned = larger % size == 0 and start % size == 0
        unit, base = (larger, start // larger * larger) if aligned else (size, start)
        start = base + max(1, round((begin / sequence - base) / unit)) * unit
        ramp.append([start, size])
    return ramp or None, sizes[-1]


def split_labels(by: Sequence[Any]) -> list[str]:
    """Return the names of the labels in `shards.NAME.by`. An item is the name of a label, or {signal.NAME: [edges]},
    whose label is called signal.NAME."""
    return [item if isinstance(item, str) else next(iter(item)) for item in by]


def _made(mix: Mapping[str, Any], splits: Mapping[str, list[str]]) -> dict[str, Any] | None:
    """Return the field `made` of a `Phase`, which records the rules from which weights were computed. It has an entry
    for each of the split shards in the mix (shards that are divided into streams by labels): the names of their labels,
    and their entry in the mix. Returns None if the mix has no split shards."""
    return {name: {"labels": splits[name], **(entry if isinstance(entry, Mapping) else {"share": entry})}
            for name, entry in sorted(mix.items()) if name in splits} or None


def _epochs(value: Any, key: str, sizes: Mapping[str, float],
            splits: Mapping[str, list[str]]) -> dict[str, float]:
    """Parse the key `max_epochs` of a phase (stretch of the training) in a recipe. Returns {stream: how often it may
    have been read by the end of the phase, counted from the start of the run}.

    `splits` names the shard sets that are split by labels into several streams, called NAME.LABEL. A limit for NAME
    applies to all of these streams except those with a limit of their own."""
    epochs = {stream: _float(limit) for stream, limit in value.items()} if isinstance(value, Mapping) else {}
    if not isinstance(value, Mapping) or not all(is_number(limit) and limit >= 0 for limit in epochs.values()):
        raise CurriculumError(f"{key}: epochs by stream, e.g. {{code: 2}}, not {value!r}")
    for name in splits.keys() & epochs.keys():
        limit = epochs.pop(name)
        epochs = {**{stream: limit for stream in sizes if stream.startswith(f"{name}.")}, **epochs}
    return epochs


def _float(value: Any) -> Any:
    """Convert a number to float, also one that YAML 1.1 reads as a string (2e-5, without a dot). Any other value is
    returned unchanged, so that the caller can raise an error about it."""
    with contextlib.suppress(TypeError, ValueError):
        return value if isinstance(value, bool) else float(value)
    return value


def own_rate(value: Any, tokens: int, key: str) -> Any:
    """Convert the recipe's `lr` of a phase (stretch of the training) with `tokens` tokens into the field `lr` of
    `Phase`. In a mapping, missing keys other than `peak` get their defaults (no warm-up, a cosine that falls to 0), and
    the warm-up becomes a number of tokens. A word such as 'stable' stays as it is. Raises CurriculumError if a value of
    the mapping is wrong."""
    if not isinstance(value, Mapping):
        return value
    rate = {"warmup": 0, "shape": "cosine", "floor": 0.0, **value}
    warmup = rate["warmup"]
    if str(warmup).strip().endswith("%"):
        rate["warmup"] = _until(warmup, tokens, f"{key}.warmup")
    elif warmup != 0:
        rate["warmup"] = parse_count(warmup, f"{key}.warmup")
    rate |= {name: _float(rate.get(name)) for name in ("peak", "floor")}
    check_rate(rate, tokens, key)
    return {name: rate[name] for name in RATE_KEYS}


def _stream(name: str, info: Mapping[str, Any], tokenizer: Mapping[str, Any]) -> Stream:
    """Return the Stream (a source of training data) for `info`, the description of a published shard set. Raises
    CurriculumError if another tokenizer has encoded the set."""
    train, val = info["train"], info.get("val")
    if info["tokenizer"] != tokenizer["sha256"]:
        raise CurriculumError(f"shards.{name} was encoded with another tokenizer ({info['tokenizer'][:12]}…, not "
                              f"{tokenizer['sha256'][:12]}…): encode it again")
    packing = train.get("packing")
    packed = {"packing": packing["sha256"], "rows": packing["rows"], "filled": packing["filled"]} if packing else {}
    return Stream(name, train["path"], val["path"] if val else None, train["sha256"], val["sha256"] if val else None,
                  train["tokens"], val["tokens"] if val else 0, info["dtype"], **packed)


def _until(value: Any, total: int, key: str) -> int:
    """Convert a share of `total` such as '70%', or a count such as '14B', into a number of tokens. Raises
    CurriculumError unless the share is above 0 and at most 100%."""
    text = str(value).strip()
    if not text.endswith("%"):
        return parse_count(value, key)
    try:
        share = Fraction(text[:-1].strip()) / 100
    except (ValueError, ZeroDivisionError):
        share = Fraction(-1)
    if not 0 < share <= 1:
        raise CurriculumError(f"{key}: {value!r} is not a share of the total; write for example 70% or 14B")
    return round(share * total)


def _longest(shards: Mapping[str, Any], names: list[str], default: int) -> int:
    """Return how many tokens a super-window (the block in which phases reserve data) has: the value `longest` of the
    recipe's `shards`, or `default` if no stream (data source) has one. Raises CurriculumError if the streams `names`
    have different values."""
    lengths = {name: parse_count(shards[name]["longest"], f"shards.{name}.longest") for name in names
               if (shards.get(name) or {}).get("longest") is not None}
    if len(set(lengths.values())) > 1:
        raise CurriculumError(f"shards: `longest` differs between streams ({lengths}): give all of a "
                              f"curriculum the same")
    return next(iter(lengths.values()), default)
