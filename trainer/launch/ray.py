"""Training on a Ray cluster: a placement group, an actor a rank, and the same `main()` in each. The only file of the
trainer that imports ray; plain Ray Core (no Ray Train): position and checkpoints are the trainer's own, so a restart is
the same command again, with any number of ranks.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from trainer.config import ConfigError

#: how long to wait for nodes (an autoscaler may have to start them)
PLACEMENT_S = 600
PACKAGES = ("pipeline", "stages", "tokenizer", "trainer")


class Both(io.StringIO):
    """Text that is kept, and passed on to another stream at once."""

    def __init__(self, other: Any) -> None:
        super().__init__()
        self.other = other

    def write(self, text: str) -> int:
        self.other.write(text)
        return super().write(text)


class Rank:
    """One rank. Two threads: `run` trains, `stop` asks it to end."""

    def address(self) -> tuple[str, int]:
        """Rank 0: open the store the others will meet at; (host, port)."""
        import torch.distributed as dist

        host = ray.util.get_node_ip_address()
        self.store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return host, self.store.port

    def run(self, arguments: list[str], environment: dict[str, str]) -> tuple[int, str]:
        """(exit code, what was said on stderr): Ray forwards what a worker prints late, or not at all."""
        os.environ.update(environment)
        from trainer.__main__ import main

        said = Both(sys.stderr)
        with contextlib.redirect_stderr(said):
            code = main(arguments)
        return code, said.getvalue()[-4000:]

    def stop(self) -> None:
        from trainer.signals import request_stop

        request_stop(signal.SIGINT)


def launch(arguments: Sequence[str], address: str, size: int, *, gpu: bool, ship_code: bool) -> int:
    """Run `python -m trainer ARGUMENTS` as `size` actors, each with a GPU of its own or (`gpu` False) a CPU, of the
    cluster at `address` ('host:port', as `pipeline.engine.auth.check_cluster` gives it); returns the first exit code
    that is not 0, or 0. RUN must be on storage that every node sees.

    Raises ConfigError when the cluster cannot be reached or never has the resources.
    """
    roots = [str(Path(__file__).resolve().parents[2] / name) for name in PACKAGES]
    environment = {"py_modules": roots} if ship_code else {}
    try:
        ray.init(address=address, runtime_env=environment, logging_level="ERROR", log_to_driver=True)
    except ConnectionError as error:
        raise ConfigError(f"--address {address}: no Ray cluster answers there ({error}); start one, or leave out "
                          f"--address to train on this machine") from None
    group = placement_group([{"CPU": 1, **({"GPU": 1} if gpu else {})}] * size, strategy="PACK")
    try:
        wait_for(group, size, gpu)
        actor = ray.remote(num_cpus=1, num_gpus=int(gpu), max_restarts=0, max_task_retries=0,
                           max_concurrency=2)(Rank)
        places = [PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i) for i in range(size)]
        members = [actor.options(scheduling_strategy=place).remote() for place in places]
        host, port = ray.get(members[0].address.remote())
        meeting = {"MASTER_ADDR": host, "MASTER_PORT": str(port), "WORLD_SIZE": str(size),
                   "TORCHELASTIC_USE_AGENT_STORE": "True",
                   "LOCAL_RANK": "0"}           # Ray shows each actor its own GPU only
        return finish(members, [member.run.remote(list(arguments), {**meeting, "RANK": str(rank)})
                                for rank, member in enumerate(members)])
    finally:
        remove_placement_group(group)            # ends the actors, too
        ray.shutdown()


def wait_for(group: Any, size: int, gpu: bool) -> None:
    """Wait until the cluster has room for all ranks at once; says every half minute what is missing."""
    since = time.monotonic()
    while not group.wait(30):
        free = ray.available_resources()
        have = f"{free.get('CPU', 0):g} CPUs" + (f" and {free.get('GPU', 0):g} GPUs" if gpu else "")
        if time.monotonic() - since > PLACEMENT_S:
            raise ConfigError(f"no room for {size} ranks after {PLACEMENT_S} s: {have} are free; ask for fewer with "
                              f"{'--gpus' if gpu else '--ranks'}, or add nodes")
        print(f"waiting for room for {size} ranks ({have} are free)", file=sys.stderr)


def finish(members: Sequence[Any], waiting: list[Any]) -> int:
    """Wait for all ranks. When one fails or dies, the rest is not waited for: it would wait for the dead one."""
    asked = False
    while waiting:
        try:
            done, waiting = ray.wait(waiting, timeout=1)
        except KeyboardInterrupt:
            if asked:
                raise
            asked = True
            print("stopping after this step, with a checkpoint (Ctrl-C again: at once)", file=sys.stderr)
            for member in members:
                member.stop.remote()
            continue
        for result in done:
            try:
                code, said = ray.get(result)
            except ray.exceptions.RayError as error:
                print(f"error: a rank died: {type(error).__name__}: {error}. Run the same command to go on from the "
                      f"latest checkpoint, with any number of ranks", file=sys.stderr)
                return 1
            if code and not asked:
                print(said, end="", file=sys.stderr)
                return code
            if code:                             # an orderly stop: let the others end, too
                ray.wait(waiting, num_returns=len(waiting), timeout=60)
                return code
    return 0
