"""Recipes that come over the network: they are checked, planned, queued, cancelled and resumed. They must not read
certain files."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import ClientDisconnect
from starlette.testclient import TestClient

from pipeline.cluster.queue import Queue
from pipeline.plan.inputs import InputError
from pipeline.recipe.load import load_text
from pipeline.service import audit
from pipeline.service.app import create_app
from pipeline.service.checks import CheckRoom, without_files
from pipeline.service.problems import HttpProblem
from pipeline.service.settings import BadSettings, ServiceSettings
from pipeline.store.fs import Store
from pipeline.store.lease import identity
from pipeline.store.log import Log
from tests.commands import command
from tests.corpus import sentences
from tests.processes import until
from tests.service.conftest import PATIENT_S

VIEWER, OPERATOR = "viewer-token-of-the-tests", "operator-token-of-the-tests"
RECIPE = """
version: 1
sources: {docs: {read: text, path: docs}}
datasets:
  clean: {from: docs, steps: [{gopher_quality: {min_doc_words: 5}}]}
run: {partition: 2KB}
"""
SITE = "/api/v1/stores/store"


class Site:
    """A server over one store, with a folder of inputs that it allows."""

    def __init__(self, top: Path, roots: tuple[str, ...] = (), **settings: Any) -> None:
        self.data, self.store = top / "data", Store(top / "store")
        (top / "store").mkdir(exist_ok=True)
        (self.data / "docs").mkdir(parents=True, exist_ok=True)
        for i in range(6):
            (self.data / "docs" / f"d{i}.txt").write_text("\n".join(sentences()[i:i + 8]))
        self.settings = ServiceSettings({"store": self.store.root}, viewer_token=VIEWER, operator_token=OPERATOR,
                                        allowed_roots=(str(self.data), *roots), backend="inline", request_s=PATIENT_S,
                                        **settings)
        self.app = create_app(self.settings)
        self.client = TestClient(self.app, base_url="http://127.0.0.1:8700", raise_server_exceptions=False)

    def post(self, path: str, body: Any = None, token: str = OPERATOR, **headers: str) -> Any:
        return self.client.post(SITE + path, json=body, headers={"Authorization": f"Bearer {token}", **headers})

    def get(self, path: str) -> Any:
        return self.client.get(SITE + path, headers={"Authorization": f"Bearer {VIEWER}"}).json()


@pytest.fixture
def site(tmp_path, checks_here):
    return Site(tmp_path)


def test_validate_lists_every_error_with_place_key_and_remedy(site, check_processes):
    bad = RECIPE.replace("read: text", "read: txet").replace("min_doc_words: 5", "min_dok_words: 5")
    answer = site.post("/recipes/validate", {"recipe": bad})
    document = answer.json()
    assert answer.status_code == 200 and document["valid"] is False and document["run"] is None
    keys = {p["key"]: p for p in document["problems"]}
    assert set(keys) == {"sources.docs.read", "datasets.clean.steps[0].gopher_quality.min_dok_words"}
    assert keys["sources.docs.read"]["line"] == 3 and "text" in keys["sources.docs.read"]["message"]
    assert all(p["severity"] == "error" and p["file"] == "recipe.yaml" for p in document["problems"])


def test_validate_lists_warnings_of_lint(site):
    two = RECIPE.replace("steps: [", "steps: [minhash, ")
    document = site.post("/recipes/validate", {"recipe": two, "name": "two"}).json()
    assert document["valid"] and document["run"].startswith("two-")
    assert [p["severity"] for p in document["problems"]].count("warning") >= 1
    assert any(p["key"].startswith("datasets.clean") and p["line"] == 5 for p in document["problems"])


def test_validate_warns_of_a_source_without_files_as_a_plan_refuses_it(site):
    missing = RECIPE.replace("path: docs", "path: ['docs/d0.txt', 'docs/*.nothing']")
    document = site.post("/recipes/validate", {"recipe": missing}).json()
    assert document["valid"] and document["run"]
    [warning] = [p for p in document["problems"] if p["key"] == "sources.docs.path"]
    assert (warning["severity"], warning["file"], warning["line"]) == ("warning", "recipe.yaml", 3)
    assert "docs/*.nothing" in warning["message"] and warning["remedy"]
    refused = site.post("/recipes/plan", {"recipe": missing}).json()
    assert (refused["detail"], refused["remedy"]) == (warning["message"], warning["remedy"])
    problems = site.post("/recipes/validate", {"recipe": RECIPE}).json()["problems"]
    assert not [p for p in problems if p["key"].startswith("sources")]


def test_a_source_that_cannot_be_listed_hides_no_other(tmp_path, monkeypatch):
    def check_patterns(name, *_, **__):
        raise PermissionError(13, "denied") if name == "docs" else InputError("source 'more': no files; add some")

    monkeypatch.setattr("pipeline.plan.inputs.check_patterns", check_patterns)
    recipe = load_text(RECIPE.replace("path: docs}", "path: docs}, more: {read: text, path: more}"), "recipe.yaml",
                       name="recipe", base=str(tmp_path), inputs_from=str(tmp_path))
    problems = {problem.path[1]: problem.message for problem in without_files(recipe, PATIENT_S)}
    assert problems == {"docs": "its files cannot be listed (PermissionError); see that the server may read the folder",
                        "more": "source 'more': no files; add some"}


def test_a_plan_is_what_the_command_says(site, check_processes, capsys):
    from pipeline.cli.app import run_command

    (site.data / "recipe.yaml").write_text(RECIPE)
    assert run_command(["plan", str(site.data / "recipe.yaml"), "--store", site.store.root, "--json"]) == 0
    command = json.loads(capsys.readouterr().out.replace(f"{site.data}/recipe.yaml", "recipe.yaml"))
    document = site.post("/recipes/plan", {"recipe": RECIPE}).json()
    assert {k: document[k] for k in command} == command
    assert command["total"]["tasks_stale"] > 0 and command["total"]["cpu_s"] >= 0
    assert not list(site.store.list("runs")) and not list(site.store.list("queue"))


def test_a_plan_without_files_is_a_problem(site):
    answer = site.post("/recipes/plan", {"recipe": RECIPE.replace("path: docs", "path: 'docs/*.nothing'")})
    assert answer.status_code == 400 and answer.headers["content-type"] == "application/problem+json"
    assert "docs" in answer.json()["detail"]


def test_only_operators_write(site):
    for path in ("/recipes/validate", "/recipes/plan", "/queue"):
        assert site.post(path, {"recipe": RECIPE}, token=VIEWER).status_code == 403
    assert not list(site.store.list("queue"))
    assert site.client.get(SITE + "/queue").status_code == 401


def test_one_request_sent_twice_is_one_run(site):
    first = site.post("/queue", {"recipe": RECIPE}, **{"Idempotency-Key": "k1"})
    assert first.status_code == 202 and first.json()["place"] == 1 and first.json()["by"] == "operator"
    again = Site(site.data.parent).post("/queue", {"recipe": RECIPE}, **{"Idempotency-Key": "k1"})   # another server
    assert again.json()["number"] == first.json()["number"]
    other = site.post("/queue", {"recipe": RECIPE, "overrides": ["run.partition=4KB"]}, **{"Idempotency-Key": "k1"})
    assert other.status_code == 409
    assert site.post("/queue", {"recipe": RECIPE}).json()["place"] == 2
    assert [(e["number"], e["place"], e["state"]) for e in site.get("/queue")["entries"]] == [
        (1, 1, "waiting"), (2, 2, "waiting")]
    assert OPERATOR not in json.dumps(site.get("/queue/1")) and "host" not in json.dumps(site.get("/queue/1"))


def test_writes_are_in_the_audit_log(site):
    site.post("/queue", {"recipe": RECIPE})
    site.post("/queue/1/cancel")
    entries = audit.entries(site.store, "", 10)
    assert [e["path"] for e in entries] == [f"{SITE}/queue", f"{SITE}/queue/1/cancel"]
    assert {e["role"] for e in entries} == {"operator"} and OPERATOR not in json.dumps(entries)


def test_cancel_what_waits(site):
    site.post("/queue", {"recipe": RECIPE})
    assert site.post("/queue/1/cancel", token=VIEWER).status_code == 403
    assert site.post("/queue/1/cancel").json()["state"] == "cancelled"
    assert site.get("/queue")["entries"] == [] and site.get("/queue?ended=true")["entries"][0]["state"] == "cancelled"
    assert site.post("/queue/7/cancel").status_code == 404


def test_bad_bodies_are_problems(site):
    for body in ({}, {"recipe": RECIPE, "ready": "fineweb"}, {"ready": "none"}, {"recipe": "[1"}, {"recipe": "\x00"},
                 {"recipe": RECIPE, "overrides": ["x"]}, {"recipe": RECIPE, "run": "../x"}, {"recipe": RECIPE, "no": 1},
                 {"recipe": RECIPE, "inputs": ["/etc/passwd"]}, {"recipe": "a: &a [*a]"},
                 {"recipe": RECIPE, "name": "../x"}):
        answer = site.post("/queue", body)
        assert 400 <= answer.status_code < 500, body
        assert answer.headers["content-type"] == "application/problem+json" and answer.json()["detail"], body
    assert not list(site.store.list("queue"))


def test_a_server_that_allows_no_place_takes_no_recipe(site):
    app = create_app(ServiceSettings({"store": site.store.root}))
    answer = TestClient(app, base_url="http://127.0.0.1:8700").post(
        SITE + "/queue", json={"recipe": RECIPE}, headers={"X-Tokenmill": "1"})
    assert answer.status_code == 422 and answer.json()["key"] == "sources.docs.path"


def test_errors_do_not_tell_the_address_of_the_cluster(tmp_path):
    site = Site(tmp_path, address="10.1.2.3:6379")
    queue = site.app.state.queues["store"]
    site.post("/queue", {"recipe": RECIPE})
    queue.append(queue.entries()[0], "failed", error="--address 10.1.2.3:6379: nothing answers there")
    document = site.get("/queue?ended=true")["entries"][0]
    assert document["state"] == "failed" and "10.1.2.3" not in json.dumps(document)
    assert "6379" not in json.dumps(site.get("/queue/1"))


def test_a_failed_run_is_resumed_and_a_done_one_is_not(site):
    """With the real dispatcher and real drivers, through a restart of the server."""
    (site.data / "docs" / "d0.txt").write_text("short")
    site.post("/queue", {"recipe": RECIPE, "name": "mine"})
    (site.data / "docs").rename(site.data / "moved")
    with site.client:
        until(lambda: site.get("/queue/1")["state"] == "failed")
    run = site.get("/queue/1")["run"]
    assert run.startswith("mine-") and not list(site.store.list("datasets/clean"))
    assert [e["kind"] for e in site.get("/queue/1")["events"]] == ["submitted", "start", "running", "failed"]
    (site.data / "moved").rename(site.data / "docs")
    resumed = site.post(f"/runs/{run}/resume").json()
    assert (resumed["number"], resumed["resumes"], resumed["run"]) == (2, True, run)
    assert site.post(f"/runs/{run}/resume").json()["number"] == 2           # it is in the queue already
    restarted = Site(site.data.parent)
    with restarted.client:
        until(lambda: restarted.get("/queue/2")["state"] == "done")
    assert site.get(f"/runs/{run}")["state"] == "done" and list(site.store.list("datasets/clean"))
    answer = site.post(f"/runs/{run}/resume")
    assert answer.status_code == 409 and "submit its recipe again" in answer.json()["remedy"]


def test_the_name_of_a_run_that_is_there_is_not_taken(site):
    site.store.write("runs/mine/run.json", b"{}")
    answer = site.post("/queue", {"recipe": RECIPE, "run": "mine"})
    assert answer.status_code == 409 and answer.json()["key"] == "run" and "resume" in answer.json()["remedy"]
    assert site.get("/queue")["entries"] == []
    assert site.post("/queue", {"recipe": RECIPE, "run": "other"}).status_code == 202


@pytest.mark.parametrize("name", ["../../data", "a\0b", "é" * 200])
def test_a_name_that_no_run_can_have_is_refused_before_the_store_is_asked_for_it(site, name):
    site.store.write("runs/other/run.json", b"{}")
    answer = site.post("/queue", {"recipe": RECIPE, "run": name})
    assert (answer.status_code, answer.json()["key"]) == (422, "run")


def test_the_name_of_a_run_that_waits_is_not_taken(site):
    assert site.post("/queue", {"recipe": RECIPE, "run": "mine"}, **{"Idempotency-Key": "k1"}).status_code == 202
    answer = site.post("/queue", {"recipe": RECIPE.replace("5", "6"), "run": "mine"})
    assert answer.status_code == 409 and answer.json()["key"] == "run" and len(site.get("/queue")["entries"]) == 1
    assert site.post("/queue", {"recipe": RECIPE, "run": "mine"}, **{"Idempotency-Key": "k1"}).json()["number"] == 1
    site.post("/queue/1/cancel")
    assert site.post("/queue", {"recipe": RECIPE, "run": "mine"}).status_code == 202


def test_drivers_and_checks_do_not_see_the_tokens(monkeypatch, site, check_processes):
    from pipeline.service.dispatching import driver_options
    from pipeline.service.settings import OPERATOR_TOKEN, VIEWER_TOKEN

    assert set(driver_options(site.settings).secrets) == {OPERATOR_TOKEN, VIEWER_TOKEN}
    code = site.data / "spy.py"
    code.write_text("import os\nraise ImportError(','.join(sorted(os.environ)))\n")
    for name in (OPERATOR_TOKEN, VIEWER_TOKEN):
        monkeypatch.setenv(name, "a-secret-of-the-service")
    spied = Site(site.data.parent, allow_code=True)
    [problem] = spied.post("/recipes/validate", {"recipe": RECIPE + "code: spy.py\n"}).json()["problems"]
    assert problem["key"] == "code" and "PATH" in problem["message"] and "OPERATOR" not in problem["message"]
    assert os.environ[OPERATOR_TOKEN]


def test_a_root_that_is_not_there_is_refused_at_the_start(site):
    with pytest.raises(BadSettings, match="--allow-root"):
        ServiceSettings({"store": site.store.root}, allowed_roots=(str(site.data / "nothing"),))


SLEEPY = """
import time
from pathlib import Path

