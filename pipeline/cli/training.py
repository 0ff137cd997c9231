"""`tokenmill train …` does the same as `python -m trainer …`, so that one command covers data and training."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Sequence


def forward(arguments: Sequence[str]) -> int:
    """Pass the command line to the trainer, and return its exit code. If the command compares data that is still to be
    made, it is made first. After a successful `train run`, a section about the training is added to the run's
    report."""
    try:
        from trainer.__main__ import main

        code = main(with_data(list(arguments)))
    except SystemExit as stop:                    # argparse has printed what is wrong with the arguments
        return int(stop.code or 0)
    except ModuleNotFoundError as e:
        if e.name != "torch":
            raise
        print("error: training needs the package 'torch', which is not installed; pip install 'tokenmill[trainer]'",
              file=sys.stderr)
        return 1
    if code == 0 and arguments[:1] == ["run"] and not {"-h", "--help"} & set(arguments):
        _report(arguments)
    return code


def _report(arguments: Sequence[str]) -> None:
    """Add the training to the report of its run, if possible. Does nothing when the pipeline is not installed (as on
    some GPU nodes), when --out puts the training outside the folder of its run, or on ranks other than 0."""
    from trainer.__main__ import parser

    options = parser("run").parse_args(arguments)
    if options.out or os.environ.get("RANK", "0") != "0":
        return
    folder = os.path.abspath(options.run) if os.path.isdir(options.run) else options.run
    try:
        written = _add_training(folder, options.store or "store")
    except ModuleNotFoundError as e:
        if (e.name or "").partition(".")[0] in ("pipeline", "stages", "tokenizer"):
            raise
        return
    if written and not (options.quiet or options.json):
        print(f"report: {written}")


def _add_training(run: str, store: str) -> str | None:
    """Add the training to the report of its run, and return the report's path. Returns None when the run has no report
    or when an error occurs. The error is only printed, because the training itself has succeeded."""
    from pipeline.base.errors import TokenmillError
    from pipeline.cli.options import resolve_run
    from pipeline.report.collect import add_training

    try:
        at, name = resolve_run(run, store)
        return f"{at.root}/runs/{name}/report.html" if add_training(at, name) else None
    except TokenmillError as e:
        print(f"warning: the report has no section about this training: {e}", file=sys.stderr)
        return None


def with_data(arguments: list[str]) -> list[str]:
    """Make the data that `train ablate --data` compares, and return the command line with which the trainer compares
    the runs. Any other command line is returned as it is."""
    from trainer.__main__ import parser

    if arguments[:1] != ["ablate"] or {"-h", "--help"} & set(arguments):
        return arguments
    options = parser("ablate").parse_args(arguments)
    if not options.data and not options.vary:
        return arguments
    import logging

    from pipeline.base.visible import visible
    from pipeline.cli.errors import BadUsage, stoppable
    from pipeline.cli.options import check_root
    from pipeline.run import default_workers, make_backend
    from pipeline.store.fs import Store
    from pipeline.study.data import make_data, study_data
    from pipeline.study.variants import named_variants

    if options.runs or options.arms or options.on:
        raise BadUsage("--data compares recipes: leave out RUN, --arm and --on")
    root = options.store or os.environ.get("TOKENMILL_STORE", "store")
    check_root(root)
    if Store(root).local is None and not options.out:
        raise BadUsage("the trainings of a study need a file system, and the store is in object storage: give a folder "
                       "with --out")
    study = study_data(named_variants(options.data or [], options.vary), options.held_out or [], name=options.name,
                       tokens=options.tokens, tokenizers=options.tokenizers, allow_custom=options.allow_custom_stages)
    if options.json:
        logging.getLogger("tokenmill").setLevel(logging.ERROR)
    with stoppable():
        made = make_data(study, root, show="quiet" if options.json else "rich",
                         make_backend=make_backend("process", options.workers or default_workers(), None))
    if not options.json:
        for warning in dict.fromkeys(warning for summary in made for warning in summary.warnings):
            print(visible(f"warning: {warning}"), file=sys.stderr)
        for variant, summary in zip(study.variants, made):
            print(f"{variant.name}: " + ", ".join(f"{s} {n:,} tokens" for s, n in summary.shards.items() if n)
                  + f"; {summary.run}")
    folders = [f"{summary.store}/runs/{summary.run}" for summary in made]
    return ["ablate", *folders, "--on", "held-out", "--out", options.out or f"{made[0].store}/studies/{study.name}",
            *passed_on(options)]


def passed_on(options: Namespace) -> list[str]:
    """Return those arguments of `train ablate --data` that are about the trainings."""
    out = ["--seeds", str(options.seeds), "--jobs", str(options.jobs), "--device", options.device]
    for flag, value in (("--tokens", options.tokens), ("--widths", options.widths), ("--ranks", options.ranks)):
        out += [flag, str(value)] if value else []
    for assignment in options.overrides:
        out += ["--set", assignment]
    return [*out, *(["--json"] if options.json else [])]
