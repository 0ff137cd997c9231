"""Base classes of the small HTTP servers that these tests run."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True          # the body of an answer would wait 40 ms for the ACK of its headers
    server: Server

    def log_message(self, *_: object) -> None:
        pass

    def send(self, data: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def send_json(self, doc: object, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send(json.dumps(doc).encode(), status, {"Content-Type": "application/json", **(headers or {})})

    def send_range(self, data: bytes, headers: dict[str, str]) -> None:
        """Send `data`, or the range of it that the request asks for."""
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked is None:
            self.send(data, 200, headers)
            return
        a, b = int(asked[1]), min(int(asked[2] or len(data)) + 1, len(data))
        if a >= len(data):
            self.send_json({"error": {"code": 416, "message": "Range"}}, 416)
        else:
            self.send(data[a:b], 206, {**headers, "Content-Range": f"bytes {a}-{b - 1}/{len(data)}"})


class Server(ThreadingHTTPServer):
    """An HTTP server. Tests keep its state (such as stored objects) in attributes of the object."""

    daemon_threads = True
    request_queue_size = 128                                    # the default, 5, is too few for these tests

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def serving(handler: type[Handler], **state: Any) -> Iterator[Server]:
    server = Server(("127.0.0.1", 0), handler)
    vars(server).update(state)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
