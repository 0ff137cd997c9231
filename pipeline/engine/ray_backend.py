"""The Ray backend: one supervisor actor per node and at most 16 CPUs, embedded or attached. The only Ray in the engine.

Ray places processes and carries records of about 1 KB; text never travels through it. Its own restarts and retries are
off: the scheduler repeats what a dead node took with it. A supervisor is sync, so its poll runs on the main thread of
its worker process, which is what its children's parent-death signal is tied to; exactly one poll is in flight for each.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.metrics import Counter, Gauge
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pipeline.engine.fingerprint import declared_libraries, differences, fingerprint, roots
from pipeline.engine.limits import Limits
from pipeline.engine.metrics import samples
from pipeline.engine.pools import OWN_MB
from pipeline.engine.scratch import Scratch
from pipeline.engine.supervisor import Supervisor
from pipeline.engine.task import Kind
from pipeline.store.fs import Store

CPUS_AN_ACTOR = 16
POLL_S = 1.0             # longest time a supervisor holds a poll
GROW_S = 5.0             # how often the cluster is looked at for nodes without a supervisor
START_S = 300.0          # without a single supervisor ready: give up
TINY = sys.float_info.min        # as good as 0
MAX_DEATHS = 5           # supervisors that may die in a row without any becoming ready

log = logging.getLogger("tokenmill")


class NoNodes(Exception):
    """No node can take work: none has resources, or all were refused. The message says which and why."""


@ray.remote(max_restarts=0, max_task_retries=0)
class SupervisorActor:
    """`Supervisor` behind a process boundary."""

    def __init__(self, store: str, slots: int, limits: dict[str, Any], **kw: Any) -> None:
        self._supervisor = Supervisor(store, slots, Limits(**limits), **kw)

    def poll(self, assignments: list[dict[str, Any]], timeout: float) -> list[dict[str, Any]]:
        return self._supervisor.poll(assignments, timeout)

    def cancel(self, ids: list[int]) -> None:
        self._supervisor.cancel(ids)

    def close(self) -> None:
        self._supervisor.close()


@dataclass
class _Node:
    """A supervisor actor. `open`: assignments it has or is about to get."""

    place: tuple[str, int]           # Ray's node id, number on that node
    name: str
    slots: int
    actor: Any
    poll: Any                        # ObjectRef of the poll in flight, None when it is idle
    ready: bool = False
    fingerprint: dict[str, Any] = field(default_factory=dict)
    open: set[int] = field(default_factory=set)
    waiting: list[dict[str, Any]] = field(default_factory=list)

    @property
    def room(self) -> int:
        return self.slots - len(self.open) if self.ready else 0


class RayBackend:
    """Runs tasks on Ray: on its own on this machine (`address` None), or on the cluster at `address`.

    `workers` bounds the children (default: every CPU). `child_memory_mb` is what a child needs at least; on
    a cluster Ray reserves that, or what the first tasks declare, for each child, plus 300 MB for their supervisor.
    A Ray this process is connected to already is used as it is, and left as it was.

    `ship_code` sends the four packages to the nodes of an attached cluster (Ray's `py_modules`); by default every node
    has them installed.
    """

    interruptible = False

    def __init__(self, store: Store, workers: int | None = None, address: str | None = None, *,
                 object_store_mb: int = 200, child_memory_mb: int = 500, limits: Limits | None = None,
                 scratch: str | None = None, ship_code: bool = False) -> None:
        self.ship_code = ship_code
        self.store, self.workers, self.address = store, workers, address
        self.object_store_mb, self.child_memory_mb = object_store_mb, child_memory_mb
        self.limits, self.scratch = limits or Limits(), scratch
        self.refused: dict[str, str] = {}             # node name → why
        self._nodes: dict[tuple[str, int], _Node] = {}
        self._started = self._own = False
        self._temp: Scratch | None = None
        self._witness: str | None = None
        self._libraries = declared_libraries()
        self._grown = self._ready = float("-inf")
        self._deaths, self._last_death = 0, ""
        self.nodes_lost = 0                           # supervisors that were ready and died
        self._metrics: dict[str, Counter | Gauge] = {}
        self._counted: dict[tuple[str, ...], float] = {}       # what was added to counters so far

    # -- start and end -------------------------------------------------------------------------------------------
    def start(self, memory_mb: int = 0) -> None:
        if self._started:
            return
        self.child_memory_mb = max(self.child_memory_mb, memory_mb)
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        if not ray.is_initialized():
            quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
            if self.address is not None:
                code = {"py_modules": [r for r in roots().values() if r]} if self.ship_code else None
                ray.init(address=self.address, runtime_env=code, **quiet)
            else:
                base = tempfile.gettempdir()          # Ray's sockets lie below; their path may have 107 characters
                self._temp = Scratch(base if len(base) <= 8 else "/tmp")
                cpus = self.workers or len(os.sched_getaffinity(0))
                ray.init(address="local", num_cpus=cpus, object_store_memory=self.object_store_mb << 20,
                         include_dashboard=False, _node_ip_address="127.0.0.1", _temp_dir=self._temp.path, **quiet)
            self._own = True
        if self._temp is None and self.store.local is not None:
            self._witness = f"runs/.witness-{uuid.uuid4().hex}"    # a local path must be a shared one on a cluster
            self.store.write(self._witness, b"")
        self._started, self._ready = True, time.monotonic()

    def close(self) -> None:
        """Take down our supervisors with their children and, if we started or attached it, our Ray."""
        nodes, self._nodes = list(self._nodes.values()), {}
        if ray.is_initialized():
            closing = [n.actor.close.remote() for n in nodes if n.ready]
            if closing:
                with contextlib.suppress(RayError):
                    ray.wait(closing, num_returns=len(closing), timeout=5.0)
            for node in nodes:
                with contextlib.suppress(RayError):
                    ray.kill(node.actor)
            if self._own:
                ray.shutdown()
        if self._witness is not None:
            with contextlib.suppress(OSError):
                self.store.remove(self._witness)
        if self._temp is not None:
            self._temp.close()
        self._started, self._own, self._temp, self._witness = False, False, None, None

    # -- what the scheduler uses ---------------------------------------------------------------------------------
    @property
    def slots(self) -> int:
        return sum(n.slots for n in self._nodes.values() if n.ready)

    def expect(self, waiting: Mapping[Kind, int]) -> Mapping[Kind, str]:
        return {}

    def room_for(self, memory_mb: int, gpus: float, cpu: str = "") -> int:
        rooms = [n.room for n in self._nodes.values() if n.ready]
        free = sum(r for r in rooms if r > 0)         # a full node does not make an idle one less idle
        return free or sum(rooms)

    def submit(self, assignment: dict[str, Any]) -> None:
        node = max((n for n in self._nodes.values() if n.ready), key=lambda n: (n.room, n.poll is None, n.place))
        node.open.add(assignment["id"])
        node.waiting.append(assignment)

    def cancel(self, ids: list[int]) -> None:
        for node in self._nodes.values():
            mine = node.open.intersection(ids)
            node.waiting = [a for a in node.waiting if a["id"] not in mine]
            node.open -= mine
            if mine:
                node.actor.cancel.remote(sorted(mine))     # after the poll in flight; what it finds may still come

    def wait(self, timeout: float) -> list[dict[str, Any]]:
        if time.monotonic() - self._grown > GROW_S:
            self._grow()
        for node in self._nodes.values():
            if node.poll is None and node.open:
                node.poll = node.actor.poll.remote(node.waiting, POLL_S)
                node.waiting = []
        polls = {n.poll: n for n in self._nodes.values() if n.poll is not None}
        if not polls:
            self._check_any()
            time.sleep(min(timeout, 0.2))
            return []
        done, _ = ray.wait(list(polls), timeout=timeout)
        if done:                                           # and all others that are ready by now
            done, _ = ray.wait(list(polls), num_returns=len(polls), timeout=0)
        events: list[dict[str, Any]] = []
        for ref in done:
            node = polls[ref]
            node.poll = None
            try:
                found = ray.get(ref)
            except RayError as e:
                events += self._lost(node, e)
                continue
            for event in found:
                if event["event"] == "fingerprint":
                    self._greet(node, event)
                elif event["event"] in ("done", "failed"):
                    node.open.discard(event["id"])
            events += [e for e in found if e["event"] != "fingerprint"]
        self._check_any()
        return events

    def emit(self, run: str, snapshot: Mapping[str, Any]) -> None:
        """Show the run on the metrics port of this node; Ray takes the values from there within some ten seconds, and
        forgets them when this process ends."""
        if not ray.is_initialized():
            return
        for metric, labels, value in samples(run, snapshot, self.nodes_lost):
            if metric.name not in self._metrics:
                make = Counter if metric.kind == "counter" else Gauge
                self._metrics[metric.name] = make(metric.name, metric.help, metric.labels)
            shown, key = self._metrics[metric.name], (metric.name, *labels.values())
            if isinstance(shown, Gauge):
                shown.set(value, labels)
                continue
            # a counter takes no zero, but must be there before the first event: `increase()` sees only what it grows by
            before = self._counted.get(key)
            if before is None or value > before:
                shown.inc(max(value - (before or 0.0), TINY), labels)
                self._counted[key] = value

    # -- nodes ---------------------------------------------------------------------------------------------------
    def _grow(self) -> None:
        """Start a supervisor wherever there should be one and is none. It gets work only once it has answered."""
        self._grown = time.monotonic()
        left = self.workers if self.workers is not None else 1 << 30
        for info in sorted(ray.nodes(), key=lambda n: n["NodeID"]):
            cpus = int(info["Resources"].get("CPU", 0)) if info["Alive"] else 0
            memory = int(info["Resources"].get("memory", 0)) >> 20
            for number, first in enumerate(range(0, min(cpus, left), CPUS_AN_ACTOR)):
                slots = min(CPUS_AN_ACTOR, min(cpus, left) - first)
                place = (info["NodeID"], number)
                if place not in self._nodes and self._name(info) not in self.refused:
                    share = memory * slots // cpus        # of a node with less than what its slots declare
                    self._spawn(place, self._name(info), slots, min(slots * self.child_memory_mb + OWN_MB, share))
            left -= min(cpus, left)

    @staticmethod
    def _name(info: dict[str, Any]) -> str:
        return f"{info.get('NodeManagerHostname') or info['NodeManagerAddress']} ({info['NodeID'][:8]})"

    def _spawn(self, place: tuple[str, int], name: str, slots: int, memory_mb: int) -> None:
        actor = SupervisorActor.options(
            num_cpus=slots, memory=memory_mb << 20,
            scheduling_strategy=NodeAffinitySchedulingStrategy(place[0], soft=False),
        ).remote(self.store.root, slots, self.limits.to_json(), memory_mb=None if self._temp else memory_mb - OWN_MB,
                 scratch=self.scratch, libraries=self._libraries, witness=self._witness)
        self._nodes[place] = _Node(place, name, slots, actor, actor.poll.remote([], 0.0))

    def _greet(self, node: _Node, theirs: dict[str, Any]) -> None:
        """The first answer of a supervisor: may it work?"""
        node.fingerprint = theirs
        wrong = differences(fingerprint(self._libraries), theirs)
        if theirs.get("sees_store") is False:
            wrong.append(f"it does not see the store {self.store.root}; put the store on a file system that all nodes "
                         f"share, or on object storage")
        if wrong:
            self.refused[node.name] = "; ".join(wrong)
            log.warning("node %s is refused: %s", node.name, self.refused[node.name])
            with contextlib.suppress(RayError):
                ray.wait([node.actor.close.remote()], timeout=2.0)
            self._drop(node)
            return
        node.ready, self._deaths = True, 0

    def _lost(self, node: _Node, error: RayError) -> list[dict[str, Any]]:
        """A supervisor is gone: what it had goes back to the scheduler; another one follows when there is room."""
        self._last_death = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        self.nodes_lost += node.ready
        if not node.ready:
            self._deaths += 1
            self._last_death = str(error).strip()[-2000:]
        self._drop(node)
        ids = sorted(node.open)
        log.warning("supervisor on node %s died: %s", node.name, self._last_death)
        return [{"event": "lost", "ids": ids, "message": f"node {node.name} died: {self._last_death}"}] if ids else []

    def _drop(self, node: _Node) -> None:
        self._nodes.pop(node.place, None)
        self._grown = time.monotonic() - GROW_S + 0.5          # look for a place again soon
        with contextlib.suppress(RayError):
            ray.kill(node.actor)

    def _check_any(self) -> None:
        """Raise NoNodes when waiting any longer makes no sense."""
        if any(n.ready for n in self._nodes.values()):
            self._ready = time.monotonic()
        elif self._deaths >= MAX_DEATHS:
            raise NoNodes(f"supervisors die before they are ready: {self._last_death}")
        elif self.refused and not self._nodes:
            raise NoNodes("no node runs what the driver runs: " + " | ".join(
                f"{name}: {why}" for name, why in sorted(self.refused.items())) +
                ". Install the same version on every node, or send the code along with --ship-code")
        elif time.monotonic() - self._ready > START_S:
            raise NoNodes(f"no supervisor got its resources within {START_S:.0f} s (cluster: {ray.cluster_resources()},"
                          f" free: {ray.available_resources()}); stop what else runs there or ask for fewer --workers")
