"""The curriculum that a training reads: the contents of `curriculum.json`.

The pipeline makes it from the curriculum of the recipe, once (`resolve.resolve`). The trainer reads only this file. The
file holds everything that determines the order of samples: the seed, the streams and the phases. A stream is the tokens
of one source, language or bucket; the file has its token counts and hashes. A phase is a stretch of the training; the
file has the integer weights of its streams.

A sample is one window of a stream: `sequence` consecutive tokens and the token after them, which is the last target.
Each phase sets its `sequence`. Samples are numbered from 0 over all phases. A step is `batch` consecutive samples, and
a phase has a whole number of steps.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeGuard

from tokenizer.mixture.apportion import CurriculumError, check_range, check_weights, is_flat
from tokenizer.mixture.order import Order
from tokenizer.mixture.phases import Phase, Stream, epochs_allowed

__all__ = ["Curriculum", "CurriculumError", "Order", "Phase", "Stream", "TokenizerRef", "cut", "edit"]

#: versions of the format: 1 if no phase needs a tree to apportion its samples (`apportion.is_flat`), 2 if one does
VERSIONS = (1, 2)
#: words for the learning rate of a phase: hold it ("stable", or its synonym "constant") or let it fall ("decay")
RATES = ("stable", "constant", "decay")
#: keys of the mapping (a learning-rate curve of its own) that a phase may have instead of such a word, and the possible
#: values of its key `shape`: how the rate falls from its peak after the warm-up
RATE_KEYS = ("peak", "warmup", "shape", "floor")
RATE_SHAPES = ("constant", "linear", "1-sqrt", "cosine", "exp")


@dataclass(frozen=True)
class TokenizerRef:
    """The tokenizer with which all streams (data sources) of a curriculum were encoded."""

    sha256: str                   # of its file
    vocab_size: int               # all ids are below it
    eos: int                      # id of the token that ends every document
    path: str                     # relative to the store


@dataclass(frozen=True)
class Curriculum:
    """Everything that determines the order of a training's samples: the streams (the tokens of one source, language or
    bucket each), the phases (stretches of the training with their mixtures of streams), the seed and so on."""

    seed: int
    tokenizer: TokenizerRef
    longest: int                  # tokens of a super-window; a multiple of every phase's sequence
    streams: tuple[Stream, ...]
    phases: tuple[Phase, ...]
    order: str                    # order hash (docs/contracts.md: Identity)

    @property
    def version(self) -> int:
        return 2 if any(phase.groups or not is_flat(list(phase.weights.values())) for phase in self.phases) else 1

    @property
    def splits(self) -> dict[str, list[str]]:
        """Return the shards of the mixtures that are split into streams by labels (such as language), as {name of the
        shards: names of their labels}."""
        return {name: entry["labels"] for phase in self.phases for name, entry in (phase.made or {}).items()}

    @property
    def samples(self) -> int:
        return self.phases[-1].stop

    @property
    def tokens(self) -> int:
        """Number of targets (tokens to predict) of the whole run."""
        return sum(p.tokens for p in self.phases)

    @property
    def steps(self) -> int:
        return sum(p.steps for p in self.phases)

    def phase_at(self, sample: int) -> int:
        """Return the index of the phase (stretch of the training) to which sample number `sample` belongs. Raises
        CurriculumError if there is no such sample."""
        for i, phase in enumerate(self.phases):
            if phase.start <= sample < phase.stop:
                return i
        raise CurriculumError(f"sample {sample} is outside the curriculum's {self.samples} samples")

    def to_json(self) -> dict[str, Any]:
        doc = asdict(self)
        # omit defaults: a new field must not change an old curriculum
        for spec, part in ((spec, part) for cls, parts in ((Phase, doc["phases"]), (Stream, doc["streams"]))
                           for spec in fields(cls) for part in parts):
            if spec.default is not MISSING and part[spec.name] == spec.default:
                del part[spec.name]
        return {**doc, "version": self.version}

    @classmethod
    def from_json(cls, doc: Mapping[str, Any], where: str = "curriculum") -> Curriculum:
        """Build a curriculum from parsed JSON and validate it. `where` names the curriculum in error messages. Raises a
        CurriculumError that names the wrong key."""
        if not isinstance(doc, Mapping):
            raise CurriculumError(f"{where}: no curriculum, which is a JSON object")
        if doc.get("version") not in VERSIONS:
            raise CurriculumError(f"{where}: this Tokenmill reads versions {VERSIONS}, not {doc.get('version')!r}; run "
                                  f"the recipe again, or use the Tokenmill that wrote it")
        curriculum = cls(**{
            **_exact(cls, {name: value for name, value in doc.items() if name != "version"}, where),
            "tokenizer": TokenizerRef(**_exact(TokenizerRef, doc["tokenizer"], f"{where}: tokenizer")),
            "streams": tuple(Stream(**{**_exact(Stream, stream, f"{where}: streams[{i}]"),
                                       "replaces": tuple(stream.get("replaces", ()))})
                             for i, stream in enumerate(doc["streams"])),
            "phases": tuple(Phase(**_exact(Phase, phase, f"{where}: phases[{i}]"))
                            for i, phase in enumerate(doc["phases"]))})
        curriculum.validate(where)
        if curriculum.version != doc["version"]:
            raise CurriculumError(f"{where}: with version {doc['version']} its samples are in another order than this "
                                  f"Tokenmill draws from such weights: run the recipe again")
        return curriculum

    @classmethod
    def load(cls, path: str | Path) -> Curriculum:
        return cls.loads(Path(path).read_bytes(), str(path))

    @classmethod
    def loads(cls, data: bytes, where: str) -> Curriculum:
        """Parse the bytes of a `curriculum.json`; `where` names the file in error messages. Raises CurriculumError when
        the file is not a curriculum, or when its checksum is wrong. The checksum is needed because a single changed
        digit would silently train another model."""
        try:
            doc = json.loads(data)
            if doc.get("version") in VERSIONS and doc.pop("sha256", "") != _digest(doc):
                raise ValueError("what it says does not have the sha256 it names")
            return cls.from_json(doc, where)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
            if isinstance(e, CurriculumError):
                raise
            raise CurriculumError(f"{where}: damaged, or changed by hand ({e}): run the recipe again. Where `tokenmill "
                                  f"train edit` had changed it, put back curriculum.N.json, which it was before, and "
                                  f"repeat the edit") from None

    def dumps(self) -> str:
        """Return the text of `curriculum.json`. Equal curricula give equal bytes. The last key, sha256, is a checksum
        of the other keys."""
        doc = self.to_json()
        return json.dumps({**doc, "sha256": _digest(doc)}, indent=1, ensure_ascii=False) + "\n"

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.dumps(), encoding="utf-8")

    def validate(self, where: str = "curriculum") -> None:
        """Raise CurriculumError if something in the curriculum is wrong, for instance if a stream (data source) does
        not have enough tokens. `where` names the curriculum in the message."""
        def need(condition: bool, message: str) -> None:
            if not condition:
                raise CurriculumError(f"{where}: {message}")

        names = [s.name for s in self.streams]
        need(bool(names) and len(set(names)) == len(names), f"streams must be named once each, not {names}")
        need(bool(self.phases), "there must be at least one phase")
        need(self.longest >= 1, f"longest must be at least 1 token, not {self.longest}")
        start, extra = 0, False
        for phase in self.phases:
            key = f"phase '{phase.name}'"
            need(phase.start == start, f"{key} starts at sample {phase.start}, the one before it ends at {start}")
            need(0 < phase.samples <= phase.reserved, f"{key} needs samples >= 1 and reserved >= samples")
            steps = [[0, 0], *(phase.ramp or ()), [phase.reserved, phase.batch]]
            need(all(earlier[0] < later[0] and earlier[1] < later[1] for earlier, later in pairwise(steps)),
                 f"{key}: ramp {phase.ramp} must rise to the batch of {phase.batch} within {phase.reserved} samples")
            need(phase.has_whole_steps,
                 f"{key}: {phase.samples} samples are no whole number of batches of {phase.batch}")
            need(phase.sequence >= 1 and self.longest % phase.sequence == 0,
                 f"{key}: longest = {self.longest} is no multiple of sequence = {phase.sequence}: "
                 f"set shards.*.longest to a multiple of every sequence")
            need(phase.sequence == self.longest or not any(s.packing and phase.weights.get(s.name)
                                                           for s in self.streams),
                 f"{key} has sequence = {phase.sequence}, but draws from streams whose documents are packed into rows "
                 f"of longest = {self.longest}: give it this sequence, or leave out shards.*.packing")
            unknown = sorted({*phase.weights, *phase.max_epochs} - set(names))
            need(not unknown, f"{key} names unknown streams {unknown}; known: {', '.join(names)}")
            if isinstance(phase.lr, Mapping):
                check_rate(phase.lr, phase.reserved * phase.sequence, f"{where}: {key}: lr")
            else:
                need(phase.lr in RATES, f"{key}: lr: {phase.lr!r} is not one of {', '.join(RATES)}; the rate itself "
                     f"stands under train.optimizer.lr, or in a mapping: {{peak: 2e-5, warmup: 50M, shape: cosine}}")
            need(phase.extra or not extra, f"{key} belongs to the total, yet stands after one that is extra: let the "
                 f"phases with `extra` come last")
            extra = phase.extra
            for switch in ("extra", "reset_optimizer"):
                need(isinstance(getattr(phase, switch), bool), f"{key}: {switch} must be true or false")
            theta = phase.rope_theta
            need(theta is None or (is_number(theta) and theta > 1),
                 f"{key}: rope_theta must be a number above 1, not {theta!r}")
            need(phase.rope_scaling is None or isinstance(phase.rope_scaling, Mapping),
                 f"{key}: rope_scaling must be a mapping (as in train.model), not {phase.rope_scaling!r}")
            made = phase.made if phase.made is not None else {}
            need(isinstance(made, Mapping) and all(isinstance(entry, Mapping) and isinstance(entry.get("labels"), list)
                                                   for entry in made.values()),
                 f"{key}: made must be a mapping from split shards to their labels and entry, not {made!r}")
            need(phase.on_exhausted in ("error", "repeat"), f"{key}: on_exhausted must be 'error' or 'repeat'")
            try:
                check_weights(list(phase.weights.values()))
                check_range(sum(phase.weights.values()), phase.reserved)
            except CurriculumError as e:
                raise CurriculumError(f"{where}: {key}: {e}") from None
            self._check_groups(phase, f"{where}: {key}")
            start = phase.stop
        self._check_kept(where)
        self._check_exhaustion(where)

    def _check_kept(self, where: str) -> None:
        """Raise CurriculumError if a phase (stretch of the training) reads a stream (data source) that
        `shards.NAME.from_phase` reserves for a later phase."""
        for stream in self.streams:
            for phase in self.phases:
                if stream.from_phase in (None, phase.name):
                    break
                if phase.weights.get(stream.name):
                    raise CurriculumError(
                        f"{where}: phase '{phase.name}' reads stream '{stream.name}', which shards.{stream.name}."
                        f"from_phase keeps for phase '{stream.from_phase}': leave it out of the mix, or let a phase "
                        f"'{stream.from_phase}' come first")

    def _check_groups(self, phase: Phase, key: str) -> None:
        """Raise CurriculumError if the groups of a phase (stretch of the training) are not lists of its streams (data
        sources), or if a stream is in two groups."""
        groups = {} if phase.groups is None else phase.groups
        if not isinstance(groups, Mapping) or not all(
                isinstance(group, list) and group and all(isinstance(stream, str) for stream in group)
                for group in groups.values()):
            raise CurriculumError(f"{key}: groups must be lists of streams by name, not {groups!r}")
        members = Counter(name for group in groups.values() for name in group)
        if unknown := sorted({*members} - {*phase.weights}):
            raise CurriculumError(f"{key}: groups have the streams {unknown}, which have no weight")
        if doubled := sorted(name for name, count in members.items() if count > 1):
            raise CurriculumError(f"{key}: the streams {doubled} are in two groups")

    def _check_exhaustion(self, where: str) -> None:
        order = Order(self)
        for p, phase in enumerate(self.phases):
            if phase.on_exhausted == "repeat":
                continue
            for s, stream in enumerate(self.streams):
                allowed = phase.max_epochs.get(stream.name, 1)
                limit, reserved = math.floor(epochs_allowed(allowed) * order.supers[s]), order.used[p][s]
                if phase.weights.get(stream.name) and reserved > limit:
                    raise CurriculumError(
                        f"{where}: phase '{phase.name}' exhausts stream '{stream.name}': it would be read "
                        f"{reserved / order.supers[s]:.2f} epochs ({reserved * self.longest:,} of {stream.tokens:,} "
                        f"tokens), allowed are {allowed:g}: lower its weight or the total, set max_epochs: "
                        f"{{{stream.name}: {math.ceil(reserved / order.supers[s])}}}, or on_exhausted: repeat")


def _digest(doc: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(doc, sort_keys=True).encode()).hexdigest()


def _exact(cls: type, doc: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Check that the JSON object `doc` has the fields of the dataclass `cls` as its keys, and return it as a dict.
    Fields with a default may be missing. Raises CurriculumError, with `where` in the message, if a key is missing or
    unknown."""
    keys = {spec.name for spec in fields(cls)}
    needed = {spec.name for spec in fields(cls) if spec.default is MISSING}
    missing, unknown = sorted(needed - set(doc)), sorted(set(doc) - keys)
    if missing or unknown:
        raise CurriculumError(f"{where}: missing keys {missing}, unknown keys {unknown}")
    return dict(doc)


