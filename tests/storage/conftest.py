"""Fixtures for tests over a real S3 protocol: one server for all tests, and a new bucket for each test."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator

import pytest

from tests.storage.s3_server import S3Server

# gcsfs reads this at its import; without it, gcsfs would ask Google's control plane for the kind of every bucket
os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
os.environ.setdefault("NO_GCE_CHECK", "true")


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory) -> Iterator[S3Server]:
    pytest.importorskip("s3fs")
    pytest.importorskip("moto.server")
    server = S3Server(tmp_path_factory.mktemp("s3"))
    yield server
    server.close()


@pytest.fixture
def s3(s3_server, monkeypatch, tmp_path) -> Iterator[S3Server]:
    """The S3 server without faults. This process is set up to use it, with a file cache of its own."""
    for name, value in s3_server.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TOKENMILL_CACHE", str(tmp_path / "cache"))
    s3_server.trouble(None)
    yield s3_server
    s3_server.trouble(None)


@pytest.fixture
def bucket(s3) -> str:
    """The URL of a new bucket."""
    import s3fs

    name = f"t-{uuid.uuid4().hex}"
    s3fs.S3FileSystem(skip_instance_cache=True).mkdir(name)
    return f"s3://{name}"
