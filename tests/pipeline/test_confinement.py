"""What a parser that an attacker has taken over can do in a worker: nothing that its task does not need.

Tests are skipped where the kernel has neither seccomp nor Landlock; the other protections are tested everywhere.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
import textwrap
import threading
from dataclasses import replace
from pathlib import Path

import pyarrow.dataset as ds
import pytest

from pipeline.base import confinement
from pipeline.engine.backends.local import ProcessBackend
from pipeline.engine.driver.scheduler import Scheduler
from pipeline.recipe import load_recipe
from pipeline.run import make_backend, run_recipe
from pipeline.store.broker import Broker, Server
from pipeline.store.fs import Store
from pipeline.store.remote import InMemory
from tests.pipeline import engine_tasks as t

pytestmark = [pytest.mark.usefixtures("room"),
              pytest.mark.skipif(sys.platform != "linux", reason="child processes need Linux")]
SECRETS = ("RAY_AUTH_TOKEN", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "HF_TOKEN", "GOOGLE_APPLICATION_CREDENTIALS",
           "AZURE_STORAGE_KEY", "WANDB_API_KEY", "PGPASSWORD", "PYTHON_KEYRING_PASSWORD", "DATABASE_URL")
needs_kernel = pytest.mark.skipif(bool(confinement.missing(confinement.support())),
                                  reason=f"this kernel: {confinement.missing(confinement.support())}")


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


@pytest.fixture
def secrets(monkeypatch, tmp_path):
    for name in SECRETS:
        monkeypatch.setenv(name, "hunter2")
    (tmp_path / "token").write_text("hunter2")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))


@contextlib.contextmanager
def targets(tmp_path):
    """Within this context there are targets for t.Hostile: a listener on loopback, another process of this user with a
    secret, and a file outside. Yields the arguments of the task."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        other = subprocess.Popen(["sleep", "600"], env={"SECRET": "hunter2"})
        try:
            yield {"port": listener.getsockname()[1], "other": other.pid, "token": str(tmp_path / "token"),
                   "outside": str(tmp_path / "outside")}
        finally:
            other.kill()
            other.wait()