def is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def check_rate(rate: Mapping[str, Any], tokens: int, key: str) -> None:
    """Check `rate`, the settings of a learning-rate curve that belongs to one phase (a stretch of the training) of
    `tokens` tokens. Raises CurriculumError if they are wrong; the message names `key`, the path of the settings in the
    recipe."""
    unknown = sorted(set(rate) - set(RATE_KEYS))
    if unknown:
        near = difflib.get_close_matches(unknown[0], RATE_KEYS, n=1)
        raise CurriculumError(f"{key}.{unknown[0]}: unknown key; "
                              + (f"did you mean '{near[0]}'?" if near else f"there are {', '.join(RATE_KEYS)}"))
    peak, warmup, floor = rate.get("peak"), rate.get("warmup"), rate.get("floor")
    if not is_number(peak) or peak <= 0:
        raise CurriculumError(f"{key}.peak: the highest rate of the phase, a number above 0 such as 2e-5, not {peak!r}")
    if not isinstance(warmup, int) or isinstance(warmup, bool) or not 0 <= warmup <= tokens:
        raise CurriculumError(f"{key}.warmup: tokens between 0 and the phase's {tokens:,}, not {warmup!r}")
    if rate.get("shape") not in RATE_SHAPES:
        raise CurriculumError(f"{key}.shape: {rate.get('shape')!r} is not one of {', '.join(RATE_SHAPES)}")
    if not is_number(floor) or not 0 <= floor <= 1:
        raise CurriculumError(f"{key}.floor: a share of the peak between 0 and 1, not {floor!r}")


