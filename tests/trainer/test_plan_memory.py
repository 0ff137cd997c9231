"""What `tokenmill train plan` says about memory: compared with the same model on fake tensors of many ranks, and
checked for consistency."""

from __future__ import annotations

import functools

import pytest
import torch

from tests.trainer.synthetic import make_run
from trainer.__main__ import main
from trainer.base.config import ConfigError, build
from trainer.loop.config import TrainConfig
from trainer.loop.run import open_run
from trainer.model import attention
from trainer.model.config import ModelConfig
from trainer.model.rope import rotation
from trainer.model.transformer import Block, Transformer, base_rope
from trainer.parallel import world
from trainer.tools.memory import (
    FILL,
    MEMORY,
    activation_bytes,
    checkpoint_bytes,
    device_named,
    estimate,
    measure,
    micro_batch,
    parse_bytes,
    table,
)

VOCAB, LENGTH = 8192, 512
MODEL = {"layers": 4, "width": 256, "heads": 8, "kv_heads": 4, "ffn": 704, "qk_norm": True}


def config(**keys) -> TrainConfig:
    return build(TrainConfig, {"model": MODEL, **keys}, "train")


@functools.cache
def undivided(layers: int) -> float:
    """Return the measured memory of each of 64 fake ranks, for a model with `layers` layers. All of them are run,
    without extrapolation."""
    return measure(config(model={**MODEL, "layers": layers}), VOCAB, 64, 16, LENGTH, 2)


@pytest.mark.parametrize("parallel", [
    {}, {"tensor": 4, "checkpointing": "selective"},
    *(pytest.param(p, marks=pytest.mark.slow) for p in (
        {"tensor": 4}, {"checkpointing": "selective"}, {"checkpointing": "full"}, {"shard": "grad"},
        {"shard": "hybrid", "shard_size": 8, "checkpointing": {"every": 2}}))])
def test_the_formula_is_what_64_fake_ranks_take(parallel):
    made = config(parallel=parallel)
    measured = measure(made, VOCAB, 64, 16, LENGTH, 2) if parallel else undivided(4)
    formula = estimate(made, VOCAB, 64, 16 * LENGTH, 2, kernels="cpu")
    # gradients come while activations go: the formula, which adds them, is the larger by them
    close = 0.15 if "tensor" in parallel else 0.12
    assert sum(formula.values()) - formula["gradients"] == pytest.approx(measured, rel=close)
    assert not torch.distributed.is_initialized()


def test_layers_that_are_not_measured_are_like_those_that_are():
    deep = config(model={**MODEL, "layers": 8})
    per_layer = 16 * LENGTH * (estimate(deep, VOCAB, 64, 1, 2, kernels="cpu")["activations"] / 8)
    assert undivided(8) - undivided(4) == pytest.approx(4 * per_layer, rel=0.15)         # 8: from 3 and 5 layers


def test_state_is_divided_as_the_mesh_says():
    parameters = build(ModelConfig, MODEL, "model").parameters(VOCAB)
    with torch.device("meta"):
        assert sum(p.numel() for p in Transformer(build(ModelConfig, MODEL, "m"), VOCAB).parameters()) == parameters
    for parallel, shards in (({}, 64), ({"tensor": 2}, 64), ({"shard": "none"}, 1), ({"shard": "none", "tensor": 4}, 4),
                             ({"shard": "hybrid", "shard_size": 8}, 8)):
        found = estimate(config(parallel=parallel), VOCAB, 64, 1024, 2)
        assert found["parameters"] == found["gradients"] == 4 * parameters / shards
        assert found["optimizer"] == 8 * parameters / shards
    offloaded = estimate(config(parallel={"offload": True}), VOCAB, 1, 1024, 2)
    assert offloaded["parameters"] == offloaded["gradients"] == offloaded["optimizer"] == 0
    # several micro-batches: a rank adds up its share, or whole gradients
    assert estimate(config(), VOCAB, 64, 1024, 2, accumulate=True)["accumulated"] == 0
    for shard in ({}, {"shard": "hybrid", "shard_size": 8}, {"shard": "none"}):
        whole = config(parallel={"accumulate": "unsharded", **shard})
        assert estimate(whole, VOCAB, 64, 1024, 2, accumulate=True)["accumulated"] == 4 * parameters
        assert estimate(whole, VOCAB, 64, 1024, 2)["accumulated"] == 0
    assert checkpoint_bytes(config(), VOCAB) == 12 * parameters
    matrices = parameters - VOCAB * MODEL["width"] - 256 * 9 - 4 * 2 * 32
    assert checkpoint_bytes(config(optimizer={"kind": "muon"}), VOCAB) == 12 * parameters - 4 * matrices
    assert checkpoint_bytes(config(optimizer={"kind": "lion"}), VOCAB) == 8 * parameters
    assert checkpoint_bytes(config(checkpoint={"moments": "bf16"}), VOCAB) == 8 * parameters


