"""Trains on a Ray cluster: one actor per rank, each running the same `main()`. This is the trainer's only file that
imports ray. It uses plain Ray Core; docs/architecture.md says why it does not use Ray Train's TorchTrainer.

Checkpoints can be loaded by any number of ranks. So the loss of a rank or of a node (machine) costs only the steps
since the latest checkpoint. The remaining ranks are ended, and as many ranks as the cluster has room for (at least
`least`) start again. Resources for the missing ranks stay requested. Once they are available, all ranks stop after a
step, with a checkpoint, and the training continues with all ranks.

Ray drains a node that is about to be taken away (a deleted pod, a spot machine). All ranks then stop in the same way,
and the training continues on other nodes.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from pipeline.base.clock import SYSTEM, Clock
from trainer.base.arguments import say
from trainer.base.config import ConfigError

#: seconds to wait for nodes (an autoscaler may have to start them)
PLACEMENT_S = 600
#: seconds to wait for room for all ranks, if the cluster is large enough, before starting with fewer
PATIENCE_S = 60
#: seconds that the other ranks have to write their share of a checkpoint once the first has ended
ENDING_S = 600
PACKAGES = ("pipeline", "stages", "tokenizer", "trainer")


class Both(io.TextIOBase):
    """A text stream that forwards everything to another stream at once, and also keeps the last 4,000 characters in
    `end`."""

    def __init__(self, other: Any) -> None:
        self.other, self.end = other, ""

    def write(self, text: str) -> int:
        self.end = (self.end + text)[-4000:]
        return self.other.write(text)

    def flush(self) -> None:
        self.other.flush()


class Rank:
    """The Ray actor that runs one rank of a training. It has two threads, so that `stop`, which asks the training to
    end, can be called while `run`, which trains, is at work."""

    def place(self) -> tuple[str, list[str]]:
        """Return (id of the node on which this rank's actor runs, the ids of the GPUs that it may use there)."""
        return ray.get_runtime_context().get_node_id(), [str(g) for g in ray.get_gpu_ids()]

    def address(self) -> tuple[str, int]:
        """Open the TCPStore through which all ranks of the training connect, and return its (host, port). Called only
        on the actor that becomes rank 0."""
        import torch.distributed as dist

        host = ray.util.get_node_ip_address()
        self.store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return host, self.store.port

    def run(self, arguments: list[str], environment: dict[str, str]) -> tuple[int, str]:
        """Run the trainer's command line with `arguments` in this actor. `environment` has further environment
        variables. Returns (exit code, last 4,000 characters of stderr). The end of stderr is returned because Ray
        forwards the output of an actor late or not at all."""
        os.environ.update(environment)
        from trainer.__main__ import main

        stderr = Both(sys.stderr)
        with contextlib.redirect_stderr(stderr):
            code = main(arguments)
        return code, stderr.end

    def stop(self) -> None:
        from trainer.base.interrupts import request_stop

        request_stop(signal.SIGINT)


class RankLost(Exception):
    """Raised when a rank of the training on the cluster has died, or has raised an unexpected error."""


class Pause(Exception):
    """Raised when all ranks have stopped in an orderly way, with a checkpoint, in order to start again on other nodes
    or in larger number."""


def launch(arguments: Sequence[str], address: str, size: int, *, gpu: bool, ship_code: bool, least: int, restarts: int,
           possible: Callable[[int], bool], progress: Callable[[], int]) -> int:
    """Run `python -m trainer ARGUMENTS` in `size` actors of the Ray cluster at `address` ('host:port', as from
    `pipeline.cluster.connect.check_cluster`). Each actor has a GPU of its own or, if `gpu` is False, a CPU. The folder
    of the run must be on storage that every node sees. With `ship_code`, the nodes get this machine's code.

    After a rank is lost, the training is started again from the latest checkpoint. `progress()` returns the step of
    that checkpoint; the training ends when it has not advanced in `restarts` restarts in a row. A start needs at least
    `least` ranks, and a number of ranks that `possible` accepts (for example whole nodes, for a model that is divided
    within a node). Ctrl-C and SIGTERM stop the training with a checkpoint.

    Returns 0 if all ranks do. Otherwise returns the first other exit code of a rank, 1 when ranks were lost too often,
    or 130 after Ctrl-C. Raises ConfigError when the cluster cannot be reached, or does not have the resources within
    PLACEMENT_S seconds.
    """
    roots = [str(Path(__file__).resolve().parents[2] / name) for name in PACKAGES]
    environment = {"py_modules": roots} if ship_code else {}
    try:
        ray.init(address=address, runtime_env=environment, logging_level=logging.ERROR, log_to_driver=True)
    except ConnectionError as error:
        raise ConfigError(f"--address {address}: no Ray cluster answers there ({error}); start one, or leave out "
                          f"--address to train on this machine") from None
    except RuntimeError as error:                # the cluster runs another version of Ray or Python
        raise ConfigError(f"--address {address}: {error}") from None
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # replaces Ray's handler; stopping a Ray job sends it
    failed, reached = 0, progress()
    try:
        while True:
            try:
                return attempt(list(arguments), size, least, gpu, possible)
            except Pause:
                continue
            except RankLost as error:
                now = progress()
                failed, reached = 1 if now > reached else failed + 1, max(now, reached)
                if failed > restarts:
                    say(f"error: {error}. Run the same command to go on from the latest checkpoint (step {now}), "
                        f"with any number of ranks", sys.stderr)
                    return 1
                say(f"{error}; going on from the latest checkpoint (step {now})", sys.stderr)
    except KeyboardInterrupt:
        say("stopped; the same command goes on from the latest checkpoint", sys.stderr)
        return 128 + signal.SIGINT
    finally:
        ray.shutdown()


def attempt(arguments: list[str], size: int, least: int, gpu: bool, possible: Callable[[int], bool]) -> int:
    """Start a rank in each of several actors on the cluster, and wait until all of them end. Returns an exit code.
    Raises RankLost when a rank dies, and Pause when the ranks have stopped in order to continue on other nodes or in
    larger number. Raises ConfigError when the cluster does not have the resources for the ranks."""
    bundle = {"CPU": 1, **({"GPU": 1} if gpu else {})}
    group, started = room(bundle, size, least, possible)
    groups = [group]
    try:
        if started < size:
            say(f"training on {started} of {size} ranks: there is no room for more", sys.stderr)
            groups.append(placement_group([bundle] * (size - started), strategy="PACK"))       # an autoscaler sees it
        actor = ray.remote(Rank)
        try:
            members: list[Any] = [actor.options(
                num_cpus=1, num_gpus=int(gpu), max_restarts=0, max_task_retries=0, max_concurrency=2,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i)).remote()
                for i in range(started)]
            # with a timeout: if a node vanishes now, its ranks wait for other places, which may never exist
            places = ray.get([member.place.remote() for member in members], timeout=PLACEMENT_S)
            # ranks of one node get consecutive numbers and see all its GPUs, so that NCCL copies between them directly
            members = [m for _, m in sorted(zip(places, members), key=lambda pair: pair[0])]
            places.sort()
            host, port = ray.get(members[0].address.remote(), timeout=PLACEMENT_S)
        except ray.exceptions.RayError as error:
            raise RankLost(f"a rank could not start: {type(error).__name__}: {error}") from None
        nodes = [node for node, _ in places]
        meeting = {"MASTER_ADDR": host, "MASTER_PORT": str(port), "WORLD_SIZE": str(started),
                   "TORCHELASTIC_USE_AGENT_STORE": "True"}
        waiting = []
        for rank, (node, _) in enumerate(places):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank - nodes.index(node)),
                   "LOCAL_WORLD_SIZE": str(nodes.count(node))}
            if gpu:
                own["CUDA_VISIBLE_DEVICES"] = ",".join(g for at, gpus in places if at == node for g in gpus)
            waiting.append(members[rank].run.remote(arguments, {**meeting, **own}))
        return finish(members, waiting, groups[1:], set(nodes))
    finally:
        for reserved in groups:
            remove_placement_group(reserved)         # this also ends the actors


