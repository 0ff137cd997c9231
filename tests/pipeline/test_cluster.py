"""The commands about runs on a cluster, tested without a cluster: what is refused, what the store alone can tell, and
what a job is given.

Tests with a real cluster are in tests/e2e/test_cluster.py.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pipeline.base import auth
from pipeline.base.auth import ClusterError, loopback
from pipeline.cluster import attempts
from pipeline.store.fs import Store
from tests.pipeline.cli_site import process
from tests.pipeline.conftest import TOKEN
from tests.pipeline.test_attempts import beat, progress

pytestmark = pytest.mark.usefixtures("no_token")


# -- clusters without a token ----------------------------------------------------------------------------------------
def test_an_open_cluster_is_refused_and_gets_nothing(serve, tokenmill, recipe, tmp_path, monkeypatch):
    url, seen = serve(wants=None)
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    said = tokenmill("submit", recipe, "--address", url, "--store", tmp_path / "store")
    assert said.code == 1 and "anybody who reaches it can run code" in said.err and "--insecure-local" in said.err
    assert "RAY_AUTH_MODE=token" in said.err
    assert seen == [("GET", "/api/version", None)], "it was asked without our token, and got nothing else"
    assert not (tmp_path / "store").exists()


def test_insecure_local_holds_for_loopback_alone(serve, monkeypatch):
    url, _ = serve(wants=None)
    auth.check_job_server(url, insecure_local=True)
    monkeypatch.setattr(auth, "loopback", lambda host: False)
    with pytest.raises(ClusterError, match="loopback alone"):
        auth.check_job_server(url, insecure_local=True)


def test_a_cluster_that_wants_a_token(serve, monkeypatch, tmp_path):
    url, seen = serve()
    with pytest.raises(ClusterError, match="this shell has none; set RAY_AUTH_MODE=token"):
        auth.check_job_server(url, insecure_local=True)
    assert all(given is None for _, _, given in seen)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "another")
    with pytest.raises(ClusterError, match="does not accept our token") as refused:
        auth.check_job_server(url)
    assert "another" not in str(refused.value)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(ClusterError, match="set RAY_AUTH_MODE=token"):
        auth.check_job_server(url)
    monkeypatch.delenv("RAY_AUTH_MODE")
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    with pytest.raises(ClusterError, match=r"RAY_AUTH_TOKEN_PATH=.*No such file"):
        auth.check_job_server(url)
    (tmp_path / "token").write_text(TOKEN + "\n")
    auth.check_job_server(url)
    assert os.environ["RAY_AUTH_MODE"] == "token"             # Ray will send it


def test_a_ray_of_our_own_gets_a_token_unless_the_user_has_one(monkeypatch):
    for name in [m for m in sys.modules if m == "ray"]:
        monkeypatch.delitem(sys.modules, name)
    auth.own_token()
    first = os.environ["RAY_AUTH_TOKEN"]
    assert os.environ["RAY_AUTH_MODE"] == "token" and len(first) == 64
    auth.own_token()
    assert os.environ["RAY_AUTH_TOKEN"] == first
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")                   # whoever says so means it
    auth.own_token()
    assert "RAY_AUTH_TOKEN" not in os.environ


def test_a_redirect_does_not_get_the_token(serve, monkeypatch):
    there, seen = serve(wants=None)
    url, _ = serve(elsewhere=there + "/api/version")
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    with pytest.raises(ClusterError, match="status 302"):
        auth.check_job_server(url, insecure_local=True)
    assert seen == []


@pytest.mark.parametrize(("address", "message"), [
    ("127.0.0.1:6379", "not the URL of a job server"), ("http://", "not the URL"), ("ray://h:10001", "not the URL"),
    ("http://[::1", "not the URL"), ("http://h:99999", "not the URL"), ("http://h:port", "not the URL"),
    ("http://me:pass-word@h:8265", "leave credentials out"), ("http://h:8265/?token=abc", "leave credentials out")])
def test_addresses_that_are_none(tokenmill, recipe, tmp_path, address, message):
    said = tokenmill("submit", recipe, "--address", address, "--store", tmp_path / "store")
    assert said.code == 2 and message in said.err and "pass-word" not in said.err and "abc" not in said.err


def test_nobody_is_there(tokenmill, recipe, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        said = tokenmill("submit", recipe, "--address", f"http://127.0.0.1:{free.getsockname()[1]}", "--store",
                         tmp_path / "store")
    assert said.code == 1 and "nothing answers at" in said.err and "ssh -L" in said.err


def test_what_is_loopback():
    assert all(map(loopback, ("127.0.0.1", "127.9.9.9", "localhost", "::1", "[::1]")))
    assert not any(map(loopback, ("0.0.0.0", "10.0.0.1", "localhost.evil.org", "", None, "::", "head")))


@pytest.mark.parametrize(("arguments", "message"), [
    (["--address", "http://h:8265"], "tokenmill submit"), (["--address", "ray://h:10001"], "Ray Client"),
    (["--address", "head"], "give HOST:6379"), (["--address", "head:99999"], "give HOST:6379"),
    (["--ship-code"], "give --address"), (["--insecure-local"], "give --address"),
    (["--address", "h:1", "--backend", "process"], "leave out --backend")])
def test_run_with_addresses_that_make_no_sense(tokenmill, recipe, tmp_path, arguments, message):
    said = tokenmill("run", recipe, "--store", tmp_path / "store", *arguments)
    assert said.code == 2 and message in said.err and not (tmp_path / "store").exists()


# -- secrets ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("command", ["run", "plan", "submit"])
@pytest.mark.parametrize(("path", "what"), [("ftp://me:pa55word@h/x.txt", "a password"),
                                            ("https://h/x.txt?X-Amz-Signature=5ecret", "a signature")])
def test_a_recipe_that_holds_a_secret_is_refused(tokenmill, recipe, tmp_path, command, path, what):
    recipe.write_text(recipe.read_text().replace("a.txt", f"'{path}'"))
    where = ["--address", "http://127.0.0.1:1"] if command == "submit" else []
    said = tokenmill(command, recipe, "--store", tmp_path / "store", *where)
    assert said.code == 2 and what in said.err and "recipe.yaml:2" in said.err and "environment" in said.err
    assert "pa55word" not in said.err and "5ecret" not in said.err and not (tmp_path / "store").exists()


def test_a_store_whose_url_holds_a_secret_is_refused(tokenmill, recipe):
    for command in (["run", recipe], ["plan", recipe], ["list"], ["status", "r"]):
        said = tokenmill(*command, "--store", "s3://KEY:pa55word@bucket/store")
        assert said.code == 2 and "***@bucket" in said.err and "pa55word" not in said.err


def test_no_secret_gets_into_what_a_failed_run_leaves(tmp_path, recipe, tokenmill, monkeypatch):
    """An error that quotes a secret: not in the message, the progress, or anything else in the store."""
    def fail(*_):
        raise PermissionError(f"GET https://b/x?X-Amz-Signature=5ecret01 with {os.environ['AWS_SECRET_ACCESS_KEY']}")

    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI+K7MDENG")
    monkeypatch.setattr("pipeline.run.drive_all", fail)
    from pipeline.cli.app import run_command

    assert run_command(["run", str(recipe), "--store", str(tmp_path / "store"), "--name", "r", "--json"]) == 1
    said = tokenmill("status", "r", "--store", tmp_path / "store")
    assert "failed" in said.out and "with ***" in said.out
    for path in (tmp_path / "store").rglob("*"):
        if path.is_file():
            assert b"5ecret01" not in path.read_bytes() and b"wJalr" not in path.read_bytes(), path


# -- the store alone -------------------------------------------------------------------------------------------------
def test_status_of_a_finished_run(site, tokenmill):
    said = tokenmill("status", "first", "--store", site / "store")
    assert said.code == 0 and said.out.startswith("first  done") and "report: " in said.out
    assert "extracted" in said.out and "quarantined" in said.out
    assert re.search(r"(\d+) documents read", said.out), said.out
    [found] = tokenmill("status", "first", "--store", site / "store", "--json").json()
    assert found["state"] == "done" and found["how"] == "local" and found["attempt"] == 1
    assert found["done"] == found["parts"] == sum(n["parts"] for n in found["nodes"].values())
    assert 0 < found["docs_read"] < found["docs"] and Path(found["report"]).is_file() and found["failures"] == []
    assert tokenmill("status", "first", "--store", site / "store", "--watch").code == 0
    said = tokenmill("cancel", "first", "--store", site / "store")
    assert said.code == 0 and "nothing to stop" in said.out
    assert not (site / "store" / "runs" / "first" / "cancel.json").exists()
    said = tokenmill("logs", "first", "--store", site / "store")
    assert said.code == 1 and "was not submitted" in said.err


def test_failures_are_shown_with_their_reasons(tmp_path, tokenmill):
    store = Store(tmp_path / "store")
    attempts.note_attempt(store, "r", 1, "local")
    node = {"parts": 4, "done": 1, "running": 1, "failed_attempts": 2, "docs": 7, "seconds": 3, "eta_s": 9}
    progress(store, "r", attempt=1, state="running", seconds=4, nodes={"clean": node},
             running=[{"node": "clean", "label": "b.warc.gz", "seconds": 75.0, "row": 1234}],
             failures=[{"node": "clean", "label": "a.warc.gz", "kind": "lost", "message": "node w3 died\nmore",
                        "times": 2}])
    said = tokenmill("status", "r", "--store", store.root)
    assert said.out.startswith("r  died") and "tokenmill resume" in said.out
    assert "clean  a.warc.gz × 2  lost: node w3 died\n" in said.out and "b.warc.gz  1:15  row 1,234" in said.out
    assert tokenmill("status", "r", "--store", store.root, "--watch").code == 1
    [row] = tokenmill("list", "--store", store.root, "--json").json()
    assert row["state"] == "died"
    beat(store, "r")
    assert "  r  running" in tokenmill("list", "--store", store.root).out


def test_a_run_nobody_knows(tmp_path, tokenmill):
    (tmp_path / "store").mkdir()
    for command in ("status", "logs", "cancel", "resume"):
        said = tokenmill(command, "nosuch", "--store", tmp_path / "store")
        assert said.code == 2 and "no run 'nosuch'" in said.err, command


def test_a_run_is_cancelled_through_the_store_and_resumed(tmp_path, tokenmill):
    """The documents are those of a run in one go."""
    from pipeline.engine.backends.inline import InlineBackend
    from pipeline.engine.driver.endings import Interrupted
    from pipeline.recipe import load_recipe
    from pipeline.run import make_backend, run_recipe
    from pipeline.store.dataset_hash import dataset_hash

    (tmp_path / "docs").mkdir()
    for i in range(60):
        (tmp_path / "docs" / f"{i:03}.txt").write_text(f"Text number {i} of many, some of which are alike. " * 20)
    recipe, store, said = tmp_path / "recipe.yaml", tmp_path / "store", []
    recipe.write_text("version: 1\nsources: {s: {read: text, path: docs}}\nrun: {partition: 2KB}\n"
                      "datasets: {read: {from: s}, clean: {from: read, steps: [exact]}}\n")

    class Cancelled(InlineBackend):
        """A backend during whose fourth task somebody asks for the run to be stopped."""

        def wait(self, timeout):
            self.waits = getattr(self, "waits", 0) + 1
            if self.waits == 4:
                said.append(tokenmill("cancel", "r", "--store", store))
                for thread in threading.enumerate():
                    if thread.name == "cancellation":          # it ends when it has passed the request on
                        thread.join(120)
            return super().wait(timeout)

    with pytest.raises(Interrupted, match="run again to go on"):
        run_recipe(load_recipe(recipe), str(store), make_backend=Cancelled, run="r")
    assert said[0].code == 0 and "was asked to stop" in said[0].out
    stopped = attempts.standing(Store(store), "r")
    assert stopped.state == "stopped" and 0 < stopped.progress["done"] < stopped.progress["parts"]
    done = tokenmill("resume", "r", "--store", store, "--backend", "inline")
    assert done.code == 0 and "reused" in done.out
    assert attempts.standing(Store(store), "r").attempt == 2
    run_recipe(load_recipe(recipe), str(tmp_path / "whole"), make_backend=make_backend("inline", 1, None), report=False)
    for name in ("read", "clean"):
        assert dataset_hash(Store(store), name) == dataset_hash(Store(tmp_path / "whole"), name)
    assert json.loads((store / "runs/r/plan.json").read_text())["recipe"] != ""


def test_a_resumed_recipe_is_the_one_that_was_run(site, tmp_path):
    from pipeline.cli.cluster import kept_recipe
    from pipeline.recipe import load_recipe

    with kept_recipe(Store(site / "store"), "first", False) as kept:
        original = load_recipe(site / "recipe.yaml")
        assert kept.digest() == original.digest() and kept.name == original.name
        assert kept.canonical_yaml() == original.canonical_yaml()


# -- code of one's own -----------------------------------------------------------------------------------------------
STAGE = ("import pathlib\nfrom stages.stage import Stage\npathlib.Path(__file__).with_suffix('.ran').touch()\n\n\n"
         "class Keep(Stage):\n    name = 'keep'\n\n    def process(self, doc):\n        return None\n")


def test_a_recipe_cannot_run_code_unless_that_is_allowed(serve, tmp_path, recipe, tokenmill):
    """Neither when it is submitted nor when it is resumed from the store."""
    module = tmp_path / f"own_{os.getpid()}_c.py"
    module.write_text(STAGE)
    recipe.write_text(f"version: 1\ncode: [{module.name}]\nsources: {{s: {{read: text, path: a.txt}}}}\n"
                      f"datasets: {{d: {{from: s, steps: ['{module.stem}:Keep']}}}}\n")
    url, seen = serve()
    store = tmp_path / "store"
    said = tokenmill("submit", recipe, "--address", url, "--store", store)
    assert said.code == 2 and "--allow-custom-stages" in said.err and not store.exists() and seen == []
    assert not module.with_suffix(".ran").exists()
    done = tokenmill("run", recipe, "--store", store, "--name", "r", "--backend", "inline", "--allow-custom-stages")
    assert done.code == 0, done.err
    kept = store / "runs/r/code" / module.name
    assert kept.read_text() == STAGE
    module.with_suffix(".ran").unlink()
    module.unlink()                                           # another machine: the store has the only copy
    refused = tokenmill("resume", "r", "--store", store, "--backend", "inline")
    assert refused.code == 2 and "--allow-custom-stages" in refused.err
    assert not kept.with_suffix(".ran").exists()
    done = process("resume", "r", "--store", store, "--backend", "inline", "--allow-custom-stages")
    assert done.code == 0 and kept.with_suffix(".ran").exists(), done.err
    assert "0 tasks run" in done.out, "the same source, the same keys, wherever it lies"


# -- what a job is given ---------------------------------------------------------------------------------------------
class Client:
    """Stands in for Ray's job client, and keeps what it is given."""

    jobs: dict[str, dict]
    states: dict[str, str]

    def __init__(self, address):
        assert "RAY_ADDRESS" not in os.environ, "Ray would take that address instead"

    def submit_job(self, **given):
        if given["submission_id"] in self.jobs:
            raise RuntimeError("Request failed with status code 500: Job with submission_id x already exists.")
        self.jobs[given["submission_id"]] = given

    def get_job_info(self, id):
        from types import SimpleNamespace

        if id not in self.jobs:
            raise RuntimeError(f"Request failed with status code 404: Job {id} does not exist.")
        return SimpleNamespace(status=self.states.get(id, "PENDING"), message="", driver_exit_code=None)

    def get_job_logs(self, id):
        return "sh: 1: python: not found\n"

    def stop_job(self, id):
        self.states[id] = "STOPPED"
        return True


