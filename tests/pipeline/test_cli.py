"""The commands about recipes and runs: success, JSON output, and what a user reads after a mistake."""

from __future__ import annotations

import builtins
import json
import logging
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import duckdb
import pytest

import pipeline.cli
from pipeline.cli.app import run_command
from pipeline.store.fs import Store
from pipeline.store.log import Log
from tests.hurried import HurriedClock
from tests.pipeline.cli_site import ROOT, process
from tests.processes import children_of, named, until
from tokenizer.byte_level import byte_level_json
from tokenizer.shards.rows import RowSet

HEAVY = "('ray', 'torch', 'numba', 'spacy', 'datatrove', 'trafilatura', 'tokenizers')"


def copy(site: Path, tmp_path: Path) -> Path:
    """Return a copy of the site's store, to which a test may write."""
    shutil.copytree(site / "store", tmp_path / "store")
    return tmp_path / "store"


# -- the command as a whole ------------------------------------------------------------------------------------------
def test_help_lists_the_commands(tokenmill):
    said = tokenmill("--help")
    assert said.code == 0
    for name in ("run", "plan", "list", "report", "inspect", "extract", "fetch", "materialize", "train", "tokenizer",
                 "shards", "dedup", "classifier"):
        assert f"\n  {name} " in said.out


@pytest.mark.parametrize("arguments", [["rnu"], ["run"], ["run", "fineweb", "--worker", "2"], ["plan", "--nosuch"],
                                       ["run", "fineweb", "--workers", "0"], ["run", "fineweb", "--backend", "dask"],
                                       ["shards", "verfy", "x"], []])
def test_bad_usage_exits_2(tokenmill, arguments):
    said = tokenmill(*arguments)
    assert said.code == 2 and "Usage: tokenmill" in said.err and said.out == ""


@pytest.mark.parametrize("command", ["plan", "run"])
def test_a_missing_model_is_one_line_that_says_how_to_get_it(tmp_path, tokenmill, monkeypatch, command):
    """The first thing that goes wrong on a new machine."""
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "recipe.yaml").write_text("version: 1\nsources: {s: {read: text, path: a.txt}}\n"
                                          "datasets: {d: {from: s, steps: [language]}}\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TOKENMILL_MODELS", str(tmp_path / "models"))
    said = tokenmill(command, tmp_path / "recipe.yaml", "--store", tmp_path / "store")
    assert said.code == 2 and said.err.startswith("error: the language model is missing") and said.err.count("\n") == 1
    assert "tokenmill fetch lid176" in said.err


def test_help_and_plan_import_nothing_heavy(site):
    plan = ["plan", str(site / "recipe.yaml"), "--store", str(site / "store")]
    lines = [["--help"], ["run", "--help"], ["shards", "--help"], plan,
             [*plan, "--set", "datasets.deduped.steps.minhash.verify=0.9"]]
    said = process("-c", f"import sys; from pipeline.cli import main\n"
                         f"for sys.argv[1:] in {lines}:\n"
                         f"    try: main()\n    except SystemExit as e: assert not e.code\n"
                         f"    print('HEAVY', [m for m in {HEAVY} if m in sys.modules])", python=True)
    assert said.code == 0 and said.out.count("HEAVY []\n") == len(lines), said.out + said.err


def test_a_missing_package_is_named():
    code = ("import sys\n"
            "class Refuse:\n"
            "    def find_spec(self, name, path=None, target=None):\n"
            "        if name.partition('.')[0] == 'typer': raise ModuleNotFoundError('no', name='typer')\n"
            "sys.meta_path.insert(0, Refuse())\n"
            "sys.argv[1:] = ['list']\n"
            "from pipeline.cli import main\nmain()")
    said = process("-c", code, python=True)
    assert said.code == 1 and "'typer' is not installed; pip install 'tokenmill[pipeline]'" in said.err
    said = process("-c", code.replace("'list'", "'train', '--help'"), python=True)
    assert said.code == 0 and "usage: tokenmill train" in said.out, "the trainer needs no pipeline"


def test_head_has_seen_enough(site):
    line = f"{sys.executable} -m pipeline.cli inspect extracted --store {site}/store -n 0 --chars 0 --json | head -1"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, cwd=ROOT, timeout=600, check=False)
    assert json.loads(done.stdout)["id"] and done.stderr == ""


# -- run -------------------------------------------------------------------------------------------------------------
def test_run_again_reuses_everything(site, tmp_path, tokenmill):
    store = copy(site, tmp_path)
    said = tokenmill("run", site / "recipe.yaml", "--store", store, "--backend", "inline", "--name", "first", "--json")
    assert said.code == 0, said.err
    events = said.json()
    assert {e["event"] for e in events} >= {"planned", "end", "done"} and events[-1]["event"] == "done"
    assert events[-1]["executed"] == 0 and events[-1]["reused"] > 10
    assert set(events[-1]["datasets"]) == {"extracted", "clean", "deduped"}
    assert Path(events[-1]["report"]).is_file()


