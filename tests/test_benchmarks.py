"""The benchmarks still run as commands, with little input. The figures that they measure here mean nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tokenizer.train import train_bpe

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.mark.slow
@pytest.mark.parametrize(("script", "arguments", "says"), [
    ("many_files.py", ["--files", "300"], "1 to be indexed"),
    ("log_replay.py", ["--records", "3000", "--segments", "1000", "--delay", "0"], "most of them removed"),
    ("driver_memory.py", ["--partitions", "200"], "tasks: resume"),
    ("playground.py", ["--documents", "4000", "--parts", "2", "--repeat", "1"], "a move of the cube"),
    ("tokens.py", ["--streams", "3", "12", "--block", "2000", "--batch", "100", "--repeat", "2"], "in 10 groups"),
    ("viewers.py", ["--viewers", "4", "--seconds", "1"], "0 errors"),
    ("materialize.py", ["--gb", "0.005"], "MB per CPU second"),
    ("loader.py", ["--tokens", "2000000", "--shards", "2"], "numpy.memmap"),
    ("dedup_driver_memory.py", ["--documents", "4000"], '"planted": 200,\n "removed": 200'),
    ("service.py", ["--documents", "2000", "--parts", "3", "--texts", "500", "--repeat", "1"],
     "peak with four requests"),
    ("engine_overhead.py", ["--docs", "500", "1000", "--workers", "1"], "by the engine"),
])
def test_a_benchmark_runs(tmp_path, script, arguments, says):
    done = subprocess.run([sys.executable, FOLDER / script, *arguments], capture_output=True, text=True, timeout=900,
                          check=False, cwd=tmp_path)
    assert "Traceback" not in done.stderr, done.stderr
    assert says in done.stdout and done.returncode in (0, 1)       # 1: the figure wanted was missed


def test_the_metrics_of_code_are_those_of_each_commit(tmp_path):
    """In a small repository, whose figures are known: a commit, then the one that adds tests/frozen.py, then a change
    that is not committed."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}

    def git(*arguments: str) -> None:
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b.example", "-c", "commit.gpgsign=false",
                        *arguments], cwd=tmp_path, env=env, capture_output=True, check=True)

    def write(file: str, text: str) -> None:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)

    for file in ("stages/catalog.py", "pipeline/a.py", "tokenizer/a.py", "trainer/a.py", "tests/test_a.py"):
        write(file, "x = 1\n")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "begin")
    write("tests/frozen.py", "")
    git("add", ".")
    git("commit", "-qm", "a" * 80)
    write("pipeline/a.py", '"""Says nothing."""\nimport pipeline.b\nimport tokenizer.a\n')
    write("tokenizer/a.py", "import pipeline.a\n")
    write("pipeline/b.py", "from pipeline import a\ndef f():\n    found = a\n    return found\n")
    write("tests/test_a.py", "import time\ntime.sleep(1)\n")
    write("benchmarks/code_metrics.py", (FOLDER / "code_metrics.py").read_text())
    done = subprocess.run([sys.executable, "benchmarks/code_metrics.py"], cwd=tmp_path, env=env, capture_output=True,
                          text=True, check=True)
    figures = {line[:62].strip(): line[62:].split() for line in done.stdout.splitlines()[1:]}
    assert {row: pair for row, pair in figures.items() if len(set(pair)) > 1} == {
        "circles of files": ["0", "1"], "mutual imports of folders": ["0", "1"], "sleeps in tests": ["0", "1"],
        "product: lines": ["4", "10"], "product: statements": ["4", "9"], "tests: lines": ["1", "2"],
        "commit subjects over 72 characters": ["0", "1"],
        "locals called found, made, mine, said, some, told": ["0", "1"]}


@pytest.mark.slow
def test_shards_are_equal_to_those_of_datatrove(tmp_path):
    pytest.importorskip("datatrove")
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(" ".join(f"word{i * j % 97} of some text," for j in range(40)) for i in range(1, 60)))
    train_bpe([text.read_text()], 400, tmp_path / "tokenizer.json")
    done = subprocess.run([sys.executable, FOLDER / "shards.py", "--tokenizer", tmp_path / "tokenizer.json", "--sizes",
                           "1", "2", "--repeat", "1", "--work", tmp_path / "work", text],
                          capture_output=True, text=True, timeout=900, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "tokens of both sides" in done.stdout and "ratio" in done.stdout


@pytest.mark.slow
def test_mutants_are_killed_by_the_tests_that_run_their_line_and_found_again(tmp_path):
    pytest.importorskip("pytest_cov")
    for file, text in {"pipeline/a.py": "def low(a, b):\n    if a < b:\n        return a\n    return b\n",
                       "tests/test_a.py": "import os, subprocess, sys\nfrom pipeline.a import low\n"
                       "def test_first(): assert low(1, 2) == 1\n"
                       "def test_child(): assert '7' in subprocess.check_output([sys.executable, '-c', "
                       "'from pipeline.a import low; print(low(8, 7))'], text=True)\n",
                       "tests/conftest.py": "", "stages/a.py": "", "tokenizer/a.py": "", "trainer/a.py": ""}.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text)

    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    env |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "-p xdist.plugin -p pytest_cov.plugin"}

    def run(script, *arguments):
        done = subprocess.run([sys.executable, FOLDER / script, "data", "--tree", tmp_path, *arguments], cwd=tmp_path,
                              capture_output=True, text=True, check=False, env=env)
        assert done.returncode == 0, done
        return done.stdout

    assert run("branches.py", "--measure").split()[-6:] == ["total", "4", "100.0", "2", "0", "100.0"]
    durations = tmp_path / "data" / "durations.txt"
    assert re.search(r"^[\d.]+s call +tests/test_a\.py::test_child$", durations.read_text(), re.M)
    durations.write_text("9.00s call     tests/test_a.py::test_child\n")      # not as measured on a busy machine
    run("mutants.py", "--count", "3", "--out", "first.json")
    killed = {m["old"]: m["by"] for m in json.loads((tmp_path / "first.json").read_text())}
    assert killed == {"if a < b:": "tests/test_a.py::test_first", "return a": "tests/test_a.py::test_first",
                      "return b": "tests/test_a.py::test_child"}
    (tmp_path / "stages/b.py").write_text("\n# moved\n" + (tmp_path / "pipeline/a.py").read_text())
    (tmp_path / "pipeline/a.py").write_text("from stages.b import low\n")
    run("branches.py", "--measure")
    assert "stages/b.py" in run("mutants.py", "--replay", "first.json")


def test_the_training_of_task_beside_goes_on_after_leaps_of_the_gradient_norm(tmp_path):
    torch = pytest.importorskip("torch")
    from benchmarks.task_beside import make_run
    from trainer.loop.run import open_run
    from trainer.loop.stability import SpikeDetector

    config = open_run(str(make_run(tmp_path, 2, ["quiz"], tmp_path / "data")), None, None, []).config
    detector = SpikeDetector(config.stability, torch.device("cpu"))
    sums = torch.tensor([5.0, 1.0], dtype=torch.float64)
    skipped = [bool(detector.judge(0, sums, torch.tensor(norm))[0]) for norm in [0.3, 0.31] * 100 + [9.0, float("nan")]]
    assert skipped == [False] * 201 + [True]
