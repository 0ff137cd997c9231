"""Readings of the machine: which are available, what happens where some are not, and which rank is the slowest."""

from __future__ import annotations

import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from trainer.observe import hardware
from trainer.observe.hardware import FIELDS, Hardware, gather, host_memory, summary


class NVMLError_NotSupported(Exception):
    """Stands in for pynvml's error, which is derived from Exception alone."""


def gpu(world, said) -> Hardware:
    """Return a Hardware that believes that its rank has a GPU. Nothing is computed on it."""
    made = Hardware(world, said.append)
    made.cuda = made.nvml = True
    made.world = replace(world, device=torch.device("cuda", 0))
    return made


def test_a_cpu_tells_memory_and_the_time_of_the_probe(alone):
    said: list[str] = []
    found = Hardware(alone, said.append).read()
    assert found.keys() == {"host_memory_bytes", "probe_s"}
    assert found["probe_s"] > 0 and not said


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_host_memory_is_what_is_resident_now():
    """Not the most that ever was. The system may take pages away at any time, so no difference is measured."""
    block = torch.ones(50_000_000)                                   # 200 MB
    del block
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    assert host_memory() == pytest.approx(1024 * int(status["VmRSS"].split()[0]), abs=90e6)


def test_sensors_come_in_the_units_of_their_names(alone, monkeypatch):
    for name, value in (("temperature", 71), ("utilization", 98), ("power_draw", 693_400)):
        monkeypatch.setattr(torch.cuda, name, lambda _device, value=value: value)
    assert gpu(alone, []).sensors() == {"gpu_temperature_c": 71.0, "gpu_utilization": pytest.approx(0.98),
                                        "gpu_power_w": pytest.approx(693.4)}


@pytest.mark.parametrize(("error", "said"), [
    (ModuleNotFoundError("pynvml does not seem to be installed"), "nvidia-ml-py"),
    (RuntimeError("cuda driver can't be loaded"), "RuntimeError"),
    (NVMLError_NotSupported(), "NVMLError_NotSupported")])
def test_what_cannot_be_read_is_left_out_and_said_once(alone, monkeypatch, error, said):
    asked = []

    def refuse(_device):
        asked.append(1)
        raise error

    monkeypatch.setattr(torch.cuda, "temperature", refuse)
    heard: list[str] = []
    reader = gpu(alone, heard)
    assert reader.sensors() == {} == reader.sensors()
    assert len(heard) == len(asked) == 1
    assert said in heard[0] and "left out" in heard[0]


def test_gpu_memory_is_the_peak_since_the_last_reading(alone, monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _device: 5)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: 7)
    reset = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset.append)
    reader = gpu(alone, [])
    reader.nvml = False
    reader.probe = lambda: 0.001
    found = reader.read()
    assert (found["gpu_memory_bytes"], found["gpu_reserved_bytes"]) == (5, 7) and len(reset) == 1


def test_ranks_are_summed_up_and_the_slow_one_is_named():
    def rank(probe, temperature, **more):
        return {"probe_s": probe, "host_memory_bytes": 10.0, "gpu_temperature_c": temperature, "gpu_utilization": 0.5,
                "gpu_power_w": 600.0, **more}

    ranks = [rank(0.010, 60), rank(0.010, 61), rank(0.013, 84, gpu_utilization=1.0), rank(0.009, 60)]
    assert summary(ranks) == {"host_memory_bytes": 10, "gpu_temperature_c": 84, "gpu_utilization": 0.625,
                              "gpu_power_w": 2400, "straggler": {"ratio": 1.3, "rank": 2}}
    assert summary([{"probe_s": 0.01, "host_memory_bytes": 3.0}]) == {"host_memory_bytes": 3}


def test_what_a_rank_did_not_read_is_not_zero(alone):
    mine = {"probe_s": 0.5, "host_memory_bytes": 1.0}
    assert gather(mine, alone) == [mine]
    assert set(mine) < set(FIELDS)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_tells_its_memory():
    device = torch.device("cuda", 0)
    reader = Hardware(types.SimpleNamespace(device=device), print)
    block = torch.ones(1 << 20, device=device)
    found = reader.read()
    assert found["gpu_memory_bytes"] >= block.numel() * 4 and 0 < found["probe_s"] < 1
    assert hardware.summary([found])["gpu_memory_bytes"] > 0
