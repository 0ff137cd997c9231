"""benchmarks/train_speed.py runs to its end unattended, whatever fails in it. (What it measures on a CPU means
nothing.)"""

from __future__ import annotations

import contextlib
import io
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import train_speed
from tests.processes import alive, until
from trainer.model.config import ModelConfig

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: it would be measured")


@no_gpu
def test_without_cuda_it_says_so_and_writes_what_it_found(tmp_path, monkeypatch, capsys):
    def measured(command: list[str], _seconds: float) -> tuple[int, str, str]:
        with monkeypatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
            patch.setattr(sys, "argv", command[1:])
            return train_speed.main(), printed.getvalue(), ""

    monkeypatch.setattr(train_speed, "child", measured)
    monkeypatch.setattr(sys, "argv", ["train_speed", "--out", str(tmp_path / "speed.json"), "--ways", "nanochat"])
    assert train_speed.main() == 0
    out = capsys.readouterr().out
    assert "no CUDA device" in out and "mean nothing" in out
    found = json.loads((tmp_path / "speed.json").read_text())
    assert found["smoke"] and found["device"] == "cpu" and found["peak_flops"] is None
    assert [r["way"] for r in found["results"]] == ["nanochat"]


@no_gpu
@pytest.mark.parametrize("way", train_speed.WAYS)
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
        model = train_speed.decoder(spec["model"], 100, 16, torch.float32)
        assert sum(p.numel() for p in model.parameters()) == ModelConfig(**spec["model"]).parameters(100)


def children(monkeypatch, *outcomes):
    """Replace the measuring processes by the given outcomes, one after the other. Returns the list of the micro-batches
    that were asked for."""
    asked, waiting = [], list(outcomes)

    def child(command, _seconds):
        asked.append(int(command[-1]))
        return waiting.pop(0)

    monkeypatch.setattr(train_speed, "child", child)
    return asked


def test_memory_that_runs_out_halves_the_micro_batch(monkeypatch):
    full = (1, "", "torch.OutOfMemoryError: CUDA out of memory.")
    asked = children(monkeypatch, full, full, (0, 'noise\n{"tokens_per_s": 7}\n', ""))
    found = train_speed.supervise("1b", "ours", 32768, 4096, 9)
    assert (found["micro"], found["tokens_per_s"]) == (8192, 7) and asked == [32768, 16384, 8192]
    asked = children(monkeypatch, full, full)                           # down to one sequence, and no further
    assert "out of memory" in train_speed.supervise("1b", "ours", 8192, 4096, 9)["error"] and asked == [8192, 4096]


@pytest.mark.parametrize(("outcome", "said"), [
    ((1, "", "Traceback\ntorch._inductor.exc.InductorError: LoweringException: no kernel image\n\nSet "
      "TORCHDYNAMO_VERBOSE=1 for the stack trace\n[rank0]:[W1] Warning: not destroyed"), "LoweringException: no"),
    ((1, "", "Traceback\nRuntimeError: no kernel image"), "no kernel image"), ((-9, "", ""), "exit code -9"),
    ((None, "", "compiling"), "no result after 9 s")])
def test_what_fails_is_a_line_of_the_table(monkeypatch, outcome, said):
    children(monkeypatch, outcome)
    found = train_speed.supervise("125m", "titan", 4096, 2048, 9)
    assert said in found["error"]
    assert f"failed: {found['error']}" in train_speed.row({"model": "125m", "way": "titan", **found})


def test_a_measurement_that_takes_too_long_leaves_nothing_behind(tmp_path, monkeypatch):
    """torch's compile workers are children of it, and would hold its pipes."""
    script = f"sleep 1000 & echo $! > {tmp_path}/worker; echo said; echo compiling >&2; > {tmp_path}/begun; sleep 1000"

    class Begun(subprocess.Popen):
        """A process whose timeout only begins once it has created the file `begun`."""

        def wait(self, timeout=None):
            until((tmp_path / "begun").exists, 120, "what it says")
            return super().wait(timeout)

    monkeypatch.setattr(subprocess, "Popen", Begun)
    assert train_speed.child(["sh", "-c", script], 0.5) == (None, "said\n", "compiling\n")
    worker = Path(tmp_path, "worker").read_text().strip()
    until(lambda: not alive(int(worker)), 120, "the end of the worker")
    assert train_speed.child(["sh", "-c", "echo 1; exit 3"], math.inf) == (3, "1\n", "")


@no_gpu
def test_it_goes_on_where_time_ran_out(tmp_path, monkeypatch, capsys):
    """What failed is measured again; what another device or torch measured counts for nothing."""
    out = tmp_path / "new" / "speed.json"
    good = (0, '{"tokens_per_s": 7, "spread": 0, "mfu": null, "memory_gb": 0}', "")

    def main(*more: str) -> list[str]:
        monkeypatch.setattr(train_speed.sys, "argv", ["train_speed", "--out", str(out), *more])
        train_speed.main()
        return [r["way"] for r in json.loads(out.read_text())["results"] if "error" not in r]

    children(monkeypatch, good, (1, "", "no"))
    assert main("--ways", "ours", "nanochat") == ["ours"]
    assert main("--minutes", "0.1") == ["ours"] and "out of time before smoke nanochat" in capsys.readouterr().out
    asked = children(monkeypatch, good, good, good)
    assert main() == ["ours", "nanochat", "titan", "packed"] and len(asked) == 3
    out.write_text(out.read_text().replace(torch.__version__, "0.1"))
    children(monkeypatch, good)
    assert main("--ways", "packed") == ["packed"]


@pytest.mark.parametrize(("mfu", "said"), [(0.46, "goal reached"), (0.40, "floor reached"), (0.3, "neither reached")])
def test_floor_and_goal_are_held_against_ours_and_the_better_of_the_others(mfu, said):
    common = {"model": "125m", "floor": 0.38, "goal": 0.45}
    results = [{**common, "way": "ours", "mfu": mfu, "tokens_per_s": 90.0},
               {**common, "way": "nanochat", "mfu": 0.5, "tokens_per_s": 100.0},
               {**common, "way": "titan", "mfu": None, "error": "x"}]
    [line] = train_speed.verdicts(results)
    assert said in line and "0.90 of the speed of nanochat" in line
