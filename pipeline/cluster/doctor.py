"""Implements `tokenmill doctor`, which checks whether this machine and every node of a cluster are fit for a run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from pipeline.base.auth import ClusterError, loopback_url
from pipeline.base.clock import SYSTEM
from pipeline.cluster.diagnostics import Check, check, clock, inspect_node
from pipeline.engine.backends.fingerprint import Fingerprint, declared_libraries, differences, fingerprint
from pipeline.store.fs import Store

HERE = "here"
LEVELS = ("green", "yellow", "red")


def diagnose(store_root: str | None = None, address: str | None = None, insecure_local: bool = False) -> dict[str, Any]:
    """Check whether this machine is fit for a run and, if `address` ('host:port') is given, every node of that Ray
    cluster.

    Returns {"store", "address", "worst": green | yellow | red, "checks": [{"where", "name", "level", "said",
    "remedy"}]}; `worst` is the worst level of all checks. On each node of the cluster a small task runs the checks. A
    cluster that demands no token is reported, and its nodes are not inspected. With `insecure_local`, they are
    inspected if the cluster is on loopback. Files that the checks write are removed again.
    """
    store = Store(store_root) if store_root is not None else None
    local = inspect_node(store.root if store else None)
    checks = [{"where": HERE, **c} for c in local["checks"]]
    if address is not None:
        checks += list(_cluster(address, store, insecure_local))
    worst = max((LEVELS.index(c["level"]) for c in checks), default=0)
    return {"store": store.root if store else None, "address": address, "worst": LEVELS[worst], "checks": checks}


def _cluster(address: str, store: Store | None, insecure_local: bool) -> Iterator[Check]:
    from pipeline.cluster import jobs

    name = "token authentication"
    try:
        demands_token = jobs.check_gcs(address, insecure_local)
    except ClusterError as e:
        message, _, remedy = str(e).partition("; ")
        yield {"where": "cluster", **check(name, "red", message, remedy)}
        return
    yield {"where": "cluster", **(check(name, "green", "on") if demands_token else
                                  check(name, "yellow", "off, on loopback", "set RAY_AUTH_MODE=token on every node"))}
    with _witness(store) as witness:
        cluster = jobs.on_every_node(address, "pipeline.cluster.diagnostics:inspect_node",
                                     {"store_root": store.root if store else None, "witness": witness})
    url = cluster["dashboard"]
    if url:
        inside = loopback_url(f"http://{url}")
        yield {"where": "cluster", **check("dashboard", "green" if inside else "yellow", f"listens on {url}",
                                           "bind it to loopback (ray start --dashboard-host=127.0.0.1) and reach it "
                                           "through ssh -L 8265:127.0.0.1:8265")}
    own = fingerprint(declared_libraries())
    for node in cluster["nodes"]:
        yield from _node(node, own)


@contextlib.contextmanager
def _witness(store: Store | None) -> Iterator[str | None]:
    """A context manager that writes a file to the store and yields its path. Each node of a cluster looks for the file,
    to check whether the node sees the same store. At the end the file is removed. The folder of the store is removed,
    too, if it did not exist before. Without a store, yields None."""
    if store is None:
        yield None
        return
    existed = store.local is None or store.local.is_dir()
    path = f"runs/.doctor-{SYSTEM.new_id()}"
    try:
        store.write(path, b"")
        yield path
    finally:
        with contextlib.suppress(Exception):
            store.remove(path)
        for folder in (store.local / "runs", store.local) if store.local is not None and not existed else ():
            with contextlib.suppress(OSError):
                folder.rmdir()


def _node(node: dict[str, Any], own: Fingerprint) -> Iterator[Check]:
    where = node["name"]
    if node.get("error"):
        yield {"where": where, **check("answers", "red", node["error"], "see that Tokenmill is installed on it, in the "
                                                                         "environment Ray was started from (or use "
                                                                         "--ship-code), and that it is not overloaded")}
        return
    result = node["result"]
    wrong = differences(own, Fingerprint.from_json(result["fingerprint"]))
    yield {"where": where, **check("code and versions", "red" if wrong else "green",
                                   "; ".join(wrong) or "the same as here",
                                   "install the same version on every node, or run with --ship-code")}
    # the node answered between `began` and `ended`, so its clock is certainly wrong only if its time is outside them
    off = max(0.0, node["began"] - result["time"], result["time"] - node["ended"])
    yield {"where": where, **clock("clock", off, "the clock here")}
    yield from ({"where": where, **c} for c in result["checks"])
