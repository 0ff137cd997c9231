"""`tokenmill train slurm`: writes a job script for Slurm, with one torchrun per node and one rank per GPU; no Ray.

The file `deploy/slurm/train.sbatch` is the output of `script()` without arguments: a job script that takes the run as
its first argument. A test checks that the file is up to date.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

from trainer.base.arguments import of_a_run, positive, say

#: Slurm sends a warning some seconds before the end of the job; torchrun gets MARGIN seconds less to end its ranks
MARGIN = 20
TEMPLATE = r"""#!/usr/bin/env bash
# Training on Slurm: one torchrun on each node, one rank on each of its GPUs. No Ray.
#
#   @usage@
#
# The run's folder and its shards must be on storage that every node sees. Training continues from the latest
# checkpoint, on any number of ranks; to resume it, submit the same command again. @warning@ s before the time limit
# (set by `tokenmill train slurm --warning`) the job finishes its step, writes a checkpoint and puts itself back into
# the queue. When a rank dies, all ranks start again from the latest checkpoint, at most three times.
#
#SBATCH --job-name=tokenmill-train
#SBATCH --nodes=@nodes@
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=@gpus@
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=@time@
@partition@#SBATCH --requeue
#SBATCH --signal=B:USR1@@warning@
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -euo pipefail

fail() {
    echo "train.sbatch: $*" >&2
    exit 1
}

[ -n "${SLURM_JOB_ID:-}" ] || fail "this is a job script: sbatch --nodes=N --gpus-per-node=8 $0"
@arguments@command -v torchrun > /dev/null || fail "torchrun is not on the PATH: activate the environment before sbatch"

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
# without GPUs (a test of the script): one rank a node, on its CPUs
ranks="${SLURM_GPUS_ON_NODE:-1}"
port=$((11000 + SLURM_JOB_ID % 160 * 128 + 100))
threads=$((${SLURM_CPUS_ON_NODE:-1} / ranks))
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}"
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-${SLURM_CPUS_ON_NODE:-1}}"
address=$(srun --nodes=1 --ntasks=1 --nodelist="${nodes[0]}" --overlap hostname --ip-address | tr ' ' '\n' \
    | grep -m1 -E '^[0-9.]+$') || fail "${nodes[0]} has no IPv4 address"

# when it is asked to stop, torchrun gives its ranks this long to write their checkpoint (its default is 30 s)
srun --nodes="${#nodes[@]}" --ntasks="${#nodes[@]}" --ntasks-per-node=1 --kill-on-bad-exit=1 \
    torchrun --nnodes="${#nodes[@]}" --nproc-per-node="$ranks" --max-restarts=3 --shutdown-timeout=@shutdown@ \
    --rdzv-backend=c10d --rdzv-endpoint="$address:$port" --rdzv-id="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" \
    -m trainer run "$@" &
step=$!
again=0
# scancel sends the signal to the ranks and not to this script; srun itself would turn a SIGTERM into a SIGKILL
# shellcheck disable=SC2329  # called by the traps
stop() { scancel --signal=TERM "$SLURM_JOB_ID" || true; }
trap 'again=1; stop' USR1
trap 'again=0; stop' TERM
result=0
wait "$step" || result=$?
while kill -0 "$step" 2> /dev/null; do        # a signal has ended `wait`, but the step still runs
    result=0
    wait "$step" || result=$?
done
if [ $again -eq 1 ] && [ $result -ne 0 ]; then
    echo "out of time: back into the queue, to go on from the latest checkpoint"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $result
