"""Connects to a Ray cluster, or starts one for this run alone, on this machine."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import traceback
from collections.abc import Iterator
from typing import Any

import ray

from pipeline.base.auth import ClusterError, NoAnswer
from pipeline.base.process import import_path

LONGEST_WHY = 600        # characters of an error of Ray in a message
STARTS = 3               # attempts: Ray's own time-outs of 15 to 30 s are short on a busy machine
QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}

log = logging.getLogger("tokenmill")


def connect(**options: Any) -> None:
    """Call `ray.init` while the current folder is `/`. Ray puts the current folder first on the import path of all
    workers of this driver. The driver of a submitted recipe may run in a folder to which others can write. If they put
    a folder there that is named like one of our packages, the workers would import it in place of the package."""
    with contextlib.chdir(os.sep):
        ray.init(**options)


@contextlib.contextmanager
def _same_imports() -> Iterator[None]:
    """A context in which new processes get the import path of this process (PYTHONPATH), so that they import the same
    modules."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = import_path()
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def attach(address: str, packages: list[str]) -> None:
    """Connect to the cluster at `address`, and send it the folders `packages` of Python packages. Raises NoAnswer if
    nothing answers there, and ClusterError if the cluster cannot be used."""
    try:
        connect(address=address, runtime_env={"py_modules": packages} if packages else None, **QUIET)
    except Exception as e:                            # from Ray or gRPC
        kind = NoAnswer if isinstance(e, (ConnectionError, TimeoutError)) else ClusterError
        why = " ".join(str(e).split()) or type(e).__name__
        raise kind(f"--address {address}: cannot attach ({why[:LONGEST_WHY]}); see that its head node runs (ray "
                   f"status), and run this on a machine of the cluster") from e


def start_local(cpus: int, object_store_mb: int, temp: str) -> None:
    """Start a Ray cluster on this machine and connect to it. Raises ClusterError when STARTS attempts have failed."""
    for remaining in reversed(range(STARTS)):
        try:
            with _same_imports():
                connect(address="local", num_cpus=cpus, object_store_memory=object_store_mb << 20,
                        include_dashboard=False, _node_ip_address="127.0.0.1", _temp_dir=temp, **QUIET)
            return
        except Exception as e:
            _kill_partial_cluster(e)
            ray.shutdown()
            why = " ".join(str(e).split())[:200]
            if not remaining:
                raise ClusterError(f"Ray does not start here ({why}); see that there is free memory and room in "
                                   f"{tempfile.gettempdir()}, or run with --backend process") from e
            log.warning("Ray did not start here (%s): once more", why)


def _kill_partial_cluster(error: BaseException) -> None:
    """Kill the processes of a Ray cluster that failed to start. `error` is the exception that `ray.init` raised.
    `ray.shutdown` would not kill them, because it ends only a cluster that has started."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        node = frame.f_locals.get("self")
        if isinstance(node, ray._private.node.Node):
            node.kill_all_processes(check_alive=False, wait=True)
            return
