"""Arguments and output that the commands of `python -m trainer` share. Imports no torch."""

from __future__ import annotations

import argparse
import errno
import os
import sys
from typing import TextIO

from pipeline.base.visible import visible


def of_a_run(optional: bool = False, several: bool = False) -> argparse.ArgumentParser:
    """Return an argparse parent parser with the arguments that commands on a run share: RUN, --store, --out and --set
    KEY=VALUE, which overrides a setting of the run. The values of --set go to `options.overrides`. With `optional`, RUN
    may be left out. With `several`, any number of runs may be given, and they go to `options.runs`."""
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

    If the reader of the stream is gone, all later output goes to /dev/null, so that training does not end with an
    error. This happens, for instance, when Ctrl-C stops both the training and the `tee` that it writes to.
    """
    stream = stream or sys.stdout
    try:
        print(visible(text), file=stream, flush=True)
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.EIO):
            raise
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
