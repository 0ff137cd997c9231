"""The server as a process: with which settings it refuses to start, how it answers raw requests, and what it still
knows after it was killed."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn

from pipeline.service.app import create_app
from pipeline.service.settings import ServiceSettings
from tests.commands import command
from tests.processes import until
from tests.service.conftest import OPERATOR, reserved_port, write_log, write_run

ROOT = Path(__file__).resolve().parents[2]
RUNS = "/api/v1/stores/store/runs"


@pytest.fixture
def port() -> Iterator[int]:
    with reserved_port() as port:
        yield port


@contextlib.contextmanager
def serving(store: str, port: int, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Within this context, `tokenmill serve` runs as a process."""
    process = subprocess.Popen([sys.executable, "-m", "pipeline.cli", "serve", "--store", store, "--port", str(port),
                                *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert process.stdout is not None and "serving" in process.stdout.readline(), process.stderr.read()
        yield process
    finally:
        process.kill()
        process.communicate()


def get(port: int, path: str, headers: dict[str, str] | None = None) -> tuple[int, bytes]:
    """Send one request, with the path exactly as given. Returns (status, body)."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    connection.request("GET", path, headers=headers or {})
    answer = connection.getresponse()
    return answer.status, answer.read()


def next_event(answer: http.client.HTTPResponse) -> dict[str, str]:
    fields: dict[str, str] = {}
    while True:
        line = answer.readline().decode().rstrip("\n")
        name, _, value = line.partition(": ")
        if line and name:
            fields[name] = value
        elif "event" in fields:
            return fields


def stream(port: int, path: str, last: str = "") -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    connection.request("GET", path, headers={"Last-Event-ID": last} if last else {})
    return connection.getresponse()


def test_a_killed_server_knows_the_same_and_streams_continue(store, port):
    write_run(store, "live", "not-ended", docs=1)
    write_log(store, "live", "one\n")
    paths = (RUNS, f"{RUNS}/live", f"{RUNS}/first", f"{RUNS}/first/events", "/api/v1/stores")
    with serving(store.root, port) as process:
        before = [get(port, path) for path in paths]
        first = next_event(stream(port, f"{RUNS}/live/events"))
        log = next_event(stream(port, f"{RUNS}/live/log/events"))
        process.send_signal(signal.SIGKILL)
        process.wait()
    with serving(store.root, port) as process:
        assert [get(port, path) for path in paths] == before and {status for status, _ in before} == {200}
        rest = stream(port, f"{RUNS}/live/events", first["id"])
        log_rest = stream(port, f"{RUNS}/live/log/events", log["id"])
        write_log(store, "live", "one\ntwo\n")
        write_run(store, "live", "done", docs=2)
        event = next_event(rest)                                       # not what it was told before it was cut off
        assert event["event"] == "progress" and json.loads(event["data"])["docs"] == 2
        assert next_event(rest)["event"] == "end"
        assert json.loads(next_event(log_rest)["data"]) == {"text": "two\n"}
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate()
    assert " 200 " in said and "Traceback" not in said


def test_raw_requests_lead_nowhere_else(store, port):
    write_run(store, "%2e%2e")
    for path in (Path(store.root).parent / "report.html", Path(store.root) / "report.html"):
        path.write_text("outside")
    with serving(store.root, port):
        for name in ("..", ".", "../..", "%2e%2e", "%252e%252e%252f", "..%00", "//", "first/../../.."):
            for rest in ("", "/report.html", "/log"):
                status, body = get(port, f"{RUNS}/{name}{rest}")
                assert 400 <= status < 500 and b"outside" not in body and json.loads(body)["status"] == status
        assert get(port, f"{RUNS}/%252e%252e")[0] == 200              # the run whose name only looks like that
        assert get(port, "/api/v1/stores", {"Host": "evil.example"})[0] == 403
        with socket.create_connection(("127.0.0.1", port), timeout=300) as s:
            s.sendall(b"GET http://evil.example/api/v1/stores HTTP/1.1\r\nHost: evil.example\r\n\r\n")
            assert b" 403 " in s.recv(4096).partition(b"\r\n")[0] + b" "
        with socket.create_connection(("127.0.0.1", port), timeout=300) as s:
            s.sendall(b"GET /api/v1/stores HTTP/1.0\r\n\r\n")
            assert b" 403 " in s.recv(4096).partition(b"\r\n")[0] + b" "


def test_a_token_of_the_environment_is_not_shown(store, port):
    os.environ["TOKENMILL_OPERATOR_TOKEN"] = OPERATOR
    try:
        with serving(store.root, port) as process:
            assert get(port, "/api/v1/stores")[0] == 401
            assert get(port, "/api/v1/stores", {"Authorization": f"Bearer {OPERATOR}"})[0] == 200
            assert OPERATOR.encode() not in Path(f"/proc/{process.pid}/cmdline").read_bytes()
            process.send_signal(signal.SIGINT)
            out, err = process.communicate()
    finally:
        del os.environ["TOKENMILL_OPERATOR_TOKEN"]
    assert OPERATOR not in out + err and "operator" in err


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_tls_and_what_it_does_to_the_cookie(store, port, tmp_path):
    cert, key, token = (tmp_path / name for name in ("cert.pem", "key.pem", "token"))
    subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", cert, "-days",
                    "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"], check=True,
                   capture_output=True)
    token.write_text(OPERATOR)
    arguments = ("--certificate", str(cert), "--key", str(key), "--token-file", str(token))
    with serving(store.root, port, *arguments) as process:
        context = ssl.create_default_context(cafile=str(cert))
        connection = http.client.HTTPSConnection("localhost", port, timeout=300, context=context)
        connection.request("POST", "/api/v1/session", json.dumps({"token": OPERATOR}))
        answer = connection.getresponse()
        answer.read()
        cookie = answer.headers["Set-Cookie"]
        assert answer.status == 204 and cookie.startswith("__Host-tokenmill=operator.") and "; Secure" in cookie
        connection.request("GET", RUNS, headers={"Cookie": cookie.partition(";")[0]})
        assert connection.getresponse().status == 200
        with pytest.raises((http.client.HTTPException, OSError)):
            get(port, RUNS)                                            # not in clear
        connection.close()
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate()
    assert OPERATOR not in said


def test_streams_end_with_their_clients(store):
    """A client that goes away without a word must not be followed for an hour."""
    write_run(store, "live", "not-ended")
    app = create_app(ServiceSettings({"store": store.root}, look_s=0.01))
    listening = socket.create_server(("127.0.0.1", 0))                 # takes connections before the server has started
    port = listening.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, ws="none"))
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    try:
        connections = [http.client.HTTPConnection("127.0.0.1", port, timeout=300) for _ in range(5)]
        for connection in connections:
            connection.request("GET", f"{RUNS}/live/events")
            next_event(connection.getresponse())
        assert app.state.streams == 5
        for connection in connections:
            connection.close()
            if connection.sock is not None:
                connection.sock.close()
        del connections, connection
        until(lambda: app.state.streams == 0)
    finally:
        server.should_exit = True
        thread.join()


@pytest.mark.parametrize(("arguments", "said"), [
    (("--store", "absent"), "absent"),
    (("--host", "0.0.0.0"), "--token-file"),
    (("--host", "0.0.0.0", "--token-file", "token"), "--certificate"),
    (("--behind-proxy",), "--token-file"),
    (("--token-file", "absent-token"), "absent-token"),
    (("--certificate", "token"), "--key"),
    (("--certificate", "token", "--key", "token"), "token"),
    (("--store", "a=store", "--store", "a=store"), "'a'"),
    (("--store", "https://user:pw@host/store"), "password"),
])
def test_what_would_not_be_safe_is_not_started(tmp_path, arguments, said):
    (tmp_path / "store").mkdir()
    (tmp_path / "token").write_text(OPERATOR)
    answer = command("pipeline.cli", "serve", *arguments, cwd=tmp_path)
    assert answer.returncode == 2 and said in answer.stderr and len(answer.stderr.splitlines()) == 1
    assert OPERATOR not in answer.stderr


def test_a_port_in_use_is_named(tmp_path):
    (tmp_path / "store").mkdir()
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = str(s.getsockname()[1])
        answer = command("pipeline.cli", "serve", "--port", port, cwd=tmp_path)
    assert answer.returncode == 2 and port in answer.stderr and "--port" in answer.stderr


def test_without_the_extra_the_command_names_it(tmp_path, monkeypatch, capsys):
    import pipeline.service
    from pipeline.cli.app import run_command

    monkeypatch.setattr(pipeline, "service", pipeline.service)     # later tests patch modules of the package of before
    for name in [name for name in sys.modules if name.startswith("pipeline.service")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert run_command(["serve", "--store", str(tmp_path)]) == 1
    assert "tokenmill[service]" in capsys.readouterr().err
