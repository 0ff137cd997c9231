"""benchmarks/train_speed.py: it runs unattended, whatever fails in it. (What it measures on a CPU means nothing.)"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import train_speed
from trainer.model import ModelConfig

ROOT = Path(__file__).resolve().parents[2]


no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: it would be measured")


@no_gpu
def test_without_cuda_it_says_so_and_writes_what_it_found(tmp_path):
    done = subprocess.run([sys.executable, str(ROOT / "benchmarks" / "train_speed.py"), "--out", "speed.json", "--ways",
                           "titan"], cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no CUDA device" in done.stdout and "mean nothing" in done.stdout
    found = json.loads((tmp_path / "speed.json").read_text())
    assert found["smoke"] and found["device"] == "cpu" and found["peak_flops"] is None
    assert [r["way"] for r in found["results"]] == ["titan"]


@no_gpu
@pytest.mark.parametrize("way", ["ours", "packed", "nanochat"])
def test_every_way_trains_a_tiny_model(way):
    found = train_speed.measure(train_speed.SMOKE, way, 256, True)
    assert len(found["windows"]) == train_speed.WINDOWS and min(found["windows"]) > 0
    assert found["tokens_per_s"] == sorted(found["windows"])[train_speed.WINDOWS // 2] and found["mfu"] is None


def test_the_shapes_have_the_sizes_they_are_called_by():
    for name, size in (("125m", 124e6), ("350m", 360e6), ("1b", 1.08e9)):
        spec = train_speed.MODELS[name]
        assert ModelConfig(**spec["model"]).parameters(train_speed.VOCAB) == pytest.approx(size, rel=0.02)
        assert spec["batch"] % spec["micro"] == 0 and spec["micro"] % spec["sequence"] == 0
        assert spec["floor"] < spec["goal"]


def test_the_baseline_has_the_parameters_of_the_trainers_model():
    for spec in (train_speed.SMOKE, {"model": {**train_speed.SMOKE["model"], "layers": 3, "kv_heads": 4}}):
        model = train_speed.decoder(spec["model"], 100, 16)
        assert sum(p.numel() for p in model.parameters()) == ModelConfig(**spec["model"]).parameters(100)


def processes(monkeypatch, *outcomes):
    """subprocess.run that ends as told, one after the other; the micro-batches it was asked for."""
    asked, waiting = [], list(outcomes)

    def run(command, **_):
        asked.append(int(command[-1]))
        outcome = waiting.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        code, out, err = outcome
        return SimpleNamespace(returncode=code, stdout=out, stderr=err)

    monkeypatch.setattr(train_speed.subprocess, "run", run)
    return asked


def test_memory_that_runs_out_halves_the_micro_batch(monkeypatch):
    full = (1, "", "torch.OutOfMemoryError: CUDA out of memory.")
    asked = processes(monkeypatch, full, full, (0, 'noise\n{"tokens_per_s": 7}\n', ""))
    assert train_speed.supervise("1b", "ours", 32768, 4096, 9) == {"micro": 8192, "tokens_per_s": 7}
    assert asked == [32768, 16384, 8192]
    asked = processes(monkeypatch, full, full)                          # down to one sequence, and no further
    assert "out of memory" in train_speed.supervise("1b", "ours", 8192, 4096, 9)["error"] and asked == [8192, 4096]


@pytest.mark.parametrize(("outcome", "said"), [
    ((1, "", "Traceback\nRuntimeError: no kernel image"), "no kernel image"), ((-9, "", ""), "exit code -9"),
    (subprocess.TimeoutExpired("x", 9), "no result after 9 s")])
def test_what_fails_is_a_line_of_the_table(monkeypatch, outcome, said):
    processes(monkeypatch, outcome)
    found = train_speed.supervise("125m", "titan", 4096, 2048, 9)
    assert said in found["error"]
    assert f"failed: {found['error']}" in train_speed.row({"model": "125m", "way": "titan", **found})


@pytest.mark.parametrize(("mfu", "said"), [(0.46, "goal reached"), (0.40, "floor reached"), (0.3, "neither reached")])
def test_floor_and_goal_are_held_against_ours_and_the_better_of_the_others(mfu, said):
    common = {"model": "125m", "floor": 0.38, "goal": 0.45}
    results = [{**common, "way": "ours", "mfu": mfu, "tokens_per_s": 90.0},
               {**common, "way": "nanochat", "mfu": 0.5, "tokens_per_s": 100.0},
               {**common, "way": "titan", "mfu": None, "error": "x"}]
    [line] = train_speed.verdicts(results)
    assert said in line and "0.90 of the speed of nanochat" in line
