"""To which servers we send our token, which names a run may have, and that nothing of a secret or of a hostile page is
shown or stored."""

from __future__ import annotations

import json
import logging
import os
import shlex
from pathlib import Path

import pytest

from pipeline.base import auth
from pipeline.base.auth import ClusterError
from pipeline.cluster import attempts, connect
from pipeline.cluster.driver_log import DriverLog
from pipeline.engine.messages import Failed, Failure
from pipeline.store.fs import Store
from tests.gcs import gcs
from tests.pipeline.cli_site import process
from tests.pipeline.conftest import TOKEN

pytestmark = pytest.mark.usefixtures("no_token")
SECRET = "wJalrXUtnFEMI+K7MDENG"


# -- a cluster to attach to ------------------------------------------------------------------------------------------
def test_a_cluster_that_wants_a_token_is_asked_whether_it_takes_ours(monkeypatch):
    with gcs(TOKEN) as (address, there):
        with pytest.raises(ClusterError, match="wants a token, and this shell has none"):
            connect.check_cluster(address, insecure_local=True)
        assert there.seen == [None]
        monkeypatch.setenv("RAY_AUTH_TOKEN", "another-token-than-that")
        with pytest.raises(ClusterError, match="does not accept our token") as refused:
            connect.check_cluster(address)
        assert "another-token" not in str(refused.value)
        monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
        assert connect.check_cluster(address) == address
        assert there.seen[-2:] == [None, f"Bearer {TOKEN}"]


def test_an_open_cluster_is_asked_without_our_token(monkeypatch):
    from pipeline.cluster import jobs

    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    with gcs(None) as (address, there):
        with pytest.raises(ClusterError, match="anybody who reaches it can run code on it"):
            connect.check_cluster(address)
        assert jobs.check_gcs(address, insecure_local=True) is False
        assert set(there.seen) == {None}


def test_no_proxy_stands_between_us_and_a_cluster_on_loopback(serve, monkeypatch):
    """A proxy of the environment would be handed the token."""
    from pipeline.cluster import jobs

    url, asked = serve()
    proxy, overheard = serve(wants=None)
    for name in ("http_proxy", "HTTP_PROXY", "grpc_proxy", "all_proxy"):
        monkeypatch.setenv(name, proxy)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    auth.check_job_server(url)
    before = len(asked)
    with pytest.raises(ClusterError):                    # it answers, but not like a Ray
        jobs.state(url, "tokenmill-x")
    assert len(asked) > before and overheard == []
    assert "no_proxy" not in os.environ and os.environ["http_proxy"] == proxy
    with gcs(TOKEN) as (address, _):
        assert jobs.check_gcs(address) is True
    assert overheard == []


@pytest.mark.parametrize(("failure", "waits"), [
    (ConnectionError("ray cannot connect"), True), (TimeoutError("too late"), True),
    (RuntimeError("Version mismatch: The cluster was started with:\n    Ray: 2.1\n    Python: 3.12.1"), False)])
def test_a_run_waits_for_a_cluster_only_if_it_does_not_answer(failure, waits, tmp_path, monkeypatch):
    """A cluster with another version of Ray never takes the run, and those behind it in the queue must not wait."""
    from pipeline.engine.backends import ray_backend

    def init(*_, **__):
        raise failure

    monkeypatch.setattr(ray_backend.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray_backend.ray, "init", init)
    with pytest.raises(ClusterError, match="--address head:6379: cannot attach") as refused:
        ray_backend.RayBackend(Store(tmp_path / "store"), address="head:6379").start()
    assert isinstance(refused.value, auth.NoAnswer) == waits
    assert " ".join(str(failure).split()) in str(refused.value)


