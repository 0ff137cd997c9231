"""Starts a Ray cluster of several nodes on this machine, in a process of its own, so that the test survives whatever
happens to the cluster.

`python -m tests.chaos.cluster` is that process. It reads one command per line from stdin (JSON: the arguments of a node
to add), and answers with the pids of the started processes. All of them end when it ends, because Ray starts its
processes with a parent-death signal.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.processes import alive, children_of, kill_tree, marked, named, signal_all, stopped

ROOT = Path(__file__).resolve().parents[2]
#: a dead node or GCS is noticed after seconds, not after a minute
FAST = {"RAY_health_check_initial_delay_ms": "1000", "RAY_health_check_period_ms": "500",
        "RAY_health_check_timeout_ms": "2000", "RAY_health_check_failure_threshold": "8",
        "RAY_gcs_rpc_server_reconnect_timeout_s": "5"}
NODE = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}


@dataclass
class Node:
    """A node of the cluster: the processes below its raylet (Ray's process on each node), whose pid is `raylet`."""

    raylet: int

    @property
    def supervisors(self) -> list[int]:
        return [p for p in children_of(self.raylet) if named(p, "ray::SupervisorActor")]

    @property
    def children(self) -> list[int]:
        """The pids of the children, the processes that run tasks, of all supervisors on the node."""
        return [c for s in self.supervisors for c in children_of(s) if named(c, "pipeline.engine.worker.child")]

    @property
    def processes(self) -> list[int]:
        """The pids of all processes that stand for this machine."""
        return [self.raylet, *children_of(self.raylet), *self.children]

    def kill(self) -> None:
        """Kill all processes of the node at once, as when a machine loses power."""
        for pid in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def send(self, signum: int) -> None:
        for pid in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)


class Cluster:
    """A Ray cluster: a head without CPUs, and `nodes` nodes with one CPU each."""

    def __init__(self, env: dict[str, str], nodes: int = 2) -> None:
        for left in (2, 1, 0):                           # Ray itself gives up after 30 s, which a busy machine may take
            self._process = subprocess.Popen([sys.executable, "-m", "tests.chaos.cluster"], cwd=ROOT,
                                             env={**env, **FAST}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                             text=True, start_new_session=True)
            try:
                said = self._answer()
                break
            except AssertionError:
                self.close()
                signal_all(marked(env["CHAOS"]), signal.SIGKILL)
                if not left:
                    raise
        self.address, self.gcs, self.head = said["address"], said["gcs"], Node(said["raylet"])
        self.nodes: list[Node] = []
        for _ in range(nodes):
            self.add()

    def _answer(self) -> dict[str, Any]:
        for line in self._process.stdout:
            if line.startswith('{"raylet"'):
                return json.loads(line)
        raise AssertionError(f"the cluster did not come up (exit {self._process.wait()})")

    def add(self, **node: Any) -> Node:
        """Add a node with the given arguments, and return it."""
        self._process.stdin.write(json.dumps(node) + "\n")
        self._process.stdin.flush()
        self.nodes.append(Node(self._answer()["raylet"]))
        return self.nodes[-1]

    @property
    def whole(self) -> bool:
        """Whether the head of the cluster is alive."""
        return alive(self.gcs) and alive(self.head.raylet)

    def resize(self, nodes: int) -> None:
        """Kill or add nodes until the cluster has exactly `nodes` of them, all running. Dead and stopped nodes are
        replaced."""
        for node in self.nodes:
            if not alive(node.raylet) or stopped(node.raylet):
                node.kill()
        self.nodes = [n for n in self.nodes if alive(n.raylet) and not stopped(n.raylet)]
        while len(self.nodes) > nodes:
            self.nodes.pop().kill()
        while len(self.nodes) < nodes:
            self.add()

    def kill_gcs(self) -> None:
        os.kill(self.gcs, signal.SIGKILL)

    def kill_head(self) -> None:
        """Kill all processes of the head at once, also Ray's control process (GCS), as when its machine loses power."""
        self.kill_gcs()
        self.head.kill()

    @property
    def children(self) -> list[int]:
        return [c for n in self.nodes for c in n.children]

    @property
    def supervisors(self) -> list[int]:
        return [s for n in self.nodes for s in n.supervisors]

    def close(self) -> None:
        kill_tree(self._process.pid)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()


def main() -> None:
    from ray.cluster_utils import Cluster as Ray

    # without the log monitor and the autoscaler's monitor: two processes that no test uses
    ray = Ray(initialize_head=True, head_node_args={**NODE, "num_cpus": 0, "no_monitor": True,
                                                    "include_log_monitor": False})
    out = sys.stdout

    def say(node: Any, **more: Any) -> None:
        out.write(json.dumps({"raylet": node.all_processes["raylet"][0].process.pid, **more}) + "\n")
        out.flush()

    say(ray.head_node, address=ray.address, gcs=ray.head_node.all_processes["gcs_server"][0].process.pid)
    for line in sys.stdin:
        say(ray.add_node(**{**NODE, **json.loads(line)}))
    os._exit(0)


if __name__ == "__main__":
    main()
