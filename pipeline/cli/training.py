"""`tokenmill train …` is `python -m trainer …`; it is here so that one command does everything."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def forward(arguments: Sequence[str]) -> int:
    """Hand the command line to the trainer; returns its exit code."""
    try:
        from trainer.__main__ import main

        return main(list(arguments))
    except ModuleNotFoundError as e:
        if e.name != "torch":
            raise
        print("error: training needs the package 'torch', which is not installed; pip install 'tokenmill[trainer]'",
              file=sys.stderr)
        return 1
