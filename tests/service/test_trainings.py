"""Trainings over HTTP and on pages: their state, their losses, the documents behind a spike, and starting and stopping
them."""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import threading
from argparse import Namespace
from pathlib import Path
from typing import Any

import lxml.etree
import pytest
from starlette.testclient import TestClient

from pipeline.service import training_files
from pipeline.service.duck import Stop
from pipeline.service.problems import HttpProblem
from pipeline.service.training_files import WINDOW, LossWindow, MetricsFile
from pipeline.service.training_starts import Options, Training, start
from pipeline.store.fs import Store
from tests.processes import until
from tests.service.conftest import problem
from tests.service.shard_site import MAIL, make_site
from tests.service.test_pages import client_of, read, text_of
from trainer.checkpoint import ledger
from trainer.evaluation import score_rows
from trainer.observe import worst_rows

API = "/api/v1/stores/main/trainings"
JSON = {"Accept": "*/*", "X-Tokenmill": "1"}
SPIKE, STEPS = 25, 40


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_site(tmp_path_factory.mktemp("trainings"))


def write_training(folder: Path, steps: int = STEPS) -> None:
    """Write the files of a training as the trainer does, with a spike, a skipped step, and a resume that makes lines
    void."""
    folder.mkdir(parents=True)
    phases = [{"name": "first", "tokens": 2048, "steps": 16, "lr": "stable", "weights": {"web": 1}},
              {"name": "second", "tokens": 2048, "steps": 32, "lr": "decay", "weights": {"web": 1}}]
    lines: list[dict[str, Any]] = [{"event": "start", "step": 0, "time": 1.0, "phases": phases}]
    for step in range(1, steps + 1):
        loss: float | None = 9.5 if step == SPIKE else 3 + 0.01 * (step % 3)
        more = {"skipped": True, "why": "loss nan", "lr": 0.01} if step == SPIKE + 2 else {"lr": 0.01}
        lines.append({"event": "step", "step": step, "time": 1.0 + step, "phase": phases[step > 4]["name"],
                      "tokens": 100 * step, "loss": loss, "grad_norm": 1.0, "streams": {"web": loss}, **more})
        if step % 10 == 0:
            lines.append({"event": "eval", "step": step, "tokens": 100 * step, "loss": 3.5, "unigram_entropy": 5.0,
                          "streams": {"web": {"loss": 3.5, "targets": 9}, "<b>": {"loss": 3.4, "targets": 8}}})
    void = {"event": "step", "step": steps + 1, "tokens": 100 * steps + 100, "loss": 99.0, "streams": {}, "lr": 0.01}
    lines += [void, {"event": "resume", "step": steps, "phases": phases}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"v": 1, **line}) + "\n" for line in lines))


@pytest.fixture(scope="module")
def trained(site: Path) -> Path:
    """The site with a training in its run."""
    write_training(site / "runs/main/train")
    return site


def got(client: TestClient, path: str = "", **params: Any) -> Any:
    answer = client.get(API + path, params=params)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_trainings_of_runs_and_of_folders_are_listed_with_their_state(trained, tmp_path):
    write_training(tmp_path / "more/own")
    write_training(tmp_path / "more/done")
    (tmp_path / "more/done/summary.json").write_text(json.dumps({"heldout_loss": 3.2, "sample": f"mail {MAIL}"}))
    (tmp_path / "more/empty").mkdir()
    (tmp_path / "more/link").symlink_to(tmp_path / "more/own")
    client = client_of({"main": trained}, trainings={"main": (str(tmp_path / "more"),)})
    listed = {t["training"]: t for t in got(client)["trainings"]}
    assert {name: t["state"] for name, t in listed.items()} == {"main": "stopped", "own": "stopped", "done": "done"}
    assert (listed["main"]["run"], listed["own"]["run"]) == ("main", None)
    assert (listed["own"]["step"], listed["own"]["steps"], listed["own"]["phase"]) == (41, 48, None)
    assert got(client, "/done")["summary"] == {"heldout_loss": 3.2, "sample": "mail email@example.com"}
    assert "<b>" in text_of(read(client, "/stores/main/trainings/own")) and "own" in text_of(
        read(client, "/stores/main/trainings"))


def test_the_files_of_a_training_are_those_that_the_trainer_names():
    assert {training_files.METRICS, ledger.NAME, worst_rows.NAME, score_rows.NAME} < set(training_files.FILES)


