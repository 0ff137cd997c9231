"""The resolved curriculum: what `curriculum.json` says, and how it comes from a recipe.

The pipeline writes it once (`resolve`, `Curriculum.save`), the trainer reads it and nothing else of the recipe. It
holds everything the order of samples depends on: seed, streams with token counts and hashes, phases with integer
weights. A sample is one window of its phase's `sequence` tokens (and one more: the last target). Samples are numbered
from 0 over all phases; a step is `batch` consecutive samples; phases are whole numbers of steps.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from stages.mix import quantities
from stages.mix.order import CurriculumError, Order, check_weights, counts

__all__ = ["Curriculum", "CurriculumError", "Order", "Phase", "Stream", "TokenizerRef", "edit", "parse_count",
           "resolve"]

VERSION = 1
#: repeating data more than this many times hardly helps (Muennighoff et al., arXiv 2305.16264)
WORTHWHILE_EPOCHS = 4
#: weights that are not integers are brought to integers of at most this sum
WEIGHT_SUM = 10**6
#: what a phase may say about the learning rate: hold it ("constant" is another word for "stable") or let it fall
RATES = ("stable", "constant", "decay")


@dataclass(frozen=True)
class TokenizerRef:
    """The tokenizer all streams were encoded with."""

    sha256: str                   # of its file
    vocab_size: int               # ids are below this
    eos: int                      # ends every document
    path: str                     # relative to the store


@dataclass(frozen=True)
class Stream:
    """The unit of a mixture: (source, language, quality bucket) as one virtual concatenation of tokens."""

    name: str
    train: str                    # folder (or manifest) of the split=train shard set, relative to the store
    val: str | None               # of split=val; None when nothing was held out
    sha256: str                   # pins the train shard set
    val_sha256: str | None
    tokens: int                   # in split=train, EOS included
    val_tokens: int
    dtype: str                    # uint16 or uint32


@dataclass(frozen=True)
class Phase:
    """One stretch of the run with its own mixture."""

    name: str
    start: int                    # first sample number
    samples: int                  # how many; a multiple of `batch`
    reserved: int                 # samples planned when it was first resolved; >= samples, larger once an edit cut it
    sequence: int                 # L: targets of a sample
    batch: int                    # sequences (samples) of a step
    weights: dict[str, int]       # stream → integer weight; streams not named give nothing
    lr: str                       # one of RATES: what the trainer's schedule does here
    max_epochs: dict[str, float]  # stream → epochs it may have been read by the end of the phase (default 1)
    on_exhausted: str             # "error" | "repeat"

    @property
    def stop(self) -> int:
        return self.start + self.samples

    @property
    def steps(self) -> int:
        return self.samples // self.batch

    @property
    def tokens(self) -> int:
        """Targets of the phase: n × L."""
        return self.samples * self.sequence


@dataclass(frozen=True)
class Curriculum:
    seed: int
    tokenizer: TokenizerRef
    longest: int                  # tokens of a super-window; a multiple of every phase's sequence
    streams: tuple[Stream, ...]
    phases: tuple[Phase, ...]
    order: str                    # order hash (contracts §2)
    version: int = VERSION

    @property
    def samples(self) -> int:
        return self.phases[-1].stop

    @property
    def tokens(self) -> int:
        """Targets of the whole run."""
        return sum(p.tokens for p in self.phases)

    @property
    def steps(self) -> int:
        return sum(p.steps for p in self.phases)

    def phase_at(self, sample: int) -> int:
        """Index of the phase sample number `sample` belongs to."""
        for i, phase in enumerate(self.phases):
            if phase.start <= sample < phase.stop:
                return i
        raise CurriculumError(f"sample {sample} is outside the curriculum's {self.samples} samples")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, doc: Mapping[str, Any], where: str = "curriculum") -> Curriculum:
        """A validated curriculum; raises CurriculumError that names the key."""
        if doc.get("version") != VERSION:
            raise CurriculumError(f"{where}: this Tokenmill reads version {VERSION}, not {doc.get('version')!r}")
        made = cls(**{
            **_exact(cls, doc, where),
            "tokenizer": TokenizerRef(**_exact(TokenizerRef, doc["tokenizer"], f"{where}: tokenizer")),
            "streams": tuple(Stream(**_exact(Stream, s, f"{where}: streams[{i}]"))
                             for i, s in enumerate(doc["streams"])),
            "phases": tuple(Phase(**_exact(Phase, p, f"{where}: phases[{i}]")) for i, p in enumerate(doc["phases"]))})
        made.validate(where)
        return made

    @classmethod
    def load(cls, path: str | Path) -> Curriculum:
        return cls.from_json(json.loads(Path(path).read_text(encoding="utf-8")), str(path))

    def dumps(self) -> str:
        """The text of `curriculum.json`: equal curricula give equal bytes."""
        return json.dumps(self.to_json(), indent=1, ensure_ascii=False) + "\n"

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.dumps(), encoding="utf-8")

    def validate(self, where: str = "curriculum") -> None:
        """Everything that must hold before a single sample is drawn, exhaustion included."""
        def need(condition: bool, message: str) -> None:
            if not condition:
                raise CurriculumError(f"{where}: {message}")

        names = [s.name for s in self.streams]
        need(bool(names) and len(set(names)) == len(names), f"streams must be named once each, not {names}")
        need(bool(self.phases), "there must be at least one phase")
        need(self.longest >= 1, f"longest must be at least 1 token, not {self.longest}")
        start = 0
        for phase in self.phases:
            key = f"phase '{phase.name}'"
            need(phase.start == start, f"{key} starts at sample {phase.start}, the one before it ends at {start}")
            need(0 < phase.samples <= phase.reserved, f"{key} needs samples >= 1 and reserved >= samples")
            need(phase.batch >= 1 and phase.samples % phase.batch == 0,
                 f"{key}: {phase.samples} samples are no whole number of batches of {phase.batch}")
            need(phase.sequence >= 1 and self.longest % phase.sequence == 0,
                 f"{key}: longest = {self.longest} is no multiple of sequence = {phase.sequence}: "
                 f"set shards.*.longest to a multiple of every sequence")
            unknown = sorted({*phase.weights, *phase.max_epochs} - set(names))
            need(not unknown, f"{key} names unknown streams {unknown}; known: {', '.join(names)}")
            need(phase.lr in RATES, f"{key}: lr: {phase.lr!r} is not one of {', '.join(RATES)}; the rate itself stands "
                 f"under train.optimizer.lr")
            need(phase.on_exhausted in ("error", "repeat"), f"{key}: on_exhausted must be 'error' or 'repeat'")
            check_weights(list(phase.weights.values()), phase.reserved)
            start = phase.stop
        self._check_exhaustion(where)

    def _check_exhaustion(self, where: str) -> None:
        order = Order(self)
        for p, phase in enumerate(self.phases):
            if phase.on_exhausted == "repeat":
                continue
            for s, stream in enumerate(self.streams):
                allowed = phase.max_epochs.get(stream.name, 1)
                limit, used = math.floor(allowed * order.supers[s]), order.used[p][s]
                if phase.weights.get(stream.name) and used > limit:
                    raise CurriculumError(
                        f"{where}: phase '{phase.name}' exhausts stream '{stream.name}': it would be read "
                        f"{used / order.supers[s]:.2f} epochs ({used * self.longest:,} of {stream.tokens:,} tokens), "
                        f"allowed are {allowed:g}: lower its weight or the total, set max_epochs: {{{stream.name}: "
                        f"{math.ceil(used / order.supers[s])}}}, or on_exhausted: repeat")


def _exact(cls: type, doc: Mapping[str, Any], where: str) -> dict[str, Any]:
    known = {f.name for f in fields(cls)}
    missing, unknown = sorted(known - set(doc)), sorted(set(doc) - known)
    if missing or unknown:
        raise CurriculumError(f"{where}: missing keys {missing}, unknown keys {unknown}")
    return dict(doc)


# -- from a recipe -----------------------------------------------------------------------------------------------
def parse_count(value: Any, key: str) -> int:
    """`stages.mix.quantities.parse_count` for the key of a recipe."""
    try:
        return quantities.parse_count(value)
    except ValueError as e:
        raise CurriculumError(f"{key}: {value!r} is no number of tokens: {e}") from None


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
            raise CurriculumError(f"{key}.{name}: weight {value!r} is no number >= 0")
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
    """The curriculum a recipe stands for, and warnings for people.

    `recipe` has the keys `curriculum` (contracts §8) and `shards` (for `longest`), plain YAML values. `shard_sets` maps
    stream name to what `pipeline.tasks.encode.publish_shards` returned. `tokenizer`: sha256, vocab_size, eos, path.
    Streams stand in order of name, so that the order does not hang on the order of lines in a recipe.
    """
    spec, warnings = recipe["curriculum"], []
    names = sorted(shard_sets)
    if not names:
        raise CurriculumError("shards: at least one stream is needed")
    streams = tuple(_stream(name, shard_sets[name], tokenizer) for name in names)
    total = parse_count(spec.get("total"), "curriculum.total")
    phases: list[Phase] = []
    entry: dict[str, Any] = {"lr": "stable", "max_epochs": {}, "on_exhausted": "error"}
    done = start = 0
    for i, given in enumerate(spec.get("phases") or ()):
        key = f"curriculum.phases[{i}]"
        entry = {**entry, **given, "until": given.get("until")}      # phases inherit from the one before
        for wanted in ("name", "until", "sequence", "batch", "mix"):
            if entry.get(wanted) is None:
                raise CurriculumError(f"{key}.{wanted} is missing")
        target = _until(entry["until"], total, f"{key}.until")
        sequence = parse_count(entry["sequence"], f"{key}.sequence")
        batch_tokens = parse_count(entry["batch"], f"{key}.batch")
        batch = max(1, round(batch_tokens / sequence))
        if batch * sequence != batch_tokens:
            warnings.append(f"{key}.batch: {batch_tokens:,} tokens are no multiple of sequence {sequence:,}; a step "
                            f"has {batch} sequences = {batch * sequence:,} tokens")
        if target <= done:
            raise CurriculumError(f"{key}.until: {entry['until']} is not after the phase before it")
        steps = max(1, round((target - done) / (batch * sequence)))
        weights = _weights(entry["mix"], f"{key}.mix", names, warnings)
        phase = Phase(str(entry["name"]), start, steps * batch, steps * batch, sequence, batch, weights, entry["lr"],
                      {k: float(v) for k, v in (entry["max_epochs"] or {}).items()}, str(entry["on_exhausted"]))
        phases.append(phase)
        done, start = done + phase.tokens, phase.stop
    if not phases:
        raise CurriculumError("curriculum.phases: at least one phase is needed")
    if abs(done - total) > 0.01 * total:
        warnings.append(f"curriculum.total: whole steps of the phases make {done:,} tokens, not {total:,}")
    longest = _longest(recipe.get("shards") or {}, names, max(p.sequence for p in phases))
    ref = TokenizerRef(**{f.name: tokenizer[f.name] for f in fields(TokenizerRef)})
    made = Curriculum(int(spec.get("seed", 0)), ref, longest, streams, tuple(phases), "")
    made.validate()
    order = Order(made)
    for s, name in enumerate(names):
        epochs = order.used[-1][s] / order.supers[s] if order.supers[s] else 0
        if epochs > WORTHWHILE_EPOCHS:
            warnings.append(f"stream '{name}' is read {epochs:.1f} times; beyond {WORTHWHILE_EPOCHS} epochs repeated "
                            f"data hardly helps (arXiv 2305.16264)")
    unused = [name for name in names if not any(p.weights.get(name) for p in phases)]
    if unused:
        warnings.append(f"curriculum: no phase draws from {', '.join(unused)}")
    return replace(made, order=order.hash()), warnings


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
        raise CurriculumError(f"{key}: {value!r} is no share of the total; write for example 70% or 14B")
    return round(share * total)


def _longest(shards: Mapping[str, Any], names: list[str], default: int) -> int:
    found = {name: parse_count(shards[name]["longest"], f"shards.{name}.longest") for name in names
             if (shards.get(name) or {}).get("longest") is not None}
    if len(set(found.values())) > 1:
        raise CurriculumError(f"shards: `longest` differs between streams ({found}): give all of a curriculum the same")
    return next(iter(found.values()), default)


def edit(old: Curriculum, sample: int, phases: list[Phase], streams: tuple[Stream, ...] = ()) -> Curriculum:
    """The curriculum with another future: at `sample` (a step boundary) the given phases take over.

    What was read before `sample` stays as it was, bit for bit; windows a cut phase had reserved and not drawn go to the
    next phase of the same length. `phases` come with `start` 0 and are placed here; `streams` are new ones (added data
    is a new stream).
    """
    if not 0 < sample < old.samples:
        raise CurriculumError(f"an edit at sample {sample} is outside the run's {old.samples} samples")
    at = old.phase_at(sample)
    kept = [*old.phases[:at], replace(old.phases[at], samples=sample - old.phases[at].start)]
    kept = [p for p in kept if p.samples]
    if kept[-1].samples % kept[-1].batch:
        raise CurriculumError(f"an edit at sample {sample} falls inside a step of phase '{kept[-1].name}' "
                              f"({kept[-1].batch} samples a step)")
    start = kept[-1].stop
    for phase in phases:
        kept.append(replace(phase, start=start))
        start = kept[-1].stop
    made = replace(old, phases=tuple(kept), streams=(*old.streams, *streams), order="")
    made.validate()
    return replace(made, order=Order(made).hash())