from stages.stage import Stage


class Sleepy(Stage):
    name = "sleepy"

    def process(self, doc):
        while not (Path(__file__).parent / "cancelled").exists():
            time.sleep(0.05)
        time.sleep(0.5)
"""


@pytest.mark.slow
def test_a_running_run_is_cancelled_and_the_next_one_starts(tmp_path):
    """Its documents wait for the request. Then they take a minute, so that the run still goes on when its driver sees
    the request, a few seconds later."""
    site = Site(tmp_path, allow_code=True)
    (site.data / "sleepy.py").write_text(SLEEPY)
    for i in range(120):
        (site.data / "docs" / f"more{i}.txt").write_text("\n".join(sentences()[:8]))
    slow = RECIPE.replace("steps: [", "steps: ['sleepy:Sleepy', ").replace("2KB", "1KB") + "code: [./sleepy.py]\n"
    with site.client:
        site.post("/queue", {"recipe": slow})
        site.post("/queue", {"recipe": RECIPE, "inputs": ["docs/d0.txt"]})
        until(lambda: site.get("/queue/1")["state"] == "running")
        assert site.post(f"/runs/{site.get('/queue/1')['run']}/cancel").json()["entries"] == [1]
        assert site.get("/queue/1")["stopping"]
        (site.data / "cancelled").touch()
        until(lambda: site.get("/queue/2")["state"] == "done")
    document = site.get("/queue/1")
    assert document["state"] == "cancelled"
    assert [e["kind"] for e in document["events"]] == ["submitted", "start", "running", "cancelling", "cancelled"]
    assert site.get(f"/runs/{document['run']}")["state"] in ("stopped", "cancelled")


@pytest.mark.parametrize("slow", ["pipeline.cli.queued._recipe", "pipeline.run.hub_tokenizer",
                                  "pipeline.plan.planner.Planner.nodes", "pipeline.run.node_ingredients"])
def test_a_run_is_cancelled_while_it_plans(site, slow):
    site.post("/queue", {"recipe": RECIPE, "run": "slow"})
    queue = site.app.state.queues["store"]
    queue.append(queue.entry(1), "start", holder=identity(""))
    done = command("tests.service.cancelled_driver", site.store.root, slow)
    assert Queue(site.store).entry(1).state == "cancelled" and not site.store.exists("not-cancelled"), done
    assert Log.open(site.store, run="next").close() is None


class Client:
    """A request whose client disconnects when the test sets `left`."""

    def __init__(self) -> None:
        self.left = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}


def test_checks_end_with_their_clients_and_few_wait(site, check_processes, monkeypatch):
    begun, processes, started = [], [], asyncio.Semaphore(0)

    async def slow(*command: Any, start: Any = asyncio.create_subprocess_exec, **pipes: Any) -> Any:
        begun.append(command)
        processes.append(await start("sleep", "600", **pipes))
        started.release()
        return processes[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", slow)

    async def main() -> None:
        room = CheckRoom(site.settings)

        async def begin(store: str | None, number: int) -> list[tuple[Client, Any]]:
            clients = [Client() for _ in range(number)]
            tasks = [(c, asyncio.ensure_future(room.check(c, {"store": store}))) for c in clients]
            await started.acquire()              # the start of a process takes many turns of the loop, a task has each
            return tasks

        plans = await begin("store", 7)
        assert len(begun) == 1, "one place is left for other checks"
        checks = await begin(None, 8)
        assert len(begun) == 2
        for store in ("store", None):
            with pytest.raises(HttpProblem) as refused:
                await asyncio.wait_for(room.check(Client(), {"store": store}), 300)
            assert refused.value.status == 503 and refused.value.headers["Retry-After"]
        for client, _ in [*plans[::-1], *checks[::-1]]:
            client.left.set()
        ends = await asyncio.wait_for(asyncio.gather(*(task for _, task in plans + checks), return_exceptions=True),
                                      300)
        assert all(isinstance(end, ClientDisconnect) for end in ends), ends
        assert all(process.returncode is not None for process in processes)
        assert room._inside == {False: 0, True: 0}

    asyncio.run(main())