def test_accumulation_takes_no_more_than_one_micro_batch():
    """The sizes of a report: 8B on 8 ranks took 32 GB more with several micro-batches a step."""
    for shard in ({}, {"shard": "hybrid", "shard_size": 4}):
        made = build(TrainConfig, {"model": {"preset": "8b"}, "parallel": {"checkpointing": "selective", **shard}}, "t")
        one, several = (sum(estimate(made, 128256, 8, 8192, 2, again).values()) for again in (False, True))
        assert several == one
    assert one > 50e9                                                  # hybrid 4: twice the state
    whole = build(TrainConfig, {"model": {"preset": "8b"}, "parallel": {
        "checkpointing": "selective", "accumulate": "unsharded"}}, "t")
    one, several = (sum(estimate(whole, 128256, 8, 8192, 2, again).values()) for again in (False, True))
    assert (round(one / 1e9, 1), round(several / 1e9, 1)) == (48.3, 80.4)


def test_fake_ranks_hold_no_whole_gradients_between_micro_batches():
    shallow, parallel = {**MODEL, "layers": 2}, {"checkpointing": "selective"}
    made = config(model=shallow, parallel=parallel)
    parameters = made.model.parameters(VOCAB)
    one, several = (measure(made, VOCAB, 64, 4, LENGTH, 2, again) for again in (False, True))
    whole = measure(config(model=shallow, parallel={**parallel, "accumulate": "unsharded"}), VOCAB, 64, 4, LENGTH, 2,
                    True)
    assert several == pytest.approx(one, rel=0.05)
    assert whole - several > 0.5 * 4 * parameters


def test_the_table_takes_the_largest_that_fits():
    made = config()
    total = sum(estimate(made, VOCAB, 16, 8 * LENGTH, 2, True).values())
    lines, best = table(made, VOCAB, 16, LENGTH, 2, total / FILL + 1, 16)
    assert lines[0].split() == ["micro_batch", "checkpointing", "full", "hybrid", "8", "grad", "none"]
    assert f"checkpointing none, train.micro_batch {8 * LENGTH}" in best
    row = next(line for line in lines if line.split()[:2] == [f"{8 * LENGTH:,}", "none"])
    assert row.split()[2].endswith("*")
    assert not row.split()[-1].endswith("*")
    least = sum(estimate(made, VOCAB, 16, LENGTH, 2, True).values())
    _, tight = table(made, VOCAB, 16, LENGTH, 2, least, 16)            # not one row without computing again
    assert "checkpointing none" not in tight
    assert "train.micro_batch" in tight
    assert "nothing fits" in table(made, VOCAB, 16, LENGTH, 2, 1e6, 16)[1]
    assert "--memory 141GB" in table(made, VOCAB, 16, LENGTH, 2, None, 16)[1]


def test_the_advice_is_for_the_way_the_run_is_divided():
    """Copies of everything on each rank take more than an eighth of it: a smaller micro-batch fits."""
    counts, length = {}, 64
    whole = sum(estimate(config(parallel={"shard": "none"}), VOCAB, 16, 4 * length, 2, True).values())
    for parallel in ({"shard": "none"}, {"shard": "full"}, {"shard": "hybrid", "shard_size": 2}):
        made = config(parallel=parallel)
        lines, best = table(made, VOCAB, 16, length, 2, whole / FILL + 1, 16)
        counts[made.parallel.shard] = int(best.split()[-1]) // length
    assert counts["none"] == 4 < counts["full"]
    assert "hybrid 2" in lines[0]


def test_amounts_and_devices():
    assert parse_bytes("141GB") == 141e9
    assert parse_bytes("80 GiB") == 80 * 2**30
    for wrong in ("141", "many GB", "-3GB"):
        with pytest.raises(ConfigError, match=f"--memory {wrong}: no amount of memory"):
            parse_bytes(wrong)
    assert device_named("h100", MEMORY) == "NVIDIA H100 80GB HBM3"
    assert device_named("H200", MEMORY) == "NVIDIA H200"
    assert device_named("NVIDIA L40S", MEMORY) == "NVIDIA L40S"
    with pytest.raises(ConfigError, match="--gpu V100: not known"):
        device_named("V100", MEMORY)