@pytest.fixture
def hostile(tmp_path):
    with targets(tmp_path) as arguments:
        yield arguments


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    """The folder in which an unconfined process stores kernels that numba has compiled."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache" / "kernels"))
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache" / "kernels"


def results_of(store: Store, records: list) -> list[dict]:
    return [json.loads(store.read(r.files["results.json"].path)) for r in records]


def check_hostile(results: dict) -> None:
    """Check the results of t.Hostile in a confined worker."""
    assert not {*SECRETS, "RAY_AUTH_TOKEN_PATH"} & set(results["names"])
    assert {"PATH", "PYTHONPATH", "TMPDIR", "OMP_NUM_THREADS", "NUMBA_CACHE_DIR"} <= set(results["names"])
    assert results["core"] is False
    assert results["privileges"] is False
    denied = ("parent", "other", "token", "connect", "unix", "datagrams", "ring", "shell", "trace", "kill", "write",
              "kernels of others")
    assert {name: results[name] for name in denied} == dict.fromkeys(denied, "PermissionError")
    assert (results["pair"], results["thread"], results["scratch"]) == ("pair", None, 1)


@needs_kernel
def test_a_parser_that_was_taken_over_gets_nowhere(secrets, hostile, kernels, store, tmp_path):
    backend = ProcessBackend(store, 1, scratch=str(tmp_path))
    records = Scheduler(backend, t.MemoryLog()).run([t.spec(t.Hostile, **hostile)])
    [results] = results_of(store, records)
    check_hostile(results)
    assert results["kernels"] == str(kernels / "sealed"), "numba unpickles what it finds there"
    assert not (tmp_path / "outside").exists()


def test_a_task_that_opted_out_has_what_it_asked_for_but_not_the_clusters_token(secrets, hostile, kernels, store,
                                                                                   tmp_path):
    backend = ProcessBackend(store, 1, scratch=str(tmp_path))
    spec = replace(t.spec(t.Hostile, **hostile), confined=False)
    [results] = results_of(store, Scheduler(backend, t.MemoryLog()).run([spec]))
    assert set(SECRETS) - set(results["names"]) == {"RAY_AUTH_TOKEN"}
    assert (results["connect"], results["shell"], results["write"]) == (None, 0, 1)
    assert results["kernels"] == str(kernels)


@needs_kernel
def test_only_declared_programs_start_and_a_sealed_worker_gives_way_to_a_fresh_one(store, kernels, tmp_path):
    start = ["true", "/bin/sh", sys.executable]
    specs = [t.spec(t.Programs, order=i, weight=9 - i, programs=programs, start=start, number=i)
             for i, programs in enumerate(([], ["true"], ["true"], []))]
    records = Scheduler(ProcessBackend(store, 1, scratch=str(tmp_path)), t.MemoryLog()).run(specs)
    first, second, third, last = results_of(store, records)
    refused = dict.fromkeys(start, "PermissionError")
    assert {k: first[k] for k in start} == refused
    assert {k: second[k] for k in start} == {**refused, "true": 0}
    assert first["pid"] != second["pid"]                         # it was sealed without any
    assert second["pid"] == third["pid"] == last["pid"]          # what suits it, it takes
    sealed = str(kernels / "sealed")
    assert [r["kernels before"] for r in (first, second, third, last)] == [str(kernels)] * 2 + [sealed] * 2
    assert {r["kernels"] for r in (first, second, third, last)} == {sealed}


STAGE = """
    import os, socket, subprocess
    from stages.stage import Stage

    class Curious(Stage):
        name = "curious"

        def programs(self):
            return ("true",)

        def setup(self):
            socket.create_connection(("127.0.0.1", {port}), timeout=5).close()

        def process(self, doc):
            if doc.text == "socket":
                socket.create_connection(("127.0.0.1", {port}), timeout=5).close()
            elif doc.text != "fine":
                subprocess.run([doc.text], check=True)
            doc.meta["secret"] = os.environ.get("AWS_SECRET_ACCESS_KEY", "")

    class Open(Curious):
        confined = False
"""


@pytest.fixture
def recipe(tmp_path, hostile):
    def make(stage):
        (tmp_path / f"its_{stage.lower()}.py").write_text(textwrap.dedent(STAGE.format(port=hostile["port"])))
        texts = ["fine", "socket", "true", "/bin/ls"]
        (tmp_path / "docs.jsonl").write_text("".join(json.dumps({"id": x, "text": x}) + "\n" for x in texts))
        (tmp_path / "recipe.yaml").write_text(textwrap.dedent(f"""
            version: 1
            code: [its_{stage.lower()}.py]
            sources: {{web: {{read: jsonl, path: docs.jsonl}}}}
            datasets: {{d: {{from: [web], steps: ['its_{stage.lower()}:{stage}']}}}}
            run: {{max_error_rate: 90%}}
            """))
        return load_recipe(str(tmp_path / "recipe.yaml"), allow_custom=True)
    return make


def rows(store, kind) -> list[dict]:
    return ds.dataset(sorted(map(str, (store / kind / "d").glob("part-*.parquet")))).to_table().to_pylist()


@needs_kernel
def test_a_stage_of_ones_own_is_confined_once_it_is_set_up(secrets, recipe, tmp_path):
    summary = run_recipe(recipe("Curious"), str(tmp_path / "store"), make_backend=make_backend("process", 1, None),
                         report=False)
    kept = {row["text"]: json.loads(row["meta"])["secret"] for row in rows(tmp_path / "store", "datasets")}
    assert kept == {"fine": "", "true": ""}
    bad = rows(tmp_path / "store", "quarantine")
    assert [row["reason"] for row in bad] == ["error:PermissionError"] * 2
    assert all("confined = False" in row["detail"] for row in bad)
    assert summary.warnings == []


READER = """
    import socket
    from stages.document import Document, document_id
    from stages.read.reader import Reader

    class Curious(Reader):
        name = "curious"
        suffixes = (".curious",)

        def read(self, local, slice):
            with open(local) as lines:
                for n, text in enumerate(map(str.strip, lines)):
                    if text == "socket":
                        socket.create_connection(("127.0.0.1", {port}), timeout=5).close()
                    yield Document(document_id(slice.source, slice.path, "", n), text, source=slice.source)
