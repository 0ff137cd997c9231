"""The job scripts in deploy/slurm are really run: several Ray nodes on this machine, with stand-ins for `srun` and
`scontrol` that start what they are given as local processes. What Slurm does beyond that (other hosts, cgroups) is not
tested. The script for training is tested by tests/trainer/test_launch_slurm.py."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pipeline.recipe import load_recipe
from pipeline.run import make_backend, run_recipe
from tests.corpus import write_warcs
from tests.e2e.test_same_bytes import result
from tests.processes import named, until

ROOT = Path(__file__).resolve().parents[2]
SLURM = ROOT / "deploy" / "slurm"

pytestmark = [pytest.mark.chaos, pytest.mark.xdist_group("ray"),
              pytest.mark.skipif(sys.platform != "linux", reason="child processes need Linux")]

SRUN = r"""#!/usr/bin/env bash
# The options of srun that matter here, then a command: --ntasks of it, as the tasks of one host. Signals go to all.
tasks=1
while [[ "$1" == --* ]]; do
    case "$1" in --ntasks=*) tasks=${1#*=} ;; esac
    shift
done
echo "$tasks: $*" >> "$STAND_IN/srun.log"
cp "${RAY_AUTH_TOKEN_PATH:-/dev/null}" "$STAND_IN/token" 2> /dev/null
for ((i = 0; i < tasks; i++)); do
    SLURM_LOCALID=$i SLURM_PROCID=$i "$@" &
    pids+=($!)
done
trap 'kill -TERM "${pids[@]}" 2> /dev/null' TERM INT
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
SCONTROL = r"""#!/usr/bin/env bash
if [ "$1 $2" = "show hostnames" ]; then tr , '\n' <<< "$3"; else echo "$*" >> "$STAND_IN/scontrol.log"; fi
"""
HOSTNAME = "#!/usr/bin/env bash\necho fe80::1 127.0.0.1\n"

#: a stage of one's own that keeps every document. It holds the last page while a file exists, so that no run ends
#: before it was interrupted
HELD = '''
import time
from pathlib import Path

from stages.stage import Stage


class Held(Stage):
    name = "held"

    def process(self, doc):
        while doc.url.endswith("/89.html") and Path({held!r}).exists():
            time.sleep(0.02)
        return None
'''
RECIPE = """
version: 1
code: [./held_stage.py]
sources: {web: {read: warc, path: crawl/*.warc.gz}}
datasets:
  extracted: {from: web, steps: [{html: {engine: resiliparse}}]}
  clean: {from: extracted, steps: ["held_stage:Held", gopher_quality, pii]}
  deduped: {from: clean, steps: [{exact: {}}]}
tokenizer: {train: {kind: bpe, vocab: 600, from: deduped, sample: 100KB}}
shards: {web: {from: deduped, longest: 256, val: 5%}}
curriculum:
  total: 20k
  phases: [{name: all, until: 100%, sequence: 128, batch: 1024, mix: {web: 1}, on_exhausted: repeat}]
train: {model: {preset: demo}, optimizer: {kind: adamw}}
run: {partition: 60KB}
"""


@pytest.fixture
def host():
    """A folder with the stand-ins in bin/. Its path is short, because Ray's sockets are below it and their paths have a
    limit."""
    top = Path(tempfile.mkdtemp(prefix="tms", dir="/tmp"))
    (top / "bin").mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("hostname", HOSTNAME)):
        (top / "bin" / name).write_text(text)
        (top / "bin" / name).chmod(0o755)
    yield top
    for pid in family(top):
        os.kill(pid, signal.SIGKILL)
    shutil.rmtree(top, ignore_errors=True)


def start(host: Path, script: str, *arguments: str, nodes: int, restart: int = 0) -> subprocess.Popen[bytes]:
    """Start a job script as Slurm does on the first node: in a session of its own, with the job's environment."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "TOKENMILL_", "SLURM_"))}
    env |= {"PATH": f"{host / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}", "STAND_IN": str(host),
            "TMPDIR": str(host), "TOKENMILL_RAY_TMP": str(host), "SLURM_JOB_ID": str(1000 + os.getpid() % 150),
            "SLURM_JOB_NODELIST": ",".join(f"node{i}" for i in range(nodes)), "SLURM_CPUS_ON_NODE": "1",
            "SLURM_SUBMIT_DIR": str(host), "SLURM_RESTART_COUNT": str(restart)}
    log = (host / f"job-{Path(script).name}-{restart}.log").open("wb")
    return subprocess.Popen(["bash", str(SLURM / script), *arguments], env=env, cwd=host, stdin=subprocess.DEVNULL,
                            stdout=log, stderr=subprocess.STDOUT, start_new_session=True)


def family(host: Path) -> set[int]:
    """Return the pids of living processes that have this folder's path in their environment."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            if state not in "ZX" and str(host).encode() in (folder / "environ").read_bytes():
                found.add(int(folder.name))
        except OSError:
            continue
    return found - {os.getpid()}