def room(bundle: dict[str, int], size: int, least: int, possible: Callable[[int], bool],
         clock: Clock = SYSTEM) -> tuple[Any, int]:
    """Reserve resources of the cluster for `size` ranks, or for fewer. `bundle` is what one rank needs. Returns
    (placement group, number of ranks for which it has resources).

    If the present nodes could never hold `size` ranks, resources for fewer ranks (at least `least`) are reserved at
    once. If the nodes could hold them, but are busy with other jobs, fewer ranks are accepted only after PATIENCE_S
    seconds. Only numbers of ranks that `possible` accepts are used. Every half minute a message says which resources
    are free. Raises ConfigError after PLACEMENT_S seconds.
    """
    def reserve(ranks: int) -> Any:
        return placement_group([bundle] * ranks, strategy="PACK")

    since = last_message = clock.now()
    group = reserve(size)
    while not group.wait(2):
        now, free = clock.now(), ray.available_resources()
        lacking = any(ray.cluster_resources().get(kind, 0) < n * size for kind, n in bundle.items())
        fits = min(int(free.get(kind, 0) / n) for kind, n in bundle.items())
        fits = next((n for n in range(min(fits, size - 1), least - 1, -1) if possible(n)), 0)
        if fits and (lacking or now - since > PATIENCE_S):
            remove_placement_group(group)
            group = reserve(fits)
            if group.wait(10):
                return group, fits
            remove_placement_group(group)
            group = reserve(size)
        free_now = " and ".join(f"{free.get(kind, 0):g} {kind}s" for kind in bundle)
        if now - since > PLACEMENT_S:
            remove_placement_group(group)
            raise ConfigError(f"no room for {least} ranks after {PLACEMENT_S} s: {free_now} are free; ask for fewer "
                              f"with {'--gpus' if 'GPU' in bundle else '--ranks'}, or add nodes")
        if now - last_message > 30:
            last_message = now
            say(f"waiting for room for {size} ranks ({free_now} are free)", sys.stderr)
    return group, size