@pytest.fixture
def ray_jobs(serve, monkeypatch):
    """(URL, class of the client): a fake cluster with token authentication that runs nothing. The client's `jobs` and
    `states` stand for Ray's."""
    pytest.importorskip("ray")
    from pipeline.cluster import jobs

    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    monkeypatch.setenv("RAY_ADDRESS", "http://somewhere.else:1")
    client = type("Fresh", (Client,), {"jobs": {}, "states": {}})
    monkeypatch.setattr(jobs, "JobSubmissionClient", client)
    return serve()[0], client


NASTY = "it's $(touch pwned); `touch pwned` && -x \"q\" ünï\\"


def test_what_is_submitted_is_a_fixed_command_whatever_the_names(ray_jobs, recipe, tmp_path, tokenmill):
    url, client = ray_jobs
    folder = tmp_path / "a store; touch pwned"
    said = tokenmill("submit", recipe, "--address", url, "--store", folder, "--name", NASTY, "--workers", "3",
                     "--python", "echo it's; touch pwned #", "--takeover")
    assert said.code == 0 and said.out == NASTY + "\n"
    [(id, job)] = client.jobs.items()
    assert all(c.isalnum() or c in "-_." for c in id) and id.isascii() and id.endswith("-1")
    words = shlex.split(job["entrypoint"])
    assert words == ["exec", "echo it's; touch pwned #", "-P", "-m", "pipeline.cli", "resume", "--job", "1", "--store",
                     str(folder), "--workers", "3", "--takeover", "--", NASTY]
    shown = subprocess.run(job["entrypoint"].replace(words[1].replace("'", "'\"'\"'"), "printf %s\\\\n"), shell=True,
                           cwd=tmp_path, capture_output=True, text=True)
    assert not list(tmp_path.rglob("pwned")), shown
    assert set(job["runtime_env"]) == {"env_vars"}, "never working_dir, never pip"
    assert int(job["runtime_env"]["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"]) > 60
    assert TOKEN not in json.dumps(job) + (folder / "runs" / NASTY / "run.json").read_text()
    assert os.environ["RAY_ADDRESS"] == "http://somewhere.else:1"


