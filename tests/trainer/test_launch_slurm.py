"""`tokenmill train slurm`: the script does what was asked for, whatever characters paths have. It is run with stand-ins
for `srun` and `scontrol`: it stops before its time is over, requeues itself, and ends with the same result as without
the stop."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.test_slurm_runs import check_nothing_is_left, host, start  # noqa: F401  (host is a fixture)
from tests.processes import alive, descendants, named, signal_all, stopped, until
from tests.trainer.synthetic import losses, make_run
from trainer.__main__ import main
from trainer.checkpoint.checkpoints import complete
from trainer.launch.slurm import script

ROOT = Path(__file__).resolve().parents[2]
#: as srun(1) and scancel(1) have it: srun makes SIGKILL of a SIGTERM of its own, scancel signals what runs in steps.
#: This scancel also lets processes go on that the test has stopped (SIGSTOP)
SRUN = r"""#!/usr/bin/env bash
tasks=1
while [[ "$1" == --* ]]; do
    case "$1" in --ntasks=*) tasks=${1#*=} ;; esac
    shift
done
for ((i = 0; i < tasks; i++)); do
    SLURM_LOCALID=$i SLURM_PROCID=$i "$@" &
    pids+=($!)
done
[ "$1" = hostname ] || echo "${pids[*]}" > "$STAND_IN/step"
trap 'echo "srun: forcing job termination"; for p in "${pids[@]}"; do kill -KILL $(pgrep -P $p) $p; done' TERM INT
code=0
for pid in "${pids[@]}"; do
    while true; do
        wait "$pid"
        got=$?
        kill -0 "$pid" 2> /dev/null || break
    done
    [ $got -eq 0 ] || code=$got
done
exit $code
"""
SCANCEL = r"""#!/usr/bin/env bash
[ "$*" = "--signal=TERM $SLURM_JOB_ID" ] || exit 1
for p in $(cat "$STAND_IN/step"); do for s in TERM CONT; do kill -$s $(pgrep -P $p) $p; done; done
"""
linux = pytest.mark.skipif(sys.platform != "linux", reason="a job script for Linux")


def ended(job: subprocess.Popen[bytes], log: Path, seconds: float = 600) -> int:
    """Wait for a job and return its exit code. If it does not end, fail and show its log."""
    try:
        return job.wait(seconds)
    except subprocess.TimeoutExpired:
        raise AssertionError(log.read_text()[-5000:]) from None


def test_the_script_in_deploy_is_the_one_without_a_run():
    assert (ROOT / "deploy" / "slurm" / "train.sbatch").read_text() == script()


def test_what_was_asked_for_stands_in_the_script(tmp_path, capsys):
    run = make_run(tmp_path, documents=60, total=960)
    assert main(["slurm", str(run), "--nodes", "2", "--gpus-per-node", "8", "--partition", "gpu",
                 "--time", "2-00:00:00", "--warning", "300"]) == 0
    made = run / "train.sbatch"
    said = capsys.readouterr().out
    assert f"sbatch {made}" in said and "16 ranks" in said
    assert "phase stable: a batch of 5 sequences leaves 11 ranks idle" in said
    text = made.read_text()
    for line in ("--nodes=2", "--gpus-per-node=8", "--partition=gpu", "--time=2-00:00:00", "--signal=B:USR1@300",
                 "--requeue"):
        assert f"\n#SBATCH {line}\n" in text
    assert "--shutdown-timeout=280 " in text and "@" not in text.replace("USR1@300", "").replace('"$@"', "")\
        .replace("[@]", "")
    assert subprocess.run(["bash", "-n", str(made)]).returncode == 0
    keys = ("parallel.tensor=2", "model.heads=2", "model.kv_heads=2", "model.ffn=64")
    divided = [x for key in keys for x in ("--set", key)]
    assert main(["slurm", str(run), "--script", str(tmp_path / "odd"), "--gpus-per-node", "3", *divided]) == 2
    assert "2 does not divide 3 ranks" in capsys.readouterr().err and not (tmp_path / "odd").exists()


@linux
def test_paths_and_settings_reach_the_ranks_as_they_are(host, capsys):  # noqa: F811
    store = host / "a $(touch made) 'place'"
    run = make_run(store, documents=60, total=960)
    script_file = host / "job.sbatch"
    assert main(["slurm", str(run), "--set", "optimizer.lr=0.002", "--out", str(host / "o; touch made"),
                 "--script", str(script_file)]) == 0
    (host / "bin" / "torchrun").write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@" > "$STAND_IN/given"\n')
    (host / "bin" / "torchrun").chmod(0o755)
    job = start(host, str(script_file), "--quiet", nodes=2)
    assert ended(job, host / "job-job.sbatch-0.log") == 0
    given = (host / "given").read_text().splitlines()
    assert given[given.index("-m"):] == ["-m", "trainer", "run", str(run), "--out", str(host / "o; touch made"),
                                         "--set", "optimizer.lr=0.002", "--quiet"]
    assert "--nnodes=2" in given and not (host / "made").exists() and not Path("made").exists()


@pytest.mark.parametrize(("arguments", "said"), [
    (["--partition", "gpu\n#SBATCH --uid=root"], "not the name of a partition"),
    (["--time", "tomorrow"], "2-00:00:00"), (["--warning", "20"], "more than 20 seconds"),
    (["--set", "optimizer.lrr=1"], "optimizer.lrr")])
def test_what_slurm_would_not_take_is_refused_before_anything_is_written(tmp_path, capsys, arguments, said):
    run = make_run(tmp_path, documents=60, total=960)
    assert main(["slurm", str(run), *arguments]) == 2
    assert said in capsys.readouterr().err
    assert not (run / "train.sbatch").exists()


@linux
@pytest.mark.slow
def test_on_two_nodes_it_is_stopped_and_goes_on_as_if_it_had_not_been(host, tmp_path, monkeypatch):  # noqa: F811
    run = make_run(tmp_path, documents=1800, total=46_080)
    out = host / "out"
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name, text in (("srun", SRUN), ("scancel", SCANCEL)):
        (host / "bin" / name).write_text(text)
        (host / "bin" / name).chmod(0o755)
    script_file = host / "train.sbatch"
    assert main(["slurm", str(run), "--out", str(out), "--nodes", "2", "--script", str(script_file)]) == 0
    job, log = start(host, str(script_file), "--device", "cpu", nodes=2), host / "job-train.sbatch-0.log"

    until(lambda: len(losses(out)) >= 3, 600, "step 3", job=job, log=log)
    ranks = [p for p in descendants(job.pid) if named(p, "trainer\0run") and not named(p, "torchrun")]
    assert signal_all(ranks, signal.SIGSTOP)              # they must not end before the signal comes
    until(lambda: all(stopped(p) or not alive(p) for p in ranks), what="the stop")
    job.send_signal(signal.SIGUSR1)                       # what --signal=B:USR1@120 sends to the batch shell
    assert ended(job, log) != 0 and "back into the queue" in log.read_text(), log.read_text()[-5000:]
    assert (host / "scontrol.log").read_text().startswith("requeue ")
    assert "forcing job termination" not in log.read_text()
    done = len(losses(out))
    assert max(c.step for c in complete(out / "checkpoints")) == done        # none of its steps is lost
    check_nothing_is_left(host)

    again = start(host, str(script_file), "--device", "cpu", nodes=2, restart=1)
    log = host / "job-train.sbatch-1.log"
    assert ended(again, log) == 0, log.read_text()[-5000:]
    check_nothing_is_left(host)
    assert main(["run", str(run), "--out", str(tmp_path / "alone"), "--device", "cpu", "--quiet"]) == 0
    assert 3 <= done < len(losses(out))
    assert losses(out) == pytest.approx(losses(tmp_path / "alone"), rel=1e-3)
