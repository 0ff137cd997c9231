"""Fixtures that all scenarios share: the corpus, the result of an undisturbed run, and `World`, which owns the store
and the processes of one scenario."""

from __future__ import annotations

import os
import random
import secrets
import shutil
import signal
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipeline.recipe import load_recipe
from pipeline.run import make_backend, run_recipe
from tests.chaos import checks, site
from tests.chaos.cluster import ROOT, Cluster
from tests.chaos.driver import Driver
from tests.processes import alive, descendants, marked, named, signal_all, until

HOOK = Path(__file__).parent / "hook"


def pytest_collection_modifyitems(items):
    """Mark all tests of this folder as `chaos` (they run with `make chaos`). Skip them outside Linux."""
    for item in items:
        if Path(item.fspath).parent == Path(__file__).parent:
            item.add_marker(pytest.mark.chaos)
            item.add_marker(pytest.mark.skipif(sys.platform != "linux", reason="child processes need Linux"))


@dataclass(frozen=True)
class Undisturbed:
    """What a run makes to which nothing happened; the scenarios are compared with it."""

    hashes: dict[str, str]
    places: dict[str, list[str]]
    tasks: Counter[str]            # by node


@pytest.fixture(scope="session")
def kernels() -> str:
    """The folder for compiled numba kernels, which all tests share, so that the kernels are compiled only once."""
    return os.environ["NUMBA_CACHE_DIR"]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    top = tmp_path_factory.mktemp("chaos")
    site.write_site(top)
    return top


@pytest.fixture(scope="session")
def undisturbed(corpus, kernels, tmp_path_factory) -> Undisturbed:
    return reference(corpus / "recipe.yaml", str(tmp_path_factory.mktemp("undisturbed") / "store"), kernels)


def reference(recipe: Path, store: str, kernels: str) -> Undisturbed:
    driver = Driver({**os.environ, "NUMBA_CACHE_DIR": kernels}, recipe, store)
    try:
        assert driver.finish() == 0, driver.stderr
    finally:
        driver.close()
    tasks = Counter(e["node"] for e in driver.told("done") if "key" in e)
    assert tasks["clean"] + tasks["unique:notes"] >= 40 and sum("/exact" in n or "/minhash" in n for n in tasks) >= 6
    found = checks.places(store)
    read = [*found["datasets/clean"], *found["dropped/clean"], *found["quarantine/clean"]]
    assert len(read) == len(set(read)) == site.WEB
    unique = [*found["datasets/unique"], *found["dropped/unique"], *found["quarantine/unique"]]
    assert len(unique) == len(set(unique)) == len(found["datasets/clean"]) + site.NOTES
    assert len(found["dropped/unique"]) > 200, "there must be duplicates to lose"
    return Undisturbed(checks.hashes(store), found, tasks)


class Machines:
    """The cluster that scenarios use one after the other. If a scenario has killed the head of the cluster, the next
    scenario gets a new cluster."""

    def __init__(self, kernels: str) -> None:
        self.temp = Path(tempfile.mkdtemp(prefix="tmc", dir="/tmp"))          # short: in the paths of sockets
        self.mark = f"chaos-{secrets.token_hex(8)}"
        self.env = {**{k: v for k, v in os.environ.items() if not k.startswith("RAY_")}, "CHAOS": self.mark,
                    "TMPDIR": str(self.temp), "RAY_TMPDIR": str(self.temp), "NUMBA_CACHE_DIR": kernels,
                    "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0",
                    "RAY_gcs_rpc_server_reconnect_timeout_s": "14",      # Ray ends a driver without a head after 60
                    "PYTHONPATH": f"{HOOK}{os.pathsep}{ROOT}", "CHAOS_FOLDER": str(self.temp)}
        self._cluster: Cluster | None = None

    def cluster(self, nodes: int) -> Cluster:
        """Return the cluster, with exactly `nodes` running nodes. A cluster whose head is dead is replaced."""
        if self._cluster is None or not self._cluster.whole:
            self.close()
            self._cluster = Cluster(self.env, nodes)
        self._cluster.resize(nodes)
        return self._cluster

    def close(self) -> None:
        if self._cluster is not None:
            self._cluster.close()
            self._cluster = None
        check_gone(self.mark)