def test_plan_of_a_run(tmp_path, capsys):
    run = make_run(tmp_path, documents=60, total=960, model={**MODEL, "layers": 1})
    at = open_run(str(run), None, None, ["micro_batch=64"])
    assert micro_batch(at, 1) == (2, 32, True)                        # as many tokens as 1 × 64
    assert main(["plan", str(run), "--ranks", "4", "--gpu", "H100", "--price", "2", "--memory", "10GB", "--set",
                 "parallel={tensor: 2, checkpointing: selective}"]) == 0
    said = capsys.readouterr().out
    for text in ("of a rank of 4 (shard 2 × tensor 2)", "checkpointing selective", "whole heads",
                 "measured on fake tensors of 4 ranks", "fits into 92% of 10 GB",
                 "GPU-hours of NVIDIA H100 80GB HBM3 at 40% MFU = $", "hours on 4"):
        assert text in said
    assert "accumulate" not in said                                   # two rows a step are one micro-batch
    several = ["plan", str(run), "--ranks", "2", "--gpu", "H100", "--set", "micro_batch=32"]
    assert main(several) == 0
    said = capsys.readouterr().out
    assert "several micro-batches a step: " in said and ", fits" in said
    assert "take sharded where a rank's links carry more than " in said
    assert main([*several, "--memory", "1MB"]) == 0
    assert ", does not fit\n           take sharded\n" in capsys.readouterr().out
    assert main([*several, "--set", "parallel.shard=none"]) == 0
    assert "take sharded: nothing is divided" in capsys.readouterr().out
    assert main(["plan", str(run), "--gpu", "V100"]) == 2
    assert main(["plan", str(run), "--price", "-2"]) == 2
    assert main(["plan", str(run), "--ranks", "3", "--set", "parallel.tensor=2"]) == 2
    assert "train.parallel.tensor: 2 does not divide 3 ranks" in capsys.readouterr().err


@torch.library.custom_op("tokenmill_test::attention", mutates_args={})
def stand_in(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Stand in for FlashAttention: return tensors of the sizes that it returns and keeps (the result, and log Z of
    every head and token)."""
    return torch.zeros_like(q), torch.zeros(q.shape[1], q.shape[0])


@torch.library.custom_op("tokenmill_test::attention_backward", mutates_args={})
def stand_in_backward(grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
                      z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


stand_in.register_fake(lambda q, k, v: (torch.empty_like(q), torch.empty(q.shape[1], q.shape[0])))
stand_in_backward.register_fake(lambda _, q, k, v, *__: tuple(torch.empty_like(x) for x in (q, k, v)))
stand_in.register_autograd(lambda context, grad, _: stand_in_backward(grad, *context.saved_tensors),
                           setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, *output))


@pytest.mark.slow
@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize(("model", "how", "size"), [
    ({}, "none", 2), ({}, "none", 4), ({"qk_norm": True}, "none", 2), ({"activation": "relu2", "ffn": 704}, "none", 2),
    ({}, "selective", 2), ({"qk_norm": True, "activation": "relu2", "ffn": 704}, "selective", 2), ({}, "full", 2)])
def test_the_formula_is_what_a_compiled_layer_keeps(monkeypatch, model, how, size, grouped):
    """By the partition of torch's compiler, which is the same for every device."""
    monkeypatch.setattr(attention, "varlen_attn", lambda q, k, v, *_, **__: stand_in(q, k, v)[0])
    monkeypatch.setattr(attention, "VARLEN_GQA", grouped)
    monkeypatch.setattr(world, "KEPT", (*world.KEPT, "tokenmill_test.attention"))
    torch._dynamo.reset()
    made = build(ModelConfig, {**MODEL, "qk_norm": False, "layers": 1, **model}, "model")
    dtype, tokens = (torch.bfloat16 if size == 2 else torch.float32), 2 * 64
    block = Block(made, 0).to(dtype)
    positions = torch.arange(64).repeat(2, 1)
    world.recompute(block, 0, how)
    kept = {p.untyped_storage().data_ptr(): 0 for p in block.parameters()}

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept.setdefault(x.untyped_storage().data_ptr(), x.untyped_storage().nbytes())
        return x

    mask = attention.document_mask(positions, dtype, backend="varlen")
    cos, sin = rotation(positions, made.rotated, base_rope(made))
    kept |= {x.untyped_storage().data_ptr(): 0 for x in (cos, sin)}        # all layers share them
    hidden = torch.randn(2, 64, made.width, dtype=dtype, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = torch.compile(block.forward, dynamic=False, backend="aot_eager_decomp_partition")(hidden, mask, cos, sin)
    out.sum().backward()
    assert sum(kept.values()) / tokens == pytest.approx(activation_bytes(made, how, size, 1, "compiled"), rel=0.02)
