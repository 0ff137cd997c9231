"""If a host cannot be reached, this is reported immediately and once. If a server fails, this is not mistaken for a
missing file."""

from __future__ import annotations

import socket

import fsspec
import pytest

from pipeline.cli.app import run_command
from pipeline.plan.inputs import list_source
from pipeline.store.fs import StoreError
from pipeline.store.remote import PROBE_S, Remote, connect
from tests.simulate.clock import VirtualClock


@pytest.fixture
def nobody(monkeypatch):
    """Makes all host names unknown, and forbids waiting. The list of attempted connections, each with its timeout."""
    tried = []

    def refuse(address, timeout=None, *_, **__):
        tried.append((*address, timeout))
        raise socket.gaierror(-2, "Name or service not known")

    def wait(_):
        raise AssertionError("waited")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(Remote, "clock", VirtualClock(asleep=wait))
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    return tried


@pytest.mark.parametrize(("url", "host"), [
    ("https://no-such-host.invalid/a/b.txt", "no-such-host.invalid"), ("hf://datasets/u/d/*.jsonl", "huggingface.co")])
def test_a_run_ends_before_it_begins(nobody, tmp_path, capfd, url, host):
    if url.startswith("hf"):
        pytest.importorskip("huggingface_hub")
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"version: 1\nsources: {{s: {{read: jsonl, path: '{url}'}}}}\ndatasets: {{d: {{from: s}}}}\n")
    arguments = ["run", str(recipe), "--store", str(tmp_path / "store"), "--backend", "inline", "--quiet"]
    assert run_command(arguments) == 1
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith(f"error: cannot reach {host}:443 for {url.rpartition('/')[0]}: Name or service not known; ")
    assert nobody == [(host, 443, PROBE_S)]


def test_behind_a_proxy_the_proxy_is_asked_and_nobody_else(nobody, monkeypatch):
    monkeypatch.setenv("https_proxy", "http://proxy.invalid:3128")
    connect("https://no-such-host.invalid").reach()
    connect("s3://bucket").reach() if _has("s3fs") else None
    assert nobody == []


def _has(package: str) -> bool:
    from importlib.util import find_spec

    return find_spec(package) is not None


def test_a_web_server_that_fails_is_asked_again_and_not_taken_for_one_without_the_file(monkeypatch):
    """fsspec makes a FileNotFoundError of whatever went wrong."""
    answers = [ConnectionResetError("reset"), None]

    def info(path, **_):
        if (error := answers.pop(0)) is not None:
            raise FileNotFoundError(path) from error
        return {"type": "file", "size": 3}

    remote = connect("http://127.0.0.1:9")
    monkeypatch.setattr(remote.fs, "info", info)
    monkeypatch.setattr(remote, "clock", VirtualClock())
    entry = remote.head("a.txt")
    assert entry is not None and entry.size == 3 and answers == []
    answers += [ValueError("404")]
    assert remote.head("b.txt") is None


def test_a_hub_that_is_switched_off_is_not_asked_ten_times(monkeypatch):
    errors = pytest.importorskip("huggingface_hub.errors")
    monkeypatch.setitem(fsspec.config.conf, "hf", {"endpoint": "http://127.0.0.1:9", "token": False,
                                                   "skip_instance_cache": True})
    asked = []

    def off(*_, **__):
        asked.append(1)
        raise errors.OfflineModeIsEnabled("offline mode is enabled")

    monkeypatch.setattr("pipeline.store.remote.Remote.reach", lambda self: None)
    monkeypatch.setattr("huggingface_hub.HfFileSystem.glob", off)
    with pytest.raises(StoreError, match="HF_HUB_OFFLINE is set: unset it"):
        list_source("s", ["hf://datasets/u/d/*.jsonl"])
    assert asked == [1]
