"""Checks the curriculum (the phases of a training) of a recipe: that names, order and values of its phases are right,
and that the recipe's shards (token files) suit them. `tokenizer.mixture.curriculum` checks whether there are enough
tokens."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from pipeline.base.quantities import parse_share, percent
from pipeline.recipe.errors import KeyPath, key_path
from pipeline.recipe.model import Recipe
from pipeline.recipe.problems import Checker
from pipeline.recipe.token_files import token_sources
from pipeline.recipe.token_models import CurriculumSettings, LabelRule, PhaseSettings, StreamGroup


def check_curriculum(curriculum: CurriculumSettings, recipe: Recipe, checker: Checker) -> None:
    if not recipe.shards:
        checker.fail(("curriculum",), "a curriculum mixes shards; add `shards:`")
        return
    _shards(recipe, checker)
    _inheritance(curriculum, checker)
    _ends(curriculum, checker)
    schedule = recipe.train.get("schedule") if recipe.train else {"floor": 1}
    _rates(curriculum, schedule if isinstance(schedule, dict) else {}, checker)
    for at, phase in _phases(curriculum):
        _sizes(phase, at, recipe, checker)
        _weights(phase, at, recipe, checker)
    _kept(curriculum, recipe, checker)


def _phases(curriculum: CurriculumSettings) -> Iterator[tuple[KeyPath, PhaseSettings]]:
    for i, phase in enumerate(curriculum.phases):
        yield ("curriculum", "phases", i), phase


def _shards(recipe: Recipe, checker: Checker) -> None:
    """Check that all entries of `shards:` have the same `longest`, and the same `val`. `longest` is the length of a
    super-window, the unit in which a phase reserves tokens. `val` is the share of documents held out for evaluation.

    Two kinds of shards may have another `val`. One is shards of token files, because no deduplication has compared
    their documents with those of others. The other is shards that hold everything out, because nothing of them is
    trained on.
    """
    first, shards = next(iter(recipe.shards.items()))
    texts = [name for name, other in recipe.shards.items()
             if other.val < 1 and not token_sources(recipe, other.inputs)]
    for name, other in recipe.shards.items():
        if other.longest != shards.longest:
            checker.fail(("shards", name, "longest"), f"{other.longest:,} differs from {shards.longest:,} of '{first}';"
                         f" all shards of a curriculum have the same `longest`")
        if name in texts and other.val != (val := recipe.shards[texts[0]].val):
            checker.fail(("shards", name, "val"), f"{percent(other.val)} differs from {percent(val)} of "
                         f"'{texts[0]}', so that the training would read near-duplicates of documents that one of them "
                         f"holds out; give all shards of a curriculum the same `val`")


def _inheritance(curriculum: CurriculumSettings, checker: Checker) -> None:
    """Check that the names of phases are unique, and that the first phase has `sequence`, `batch` and `mix`. Later
    phases may inherit these."""
    names: set[str] = set()
    for i, (at, phase) in enumerate(_phases(curriculum)):
        if phase.name in names:
            checker.fail((*at, "name"), f"two phases are called '{phase.name}'; a phase is known by its name")
        names.add(phase.name)
        for key in ("sequence", "batch", "mix"):
            if i == 0 and getattr(phase, key) is None:
                checker.fail(at, f"missing key '{key}': the first phase has none to inherit it from")


def _ends(curriculum: CurriculumSettings, checker: Checker) -> None:
    """Check that the ends of the phases (`until`) rise up to the curriculum's total number of tokens, and that phases
    beyond the total (`extra`) come last."""
    before, beyond, last = Fraction(0), False, len(curriculum.phases) - 1
    for i, (at, phase) in enumerate(_phases(curriculum)):
        if (phase.until is None) == (phase.extra is None):
            checker.fail(at, "`until` says where in the total a phase ends, `extra` how many tokens it has beyond the "
                             "total: give one of them")
        elif phase.until is not None:
            end = _end(phase.until, curriculum.total)
            if end <= before:
                checker.fail((*at, "until"), f"'{phase.until}' is not after the phase before it; `until` counts from "
                                             "the start of the run")
            if beyond:
                checker.fail((*at, "until"), "a phase before it is beyond the total; put phases with `extra` last")
            before, last = end, i
        beyond = beyond or phase.extra is not None
    if before != curriculum.total:
        checker.fail(("curriculum", "phases", last, "until"),
                     f"the last phase ends at {int(before):,} of {curriculum.total:,} tokens; write `until: 100%`")


def _end(until: str | int, total: int) -> Fraction:
    if isinstance(until, int):
        return Fraction(until)
    parse_share(until)
    return Fraction(until.rstrip("% ")) / 100 * total


def _rates(curriculum: CurriculumSettings, schedule: dict[str, Any], checker: Checker) -> None:
    """Check that the learning rates of the phases fit together and suit `train.schedule`; add problems for those that
    do not. `trainer.optim.schedule` refuses bad learning rates, too, but only when the training begins, after all its
    data has been made."""
    fallen = own = False
    for at, phase in _phases(curriculum):
        if phase.lr == "decay" and schedule.get("kind", "wsd") != "wsd":
            checker.fail((*at, "lr"), f"train.schedule.kind {schedule['kind']} has no stretch of decay; use kind: wsd, "
                                      "or lr: stable")
        if own and phase.lr is None:
            checker.fail(at, "missing key 'lr': the phase before it has a rate of its own, which is not inherited")
        own = isinstance(phase.lr, dict)
        fallen = fallen or phase.lr == "decay"
        if fallen and phase.lr in ("stable", "constant") and not schedule.get("floor"):
            checker.fail((*at, "lr"), "the learning rate has fallen to 0 before this phase, which would learn nothing: "
                                      "let only the last phases say lr: decay, give this one a rate of its own, or "
                                      "train.schedule.floor")


def _sizes(phase: PhaseSettings, at: KeyPath, recipe: Recipe, checker: Checker) -> None:
    if phase.sequence is None:
        return
    for name, shards in recipe.shards.items():
        if shards.longest % phase.sequence:
            checker.fail((*at, "sequence"), f"{phase.sequence:,} does not divide {shards.longest:,}, the `longest` of "
                                            f"shards '{name}'")
        elif shards.packing and phase.sequence != shards.longest:
            checker.fail((*at, "sequence"), f"the documents of shards '{name}' are packed into rows of "
                                            f"{shards.longest:,} tokens (`longest`), not of {phase.sequence:,}; give "
                                            f"all phases this sequence, or leave out shards.{name}.packing")
    batch = min(phase.batch.values()) if isinstance(phase.batch, dict) else phase.batch
    if phase.sequence and batch and batch < phase.sequence:
        checker.fail((*at, "batch"), f"a batch of {batch:,} tokens holds no sequence of {phase.sequence:,}")


def _weights(phase: PhaseSettings, at: KeyPath, recipe: Recipe, checker: Checker) -> None:
    for name in phase.max_epochs or ():
        _stream(name, (*at, "max_epochs", name), recipe, checker)
    if phase.mix is None:
        return
    seen: set[str] = set()
    for entry, weight in phase.mix.items():
        inside = weight.streams if isinstance(weight, StreamGroup) else None
        if isinstance(weight, StreamGroup) and inside is None:
            _label_rules(entry, weight, (*at, "mix", entry), recipe, checker)
        for name in [entry] if inside is None else inside:
            path: KeyPath = (*at, "mix", entry) if inside is None else (*at, "mix", entry, "streams", *(
                [name] if isinstance(inside, dict) else [inside.index(name)]))
            _stream(name, path, recipe, checker)
            if inside is not None and name in recipe.shards and recipe.shards[name].by:
                checker.fail(path, f"'{name}' is split; name its streams, such as {name}.en, or make it an entry of "
                                   f"its own: {name}: {{share: …, by: …}}")
            if name in seen:
                checker.fail(path, f"the phase has stream '{name}' twice; give it one place")
            seen.add(name)
        if isinstance(inside, dict) and not any(inside.values()):
            checker.fail((*at, "mix", entry, "streams"), "all weights are 0; give at least one stream a weight")
    total = sum(Fraction(str(w.share if isinstance(w, StreamGroup) else w)) for w in phase.mix.values())
    if total == 0:
        checker.fail((*at, "mix"), "all weights are 0; give at least one source a weight")
    elif total not in (1, 100):
        checker.warnings.append(f"{key_path((*at, 'mix'))}: weights sum to {float(total):g}, not to 100; they were "
                                "normalised")


def _stream(name: str, path: KeyPath, recipe: Recipe, checker: Checker) -> None:
    """Check that `name` is an entry of `shards:`, or may be a stream of split shards. The streams of split shards are
    known only when their documents have been seen. Therefore any name that begins with the name of split shards is
    accepted."""
    if recipe.split_of(name) is None:
        checker.check_name(name, recipe.shards, path, "shards")


def _label_rules(entry: str, rule: LabelRule | None, path: KeyPath, recipe: Recipe, checker: Checker) -> None:
    """Check the rule that divides the share of `entry` (shards that labels split into streams) among its streams, and
    the rules inside it (`within`). The label `by` must be one of those that split the shards, at most one rule may be
    given, and `within` needs `by`."""
    shards = recipe.shards.get(entry)
    if shards is None:
        return                                                     # reported by `_stream`
    if not shards.by:
        checker.fail(path, f"'{entry}' is not split; list streams under `streams:`, or split it with "
                           f"`shards.{entry}.by`")
        return
    while rule is not None:
        if rule.by is not None:
            checker.check_name(rule.by, shards.labels, (*path, "by"), f"label of shards '{entry}'")
        if len(rule.rules) > 1:
            checker.fail(path, f"{' and '.join(rule.rules)} are rules for the same weights; give one of them")
        if rule.within is not None and rule.by is None:
            checker.fail((*path, "within"), f"`within` divides what each label gets; say which: by: {shards.labels[0]}")
        rule, path = rule.within, (*path, "within")


def _kept(curriculum: CurriculumSettings, recipe: Recipe, checker: Checker) -> None:
    """Check that no phase reads a stream before the phase that the stream's `from_phase` names. A phase without a mix
    inherits the mix of the phase before it."""
    numbers = {phase.name: i for i, phase in enumerate(curriculum.phases)}
    for name, shards in recipe.shards.items():
        if shards.from_phase is None:
            continue
        checker.check_name(shards.from_phase, numbers, ("shards", name, "from_phase"), "curriculum.phases")
        for at, phase in list(_phases(curriculum))[:numbers.get(shards.from_phase, 0)]:
            for entry, weight in (phase.mix or {}).items():
                # a group without streams has the streams of split shards
                inside = {entry: weight} if not isinstance(weight, StreamGroup) else \
                    {entry: weight.share} if weight.streams is None else weight.streams
                reads = {stream for stream in inside if not (isinstance(inside, dict) and inside[stream] == 0)}
                if name in reads or (shards.by and any(stream.startswith(f"{name}.") for stream in reads)):
                    checker.fail((*at, "mix", entry), f"phase '{phase.name}' reads stream '{name}', which "
                                 f"shards.{name}.from_phase keeps for phase '{shards.from_phase}': leave it out here, "
                                 f"or write from_phase: {phase.name}")
