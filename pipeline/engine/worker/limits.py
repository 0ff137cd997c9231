"""Defines the limits of a child (a confined process that runs tasks), and measures what a child uses. The kernel
enforces some limits, which the child sets for itself; the supervisor, which started the child, watches the other
limits. Works on Linux only (proc(5), cgroups v1 and v2).

Limits of CPU time and memory can put a document into quarantine, so they are generous. When a child exceeds one at a
document, crash triage begins: it finds the document at fault, and quarantines it only after proof. When a child exceeds
the limit of wall-clock time, its task is repeated; if that happens twice in an attempt, the attempt fails. No document
is blamed, because no clock may decide which documents are kept (docs/contracts.md).
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import resource
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from pipeline.base.process import status_kb

_TICK = os.sysconf("SC_CLK_TCK")
_STATES = {b"T": "stopped", b"t": "stopped", b"D": "waiting", b"R": "computing", b"S": "sleeping", b"I": "sleeping"}


#: bytes of input per CPU second: every task without a fault reads, sorts or learns faster than this
READING_BYTES = 20_000
#: bytes per CPU second: reading one record, or searching for places to split a file at, is faster than this
RECORD_BYTES = 1_000_000


@dataclass(frozen=True)
class ProcessLimits:
    """The limits of the child processes in which a supervisor runs tasks: on their CPU time, idle time and memory, and
    on the documents that they quarantine and the faults of the machine that they survive."""

    cpu_s: float = 60.0            # CPU seconds a document may take in one stage (a batch: `batch_cpu_s`)
    record_cpu_s: float = 300.0    # CPU seconds to read one record, plus one for each RECORD_BYTES of the task
    reading_cpu_s: float = 1800.0  # CPU seconds outside documents, plus one for each READING_BYTES of the task
    wall_s: float = 600.0          # the task is repeated if in this time the cursor stands still and the child is idle
    idle_cpu_s: float = 1.0        # most CPU seconds that an idle child uses, however long it is idle
    memory_share: float = 0.85     # of the cgroup's (or machine's) memory: above it the largest child is killed
    pressure_s: float = 1.0        # seconds between two checks of `memory_share`
    recycle_cpu_s: float = 600.0   # CPU seconds after which a child is replaced (a new one costs 1): libraries leak
    max_quarantined: int = 100     # most documents of one partition in quarantine
    max_environment: int = 3       # most faults of machine or storage that an attempt survives
    hanging_s: float = 120.0       # seconds without cursor movement until the task is reported as hanging
    idle_s: float = 20.0           # the same if the child is idle for that time

    def batch_cpu_s(self, rows: int) -> float:
        """Returns the CPU seconds that a batch of `rows` documents may take in one stage. A batch of up to 16 documents
        gets `cpu_s` for each of them. A larger batch gets 16 × `cpu_s` or, if that is more, an eighth of `cpu_s` per
        document. This is plenty, because all but one document in a thousand take at most a tenth of `cpu_s`.

        The limit keeps a document whose processing never ends from occupying the child process for hours. When a batch
        exceeds the limit, its documents are run again one by one, and none of them is blamed for the batch.
        """
        return self.cpu_s * min(rows, max(16, rows / 8))

    def hangs(self, still: float, idle: float, reports: int) -> bool:
        """Whether to report a task as hanging. `still`: the seconds for which its crash cursor (the record of which
        document it works on) has not moved. `idle`: the seconds in which its child process has used at most
        `idle_cpu_s` of CPU time. A task hangs after `hanging_s` without movement, or after `idle_s` without movement if
        it was idle for as long. Both limits double with each of the `reports` made so far."""
        doubled = float(2 ** reports)
        return still >= self.hanging_s * doubled or min(still, idle) >= self.idle_s * doubled

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def cpu_seconds(pid: int) -> float:
    """Returns the CPU time of all threads of a process so far, in seconds. Raises OSError when the process does not
    exist any more."""
    with open(f"/proc/{pid}/stat", "rb") as f:
        fields = f.read().rpartition(b")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICK


def working_seconds(pid: int) -> float:
    """Returns the CPU time of a process in seconds, including programs (OCR) that it started and waited for. The number
    shows whether the process makes progress; it is not used as the cost of a document."""
    with open(f"/proc/{pid}/stat", "rb") as f:
        fields = f.read().rpartition(b")")[2].split()
    return sum(map(int, fields[11:15])) / _TICK


def doing(pid: int) -> str:
    """Returns the state of a process according to the kernel: "stopped", "computing", "sleeping", or "waiting" (for a
    disk or a network share; no signal reaches the process then). Returns "" when the process has ended."""
    with contextlib.suppress(OSError, IndexError), open(f"/proc/{pid}/stat", "rb") as f:
        return _STATES.get(f.read().rpartition(b")")[2].split()[0], "")
    return ""


def anonymous_mb(pid: int) -> float:
    """Returns the memory of a process that the kernel cannot reclaim, in MB: anonymous and shared memory, including
    what is swapped out. Mapped files are not counted. Raises OSError when the process does not exist any more."""
    return status_kb(pid, ("RssAnon:", "RssShmem:", "VmSwap:")) / 1024


def die_of(number: int) -> NoReturn:
    """End this process by the signal `number`, which has killed a program that this process had started. The supervisor
    then treats the death of the program like a death of this process."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.disable()                              # its traceback would show a place that did not crash
    signal.signal(number, signal.SIG_DFL) if number not in (signal.SIGKILL, signal.SIGSTOP) else None
    os.kill(os.getpid(), number)
    os._exit(1)                                         # the signal did not end this process


