"""Chooses how many CPU threads a rank computes with: as many as its model can use, but no more than its share of the
free cores.

torch's default, a thread per core, is too many in two cases. For a small model, dividing an operator among threads
takes longer than computing it. On a busy machine, every operator waits for the thread whose core another process
occupies. Together, this made the training of a model of 72 thousand parameters a hundred times slower. Therefore the
load is measured while torch is imported, and only cores that other processes leave free count.

The number of threads changes the last bits of sums. It is therefore printed at the start and stored in metrics and
checkpoints, and a training that resumes reports a change of it. OMP_NUM_THREADS overrides the choice; launchers such as
torchrun, Slurm and Ray set it.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.loop.run import Run

#: a rank gets one thread per WORTH FLOPs in a layer's forward over a micro-batch; WORTH FLOPs take some milliseconds
WORTH = 2e8
#: the load is measured over at least this many seconds; the system counts idle time in ticks of 10 ms
WATCHED_S = 0.3


def cores() -> float:
    """Return how many CPUs this process may use, as limited by its affinity and the quotas of its cgroups (v2)."""
    count = float(len(affinity()))
    try:
        path = Path("/proc/self/cgroup").read_text(encoding="ascii").split("0::", 1)[1].split("\n")[0]
    except (OSError, IndexError):
        return count
    place = Path("/sys/fs/cgroup") / path.strip("/")
    for group in (place, *place.parents):
        try:
            quota, period = (group / "cpu.max").read_text(encoding="ascii").split()
            count = min(count, int(quota) / int(period))
        except (OSError, ValueError):                    # no such file, or "max": no quota
            continue
    return count


def affinity() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


class CoreWatch:
    """Measures how busy the CPU cores are, from the creation of the object to the call of `free`. `watched_s` is the
    shortest duration of the measurement, in seconds."""

    def __init__(self, watched_s: float = WATCHED_S) -> None:
        self.watched_s = watched_s
        self.since, self.own, self.idle = time.monotonic(), time.process_time(), idle()

    def free(self) -> float:
        """Return how many cores were free for this process, on average since the object was created: those that were
        idle, and those that it used itself. Waits until the measurement has lasted `watched_s` seconds. If the system
        does not report idle time, all cores count as free."""
        time.sleep(max(0.0, self.watched_s - (time.monotonic() - self.since)))
        now, own = idle(), time.process_time() - self.own
        if self.idle is None or now is None:
            return cores()
        return min(cores(), (now - self.idle + own) / (time.monotonic() - self.since))


def idle() -> float | None:
    """Return the idle seconds since the system started, summed over the cores that this process may use. None if the
    system does not report them."""
    try:
        lines = Path("/proc/stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    rows = (line.split() for line in lines if line.startswith("cpu") and line[3].isdecimal())
    allowed = affinity()
    return sum(int(row[4]) + int(row[5]) for row in rows if int(row[0][3:]) in allowed) / os.sysconf("SC_CLK_TCK")


def threads(run: Run, ranks: int, free: float, device: str) -> int:
    """Return how many CPU threads each of `ranks` ranks should use on a machine with `free` free cores. It is a rank's
    share of the cores, but for a small model no more than the model can use. On CUDA the model's size does not limit
    the number, because there the CPU computes only what is offloaded to it."""
    most = max(1, int(free / ranks + 0.5))
    if device == "cuda":
        return most
    model = run.config.model
    tokens = max(run.micro_rows(phase.sequence) * phase.sequence if phase.batch * phase.sequence >
                 run.config.micro_batch else phase.batch * phase.sequence for phase in run.curriculum.phases)
    work = 2 * model.matmul_parameters(run.vocab) / model.layers * tokens
    return max(1, min(most, int(work / WORTH)))


def settle(run: Run, watch: CoreWatch, device: str) -> None:
    """Choose how many CPU threads this process computes with, and set the number in torch. Does nothing if
    OMP_NUM_THREADS is set."""
    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
        torch.set_num_threads(threads(run, here, watch.free(), "cuda" if cuda else "cpu"))


def describe() -> str:
    """Return the number of threads as text: '1 thread of 2 cores'."""
    import torch

    count = torch.get_num_threads()
    return f"{count} thread{'s' if count > 1 else ''} of {cores():g} cores"
