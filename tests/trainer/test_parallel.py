"""Every arrangement of ranks, and every setting that saves memory, gives the same training. Tests use four gloo ranks,
or one process where that is enough."""

from __future__ import annotations

import json
from collections import Counter
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.trainer.processes import launch
from tests.trainer.ranks import FEW, FOUR, MODEL, STOP, TOTAL, built, initial_hashes
from tests.trainer.synthetic import losses, make_run, quiet
from tests.trainer.test_parity import norms, parity
from trainer.base.config import ConfigError, build
from trainer.checkpoint import checkpoints as ckpt
from trainer.loop import train as loop
from trainer.loop.run import open_run
from trainer.model.attention import document_mask
from trainer.model.config import ModelConfig
from trainer.model.init import initialise
from trainer.model.tensor import PLAN, placement
from trainer.model.transformer import Transformer
from trainer.observe.metrics import read
from trainer.parallel.config import Every, ParallelConfig
from trainer.parallel.world import arranged, clip, shard, world


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return str(make_run(tmp_path_factory.mktemp("store"), model=MODEL, total=TOTAL, documents=300))


@pytest.fixture(scope="module")
def four(run, tmp_path_factory):
    """The results of trainings on one rank, of the same trainings on four ranks, and of one rank that continues what
    the four wrote."""
    out = tmp_path_factory.mktemp("four")
    with world("cpu") as here:
        (out / "init.alone.json").write_text(json.dumps(initial_hashes(run, here)))
        loop.train(open_run(run, None, str(out / "one"), []), here, STOP, quiet)
    launch("tests.trainer.ranks", 4, "parallel", run, str(out))
    with world("cpu") as here:
        for name in FOUR:
            loop.train(open_run(run, None, str(out / name), []), here, STOP, quiet)
    return out


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUR)
def test_four_ranks_in_any_arrangement_give_the_losses_of_one(four, name):
    one, found = losses(four / "one"), losses(four / name)
    lines = read(four / name / "metrics.jsonl")
    assert [(line["event"], line["step"], line["world"]) for line in lines if line["event"] in ("start", "resume")] == \
        [("start", 0, 4), ("resume", FEW, 1)]
    assert one.keys() == found.keys()
    assert parity(one, found) < 1e-4                  # the last steps: one rank, from the checkpoint of four
    assert norms(four / name) == pytest.approx(norms(four / "one"), rel=1e-3)


@pytest.mark.slow
def test_with_copies_of_tensor_groups_no_shard_is_like_another(four):
    alone = {name: digest for name, (digest, _) in json.loads((four / "init.alone.json").read_text()).items()}
    for rank in range(4):
        found = json.loads((four / f"shards.{rank}.json").read_text())
        assert {name: digest for name, (digest, _) in found["init"].items()} == alone
        assert found["sound"] == {"twins": [], "unequal": []}
        assert found["mutant"]["twins"] == [name for name in alone if "norm" not in name]


@pytest.mark.slow
def test_a_poisoned_rank_of_four_poisons_all(four):
    seen = [json.loads((four / f"poison.{rank}.json").read_text()) for rank in range(4)]
    assert len({str(norms) for norms in seen}) == 1
    assert [i for i, x in enumerate(seen[0]) if x != x] == [4]
    lines = [line for line in read(four / "poison" / "metrics.jsonl") if line["event"] == "step"]
    assert [line["step"] for line in lines if line.get("skipped")] == [5]


@pytest.fixture(scope="module")
def plain(run, tmp_path_factory):
    out = tmp_path_factory.mktemp("plain")
    with world("cpu") as here:
        loop.train(open_run(run, None, str(out), []), here, FEW, quiet)
    return out


@pytest.mark.parametrize("overrides", [
    ["parallel.checkpointing=selective", "parallel.shard=none"], ["parallel.checkpointing=full", "micro_batch=64"],
    ["parallel.checkpointing={every: 2}", "parallel.offload=true"],
    pytest.param(["compile=true", "parallel.checkpointing=selective"], marks=pytest.mark.slow)])
