"""Measures the machine during a training: memory; temperature, utilisation and power of GPUs; and which rank is the
slowest.

Temperature, utilisation and power come from NVML through `torch.cuda`, which needs the package `pynvml` (nvidia-ml-py).
Without the package these readings are left out, and a message says so once. No reading happens within a step.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist

from trainer.parallel.world import World

#: readings requested from NVML: (key, torch.cuda function, factor to the key's unit)
NVML = (("gpu_temperature_c", "temperature", 1.0), ("gpu_utilization", "utilization", 0.01),
        ("gpu_power_w", "power_draw", 0.001))
#: readings that a metrics line has, and the function that combines the values of all ranks
OVER_RANKS: dict[str, Callable[[list[float]], float]] = {
    "host_memory_bytes": max, "gpu_memory_bytes": max, "gpu_reserved_bytes": max, "gpu_temperature_c": max,
    "gpu_utilization": fmean, "gpu_power_w": sum}
#: width of the matrices whose product every rank times (`Hardware.probe`). On a GPU it is large enough that compute is
#: the limit; on a CPU it takes a negligible time
PROBE = {"cuda": 4096, "cpu": 192}
#: the readings of a rank at each log interval, in the order of the gathered vector
FIELDS = ("probe_s", "data_wait_p50_ms", "data_wait_p99_ms", "data_wait_s", *OVER_RANKS)


class Hardware:
    """Takes readings of the machine of this rank: memory, the speed of a matrix product and, on a GPU, temperature,
    utilisation and power. If some readings are unavailable, `say` is called once with a message."""

    def __init__(self, world: World, say: Callable[[str], None]) -> None:
        self.world, self.cuda = world, world.device.type == "cuda"
        self.nvml = self.cuda
        self.say = say
        size = PROBE[world.device.type]
        dtype = torch.bfloat16 if self.cuda else torch.float32
        self.matrix = torch.ones(size, size, dtype=dtype, device=world.device)

    def read(self) -> dict[str, float]:
        """Return the readings that are available on this machine, as {name: value}; the names are in FIELDS.
        `gpu_memory_bytes` is the peak since the last call."""
        result = {"host_memory_bytes": float(host_memory()), "probe_s": self.probe()}
        if self.cuda:
            result["gpu_memory_bytes"] = float(torch.cuda.max_memory_allocated(self.world.device))
            result["gpu_reserved_bytes"] = float(torch.cuda.memory_reserved(self.world.device))
            torch.cuda.reset_peak_memory_stats(self.world.device)
            result |= self.sensors()
        return result

    def sensors(self) -> dict[str, float]:
        """Return temperature, utilisation and power of this rank's GPU; {} where NVML is not available."""
        result = {}
        for key, function, factor in NVML if self.nvml else ():
            try:
                result[key] = getattr(torch.cuda, function)(self.world.device) * factor
            except Exception as error:               # NVML's own errors derive from Exception alone
                self.nvml = False
                why = "pip install nvidia-ml-py" if isinstance(error, ImportError) else f"NVML: {type(error).__name__}"
                self.say(f"temperature, utilisation and power of the GPU are left out ({why})")
                return {}
        return result

    @torch.no_grad()
    def probe(self) -> float:
        """Return how many seconds a fixed matrix product takes on this rank's device, the shortest of three
        measurements.

        This shows which rank is slow (because a GPU throttles, or a host is busy). The duration of a step does not show
        it: all ranks take equally long for a step, because each waits for the slowest rank in the collectives.
        """
        best = float("inf")
        for _ in range(3):
            if self.cuda:
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                self.matrix @ self.matrix
                end.record()
                end.synchronize()
                best = min(best, start.elapsed_time(end) / 1e3)
            else:
                began = time.perf_counter()
                self.matrix @ self.matrix
                best = min(best, time.perf_counter() - began)
        return best


def host_memory() -> int:
    """Return the bytes of memory that this process has resident now; on systems without /proc, the highest value so
    far."""
    try:
        with open("/proc/self/statm", encoding="ascii") as f:
            return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def gather(readings: dict[str, float], world: World) -> list[dict[str, float]]:
    """Collect the readings of all ranks: a mapping for each rank, in order of rank. `readings` are those of this rank.
    Every rank must call this. A reading that a rank does not have is missing from its mapping."""
    vector = torch.tensor([readings.get(key, float("nan")) for key in FIELDS], dtype=torch.float64, device=world.device)
    out = [torch.empty_like(vector) for _ in range(dist.get_world_size())]
    dist.all_gather(out, vector)
    return [{key: v for key, v in zip(FIELDS, row.tolist()) if v == v} for row in out]


def summary(ranks: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Combine the readings of all ranks for a metrics line: maximum of temperature and memory, sum of power, mean of
    utilisation. If there are several ranks, the result also has `straggler`: the slowest rank in `Hardware.probe`, and
    the ratio of its time to the median."""
    result: dict[str, Any] = {}
    for key, how in OVER_RANKS.items():
        values = [rank[key] for rank in ranks if key in rank]
        if values:
            value = how(values)
            result[key] = int(value) if key.endswith("_bytes") else round(value, 3)
    times = [rank["probe_s"] for rank in ranks]
    if len(times) > 1:
        slowest = max(range(len(times)), key=times.__getitem__)
        result["straggler"] = {"ratio": round(times[slowest] / median(times), 3), "rank": slowest}
    return result