@pytest.mark.parametrize("name", ["metrics.jsonl", "summary.json", "train.log", "worst_rows.jsonl", "ledger.jsonl",
                                  "tasks.jsonl"])
def test_links_in_the_folder_of_a_training_are_not_followed(trained, tmp_path, name):
    write_training(tmp_path / "more/own")
    secret = tmp_path / "secret"
    secret.write_text('{"password": "hunter2"}\n')
    client = client_of({"main": trained}, "operator", trainings={"main": (str(tmp_path / "more"),)})
    client.headers["Accept"] = "*/*"
    assert client.get(f"{API}/own").status_code == 200
    (tmp_path / "more/own" / name).unlink(missing_ok=True)
    (tmp_path / "more/own" / name).symlink_to(secret)
    assert "own" not in {t["training"] for t in got(client)["trainings"]}
    for path in ("", "/log", "/losses.svg", "/steps/3?run=main"):
        assert "hunter2" not in json.dumps(problem(client.get(f"{API}/own{path}"), 404))
    with pytest.raises(HttpProblem, match="is a link"):
        start(Store(trained), Training("own", "main", tmp_path / "more/own"), Options(), "operator")
    assert secret.read_text() == '{"password": "hunter2"}\n'


@pytest.mark.parametrize("damage", [{"phases": None}, {"phases": 5}, {"phases": [{"name": "a", "steps": "x"}]},
                                    {"phases": [{"name": "a", "tokens": float("inf"), "steps": 1}]}])
def test_a_damaged_training_hides_no_other(trained, tmp_path, damage):
    write_training(tmp_path / "more/own")
    lines = (tmp_path / "more/own/metrics.jsonl").read_text().splitlines()
    lines[0] = json.dumps({**json.loads(lines[0]), **damage})
    (tmp_path / "more/own/metrics.jsonl").write_text("\n".join(lines[:20]) + "\n")
    client = client_of({"main": trained}, "viewer", trainings={"main": (str(tmp_path / "more"),)})
    assert {"main", "own"} <= {t["training"] for t in got(client)["trainings"]}
    assert got(client, "/own")["loss"]
    for path in ("losses.svg", "steps/3?run=main"):
        answer = client.get(f"{API}/own/{path}")
        assert answer.status_code == 200 or problem(answer, 409)["key"] == "training"


def test_a_plot_of_metrics_written_anew_is_another_one(trained, tmp_path):
    """Also if they are shorter than before, in the same file, and have the same steps."""
    write_training(tmp_path / "more/own")
    path = tmp_path / "more/own/metrics.jsonl"
    client = client_of({"main": trained}, "viewer", trainings={"main": (str(tmp_path / "more"),)})
    before = got(client, "/own")["plot"]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    with open(path, "r+") as f:
        f.write("".join(json.dumps({k: 1.0 if k == "loss" else v for k, v in line.items()}) + "\n" for line in lines))
        f.truncate()
    assert path.stat().st_size != 0 and got(client, "/own")["plot"] != before


def test_a_line_of_metrics_without_an_end_is_refused(trained, tmp_path):
    """It may have gigabytes, which would all be in memory at once."""
    write_training(tmp_path / "more/own")
    with open(tmp_path / "more/own/metrics.jsonl", "a") as f:
        f.write('{"event": "step", "x": "' + "x" * (1 << 20))
    client = client_of({"main": trained}, "viewer", trainings={"main": (str(tmp_path / "more"),)})
    for path in ("", "/losses.svg"):
        refused = problem(client.get(f"{API}/own{path}"), 409)
        assert refused["key"] == "training" and "1 MB" in refused["detail"]
    assert {"main", "own"} <= {t["training"] for t in got(client)["trainings"]}


def test_a_list_reads_no_folder_again_for_each_training(trained, tmp_path, monkeypatch):
    for i in range(30):
        write_training(tmp_path / f"more/t{i}", 1)
    looks: list[Path] = []
    real = training_files._folders
    monkeypatch.setattr(training_files, "_folders", lambda top: looks.append(top) or real(top))
    client = client_of({"main": trained}, trainings={"main": (str(tmp_path / "more"),)})
    assert len(got(client)["trainings"]) >= 30 and len(looks) == 2


