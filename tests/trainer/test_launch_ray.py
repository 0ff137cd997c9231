"""Training on a Ray cluster gives what training without Ray gives, and says so when it cannot start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainer.synthetic import make_run
from trainer.train import train

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.ray, pytest.mark.slow]


def command(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "trainer", *arguments], cwd=ROOT, capture_output=True, text=True,
                          timeout=280, env={**os.environ, "OMP_NUM_THREADS": "1"})


def test_two_ranks_on_a_cluster_equal_one_without(ray_session, tmp_path, alone):
    from trainer.run import open_run

    folder = make_run(tmp_path, documents=200, total=1920)
    here = train(open_run(str(folder), None, str(tmp_path / "here"), []), alone, None, lambda _text: None)
    address = ray_session.get_runtime_context().gcs_address
    done = command("run", str(folder), "--address", address, "--insecure-local", "--ranks", "2", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    there = json.loads((folder / "train" / "summary.json").read_text())
    assert there["heldout_loss"] == pytest.approx(here["heldout_loss"], abs=1e-4)
    first = json.loads((folder / "train" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["world"] == 2

    broken = command("run", str(folder), "--out", str(tmp_path / "other"), "--address", address, "--insecure-local",
                     "--ranks", "1", "--device", "cuda")
    assert broken.returncode == 2                                    # the exit code of the rank, and its message
    assert "torch sees no CUDA device" in broken.stdout + broken.stderr
