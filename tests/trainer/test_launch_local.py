"""Several ranks on this machine: started by the real torchrun, and by our own launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.base.clock import Clock
from pipeline.cli.training import forward
from tests.processes import until
from tests.trainer.processes import begin
from tests.trainer.synthetic import losses, make_run
from trainer.__main__ import COMMANDS, main
from trainer.base.config import ConfigError
from trainer.base.interrupts import interruptions
from trainer.checkpoint.checkpoints import complete
from trainer.launch import local
from trainer.loop.metrics_buffer import MetricsBuffer
from trainer.loop.run import open_run
from trainer.loop.train import train
from trainer.observe.metrics import read

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_torchrun_is_taken_at_its_word(tmp_path, alone):
    """RANK, WORLD_SIZE and the store are torchrun's; the losses are those of one process."""
    folder = make_run(tmp_path, documents=200, total=1920)
    train(open_run(str(folder), None, str(tmp_path / "one"), []), alone, None, lambda _text: None)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "trainer", "run",
         str(folder), "--device", "cpu", "--ranks", "7"],              # --ranks is for those who have no launcher
        cwd=ROOT, capture_output=True, text=True, timeout=600, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    assert [line["world"] for line in read(folder / "train" / "metrics.jsonl") if line["event"] == "start"] == [2]
    assert done.stdout.count("held-out loss") == 1                     # one rank speaks
    assert losses(folder / "train") == pytest.approx(losses(tmp_path / "one"), abs=1e-4)
    assert len(losses(tmp_path / "one")) >= 10


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """A function that makes the launcher start a shell script instead of `python -m trainer`."""
    def write(script: str) -> str:
        path = tmp_path / "rank.sh"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setattr(local.sys, "executable", str(path))
        return str(path)

    return write


class FastClock(Clock):
    """A clock that runs 50 times as fast, so that a limit of ten seconds takes a fifth of a second."""

    def now(self) -> float:
        return super().now() * 50


@pytest.mark.parametrize(("script", "code", "said"), [
    ("exit 0", 0, ""), ("exit $((2 * RANK))", 2, ""),
    ("[ $RANK = 0 ] || kill -9 $$; exec sleep 1000", 137, "rank 1 was ended by SIGKILL (the system does that when "),
    ("[ $RANK = 0 ] || kill -6 $$; exec sleep 1000", 134, "rank 1 was ended by SIGABRT; the other ranks")])
def test_one_rank_that_fails_ends_all_of_them_and_is_named(stand_in, capfd, script, code, said):
    stand_in(script)
    assert local.launch(["run"], 2, "cpu", clock=FastClock()) == code
    told = capfd.readouterr().err
    assert said in told if said else not told


def test_a_signal_that_comes_while_a_rank_is_being_started_reaches_all(stand_in, monkeypatch, capfd):
    stand_in("exec sleep 60")
    started = []

    class Rank(subprocess.Popen):
        def __init__(self, *arguments, **more):
            super().__init__(*arguments, **more)
            started.append(self)
            if len(started) == 1:
                os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(subprocess, "Popen", Rank)
    assert local.launch(["run"], 2, "cpu") == 128 + signal.SIGTERM
    assert [rank.returncode for rank in started] == [-signal.SIGTERM] * 2


def test_ctrl_c_during_set_up_is_no_traceback(tmp_path, monkeypatch, capfd):
    """torch takes seconds to import, on eight ranks at once; also through `tokenmill train`."""
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("trainer.loop.run.open_run", interrupted)
    monkeypatch.setattr("trainer.__main__.failures", pytest.fail)      # would import what has just been interrupted
    for command in (main, forward):
        assert command(["run", str(tmp_path)]) == 1
        assert capfd.readouterr().err == "stopped: nothing was saved\n"
    monkeypatch.setattr("trainer.tools.task_eval.run", interrupted)     # saves each task that is scored
    assert main(["eval", str(tmp_path)]) == 1 and capfd.readouterr().err == "stopped\n"


