"""Ranks on this machine: under torchrun as it is, and the command line that starts them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainer.synthetic import make_run
from trainer.__main__ import COMMANDS, main
from trainer.metrics import read
from trainer.run import open_run
from trainer.train import train

ROOT = Path(__file__).resolve().parents[2]


def losses(out: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in read(out / "metrics.jsonl") if line["event"] == "step"}


def test_torchrun_is_taken_at_its_word(tmp_path, alone):
    """RANK, WORLD_SIZE and the store are torchrun's; the losses are those of one process."""
    folder = make_run(tmp_path, documents=200, total=1920)
    train(open_run(str(folder), None, str(tmp_path / "one"), []), alone, None, lambda _text: None)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "trainer", "run",
         str(folder), "--device", "cpu", "--ranks", "7"],              # --ranks is for those who have no launcher
        cwd=ROOT, capture_output=True, text=True, timeout=200, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    assert [line["world"] for line in read(folder / "train" / "metrics.jsonl") if line["event"] == "start"] == [2]
    assert done.stdout.count("held-out loss") == 1                     # one rank speaks
    assert losses(folder / "train") == pytest.approx(losses(tmp_path / "one"), abs=1e-4)
    assert len(losses(tmp_path / "one")) >= 10


def test_help_imports_no_torch():
    """Of all commands, and of each."""
    script = ("import sys\nfrom trainer.__main__ import COMMANDS, main\n"
              "assert [main(['--help'])] + [main([c, '--help']) for c in COMMANDS] == [0] * (len(COMMANDS) + 1)\n"
              "print([m for m in ('torch', 'ray', 'pyarrow') if m in sys.modules])")
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
    assert all(f"usage: tokenmill train {command} " in done.stdout for command in COMMANDS)


@pytest.mark.parametrize(("arguments", "said"), [
    (["--gpus", "2"], "need --address"), (["--least", "1"], "need --address"),
    (["--address", "auto"], "--address needs --gpus N"),
    (["--address", "auto", "--ranks", "2", "--least", "3"], "--least 3 is more than the 2 ranks"),
    (["--address", "auto", "--ranks", "2", "--gpus", "2"], "not both")])
def test_what_does_not_go_together_is_said(tmp_path, capsys, arguments, said):
    assert main(["run", str(make_run(tmp_path, documents=60, total=960)), *arguments]) == 2
    assert said in capsys.readouterr().err


def test_commands_that_do_not_exist_are_usage_errors(capsys):
    assert main(["rnu"]) == 2 and "invalid choice: 'rnu'" in capsys.readouterr().err
    assert main([]) == 2 and main(["run"]) == 2
