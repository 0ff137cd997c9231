"""Properties of this machine: its CPU, on which results may depend, and its cores."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def usable_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_tag() -> str:
    """Returns the instruction-set family of this machine's CPU, e.g. 'x86_64-avx512'. Numeric results may depend on
    it."""
    machine, flags = platform.machine(), ""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith(("flags", "Features")):
                flags = line
                break
    except OSError:
        pass
    level = "avx512" if " avx512f" in flags else "avx2" if " avx2" in flags else "base"
    return f"{machine}-{level}"
