"""`tokenmill train run`: trains on this machine in one or several processes, as one rank that torchrun or Slurm has
started, or on a Ray cluster."""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from trainer.base.arguments import of_a_run, positive, say

if TYPE_CHECKING:
    from trainer.loop.run import Run


def add_parser(commands: Any) -> None:
    run = commands.add_parser("run", parents=[of_a_run()],
                              description="Train, from the latest checkpoint if there is one.")
    run.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    run.add_argument("--ranks", type=positive, metavar="N",
                     help="N processes: on this machine, or with --address on Ray")
    run.add_argument("--stop-at", type=positive, metavar="STEP", help="stop, with a checkpoint, after STEP steps")
    run.add_argument("--address", help="a Ray cluster to train on (host:port, or auto on one of its machines)")
    run.add_argument("--gpus", type=positive, metavar="N", help="with --address: one rank on each of N GPUs")
    run.add_argument("--least", type=positive, metavar="M",
                     help="with --address: go on with M ranks or more when a node is lost, until there are N again "
                          "(default: wait for N)")
    run.add_argument("--restarts", type=lambda text: positive(text, 0), default=3, metavar="K",
                     help="with --address: start again at most K times in a row without a new checkpoint (default: 3)")
    run.add_argument("--ship-code", action="store_true", help="with --address: send this machine's code to the nodes")
    run.add_argument("--insecure-local", action="store_true", help="with --address: accept a cluster without token "
                                                                   "authentication on this machine's loopback")
    run.add_argument("--quiet", action="store_true", help="print nothing but errors")
    run.add_argument("--json", action="store_true", help="print the summary as one JSON object, and nothing else "
                                                         "(without --address)")


def run(options: argparse.Namespace) -> int:
    from trainer.loop.threads import CoreWatch, settle, threads

    watch = CoreWatch()                       # measures the load of the cores while torch is imported
    from trainer.base.config import ConfigError
    from trainer.data.remote import fetch_shards, is_url
    from trainer.loop.run import open_run
    from trainer.loop.task_watcher import check_tasks
    from trainer.parallel.world import check_device

    if (options.gpus or options.least or options.ship_code or options.insecure_local) and not options.address:
        raise ConfigError("--gpus, --least, --ship-code and --insecure-local need --address; on this machine use "
                          "--ranks N --device cuda")
    if options.address and not (options.gpus or options.ranks):
        raise ConfigError("--address needs --gpus N (one rank on each of N GPUs) or --ranks N (CPU)")
    if options.gpus and options.ranks:
        raise ConfigError("give --gpus N (one rank a GPU) or --ranks N (CPU), not both")
    if not options.out and (is_url(options.run) or is_url(options.store)):
        raise ConfigError("a run in object storage has no place for checkpoints; give one with --out, a folder that "
                          "all ranks see")
    if not options.address:
        check_device(options.device)
    training = open_run(options.run, options.store, options.out, options.overrides)
    if options.least and options.least > (options.gpus or options.ranks):
        raise ConfigError(f"--least {options.least} is more than the {options.gpus or options.ranks} ranks asked for")
    if options.address:
        return on_cluster(options, training)
    first = os.environ.get("RANK", "0") == "0"
    if first and not training.source:
        check_tasks(training)
    if options.ranks and options.ranks > 1 and "RANK" not in os.environ:
        from trainer.launch.local import launch as launch_local

        return launch_local(options.arguments, options.ranks, options.device,
                            lambda device: threads(training, options.ranks, watch.free(), device))

    import torch

    from trainer.base.files import alone
    from trainer.loop.train import train
    from trainer.parallel.world import world

    announce = (lambda _text: None) if options.quiet or options.json else say
    if training.source:                   # before the ranks connect: no rank may wait in a collective for a download
        fetch_shards(training.source, training.curriculum, announce, training.config.fetch)
        if first:
            check_tasks(training)         # needs the tokenizer, which was fetched, too
    settle(training, watch, options.device)
    with world(options.device) as here:
        if here.size == 1 and here.device.type == "cuda" and (gpus := torch.cuda.device_count()) > 1:
            announce(f"one of {gpus} GPUs is used; --ranks {gpus} uses all of them")
        with alone(training.out) if here.first else nullcontext():
            summary = train(training, here, options.stop_at, say=announce)
    if options.json and here.first:
        say(json.dumps(summary, ensure_ascii=False))
    return 0


def on_cluster(options: argparse.Namespace, training: Run) -> int:
    """Train on the Ray cluster at the address `options.address` (option --address), and return an exit code. The
    cluster must require a token and accept the token of this machine. With --insecure-local, a cluster without
    authentication is permitted if its address is a loopback address."""
    from trainer.base.config import ConfigError
    from trainer.checkpoint.checkpoints import latest

    try:
        from pipeline.base.auth import ClusterError
        from pipeline.cluster.connect import check_cluster

        address = check_cluster(options.address, options.insecure_local)       # before Ray is imported
        from trainer.launch.ray import launch
    except ModuleNotFoundError as error:
        print(f"error: --address needs the package '{error.name}', which is not installed; pip install "
              f"'tokenmill[pipeline]', or start `torchrun -m trainer run` on the nodes themselves", file=sys.stderr)
        return 1
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1

    def progress() -> int:
        checkpoint = latest(training.out / "checkpoints")
        return checkpoint.step if checkpoint else 0

    def possible(ranks: int) -> bool:
        try:
            return bool(training.config.parallel.shape(ranks))
        except ConfigError:
            return False

    size = options.gpus or options.ranks
    training.config.parallel.shape(size)          # raises its error here instead of on the nodes
    return launch(forwarded(options), address, size, gpu=bool(options.gpus), ship_code=options.ship_code,
                  least=options.least or size, restarts=options.restarts, possible=possible,
                  progress=progress)


def forwarded(options: argparse.Namespace) -> list[str]:
    """Return the arguments of `python -m trainer` for one rank on a cluster: the given options without those that
    choose the cluster. Paths, which must be on shared storage, are made absolute."""
    from trainer.data.remote import is_url

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
