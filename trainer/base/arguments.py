"""Arguments and output that the commands of `python -m trainer` share. Imports no torch."""

from __future__ import annotations

import argparse
import errno
import os
import sys
from typing import TextIO

from pipeline.base.visible import visible


def of_a_run(optional: bool = False, several: bool = False) -> argparse.ArgumentParser:
    """Return a parent parser (see argparse) for the commands that work on one run. The parser has the arguments RUN,
    --store, --out and --set KEY=VALUE, which overrides a setting of the run. The values of --set are put into
    `options.overrides`. With `optional`, RUN may be left out. With `several`, there may be any number of runs,
    `options.runs`."""
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("runs" if several else "run", metavar="RUN",
                        nargs="*" if several else "?" if optional else None,
                        help="folder or URL of the run (STORE/runs/RUN), or its name with --store")
    shared.add_argument("--store", help="the store that has RUN's shards (default: two folders above RUN)")
    shared.add_argument("--out", help="where checkpoints, metrics and plot go (default: RUN/train)")
    shared.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides",
                        help="override a key of the recipe's train: section, e.g. --set optimizer.lr=0.001")
    return shared


def positive(text: str, least: int = 1) -> int:
    """Parse a whole number of at least `least`, written as in recipes: 8, 2048, 2,048, 50M, 1B."""
    from pipeline.base.quantities import parse_count

    try:
        return parse_count(text, least=least)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def say(text: str, stream: TextIO | None = None) -> None:
    """Print `text` to `stream` (default: stdout) and flush it, so that the reader of a pipe gets the line at once.
    Characters that are unsafe in a terminal are shown as escapes (see `visible`).

    If the pipe or terminal behind the stream is closed, output goes to /dev/null from then on. Otherwise an error would
    be raised, and would end the training. A pipe is closed, for instance, when the Ctrl-C that asks the training for a
    checkpoint also ends the `tee` of `… | tee`."""
    stream = stream or sys.stdout
    try:
        print(visible(text), file=stream, flush=True)
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.EIO):
            raise
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