@pytest.mark.parametrize("command", [["run", "recipe.yaml", "--store", "store"], ["doctor"]])
def test_commands_that_attach_say_what_is_missing(command, recipe, tmp_path, monkeypatch, tokenmill):
    monkeypatch.chdir(tmp_path)
    for wants, word in ((TOKEN, "has none"), (None, "anybody who reaches it")):
        with gcs(wants) as (address, there):
            said = tokenmill(*command, "--address", address)
        assert said.code == 1 and word in said.out + said.err and set(there.seen) == {None}
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("text", ["first-half-of-it\nsecond-half-of-it", "töken-of-the-cluster", "twowords apart"])
def test_what_is_no_token_is_not_quoted(text, serve, tmp_path, monkeypatch):
    url, seen = serve()
    (tmp_path / "token").write_text(text)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    with pytest.raises(ClusterError, match="one word of ASCII") as refused:
        auth.check_job_server(url)
    assert not any(word in str(refused.value) for word in text.split())
    assert not any(given for _, _, given in seen)


def test_an_empty_token_is_none(serve, tmp_path, monkeypatch):
    url, _ = serve()
    monkeypatch.setenv("RAY_AUTH_TOKEN", " ")
    (tmp_path / "token").write_text("\n")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    assert auth.use_token() is None and "RAY_AUTH_MODE" not in os.environ
    with pytest.raises(ClusterError, match="has none"):
        auth.check_job_server(url)


# -- an address that stands in a store -------------------------------------------------------------------------------
def test_a_store_does_not_say_where_our_token_goes(serve, tmp_path, monkeypatch, tokenmill):
    """Whoever writes run.json could have it sent to a server of his own."""
    url, seen = serve()
    monkeypatch.setattr(auth, "loopback", lambda host: False)
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    store = Store(tmp_path / "store")
    attempts.note_attempt(store, "r", 1, "job", job="j", address=url)
    for command in ("status", "logs", "cancel"):
        said = tokenmill(command, "r", "--store", store.root)
        assert said.code == 0 and f"export TOKENMILL_ADDRESS={url}" in said.out + said.err, command
        assert seen == [], command
    monkeypatch.setenv("TOKENMILL_ADDRESS", url + "/")
    attempts.note_attempt(store, "r", 2, "job", job="j", address=url)
    tokenmill("status", "r", "--store", store.root)
    assert [given for _, _, given in seen][:2] == [None, f"Bearer {TOKEN}"]
    attempts.note_attempt(store, "r", 3, "job", job="j", address="file:///etc")
    assert "not the URL of a job server" in tokenmill("status", "r", "--store", store.root).out


def test_a_cancel_that_cannot_reach_the_job_says_so_beside_its_json(tmp_path, tokenmill):
    store = Store(tmp_path / "store")
    attempts.note_attempt(store, "r", 1, "job", job="j", address="http://127.0.0.1:1")
    said = tokenmill("cancel", "r", "--store", store.root, "--json")
    assert said.json() == [{"run": "r", "attempt": 1, "was": "submitted", "asked": True}]
    assert "its job cannot be stopped from here" in said.err


def test_a_head_that_may_not_read_the_store_says_so(tmp_path, monkeypatch):
    from pipeline.cli.cluster import seen_by_the_head
    from pipeline.cli.errors import UserError

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    attempts.note_attempt(Store(tmp_path / "store"), "r", 1, "job")
    assert seen_by_the_head("r", str(tmp_path / "store"))[1] == "r"
    with pytest.raises(UserError, match="does not see run 'q'"):
        seen_by_the_head("q", str(tmp_path / "store"))
    monkeypatch.setattr(Store, "read", refuse)
    with pytest.raises(UserError, match=r"cannot read .*run\.json: Permission denied"):
        seen_by_the_head("r", str(tmp_path / "store"))


# -- names -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["a\nb", "a\x1b[2J", "-rf", ".hidden", "n" * 201, "", "..", "a/b", "\0"])
def test_names_of_runs_that_make_trouble(name, recipe, tmp_path, tokenmill):
    for command in (["run", recipe], ["submit", recipe, "--address", "http://127.0.0.1:1"]):
        said = tokenmill(*command, "--store", tmp_path / "store", f"--name={name}")
        assert said.code == 2 and "the name of a run is the name of a folder" in said.err and "\x1b" not in said.err
    assert not (tmp_path / "store").exists()