def test_curves_leave_out_what_was_made_void_and_name_the_spikes(trained):
    shown = got(client_of({"main": trained}, "viewer"), "/main")
    assert [p["tokens"] for p in shown["curves"]["steps"]] == [100 * step for step in range(1, STEPS + 1)]
    assert shown["curves"]["steps"][0] == {"tokens": 100, "loss": 3.01, "streams": {"web": 3.01}, "lr": 0.01}
    assert shown["curves"]["evals"][0]["streams"] == {"web": 3.5, "<b>": 3.4}
    assert [(p["name"], p["from"], p["to"]) for p in shown["phases"]] == [("first", 0, 2048), ("second", 2048, 4096)]
    assert [(s["step"], s["skipped"], s["why"]) for s in shown["spikes"]] == [
        (SPIKE, False, None), (SPIKE + 2, True, "loss nan")]
    assert shown["spikes"][0]["distance"] > 6


def test_the_latest_scores_on_tasks_are_shown_while_a_training_runs(trained, tmp_path):
    write_training(tmp_path / "more/own")
    client = client_of({"main": trained}, trainings={"main": (str(tmp_path / "more"),)})
    assert got(client, "/own")["tasks"] == []
    assert "Scores on tasks" not in text_of(read(client, "/stores/main/trainings/own"))
    rows = [{"step": step, "tokens": 100 * step, "task": "arc<b>", "measure": measure, "value": value, **more}
            for step in range(10, 5000, 10) for measure, value, more in (
                ("bpb", 2.0 / step, {"stderr": None}), ("mcf", 0.25 + step, {"stderr": 0.01, "chance": 0.25}))]
    (tmp_path / "more/own/tasks.jsonl").write_text("".join(json.dumps(row | {"pad": "x" * 2000}) + "\n" for row in rows)
                                                   + '{"step": 9999, "task": "torn')
    assert got(client, "/own")["tasks"] == [
        {"task": "arc<b>", "measure": "bpb", "step": 4990, "value": 2.0 / 4990, "stderr": None, "chance": None},
        {"task": "arc<b>", "measure": "mcf", "step": 4990, "value": 4990.25, "stderr": 0.01, "chance": 0.25}]
    page = read(client, "/stores/main/trainings/own")
    table = lxml.etree.tostring(page.xpath("//table[caption[contains(., 'bpb')]]")[0])
    assert b"arc&lt;b&gt;" in table and b"4990.25" in table