"""
#: line of a script that was written without a run: the run is its first argument
GIVEN = """[ $# -ge 1 ] || fail "which run? sbatch … $0 STORE/runs/RUN"
"""
USAGE = "sbatch --nodes=4 --gpus-per-node=8 deploy/slurm/train.sbatch /shared/store/runs/RUN [options of train run]"


def add_parser(commands: Any) -> None:
    slurm = commands.add_parser("slurm", parents=[of_a_run()],
                                description="Write a job script for Slurm that trains, stops in good order before its "
                                            "time is over, and puts itself back into the queue.")
    slurm.add_argument("--nodes", type=positive, default=1, metavar="N")
    slurm.add_argument("--gpus-per-node", type=positive, default=8, metavar="N")
    slurm.add_argument("--partition", metavar="NAME")
    slurm.add_argument("--time", default="24:00:00", metavar="LIMIT", help="as Slurm writes it: 24:00:00, 2-00:00:00")
    slurm.add_argument("--warning", type=positive, default=120, metavar="SECONDS",
                       help="time from Slurm's signal to the end of the job: long enough for a step and a checkpoint "
                            "(default: 120)")
    slurm.add_argument("--script", metavar="FILE", help="the file to write (default: RUN/train.sbatch)")


def run(options: argparse.Namespace) -> int:
    from trainer.base.config import ConfigError
    from trainer.data.remote import is_url
    from trainer.loop.run import open_run

    if options.partition and not re.fullmatch(r"[\w.,@-]+", options.partition):
        raise ConfigError(f"--partition {options.partition}: not the name of a partition")
    if not re.fullmatch(r"(\d+-)?\d+(:\d\d){0,2}", options.time):
        raise ConfigError(f"--time {options.time}: write it as Slurm does, e.g. 24:00:00 or 2-00:00:00")
    if options.warning <= MARGIN:
        raise ConfigError(f"--warning {options.warning}: leave more than {MARGIN} seconds for a checkpoint")
    if not options.out and (is_url(options.run) or is_url(options.store)):
        raise ConfigError("a run in object storage has no place for checkpoints; give one with --out, a folder that "
                          "all nodes see")
    training = open_run(options.run, options.store, options.out, options.overrides)  # raises errors now, not in the job
    size = options.nodes * options.gpus_per_node
    idle = training.unshared(size)
    arguments = [options.run if is_url(options.run) or not Path(options.run).is_dir() else os.path.abspath(options.run)]
    for flag, value in (("--store", options.store), ("--out", options.out)):
        if value:
            arguments += [flag, value if is_url(value) else os.path.abspath(value)]
    for assignment in options.overrides:
        arguments += ["--set", assignment]
    folder = training.out if training.source else training.folder
    path = Path(options.script or folder / "train.sbatch").absolute()
    text = script(options.nodes, options.gpus_per_node, options.time, options.warning, options.partition, arguments,
                  f"sbatch {shlex.quote(str(path))}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; name another place with --script") from None
    say(f"{path}: {options.nodes} node{'s' * (options.nodes > 1)} of {options.gpus_per_node} GPUs = {size} ranks")
    for line in idle:
        say(line)
    say(f"sbatch {shlex.quote(str(path))}")
    return 0


def script(nodes: int = 1, gpus: int = 8, time: str = "24:00:00", warning: int = 120, partition: str | None = None,
           arguments: list[str] | None = None, usage: str = USAGE) -> str:
    """Return the text of a job script for Slurm that runs a training. `arguments` are those of `tokenmill train run`.
    If they are None, the arguments have to be given when the script is submitted: `sbatch SCRIPT ARGUMENTS`."""
    set_arguments = "" if arguments is None else (
        f'PATH="$PATH":{shlex.quote(str(Path(sys.executable).parent))}   # where it was written, if nothing is active\n'
        f'set -- {shlex.join(arguments)} "$@"\n')
    values = {"usage": usage, "nodes": nodes, "gpus": gpus, "time": time, "warning": warning,
              "shutdown": warning - MARGIN, "partition": f"#SBATCH --partition={partition}\n" if partition else "",
              "arguments": GIVEN if arguments is None else set_arguments}
    return re.sub(r"@(" + "|".join(values) + r")@", lambda match: str(values[match[1]]), TEMPLATE)