def check_gone(mark: str) -> None:
    """Wait until no worker and no driver with `mark` in its environment is left, and fail if this takes too long. Ray's
    own processes, which would end a minute after the cluster's head, are killed."""
    def ours() -> set[int]:
        return {p for p in marked(mark) if named(p, "pipeline.") or named(p, "SupervisorActor")}

    try:
        until(lambda: not ours(), 120, lambda: f"the end of {ours()}")
    finally:
        signal_all(marked(mark), signal.SIGKILL)


@pytest.fixture(scope="session")
def machines(kernels):
    made = Machines(kernels)
    yield made
    made.close()
    shutil.rmtree(made.temp, ignore_errors=True)


class World:
    """A scenario: its store, its cluster and its drivers. After the scenario, none of its processes and no scratch may
    be left."""

    def __init__(self, name: str, corpus: Path, machines: Machines) -> None:
        self.corpus, self.rng, self._machines = corpus, random.Random(f"chaos/{name}"), machines
        self.temp = Path(tempfile.mkdtemp(prefix="tmw", dir="/tmp"))
        self.store = str(self.temp / "store")
        self.mark = f"chaos-{secrets.token_hex(8)}"
        self.env = {**machines.env, "CHAOS": self.mark, "TMPDIR": str(self.temp)}
        self.cluster: Cluster | None = None
        self._drivers: list[Driver] = []
        self._seen: set[int] = set()
        self._told: list[Path] = []

    def start(self, nodes: int = 2) -> Cluster:
        self.cluster = self._machines.cluster(nodes)
        return self.cluster

    def run(self, *more: str, recipe: Path | None = None, local: bool = False, scheme: str = "", **kw) -> Driver:
        """Start a driver with workers on the cluster or, with `local`, with child processes of its own. `scheme` is put
        in front of the path of the store."""
        address = None if local else self.cluster.address
        self._drivers.append(Driver(self.env, recipe or self.corpus / "recipe.yaml", scheme + self.store, *more,
                                    address=address, **kw))
        return self._drivers[-1]

    def tell(self, fault: str, what: str = "") -> Path:
        """Create the file `fault` with the contents `what`. As long as it exists, children behave as
        `hook/sitecustomize.py` describes for a file of this name. Returns the path."""
        self._told.append(self._machines.temp / fault)
        part = self._machines.temp / f".{fault}"
        part.write_text(what)
        part.rename(self._told[-1])
        return self._told[-1]

    def note(self) -> None:
        """Remember all workers that run now. `check_workers_are_gone` later checks that none of them has outlived the
        run."""
        if self.cluster is not None:
            self._seen.update(p for n in self.cluster.nodes for p in (*n.supervisors, *n.children))
        for driver in self._drivers:
            self._seen.update(descendants(driver.pid))

    def check_workers_are_gone(self) -> None:
        """Wait until all supervisors and children of the ended runs are gone, and fail if this takes too long."""
        until(lambda: not [p for p in self._seen if alive(p)], 120,
              lambda: f"the end of {[p for p in self._seen if alive(p)]}")
        if self.cluster is not None:
            until(lambda: not (self.cluster.children or self.cluster.supervisors), 120, "the end of all workers")

    def replace_cluster(self, nodes: int = 2) -> Cluster:
        """Close the cluster, and start a new one with `nodes` nodes."""
        self._machines.close()
        return self.start(nodes)

    def close(self) -> None:
        for file in self._told:
            file.unlink(missing_ok=True)
        for driver in self._drivers:
            driver.close()
        try:
            check_gone(self.mark)
        finally:
            shutil.rmtree(self.temp, ignore_errors=True)

    def check(self, expected: Undisturbed, recipe: Path | None = None) -> None:
        """Check that the run has ended well: all data is as in the undisturbed run, running the recipe again has
        nothing to do, and no processes and no scratch are left."""
        self.note()
        self.check_workers_are_gone()
        assert checks.hashes(self.store) == expected.hashes
        assert checks.places(self.store) == expected.places
        checks.check_log(self.store)
        again = load_recipe(recipe or self.corpus / "recipe.yaml", [], allow_custom=True)
        summary = run_recipe(again, self.store, make_backend=make_backend("inline", 1, None), report=False)
        assert summary.executed == 0, "something was lost"
        checks.check_objects(self.store)
        assert checks.hashes(self.store) == expected.hashes
        checks.check_scratch(self.temp)
        checks.check_scratch(self._machines.temp)


@pytest.fixture
def world(request, corpus, machines):
    made = World(request.node.name, corpus, machines)
    yield made
    made.close()