def finish(members: Sequence[Any], waiting: list[Any], missing: Sequence[Any],
           nodes: AbstractSet[str] = frozenset()) -> int:
    """Wait until all ranks end. Returns 0, or the first exit code of a rank that is not 0. `members` are the actors of
    the ranks, and `waiting` are the futures of their runs. Raises RankLost when a rank dies. If a rank fails or dies,
    the other ranks are not waited for, because they hang in a collective.

    All ranks are asked to stop, and Pause is raised, in two cases: one of `nodes` (ids of nodes) is about to be taken
    away, or the cluster has room again for ranks that could not start. `missing` are the placement groups that wait for
    that room. Ctrl-C asks all ranks to stop, too; a second Ctrl-C raises KeyboardInterrupt at once.
    """
    stop_requested, reason = False, ""
    while waiting:
        ended: list[Any] = []
        try:
            ended, waiting = ray.wait(waiting, timeout=1)
            if not reason:
                if missing and all(group.wait(0) for group in missing):
                    reason = "there is room for all ranks again"
                elif nodes & draining():
                    reason = "a node is about to go"
                if reason:
                    say(f"{reason}: stopping after this step, with a checkpoint", sys.stderr)
            if stop_requested or reason:  # every second, because a rank that had not begun may have missed the request
                for member in members:
                    member.stop.remote()
        except KeyboardInterrupt:
            if stop_requested:
                raise
            stop_requested = True
            say("stopping after this step, with a checkpoint (Ctrl-C again: at once)", sys.stderr)
        for result in ended:
            try:
                code, stderr = ray.get(result)
            except ray.exceptions.RayError as error:
                if stop_requested:                        # a requested end must not lead to a restart
                    raise KeyboardInterrupt from None
                raise RankLost(f"a rank died: {type(error).__name__}: {last_line(error)}") from None
            if 0 < code < 128:  # an error, even in a requested stop: that rank's checkpoint may have failed
                say(stderr.rstrip(), sys.stderr)
                return code
            if code:                             # an orderly stop: wait for the other ranks to end, too
                ray.wait(waiting, num_returns=len(waiting), timeout=ENDING_S)
                if reason and not stop_requested:
                    raise Pause
                return code
    return 0


def draining() -> set[str]:
    """Return the ids of the nodes that are about to be taken away (that Ray is draining). The call is not in Ray's
    public interface. If this version of Ray lacks the call, the result is empty."""
    try:
        return set(ray._private.state.state.get_draining_nodes())
    except Exception:                            # then the loss of a node is handled only when it happens
        return set()


def last_line(error: BaseException) -> str:
    """Return the last line of a remote error, whose text is a whole traceback."""
    return (str(error).strip().splitlines() or [""])[-1]
