"""`tokenmill train edit RUN --at STEP|now --phases FILE`: replace the phases of a training from a step on.

FILE is YAML: a list of phases (stretches of the training) like a recipe's `curriculum.phases`. It may also be a mapping
with `phases`, and with `total` if shares such as `until: 80%` should refer to another total. The phases in FILE replace
all that comes after step STEP; everything up to this step stays. A phase inherits keys that it does not give from the
phase before it:

    - {name: code, until: 80%, mix: {web: 60, code: 40}}
    - {name: long, extra: 1B, sequence: 16384, rope_theta: 2e6, lr: {peak: 2e-5, warmup: 50M, shape: cosine}}

The samples up to step STEP stay the same, bit for bit, and no data is read twice within an epoch of its stream. A
stream that the run does not have yet is taken from the store's shards/NAME.

RUN/curriculum.json is replaced atomically, and the old file is kept as curriculum.1.json (2, …). A running training
keeps the curriculum that it read at its start, so stop it after STEP at the latest, and start it again. It then records
in OUT/ledger.jsonl from which step on the new curriculum applies.
"""

from __future__ import annotations

import argparse
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.base.arguments import of_a_run

if TYPE_CHECKING:
    from tokenizer.mixture.curriculum import Curriculum, Phase, Stream
    from trainer.loop.run import Run


def add_parser(commands: Any) -> None:
    edit = commands.add_parser("edit", parents=[of_a_run()],
                               description="Give a training other phases from a step on, or more of them at its end.")
    edit.add_argument("--at", required=True, metavar="STEP",
                      help="the phases begin after this step; now: after that of the latest checkpoint")
    edit.add_argument("--phases", required=True, metavar="FILE", help="the phases, as YAML")
    edit.add_argument("--recipe", metavar="FILE",
                      help="a recipe whose train: section counts from now on; the old one is kept as recipe.1.yaml")


def run(options: argparse.Namespace) -> int:
    from tokenizer.mixture.curriculum import Curriculum
    from tokenizer.mixture.realised import plan_text
    from trainer.base.config import ConfigError, build, override, read_train
    from trainer.checkpoint import checkpoints as ckpt
    from trainer.loop.config import TrainConfig
    from trainer.loop.run import differences, edits, open_run
    from trainer.model.transformer import phase_rope
    from trainer.observe.metrics import scan

    old = open_run(options.run, options.store, options.out, options.overrides)
    if old.source:
        raise ConfigError(f"{options.run}: a run in object storage cannot be edited; give one on a file system")
    checkpoint = ckpt.latest(old.out / "checkpoints")
    if checkpoint and (wrong := differences(checkpoint.meta, old)):
        raise ConfigError(f"{checkpoint.folder.parent} belongs to another training than this one:\n  "
                          + "\n  ".join(wrong)
                          + "\nTake these back first (an older curriculum is RUN/curriculum.N.json)")
    step = at_step(options.at, checkpoint.step if checkpoint else 0, old.curriculum.steps)
    warnings: list[str] = []
    curriculum, phases = edited(old, step, Path(options.phases), warnings)
    config = old.config
    if options.recipe:
        train = read_train(Path(options.recipe))
        for assignment in options.overrides:
            override(train, assignment)
        config = build(TrainConfig, train, f"{options.recipe}: train")
    new = replace(old, curriculum=curriculum, config=config)
    new.schedule()                        # raises errors before anything is written
    for phase in phases:
        phase_rope(config.model, phase)
    if checkpoint and (wrong := differences(checkpoint.meta, new)):
        raise ConfigError("a training could not go on so:\n  " + "\n  ".join(wrong))
    if Curriculum.load(old.folder / "curriculum.json") != old.curriculum:
        raise ConfigError(f"{old.folder / 'curriculum.json'} has just been edited by somebody else; look at it")
    if options.recipe:
        replace_and_keep(old.folder / "recipe.yaml", Path(options.recipe).read_text(encoding="utf-8"))
    before = replace_and_keep(old.folder / "curriculum.json", curriculum.dumps())
    for warning in warnings:
        print(f"warning: {warning}")
    print(plan_text(curriculum), end="")
    for line in edits({"curriculum": old.curriculum.to_json()}, new):
        print(line)
    print(f"{old.folder / 'curriculum.json'} is another from step {step:,} on; the old one is {before.name}. A "
          f"training that is running does not see it: stop it by step {step:,}, and start it again")
    for last in scan(old.out / "metrics.jsonl", lambda *_: False):       # gives only the last line
        if last["step"] > step:
            print(f"warning: step {last['step']:,} has been done already. If a training that still runs did it, what "
                  f"it saves when it stops cannot go on so: put {before.name} back (mv {before} "
                  f"{old.folder / 'curriculum.json'}) and edit at a step that is still ahead of it")
    return 0


def edited(old: Run, step: int, path: Path, warnings: list[str]) -> tuple[Curriculum, list[Phase]]:
    """Return (new curriculum, new phases) for the run `old`. In the new curriculum, the phases in the file `path`
    (stretches of the training) replace those of `old` after step `step`. Warnings are appended to `warnings`. Raises
    ConfigError when the phases cannot be used."""
    from tokenizer.mixture.curriculum import CurriculumError, cut, edit
    from tokenizer.mixture.resolve import parse_count, resolve_phases, stream_sizes
    from trainer.base.config import ConfigError

    document, before, sample = read_phases(path), old.curriculum, old.sample_at(step)
    try:
        total = parse_count(document["total"], "total") if "total" in document else \
            sum(p.tokens for p in before.phases if not p.extra)
        streams = new_streams(document["phases"], before, old.store)
        sizes = stream_sizes((*before.streams, *streams), before.splits, before.longest)
        phases = resolve_phases(document["phases"], total, sizes, warnings, cut(before, sample), f"{path}: phases",
                                before.splits)
        return edit(before, sample, phases, streams), phases
    except CurriculumError as error:
        raise ConfigError(str(error)) from None


