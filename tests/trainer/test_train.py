"""The training loop as a user sees it: it learns, prints what it does, stops when asked, and gives a reason when it
fails."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.trainer.synthetic import make_run, quiet
from trainer.__main__ import main
from trainer.base.interrupts import interruptions, request_stop
from trainer.checkpoint import checkpoints as ckpt
from trainer.data.tokenizer import load_tokenizer
from trainer.loop.config import SampleConfig
from trainer.loop.evaluate import unigram_entropy
from trainer.loop.metrics_buffer import clock
from trainer.loop.run import TrainingError, open_run
from trainer.loop.train import train
from trainer.observe.metrics import Metrics, read
from trainer.observe.plot import smooth, svg, thin, ticks
from trainer.optim import build as optim

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A finished training of a synthetic language whose entropy is known (three equally likely successors): (output
    folder, summary, printed lines)."""
    from trainer.parallel.world import world

    folder = make_run(tmp_path_factory.mktemp("store"), documents=1500, total=61_440, phases=[
        {"name": "stable", "until": "60%", "sequence": 64, "batch": 512, "mix": {"web": 100}},
        {"name": "anneal", "until": "100%", "mix": {"web": 90, "code": 10}, "lr": "decay"}],
        train={"evaluate": {"every": 40}, "sample": {"tokens": 5, "temperature": 0}})
    said: list[str] = []
    with world("cpu") as here:
        summary = train(open_run(str(folder), None, None, []), here, None, said.append)
    return folder / "train", summary, said


def test_it_learns_the_language(done):
    out, summary, _ = done
    assert summary["heldout_loss_before"] == pytest.approx(math.log(97), abs=0.1)
    web = summary["streams"]["web"]
    # three successors cost ln 3 = 1.10 a token, and the end of a document, about one in 40, a little more
    assert web["loss"] < 1.10 + 0.35
    assert web["loss"] < 0.4 * web["unigram_entropy"]
    # the other language it has hardly seen
    assert summary["streams"]["code"]["loss"] > web["loss"] + 0.3
    assert abs(summary["gap"]) < 0.5
    assert json.loads((out / "summary.json").read_text()) == summary


def test_metrics_have_a_line_for_every_step(done):
    out, summary, said = done
    lines = read(out / "metrics.jsonl")
    steps = [line for line in lines if line["event"] == "step"]
    assert [line["step"] for line in steps] == list(range(1, 121))
    assert [line["tokens"] for line in steps] == [512 * i for i in range(1, 121)]
    assert {line["phase"] for line in steps[:72]} == {"stable"}
    assert {line["phase"] for line in steps[72:]} == {"anneal"}
    assert all(line["mfu"] is None for line in steps)                # a CPU has no peak in the table: unknown
    assert steps[-1]["lr"] < 0.02 * max(line["lr"] for line in steps)
    both = next(line for line in steps if len(line["streams"]) == 2)
    assert min(both["streams"].values()) < both["loss"] < max(both["streams"].values())
    assert [line["step"] for line in lines if line["event"] == "eval"] == [0, 40, 80, 120]
    assert lines[0]["mfu_formula"].startswith("6·N_matmul + 12·layers")
    assert any("mfu unknown" in text for text in said)
    assert summary["tokens"] == steps[-1]["tokens"]


def test_without_a_tokenizer_the_sample_is_skipped_visibly(done):
    _, summary, said = done
    assert summary["sample"] is None
    assert "no sample" in summary["sample_skipped"]
    assert summary["sample_skipped"] in said


