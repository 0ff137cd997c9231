"""A training on one CUDA device has the losses of a training on the CPU, in every arrangement and with every optimiser.
The host does not wait for the device within a step.

`make gpu` runs these tests. Without a CUDA device they are skipped.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.trainer.synthetic import losses, make_run, quiet
from trainer.checkpoint import checkpoints as ckpt
from trainer.checkpoint.ledger import Ledger
from trainer.loop.config import SampleConfig
from trainer.loop.generate import generate
from trainer.loop.run import Run, open_run
from trainer.loop.train import Trainer, train
from trainer.observe.goodput import Goodput
from trainer.observe.metrics import read
from trainer.optim.config import kinds
from trainer.parallel.world import arranged, world

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

ROOT = Path(__file__).resolve().parents[2]
#: widths that FlashAttention and float8 take; grouped heads
MODEL = {"layers": 2, "width": 128, "heads": 4, "kv_heads": 2, "ffn": 256, "qk_norm": True}
#: steps of a training; two sequence lengths, several micro-batches of unequal size
STEPS = 8
SET = ["compile=false", "micro_batch=96", "evaluate.every=1000", "checkpoint.every=1000", "log_every=4",
       "optimizer.lr=0.003"]
#: the optimisers besides AdamW, which all other tests use
OTHER_KINDS = sorted(kinds().keys() - {"adamw"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    phases = [{"name": "stable", "until": "50%", "sequence": 32, "batch": 160, "mix": {"web": 70, "code": 30}},
              {"name": "anneal", "until": "100%", "sequence": 64, "batch": 192, "mix": {"web": 50, "code": 50},
               "lr": "decay"}]
    return make_run(tmp_path_factory.mktemp("store"), model=MODEL, total=1536, documents=300, phases=phases)


@pytest.fixture(scope="module")
def gpu():
    with world("cuda") as here:
        yield here


def opened(folder: Path, out: Path, *overrides: str) -> Run:
    return open_run(str(folder), None, str(out), [*SET, *overrides])


@pytest.fixture(scope="module")
def on_cpu(folder, tmp_path_factory):
    """The losses of a training on the CPU, in float32. It runs in a process of its own, because a process can only have
    one World."""
    out = tmp_path_factory.mktemp("cpu")
    subprocess.run([sys.executable, "-m", "trainer", "run", str(folder), "--out", str(out), "--device", "cpu",
                    *(x for o in SET for x in ("--set", o))], check=True, cwd=ROOT,
                   env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, stdout=subprocess.DEVNULL)
    return losses(out)


@pytest.fixture(scope="module")
def on_gpu(folder, gpu, tmp_path_factory):
    """The output folder of a training with the default settings (bf16, AdamW), except that it is not compiled:
    compiling takes 20 s each time."""
    out = tmp_path_factory.mktemp("gpu")
    train(opened(folder, out), gpu, None, quiet)
    return out


def apart(a: dict[int, float], b: dict[int, float]) -> float:
    assert a.keys() == b.keys() and len(a) >= STEPS
    return max(abs(a[step] - b[step]) / a[step] for step in a)


@pytest.mark.parametrize("compile", ["auto", "false"])
def test_in_float32_a_gpu_has_the_losses_of_the_cpu(folder, gpu, on_cpu, tmp_path, compile):
    train(opened(folder, tmp_path, "precision=fp32", f"compile={compile}"), gpu, None, quiet)
    assert apart(on_cpu, losses(tmp_path)) < 1e-4
    start = read(tmp_path / "metrics.jsonl")[0]
    assert start["precision"] == "float32" and start["kernel"].startswith("flex_attention")


def test_the_default_is_bf16_compiled_with_flash_attention(folder, gpu, on_cpu, on_gpu, tmp_path):
    train(opened(folder, tmp_path, "compile=auto"), gpu, None, quiet)
    assert apart(losses(on_gpu), losses(tmp_path)) < 5e-3
    start, *lines = read(tmp_path / "metrics.jsonl")
    assert start["precision"] == "bfloat16" and start["compiled"] and start["kernel"].startswith("FlashAttention")
    assert start["device"] == torch.cuda.get_device_name()
    assert apart(on_cpu, losses(tmp_path)) < 5e-3
    told = [line for line in lines if line["event"] == "step" and "gpu_memory_bytes" in line]
    assert told and all(0 < line["gpu_memory_bytes"] < 1e9 for line in told)


@pytest.mark.parametrize("overrides", [
    ["parallel.shard=none"], ["parallel.shard=grad"], ["parallel.checkpointing={every: 2}"],
    ["parallel.checkpointing=selective"], ["parallel.checkpointing=selective", "compile=auto"],
    ["parallel.checkpointing=full"], ["parallel.accumulate=unsharded"], ["parallel.offload=true"],
    ["loss.chunk=40"], ["checkpoint.async=true", "checkpoint.every=3"]],
    ids=lambda overrides: " ".join(overrides))
def test_no_arrangement_changes_the_losses(folder, gpu, on_gpu, tmp_path, overrides):
    train(opened(folder, tmp_path, *overrides), gpu, None, quiet)
    assert apart(losses(on_gpu), losses(tmp_path)) < 5e-3


def test_without_document_masks_attention_crosses_documents(folder, gpu, on_gpu, tmp_path):
    train(opened(folder, tmp_path, "model.masking=none"), gpu, None, quiet)
    assert 0 < apart(losses(on_gpu), losses(tmp_path)) < 0.2
    assert read(tmp_path / "metrics.jsonl")[0]["kernel"].startswith("scaled_dot_product_attention")


@pytest.mark.parametrize("model", [
    ["model.softcap=15", "model.tie=false"], ["model.activation=relu2", "model.nope_every=2", "model.rotary=0.5"],
    ["model.mup=64", "model.qkv_bias=true"], ["model.kv_heads=4"], ["model.head_dim=20"]],
    ids=lambda overrides: " ".join(overrides))
def test_every_model_trains_as_on_the_cpu(folder, gpu, tmp_path, model):
    both = []
    for precision in ("fp32", "bf16"):
        out = tmp_path / precision
        train(opened(folder, out, *model, f"precision={precision}"), gpu, 4, quiet)
        both.append(losses(out))
    assert max(abs(both[0][s] - both[1][s]) / both[0][s] for s in both[0]) < 5e-3


@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_every_optimiser_steps_as_on_the_cpu(folder, gpu, tmp_path, kind):
    chosen = [f"optimizer.kind={kind}", "optimizer.lr=0.002", "precision=fp32"]
    out = tmp_path / "cpu"
    subprocess.run([sys.executable, "-m", "trainer", "run", str(folder), "--out", str(out), "--device", "cpu",
                    *(x for o in [*SET, *chosen] for x in ("--set", o))], check=True, cwd=ROOT,
                   env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, stdout=subprocess.DEVNULL)
    train(opened(folder, tmp_path / "gpu", *chosen), gpu, None, quiet)
    # Muon orthogonalises in bfloat16 on a GPU; the sign of Lion flips with rounding
    assert apart(losses(out), losses(tmp_path / "gpu")) < 5e-3


def test_float8_learns_nearly_as_bf16(folder, gpu, on_gpu, tmp_path):
    pytest.importorskip("torchao")
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs compute capability 8.9")
    train(opened(folder, tmp_path, "parallel.fp8=true", "compile=auto"), gpu, None, quiet)
    assert 0 < apart(losses(on_gpu), losses(tmp_path)) < 2e-2


def test_a_resume_goes_on_as_if_nothing_had_been(folder, gpu, on_gpu, tmp_path):
    for stop in (3, 6, None):
        said: list[str] = []
        train(opened(folder, tmp_path), gpu, stop, said.append)
    assert any("resumed from step_00000006" in text for text in said)
    assert apart(losses(on_gpu), losses(tmp_path)) < 1e-3


def test_the_same_training_twice(folder, gpu, on_gpu, tmp_path):
    """FlashAttention's backward and the embedding's add in any order, so not bit for bit."""
    train(opened(folder, tmp_path), gpu, None, quiet)
    assert apart(losses(on_gpu), losses(tmp_path)) < 1e-3


@pytest.mark.parametrize("overrides", [[], *([f"optimizer.kind={kind}"] for kind in OTHER_KINDS),
                                       ["parallel.checkpointing=selective"], ["parallel.shard=none"],
                                       ["compile=auto"]],
                         ids=lambda overrides: " ".join(overrides))
def test_the_host_never_waits_within_a_step(folder, gpu, tmp_path, overrides, monkeypatch):
    """torch raises at every call that would wait for the device, from the third step of a shape on."""
    real, seen = Trainer.perform, []

    def watched(self, step, batch, waited):
        seen.append(self.number)
        strict = len(seen) > 2 and not self.meters.due(self.number)
        torch.cuda.set_sync_debug_mode("error" if strict else "default")
        try:
            real(self, step, batch, waited)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(Trainer, "perform", watched)
    train(opened(folder, tmp_path, "log_every=50", *overrides), gpu, 4, quiet)
    assert len(seen) == 4


def test_checkpoints_hold_the_same_bytes_in_the_background(folder, gpu, on_gpu, tmp_path):
    """Saved from one state, since two trainings differ in their last bits."""
    from tests.trainer.test_async_checkpoint import content

    found = []
    for way in ("false", "true"):
        out = tmp_path / way
        run = opened(folder, out, f"checkpoint.async={way}")
        there = arranged(gpu, run.config.parallel)
        trainer = Trainer(run, there, Ledger.open(out, there), ckpt.latest(on_gpu / "checkpoints"), Goodput(), quiet)
        with trainer.saver:
            trainer.save(next(run.steps(0)), None)
            trainer.saver.wait()
        found.append(content(ckpt.latest(out / "checkpoints")))
    assert found[0].keys() == found[1].keys() and found[0]
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_it_generates_the_same_text_as_the_cpu(folder, gpu, on_gpu, tmp_path, precision):
    """Greedy, and the same tokens twice: each token has another length."""
    run = opened(folder, tmp_path, f"precision={precision}")
    there = arranged(gpu, run.config.parallel)
    trainer = Trainer(run, there, Ledger.open(tmp_path, there), None, Goodput(), quiet)
    config = SampleConfig(tokens=6, temperature=0)
    made = [generate(trainer.model, [5, 7], config, 0, 1, trainer.dtype, there) for _ in range(2)]
    assert made[0] == made[1] and all(0 <= token < run.vocab for token in made[0])


@pytest.mark.parametrize("command", [["doctor", "--ranks", "1"], ["plan"], ["soak", "--steps", "4"]])
def test_commands_on_a_gpu(folder, on_gpu, tmp_path, command):
    done = subprocess.run([sys.executable, "-m", "trainer", command[0], str(folder), "--out", str(tmp_path / "out"),
                           *command[1:]], capture_output=True, text=True, cwd=ROOT, timeout=300)
    print(done.stdout, done.stderr)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


def test_more_ranks_than_gpus_are_refused_in_one_line(folder, tmp_path):
    ranks = torch.cuda.device_count() + 1
    done = subprocess.run([sys.executable, "-m", "trainer", "run", str(folder), "--out", str(tmp_path), "--ranks",
                           str(ranks)], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode and "Traceback" not in done.stderr and str(ranks) in done.stderr
    assert not list(tmp_path.glob("checkpoints/*"))