def at_step(text: str, reached: int, steps: int) -> int:
    """Parse the value of `--at`, a step number or `now`. Returns the number of steps after which the new phases
    (stretches of the training) begin. `reached` is the step of the latest checkpoint (0: none), and `steps` is the
    number of steps of the curriculum. Raises ConfigError for a step before `reached` or beyond the curriculum, for
    `now` without a checkpoint, and for any other text."""
    from trainer.base.config import ConfigError

    if text == "now":
        if not reached:
            raise ConfigError("--at now: there is no checkpoint yet; give the step at which the phases shall begin")
        return reached
    if not text.replace(",", "").isdigit() or not 0 < int(text.replace(",", "")) <= steps:
        raise ConfigError(f"--at {text}: give a step from 1 to {steps:,}, or now")
    step = int(text.replace(",", ""))
    if step < reached:
        raise ConfigError(f"--at {text}: the latest checkpoint is of step {reached:,}, what has been read cannot "
                          f"become another: give a step from {reached:,} on, or now")
    return step


def read_phases(path: Path) -> dict[str, Any]:
    """Read new phases (stretches of a training) from the file given with `--phases`. Returns {"phases": [mapping, …]},
    with a further key "total" if the file has it. Raises ConfigError when the file cannot be used."""
    import yaml

    from trainer.base.config import ConfigError

    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--phases {path}: cannot be read ({error.strerror})") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"--phases {path}: not YAML: {error}") from None
    result = {"phases": document} if isinstance(document, list) else document
    valid = {"name", "until", "extra", "sequence", "batch", "mix", "max_epochs", "lr", "on_exhausted",
             "reset_optimizer", "rope_theta", "rope_scaling"}
    if not isinstance(result, dict) or not result.get("phases") or set(result) - {"phases", "total"} or \
            not all(isinstance(p, dict) for p in result["phases"]):
        raise ConfigError(f"--phases {path}: expected a list of phases, e.g. - {{name: long, extra: 1B, sequence: "
                          f"16384}}, or a mapping with `phases` and `total`")
    for i, phase in enumerate(result["phases"]):
        if unknown := sorted(set(phase) - valid):
            raise ConfigError(f"--phases {path}: phases[{i}].{unknown[0]}: unknown key; there are "
                              f"{', '.join(sorted(valid))}")
        if phase.get("mix") is not None and not isinstance(phase["mix"], dict):
            raise ConfigError(f"--phases {path}: phases[{i}].mix: expected stream: weight, got {phase['mix']!r}")
    return result


def new_streams(phases: Sequence[Mapping[str, Any]], curriculum: Curriculum, store: Path) -> list[Stream]:
    """Return the streams (data sources) that `phases` name and that the curriculum does not have yet, sorted by name.
    Their sizes and hashes are read from the folders shards/NAME of the store. Raises ConfigError when a stream has no
    such folder, has another tokenizer, or is packed into rows of another length than the run's `longest`."""
    from tokenizer.mixture.curriculum import Stream
    from tokenizer.mixture.mix import streams_in
    from tokenizer.shards.layout import ShardError
    from tokenizer.shards.reader import ShardSet
    from trainer.base.config import ConfigError

    present = {s.name for s in curriculum.streams}
    named = {n for p in phases for n in streams_in(p.get("mix") or {})}
    result = []
    for name in sorted(named - present - curriculum.splits.keys()):
        folder = Path("shards", name)
        try:
            training = ShardSet(store / folder / "split=train")
            train, packing = training.manifest, training.published_packing()
            has_val = (store / folder / "split=val").exists()
            val = ShardSet(store / folder / "split=val").manifest if has_val else None
        except ShardError as error:
            raise ConfigError(f"stream {name} is not one of the run's ({', '.join(sorted(present))}): "
                              f"{error}") from None
        if train.tokenizer != curriculum.tokenizer.sha256:
            raise ConfigError(f"stream {name} was encoded with another tokenizer ({train.tokenizer[:12]}…, not "
                              f"{curriculum.tokenizer.sha256[:12]}…): encode it again")
        if packing is not None and packing.longest != curriculum.longest:
            raise ConfigError(f"stream {name}: its documents are packed into rows of {packing.longest} tokens, the run "
                              f"has longest = {curriculum.longest}: pack it with this `longest`")
        stream = Stream(name, f"{folder}/split=train", f"{folder}/split=val" if val else None, train.sha256,
                        val.sha256 if val else None, train.tokens, val.tokens if val else 0, train.dtype)
        result.append(stream if packing is None else replace(stream, packing=packing.sha256, rows=packing.rows,
                                                             filled=packing.filled))
    return result


def replace_and_keep(path: Path, text: str) -> Path:
    """Replace `path` by `text` atomically and durably. Readers see either the whole old or the whole new file. Returns
    the path under which the old file is kept: NAME.1.SUFFIX, or the first free number instead of 1."""
    from pipeline.base import files

    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    number = 1
    try:
        files.write_synced(part, text.encode())
        while True:          # only now that the new file is on disk, so that a full disk changes nothing
            old_copy = path.with_name(f"{path.stem}.{number}{path.suffix}")
            try:
                os.link(path, old_copy)
                break
            except FileExistsError:
                number += 1
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    files.sync(path.parent)
    return old_copy
