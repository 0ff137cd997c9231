"""The watch over a cluster's head: silent while it answers, one line when it does not, one more the next time."""

from __future__ import annotations

import socket
import time

from pipeline.engine import head


def until(condition) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def listen(port: int = 0) -> socket.socket:
    found = socket.socket()
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    found.bind(("127.0.0.1", port))
    found.listen(64)
    return found


def test_a_head_that_goes_is_said_once_each_time(monkeypatch, caplog):
    monkeypatch.setattr(head, "CHECK_S", 0.05)
    server = listen()
    port = server.getsockname()[1]
    closed = head.mind_head(f"127.0.0.1:{port}")
    try:
        time.sleep(0.5)
        assert not caplog.messages
        for times in (1, 2):
            server.close()
            until(lambda times=times: len(caplog.messages) == times)
            time.sleep(0.3)
            assert len(caplog.messages) == times, "once is enough"
            assert f"127.0.0.1:{port}" in caplog.messages[-1] and "run again, on any cluster" in caplog.messages[-1]
            server = listen(port)
            time.sleep(0.3)
    finally:
        closed.set()
        server.close()