def test_a_recipe_may_be_called_what_it_likes(tmp_path):
    from pipeline.recipe import load_recipe
    from pipeline.run import run_name

    (tmp_path / "a.txt").write_text("A text.")
    names = set()
    for stem in ("my recipe; touch pwned", "x" * 240, "-n", "$(id)", "корпус", "plain-1.2_x"):
        path = tmp_path / f"{stem}.yaml"
        path.write_text("version: 1\nsources: {s: {read: text, path: a.txt}}\ndatasets: {d: {from: s}}\n")
        name = run_name(load_recipe(path))
        assert shlex.quote(name) == name or "корпус" in name
        assert name[0] not in "-." and len(name.encode()) <= 200
        names.add(name.rpartition("-")[0])
    assert {"my-recipe-touch-pwned", "n", "id", "корпус", "plain-1.2_x"} <= names


def test_commands_to_be_copied_are_quoted(tmp_path, tokenmill):
    store = Store(tmp_path / "a store; touch pwned")
    attempts.note_attempt(store, "r $(id)", 1, "job", job="j", address="http://127.0.0.1:1")
    attempts.note_attempt(store, "l $(id)", 1, "local")
    store.write("runs/l $(id)/progress.json", b'{"attempt": 1, "state": "done", "parts": 1, "done": 1}')
    for command, run in (("logs", "l $(id)"), ("report", "l $(id)")):
        said = tokenmill(command, run, "--store", store.root)
        assert f"{shlex.quote(run)} --store {shlex.quote(store.root)}" in said.err, command


# -- secrets ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("value", "what"), [("hf_abcdefghijklmnopqrstuvwx", "a key or token"),
                                             ("AKIAIOSFODNN7EXAMPLE", "a key or token"),
                                             (f"x {SECRET}", "secret environment variable")])
def test_a_setting_that_is_a_secret_is_refused(value, what, recipe, tmp_path, monkeypatch, tokenmill):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    said = tokenmill("run", recipe, "--store", tmp_path / "store", "--set", f"train.logger.key={value}")
    assert said.code == 2 and what in said.err and "train.logger.key" in said.err
    assert value.split()[-1] not in said.err and not (tmp_path / "store").exists()


def test_rows_are_not_copied_to_an_address_with_a_secret(site, tokenmill):
    said = tokenmill("materialize", "first", "--store", site / "store", "--out", "ftp://me:pa55word@h/rows")
    assert said.code == 2 and "--out ftp://***@h/rows" in said.err and "pa55word" not in said.out + said.err


def test_what_is_logged_is_masked(tmp_path, monkeypatch, tokenmill, caplog):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    tokenmill("list", "--store", tmp_path)
    logging.getLogger("tokenmill").warning("cannot read %s, %s", "s3://b/x?X-Amz-Signature=5ecret01", SECRET)
    assert caplog.messages == ["cannot read s3://b/x?X-Amz-Signature=*** ***"]


STAGE = """
import os
from stages.stage import Stage


class Quote(Stage):
    name = "quote"
    confined = False                # otherwise it would have none to quote

    def process(self, doc):
        if doc.text.startswith("Bad"):
            raise ValueError("401 for " + os.environ["AWS_SECRET_ACCESS_KEY"])
        doc.meta["token"] = os.environ.get("RAY_AUTH_TOKEN", "none")
        return None


class Break(Quote):
    name = "break"

    def setup(self):
        raise RuntimeError("no model for " + os.environ["AWS_SECRET_ACCESS_KEY"])
"""


@pytest.mark.parametrize("stage", ["Quote", "Break"])
def test_a_stage_that_quotes_a_secret(stage, tmp_path, tokenmill):
    """Its error is in the quarantine, or in what the run says and leaves when it fails: the secret is in neither."""
    module = f"own_{os.getpid()}_{stage.lower()}"
    (tmp_path / f"{module}.py").write_text(STAGE)
    for i in range(3):
        (tmp_path / f"t{i}.txt").write_text("Bad text." if i == 1 else "A text.")
    (tmp_path / "recipe.yaml").write_text(
        f"version: 1\ncode: [{module}.py]\nsources: {{s: {{read: text, path: 't*.txt'}}}}\n"
        f"datasets: {{d: {{from: s, steps: ['{module}:{stage}']}}}}\nrun: {{max_error_rate: 50%}}\n")
    done = process("run", tmp_path / "recipe.yaml", "--store", tmp_path / "store", "--name", "r", "--backend",
                   "process", "--workers", "1", "--allow-custom-stages", AWS_SECRET_ACCESS_KEY=SECRET,
                   RAY_AUTH_TOKEN=TOKEN)
    assert (done.code == 0) == (stage == "Quote"), done.err
    assert SECRET not in done.out + done.err
    for path in (tmp_path / "store").rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes(), path
    if stage == "Quote":
        [row] = tokenmill("inspect", "d", "--store", tmp_path / "store", "--quarantined", "--json").json()
        assert row["detail"] == "401 for ***"
        kept = tokenmill("inspect", "d", "--store", tmp_path / "store", "--json").json()
        assert [json.loads(doc["meta"])["token"] for doc in kept] == ["none", "none"], "pages are parsed without it"
    else:
        assert "no model for ***" in done.err


