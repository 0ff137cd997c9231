"""The loader alone, over the last steps of a run: what it reads, what is reported, and when it is found too slow."""

from __future__ import annotations

import itertools
import json
import sys
import threading
from types import SimpleNamespace

import pytest

from tests.simulate.clock import VirtualClock
from tests.trainer.synthetic import VOCAB, make_run
from tokenizer.shards.layout import token_dtype
from trainer.__main__ import main
from trainer.data import batches as data
from trainer.data.batches import Data
from trainer.loop.run import TrainingError, open_run
from trainer.tools import loader_benchmark

FINE = {"first_step": 1, "steps": 10, "tokens": 1000, "seconds": 2.0, "wait_p50_ms": 0.1, "wait_p99_ms": 1.0,
        "wait_max_ms": 2.0, "wait_share": 0.002, "bytes": 2_000_000, "disk_bytes": 0, "memory_before": 100 << 20,
        "memory_after": 101 << 20}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("store"), documents=300)


def test_it_reads_the_last_steps_and_no_others(folder, monkeypatch):
    run = open_run(str(folder), None, None, [])
    seen = []
    step = Data.step

    def noted(self, first, batch, rank, world):
        seen.append((first, batch, rank, world))
        return step(self, first, batch, rank, world)

    monkeypatch.setattr(Data, "step", noted)
    found = loader_benchmark.load(run, 15, 0, 1, 2)
    everything = list(run.steps())
    assert seen == [(s.first, s.batch, 1, 2) for s in everything[-15:]]
    assert found["first_step"] == len(everything) - 14 and found["steps"] == 15
    assert found["tokens"] == sum(s.batch * run.curriculum.phases[s.phase].sequence for s in everything[-15:])
    width = token_dtype(VOCAB).itemsize
    assert found["bytes"] == width * sum(-(-s.batch // 2) * (run.curriculum.phases[s.phase].sequence + 1)
                                         for s in everything[-15:])
    seen.clear()
    assert loader_benchmark.load(run, 10_000, 0, 0, 1)["first_step"] == 1    # more than there are: all of them
    assert len(seen) == len(everything)


def test_verdicts():
    assert loader_benchmark.together([FINE], 500.0)["sound"]
    slow = loader_benchmark.together([FINE, {**FINE, "wait_share": 0.03}], 500.0)
    assert not slow["sound"] and "3.0% of the time" in slow["problems"][0]
    assert "verdict    at 500 tokens/s" in loader_benchmark.text(slow)
    # as fast as it goes it waits all the time, which says nothing
    assert loader_benchmark.together([{**FINE, "wait_share": 0.99}], 0)["sound"]
    grown = loader_benchmark.together([FINE, {**FINE, "memory_after": 400 << 20}], 0)
    assert not grown["sound"] and "grown by 315 MB" in grown["problems"][0]
    assert loader_benchmark.together([{**FINE, "memory_after": 150 << 20}], 0)["sound"]       # 50 MB are noise
    two = loader_benchmark.together([FINE, {**FINE, "seconds": 4.0, "wait_p99_ms": 7.0}], 500.0)
    assert (two["tokens_per_s"], two["mb_per_s"], two["wait_p99_ms"], two["ranks"]) == (250, 1.0, 7.0, 2)
    assert "it keeps up" in loader_benchmark.text(two)


def test_a_loader_that_is_too_slow_is_found_out(folder, monkeypatch, capsys):
    """However slow the machine is: it loads while it is waited for, twenty milliseconds of a virtual clock against a
    microsecond of computing."""
    step, waited_for, looks, clock = Data.step, threading.Event(), itertools.count(), VirtualClock()

    def look() -> float:
        now = clock.now()
        if next(looks) % 2 == 0:                     # of two looks at a wait the one at its beginning
            waited_for.set()
        return now

    def slow(self, *args):
        assert waited_for.wait(600)
        waited_for.clear()
        clock.sleep(0.02)
        return step(self, *args)

    monkeypatch.setattr(Data, "step", slow)
    monkeypatch.setattr(data, "time", SimpleNamespace(perf_counter=look))
    monkeypatch.setattr(loader_benchmark, "time", SimpleNamespace(perf_counter=clock.now, sleep=clock.sleep))
    assert main(["soak", str(folder), "--steps", "5", "--rate", "100M"]) == 1
    assert "spent waiting for data" in capsys.readouterr().out


def test_the_command(folder, capsys):
    assert main(["soak", str(folder), "--steps", "20", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ranks"] == 1 and report["steps"] == 20 and report["sound"] and report["rate"] is None
    assert report["memory_after"] > 1 << 20
    assert main(["soak", str(folder), "--steps", "20"]) == 0
    out = capsys.readouterr().out
    assert "(the last 20)" in out and "memory does not grow" in out
    assert main(["soak", str(folder), "--rate", "fast"]) == 2
    assert "--rate" in capsys.readouterr().err


def test_the_command_over_two_ranks_joins_what_each_of_them_prints(folder, tmp_path, monkeypatch, capsys):
    """A rank is this command with --rank; here a script prints what that printed."""
    for rank in range(2):
        assert main(["soak", str(folder), "--steps", "20", "--ranks", "2", "--rank", str(rank)]) == 0
        printed = json.loads(capsys.readouterr().out)
        assert printed["steps"] == 20 and printed["bytes"] > 0
        (tmp_path / f"{rank}").write_text(json.dumps({**FINE, "wait_p99_ms": rank, "tokens": printed["tokens"]}))
    script = tmp_path / "rank.sh"
    script.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/given\nfor last; do :; done\ncat {tmp_path}/$last\n')
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    command = ["soak", str(folder), "--steps", "20", "--ranks", "2", "--json"]
    assert main(command) == 0
    assert sorted((tmp_path / "given").read_text().splitlines()) == \
        [" ".join(["-m", "trainer", *command, "--rank", rank]) for rank in "01"]
    report = json.loads(capsys.readouterr().out)
    assert (report["ranks"], report["wait_p99_ms"], report["sound"]) == (2, 1, True)
    assert report["tokens_per_s"] == printed["tokens"] / FINE["seconds"]


def test_a_rank_that_fails_fails_the_command(capfd):
    with pytest.raises(TrainingError, match="rank 0 failed"):
        loader_benchmark.several(["soak", "RUN", "--no-such-option"], 2)
    assert "--no-such-option" in capfd.readouterr().err