def test_shipped_code_is_the_four_packages(ray_jobs, recipe, tmp_path, tokenmill):
    url, client = ray_jobs
    assert tokenmill("submit", recipe, "--address", url, "--store", tmp_path / "s", "--ship-code").code == 0
    [job] = client.jobs.values()
    assert [Path(p).name for p in job["runtime_env"]["py_modules"]] == ["pipeline", "stages", "tokenizer", "trainer"]
    assert set(job["runtime_env"]) == {"env_vars", "py_modules"}


def test_submitting_twice_starts_one_job(ray_jobs, recipe, tmp_path, tokenmill):
    url, client = ray_jobs
    arguments = ("submit", recipe, "--address", url, "--store", tmp_path / "s", "--json")
    [first], [second] = tokenmill(*arguments).json(), tokenmill(*arguments).json()
    assert first["already"] is None and second["already"] == "submitted" and len(client.jobs) == 1
    run, store = first["run"], Store(tmp_path / "s")
    assert tokenmill("submit", recipe, "--address", url, "--store", tmp_path / "t").code == 0
    assert len(client.jobs) == 2, "another store is another run"
    progress(store, run, attempt=1, state="running")
    beat(store, run)
    [third] = tokenmill(*arguments).json()
    assert third["already"] == "running" and len(client.jobs) == 2
    progress(store, run, attempt=1, state="failed")                   # it may be tried again
    [fourth] = tokenmill("resume", run, "--store", store.root, "--address", url, "--json").json()
    assert (fourth["already"], fourth["attempt"]) == (None, 2) and fourth["job"].endswith("-2")
    del client.jobs[fourth["job"]]                                    # the cluster is gone before the driver began
    [fifth] = tokenmill("resume", run, "--store", store.root, "--address", url, "--json").json()
    assert (fifth["already"], fifth["job"]) == (None, fourth["job"])


