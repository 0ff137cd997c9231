"""The command line of the trainer: `python -m trainer COMMAND`, also called as `tokenmill train COMMAND`. It needs only
torch, numpy, pyarrow and PyYAML.

A command is a module with two functions: `add_parser(commands)` adds its parser to argparse's sub-commands, and
`run(options)` runs the command and returns its exit code. Only the module of the requested command is imported. Modules
import torch (and everything that needs it) inside `run`, so that --help answers at once.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizer.mixture.phases import Phase

#: command → (its module, its help text). A new command needs a line in this table
COMMANDS = {
    "run": ("trainer.launch.start", "train, from the latest checkpoint if there is one"),
    "slurm": ("trainer.launch.slurm", "write a job script for Slurm"),
    "verify": ("trainer.tools.verify", "check a checkpoint; say which data the model has seen"),
    "edit": ("trainer.tools.curriculum_edit", "give a training other phases from a step on"),
    "explain": ("trainer.tools.explain", "show the documents a step consisted of, and its loss beside nearby steps'"),
    "soak": ("trainer.tools.loader_benchmark", "run the loader alone over the last steps: does it keep up?"),
    "doctor": ("trainer.tools.doctor", "check that this machine trains alike on one rank and on several"),
    "plan": ("trainer.tools.plan", "show phases, sizes, memory and FLOPs of a training"),
    "anneal": ("trainer.tools.anneal", "from a checkpoint, decay on several mixtures: which data helps?"),
    "ablate": ("trainer.tools.ablate", "train variations of the settings, with several seeds"),
    "compare": ("trainer.tools.compare", "show trainings side by side at equal tokens"),
    "eval": ("trainer.tools.task_follow", "score checkpoints or an exported model on benchmark tasks"),
    "signal": ("trainer.tools.signal_table", "judge which benchmark tasks can be trusted, from scores of checkpoints"),
    "export": ("trainer.tools.export", "write a checkpoint's model in Hugging Face's layout"),
    "import": ("trainer.tools.import_hf", "check a model in Hugging Face's layout and print how to go on training it"),
}


def parser(command: str | None) -> argparse.ArgumentParser:
    """Build the argument parser of the trainer's command line. Only `command` gets its options; every other command has
    only a name and a help text, so that its module need not be imported. If `command` is None, no command has
    options."""
    top = argparse.ArgumentParser(prog="tokenmill train", description="Train on the shards of a run.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, help_text) in COMMANDS.items():
        if name == command:
            importlib.import_module(module).add_parser(commands)
        else:
            commands.add_parser(name, help=help_text)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns its exit code: 0 done, 1 failed, 2 bad usage or configuration, 128 + n after signal n."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        options = parser(arguments[0] if arguments else None).parse_args(arguments)
    except SystemExit as stop:            # argparse has printed its message; a program that calls `main` needs the code
        return int(stop.code or 0)
    options.arguments = arguments         # launchers pass these to the other ranks
    from pipeline.base.visible import visible
    from trainer.base.config import ConfigError

    try:
        return importlib.import_module(COMMANDS[options.command][0]).run(options)
    except ConfigError as error:
        print(visible(f"error: {error}"), file=sys.stderr)
        return 2
    except KeyboardInterrupt:             # of `run`: in set-up, or at a second Ctrl-C
        print("stopped: nothing was saved" if options.command == "run" else "stopped", file=sys.stderr)
        return 1                          # not 128 + n: after such a code, launchers give the other ranks time to save
    except failures() as error:
        print(visible(f"error: {error}"), file=sys.stderr)
        return 1
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        print(f"error: {error.strerror}{f': {error.filename}' if error.filename else ''}; make room where checkpoints "
              f"and metrics go ({getattr(options, 'out', None) or 'RUN/train'}); the same command goes on from the "
              f"latest checkpoint", file=sys.stderr)
        return 1
    except SystemExit as stop:
        return int(stop.code or 0)


def check_recipe(options: argparse.Namespace, settings: Mapping[str, Any], phases: Sequence[Phase]) -> None:
    """Check the options of `ablate --data` before the pipeline makes the data of the recipes. See
    `trainer.tools.ablate.check_recipe`."""
    importlib.import_module(COMMANDS["ablate"][0]).check_recipe(options, settings, phases)


def check_candidates(options: argparse.Namespace, run: str, names: Sequence[str]) -> None:
    """Check the options of `anneal --data` before the pipeline makes the data of the candidates. See
    `trainer.tools.anneal.check_candidates`."""
    importlib.import_module(COMMANDS["anneal"][0]).check_candidates(options, run, names)


def failures() -> tuple[type[Exception], ...]:
    """Return the classes of errors that are reported to the user by their message alone, without a traceback."""
    from tokenizer.shards.layout import ShardError
    from trainer.checkpoint.checkpoints import CheckpointError
    from trainer.loop.run import TrainingError

    return TrainingError, CheckpointError, ShardError


if __name__ == "__main__":
    sys.exit(main())