def edit(old: Curriculum, sample: int, phases: Sequence[Phase], streams: Sequence[Stream] = ()) -> Curriculum:
    """Return a curriculum that keeps the samples of `old` before sample number `sample`, and goes on with `phases`
    (stretches of the training). `sample` must be the first one of a step, or the number of all samples.

    The samples before `sample` stay the same, bit for bit. If a phase is cut short, it has reserved windows of tokens
    that it does not read. They go to the next phase with the same sequence length, if the stream is still in the same
    epoch. The `start` of each of `phases` is overwritten. `streams` are added to the streams of `old`: new data always
    forms a new stream."""
    edited = cut(old, sample)
    start = edited[-1].stop
    for phase in phases:
        edited.append(replace(phase, start=start))
        start = edited[-1].stop
    curriculum = replace(old, phases=tuple(edited), streams=(*old.streams, *streams), order="")
    curriculum.validate()
    return replace(curriculum, order=Order(curriculum).hash())


def cut(old: Curriculum, sample: int) -> list[Phase]:
    """Return the phases (stretches of the training) of `old` up to sample number `sample`. The last one is shortened so
    that it ends before this sample. If `sample` is the number of all samples, all phases are returned as they are.
    Raises CurriculumError when `sample` is 0, beyond the end of the run, or inside a step."""
    if not 0 < sample <= old.samples:
        raise CurriculumError(f"an edit at sample {sample} is outside the run's {old.samples} samples")
    if sample == old.samples:
        return list(old.phases)
    index = old.phase_at(sample)
    phases = [*old.phases[:index], replace(old.phases[index], samples=sample - old.phases[index].start)]
    phases = [phase for phase in phases if phase.samples]
    if not phases[-1].has_whole_steps:
        raise CurriculumError(f"an edit at sample {sample} falls inside a step of phase '{phases[-1].name}' "
                              f"({phases[-1].batch_at(phases[-1].samples - 1)} samples a step)")
    return phases
