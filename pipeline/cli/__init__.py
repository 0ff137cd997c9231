"""The `tokenmill` command. Exit codes: 0 done, 1 failed, 2 bad usage or recipe."""

from __future__ import annotations

import sys


def main() -> None:
    """The entry point of the command `tokenmill`. For `tokenmill train …` only the trainer is imported, because a GPU
    node may have nothing else installed."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["train"]:
        from pipeline.cli.training import forward

        sys.exit(forward(arguments[1:]))
    try:
        from pipeline.cli.app import run_command
    except ModuleNotFoundError as e:
        if (e.name or "").partition(".")[0] in ("pipeline", "stages", "tokenizer"):
            raise
        print(f"error: the package '{e.name}' is not installed; pip install 'tokenmill[pipeline]'", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:                     # the import takes most of a second
        print("stopped", file=sys.stderr)
        sys.exit(1)
    sys.exit(run_command(arguments))
