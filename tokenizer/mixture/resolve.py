"""Turns the `curriculum` section of a recipe into the contents of curriculum.json: shares (70%), counts with suffixes
(14B) and inherited keys become numbers of samples and integer weights."""

from __future__ import annotations

import contextlib
import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from fractions import Fraction
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
from tokenizer.mixture.order import Order, counts

#: beyond this many epochs, repeated data hardly helps (Muennighoff et al., arXiv 2305.16264)
WORTHWHILE_EPOCHS = 4
#: weights that are not integers are scaled to integers of at most this sum
WEIGHT_SUM = 10**6


def parse_count(value: Any, key: str) -> int:
    """Parse a count such as '14B' (see `pipeline.base.quantities.parse_count`). Raises a CurriculumError that names
    `key`, the recipe's key."""
    try:
        return quantities.parse_count(value)
    except ValueError as e:
        raise CurriculumError(f"{key}: {value!r} is not a number of tokens: {e}") from None


def _weights(mix: Mapping[str, Any], key: str, names: list[str], warnings: list[str]) -> dict[str, int]:
    given: dict[str, Fraction] = {}
    for name, value in mix.items():
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"shards: has {', '.join(names)}"
            raise CurriculumError(f"{key}: unknown stream '{name}': {hint}")
        try:
            given[name] = Fraction(str(value).strip().removesuffix("%"))
        except (ValueError, ZeroDivisionError):
            given[name] = Fraction(-1)
        if isinstance(value, bool) or given[name] < 0:
            raise CurriculumError(f"{key}.{name}: weight {value!r} is not a number >= 0")
    total = sum(given.values())
    if total <= 0:
        raise CurriculumError(f"{key}: at least one stream needs a weight above 0")
    if total not in (1, 100):
        warnings.append(f"{key}: weights sum to {float(total):g}, not to 100; they were normalised")
    scale = math.lcm(*(w.denominator for w in given.values()))
    whole = {name: int(w * scale) for name, w in given.items()}
    divisor = math.gcd(*whole.values())
    whole = {name: w // divisor for name, w in whole.items()}
    if sum(whole.values()) > WEIGHT_SUM:
        whole = dict(zip(whole, counts(WEIGHT_SUM, list(whole.values()))))
        gone = [name for name, w in given.items() if w and not whole[name]]
        if gone:
            raise CurriculumError(f"{key}: weights of {gone} are below one in {WEIGHT_SUM:,}: raise or remove them")
    return {name: whole[name] for name in names if whole.get(name)}


def resolve(recipe: Mapping[str, Any], shard_sets: Mapping[str, Mapping[str, Any]],
            tokenizer: Mapping[str, Any]) -> tuple[Curriculum, list[str]]:
    """Return (the curriculum of a recipe, warnings for its author).

    `recipe` has the keys `curriculum` and `shards` (for `longest`), with plain YAML values. `shard_sets` maps the name
    of a stream to the result of `pipeline.passes.encode.publish_shards` for it. `tokenizer` has the keys sha256,
    vocab_size, eos and path. Streams are sorted by name, so that the order of samples does not depend on the order of
    lines in the recipe. Raises a CurriculumError that names the key of the recipe.
    """
    spec = recipe["curriculum"]
    warnings: list[str] = []
    names = sorted(shard_sets)
    if not names:
        raise CurriculumError("shards: at least one stream is needed")
    streams = tuple(_stream(name, shard_sets[name], tokenizer) for name in names)
    total = parse_count(spec.get("total"), "curriculum.total")
    phases = place(spec.get("phases") or (), total, names, warnings)
    if not phases:
        raise CurriculumError("curriculum.phases: at least one phase is needed")
    done = sum(p.tokens for p in phases if not p.extra)
    if abs(done - total) > 0.01 * total:
        warnings.append(f"curriculum.total: whole steps of the phases make {done:,} tokens, not {total:,}")
    longest = _longest(recipe.get("shards") or {}, names, max(p.sequence for p in phases))
    ref = TokenizerRef(**{f.name: tokenizer[f.name] for f in fields(TokenizerRef)})
    curriculum = Curriculum(int(spec.get("seed", 0)), ref, longest, streams, tuple(phases), "")
    curriculum.validate()
    order = Order(curriculum)
    for s, name in enumerate(names):
        epochs = order.used[-1][s] / order.supers[s] if order.supers[s] else 0
        if epochs > WORTHWHILE_EPOCHS:
            warnings.append(f"stream '{name}' is read {epochs:.1f} times; beyond {WORTHWHILE_EPOCHS} epochs repeated "
                            f"data hardly helps (arXiv 2305.16264)")
    unused = [name for name in names if not any(p.weights.get(name) for p in phases)]
    if unused:
        warnings.append(f"curriculum: no phase draws from {', '.join(unused)}")
    return replace(curriculum, order=order.hash()), warnings


def place(given: Sequence[Mapping[str, Any]], total: int, names: list[str], warnings: list[str],
          before: Sequence[Phase] = (), where: str = "curriculum.phases") -> list[Phase]:
    """Return the phases for `given`, entries of a recipe's `curriculum.phases`. They follow the existing phases
    `before`. `until` counts tokens from the start of the run; percentages are shares of `total` tokens. `names` are the
    known streams. Warnings are appended to `warnings`.

    A key that an entry does not give is inherited from the entry before it, except for `name`, `until`, `extra` and
    `reset_optimizer`. After an entry whose `lr` is a curve of its own, `lr` must be given.
    """
    phases: list[Phase] = []
    last = before[-1] if before else None
    entry: dict[str, Any] = {"lr": "stable", "max_epochs": {}, "on_exhausted": "error"}
    if last is not None:
        entry = {"sequence": last.sequence, "batch": last.batch * last.sequence, "mix": last.weights, "lr": last.lr,
                 "max_epochs": last.max_epochs, "on_exhausted": last.on_exhausted, "rope_theta": last.rope_theta,
                 "rope_scaling": last.rope_scaling}
    done, start = sum(p.tokens for p in before), last.stop if last else 0
    for i, spoken in enumerate(given):
        key = f"{where}[{i}]"
        if spoken.get("lr") is None and isinstance(entry["lr"], Mapping):
            raise CurriculumError(f"{key}.lr is missing: the phase before has a learning rate of its own, which is not "
                                  f"inherited; write lr: stable, or {{peak: …, warmup: …, shape: …}} again")
        once = {"name": None, "until": None, "extra": None, "reset_optimizer": False}
        entry = {**entry, **once, **{k: v for k, v in spoken.items() if v is not None}}
        for wanted in ("name", "sequence", "batch", "mix"):
            if entry.get(wanted) is None:
                raise CurriculumError(f"{key}.{wanted} is missing")
        if str(entry["name"]) in {p.name for p in (*before, *phases)}:
            raise CurriculumError(f"{key}.name: two phases would be called '{entry['name']}'; give it another name")
        extra = entry["extra"] is not None
        if extra == (entry["until"] is not None):
            raise CurriculumError(f"{key}: `until` says where in the total it ends, `extra` how many tokens it has "
                                  f"beyond it: give one of them" if extra else f"{key}.until is missing")
        target = done + parse_count(entry["extra"], f"{key}.extra") if extra else \
            _until(entry["until"], total, f"{key}.until")
        sequence = parse_count(entry["sequence"], f"{key}.sequence")
        if target <= done:
            raise CurriculumError(f"{key}.until: {entry['until']} is not after the phase before it")
        ramp, batch = _batches(entry["batch"], sequence, target - done, f"{key}.batch", warnings)
        grown = ramp[-1][0] if ramp else 0
        rest = grown % batch
        samples = rest + max(grown // batch + 1, round((target - done - rest * sequence) / (batch * sequence))) * batch
        if isinstance(entry["batch"], Mapping):     # the batch grows only once: the next phase inherits its last size
            entry["batch"] = max(parse_count(b, f"{key}.batch") for b in entry["batch"].values())
        weights = entry["mix"] if last is not None and entry["mix"] is last.weights else \
            _weights(entry["mix"], f"{key}.mix", names, warnings)
        scaling = entry.get("rope_scaling")
        phases.append(Phase(
            str(entry["name"]), start, samples, samples, sequence, batch, weights,
            own_rate(entry["lr"], samples * sequence, f"{key}.lr"),
            _epochs(entry["max_epochs"] or {}, f"{key}.max_epochs"), str(entry["on_exhausted"]), extra,
            entry["reset_optimizer"], _float(entry.get("rope_theta")),
            dict(scaling) if isinstance(scaling, Mapping) else scaling, ramp))
        done, start = done + phases[-1].tokens, phases[-1].stop
    return phases


def _batches(value: Any, sequence: int, tokens: int, key: str,
             warnings: list[str]) -> tuple[list[list[int]] | None, int]:
    """Convert the recipe's `batch` of a phase with `tokens` tokens into the fields `ramp` and `batch` of `Phase`.

    `value` is a number of tokens such as '0.5M', or a mapping such as {0: 64k, 100M: 128k, 1B: 0.5M} if the batch size
    grows; a key is the number of tokens of the phase after which the batch size applies. If a batch size divides the
    next one, the larger starts at a multiple of itself, so that no sample is left over. The phase then has as many
    samples as without growth, in the same order."""
    table = value if isinstance(value, Mapping) else {0: value}
    try:
        rows = sorted((quantities.parse_count(at, least=0), at) for at in table)
    except ValueError as e:
        raise CurriculumError(f"{key}: {e}") from None
    if not rows or rows[0][0]:
        raise CurriculumError(f"{key}: a batch that grows begins at 0, e.g. {{0: 64k, 100M: 128k, 1B: 0.5M}}")
    sizes = []
    for _, at in rows:
        wanted = parse_count(table[at], f"{key}.{at}" if isinstance(value, Mapping) else key)
        sizes.append(max(1, round(wanted / sequence)))
        if sizes[-1] * sequence != wanted:
            warnings.append(f"{key}: {wanted:,} tokens are no multiple of sequence {sequence:,}; a step has "
                            f"{sizes[-1]} sequences = {sizes[-1] * sequence:,} tokens")
    ramp: list[list[int]] = []
    first = 0
    for (at, _), size, larger in zip(rows[1:], sizes, sizes[1:]):
        if larger <= size or not 0 < at < tokens:
            raise CurriculumError(f"{key}: batches grow, each from a later token of the phase on, before its end at "
                                  f"{tokens:,}; got {dict(value)}")
        aligned = larger % size == 0 and first % size == 0
        unit, base = (larger, first // larger * larger) if aligned else (size, first)
        first = base + max(1, round((at / sequence - base) / unit)) * unit
        ramp.append([first, size])
    return ramp or None, sizes[-1]


def _epochs(value: Any, key: str) -> dict[str, float]:
    """Parse `max_epochs` of a phase. Returns {stream: how many epochs of it may have been read by the end of the
    phase}."""
    epochs = {k: _float(v) for k, v in value.items()} if isinstance(value, Mapping) else {}
    if not isinstance(value, Mapping) or not all(is_number(v) and v >= 0 for v in epochs.values()):
        raise CurriculumError(f"{key}: epochs by stream, e.g. {{code: 2}}, not {value!r}")
    return epochs


def _float(value: Any) -> Any:
    """Convert a number to float, also one that YAML 1.1 reads as a string (2e-5, without a dot). Any other value is
    returned unchanged, so that the caller can raise an error about it."""
    with contextlib.suppress(TypeError, ValueError):
        return value if isinstance(value, bool) else float(value)
    return value


def own_rate(value: Any, tokens: int, key: str) -> Any:
    """Convert the recipe's `lr` of a phase with `tokens` tokens into the field `lr` of `Phase`. In a mapping, missing
    keys get their defaults, and the warm-up becomes a number of tokens. A word such as 'stable' stays as it is."""
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
    train, val = info["train"], info.get("val")
    if info["tokenizer"] != tokenizer["sha256"]:
        raise CurriculumError(f"shards.{name} was encoded with another tokenizer ({info['tokenizer'][:12]}…, not "
                              f"{tokenizer['sha256'][:12]}…): encode it again")
    return Stream(name, train["path"], val["path"] if val else None, train["sha256"], val["sha256"] if val else None,
                  train["tokens"], val["tokens"] if val else 0, info["dtype"])


def _until(value: Any, total: int, key: str) -> int:
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
    lengths = {name: parse_count(shards[name]["longest"], f"shards.{name}.longest") for name in names
               if (shards.get(name) or {}).get("longest") is not None}
    if len(set(lengths.values())) > 1:
        raise CurriculumError(f"shards: `longest` differs between streams ({lengths}): give all of a "
                              f"curriculum the same")
    return next(iter(lengths.values()), default)
