"""The benchmarks still run as commands, with little input. The figures that they measure here mean nothing."""

from __future__ import annotations

import json
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
    ("viewers.py", ["--viewers", "8", "--seconds", "4"], "0 errors"),
    ("materialize.py", ["--gb", "0.005"], "MB per CPU second"),
    ("loader.py", ["--tokens", "2000000", "--shards", "2"], "numpy.memmap"),
    ("dedup_driver_memory.py", ["--documents", "4000"], '"planted": 200,\n "removed": 200'),
    ("service.py", ["--documents", "2000", "--parts", "3", "--texts", "500", "--repeat", "1"],
     "peak with four requests"),
    ("code_metrics.py", ["--at", "HEAD"], "product: statements"),
    ("engine_overhead.py", ["--docs", "500", "1000", "--backend", "process", "inline"], "by the engine"),
])
def test_a_benchmark_runs(tmp_path, script, arguments, says):
    done = subprocess.run([sys.executable, FOLDER / script, *arguments], capture_output=True, text=True, timeout=900,
                          check=False, cwd=tmp_path)
    assert "Traceback" not in done.stderr, done.stderr
    assert says in done.stdout and done.returncode in (0, 1)       # 1: the figure wanted was missed


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

    def run(script, *arguments):
        done = subprocess.run([sys.executable, FOLDER / script, "data", "--tree", tmp_path, *arguments], cwd=tmp_path,
                              capture_output=True, text=True, check=False)
        assert done.returncode == 0, done
        return done.stdout

    assert run("branches.py", "--measure").split()[-6:] == ["total", "4", "100.0", "2", "0", "100.0"]
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
