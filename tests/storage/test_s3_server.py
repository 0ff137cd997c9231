"""The S3 server of these tests behaves as S3 does in the cases where moto, on which it is based, does not."""

from __future__ import annotations

import socket

import pytest

from pipeline.store.fs import Store


@pytest.mark.parametrize(("framing", "sent"), [
    ("Content-Length: 100", "half"), ("Content-Length: 100", ""), ("Transfer-Encoding: chunked", "64\r\nhalf"),
    ("Transfer-Encoding: chunked", "4\r\nhalf\r\n")])
def test_what_a_client_did_not_live_to_send_is_no_object(s3_server, bucket, framing, sent):
    """Drivers are killed while they write: half a segment of the log would be a damaged one."""
    path = bucket.removeprefix("s3://") + "/x"
    with socket.create_connection(("127.0.0.1", s3_server.proxy.server_port), timeout=300) as client:
        client.sendall(f"PUT /{path} HTTP/1.1\r\nHost: s3\r\n{framing}\r\n\r\n{sent}".encode())
        client.shutdown(socket.SHUT_WR)
        assert client.recv(1) == b"", "it was answered"
    assert not Store(bucket).exists("x")