"""


@needs_kernel
def test_a_reader_of_ones_own_is_confined(hostile, tmp_path):
    (tmp_path / "its_reader.py").write_text(textwrap.dedent(READER.format(port=hostile["port"])))
    for name, text in (("a", "fine"), ("b", "socket")):
        (tmp_path / f"{name}.curious").write_text(text + "\n")
    (tmp_path / "recipe.yaml").write_text(textwrap.dedent("""
        version: 1
        code: [its_reader.py]
        sources: {web: {read: 'its_reader:Curious', path: '*.curious'}}
        datasets: {d: {from: [web], steps: []}}
        run: {max_bad_files: 1, max_error_rate: 90%}
        """))
    run_recipe(load_recipe(str(tmp_path / "recipe.yaml"), allow_custom=True), str(tmp_path / "store"),
               make_backend=make_backend("process", 1, None), report=False)
    assert [row["text"] for row in rows(tmp_path / "store", "datasets")] == ["fine"]
    [bad] = rows(tmp_path / "store", "quarantine")
    assert "PermissionError" in f"{bad['reason']} {bad['detail']}"


def test_a_stage_that_opted_out_is_not_and_the_run_says_so(secrets, recipe, tmp_path):
    summary = run_recipe(recipe("Open"), str(tmp_path / "store"), make_backend=make_backend("process", 1, None),
                         report=False)
    kept = {row["text"]: json.loads(row["meta"])["secret"] for row in rows(tmp_path / "store", "datasets")}
    assert kept == dict.fromkeys(("fine", "socket", "true", "/bin/ls"), "hunter2")
    [warning] = summary.warnings
    assert warning.startswith("its_open:Open is not confined")
    plan = json.loads(Store(tmp_path / "store").read(f"runs/{summary.run}/plan.json"))
    assert plan["unconfined"] == ["its_open:Open"]


def test_environments_are_scrubbed_by_an_allow_list():
    env = {"PATH": "/bin", "TOKENMILL_MODELS": "/m", "TOKENIZERS_PARALLELISM": "false", "LC_ALL": "C", "XDG_X": "1",
           "MY_OWN": "1", "RAY_ADDRESS": "auto", "HTTPS_PROXY": "http://u:p@h", "XDG_URL": "http://u:p@h/",
           "PYTHON_TOKEN": "1", **dict.fromkeys(SECRETS, "hunter2")}
    assert set(confinement.scrubbed(env)) == {"PATH", "TOKENMILL_MODELS", "TOKENIZERS_PARALLELISM", "LC_ALL", "XDG_X"}


def test_all_is_readable_but_what_is_denied(tmp_path):
    for path in ("a/b/secret", "a/b/other", "a/c", "d"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("")
    os.symlink(tmp_path / "a" / "b", tmp_path / "link")
    readable = confinement.all_but([str(tmp_path / "a" / "b" / "secret")])
    below = {os.path.relpath(p, tmp_path) for p in readable if p.startswith(f"{tmp_path}/")}
    assert below == {"a/b/other", "a/c", "d"}
    assert "/proc" in readable and "/" not in readable


def test_a_run_says_once_what_the_kernel_lacks(store, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(confinement, "support", lambda: {"landlock": 0, "seccomp": False})
    backend = ProcessBackend(store, 2, scratch=str(tmp_path))
    backend.start()
    backend.start()
    backend.close()
    [line] = [r.getMessage() for r in caplog.records if "confined" in r.getMessage()]
    assert "no seccomp" in line and "no Landlock" in line


@pytest.fixture
def broker(tmp_path):
    """A broker for a store and one source, both in memory, with the end of the connection that a child has."""
    InMemory("memory://own").write("objects/k/part", b"0123456789")
    InMemory("memory://source").write("x", b"source")
    InMemory("memory://elsewhere").write("x", b"secret")
    (tmp_path / "storage").mkdir()
    ours, theirs = socket.socketpair()
    server = Server("memory://own", ["memory://source"], str(tmp_path / "storage"))
    thread = threading.Thread(target=server.run, args=(theirs,))
    thread.start()
    yield Broker(ours)
    ours.close()
    thread.join()
    theirs.close()


def test_the_broker_serves_the_store_and_the_sources_of_the_run_alone(broker, tmp_path):
    own = broker.connect("memory://own")
    assert own.read("objects/k/part") == b"0123456789"
    assert own.read_range("objects/k/part", 3, 5) == b"34"
    assert own.head("objects/k/part").size == 10
    assert own.head("objects/k/nothing") is None
    assert broker.connect("memory://source").read("x") == b"source"
    with pytest.raises(FileNotFoundError):
        own.read("objects/k/nothing")
    for root in ("memory://elsewhere", "http://169.254.169.254"):
        with pytest.raises(PermissionError, match="neither the store nor a source"):
            broker.connect(root).read("x")
    with pytest.raises(PermissionError, match="not below its root"):
        own.read("../elsewhere/x")


@pytest.mark.parametrize("request_", [struct.pack(">I", 1 << 31), struct.pack(">I", 14) + b'{"bytes": 1e9}',
                                      struct.pack(">I", 22) + b'{"bytes": 99999999999}'])
def test_a_request_that_would_fill_the_broker_ends_the_line(tmp_path, request_):
    ours, theirs = socket.socketpair()
    server = Server("memory://own", [], str(tmp_path))
    thread = threading.Thread(target=server.serve, args=(theirs,))
    thread.start()
    with ours:
        ours.settimeout(300)
        ours.sendall(request_)
        assert ours.recv(1) == b"", "it waits for the rest of it"
    thread.join()


def test_what_a_reader_needs_of_a_file_is_asked_of_the_child(broker, tmp_path):
    source = broker.connect("memory://source")
    local = source.fetch("x", "", 6, None, lambda size, read: [(0, 1), (4, size)] if read(1, 3) == b"ou" else [])
    assert local.startswith(str(tmp_path / "storage"))
    assert Path(local).read_bytes() == b"source"                 # so small a gap is not worth a hole

    def damaged(size, read):
        raise EOFError("the footer is cut short")

    with pytest.raises(EOFError, match="cut short"):             # the reader's own error, not the end of the broker
        source.fetch("x", "", 6, "other", damaged)
    assert source.read("x") == b"source"
    broker.release()
    assert not list((tmp_path / "storage").iterdir())


def test_a_task_writes_below_the_objects_of_its_store_alone(broker, tmp_path):
    (tmp_path / "out").write_bytes(b"result")
    own = broker.connect("memory://own")
    own.upload(str(tmp_path / "out"), "objects/k/out")
    assert InMemory("memory://own").read("objects/k/out") == b"result"
    own.remove("objects/k/out")
    assert own.head("objects/k/out") is None
    for root, path in (("own", "log/x"), ("own", "objects/../log/x"), ("own", "objects/k/.."), ("source", "objects/x")):
        with pytest.raises(PermissionError):
            broker.connect(f"memory://{root}").upload(str(tmp_path / "out"), path)


@pytest.mark.parametrize("flags", [os.O_PATH, os.O_WRONLY], ids=["path", "write"])
def test_the_broker_reads_no_file_for_a_task_that_the_task_has_not_opened_for_reading(broker, tmp_path, flags):
    (tmp_path / "secret").write_bytes(b"secret")
    file = os.open(tmp_path / "secret", flags)
    with pytest.raises(PermissionError):
        broker.ask({"call": "upload", "root": "memory://own", "path": "objects/sent"}, file=file)
    os.close(file)
    assert broker.connect("memory://own").head("objects/sent") is None


def test_a_broker_that_is_gone_is_the_environments_fault():
    from pipeline.store.errors import EnvironmentFailure

    ours, theirs = socket.socketpair()
    theirs.close()
    with pytest.raises(EnvironmentFailure, match="talks to object storage"):
        Broker(ours).connect("memory://own").read("x")
    ours.close()
