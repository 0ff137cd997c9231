"""What the commands of `python -m trainer` have in common on their command lines. Imports no torch."""

from __future__ import annotations

import argparse


def of_a_run() -> argparse.ArgumentParser:
    """A parent parser for commands about one run: RUN, --store, --out, --set (`options.overrides`)."""
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("run", metavar="RUN",
                        help="folder or URL of the run (STORE/runs/RUN), or its name with --store")
    shared.add_argument("--store", help="the store RUN's shard paths are relative to (default: two folders above RUN)")
    shared.add_argument("--out", help="where checkpoints, metrics and plot go (default: RUN/train)")
    shared.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides",
                        help="override a key of the recipe's train: section, e.g. --set optimizer.lr=0.001")
    return shared


def positive(text: str, least: int = 1) -> int:
    """A whole number of at least `least`, as recipes write them: 8, 2048, 2,048, 50M, 1B."""
    from stages.mix.quantities import parse_count

    try:
        return parse_count(text, least=least)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def say(text: str) -> None:
    """Print at once, also into a pipe."""
    print(text, flush=True)