def test_a_cluster_that_remembers_what_the_store_does_not(ray_jobs, recipe, tmp_path, tokenmill):
    """The store was removed and made anew at the same place: ids of jobs that have ended are used up."""
    url, client = ray_jobs
    arguments = ("submit", recipe, "--address", url, "--store", tmp_path / "s", "--json")
    [first] = tokenmill(*arguments).json()
    shutil.rmtree(tmp_path / "s")
    [again] = tokenmill(*arguments).json()
    assert (again["already"], again["job"]) == ("submitted", first["job"]), "that job has not ended"
    client.states[first["job"]] = "SUCCEEDED"
    shutil.rmtree(tmp_path / "s")
    [third] = tokenmill(*arguments).json()
    assert (third["already"], third["attempt"]) == (None, 2) and len(client.jobs) == 2
    assert attempts.facts_of(Store(tmp_path / "s"), third["run"])["attempt"] == 2


def test_a_job_that_ends_before_its_driver_reaches_the_store(ray_jobs, recipe, tmp_path, tokenmill):
    url, client = ray_jobs
    [sent] = tokenmill("submit", recipe, "--address", url, "--store", tmp_path / "s", "--name", "r", "--json").json()
    assert "its driver has not begun yet" in tokenmill("status", "r", "--store", tmp_path / "s").out
    assert "has said nothing yet" in tokenmill("logs", "r", "--store", tmp_path / "s").err
    client.states[sent["job"]] = "FAILED"
    said = tokenmill("status", "r", "--store", tmp_path / "s")
    assert said.out.startswith("r  failed") and "python: not found" in said.out
    assert "python: not found" in tokenmill("logs", "-f", "r", "--store", tmp_path / "s").err
    [again] = tokenmill("submit", recipe, "--address", url, "--store", tmp_path / "s", "--name", "r", "--json").json()
    assert again["attempt"] == 2
    said = tokenmill("cancel", "r", "--store", tmp_path / "s")
    assert said.code == 0 and client.states[again["job"]] == "STOPPED"
    assert tokenmill("status", "r", "--store", tmp_path / "s").out.startswith("r  cancelled")
    client.jobs.clear()
    assert tokenmill("submit", recipe, "--address", url, "--store", tmp_path / "s", "--name", "r").code == 0
    client.jobs.clear()
    assert "the cluster does not know its job" in tokenmill("status", "r", "--store", tmp_path / "s").out


