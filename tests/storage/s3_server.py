"""Runs an S3 server on loopback for the tests: moto, in a process of its own, behind a proxy that can misbehave.

    server = S3Server(folder); server.environment() → what a process needs to talk to it
    server.trouble(lambda method, path, n: "503" | "slow down" | "drop" | "cut" | "hang" | "lost reply" | None)

The proxy forwards requests unchanged, unless the function given to `trouble` names a fault for a request. It then
answers by itself (`503`, `slow down`, `deny`), closes the connection without an answer (`drop`), sends half of the body
(`cut`), performs the request but closes without passing the answer on (`lost reply`), or is silent until the client
gives up (`hang`).

moto differs from S3 in three ways, which the proxy hides:

* S3 creates an object that must not exist in one atomic step. moto first looks and then creates, so two clients could
  both be told that they created it. Therefore only one request at a time is forwarded.
* moto answers 500 when an object is read or listed while another client replaces or removes it. The same rule helps.
* moto stores the part of an upload that it got before a client died. The proxy forwards only complete requests.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.commands import command, server_pid
from tests.processes import children_of, signal_all, until

Trouble = Callable[[str, str, int], str | None]
KEYS = {"AWS_ACCESS_KEY_ID": "testing-key-id", "AWS_SECRET_ACCESS_KEY": "very-secret-testing-key"}
_ERROR = ('<?xml version="1.0" encoding="UTF-8"?><Error><Code>{}</Code><Message>{}</Message>'
          '<RequestId>1</RequestId></Error>')


@dataclass
class Request:
    method: str
    path: str
    sent: int                    # bytes of its body
    received: int = 0            # bytes of the answer's


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True          # the body of an answer would wait 40 ms for the ACK of its headers
    server: _Proxy

    def log_message(self, *_: object) -> None:
        pass

    def _forward(self) -> None:
        try:
            body = self._body()
        except ConnectionError:
            self._break()
            return
        with self.server.at_work():
            self._forward_body(body)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _forward

    def _forward_body(self, body: bytes) -> None:
        request = Request(self.command, self.path, len(body))
        what = self.server.decide(request)
        if what in ("503", "slow down"):
            code = "SlowDown" if what == "slow down" else "ServiceUnavailable"
            self._answer(503, [("Content-Type", "application/xml")], _ERROR.format(code, "not now").encode())
            return
        if what == "deny":                              # as chatty as some servers are
            said = f"Access Denied to {KEYS['AWS_ACCESS_KEY_ID']} with {KEYS['AWS_SECRET_ACCESS_KEY']}"
            self._answer(403, [("Content-Type", "application/xml")], _ERROR.format("AccessDenied", said).encode())
            return
        if what == "drop":
            self._break()
            return
        if what == "hang":
            with contextlib.suppress(OSError):
                self.connection.recv(1)                 # nothing comes until the client closes
            self._break()
            return
        with self.server.asking:
            got, data = self._ask(body)
        request.received = len(data)
        if what == "lost reply":
            self._break()
            return
        kept = [(k, v) for k, v in got.getheaders()
                if k.lower() not in ("connection", "transfer-encoding", "content-length", "server", "date")]
        size = got.getheader("Content-Length") if self.command == "HEAD" else str(len(data))
        self._answer(got.status, kept, data, size, cut=what == "cut")

    def _ask(self, body: bytes) -> tuple[http.client.HTTPResponse, bytes]:
        upstream = http.client.HTTPConnection("127.0.0.1", self.server.upstream, timeout=300)
        try:
            headers = {k: v for k, v in self.headers.items()
                       if k.lower() not in ("connection", "expect", "transfer-encoding", "content-length")}
            upstream.request(self.command, self.path, body, {**headers, "Content-Length": str(len(body))})
            got = upstream.getresponse()
            return got, got.read()
        finally:
            upstream.close()

    def _body(self) -> bytes:
        """Return the body of the request. Raises ConnectionError when the client disconnects before its end."""
        if self.headers.get("Expect", "").lower() == "100-continue":
            self.send_response_only(100)
            self.end_headers()
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            data = b""
            while size := int(self._exactly(self.rfile.readline()).split(b";")[0], 16):
                data += self._exactly(self.rfile.read(size), size)
                self.rfile.readline()
            while self._exactly(self.rfile.readline()).strip():
                pass
            return data
        size = int(self.headers.get("Content-Length") or 0)
        return self._exactly(self.rfile.read(size), size)

    @staticmethod
    def _exactly(data: bytes, size: int = 1) -> bytes:
        if len(data) < size:
            raise ConnectionError("the client is gone")
        return data

    def _answer(self, status: int, headers: list[tuple[str, str]], data: bytes, size: str | None = None,
                cut: bool = False) -> None:
        self.send_response_only(status)
        for k, v in headers:
            self.send_header(k, v)
        self.send_header("Content-Length", size if size is not None else str(len(data)))
        self.end_headers()
        with contextlib.suppress(OSError):
            if self.command != "HEAD":
                self.wfile.write(data[:len(data) // 2] if cut else data)
            self.wfile.flush()
        if cut:
            self._break()

    def _break(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


class _Proxy(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, upstream: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream = upstream
        self.trouble: Trouble | None = None
        self.lock, self.asking = threading.Lock(), threading.Lock()
        self.seen: list[Request] = []
        self.working = 0                                # requests that have come and are not answered yet
        self.idle = threading.Condition()

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        with self.idle:
            self.working += 1
        try:
            yield
        finally:
            with self.idle:
                self.working -= 1
                self.idle.notify_all()

    def decide(self, request: Request) -> str | None:
        with self.lock:
            self.seen.append(request)
            return self.trouble(request.method, request.path, len(self.seen) - 1) if self.trouble else None

    def handle_error(self, *_: object) -> None:
        pass                                            # tests make clients give up; this is no error


class S3Server:
    def __init__(self, folder: Path) -> None:
        log = folder / "moto.log"
        with log.open("w") as file:
            # port 0: the system picks a free one, and the server says which
            self.process = subprocess.Popen(
                [sys.executable, "-c", "from moto.server import main; main(['-H', '127.0.0.1', '-p', '0'])"],
                stdout=file, stderr=subprocess.STDOUT, env={**os.environ, **KEYS, "PYTHONUNBUFFERED": "1"})
        address = until(lambda: re.search(r"http://127\.0\.0\.1:(\d+)\s", log.read_text()), 300,
                        "the start of moto's server", job=self.process, log=log)
        self.proxy = _Proxy(int(address[1]))
        threading.Thread(target=self.proxy.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.proxy.server_port}"

    def environment(self) -> dict[str, str]:
        return {**KEYS, "AWS_ENDPOINT_URL": self.url, "AWS_DEFAULT_REGION": "us-east-1",
                "AWS_EC2_METADATA_DISABLED": "true", "AWS_CONFIG_FILE": os.devnull,
                "AWS_SHARED_CREDENTIALS_FILE": os.devnull}

    def trouble(self, decide: Trouble | None) -> None:
        """Let `decide` name the faults of the requests from now on. Waits until earlier requests are answered: that of
        a killed client may still be on its way into a bucket."""
        with self.proxy.idle:
            assert self.proxy.idle.wait_for(lambda: not self.proxy.working, 300), "a request has no answer"
        with self.proxy.lock:
            self.proxy.trouble = decide
            self.proxy.seen.clear()

    def killed_at(self, which: Callable[[str, str], bool], *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run `tokenmill ARGUMENTS`, and kill it (SIGKILL) when the server has a request for which
        `which(method, path)` is true. This request is performed all the same."""
        def kill(method: str, path: str, number: int) -> None:
            if which(method, path):
                signal_all(children_of(server_pid()), signal.SIGKILL)

        self.trouble(kill)
        done = command("pipeline.cli", *arguments)
        self.trouble(None)
        return done

    @property
    def requests(self) -> list[Request]:
        """The requests since the last call of `trouble`."""
        with self.proxy.lock:
            return list(self.proxy.seen)

    def close(self) -> None:
        self.proxy.shutdown()
        self.proxy.server_close()
        self.process.kill()
        self.process.wait()