def test_run_for_people_and_quietly(site, tmp_path, tokenmill):
    store = copy(site, tmp_path)
    at = ("run", site / "recipe.yaml", "--store", store, "--backend", "inline")
    said = tokenmill(*at, "--set", "datasets.clean.steps.gopher_quality.min_stop_words=4")
    assert said.code == 0
    assert all(words in said.out for words in ("tasks run", "documents kept: extracted", "report: "))
    quiet = tokenmill(*at, "--quiet")
    assert (quiet.code, quiet.out, quiet.err) == (0, "", "")


@pytest.mark.parametrize(("extra", "said"), [
    (["--address", "auto", "--backend", "inline"], "leave out --backend inline"),
    (["--name", "a/b"], "leave out '/'"),
    (["--set", "datasets.clean"], "write --set KEY=VALUE"),
    (["--set", "datasets.clean.steps.nosuch.x=1"], "there is no 'nosuch' here"),
    (["--input", "nothing/*.gz"], "which of the sources"),
])
def test_run_names_the_mistake(site, tmp_path, tokenmill, extra, said):
    found = tokenmill("run", site / "recipe.yaml", "--store", tmp_path / "store", *extra)
    assert found.code == 2 and said in found.err and found.err.startswith("error: ")
    assert not (tmp_path / "store").exists()


def test_a_ready_recipe_wants_input(tokenmill, tmp_path):
    assert "add --input" in tokenmill("run", "fineweb", "--store", tmp_path / "s").err
    found = tokenmill("run", "fineweb", "--input", "nothing/*.gz", "--store", tmp_path / "s", "--backend", "inline")
    assert found.code == 2 and "no file matches" in found.err
    assert "did you mean 'fineweb'?" in tokenmill("run", "finweb").err


def test_a_cluster_that_is_not_there(site, tmp_path, tokenmill, monkeypatch):
    at = ("run", site / "recipe.yaml", "--store", tmp_path / "store", "--address")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))                           # bound, but nobody listens
        said = tokenmill(*at, f"127.0.0.1:{free.getsockname()[1]}")
    assert said.code == 1 and "nothing answers there" in said.err and "leave --address out" in said.err

    def refuse(*_):
        raise ConnectionError("Could not find any running Ray instance.\nmore")

    pytest.importorskip("ray")
    monkeypatch.setattr("ray._private.services.canonicalize_bootstrap_address_or_die", refuse)
    said = tokenmill(*at, "auto")
    assert said.code == 1 and "--address auto: this machine is in no Ray cluster" in said.err
    assert "more" not in said.err

    with socket.socket() as head:
        head.bind(("127.0.0.1", 0))
        head.listen()
        monkeypatch.setattr("pipeline.cluster.jobs.local_cluster", lambda: f"127.0.0.1:{head.getsockname()[1]}")
        monkeypatch.setattr("pipeline.cluster.jobs.check_gcs", lambda address, insecure_local: True)
        monkeypatch.setattr("pipeline.run.make_backend", lambda *_: refuse)
        said = tokenmill(*at, "auto")
    assert said.code == 1 and "--address auto: cannot attach" in said.err and "more" not in said.err


def test_a_store_in_use_is_not_touched(site, tmp_path, tokenmill):
    store = copy(site, tmp_path)
    with Log.open(Store(store), run="other"):
        said = tokenmill("run", site / "recipe.yaml", "--store", store, "--backend", "inline")
        assert said.code == 1 and "in use by run 'other'" in said.err and "--takeover" in said.err
        (tmp_path / "a.ds").write_bytes(b"")
        (tmp_path / "bytes.json").write_text(byte_level_json())
        said = tokenmill("shards", "import", str(tmp_path / "a.ds"), "--format", "ds", "--tokenizer",
                         str(tmp_path / "bytes.json"), "--store", store, "--name", "old")
        assert said.code == 1 and "in use by run 'other'" in said.err and "wait" in said.err
        assert "--takeover" not in said.err                                    # the command has no such option


def test_waiting_for_a_holder_that_cannot_be_seen_is_said(site, tmp_path, monkeypatch, caplog):
    from pipeline.store import lease

    caplog.set_level(logging.WARNING, "tokenmill")            # a command before may have been --quiet
    store = copy(site, tmp_path)
    held = Log.open(Store(store), run="other")
    try:
        held._stop.set()
        held._thread.join()                                   # a driver on another host, cut off
        monkeypatch.setattr(lease, "alive", lambda holder: None)
        Log.open(Store(store), run="next", clock=HurriedClock()).close()
    finally:
        held._closed = True
    assert "last held by run 'other'" in caplog.text and "waiting up to" in caplog.text