def test_saving_memory_changes_no_loss(run, plain, tmp_path, alone, overrides):
    loop.train(open_run(run, None, str(tmp_path), overrides), alone, FEW, quiet)
    assert parity(losses(plain), losses(tmp_path), FEW) < 1e-5
    assert norms(tmp_path) == pytest.approx(norms(plain), rel=1e-4)
    a, b = (ckpt.latest(out / "checkpoints") for out in (plain, tmp_path))
    assert a.meta["probe"]["loss"] == pytest.approx(b.meta["probe"]["loss"], abs=1e-5)


@pytest.mark.parametrize("how", ["none", "selective", "full"])
def test_all_layers_share_one_compiled_graph(run, alone, how, monkeypatch):
    """Compiled is what a layer computes, whole: FSDP's hooks and checkpointing leave nothing out."""
    graphs = []

    def counting(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **options: real(f, backend=counting, **options))
    torch._dynamo.reset()
    config = open_run(run, None, None, []).config.model
    tokens, found = torch.arange(64)[None], []
    for compiled in (False, True):
        with torch.device("meta"):
            model = Transformer(config, 128)
        shard(model, arranged(alone, ParallelConfig(checkpointing=how)), torch.float32, compiled)
        initialise(model, config, 7)
        loss = model(tokens, document_mask(tokens, torch.float32), tokens)[0]
        loss.backward()
        found.append([loss.detach(), *(p.grad.full_tensor() for p in model.parameters())])
        assert len(graphs) == compiled
    torch._dynamo.reset()
    for one, other in zip(*found):
        torch.testing.assert_close(one, other)