def test_ctrl_c_saves_also_when_it_ends_who_listens(tmp_path, monkeypatch):
    """`train run RUN 2>&1 | tee log`: a terminal sends it to both, and what is said then raises."""
    folder = make_run(tmp_path, documents=60, total=960)
    reader, writer = os.pipe()
    flush, done = MetricsBuffer.flush, []

    def interrupted_after_two(self, interrupted):
        found = flush(self, interrupted)
        done.append(1)
        if len(done) == 2:
            os.close(reader)
            os.kill(os.getpid(), signal.SIGINT)
        return found

    monkeypatch.setattr(MetricsBuffer, "flush", interrupted_after_two)
    with open(writer, "w") as listener:
        monkeypatch.setattr(sys, "stdout", listener)
        assert main(["run", str(folder), "--device", "cpu"]) == 128 + signal.SIGINT
        print("what is left", flush=True)             # as when Python ends: an error there would change the exit code
        monkeypatch.undo()
    assert [c.step for c in complete(folder / "train" / "checkpoints")] == [len(losses(folder / "train"))] == [3]


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_more_ranks_than_gpus_are_refused_before_they_start(stand_in, monkeypatch, device):
    stand_in("exit 0")
    monkeypatch.setattr(local.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(local.torch.cuda, "device_count", lambda: 4)
    with pytest.raises(ConfigError, match="--ranks 8: a rank takes a GPU, and this machine has 4"):
        local.launch(["run"], 8, device)
    assert local.launch(["run"], 4, device) == 0


@pytest.mark.parametrize("arguments", [["--ranks", "8"], []])
def test_a_gpu_that_is_not_there_is_said_once_before_anything_begins(monkeypatch, capfd, arguments):
    """Not by every rank, and not after a download: there is no such run."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(subprocess, "Popen", None)
    assert main(["run", "s3://nowhere/runs/r", "--out", "out", "--device", "cuda", *arguments]) == 2
    assert capfd.readouterr().err == ("error: --device cuda: torch sees no CUDA device; use --device cpu, or a CUDA "
                                      "build of torch\n")


def launches(folder: Path, rank: Path) -> None:
    """Run the launcher with two ranks, each of which is the script `rank`."""
    os.chdir(folder)
    sys.executable = str(rank)
    local.launch(["run"], 2, "cpu")


def test_nobody_trains_on_when_the_launcher_is_killed(tmp_path):
    """They are asked to stop in good order: the next start would train beside them."""
    rank = tmp_path / "rank.sh"
    rank.write_text("#!/bin/sh\ntrap 'touch stopped.$RANK; exit' TERM\ntouch started.$RANK\n"
                    "while :; do sleep 0.1; done\n")
    rank.chmod(0o755)
    launcher = begin(launches, tmp_path, rank)
    try:
        until(lambda: len(list(tmp_path.glob("started.*"))) == 2, 600, "two ranks")
    finally:
        launcher.kill()
        launcher.join()
    until(lambda: len(list(tmp_path.glob("stopped.*"))) == 2, 600, "their end")


@pytest.mark.parametrize(("rank", "times"), [("0", 1), ("1", 0)])
def test_a_signal_to_all_ranks_is_told_once(monkeypatch, capfd, rank, times):
    """Under Slurm each of 32 ranks gets two of them."""
    monkeypatch.setenv("RANK", rank)
    with interruptions() as told:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
        assert told() == signal.SIGTERM
    assert capfd.readouterr().err.count("SIGTERM: stopping after this step") == times


def test_a_closed_terminal_ends_nothing_that_was_started_with_nohup():
    old = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interruptions() as told:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not told()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, old)


def test_help_imports_no_torch():
    """Of all commands, and of each."""
    script = ("import sys\nfrom trainer.__main__ import COMMANDS, main\n"
              "assert [main(['--help'])] + [main([c, '--help']) for c in COMMANDS] == [0] * (len(COMMANDS) + 1)\n"
              "print([m for m in ('torch', 'ray', 'pyarrow') if m in sys.modules])")
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
    assert all(f"usage: tokenmill train {command} " in done.stdout for command in COMMANDS)


def test_where_another_process_trains_a_start_is_refused(tmp_path, capsys, monkeypatch):
    folder = make_run(tmp_path, documents=60, total=960)
    monkeypatch.setattr("trainer.base.files._process", lambda pid: f"{pid} 1 boot")
    (folder / "train").mkdir()
    (folder / "train" / "trainer.pid").write_text("1 1 boot")
    assert main(["run", str(folder), "--device", "cpu"]) == 2
    assert "train: process 1 of this machine trains there" in capsys.readouterr().err
    assert [p.name for p in (folder / "train").iterdir()] == ["trainer.pid"]


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
    assert main(["run", "x", "--restarts", "-1"]) == 2 and "argument --restarts: '-1' is not" in capsys.readouterr().err
    assert main(["-h", "run"]) == 0 and "    run " in capsys.readouterr().out
