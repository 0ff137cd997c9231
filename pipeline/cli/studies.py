"""Runs the recipes whose data `tokenmill train ablate --data` and `tokenmill train anneal --data` compare, and forms
the command line with which the trainer compares the data. The options are those of the trainer's parser.
"""

from __future__ import annotations

import logging
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from pipeline.base.visible import visible
from pipeline.cli.errors import BadUsage, stoppable
from pipeline.cli.options import check_root, resolve_run
from pipeline.forecast.mixture import phases
from pipeline.recipe.model import Recipe
from pipeline.run import RunSummary, default_workers, make_backend
from pipeline.store.fs import Store
from pipeline.study.data import StudyData, candidate_data, make_data, study_data
from pipeline.study.variants import HELD_OUT, DataVariant, load_variant, named_variants
from tokenizer.mixture.curriculum import Curriculum
from tokenizer.mixture.phases import Phase


def ablate_data(options: Namespace, check: Callable[[Mapping[str, Any], Sequence[Phase]], None]) -> list[str]:
    """Run the recipes (variants) of a study, and return the arguments of `train ablate` that compare their runs.
    `check` is called first, with the section `train:` of the recipe and the phases of its curriculum. It raises an
    error when the options do not fit them."""
    if options.runs or options.arms or options.on:
        raise BadUsage("--data compares recipes: leave out RUN, --arm and --on")
    root = options.store or os.environ.get("TOKENMILL_STORE", "store")
    check_root(root)
    if Store(root).local is None and not options.out:
        raise BadUsage("the trainings of a study need a file system, and the store is in object storage: give a folder "
                       "with --out")
    study = study_data(named_variants(options.data or [], options.vary), options.held_out or [], name=options.name,
                       tokens=options.tokens, tokenizers=options.tokenizers, allow_custom=options.allow_custom_stages)
    first = check_settings(study.variants[0], options)
    check(first.train, phases(first))
    summaries = made_runs(study, root, options)
    return ["ablate", *(f"{summary.store}/runs/{summary.run}" for summary in summaries), "--on", HELD_OUT,
            "--out", options.out or f"{summaries[0].store}/studies/{study.name}",
            *passed_on(options, ("widths",))]        # the curricula of the runs have the number of tokens already


def anneal_data(options: Namespace, check: Callable[[str, Sequence[str]], None]) -> list[str]:
    """Make the shards of several recipes (variants) with the tokenizer of a run. Returns the arguments of `train
    anneal`, which compares the variants. For each of them it trains on a mixture of its shards and the run's own.
    `check` is called first, with the folder of the run and the names of the variants. It raises an error when the
    options do not fit them."""
    if options.mixes or options.candidates:
        raise BadUsage("--data makes the candidates: leave out --mixes and --candidates")
    store, name = resolve_run(options.run, options.store or os.environ.get("TOKENMILL_STORE", "store"))
    if store.local is None:
        raise BadUsage(f"{store.root}: candidates are added to the store of the run, on a file system; this one is in "
                       f"object storage")
    study = candidate_data(named_variants(options.data or [], options.vary), tokenizer_of(store, store.local, name),
                           name=options.name, allow_custom=options.allow_custom_stages)
    check(f"{store.root}/runs/{name}", [variant.name for variant in study.variants])
    summaries = made_runs(study, store.root, options)
    candidates = []
    for variant, summary in zip(study.variants, summaries):
        streams = {f"{stream}@{variant.name}": tokens for stream, tokens in summary.shards.items() if tokens}
        if not streams:
            raise BadUsage(f"{variant.file}: the variant '{variant.name}' has no tokens to train on; see "
                           f"{summary.store}/runs/{summary.run}/report.html")
        candidates.append(f"{variant.name}=" + ",".join(f"{stream}:{n}" for stream, n in streams.items()))
    return ["anneal", f"{store.root}/runs/{name}", "--from", str(options.step), "--candidates", *candidates,
            *passed_on(options, ("tokens", "share", "out"))]


def check_settings(first: DataVariant, options: Namespace) -> Recipe:
    """Load the recipe of a study's first variant with the settings of `--set`, and return it. Raises RecipeError when
    `--set` names a setting of the training that does not exist, or a wrong value."""
    return load_variant(first, [f"train.{change.removeprefix('train.')}" for change in options.overrides],
                        options.allow_custom_stages)


def tokenizer_of(store: Store, folder: Path, run: str) -> dict[str, Any]:
    """Return a section `tokenizer:` for a recipe that is to use the tokenizer of the run `run`. Raises BadUsage when
    this run has no curriculum, because the curriculum names the tokenizer."""
    path = f"runs/{run}/curriculum.json"
    if not store.exists(path):
        raise BadUsage(f"{store.at(path)}: no such file; give a run that has been trained")
    curriculum = Curriculum.loads(store.read(path), store.at(path))
    recipe = yaml.safe_load(store.read(f"runs/{run}/recipe.yaml")) or {}
    eos = (recipe.get("tokenizer") or {}).get("eos")
    return {"load": str((folder / curriculum.tokenizer.path).absolute()), **({"eos": eos} if eos else {})}


def made_runs(study: StudyData, root: str, options: Namespace) -> list[RunSummary]:
    """Run the recipes of a study, print the tokens that each has made, and return the summaries of the runs."""
    if options.json:
        logging.getLogger("tokenmill").setLevel(logging.ERROR)
    with stoppable():
        summaries = make_data(study, root, show="quiet" if options.json else "rich",
                         make_backend=make_backend("process", options.workers or default_workers(), None))
    if not options.json:
        for warning in dict.fromkeys(warning for summary in summaries for warning in summary.warnings):
            print(visible(f"warning: {warning}"), file=sys.stderr)
        for variant, summary in zip(study.variants, summaries):
            shards = ", ".join(f"{stream} {n:,} tokens" for stream, n in summary.shards.items() if n)
            print(visible(f"{variant.name}: {shards}; {summary.run}"), flush=True)
    return summaries


def passed_on(options: Namespace, names: Sequence[str]) -> list[str]:
    """Return the command-line arguments that are passed on to the trainer: the options about trainings that all studies
    have, and the options `names`."""
    out = ["--seeds", str(options.seeds), "--jobs", str(options.jobs), "--device", options.device, "--by", options.by]
    for name in (*names, "ranks", "address", "gpus"):
        value = getattr(options, name)
        out += [f"--{name}", str(value)] if value else []
    for assignment in options.overrides:
        out += ["--set", assignment]
    flags = ("halving", "ship-code", "insecure-local", "json")
    return [*out, *(f"--{flag}" for flag in flags if getattr(options, flag.replace("-", "_")))]