def test_plot_is_valid_svg_with_phases_and_curves(done):
    out, _, _ = done
    text = (out / "loss.svg").read_text()
    root = ET.fromstring(text)
    found = [e.text for e in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "stable" in found
    assert "anneal ↘" in found
    lines = {e.get("class"): e.get("points", "") for e in root.iter("{http://www.w3.org/2000/svg}polyline")}
    assert len(lines["raw"].split()) == 120
    assert len(lines["held"].split()) == 4
    assert len(lines["rate"].split()) == 120
    for points in lines.values():
        for point in points.split():
            x, y = map(float, point.split(","))
            assert 0 <= x <= 860
            assert 0 <= y <= 470
    assert "prefers-color-scheme:dark" in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    rate = [float(p.split(",")[1]) for p in lines["rate"].split()]
    assert rate[-1] == max(rate[40:])                                # decays to the bottom (y grows downwards)


def test_plot_helpers():
    assert ticks(0, 10, 6) == [0, 2, 4, 6, 8, 10]
    assert ticks(4.2, 9.3, 6) == [5, 6, 7, 8, 9]
    points = thin(np.arange(10_000.0), np.repeat([1.0, 3.0], 5000))
    assert len(points) == 600 and points[-1] == (9999, 3)
    assert thin(np.arange(3.0), np.ones(3)) == [(0, 1), (1, 1), (2, 1)]
    assert thin(np.empty(0), np.empty(0)) == []
    assert smooth([(0, 4.0), (1, math.nan), (2, 4.0)]) == [(0, 4.0), (2, 4.0)]
    assert "<polyline" in svg([])                                    # nothing yet is no error
    assert clock(93) == "1:33"
    assert clock(7260) == "2:01:00"


def test_unigram_entropy():
    assert unigram_entropy([np.array([1, 1, 2, 2])]) == pytest.approx(math.log(2))
    assert unigram_entropy([np.array([5, 5]), np.array([5])]) == 0


def test_metrics_drop_what_a_resume_made_void(tmp_path):
    metrics = Metrics(tmp_path, True)
    metrics.write("start", 0)
    for step in range(1, 6):
        metrics.write("step", step, loss=float(step), run=1)
    metrics.close()
    with open(tmp_path / "metrics.jsonl", "a") as f:
        f.write('{"event": "step", "step": 6, "lo')                  # killed while writing
    metrics = Metrics(tmp_path, True)
    metrics.write("resume", 3)
    metrics.write("step", 4, loss=4.0, run=2)
    metrics.close()
    lines = read(tmp_path / "metrics.jsonl")
    assert [(line["event"], line["step"], line.get("run")) for line in lines] == [
        ("start", 0, None), ("step", 1, 1), ("step", 2, 1), ("step", 3, 1), ("resume", 3, None), ("step", 4, 2)]


def test_tensorboard_holds_the_same_numbers(done):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out, _, _ = done
    board = EventAccumulator(str(out / "tensorboard"))
    board.Reload()
    steps = [line for line in read(out / "metrics.jsonl") if line["event"] == "step"]
    assert [e.value for e in board.Scalars("train/loss")] == pytest.approx([line["loss"] for line in steps])
    assert len(board.Scalars("heldout/streams/web/loss")) == 4


def test_divergence_stops_with_a_reason_and_no_bad_checkpoint(tmp_path, alone):
    folder = make_run(tmp_path, documents=60, total=1920)
    wild = ["optimizer.lr=1e30", "clip=1e30", "model.qk_norm=false", "schedule.warmup=0%"]
    run = open_run(str(folder), None, None, wild)
    with pytest.raises(TrainingError, match=r"has diverged.*lower rate \(.* edit.*lower train\.optimizer\.lr"):
        train(run, alone, None, quiet)
    assert list((run.out / "checkpoints").glob("step_*/COMPLETE")) == []


def test_parameters_that_are_no_numbers_are_not_saved(tmp_path, alone, monkeypatch):
    """A step's loss and norm are of the parameters before it: the last step before a checkpoint can spoil them."""
    folder = make_run(tmp_path, documents=60, total=1920)
    run = open_run(str(folder), None, None, ["checkpoint.every=2"])

    def spoil(optimizer, *_):
        for group in optimizer.param_groups:
            if optimizer.state[group["params"][0]]["step"].item() == 4:
                group["params"][0].data.mul_(math.nan)

    build = optim.build

    def built(*a):
        made = build(*a)
        made.register_step_post_hook(spoil)
        return made

    monkeypatch.setattr(optim, "build", built)
    with pytest.raises(TrainingError, match=r"step 4: loss nan after it.*step_00000002 is sound"):
        train(run, alone, None, quiet)
    assert ckpt.latest(run.out / "checkpoints").step == 2


@pytest.mark.parametrize("masked", [("code",), ("web", "code")])
def test_prompts_alone_weigh_nothing_and_end_nothing(tmp_path, alone, masked):
    """A phase of windows without a target, and held-out data without any."""
    folder = make_run(tmp_path / "store", documents=60, total=1280, masked=masked, phases=[
        {"name": "stable", "until": "50%", "sequence": 32, "batch": 160, "mix": {"web": 50, "code": 50}},
        {"name": "prompts", "until": "100%", "mix": {"code": 100}}])
    summary = train(open_run(str(folder), None, None, []), alone, None, quiet)
    lines = read(folder / "train" / "metrics.jsonl")
    steps = [line for line in lines if line["event"] == "step"]
    assert [s["loss"] is None for s in steps] == [s["targets"] == 0 for s in steps]
    learned = [s for s in steps if s["targets"]]
    if masked == ("code",):
        assert len(learned) == 4 and all(0 < s["targets"] < 160 and list(s["streams"]) == ["web"] for s in learned)
        assert summary["train_loss_first"] == learned[0]["loss"] and list(summary["streams"]) == ["web"]
    else:
        assert not learned and summary["train_loss_first"] is summary["heldout_loss"] is None
        assert not [line for line in lines if line["event"] == "eval"]


def test_a_summary_is_of_the_whole_curriculum_or_not_there(tmp_path, alone):
    """A run that was at its end and has been prolonged must not show the old end as its own."""
    folder = make_run(tmp_path, documents=300, total=1920, train={"schedule": {"warmup": "64", "floor": 0.1}})
    run = open_run(str(folder), None, None, [])
    train(run, alone, None, quiet)
    assert (run.out / "summary.json").exists()
    last = run.curriculum.phases[-1]
    more = replace(last, name="more", start=last.stop, lr="stable")
    longer = replace(run.curriculum, phases=(*run.curriculum.phases, more))
    steps = run.curriculum.steps
    train(replace(run, curriculum=longer), alone, steps + 1, quiet)
    assert not (run.out / "summary.json").exists()
    assert train(replace(run, curriculum=longer), alone, None, quiet)["steps"] == steps + more.steps


def test_a_folder_that_cannot_be_written_is_named(tmp_path, capsys):
    folder = make_run(tmp_path, documents=60, total=1920)
    (tmp_path / "file").write_text("in the way")
    assert main(["run", str(folder), "--out", str(tmp_path / "file" / "out")]) == 2
    assert "cannot be written" in (said := capsys.readouterr().err) and "--out" in said


@pytest.mark.slow
def test_a_signal_ends_two_ranks_with_a_checkpoint(tmp_path):
    folder = make_run(tmp_path, documents=4000, total=200_000)
    command = [sys.executable, "-m", "trainer", "run", str(folder), "--ranks", "2", "--device", "cpu",
               "--set", "log_every=1"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        for line in process.stdout:
            if line.startswith("step      3/"):
                process.send_signal(signal.SIGTERM)
                break
        out, err = process.communicate(timeout=600)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGTERM, err
    assert "stopped by SIGTERM" in out
    run = open_run(str(folder), None, None, [])
    steps = [line["step"] for line in read(run.out / "metrics.jsonl") if line["event"] == "step"]
    saved = ckpt.latest(run.out / "checkpoints")
    assert saved.step == steps[-1] < run.curriculum.steps
    assert saved.meta["world"] == 2


def test_a_missing_shard_fails_the_command(tmp_path, capsys):
    folder = make_run(tmp_path, documents=60, total=960)
    next((tmp_path / "shards" / "web" / "split=train").glob("*.tokens")).unlink()
    assert main(["run", str(folder), "--device", "cpu"]) == 1
    assert ".tokens: missing" in capsys.readouterr().err


def test_load_tokenizer_says_why_not(tmp_path):
    for name in ("x.txt", "tokenizer.json"):
        tokenizer, why = load_tokenizer(tmp_path / name)
        assert tokenizer is None
        assert name in why


def test_a_sample_with_a_real_tokenizer(tmp_path, alone):
    tokenizers = pytest.importorskip("tokenizers")
    folder = make_run(tmp_path, documents=300, total=3840, train={
        "seed": 3, "sample": {"prompt": "a b", "tokens": 12}})
    words = {"<eos>": 0, **{chr(97 + i // 26) * (i // 26) + chr(97 + i % 26): i + 1 for i in range(96)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<eos>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    path = tmp_path / "tokenizers" / "none" / "tokenizer.json"
    path.parent.mkdir(parents=True)
    tokenizer.save(str(path))
    texts = [train(open_run(str(folder), None, str(tmp_path / out), []), alone, None, quiet)["sample"] for out in "ab"]
    assert texts[0].startswith("a b")
    assert len(texts[0]) > len("a b")
    assert texts[0] == texts[1]                                      # seeded
    assert SampleConfig().tokens > 0


def test_what_a_kill_after_the_last_checkpoint_left_out_is_made_up(tmp_path, alone):
    """The summary is written when the same command is given again, with the numbers it would have had."""
    folder = make_run(tmp_path, documents=300, total=3840, train={"seed": 3, "sample": {"tokens": 0}})
    whole = train(open_run(str(folder), None, None, []), alone, None, quiet)
    (folder / "train" / "summary.json").unlink()
    said: list[str] = []
    again = train(open_run(str(folder), None, None, []), alone, None, said.append)
    assert json.loads((folder / "train" / "summary.json").read_text()) == again
    assert any(line.startswith("resumed from") for line in said)
    for key in ("heldout_loss", "unigram_entropy", "gap", "train_loss_last", "steps"):
        assert again[key] == pytest.approx(whole[key], abs=1e-6), key
    assert train(open_run(str(folder), None, None, []), alone, None, quiet) == again


def test_a_request_to_stop_that_comes_before_the_first_step_counts_once():
    request_stop(signal.SIGTERM)
    with interruptions() as told:
        assert told() == signal.SIGTERM
    with interruptions() as told:
        assert told() == 0
