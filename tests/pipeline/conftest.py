"""Fixtures for the tests of the command: a site with a finished run, the command itself, and a job server."""

from __future__ import annotations

import http.server
import random
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.corpus import pages, sentences, warc
from tests.pipeline.cli_site import RECIPE, Said

TOKEN = "the-token-of-the-cluster"


@pytest.fixture(scope="session")
def site(tmp_path_factory) -> Path:
    """A folder with `crawl/`, `docs/`, `recipe.yaml` and `store/`, which has the run `first`. Tests must not write to
    it."""
    from pipeline.recipe import load_recipe
    from pipeline.run import make_backend, run_recipe

    top = tmp_path_factory.mktemp("cli")
    (top / "crawl").mkdir()
    found = pages(90, seed=2)
    damaged = bytearray(warc(found[60:]))
    damaged[-40:-20] = b"\xff" * 20
    (top / "crawl" / "a.warc.gz").write_bytes(warc(found[:60]))
    (top / "crawl" / "b.warc.gz").write_bytes(bytes(damaged))
    (top / "docs").mkdir()
    rng, prose = random.Random(5), sentences()
    for i in range(12):
        (top / "docs" / f"d{i:02d}.txt").write_text(" ".join(rng.sample(prose, 25)))
    (top / "docs" / "dup.txt").write_text((top / "docs" / "d00.txt").read_text() + " One more sentence here.")
    (top / "docs" / "same.txt").write_text((top / "docs" / "d01.txt").read_text().replace(" ", "  "))
    (top / "recipe.yaml").write_text(RECIPE)
    run_recipe(load_recipe(top / "recipe.yaml"), str(top / "store"), make_backend=make_backend("inline", 1, None),
               run="first")
    return top


@pytest.fixture
def tokenmill(capsys, monkeypatch) -> Callable[..., Said]:
    """A function that calls the command in this process, without a store that the user's environment names."""
    from pipeline.cli.app import run_command

    monkeypatch.delenv("TOKENMILL_STORE", raising=False)

    def call(*arguments: str | Path) -> Said:
        capsys.readouterr()
        code = run_command([str(a) for a in arguments])
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return Said(code, out, err)

    return call


@pytest.fixture
def room(monkeypatch):
    """Makes the machine seem to have memory to spare, so that other programs on it neither lead to killed children nor
    limit their number.
    """
    monkeypatch.setattr("pipeline.engine.worker.limits.memory_use", lambda: (1 << 30, 64 << 30))


class Server(http.server.BaseHTTPRequestHandler):
    """Stands in for Ray's job server, as far as it is asked before a job is submitted. `wants` is the token that it
    requires (None: no token)."""

    wants: str | None = TOKEN
    elsewhere: str | None = None
    seen: list[tuple[str, str, str | None]]

    def do_GET(self):
        given = self.headers.get("Authorization")
        self.seen.append((self.command, self.path, given))
        if self.elsewhere:
            self.send_response(302)
            self.send_header("Location", self.elsewhere)
        elif self.wants is None or given == f"Bearer {self.wants}":
            self.send_response(200)
        else:
            self.send_response(401 if given is None else 403)
        self.end_headers()

    do_POST = do_PUT = do_GET

    def log_message(self, *_):
        pass


@pytest.fixture
def serve():
    """A function that starts such a server: serve(wants=…) returns (its URL, the list of requests that it gets)."""
    servers = []

    def start(**settings):
        handler = type("Handler", (Server,), {"seen": [], **settings})
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}", handler.seen

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def no_token(monkeypatch, tmp_path):
    """An environment without a token for Ray, which `auth.use_token` may change. Timeouts are long, so that a busy
    machine does not fail a test."""
    for module in ("pipeline.base.auth", "pipeline.cluster.connect", "pipeline.cluster.jobs"):
        if module in sys.modules:
            monkeypatch.setattr(f"{module}.CONNECT_S", 120.0)
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "TOKENMILL_ADDRESS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


@pytest.fixture
def recipe(tmp_path) -> Path:
    (tmp_path / "a.txt").write_text("A text.")
    path = tmp_path / "recipe.yaml"
    path.write_text("version: 1\nsources: {s: {read: text, path: a.txt}}\ndatasets: {d: {from: s}}\n")
    return path