def raise_oom_score(score: int = 500) -> None:
    """Make the kernel's OOM killer choose this process before its supervisor (the process that started it) and before
    Ray."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as f:
        f.write(str(score))


def memory_use() -> tuple[int, int]:
    """Returns (used, total) bytes of the memory that is nearest to being full: that of the machine, or that of a cgroup
    of this process. File cache that the kernel can reclaim does not count as used."""
    result = [_machine()]
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                result += _groups("/sys/fs/cgroup", path, "memory.max", "memory.current", "inactive_file")
            elif "memory" in controllers.split(","):
                result += _groups("/sys/fs/cgroup/memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes",
                                 "total_inactive_file")
    return max(result, key=lambda use: use[0] / use[1])


def _machine() -> tuple[int, int]:
    info = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        info[name] = int(value.split()[0]) * 1024
    return info["MemTotal"] - info["MemAvailable"], info["MemTotal"]


def _groups(mount: str, path: str, limit: str, usage: str, cache: str) -> list[tuple[int, int]]:
    """Returns (used, total) bytes of memory for a cgroup and for each cgroup above it. Groups without a limit are left
    out."""
    result = []
    group = Path(mount, path.lstrip("/"))
    for folder in (group, *group.parents):
        if not folder.is_relative_to(mount):
            break
        with contextlib.suppress(OSError, ValueError):      # "max", or a group that a container cannot see
            total = int((folder / limit).read_text())
            used = int((folder / usage).read_text())
            for line in (folder / "memory.stat").read_text().splitlines():
                if line.startswith(cache + " "):
                    used -= int(line.split()[1])
            if 0 < total < 1 << 60:                         # "no limit" of v1 is a number beyond any machine
                result.append((max(used, 0), total))
    return result


def visible_gpus(env: Mapping[str, str] = os.environ) -> list[str]:
    """Returns the names of this machine's NVIDIA GPUs, in the form that CUDA_VISIBLE_DEVICES uses. The names come from
    that variable or, if it is not set, from /dev."""
    named = env.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name.strip() for name in named.split(",") if name.strip() not in ("", "-1", "NoDevFiles")]
    return [str(i) for i in range(len(list(Path("/dev").glob("nvidia[0-9]*"))))]  # CUDA counts the visible ones from 0


class Devices:
    """Keeps track of which GPUs, or parts of GPUs, the child processes of a supervisor occupy. A child keeps its part
    until it ends, because its loaded models stay on the GPU between tasks."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self._free = dict.fromkeys(self.names, 1.0)

    def take(self, share: float) -> dict[str, float] | None:
        """Reserve GPUs for a child process that needs `share` GPUs (a number of GPUs, or a part of one; `pools.share`).
        Returns {device: part}, which is {} if `share` is 0. Returns None if not enough is free. A part of a device is
        taken from the fullest device that has enough left, so that whole devices stay free."""
        if share < 1:
            fitting = sorted((free, i) for i, free in enumerate(self._free.values()) if free >= share - 1e-6)
            parts = {self.names[fitting[0][1]]: share} if fitting and share else {}
            if share and not parts:
                return None
        else:
            unused = [name for name, free in self._free.items() if free > 1 - 1e-6][:int(share)]
            if len(unused) < share:
                return None
            parts = dict.fromkeys(unused, 1.0)
        for name, part in parts.items():
            self._free[name] -= part
        return parts

    def copy(self) -> Devices:
        other = Devices(self.names)
        other._free = dict(self._free)
        return other

    def give_back(self, parts: Mapping[str, float]) -> None:
        for name, part in parts.items():
            self._free[name] += part