class Operators(TorchDispatchMode):
    """Counts calls of operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


def operators(run: str, here, how: str) -> Counter[str]:
    """Return which operators forward and backward of two layers call, and how often."""
    here = arranged(here, open_run(run, None, None, [f"parallel.checkpointing={how}"]).config.parallel)
    model = built(run, here, [])
    tokens = torch.arange(64)[None]
    with Operators() as called:
        model(tokens, document_mask(tokens, torch.float32), tokens)[0].backward()
    return called.seen


def test_checkpointing_computes_again_what_it_says(run, alone):
    product, norm = "aten.mm.default", "aten.rsqrt.default"
    attention = "aten._scaled_dot_product_flash_attention_for_cpu"
    called = {how: operators(run, alone, how) for how in ("none", "selective", "full", "{every: 2}")}
    layers, products = 2, 7
    attentions = {how: sum(n for name, n in seen.items() if name.startswith(attention) and "backward" not in name)
                  for how, seen in called.items()}
    assert attentions == {"none": layers, "selective": layers, "full": 2 * layers, "{every: 2}": layers + 1}
    base = called["none"][product]
    assert called["selective"][product] == base                        # no matrix product twice
    # of a layer that is computed again the last product is not: nothing of it is needed
    assert base + layers * (products - 1) <= called["full"][product] <= base + layers * products
    assert base + products - 1 <= called["{every: 2}"][product] <= base + products
    assert called["selective"][norm] > called["none"][norm]            # but norms are


def test_the_norm_counts_what_several_ranks_hold_once(run, alone):
    model = built(run, arranged(alone, ParallelConfig(shard="none")), [])
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    entries = sum(p.numel() for p in model.parameters())
    with mock.patch.object(torch, "tensor", side_effect=AssertionError("copied from the host, which waits for that")):
        norm = clip(model, 1.0, alone)
    assert norm.item() == pytest.approx(0.5 * entries ** 0.5, rel=1e-5)
    assert clip(model, 1.0, alone).item() == pytest.approx(1.0, rel=1e-4)
    assert clip(model, 7.0, alone).item() == pytest.approx(1.0, rel=1e-4)       # below the bound nothing is scaled


def test_every_parameter_of_every_model_has_a_place_in_the_plan():
    for preset in ModelConfig.PRESETS:
        config = build(ModelConfig, {"preset": preset, "qk_norm": True, "layers": 1}, "model")
        with torch.device("meta"):
            model = Transformer(config, 64)
        for name, parameter in model.named_parameters():
            how = placement(name)
            assert how.is_replicate() == (parameter.ndim == 1 and not name.endswith("bias")), name
    with pytest.raises(ValueError, match="no plan for the parameter blocks"):
        placement("blocks.0.router.weight")
    assert len({ending for endings, _, _ in PLAN for ending in endings}) == sum(len(e) for e, _, _ in PLAN)


@pytest.mark.parametrize(("written", "expected"), [
    ({}, ParallelConfig()), ({"checkpointing": "full"}, ParallelConfig(checkpointing="full")),
    ({"checkpointing": {"every": 2}}, ParallelConfig(checkpointing=Every(2))),
    ({"shard": "hybrid", "shard_size": 8, "tensor": 2}, ParallelConfig("hybrid", 8, 2))])
def test_config(written, expected):
    assert build(ParallelConfig, written, "train.parallel") == expected


@pytest.mark.parametrize(("written", "said"), [
    ({"shard": "zero"}, "train.parallel.shard: 'zero' is not one of"),
    ({"checkpointing": "all"}, "train.parallel.checkpointing: 'all' is not one of"),
    ({"checkpointing": {"each": 2}}, "train.parallel.checkpointing.each: unknown key"),
    ({"checkpointing": {"every": 0}}, "every must be at least 1"),
    ({"shard": "hybrid"}, "goes with shard: hybrid"), ({"shard_size": 8}, "goes with shard: hybrid"),
    ({"tensor": 0}, "tensor must be at least 1"), ({"fp8": True, "tensor": 2}, "do not go together")])
def test_what_cannot_be_is_refused(written, said):
    with pytest.raises(ConfigError, match=said):
        build(ParallelConfig, written, "train.parallel")


def test_shapes_of_meshes():
    assert ParallelConfig().shape(8) == {"shard": 8}
    assert ParallelConfig("none").shape(8) == {"replicate": 8, "shard": 1}
    assert ParallelConfig("hybrid", 8, 2).shape(64) == {"replicate": 4, "shard": 8, "tensor": 2}
    assert ParallelConfig("grad", tensor=4).shape(8) == {"shard": 2, "tensor": 4}
    with pytest.raises(ConfigError, match="tensor: 3 does not divide 8 ranks"):
        ParallelConfig(tensor=3).shape(8)
    with pytest.raises(ConfigError, match="shard_size: 8 does not divide 4 data ranks"):
        ParallelConfig("hybrid", 8, 2).shape(8)


def test_a_model_that_does_not_divide_is_refused_when_the_run_is_opened(run):
    with pytest.raises(ConfigError, match=r"tensor: 4 does not divide train.model.kv_heads \(2\)"):
        open_run(run, None, None, ["parallel.tensor=4"])


def test_more_ranks_than_gpus_are_told_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ConfigError, match=r"number 3 on this machine, where torch sees 2 GPUs"), world("cuda"):
        pass


def test_a_rank_that_fails_ends_and_the_others_with_it():
    """While they wait for it in a collective, and though (as with NCCL) leaving in good order is one, too."""
    said = launch("tests.trainer.fault_ranks", 2, ends=1)            # a collective's own limit is 600 s
    assert "the disk is gone" in said[1] and "the disk is gone" not in said[0]


def test_float8_says_what_it_needs(run, alone):
    with torch.device("meta"):
        model = Transformer(ModelConfig(layers=1, width=16, heads=2), 32)
    with pytest.raises(ConfigError, match=r"train.parallel.fp8: needs (the package torchao|a GPU)"):
        shard(model, arranged(alone, ParallelConfig(fp8=True)), torch.float32, False)
