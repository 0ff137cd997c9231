"""Starts a Ray head as a user would: in a separate process group, with token authentication, on loopback and free
ports."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
import uuid
from pathlib import Path

from tests.processes import signal_all, until

ROOT = Path(__file__).resolve().parents[2]


def free_ports(n: int) -> list[int]:
    """Return `n` free ports. They are below the range from which the system takes ports for programs that ask for any
    port, because Ray's processes take dozens of those before they use the ports given here. They are above the range
    that Ray gives to its workers."""
    found: list[int] = []
    with contextlib.ExitStack() as held:
        for port in random.SystemRandom().sample(range(20_000, 32_768), 1000):
            with contextlib.suppress(OSError):
                held.enter_context(socket.socket()).bind(("127.0.0.1", port))
                found.append(port)
            if len(found) == n:
                break
    return found


class Head:
    """`ray start --head` with two CPUs. Without a `token`, the cluster has no authentication."""

    def __init__(self, token: str | None = None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="tmh", dir="/tmp"))        # short: in the paths of sockets
        self.mark = uuid.uuid4().hex
        self.token = token
        if token is not None:
            (self.folder / "token").write_text(token)
        for left in (2, 1, 0):                                    # another program may take a port before Ray does
            try:
                self._start()
                return
            except BaseException as error:
                self.kill()
                shutil.rmtree(self.folder / "r", ignore_errors=True)
                if not left or not isinstance(error, AssertionError):
                    self.close()
                    raise

    def _start(self) -> None:
        gcs, dashboard, *others = free_ports(6)
        self.gcs, self.url = f"127.0.0.1:{gcs}", f"http://127.0.0.1:{dashboard}"
        options = {"port": gcs, "dashboard-host": "127.0.0.1", "dashboard-port": dashboard, "num-cpus": 2,
                   "node-ip-address": "127.0.0.1", "object-store-memory": 100 << 20, "temp-dir": self.folder / "r",
                   **dict(zip(("dashboard-agent-listen-port", "dashboard-agent-grpc-port", "metrics-export-port",
                               "ray-client-server-port"), others))}
        ray = Path(sys.executable).with_name("ray")
        command = [str(ray), "start", "--head", "--block", "--disable-usage-stats"]
        self.process = subprocess.Popen(
            [*command, *(f"--{name}={value}" for name, value in options.items())],
            env=self.environment() | {"TOKENMILL_TEST_HEAD": self.mark}, cwd=self.folder, start_new_session=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._wait()

    def environment(self, knows: bool = True) -> dict[str, str]:
        """Return the environment variables for the nodes, and for the shell of a user. Unless `knows`, the user does
        not have the token."""
        env = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "TOKENMILL_"))}
        env |= {"HOME": str(self.folder), "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0",
                "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
        if self.token is None:
            return env | {"RAY_AUTH_MODE": "disabled"}
        return env | ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self.folder / "token")} if knows else {})

    def _wait(self) -> None:
        """Wait until the head accepts jobs. An answer of the dashboard alone is not enough, because it answers before
        the agent that runs jobs has started."""
        headers = {} if self.token is None else {"Authorization": f"Bearer {self.token}"}
        request = urllib.request.Request(f"{self.url}/api/jobs/", headers=headers)

        def answers() -> bool:
            try:
                with urllib.request.urlopen(request, timeout=60):
                    return True
            except (OSError, urllib.error.HTTPError):
                return False

        until(answers, 300, "the start of the head", job=self.process)

    def pids(self) -> list[int]:
        """Return the pids of all processes that the head has started, jobs included."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if self.mark.encode() in path.read_bytes():
                    found.append(int(path.parent.name))
        return found

    def kill(self) -> None:
        """Kill all processes of the head, as when its machine loses power, and wait until they are gone."""
        until(lambda: not signal_all(self.pids(), signal.SIGKILL), 120, "the end of the head")
        self.process.wait(timeout=120)
        assert not self.pids()

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
