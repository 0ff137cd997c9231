"""`python -m trainer …`, which is also `tokenmill train …`. Needs torch, numpy, pyarrow and PyYAML, nothing else."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="tokenmill train", description="Train on the shards of a run.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("run", metavar="RUN",
                        help="folder or URL of the run (STORE/runs/RUN), or its name with --store")
    shared.add_argument("--store", help="the store RUN's shard paths are relative to (default: two folders above RUN)")
    shared.add_argument("--out", help="where checkpoints, metrics and plot go (default: RUN/train)")
    shared.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides",
                        help="override a key of the recipe's train: section, e.g. --set optimizer.lr=0.001")

    run = commands.add_parser("run", parents=[shared], help="train, from the latest checkpoint if there is one",
                              description="Train, from the latest checkpoint if there is one.")
    run.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    run.add_argument("--ranks", type=positive, metavar="N",
                     help="N processes: on this machine, or with --address on Ray")
    run.add_argument("--stop-at", type=positive, metavar="STEP", help="stop, with a checkpoint, after STEP steps")
    run.add_argument("--address", help="a Ray cluster to train on (host:port, or auto on one of its machines)")
    run.add_argument("--gpus", type=positive, metavar="N", help="with --address: one rank on each of N GPUs")
    run.add_argument("--ship-code", action="store_true", help="with --address: send this machine's code to the nodes")
    run.add_argument("--insecure-local", action="store_true", help="with --address: accept a cluster without token "
                                                                   "authentication on this machine's loopback")
    run.add_argument("--quiet", action="store_true", help="print nothing but errors")

    plan = commands.add_parser("plan", parents=[shared], help="show phases, sizes, memory and FLOPs of a training",
                               description="Show what training would do, without doing it.")
    plan.add_argument("--ranks", type=positive, default=1, metavar="N", help="ranks the state is sharded over")
    return top


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 done, 1 failed, 2 bad usage or configuration, 128 + n after signal n."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        options = parser().parse_args(arguments)
    except SystemExit as stop:            # argparse has said what is wrong; a caller that is a program wants a number
        return int(stop.code or 0)
    from trainer.config import ConfigError

    try:
        return execute(options, arguments)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def execute(options: argparse.Namespace, arguments: list[str]) -> int:
    from tokenizer.shards.layout import ShardError
    from trainer.checkpoint import CheckpointError
    from trainer.config import ConfigError
    from trainer.remote import fetch_shards, is_url
    from trainer.run import open_run

    if options.command == "run" and (options.gpus or options.ship_code or options.insecure_local) and \
            not options.address:
        raise ConfigError("--gpus, --ship-code and --insecure-local need --address; on this machine use --ranks N "
                          "--device cuda")
    if options.command == "run" and options.address and not (options.gpus or options.ranks):
        raise ConfigError("--address needs --gpus N (one rank on each of N GPUs) or --ranks N (CPU)")
    if options.command == "run" and options.gpus and options.ranks:
        raise ConfigError("give --gpus N (one rank a GPU) or --ranks N (CPU), not both")
    if options.command == "run" and not options.out and (is_url(options.run) or is_url(options.store)):
        raise ConfigError(f"{options.run}: a run in object storage has no place for checkpoints; give one with --out, "
                          f"a folder that all ranks see")
    run = open_run(options.run, options.store, options.out, options.overrides)
    if options.command == "plan":
        from trainer.plan import plan

        print(plan(run, options.ranks))
        return 0
    if options.address:
        return on_cluster(options)
    if options.ranks and options.ranks > 1 and "RANK" not in os.environ:
        from trainer.launch.local import launch as launch_local

        return launch_local(arguments, options.ranks)

    from trainer.parallel import world
    from trainer.run import TrainingError
    from trainer.train import train

    if run.source:                        # before the ranks meet: nobody waits for a download in a collective
        fetch_shards(run.source, run.curriculum, (lambda _text: None) if options.quiet else say)
    try:
        with world(options.device) as here:
            train(run, here, options.stop_at, say=(lambda _text: None) if options.quiet else say)
    except (TrainingError, CheckpointError, ShardError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def on_cluster(options: argparse.Namespace) -> int:
    """Train on the Ray cluster at --address, which has to want a token and to take ours."""
    try:
        from pipeline.engine.auth import ClusterError, check_cluster

        address = check_cluster(options.address, options.insecure_local)       # before Ray is imported
        from trainer.launch.ray import launch
    except ModuleNotFoundError as error:
        print(f"error: --address needs the package '{error.name}', which is not installed; pip install "
              f"'tokenmill[pipeline]', or start `torchrun -m trainer run` on the nodes themselves", file=sys.stderr)
        return 1
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return launch(forwarded(options), address, options.gpus or options.ranks, gpu=bool(options.gpus),
                  ship_code=options.ship_code)


def say(text: str) -> None:
    print(text, flush=True)


def forwarded(options: argparse.Namespace) -> list[str]:
    """The command line of one rank on a cluster: without what chose the cluster, paths absolute (shared storage)."""
    from trainer.remote import is_url

    out = ["run", os.path.abspath(options.run) if os.path.isdir(options.run) else options.run,
           "--device", "cuda" if options.gpus else options.device]
    for flag, value in (("--store", options.store), ("--out", options.out)):
        if value:
            out += [flag, value if is_url(value) else os.path.abspath(value)]
    for assignment in options.overrides:
        out += ["--set", assignment]
    if options.stop_at:
        out += ["--stop-at", str(options.stop_at)]
    return out + (["--quiet"] if options.quiet else [])


if __name__ == "__main__":
    sys.exit(main())