def test_the_job_of_an_attempt_that_is_not_the_latest_does_nothing(recipe, tmp_path):
    store = Store(tmp_path / "s")
    attempts.note_attempt(store, "r", 2, "job")
    done = process("resume", "--job", "1", "--store", store.root, "--", "r")
    assert done.code == 1 and "attempt 2 was begun since" in done.err
    attempts.ask_to_stop(store, "r", 2)
    done = process("resume", "--job", "2", "--store", store.root, "--", "r")
    assert done.code == 1 and "cancelled before it began" in done.err
    assert attempts.standing(store, "r").state == "cancelled"
    assert "cancelled before it began" in "".join(attempts.LogReader(store, "r", 2).more())


def test_a_head_that_does_not_see_the_store_says_so(tmp_path):
    done = process("resume", "--job", "1", "--store", tmp_path / "nowhere", "--", "r")
    assert done.code == 1 and "the head node does not see run 'r'" in done.err and "shared" not in done.out


def test_stores_no_cluster_can_see(serve, recipe, tokenmill):
    url, seen = serve()
    said = tokenmill("submit", recipe, "--address", url, "--store", "memory://store")
    assert said.code == 2 and "which no cluster sees" in said.err and seen == []


def test_notes_for_places_that_may_not_be_shared(tmp_path):
    from pipeline.cli.cluster import notes

    here, there = "http://127.0.0.1:8265", "http://head:8265"
    assert list(notes(Store(tmp_path), here, auth.in_clear(here))) == []
    said = list(notes(Store(tmp_path), there, auth.in_clear(there)))
    assert "unencrypted" in said[0] and "every node of the cluster shares" in said[1]
    assert not auth.in_clear("https://head:8265")


@pytest.fixture(autouse=True)
def clean(tmp_path):
    yield
    shutil.rmtree(tmp_path / "store", ignore_errors=True)
