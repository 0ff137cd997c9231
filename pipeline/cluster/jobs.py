"""Runs the driver of a run (the process that schedules its tasks) as a job of a Ray cluster. Submits the job, reports
its state and stops it. Also checks whether the cluster demands a token.

The state that Ray reports of a job may be wrong (ray#65608, ray#65025) or missing after a head node is lost. The state
of a run is therefore read from its store (`pipeline.cluster.attempts`), and Ray's report is only a hint. Job ids,
options and packages are sent through Ray. The recipe is not, because its text must not reach a shell.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import grpc
import ray
from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc
from ray.job_submission import JobStatus, JobSubmissionClient
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pipeline.base.auth import CONNECT_S, ClusterError, NoAnswer, loopback, our_token, refuse_open, token_refused
from pipeline.base.clock import SYSTEM, Clock
from pipeline.base.redact import redact
from pipeline.engine.backends.ray_local import QUIET, connect
from stages.catalog import load

#: seconds that Ray waits between SIGTERM and SIGKILL, so that running tasks can finish (`cancellation.GRACE_S`) and the
#: driver can write its report
STOP_WAIT_S = 180
#: environment variables that Ray prefers to the addresses it is given
_OVERRIDES = ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS")


@dataclass(frozen=True)
class JobState:
    """The state of a Ray job as Ray reports it. `status` is PENDING, RUNNING, STOPPED, SUCCEEDED or FAILED. `exit_code`
    is None as long as Ray does not know the exit code."""

    status: str
    message: str
    exit_code: int | None

    @property
    def ended(self) -> bool:
        return JobStatus(self.status).is_terminal()


def job_id(store_root: str, run: str, attempt: int) -> str:
    """Return the id of the Ray job for this attempt (start) of a run. The id depends only on the arguments, so that Ray
    refuses to start the same attempt a second time."""
    digest = hashlib.blake2b(f"{store_root}\0{run}".encode(), digest_size=5).hexdigest()
    return f"tokenmill-{re.sub(r'[^A-Za-z0-9_.-]', '-', run)[:64]}-{digest}-{attempt}"


def submit(address: str, id: str, arguments: Sequence[str], *, python: str = "python",
           packages: Sequence[str] = ()) -> bool:
    """Start `python -m pipeline.cli ARGUMENTS` on the head node of the cluster as the job `id`, and return without
    waiting for the job to end. Returns False when a job with this id exists already.

    `packages` are folders of Python packages to send along. Without them the packages must be installed on the head
    node. `address` is the URL of the job server. Raises ClusterError when the cluster does not accept the job.
    """
    # -P: Python must not find other packages in the folder Ray was started in
    entrypoint = "exec " + shlex.join([python, "-P", "-m", "pipeline.cli", *arguments])
    environment = {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT_S)},
                   **({"py_modules": list(packages)} if packages else {})}
    with _client(address) as client:
        try:
            client.submit_job(entrypoint=entrypoint, submission_id=id, runtime_env=environment)
        except RuntimeError as e:
            if "already exists" in str(e):
                return False
            raise ClusterError(f"{address} did not take the job: {_line(e)}") from None
    return True


def state(address: str, id: str) -> JobState | None:
    """Return the state of the Ray job `id` as Ray reports it; None when the cluster has no such job."""
    with _client(address) as client:
        try:
            info = client.get_job_info(id)
        except RuntimeError as e:
            if "does not exist" in str(e):
                return None
            raise ClusterError(f"{address} does not report the state of the job: {_line(e)}") from None
    return JobState(str(info.status.value if isinstance(info.status, JobStatus) else info.status),
                    redact(info.message or ""), info.driver_exit_code)


def stop(address: str, id: str) -> bool:
    """Ask Ray to stop the job `id` of the cluster, and return without waiting. Ray sends SIGTERM, and SIGKILL after
    STOP_WAIT_S seconds. Returns False when the job has ended or the cluster has no such job."""
    with _client(address) as client:
        try:
            return bool(client.stop_job(id))
        except RuntimeError as e:
            if "does not exist" in str(e):
                return False
            raise ClusterError(f"{address} did not stop the job: {_line(e)}") from None


def job_output(address: str, id: str) -> str:
    """Return the output of the Ray job `id`, as far as Ray has kept it, with secrets masked; "" when Ray has none."""
    with _client(address) as client:
        try:
            return redact(client.get_job_logs(id))
        except RuntimeError:
            return ""


@contextlib.contextmanager
def _client(address: str) -> Iterator[JobSubmissionClient]:
    """A context manager that yields a client of the job server at `address`. Errors of the connection are raised as
    ClusterError."""
    logging.getLogger("ray.dashboard.modules.dashboard_sdk").setLevel(logging.WARNING)     # "Uploading package …"
    before = {name: os.environ.pop(name, None) for name in (*_OVERRIDES, "no_proxy")}
    host = urlsplit(address).hostname
    # reach this machine's loopback without a proxy, which would see the token
    direct = host if loopback(host) else before["no_proxy"]
    if direct is not None:
        os.environ["no_proxy"] = direct
    try:
        yield JobSubmissionClient(address)
    except ClusterError:
        raise
    except Exception as e:                  # from requests, Ray or aiohttp
        raise ClusterError(f"{address}: {_line(e)}") from None
    finally:
        os.environ.pop("no_proxy", None)
        os.environ.update({name: value for name, value in before.items() if value is not None})


def _line(error: BaseException) -> str:
    """Return the most informative line of the message of a Ray error: the last line if the message is a traceback, else
    the first line."""
    text = redact(str(error)).strip().strip("\"'").replace("\\n", "\n")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return lines[-1] if "Traceback" in text else lines[0]


def local_cluster() -> str:
    """Return the address ('host:port') that `--address auto` means: that of the GCS (the server of a Ray cluster's head
    node). The cluster is the one that RAY_ADDRESS names or, without RAY_ADDRESS, the one that this machine is part of.
    Raises NoAnswer when there is none."""
    try:
        return str(ray._private.services.canonicalize_bootstrap_address_or_die("auto"))
    except ConnectionError as e:
        raise NoAnswer(f"--address auto: this machine is in no Ray cluster ({_line(e)}); give HOST:6379, or leave "
                       f"--address out to run on this machine alone") from None


def check_gcs(address: str, insecure_local: bool = False) -> bool:
    """Check the authentication of the Ray cluster at `address`, the 'host:port' of its GCS (the server of its head
    node). Returns True when the cluster demands a token and accepts this user's token. Returns False when it demands no
    token, which is allowed only with `insecure_local` and on loopback. Raises ClusterError in all other cases."""
    if _admits(address, None):
        refuse_open(address, address.rpartition(":")[0].strip("[]"), insecure_local)
        return False
    if not _admits(address, our_token(address)):
        raise token_refused(address)
    return True


def _admits(address: str, bearer: str | None) -> bool:
    """Whether the GCS (the server of a Ray cluster's head node) at `address` accepts a request with the token `bearer`.
    With None, the request has no token."""
    # like Ray's own channels, use no proxy, which would see the token
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        stub = gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel)
        try:
            request = gcs_service_pb2.GetAllNodeInfoRequest(limit=1)      # type: ignore[attr-defined]  # generated
            stub.GetAllNodeInfo(request, timeout=CONNECT_S,
                                metadata=[("authorization", f"Bearer {bearer}")] if bearer else None)
        except grpc.RpcError as e:
            if e.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
                return False
            kind = NoAnswer if e.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED) \
                else ClusterError
            raise kind(f"no head node of a Ray cluster answers at {address} ({e.code().name}); see that its "
                       f"head node runs (ray status) and the port is open") from None
    return True


# -- all nodes -------------------------------------------------------------------------------------------------------
@ray.remote(max_retries=0)
def _call(target: str, arguments: dict[str, Any]) -> Any:
    return load(target)(**arguments)


def on_every_node(address: str, target: str, arguments: dict[str, Any], timeout: float = 60.0,
                  clock: Clock = SYSTEM) -> dict[str, Any]:
    """Call the function `target` ('module:function') with these arguments on every living node of the cluster at
    `address` ('host:port').

    Returns {"dashboard": "host:port", "nodes": [{"name", "id", "began", "ended", "result" or "error"}]}, with nodes
    sorted by name. `began` and `ended` are the times of the call by the clock of this machine, in seconds since 1970. A
    node has an error if it does not answer within `timeout` seconds, or if the function raises there. Raises
    ClusterError when this process cannot attach to the cluster.
    """
    own = not ray.is_initialized()
    try:
        if own:
            connect(address=address, **QUIET)
    except Exception as e:                  # from Ray or gRPC
        raise ClusterError(f"--address {address}: cannot attach ({_line(e)}); see that its head node runs (ray "
                           f"status), and run this on a machine of the cluster") from None
    try:
        nodes = sorted((n for n in ray.nodes() if n["Alive"]), key=lambda n: (n["NodeManagerHostname"], n["NodeID"]))
        began, deadline = clock.wall(), clock.now() + timeout
        nodes_by_call = {_call.options(
            num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(n["NodeID"], soft=False),
        ).remote(target, arguments): n for n in nodes}
        answers, waiting = [], list(nodes_by_call)
        while waiting:
            done, waiting = ray.wait(waiting, timeout=max(0.0, deadline - clock.now()))
            for ref in done or waiting:
                node = nodes_by_call[ref]
                answer = {"name": f"{node['NodeManagerHostname']} ({node['NodeID'][:8]})", "id": node["NodeID"],
                          "began": began, "ended": clock.wall()}
                try:
                    if not done:
                        raise TimeoutError(f"no answer within {timeout:.0f} s")
                    answers.append({**answer, "result": ray.get(ref)})
                except Exception as e:      # an error of the function, or the loss of its node
                    cause = getattr(e, "cause", None) or e
                    answers.append({**answer, "error": f"{type(cause).__name__}: {_line(cause)}"})
            waiting = waiting if done else []
        here = ray._private.worker.global_worker.node
        return {"dashboard": (here.webui_url if here is not None else "") or "",
                "nodes": sorted(answers, key=lambda n: (n["name"], n["id"]))}
    finally:
        if own:
            ray.shutdown()
