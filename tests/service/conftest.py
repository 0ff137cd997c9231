"""Fixtures: a small store with runs, and clients of a service over it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from pipeline.service import checks, dispatching, query, sources, submit, tune, watch
from pipeline.service.app import create_app
from pipeline.service.duck import QueryLimits
from pipeline.service.settings import ServiceSettings
from pipeline.store.fs import Store

OPERATOR, VIEWER = "operator-" + "o" * 24, "viewer-" + "v" * 24
BASE = "http://127.0.0.1:8700"
#: seconds that a request may take in tests; a busy machine may stand still
PATIENT_S = 600.0


@pytest.fixture(scope="module", autouse=True)
def patient() -> Iterator[None]:
    """Make the service wait long for queries, for processes and for new states, and look often at its queues. With its
    own limits, an answer would depend on how busy this machine is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(query, "QueryLimits", partial(QueryLimits, seconds=PATIENT_S, wait_s=PATIENT_S))
        for module, limit in ((checks, "CHECK_S"), (submit, "FILES_S"), (sources, "READ_S"), (tune, "WAIT_S"),
                              (watch, "PATIENCE_S")):
            patch.setattr(module, limit, PATIENT_S)
        patch.setattr(dispatching, "TICK_S", 0.1)
        yield


class CheckHere:
    """Stands in for the process that checks a recipe: does the same work in this process, which saves the start."""

    returncode: int | None = None

    async def communicate(self, data: bytes) -> tuple[bytes, bytes]:
        result = await asyncio.to_thread(checks._checked, json.loads(data))
        self.returncode = 0
        return json.dumps(result).encode(), b""


@pytest.fixture
def check_processes() -> None:
    """A test that uses this fixture beside `checks_here` has a process for each check, as the service has."""


@pytest.fixture
def checks_here(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The service checks recipes without processes of their own."""
    async def start(*command: str, **_: Any) -> CheckHere:
        assert command[-1] == "pipeline.service.checks"
        return CheckHere()

    if "check_processes" not in request.fixturenames:
        monkeypatch.setattr(asyncio, "create_subprocess_exec", start)


def pass_time(seconds: float) -> None:
    """Set the clock of the running event loop forward: what was to happen in the next `seconds` is due now."""
    loop = asyncio.get_running_loop()
    now = loop.time
    loop.time = lambda: now() + seconds  # type: ignore[method-assign]


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A context manager that yields a port on which a server can listen again and again. Until its end, the system
    gives the port to no other program that asks for any port."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)      # servers set this, too, and may then listen
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def write_run(store: Store, run: str, state: str = "done", attempt: int = 1, how: str = "job", facts: dict[str, Any]
              | None = None, **progress: Any) -> None:
    """Write the files of a run as its driver leaves them."""
    known = {"run": run, "attempt": attempt, "how": how, **(facts or {})}
    store.write(f"runs/{run}/run.json", json.dumps(known).encode())
    document = {"state": state, "attempt": attempt, "parts": 4, "done": 4, "nodes": {}, **progress}
    store.write(f"runs/{run}/progress.json", json.dumps(document).encode())


def write_log(store: Store, run: str, *pieces: str, attempt: int = 1) -> None:
    for n, piece in enumerate(pieces, 1):
        store.write(f"runs/{run}/log/{attempt:04d}-{n:06d}.txt", piece.encode())


@pytest.fixture
def store(tmp_path: Path) -> Store:
    at = Store(tmp_path / "store")
    write_run(at, "first", docs=12)
    write_run(at, "second", state="failed", error="no space left", docs=3)
    return at


@pytest.fixture
def app(store: Store) -> FastAPI:
    """A service without tokens, on loopback."""
    return create_app(ServiceSettings({"s": store.root}, look_s=0.0))


@pytest.fixture
def client(app: FastAPI) -> TestClient:
    return TestClient(app, base_url=BASE)


@pytest.fixture
def guarded(store: Store) -> Callable[..., TestClient]:
    """A function that makes clients of a service with tokens: guarded("operator") sends the operator's token."""
    def make(role: str = "", **settings: Any) -> TestClient:
        made = create_app(ServiceSettings({"s": store.root}, viewer_token=VIEWER, operator_token=OPERATOR, look_s=0.0,
                                          **settings))
        token = {"operator": OPERATOR, "viewer": VIEWER}.get(role, role)
        return TestClient(made, base_url=BASE, headers={"Authorization": f"Bearer {token}"} if token else {})
    return make


def problem(answer: Any, status: int) -> dict[str, Any]:
    """Check that an answer is a problem document (application/problem+json) with this status, and that it shows no
    traceback. Returns the document."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    document = answer.json()
    assert document["status"] == status and {"type", "title", "detail"} <= document.keys()
    assert "Traceback" not in answer.text and 'File "' not in answer.text
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    return document


def events(text: str) -> list[dict[str, Any]]:
    """Parse the text of an event stream. Returns its events as {"event", "id", "data"}."""
    result = []
    for block in text.split("\n\n"):
        fields = dict(line.partition(": ")[::2] for line in block.splitlines() if not line.startswith(":"))
        if "event" in fields:
            result.append({**fields, "data": json.loads(fields["data"])})
    return result
