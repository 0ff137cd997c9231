"""A run on a Ray cluster that somebody else has started, with token authentication. The run is started from a terminal
that is then closed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.base.auth import ClusterError
from pipeline.cluster.attempts import Standing, standing
from pipeline.store.dataset_hash import dataset_hash
from pipeline.store.fs import Store
from tests.corpus import write_warcs
from tests.e2e.ray_head import ROOT, Head
from tests.processes import children_of, named, until

pytestmark = [pytest.mark.chaos, pytest.mark.xdist_group("ray"),
              pytest.mark.skipif(sys.platform != "linux", reason="child processes need Linux")]

TOKEN = "token-of-the-tests-0123456789abcdef"
#: a stage that travels with the run; it holds the pages of the last crawl file while `held` exists, so that no run ends
#: before a test has looked
STAGE = """
import time
from pathlib import Path
from stages.stage import Stage


class Held(Stage):
    name = "held"

    def process(self, doc):
        while doc.locator["file"].endswith("crawl-05.warc.gz") and Path({held!r}).exists():
            time.sleep(0.02)
        return None
"""
RECIPE = """
version: 1
code: [{code}]
sources: {{web: {{read: warc, path: crawl/*.warc.gz}}}}
datasets:
  extracted: {{from: web, steps: [{{html: {{engine: resiliparse}}}}, "{stem}:Held"]}}
  clean: {{from: extracted, steps: [gopher_quality, pii]}}
  deduped: {{from: clean, steps: [exact]}}
run: {{partition: 60KB}}
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    top = tmp_path_factory.mktemp("cluster")
    write_warcs(top / "crawl", 250, 6)
    (top / "stages_of_mine.py").write_text(STAGE.format(held=str(top / "held")))
    (top / "recipe.yaml").write_text(RECIPE.format(code="stages_of_mine.py", stem="stages_of_mine"))
    return top


@pytest.fixture
def held(site) -> Iterator[Path]:
    """A file that keeps the run from ending as long as it exists."""
    path = site / "held"
    path.touch()
    yield path
    path.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def expected(site, tmp_path_factory) -> dict[str, str]:
    """The hashes of what a run on this machine alone makes."""
    store = tmp_path_factory.mktemp("alone") / "store"
    done = call(dict(os.environ), "run", site / "recipe.yaml", "--store", store, "--backend", "process",
                "--allow-custom-stages", "--quiet")
    assert done.returncode == 0, done.stderr
    return hashes(store)


def hashes(store: Path) -> dict[str, str]:
    return {name: dataset_hash(Store(store), name) for name in ("extracted", "clean", "deduped")}


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    started = Head(TOKEN)
    yield started
    started.close()


def call(env: dict[str, str], *arguments: Any, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "pipeline.cli", *map(str, arguments)], env=env, cwd=cwd,
                          capture_output=True, text=True, timeout=900)


def wait_for(store: Path, run: str, condition: Callable[[Standing], bool]) -> Standing:
    """Wait until the standing of a run meets `condition`, and return it."""
    seen = [standing(Store(store), run)]

    def met() -> bool:
        seen.append(standing(Store(store), run))
        return condition(seen[-1])

    until(met, 600, lambda: f"another standing than {seen[-1]}")
    return seen[-1]


def under_way(found: Standing) -> bool:
    assert not found.ended, found
    return found.state == "running" and 3 <= found.progress["done"] < found.progress["parts"]


def no_token_in(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            assert TOKEN.encode() not in path.read_bytes(), path


def test_submit_close_the_terminal_look_cancel_resume(site, expected, head, held, tmp_path):
    store, env = tmp_path / "store", head.environment()
    env |= {"TOKENMILL_STORE": str(store), "TOKENMILL_ADDRESS": head.url}
    # a terminal: submits, and is gone with everything that was started in it
    line = f"{sys.executable} -m pipeline.cli submit {site}/recipe.yaml --name mine --allow-custom-stages; sleep 600"
    terminal = subprocess.Popen(["bash", "-c", line], env=env, cwd=ROOT, stdout=subprocess.PIPE, text=True,
                                start_new_session=True)
    assert terminal.stdout.readline() == "mine\n"
    os.killpg(terminal.pid, signal.SIGKILL)
    terminal.wait()
    # another one: follows the log; a third one looks, with neither token nor address
    following = subprocess.Popen([sys.executable, "-m", "pipeline.cli", "logs", "-f", "mine"], env=env, cwd=ROOT,
                                 stdout=subprocess.PIPE, text=True)
    wait_for(store, "mine", under_way)
    stranger = {**head.environment(knows=False), "TOKENMILL_STORE": str(store)}
    [now] = [json.loads(x) for x in call(stranger, "status", "mine", "--json").stdout.splitlines()]
    assert now["state"] == "running" and now["slots"] >= 1 and now["address"] == head.url
    assert set(now["nodes"]["extracted"]) >= {"parts", "done", "running", "docs_per_s", "eta_s", "failed_attempts"}
    again = call(env, "submit", site / "recipe.yaml", "--name", "mine", "--allow-custom-stages")
    assert again.returncode == 0 and "under way already" in again.stderr
    assert "  mine  running" in call(stranger, "list").stdout
    # a cancel from there needs no cluster either
    said = call(stranger, "cancel", "mine")
    assert said.returncode == 0, said.stderr
    wait_for(store, "mine", lambda s: s.progress["state"] == "stopping")      # its driver has noticed
    held.unlink()
    stopped = wait_for(store, "mine", lambda s: s.ended)
    assert stopped.state == "stopped" and 0 < stopped.progress["done"] < stopped.progress["parts"]
    log, _ = following.communicate(timeout=300)
    assert following.returncode == 0 and "what was committed is kept" in log and "extracted" in log
    # resume needs to be told again that code may run
    refused = call(env, "resume", "mine", "--address", head.url)
    assert refused.returncode == 2 and "--allow-custom-stages" in refused.stderr
    resumed = call(env, "resume", "mine", "--address", head.url, "--allow-custom-stages")
    assert resumed.returncode == 0, resumed.stderr
    watched = call(stranger, "status", "mine", "--watch")
    assert watched.returncode == 0, watched.stdout + watched.stderr
    assert hashes(store) == expected
    found = standing(Store(store), "mine")
    assert found.attempt == 2 and sum(n["reused"] for n in found.progress["nodes"].values()) >= stopped.progress["done"]
    assert call(env, "cancel", "mine").stdout.startswith("'mine' is done")
    no_token_in(store)


STOP = """
import sys, time
from pipeline.base import auth
auth.check_job_server(sys.argv[1])
from pipeline.cluster import jobs
assert jobs.stop(*sys.argv[1:])
while not jobs.state(*sys.argv[1:]).ended:
    time.sleep(0.2)
print(jobs.state(*sys.argv[1:]).status, jobs.stop(*sys.argv[1:]), jobs.state(sys.argv[1], "nosuch"))
"""


def test_a_stop_by_ray_itself_ends_in_good_order(site, head, held, tmp_path):
    """`ray job stop`, the dashboard's button: SIGTERM. What runs is finished and committed, the run says 'stopped'."""
    store, env = tmp_path / "store", head.environment()
    sent = call(env, "submit", site / "recipe.yaml", "--name", "mine", "--address", head.url, "--store", store,
                "--allow-custom-stages", "--json")
    done = wait_for(store, "mine", under_way).progress["done"]
    stop = subprocess.Popen([sys.executable, "-c", STOP, head.url, json.loads(sent.stdout)["job"]], env=env, cwd=ROOT,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert wait_for(store, "mine", lambda s: s.progress["state"] != "running").state == "stopping"
    held.unlink()
    answer, errors = stop.communicate(timeout=600)
    assert answer == "STOPPED False None\n", errors
    found = standing(Store(store), "mine")
    assert found.state == "stopped" and found.progress["done"] > done
    assert "tokenmill resume mine goes on from there" in call(env, "logs", "mine", "--store", store).stdout


def test_a_lost_cluster_and_a_new_one(site, expected, held, tmp_path):
    """The head loses its power in the middle: the run is listed as died, and goes on elsewhere."""
    store = tmp_path / "store"
    first = Head(TOKEN)
    try:
        env = first.environment() | {"TOKENMILL_STORE": str(store)}
        sent = call(env, "submit", site / "recipe.yaml", "--name", "mine", "--address", first.url,
                    "--allow-custom-stages")
        assert sent.returncode == 0, sent.stderr
        before = wait_for(store, "mine", under_way)
        first.kill()
        held.unlink()
        said = call(env, "status", "mine")
        assert said.stdout.startswith("mine  died") and "tokenmill resume" in said.stdout
        assert "  mine  died" in call(env, "list").stdout
        assert "nothing to stop" in call(env, "cancel", "mine").stdout
    finally:
        first.close()
    second = Head(TOKEN)
    try:
        env = second.environment() | {"TOKENMILL_STORE": str(store)}
        resumed = call(env, "resume", "mine", "--address", second.url, "--allow-custom-stages")
        assert resumed.returncode == 0, resumed.stderr
        assert call(env, "status", "mine", "--watch").returncode == 0
    finally:
        second.close()
    assert hashes(store) == expected
    assert standing(Store(store), "mine").progress["done"] > before.progress["done"]


def test_shipped_code_runs_on_the_head_and_the_nodes(site, head, tmp_path):
    """An installation with a mark of its own submits; the cluster has another one."""
    code = tmp_path / "mine"
    for package in ("pipeline", "stages", "tokenizer", "trainer"):
        shutil.copytree(ROOT / package, code / package, ignore=shutil.ignore_patterns("__pycache__"))
    with open(code / "pipeline" / "run.py", "a") as f:
        f.write("\nprint('this is the code that was shipped')\n")
    (tmp_path / "a.txt").write_text("A text.")
    (tmp_path / "recipe.yaml").write_text("version: 1\nsources: {s: {read: text, path: a.txt}}\n"
                                          "datasets: {d: {from: s}}\n")
    env = head.environment() | {"PYTHONPATH": str(code), "TOKENMILL_STORE": str(tmp_path / "store")}
    sent = call(env, "submit", tmp_path / "recipe.yaml", "--name", "mine", "--address", head.url, "--ship-code",
                cwd=code)
    assert sent.returncode == 0, sent.stderr
    watched = call(env, "status", "mine", "--watch")
    log = call(env, "logs", "mine").stdout
    assert watched.returncode == 0, watched.stdout + log
    assert "this is the code that was shipped" in log       # the driver; a node with other code would be refused
    # attached from outside as well
    attached = call(env, "run", tmp_path / "recipe.yaml", "--store", tmp_path / "other", "--address", head.gcs,
                    "--ship-code", cwd=code)
    assert attached.returncode == 0, attached.stderr


def test_who_has_no_token_gets_nowhere(site, head, tmp_path):
    for env in (head.environment(knows=False), head.environment() | {"RAY_AUTH_TOKEN": "not-this-one-at-all"}):
        sent = call(env, "submit", site / "recipe.yaml", "--store", tmp_path / "store", "--address", head.url,
                    "--allow-custom-stages", "--insecure-local")
        assert sent.returncode == 1 and ("has none" in sent.stderr or "does not accept our token" in sent.stderr)
        assert "not-this-one" not in sent.stderr and not (tmp_path / "store").exists()
        attached = call(env, "run", site / "recipe.yaml", "--store", tmp_path / "store", "--address", head.gcs,
                        "--allow-custom-stages", "--insecure-local")
        assert attached.returncode == 1 and attached.stderr.count("\n") == 1
        assert "has none" in attached.stderr or "does not accept our token" in attached.stderr
        assert "not-this-one" not in attached.stderr and not (tmp_path / "store").exists()


def listening(pid: int) -> list[int]:
    """Return the TCP ports on which a process listens."""
    inodes = set()
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):               # closed meanwhile
            inodes |= set(re.findall(r"^socket:\[(\d+)\]$", os.readlink(file)))
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return sorted({int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and row[9] in inodes})


def test_a_ray_of_our_own_has_a_token_of_its_own(site, held, tmp_path):
    """What listens while a run goes on without any cluster; no token is left behind."""
    from pipeline.cluster import jobs

    env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")} | {"HOME": str(tmp_path / "home")}
    driver = subprocess.Popen([sys.executable, "-m", "pipeline.cli", "run", str(site / "recipe.yaml"), "--store",
                               str(tmp_path / "store"), "--allow-custom-stages", "--quiet"], env=env, cwd=ROOT)
    try:
        [gcs] = until(lambda: [p for p in children_of(driver.pid) if named(p, "gcs_server")], 300, "GCS", job=driver)
        [run] = until(lambda: [p.name for p in (tmp_path / "store" / "runs").glob("*/")], 300, "a run", job=driver)
        wait_for(tmp_path / "store", run, under_way)
        ports = listening(gcs)
        answers = {}
        for port in ports:
            try:
                jobs.check_gcs(f"127.0.0.1:{port}")
                answers[port] = "takes ours"
            except ClusterError as e:
                answers[port] = ("open" if "run code" in str(e) else "wants another token"
                                 if "token" in str(e) else "not Ray's")
        assert "wants another token" in answers.values(), answers
        assert set(answers.values()) <= {"wants another token", "not Ray's"}, answers
    finally:
        driver.send_signal(signal.SIGINT)
        assert driver.wait(timeout=300) == 1
    assert not list((tmp_path / "home").rglob("auth_token"))


def test_an_open_cluster_is_refused_unless_that_is_said(tmp_path):
    (tmp_path / "a.txt").write_text("A text.")
    (tmp_path / "recipe.yaml").write_text("version: 1\nsources: {s: {read: text, path: a.txt}}\n"
                                          "datasets: {d: {from: s}}\n")
    opened = Head(None)
    try:
        env = opened.environment() | {"TOKENMILL_STORE": str(tmp_path / "store")}
        recipe = tmp_path / "recipe.yaml"
        for command in (["submit", recipe, "--address", opened.url], ["run", recipe, "--address", opened.gcs]):
            said = call(env, *command)
            assert said.returncode == 1 and "anybody who reaches it can run code" in said.stderr, said.stderr
            assert not (tmp_path / "store").exists()
        assert call(env, "submit", recipe, "--address", opened.url, "--insecure-local", "--name", "r").returncode == 0
        watched = call(env, "status", "r", "--watch")
        assert watched.returncode == 0, watched.stdout + watched.stderr
        attached = call(env, "run", recipe, "--address", opened.gcs, "--insecure-local", "--store", tmp_path / "other")
        assert attached.returncode == 0, attached.stderr
    finally:
        opened.close()