#: a step that never ends
ENDLESS = """
import time
from stages.stage import Stage


class Endless(Stage):
    name = "endless"

    def process(self, doc):
        time.sleep(3600)
"""


def has_child(pid: int) -> bool:
    """Return whether a driver has started a child process. By then, it also has its signal handlers."""
    return any(named(child, "pipeline.engine.worker.child") for child in children_of(pid))


def test_ctrl_c_says_what_is_kept(tmp_path):
    (tmp_path / "endless_step.py").write_text(ENDLESS)
    (tmp_path / "a.txt").write_text("A text.")
    (tmp_path / "r.yaml").write_text("version: 1\ncode: endless_step.py\nsources: {s: {read: text, path: a.txt}}\n"
                                     "datasets: {d: {from: s, steps: ['endless_step:Endless']}}\n")
    run = subprocess.Popen([sys.executable, "-m", "pipeline.cli", "run", str(tmp_path / "r.yaml"), "--store",
                            str(tmp_path / "store"), "--backend", "process", "--workers", "1", "--json",
                            "--allow-custom-stages"],
                           stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert '"planned"' in run.stdout.readline()
    until(lambda: has_child(run.pid), 600, "a child process", job=run)
    run.send_signal(signal.SIGINT)
    _, err = run.communicate(timeout=600)
    assert run.returncode == 1 and err == "error: stopped by SIGINT; what was committed is kept, run again to go on\n"


def test_ctrl_c_before_anything_runs_says_it_too(site, tmp_path, tokenmill, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("pipeline.engine.backends.inline.InlineBackend.start", interrupted)
    said = tokenmill("run", site / "recipe.yaml", "--store", tmp_path / "store", "--backend", "inline", "--quiet")
    assert said.code == 1
    assert said.err == "error: stopped by SIGINT; what was committed is kept, run again to go on\n"


def test_ctrl_c_while_the_command_is_imported_is_one_line(monkeypatch, capsys):
    real = builtins.__import__

    def interrupted(name, *rest):
        if name == "pipeline.cli.app":
            raise KeyboardInterrupt
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", interrupted)
    monkeypatch.setattr(sys, "argv", ["tokenmill", "list"])
    with pytest.raises(SystemExit) as stop:
        pipeline.cli.main()
    assert stop.value.code == 1 and capsys.readouterr().err == "stopped\n"


@pytest.mark.parametrize("root", ["s3://", "s3:///", "file://", "gs://"])
def test_an_address_without_a_bucket_is_no_folder_of_this_machine(root, tokenmill, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = tokenmill("list", "--store", root)
    assert said.code == 1 and said.err.startswith(f"error: {root}: names no bucket or folder") and not said.out
    assert said.err.count("\n") == 1 and not list(tmp_path.iterdir())


# -- plan ------------------------------------------------------------------------------------------------------------
def test_plan_as_json_and_for_people(site, tokenmill):
    at = ("plan", site / "recipe.yaml", "--store", site / "store")
    [document] = tokenmill(*at, "--json").json()
    assert document["total"]["tasks_stale"] == 0
    assert {n["name"] for n in document["nodes"]} >= {"extracted", "shards:web"}
    changed = tokenmill(*at, "--set", "datasets.clean.steps.gopher_quality.min_stop_words=4")
    assert changed.code == 0
    assert "min_stop_words: 2 → 4" in changed.out and "to run:    clean (" in changed.out
    wide = max(map(len, changed.out.splitlines()))
    assert wide <= 120 + len(str(site))


def test_plan_of_a_recipe_with_a_typo(site, tokenmill):
    said = tokenmill("plan", site / "recipe.yaml", "--set", "run.partitions=3MB")
    assert said.code == 2 and "did you mean 'partition'?" in said.err


# -- list, report ----------------------------------------------------------------------------------------------------
def test_list(site, tmp_path, tokenmill):
    store = copy(site, tmp_path)
    for name, snapshot in (("broken", "{"), ("begun", None)):
        (store / "runs" / name).mkdir()
        (store / "runs" / name / "recipe.yaml").write_text("version: 1")
        if snapshot:
            (store / "runs" / name / "progress.json").write_text(snapshot)
    rows = {r["run"]: r for r in tokenmill("list", "--store", store, "--json").json()}
    assert (rows["first"]["state"], rows["first"]["latest"]) == ("done", True)
    assert rows["first"]["done"] == rows["first"]["parts"] > 10 and Path(rows["first"]["report"]).is_file()
    assert (rows["broken"]["state"], rows["begun"]["state"], rows["begun"]["latest"]) == ("unknown", "started", False)
    said = tokenmill("list", "--store", store)
    assert said.code == 0 and "* first" in said.out and "  begun" in said.out


def test_commands_without_a_store(tmp_path, tokenmill, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for arguments in (["list"], ["report", "x"], ["inspect"], ["inspect", "clean"], ["dedup", "explain", "0"],
                      ["materialize", "x"]):
        said = tokenmill(*arguments)
        assert said.code == 2 and "there is no store at" in said.err and "TOKENMILL_STORE" in said.err, arguments


def test_the_store_comes_from_the_environment(site, tokenmill, monkeypatch):
    monkeypatch.setenv("TOKENMILL_STORE", str(site / "store"))
    assert "* first" in tokenmill("list").out


def test_report(site, tmp_path, tokenmill):
    store = copy(site, tmp_path)
    (store / "runs" / "first" / "report.html").unlink()
    [document] = tokenmill("report", "first", "--store", store, "--json").json()
    assert document["run"] == "first" and document["funnel"]["web"]
    assert (store / "runs" / "first" / "report.html").is_file()
    said = tokenmill("report", store / "runs" / "first")
    assert said.code == 0 and said.out.strip() == str(store / "runs" / "first" / "report.html")
    missing = tokenmill("report", "fisrt", "--store", store)
    assert missing.code == 2 and "no run 'fisrt'" in missing.err and "it has: first" in missing.err
    (store / "runs" / "first" / "plan.json").unlink()
    unfinished = tokenmill("report", "first", "--store", store)
    assert unfinished.code == 1 and "has not finished" in unfinished.err and "tokenmill resume" in unfinished.err


@pytest.mark.parametrize("file", ["plan.json", "tasks.parquet"])
def test_a_report_does_not_overwrite_that_of_a_run_that_ended_meanwhile(site, tmp_path, tokenmill, monkeypatch, file):
    from pipeline.report import collect

    at = copy(site, tmp_path) / "runs" / "first"
    whole = collect.collect

    def takes_long(*given):
        document = whole(*given)
        for name, data in ((file, (at / file).read_bytes() + b" "), ("report.html", b"theirs")):
            (at / name).unlink()
            (at / name).write_bytes(data)
        return document
    monkeypatch.setattr(collect, "collect", takes_long)
    said = tokenmill("report", "first", "--store", tmp_path / "store")
    assert said.code == 1 and "was run again meanwhile" in said.err
    assert (at / "report.html").read_bytes() == b"theirs"


# -- materialize -----------------------------------------------------------------------------------------------------
def test_materialize_and_copy_out(site, tmp_path, tokenmill):
    store, out = copy(site, tmp_path), tmp_path / "rows"
    said = tokenmill("materialize", "first", "--store", store, "--backend", "inline", "--quiet")
    assert (said.code, said.out) == (0, "")
    at = ("--format", "parquet", "--backend", "inline", "--out", out)
    done = tokenmill("materialize", store / "runs" / "first", *at, "--json").json()[-1]
    assert done["event"] == "done" and done["path"] == str(out) and done["folder"] == "runs/first/rows-parquet"
    copied, inside = RowSet(out), RowSet(store / done["folder"])
    assert len(copied) == len(inside) == done["rows"] == 96 + 16
    assert all(copied.row(n).tokens.tolist() == inside.row(n).tokens.tolist() for n in range(0, 112, 9))
    assert duckdb.sql(f"select count(*) from '{out}/*.parquet'").fetchall() == [(done["rows"],)]
    first = {p.name: p.stat().st_mtime_ns for p in out.glob("*.parquet")}
    again = tokenmill("materialize", "first", "--store", store, *at)
    assert again.code == 0 and f"112 samples in {len(first)} files: {out}" in again.out
    assert {p.name: p.stat().st_mtime_ns for p in out.glob("*.parquet")} == first, "what is there is not copied again"


def test_materialize_of_a_run_without_a_curriculum(site, tmp_path, tokenmill):
    store = copy(site, tmp_path)
    (store / "runs" / "first" / "curriculum.json").unlink()
    said = tokenmill("materialize", "first", "--store", store, "--backend", "inline")
    assert said.code == 1 and "add `curriculum:` to the recipe" in said.err
    assert tokenmill("materialize", "first", "--store", store, "--format", "csv").code == 2


def test_a_wrong_choice_is_refused_without_the_words_of_a_library(capsys):
    assert run_command(["shards", "export", "set", "--format", "mdz", "--out", "out"]) == 2
    assert "'--format': 'mdz' is not one of 'ds', 'megatron'" in capsys.readouterr().err
