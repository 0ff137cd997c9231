"""`tokenmill train anneal RUN --from STEP --mixes a.yaml b.yaml --tokens 1B --seeds 2`: which data helps?

Several short trainings (arms) continue from one checkpoint, each with another data mixture and with a learning rate
that decays to 0. Then the held-out loss of every source is compared (micro-anneals: OLMo 2, arXiv 2501.00656; Llama 3,
arXiv 2407.21783 §3.1.3). The checkpoint should be from before the learning rate has fallen.

A mixture is a YAML file: streams (data sources) and weights, or the keys of a phase (`mix`, `max_epochs`,
`on_exhausted`). Streams that the run does not have yet are taken from the store's shards/NAME. All mixtures are
compared with that of the first file.

Instead of mixtures, `--candidates [NAME=]STREAM …` names streams of the store. A candidate may consist of several
streams with weights, `clean=web:3,code:1`. Each candidate gets an arm of its own, in which it has the share `--share`
of the tokens, and the mixture of the run has the rest. All are compared with an arm that has the mixture of the run
alone, by the held-out text of the run. `--data RECIPE …` makes the candidates from recipes; this needs the pipeline
(`pipeline.study`).

All arms continue from the same position in the data. An arm with another seed reads the same part of the data in
another order. As the order depends on the number of the phase (stretch of the training), the arm with seed s makes each
of its first s steps a separate phase.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.base.arguments import of_a_run, positive
from trainer.tools import experiment_arms
from trainer.tools.arm import arm_of, settings_of
from trainer.tools.arm_table import RUN
from trainer.tools.arm_tasks import check_data, check_scoring

if TYPE_CHECKING:
    from tokenizer.mixture.curriculum import Curriculum
    from trainer.checkpoint.checkpoints import Checkpoint
    from trainer.loop.run import Run
    from trainer.tools.arm import Arm

BASE = "base"


def add_parser(commands: Any) -> None:
    anneal = commands.add_parser("anneal", parents=[of_a_run()],
                                 description="From a checkpoint, decay the learning rate to 0 on each of several "
                                             "mixtures, and compare what that does to the held-out data.")
    anneal.add_argument("--from", required=True, type=positive, dest="step", metavar="STEP",
                        help="the step of the checkpoint from which the trainings continue")
    anneal.add_argument("--mixes", nargs="+", metavar="FILE", default=[], help="candidate mixtures, as YAML")
    anneal.add_argument("--candidates", nargs="+", metavar="[NAME=]STREAM", default=[],
                        help="streams of the store, each of which is mixed with what the run reads")
    anneal.add_argument("--share", default="60%", metavar="SHARE",
                        help="share of a candidate in its mixture (default: 60%%)")
    anneal.add_argument("--tokens", required=True, type=positive, metavar="N",
                        help="tokens of each training, over which the learning rate decays to 0, e.g. 1B")
    experiment_arms.add_arguments(anneal)
    experiment_arms.add_data_arguments(anneal, "make candidates from the shards of these recipes, which run as one "
                                               "plan in the store of RUN")


def run(options: argparse.Namespace) -> int:
    from trainer.base.config import ConfigError

    if options.data or options.vary:
        raise ConfigError(experiment_arms.NEEDS_PIPELINE)
    base, checkpoint = opened(options.run, options)
    if bool(options.mixes) == bool(options.candidates):
        raise ConfigError("what is compared? Give --mixes FILE FILE … or --candidates STREAM …")
    mixes = {Path(file).stem: read_mix(Path(file)) for file in options.mixes} or with_candidates(
        base, checkpoint.meta["samples"], options.candidates, options.share)
    if len(mixes) < len(options.mixes):
        raise ConfigError("--mixes: files are told apart by their names, and two have the same")
    settings = settings_of(base, options.overrides)
    folder = base.out / "anneal" / f"from{checkpoint.step}"
    result = [arm(base, checkpoint, mixes, name, options.tokens, seed, settings, folder)
              for name in mixes for seed in range(options.seeds)]
    return experiment_arms.perform(options, result, lambda one: plant(checkpoint, base, one.run),
                                   sources=sources_of(base, result[0].run))


def sources_of(base: Run, arm: Run) -> dict[str, list[str]]:
    """Return the sources (rows of the table that compares the arms of a study), each with its streams. The first source
    decides about the arms: all streams of the run `base` taken together. Then comes a source for each stream that the
    arms have; `arm` is one of the arms. The held-out text of a candidate does not decide, because it is of the same
    quality as the candidate. Raises ConfigError when the run has no held-out data."""
    from trainer.base.config import ConfigError

    names = experiment_arms.held_out(arm.curriculum)
    own = [stream.name for stream in base.curriculum.streams if stream.name in names]
    if not own:
        raise ConfigError(f"{base.folder}: the streams of the run have no held-out data, by which arms are compared; "
                          f"give shards.*.val")
    return {RUN: own, **{name: [name] for name in names}}


def check_candidates(options: argparse.Namespace, run: str, names: Sequence[str]) -> None:
    """Check the options of `anneal --data` before the candidates' data is made. `run` is the folder of the run, and
    `names` are those of the candidates. The arm with the run's own mixture needs no candidate, so it is prepared as in
    the study, to check as much as possible. Raises ConfigError for options that cannot be used."""
    base, checkpoint = opened(run, options)
    mixes = with_candidates(base, checkpoint.meta["samples"], [f"{name}={name}" for name in names], options.share)
    of_run = arm(base, checkpoint, {BASE: mixes[BASE]}, BASE, options.tokens, options.seeds - 1,
                 settings_of(base, options.overrides), base.out / "anneal" / f"from{checkpoint.step}")
    experiment_arms.refuse_contradictions(options)
    sources_of(base, of_run.run)
    if check_scoring([of_run], options.by, announce=lambda _text: None):
        check_data([of_run])


def opened(run: str, options: argparse.Namespace) -> tuple[Run, Checkpoint]:
    """Open a run and its checkpoint of step --from. Raises ConfigError when the run has no such checkpoint, or when the
    checkpoint belongs to another training."""
    from trainer.base.config import ConfigError
    from trainer.checkpoint import checkpoints as ckpt
    from trainer.loop.run import differences, open_run

    base = open_run(run, options.store, options.out, options.overrides)
    checkpoints = {c.step: c for c in ckpt.complete(base.out / "checkpoints")}
    if options.step not in checkpoints:
        raise ConfigError(f"--from {options.step}: {base.out / 'checkpoints'} has "
                          + (f"checkpoints of steps {', '.join(map(str, checkpoints))}" if checkpoints else
                             "no checkpoints") + "; checkpoint.keep_every keeps more of them")
    checkpoint = checkpoints[options.step]
    if wrong := differences(checkpoint.meta, base):
        raise ConfigError(f"{checkpoint.folder.parent} belongs to another training than this one:\n  "
                          + "\n  ".join(wrong))
    return base, checkpoint


def with_candidates(base: Run, sample: int, candidates: Sequence[str], share: str) -> dict[str, dict[str, Any]]:
    """Return the mixtures that `--candidates` compares, by name. `base` is the mixture of the run just before sample
    number `sample`. Every other mixture is named after a candidate, which has the share `share` in it; `base` has the
    rest. In these mixtures, streams (data sources) may be read more often than the run allows. Raises ConfigError when
    a share or a name cannot be used."""
    from pipeline.base.quantities import parse_share
    from trainer.base.config import ConfigError

    try:
        part = parse_share(share)
    except ValueError as error:
        raise ConfigError(f"--share {share}: {error}") from None
    if not part:
        raise ConfigError(f"--share {share}: a candidate has a share above 0")
    phase = base.curriculum.phases[base.curriculum.phase_at(sample - 1)]
    mixes: dict[str, dict[str, Any]] = {BASE: {"mix": dict(phase.weights)}}
    for word in candidates:
        name, weights = candidate(word)
        if name in mixes:
            raise ConfigError(f"--candidates {word}: '{name}' stands there twice, or is the mixture of the run; give "
                              f"it another name: NAME={word.partition('=')[2] or word}")
        mix: dict[str, float] = {}
        for streams, sum_of in ((phase.weights, 100 * (1 - part)), (weights, 100 * part)):
            for stream, weight in streams.items():
                mix[stream] = mix.get(stream, 0) + sum_of * weight / sum(streams.values())
        mixes[name] = {"mix": {stream: weight for stream, weight in mix.items() if weight}, "on_exhausted": "repeat"}
    return mixes


def candidate(word: str) -> tuple[str, dict[str, float]]:
    """Parse a candidate of `--candidates`, `[NAME=]STREAM[:WEIGHT],…`. Returns its name (without NAME, all of the word)
    and the weights of its streams (data sources). Raises ConfigError when a stream has no name or a weight is not above
    0."""
    from trainer.base.config import ConfigError

    name, _, listed = word.rpartition("=")
    weights: dict[str, float] = {}
    for entry in listed.split(","):
        stream, _, weight = entry.partition(":")
        try:
            weights[stream] = float(weight or 1)
        except ValueError:
            raise ConfigError(f"--candidates {word}: '{weight}' is not a weight; write clean=web:3,code:1") from None
    if not re.fullmatch(r"[^/\\]*[^/\\.][^/\\]*", name or listed):
        raise ConfigError(f"--candidates {word}: '{name or listed}' cannot be the name of a folder; write NAME=STREAM "
                          f"with a name without slashes")
    if not all(stream and weight > 0 for stream, weight in weights.items()):
        raise ConfigError(f"--candidates {word}: write a stream, or NAME=STREAM:WEIGHT,… with weights above 0")
    return name or listed, weights


def read_mix(path: Path) -> dict[str, Any]:
    """Read a data mixture, a file given with `--mixes`. Returns the keys of a phase (stretch of the training) that the
    file sets: `mix` (streams, i.e. data sources, and weights) and, if given, `max_epochs` and `on_exhausted`. Raises
    ConfigError when the file cannot be used."""
    import yaml

    from trainer.base.config import ConfigError

    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--mixes {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--mixes {path}: {error}") from None
    if not isinstance(document, dict) or not document:
        raise ConfigError(f"--mixes {path}: expected streams and weights, e.g. {{web: 60, code: 40}}")
    if "mix" not in document:
        return {"mix": document}
    if wrong := sorted(set(document) - {"mix", "max_epochs", "on_exhausted"}):
        raise ConfigError(f"--mixes {path}: {wrong[0]}: candidates differ in their data alone; there are mix, "
                          f"max_epochs and on_exhausted")
    return document


def arm(base: Run, checkpoint: Checkpoint, mixes: Mapping[str, Mapping[str, Any]], name: str, tokens: int,
        seed: int, settings: Mapping[str, Any], folder: Path) -> Arm:
    """Return a short training that continues the run `base` from `checkpoint`. It trains on the mixture `name` of
    `mixes` for `tokens` tokens, with a learning rate that decays to 0. `seed` determines the order of the data; the
    seed in the settings stays, because it belongs to the initial values. Raises ConfigError when the learning rate at
    the checkpoint is 0, or when the curriculum cannot be made."""
    from tokenizer.mixture.curriculum import CurriculumError
    from trainer.base.config import ConfigError

    rate = base.schedule().factor(checkpoint.meta["tokens"]) * base.config.optimizer.lr
    if rate <= 0:
        raise ConfigError(f"--from {checkpoint.step}: the learning rate has fallen to 0 there; begin before its decay")
    try:
        curriculum = future(base, checkpoint.meta["samples"], mixes, name, tokens, seed, rate)
    except CurriculumError as error:
        raise ConfigError(str(error)) from None
    # the phase has a rate of its own; shares in the run's schedule (a warm-up of 2%) would refer to another total
    decayed = {**settings, "schedule": {"kind": "constant", "warmup": "0"}, "skip": []}
    return replace(arm_of(base, name, seed, decayed, curriculum, folder), before=checkpoint.meta["tokens"],
                   step=checkpoint.step)


def future(base: Run, sample: int, mixes: Mapping[str, Mapping[str, Any]], name: str, tokens: int, seed: int,
           rate: float) -> Curriculum:
    """Return the curriculum of the run `base`, changed from sample number `sample` on. From there it has the data
    mixture `name` for `tokens` tokens. The learning rate stays at `rate` for `seed` steps, and then decays linearly to
    0. The curriculum has the streams (data sources) of all of `mixes`, so that trainings with different mixtures are
    evaluated on the same held-out data."""
    from tokenizer.mixture.curriculum import CurriculumError, cut, edit
    from tokenizer.mixture.resolve import resolve_phases, stream_sizes
    from trainer.tools.curriculum_edit import new_streams

    past = cut(base.curriculum, sample)
    step = past[-1].batch * past[-1].sequence
    if tokens // step < 2 + seed:
        raise CurriculumError(f"--tokens {tokens:,}: a step has {step:,} tokens; {2 + seed} of them are the least here")
    streams = new_streams([{"mix": m["mix"]} for m in mixes.values()], base.curriculum, base.store)
    decay = {"peak": rate, "warmup": 0, "shape": "linear", "floor": 0.0}
    new_phases = [{**mixes[name], "name": f"order {i + 1}", "extra": step, "lr": {**decay, "shape": "constant"}}
             for i in range(seed)]
    new_phases.append({**mixes[name], "name": "anneal", "extra": tokens - seed * step, "lr": decay})
    splits = base.curriculum.splits
    sizes = stream_sizes((*base.curriculum.streams, *streams), splits, base.curriculum.longest)
    phases = resolve_phases(new_phases, tokens, sizes, [], past, f"mixture {name}", splits)
    # the short training may read what the run keeps for a later phase: it is to find out what that phase shall read
    free = tuple(replace(stream, from_phase=None) for stream in base.curriculum.streams)
    return edit(replace(base.curriculum, streams=free), sample, phases, streams)


def plant(checkpoint: Checkpoint, base: Run, run: Run) -> None:
    """Put `checkpoint` of the run `base` into the folder of `run`, a short training that is to begin with this
    checkpoint. Its files are linked where possible. Its metadata gets the configuration and curriculum of `run`. The
    ledger of `base` (its list of skipped steps) is copied. Does nothing when `run` already has a checkpoint."""
    from trainer.checkpoint import checkpoints as ckpt
    from trainer.checkpoint.ledger import NAME

    folder = run.out / "checkpoints"
    if ckpt.latest(folder):
        return
    attempt = folder / checkpoint.folder.parent.name / checkpoint.folder.name
    attempt.mkdir(parents=True, exist_ok=True)
    if (base.out / NAME).exists():
        shutil.copyfile(base.out / NAME, run.out / NAME)
    for file in checkpoint.folder.iterdir():
        target = attempt / file.name
        if file.name == "meta.json" or target.exists():
            continue
        try:
            os.link(file, target)
        except OSError:                          # for instance on another disk
            shutil.copyfile(file, target)
    meta = {**checkpoint.meta, "config": run.config.identity(), "train": asdict(run.config), "pinned": False,
            "curriculum": run.curriculum.to_json()}
    (attempt / "meta.json").write_text(json.dumps(meta, indent=1, sort_keys=True), encoding="utf-8")
    files = {p.name: p.stat().st_size for p in sorted(attempt.iterdir())}
    sums = {**checkpoint.sha256, "meta.json": ckpt.sha256(attempt / "meta.json")} if checkpoint.sha256 else {}
    commit = {"attempt": attempt.name, "files": files, "sha256": sums}
    ckpt.put_absent(attempt.parent / "COMPLETE", json.dumps(commit, indent=1).encode())