def progress(store: Path) -> dict[str, Any]:
    """Return the progress of the only run as its driver reported it last, or {} before that."""
    return next((json.loads(at.read_text()) for at in store.glob("runs/*/progress.json")), {})


def clean_done(store: Path) -> int:
    """Return how many parts of the dataset `clean` are done."""
    return progress(store).get("nodes", {}).get("clean", {}).get("done", 0)


def program(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode()
    except OSError:
        return ""


def test_a_run_on_three_nodes_is_stopped_by_the_time_limit_and_ends_in_its_next_turn(host, tmp_path):
    write_warcs(host / "crawl", 90, 3)
    (host / "recipe.yaml").write_text(RECIPE)
    (host / "held_stage.py").write_text(HELD.format(held=str(host / "held")))
    local = tmp_path / "local"
    run_recipe(load_recipe(host / "recipe.yaml", allow_custom=True), str(local),
               make_backend=make_backend("inline", 1, None))
    store, first_log = host / "store", host / "job-tokenmill.sbatch-0.log"
    line = [str(host / "recipe.yaml"), "--store", str(store), "--allow-custom-stages"]

    (host / "held").touch()
    job = start(host, "tokenmill.sbatch", *line, nodes=3)
    until(lambda: clean_done(store) >= 1 and any(named(p, "--watch") for p in family(host)), 600, "a part of clean",
          job=job, log=first_log)                         # before it watches the run, the script has no handler
    assert len([p for p in family(host) if program(p).endswith("/raylet")]) == 3
    job.send_signal(signal.SIGUSR1)                       # what --signal=B:USR1@600 sends to the batch shell
    until(lambda: progress(store)["state"] == "stopping", 600, "the end of the run", job=job, log=first_log)
    (host / "held").unlink()
    assert job.wait(600) == 1, first_log.read_text()[-5000:]
    assert "back into the queue" in first_log.read_text()
    assert (host / "scontrol.log").read_text().split() == ["requeue", str(1000 + os.getpid() % 150)]
    check_nothing_is_left(host)

    again = start(host, "tokenmill.sbatch", *line, nodes=2, restart=1)         # as many as there are this time
    assert again.wait(900) == 0, (host / "job-tokenmill.sbatch-1.log").read_text()[-5000:]
    assert result(store) == result(local)
    check_nothing_is_left(host)
    token = (host / "token").read_text()                  # of the second turn; nobody wrote it down
    assert len(token) == 64
    for path in [*host.glob("*.log"), *(p for p in store.rglob("*") if p.is_file())]:
        assert token.encode() not in path.read_bytes(), path
    steps = Counter(s.split()[0] for s in (host / "srun.log").read_text().splitlines() if ": bash -c" in s)
    assert steps == {"1:": 3, "2:": 1}                    # two heads, two workers in one step, and one in another


def check_nothing_is_left(host: Path) -> None:
    """Check that no process, no token and no scratch folder is left."""
    until(lambda: not family(host), 120,
          lambda: f"the end of {[*map(program, family(host))]}")
    assert not (host / ".tokenmill").exists()
    assert not [p.name for p in host.iterdir() if p.name.startswith(("tm-", "tokenmill-"))]


def test_a_cluster_that_does_not_come_up_is_an_error_and_leaves_nothing(host):
    (host / "bin" / "ray").write_text('#!/usr/bin/env bash\n[ "$1" = start ] && { echo no ports left >&2; exit 7; }\n')
    (host / "bin" / "ray").chmod(0o755)
    job = start(host, "tokenmill.sbatch", "recipe.yaml", "--store", str(host / "store"), nodes=2)
    log = host / "job-tokenmill.sbatch-0.log"
    assert job.wait(300) == 1
    assert "no ports left" in log.read_text() and "Ray does not start on node0" in log.read_text()
    check_nothing_is_left(host)