def test_a_phase_with_another_loss_is_no_spike(tmp_path):
    """Means and deviations are those that a library computes, over more steps than the window has."""
    rng, path = random.Random(5), tmp_path / "metrics.jsonl"
    losses = [2 + rng.random() for _ in range(700)] + [4 + rng.random() for _ in range(100)] + [30.0]
    lines = [{"v": 1, "event": "step", "step": i, "phase": "ab"[i > 700], "loss": loss}
             for i, loss in enumerate(losses, 1)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    [spike] = MetricsFile(path).read(Stop(60.0)).spikes
    before = losses[700:800]
    assert spike["step"] == 801 and spike["mean"] == pytest.approx(statistics.fmean(before), rel=1e-12)
    assert spike["distance"] == pytest.approx((30 - statistics.fmean(before)) / statistics.stdev(before), rel=1e-9)


def test_the_window_of_losses_forgets_what_is_old():
    rng, window = random.Random(6), LossWindow()
    losses = [100.0] * 20 + [1e-3 * rng.random() for _ in range(5 * WINDOW)]
    for loss in losses:
        window.add(loss)
    mean, sigma = window.mean_and_sigma()
    assert mean == pytest.approx(statistics.fmean(losses[-WINDOW:]), rel=1e-9)
    assert sigma == pytest.approx(statistics.stdev(losses[-WINDOW:]), rel=1e-9)


def test_only_what_was_added_is_read_and_a_new_file_is_read_anew(trained, tmp_path):
    write_training(tmp_path / "more/own")
    metrics = tmp_path / "more/own/metrics.jsonl"
    client = client_of({"main": trained}, trainings={"main": (str(tmp_path / "more"),)})
    assert len(got(client, "/own")["curves"]["steps"]) == STEPS
    line = {"v": 1, "event": "step", "step": STEPS + 1, "tokens": 7, "loss": 1.0, "streams": {}}
    with open(metrics, "a") as f:
        f.write(json.dumps(line) + "\n" + json.dumps({**line, "step": STEPS + 2})[:40])
    assert got(client, "/own")["curves"]["steps"][-1]["tokens"] == 7
    fresh = tmp_path / "fresh"
    fresh.write_text(json.dumps({"v": 1, "event": "start", "step": 0}) + "\n" + json.dumps({**line, "step": 1}) + "\n")
    os.replace(fresh, metrics)
    assert [p["tokens"] for p in got(client, "/own")["curves"]["steps"]] == [7]


def test_the_plot_is_an_svg_without_script(trained):
    answer = client_of({"main": trained}).get(f"{API}/main/losses.svg")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("image/svg+xml")
    assert "script-src" not in answer.headers["content-security-policy"]
    tags = {lxml.etree.QName(e).localname for e in lxml.etree.fromstring(answer.content).iter()}
    assert {"polyline", "style"} <= tags and "script" not in tags


def test_the_plot_is_drawn_again_only_when_it_would_show_something_else(trained, tmp_path):
    write_training(tmp_path / "more/own", 1000)                   # of these, every second or fourth is kept
    metrics = tmp_path / "more/own/metrics.jsonl"
    client = client_of({"main": trained}, trainings={"main": (str(tmp_path / "more"),)})
    line = {"v": 1, "event": "step", "step": 1000, "tokens": 7, "loss": 1.0, "streams": {}}

    def tag_after(*lines: dict[str, Any]) -> str:
        with open(metrics, "a") as f:
            f.writelines(json.dumps(line) + "\n" for line in lines)
        answer = client.get(f"{API}/own/losses.svg", headers={"If-None-Match": tags[-1]} if tags else {})
        assert answer.status_code == (304 if answer.headers["etag"] in tags[-1:] else 200)
        assert bool(answer.content) == (answer.status_code == 200)
        assert got(client, "/own")["plot"] == answer.headers["etag"].strip('"')
        return answer.headers["etag"]

    tags: list[str] = []
    for step in range(1001, 1013):
        tags.append(tag_after({**line, "step": step}))
    assert 1 < len(set(tags)) < len(tags) / 2
    back = {"v": 1, "event": "rewind", "step": 1000, "steps": 12}
    before = tags[-1]
    tags.append(tag_after(back, *({**line, "step": step, "loss": 2.0} for step in range(1001, 1013))))
    assert tags[-1] != before, "the same steps, another loss"
    tree = read(client, "/stores/main/trainings/own")
    answer = client.get(tree.xpath("//img/@src")[0])
    assert answer.status_code == 200 and answer.headers["etag"] == tags[-1]


def test_pages_of_trainings_are_kept_current_only_while_one_runs(trained, tmp_path):
    folder = tmp_path / "more/own"
    write_training(folder)
    client = client_of({"main": trained}, trainings={"main": (str(tmp_path / "more"),)})
    for going in (False, True):
        if going:
            (folder / "trainer.pid").touch()                      # on another machine, as it seems
        for page in ("/stores/main/trainings", "/stores/main/trainings/own"):
            tree = read(client, page)
            [live] = tree.xpath("//div[@id='live']")
            scripts, status = tree.xpath("//script"), tree.xpath("//p[@role='status']")
            assert [len(scripts), len(status), "data-every" in live.attrib] == [going] * 3
            assert live.get("data-from") == page


def test_a_spike_leads_to_its_documents_as_the_command_names_them(trained, capsys):
    from trainer.__main__ import main

    (trained / "runs/main/train/worst_rows.jsonl").write_text(
        json.dumps({"step": SPIKE, "sample": 2 * SPIKE + 14, "stream": "web", "loss": 9.5}) + "\n")
    assert main(["explain", str(trained / "runs/main"), str(SPIKE), "--worst", "2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    shown = got(client_of({"main": trained}, "viewer"), f"/main/steps/{SPIKE}", worst=2)
    for key in ("step", "phase", "samples", "loss", "norm", "around", "skip_reason", "unranked"):
        assert shown[key] == told[key], key
    assert [[d["id"] for d in row["documents"]] for row in shown["rows"]] == [
        [d["id"] for d in row["documents"]] for row in told["rows"]] != []
    assert MAIL in json.dumps(told) and MAIL not in json.dumps(shown)
    client = client_of({"main": trained})
    tree = read(client, "/stores/main/trainings/main")
    [href] = tree.xpath(f"//table[caption='Spikes']//a[text()='{SPIKE}']/@href")
    tree = read(client, href)
    assert "alert(" in text_of(tree) and MAIL not in text_of(tree)
    assert tree.xpath("//ol[@class='documents']//a[contains(@href, '/datasets/clean/documents/')]")


@pytest.mark.parametrize(("method", "path", "body", "status", "key"), [
    ("GET", "/nosuch", None, 404, "training"), ("GET", "/..%2fmain", None, 404, None),
    ("GET", "/main/steps/0", None, 422, "step"), ("GET", "/main/steps/9999", None, 400, None),
    ("POST", "", {"run": "nosuch"}, 404, "run"), ("POST", "", {"run": "main", "name": "a"}, 422, "name"),
    ("POST", "", {"run": "main", "overrides": ["init.from=/etc"]}, 422, "overrides"),
    ("POST", "", {"run": "main", "overrides": ["metrics.wandb={project: x}"]}, 422, "overrides"),
    ("POST", "", {"run": "main", "overrides": ["train.init.from=/etc"]}, 422, "overrides"),
    ("POST", "", {"run": "main", "overrides": ["train.metrics.wandb={project: x}"]}, 422, "overrides"),
    ("POST", "", {"run": "main", "overrides": ["evaluate.tasks.data=/etc"]}, 422, "overrides"),
    ("POST", "", {"run": "main", "overrides": ["evaluate={tasks: {every: 5, tasks: [x.yaml], data: /}}"]}, 422,
     "overrides"),
    ("POST", "", {"run": "main", "overrides": ["--out"]}, 422, "overrides"),
    ("POST", "", {"run": "main", "overrides": ["seed=\0"]}, 422, "overrides"),
    ("POST", "", {"run": "main", "ranks": 0}, 422, "ranks"), ("POST", "/nosuch/stop", {}, 404, "training"),
    ("POST", "/main/stop", {}, 409, "training"), ("GET", "/main/log", None, 404, "training")])
def test_mistakes_are_problems(trained, method, path, body, status, key):
    document = problem(client_of({"main": trained}).request(method, API + path, json=body, headers=JSON), status)
    assert key is None or (document["key"] == key and document["remedy"])


def test_viewers_start_and_stop_nothing(trained):
    viewer = client_of({"main": trained}, "viewer")
    for path, body in (("", {"run": "main"}), ("/main/stop", None), ("/main/resume", None)):
        problem(viewer.post(API + path, json=body, headers=JSON), 403)
    problem(viewer.get(f"{API}/main/log", headers=JSON), 403)
    assert not read(viewer, "/stores/main/trainings/main").xpath("//main//form[@method='post']")


class Meeting(Store):
    """A store in which two servers both read that nothing runs, before either writes that it starts something."""

    both = threading.Barrier(2)

    def put_absent(self, path: str, data: bytes) -> bool:
        if path.endswith("/000001.json"):
            self.both.wait(300)
        return super().put_absent(path, data)


@pytest.mark.slow
def test_of_two_servers_one_starts_a_training(trained, tmp_path):
    results: list[Any] = []
    training = Training("twice", "nosuch", tmp_path / "twice")

    def try_it() -> None:
        try:
            results.append(start(Meeting(trained), training, Options(), "operator"))
        except HttpProblem as e:
            results.append(e.status)

    threads = [threading.Thread(target=try_it) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    [child] = [r for r in results if isinstance(r, subprocess.Popen)]
    assert child.wait() == 2 and results.count(409) == 1          # the run that it is to train on does not exist
    assert len(list((trained / "trainings/twice").glob("*.process.json"))) == 1
    assert "nosuch" in (tmp_path / "twice/train.log").read_text()


def test_processes_of_a_training_import_nothing_from_its_folder(trained, tmp_path, monkeypatch):
    """Whoever may write to the folder could run code in this way."""
    training = Training("planted", "main", tmp_path / "planted")
    (training.folder / "trainer").mkdir(parents=True)
    (training.folder / "trainer/__init__.py").write_text("raise SystemExit('planted')")
    options: dict[str, Any] = {}
    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "Popen",
                        lambda command, **given: options.update(given) or Namespace(pid=os.getpid()))
        start(Store(trained), training, Options(), "operator")
    ranks = [sys.executable, "-m", "trainer", "--help"]           # as trainer.launch.local starts them
    output = subprocess.run(ranks, cwd=options["cwd"], env=options["env"], capture_output=True, text=True)
    assert output.returncode == 0 and "planted" not in output.stderr


def test_a_start_that_fails_does_not_bar_the_next(trained, tmp_path):
    training = Training("barred", "main", tmp_path / "barred")
    for _ in range(2):                                            # else the second would be told that it runs
        with pytest.raises(ValueError, match="null byte"):
            start(Store(trained), training, Options(("seed=\0",)), "operator")


def test_a_training_that_a_command_has_started_is_stopped_by_its_signal(trained, tmp_path):
    write_training(tmp_path / "more/own")
    program = ("import sys, time\nfrom pathlib import Path\nfrom trainer.base.files import alone\n"
               "from trainer.base.interrupts import interruptions\n"
               "with interruptions() as stopped, alone(Path(sys.argv[1])):\n"
               "    print('ready', flush=True)\n    while not stopped(): time.sleep(0.05)\n")
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "more/own")], stdout=subprocess.PIPE,
                          text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        client = client_of({"main": trained}, trainings={"main": (str(tmp_path / "more"),)})
        assert got(client, "/own")["state"] == "running"
        assert client.post(f"{API}/own/stop", headers=JSON).status_code == 202
        assert child.wait(300) == 0
    assert got(client, "/own")["state"] == "stopped"


def test_without_torch_everything_but_starting_works(trained):
    program = """
import sys
sys.modules["torch"] = None
from starlette.testclient import TestClient
from pipeline.service.app import create_app
from pipeline.service.settings import ServiceSettings
client = TestClient(create_app(ServiceSettings({"main": sys.argv[1]})), base_url="http://127.0.0.1:8700")
api = "/api/v1/stores/main/trainings"
print(*(client.get(api + path).status_code for path in ("", "/main", "/main/losses.svg", "/main/steps/3")))
answer = client.post(api, json={"run": "main"}, headers={"X-Tokenmill": "1"})
print(answer.status_code, answer.json()["remedy"])
"""
    done = subprocess.run([sys.executable, "-c", program, str(trained)], capture_output=True, text=True, check=False)
    assert done.stdout == "200 200 200 200\n409 pip install 'tokenmill[trainer]'\n", done.stderr


@pytest.mark.slow
def test_a_training_is_started_outlives_the_server_is_stopped_and_resumed(site, tmp_path):
    """By the forms of the pages; another server sees it and stops it."""
    (tmp_path / "more").mkdir()
    folders = {"main": (str(tmp_path / "more"),)}
    client = client_of({"main": site}, trainings=folders)
    tree = read(client, "/stores/main/trainings")
    [form] = tree.xpath("//form[@aria-label='Start a training']")
    form.fields["run"], form.fields["name"] = "main", "mine"
    assert client.post(form.get("action"), data=dict(form.form_values())).status_code == 303
    problem(client.post(API, json={"run": "main", "name": "mine"}, headers=JSON), 409)
    other = client_of({"main": site}, trainings=folders)

    def wait_while(who: TestClient, *states: str, until_step: bool = False) -> None:
        def passed() -> bool:
            now = got(who, "/mine")
            return now["state"] not in states or bool(until_step and now["step"])

        until(passed, 600, f"the end of {states}")

    wait_while(other, "starting", "running", until_step=True)
    if got(other, "/mine")["state"] == "running":                 # a fast machine may have ended it
        other.post(f"{API}/mine/stop", headers=JSON)
    wait_while(other, "starting", "running")
    stopped = got(other, "/mine")
    assert stopped["state"] in ("stopped", "done"), got(other, "/mine/log")["text"]
    assert list((tmp_path / "more/mine/checkpoints").glob("*/COMPLETE"))
    assert other.post(f"{API}/mine/resume", headers=JSON).status_code == 202
    wait_while(client, "starting", "running")
    assert got(client, "/mine")["state"] == "done", got(client, "/mine/log")["text"]
    assert len(list((site / "trainings/mine").glob("??????.json"))) == 2
    assert "Summary" in text_of(read(client, "/stores/main/trainings/mine"))
