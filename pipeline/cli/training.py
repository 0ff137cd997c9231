"""`tokenmill train …` does the same as `python -m trainer …`, so that one command, `tokenmill`, covers data and
training.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partial


def forward(arguments: Sequence[str]) -> int:
    """Pass the command line of `tokenmill train` to the trainer, and return the exit code. If the command compares data
    that is still to be made, this data is made first. After a successful `train run`, a section about the training is
    added to the run's report if this is possible (`_report`). If PyTorch is not installed, a message says so, and the
    exit code is 1."""
    try:
        from trainer.__main__ import main

        code = main(with_data(list(arguments)))
    except SystemExit as stop:                    # what is wrong has been printed
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
    """Add a section about the training to the report of the run whose shards it trained on, if possible. Does nothing
    when the pipeline is not installed (as on some GPU nodes), or on ranks other than 0. With --out it does nothing
    either, because the training is then outside the folder of its run."""
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
    """Add a section about the training to the report of the run whose shards it trained on, and return the report's
    path. Returns None when the run has no report or when a TokenmillError occurs. The error is only printed, because
    the training itself has succeeded."""
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
    """Make the data that `train ablate --data` and `train anneal --data` compare. Returns the command line with which
    the trainer compares the data. Any other command line is returned unchanged.

    The options about the trainings are checked before the data is made, as far as they can be. An error in them, or in
    making the data, is printed as one line; then SystemExit is raised with the exit code of the command. Raises
    ModuleNotFoundError when torch is not installed."""
    from trainer.__main__ import check_candidates, check_recipe, parser

    if arguments[:1] not in (["ablate"], ["anneal"]) or {"-h", "--help"} & set(arguments):
        return arguments
    options = parser(arguments[0]).parse_args(arguments)
    if not options.data and not options.vary:
        return arguments
    from pipeline.cli.errors import report_error
    from pipeline.cli.studies import ablate_data, anneal_data

    try:
        if arguments[0] == "ablate":
            return ablate_data(options, partial(check_recipe, options))
        return anneal_data(options, partial(check_candidates, options))
    except Exception as e:
        if isinstance(e, ModuleNotFoundError) and e.name == "torch":
            raise
        raise SystemExit(report_error(e)) from None
