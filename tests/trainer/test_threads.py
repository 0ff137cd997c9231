"""The number of threads of a rank depends on the size of its model and on the free cores. It is printed at the start,
with the kernels that are used."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.trainer.synthetic import make_run
from trainer.__main__ import main
from trainer.launch import local
from trainer.loop import threads
from trainer.loop.run import Run, open_run
from trainer.loop.train import train
from trainer.model import attention
from trainer.observe.metrics import read
from trainer.parallel.world import compiles

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
WIDE = ["model={layers: 2, width: 1024, heads: 8}", "micro_batch=4096"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("store"), documents=200)


def opened(folder: Path, *overrides: str) -> Run:
    return open_run(str(folder), None, None, list(overrides))


@pytest.mark.parametrize(("overrides", "ranks", "free", "device", "expected"), [
    ([], 1, 64.0, "cpu", 1),                                       # too small to be shared out
    (WIDE, 1, 64.0, "cpu", 24), (WIDE, 1, 2.0, "cpu", 2), (WIDE, 1, 1.4, "cpu", 1), (WIDE, 1, 1.6, "cpu", 2),
    (WIDE, 1, 0.0, "cpu", 1), (WIDE, 2, 4.0, "cpu", 2), (WIDE, 3, 4.0, "cpu", 1), ([], 4, 32.0, "cuda", 8)])
def test_threads_follow_size_and_free_cores(folder, overrides, ranks, free, device, expected):
    assert threads.threads(opened(folder, *overrides), ranks, free, device) == expected


@pytest.mark.parametrize(("idle", "own", "expected"), [
    (8.0, 0.0, 2.0),                                               # two cores, idle for all of the four seconds
    (4.0, 0.0, 1.0), (0.0, 0.0, 0.0), (4.0, 4.0, 2.0),             # what it uses itself is free
    (6.0, 4.0, 2.0)])
def test_what_others_use_is_not_free(monkeypatch, idle, own, expected):
    clock = mock.Mock(monotonic=mock.Mock(side_effect=[10.0, 14.0, 14.0]),
                      process_time=mock.Mock(side_effect=[1.0, 1.0 + own]))
    monkeypatch.setattr(threads, "time", clock)
    monkeypatch.setattr(threads, "idle", mock.Mock(side_effect=[100.0, 100.0 + idle]))
    monkeypatch.setattr(threads, "cores", lambda: 2.0)
    assert threads.CoreWatch().free() == expected


def test_where_the_system_does_not_tell_all_cores_are_free(monkeypatch):
    monkeypatch.setattr(threads, "idle", lambda: None)
    monkeypatch.setattr(threads, "cores", lambda: 3.0)
    assert threads.CoreWatch(watched_s=0).free() == 3.0


def test_cores_are_those_this_process_may_use():
    assert 0 < threads.cores() <= len(os.sched_getaffinity(0))
    assert threads.idle() > 0


def test_what_the_environment_says_is_left_alone(folder, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    with mock.patch.object(torch, "set_num_threads") as setting:
        threads.settle(opened(folder), mock.Mock(), "cpu")
        assert not setting.called
        monkeypatch.delenv("OMP_NUM_THREADS")
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        threads.settle(opened(folder, *WIDE), mock.Mock(free=lambda: 6.0), "cpu")
        setting.assert_called_once_with(3)


@pytest.mark.parametrize(("given", "expected"), [(None, "5"), ("3", "3")])
def test_ranks_of_this_machine_get_their_share(monkeypatch, given, expected):
    monkeypatch.delenv("OMP_NUM_THREADS")
    if given:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    with mock.patch.object(local.subprocess, "Popen") as started, mock.patch.object(local, "wait", return_value=0):
        assert local.launch(["run"], 2, "cpu", lambda device: {"cpu": 5}[device]) == 0
    environments = [call.kwargs["env"] for call in started.call_args_list]
    assert [e["OMP_NUM_THREADS"] for e in environments] == [expected] * 2
    assert [e["LOCAL_WORLD_SIZE"] for e in environments] == ["2"] * 2


def test_a_small_model_trains_on_one_thread(folder, tmp_path, monkeypatch, capsys):
    """With no word from the environment, on any machine; the metrics say so."""
    monkeypatch.delenv("OMP_NUM_THREADS")
    torch.set_num_threads(2)
    try:
        assert main(["run", str(folder), "--out", str(tmp_path), "--stop-at", "2", "--device", "cpu"]) == 0
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(1)
    assert read(tmp_path / "metrics.jsonl")[0]["threads"] == 1
    [line] = [text for text in capsys.readouterr().out.splitlines() if text.startswith("model: ")]
    assert f", 1 thread of {threads.cores():g} cores" in line


def test_the_start_says_what_computes(folder, tmp_path, alone):
    lines: list[str] = []
    train(open_run(str(folder), None, str(tmp_path), ["parallel.shard=grad"]), alone, 1, lines.append)
    [line] = [text for text in lines if text.startswith("model: ")]
    assert line.endswith(f"; 1 rank on cpu, shard grad, float32, not compiled, scaled_dot_product_attention of torch "
                         f"{torch.__version__}, {threads.describe()}")
    start = read(tmp_path / "metrics.jsonl")[0]
    assert (start["compiled"], start["precision"], start["sharding"]) == (False, "float32", {"shard": 1})
    assert start["kernel"].startswith("scaled_dot_product_attention")


def test_kernels_have_versions(monkeypatch):
    monkeypatch.setattr(attention, "varlen_attn", object())
    monkeypatch.setattr(attention, "flash", lambda _index: True)
    for third, version in ((True, 3), (False, 2)):
        monkeypatch.setattr(attention, "flash3", lambda _index, third=third: third)
        assert attention.describe(CUDA, torch.bfloat16, "document") == \
            f"FlashAttention {version} (varlen_attn of torch {torch.__version__})"
    assert attention.describe(CUDA, torch.float32, "document").startswith("flex_attention of torch")
    assert attention.describe(CUDA, torch.bfloat16, "none").startswith("scaled_dot_product_attention")


def test_layers_are_compiled_on_cuda_unless_told_otherwise(folder, monkeypatch):
    assert opened(folder).config.compile == "auto"
    assert opened(folder, "compile=true").config.compile is True
    for found, expected in ((object(), True), (None, False)):      # without Triton nothing can be compiled
        monkeypatch.setattr("importlib.util.find_spec", lambda _name, found=found: found)
        assert compiles("auto", CUDA) is expected
        assert compiles(True, CUDA) and not compiles(False, CUDA)
    assert not compiles("auto", CPU) and compiles(True, CPU)