def test_a_node_masks_its_own_secrets_before_it_tells_of_a_failure(tmp_path, monkeypatch):
    """The driver may not know them: it has another environment."""
    from types import SimpleNamespace

    from pipeline.engine.worker.limits import ProcessLimits
    from pipeline.engine.worker.supervisor import Supervisor

    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    supervisor = Supervisor(str(tmp_path / "store"), 1, ProcessLimits(), memory_mb=1000, scratch=str(tmp_path))
    try:
        supervisor._failed(SimpleNamespace(id=7), Failure("exception", f"x {SECRET}", traceback=f"y {SECRET}"))
        assert supervisor._events[-1] == Failed(7, Failure("exception", "x ***", traceback="y ***"))
    finally:
        supervisor.close()


def test_a_secret_that_a_driver_says_in_pieces(tmp_path, monkeypatch):
    """A burst that fills the pipe ends anywhere, and a key has many lines."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    log = DriverLog(Store(tmp_path / "store"), "r", 1)
    with open(os.devnull, "wb") as null:
        log._saved = [null.fileno(), null.fileno()]
        log._take("a line\n" * 10_000 + SECRET[:9])
        log._take(SECRET[9:] + "\n-----BEGIN PRIVATE KEY-----\n")
        for line in ("MIIEow", "IBAAKC"):
            log._take(line + "\n")
        log._take("-----END PRIVATE KEY-----\nafter it\n")
        log._take("-----BEGIN of something else\nand more")
        log._take("", last=True)
    said = log._text.decode()
    assert said == "a line\n" * 10_000 + "***\n***\nafter it\n-----BEGIN of something else\nand more"


# -- what a terminal would obey --------------------------------------------------------------------------------------
HOSTILE = "before\x1b]52;c;cm0gLXJmIH4=\x07\x1b[2J\x9b31m after\r\nnext\tline"


def test_a_page_does_not_command_the_terminal(tmp_path: Path, tokenmill, monkeypatch):
    from pipeline.base.visible import visible
    from pipeline.cli.inspect import card

    assert visible(HOSTILE) == "before\\x1b]52;c;cm0gLXJmIH4=\\x07\\x1b[2J\\x9b31m after\nnext\tline"
    row = {"id": "1", "source": HOSTILE, "url": HOSTILE, "text": HOSTILE, "chars": len(HOSTILE), "meta": HOSTILE,
           "stage": None, "reason": HOSTILE, "detail": HOSTILE}
    assert not set(card(row)) & set("\x1b\x07\x9b\r")
    monkeypatch.setattr("typer._click.utils.should_strip_ansi", lambda *_: False, raising=False)
    store = Store(tmp_path / "store")
    attempts.note_attempt(store, "r", 1, "job", job="j", address="http://127.0.0.1:1")
    store.write(attempts.piece_name("r", 1, 1), HOSTILE.encode())
    store.write("runs/r/progress.json", json.dumps({
        "attempt": 1, "state": "failed", "parts": 1, "done": 0, "nodes": {}, "error": HOSTILE,
        "failures": [{"node": "d", "label": HOSTILE, "kind": "x", "message": HOSTILE, "times": 1}]}).encode())
    for command in ("logs", "status"):
        said = tokenmill(command, "r", "--store", store.root)
        assert "after" in said.out and not set(said.out) & set("\x1b\x07\x9b\r"), command
