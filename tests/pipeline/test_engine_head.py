"""The watch over a cluster's head: it prints nothing while the head answers, one line when it stops answering, and one
more the next time."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
from collections.abc import Iterator
from types import SimpleNamespace

from pipeline.engine.backends import head


class Server(socketserver.TCPServer):
    allow_reuse_address = True


@contextlib.contextmanager
def answering(port: int) -> Iterator[None]:
    with Server(("127.0.0.1", port), socketserver.BaseRequestHandler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()


def test_a_head_that_goes_is_said_once_each_time(monkeypatch, caplog):
    looks = threading.Semaphore(0)

    def connect(address, timeout):
        try:
            return socket.create_connection(address, timeout=120)        # a busy machine answers late, and does answer
        finally:
            looks.release()

    def looked(times):
        while looks.acquire(blocking=False):           # those before now do not count
            pass
        for _ in range(times):
            assert looks.acquire(timeout=120)

    monkeypatch.setattr(head, "socket", SimpleNamespace(create_connection=connect))
    with socket.socket() as held:                        # the port is nobody else's while nobody listens there
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        with answering(port):
            others = threading.enumerate()
            closed = head.watch_head(f"127.0.0.1:{port}", every_s=0.02)
            [watch] = set(threading.enumerate()) - set(others)
            looked(5)
        try:
            for times in (1, 2):
                looked(head.MISSES + 4)
                assert len(caplog.messages) == times, "once is enough"
                assert f"127.0.0.1:{port}" in caplog.messages[-1] and "run again, on any cluster" in caplog.messages[-1]
                with answering(port):
                    looked(5)
                    assert len(caplog.messages) == times
        finally:
            closed.set()
            watch.join()
