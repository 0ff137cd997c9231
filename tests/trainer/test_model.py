"""The decoder: tokens do not attend to other documents, positions restart, and the number of parameters is as
calculated."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from tokenizer.mixture.curriculum import Phase
from trainer.base.config import ConfigError, build
from trainer.model.attention import attend, cumulative_lengths, document_mask
from trainer.model.config import ModelConfig, RopeScaling
from trainer.model.init import full_value, initialise, parameter_seed
from trainer.model.loss import IGNORE
from trainer.model.rope import Rope, rotate, rotation
from trainer.model.transformer import Transformer, base_rope, phase_rope

SMALL = ModelConfig(layers=3, width=48, heads=6, kv_heads=2, ffn=80, qk_norm=True, nope_every=3)


def made(config: ModelConfig, vocab: int = 101, seed: int = 0) -> Transformer:
    model = Transformer(config, vocab)
    initialise(model, config, seed)
    return model


def positions_of(*lengths: int) -> torch.Tensor:
    return torch.cat([torch.arange(n) for n in lengths])[None]


@pytest.mark.parametrize("config", [SMALL, ModelConfig(layers=2, width=32, heads=4, kv_heads=4, ffn=64, tie=False)])
def test_a_token_of_one_document_changes_nothing_in_another(config):
    model, g = made(config), torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 101, (1, 40), generator=g)
    mask = document_mask(positions_of(13, 20, 7), torch.float32)
    before = model(tokens, mask)
    changed = tokens.clone()
    changed[0, 5] = (tokens[0, 5] + 1) % 101                         # in the first document
    changed[0, 20] = (tokens[0, 20] + 1) % 101                       # in the second, its eighth token
    after = model(changed, mask)
    same = (before == after).all(-1)[0]
    assert same[:5].all()                                            # causal
    assert not same[5:13].any()                                      # what follows in the first document
    assert same[13:20].all()                                         # the second, up to the change
    assert not same[20:33].any()
    assert same[33:].all()                                           # the third never


def test_a_document_reads_the_same_wherever_it_stands():
    model, g = made(SMALL), torch.Generator().manual_seed(2)
    document, other = torch.randint(0, 101, (1, 17), generator=g), torch.randint(0, 101, (1, 23), generator=g)
    alone = model(document, document_mask(positions_of(17), torch.float32))
    packed = model(torch.cat((other, document), 1), document_mask(positions_of(23, 17), torch.float32))
    assert torch.allclose(alone, packed[:, 23:], atol=1e-5)


def test_dense_mask_equals_attention_of_each_document_alone():
    g = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 30, n, 8, generator=g) for n in (6, 2, 2))
    whole = attend(q, k, v, document_mask(positions_of(11, 1, 18), torch.float32))
    parts = [attend(q[:, a:b], k[:, a:b], v[:, a:b], document_mask(positions_of(b - a), torch.float32))
             for a, b in ((0, 11), (11, 12), (12, 30))]
    assert torch.allclose(whole, torch.cat(parts, 1), atol=1e-6)


def test_cumulative_lengths_are_padded_with_empty_documents():
    starts = cumulative_lengths(torch.cat((positions_of(3, 5), positions_of(8)), 0))
    assert starts.dtype == torch.int32
    assert starts[:4].tolist() == [0, 3, 8, 16]
    assert len(starts) == 64
    assert set(starts[3:].tolist()) == {16}
    many = cumulative_lengths(torch.zeros(2, 100, dtype=torch.int64))
    assert many[:201].tolist() == list(range(201))
    assert len(many) == 256
    more = cumulative_lengths(torch.zeros(2, 150, dtype=torch.int64))
    assert len(more) == 1024 and set(more[300:].tolist()) == {300}


def test_rotation_depends_on_distance_alone():
    g = torch.Generator().manual_seed(4)
    q, k = torch.randn(1, 1, 1, 16, generator=g), torch.randn(1, 1, 1, 16, generator=g)

    def score(i: int, j: int) -> float:
        a = rotate(q, *rotation(torch.tensor([[i]]), 16, Rope(10_000.0)))
        b = rotate(k, *rotation(torch.tensor([[j]]), 16, Rope(10_000.0)))
        return float((a * b).sum())

    assert score(7, 3) == pytest.approx(score(104, 100), abs=1e-4)
    assert score(7, 3) != pytest.approx(score(7, 4), abs=1e-3)


def test_nope_layers_do_not_rotate():
    model = made(SMALL)
    assert [block.attention.rope for block in model.blocks] == [True, True, False]


@pytest.mark.parametrize("config", [SMALL, ModelConfig(layers=2, width=32, heads=4, kv_heads=1, ffn=60, tie=False),
                                    ModelConfig(layers=2, width=32, heads=4, kv_heads=2, qkv_bias=True),
                                    ModelConfig(layers=2, width=32, heads=4, activation="relu2", rotary=0.5)])
def test_parameters_are_counted(config):
    assert sum(p.numel() for p in Transformer(config, 101).parameters()) == config.parameters(101)


def preset(name: str) -> ModelConfig:
    return build(ModelConfig, {"preset": name}, "recipe.yaml: train.model")


@pytest.mark.parametrize(("name", "vocab", "millions"), [
    ("135m", 49152, 134.5), ("360m", 49152, 361.8), ("1.7b", 49152, 1711.4), ("1b", 128256, 1235.8),
    ("3b", 128256, 3075.1), ("qwen3-0.6b", 151936, 596.0), ("8b", 128256, 8030.3)])
def test_presets_have_the_published_sizes(name, vocab, millions):
    assert preset(name).parameters(vocab) / 1e6 == pytest.approx(millions, abs=0.1)


def test_presets_have_the_published_positions_and_norms():
    assert {n: (preset(n).rope_theta, preset(n).norm_eps, preset(n).dim) for n in ModelConfig.PRESETS
            if n[0] not in "dt"} == {
        "135m": (1e5, 1e-5, 64), "360m": (1e5, 1e-5, 64), "1.7b": (1.3e5, 1e-5, 64), "1b": (5e5, 1e-5, 64),
        "3b": (5e4, 1e-6, 128), "qwen3-0.6b": (1e6, 1e-6, 128), "8b": (5e5, 1e-5, 128)}
    assert preset("1b").rope_scaling == RopeScaling("llama3", 32.0, 8192, 1.0, 4.0)
    assert [n for n in ModelConfig.PRESETS if preset(n).rope_scaling] == ["1b"]


def test_the_dial_of_depth():
    for layers in (4, 12, 32):
        config = preset(f"d{layers}")
        assert (config.layers, config.width, config.dim, config.heads) == (layers, 64 * layers, 128, layers // 2)
        assert config.ffn == pytest.approx(8 / 3 * config.width, abs=64)
        assert config.qk_norm and not config.tie


@pytest.mark.parametrize(("change", "said"), [
    ({"rotary": 0.1}, "even"), ({"rotary": 1.5}, "share"), ({"softcap": -1}, "softcap"),
    ({"rope_scaling": {"kind": "yarn", "factor": 4}}, "needs original"),
    ({"rope_scaling": {"kind": "linear", "factor": 0.5}}, "at least 1"),
    ({"rope_scaling": {"kind": "llama3", "factor": 8, "original": "8k", "attention_factor": 1.2}}, "belongs to yarn"),
    ({"rope_scaling": {"kind": "ntk", "factor": 2}}, "'linear', 'llama3', 'yarn'"),
    ({"activation": "gelu"}, "'swiglu', 'relu2'")])
def test_models_that_cannot_be_are_refused(change, said):
    with pytest.raises(ConfigError, match=said):
        build(ModelConfig, {"preset": "tiny", **change}, "recipe.yaml: train.model")


def test_what_a_checkpoint_keeps_of_a_model():
    for name in ("tiny", "1b", "qwen3-0.6b"):
        kept = json.loads(json.dumps(preset(name).identity()))
        assert build(ModelConfig, kept, "meta.json") == preset(name)


def test_scaled_frequencies():
    """YaRN (arXiv 2309.00071, §3.2): fast pairs as they were, slow ones divided; Llama 3.1 by wavelength."""
    cpu = torch.device("cpu")
    plain = Rope(10_000.0).frequencies(64, cpu)
    assert torch.allclose(Rope(10_000.0, RopeScaling("linear", 4.0)).frequencies(64, cpu), plain / 4)
    turns = 2048 * plain / (2 * torch.pi)
    for scaling, fast, slow in ((RopeScaling("yarn", 8.0, 2048), 32 * 1.4, 1 / 1.4),
                                (RopeScaling("llama3", 8.0, 2048, 1.0, 4.0), 4.0, 1.0)):
        got = Rope(10_000.0, scaling).frequencies(64, cpu)
        assert torch.allclose(got[turns > fast], plain[turns > fast])
        assert torch.allclose(got[turns < slow], plain[turns < slow] / 8)
        between = (turns < fast / 1.5) & (turns > slow * 1.5)
        assert between.any()
        assert ((got < plain) & (got > plain / 8))[between].all()
        assert (got.diff() < 0).all()
    assert Rope(1e4, RopeScaling("yarn", 8.0, 2048)).magnitude == pytest.approx(1.2079, abs=1e-4)
    assert Rope(1e4, RopeScaling("yarn", 8.0, 2048, attention_factor=1.0)).magnitude == 1.0
    assert Rope(1e4, RopeScaling("llama3", 8.0, 2048)).magnitude == 1.0


def test_a_phase_has_positions_of_its_own():
    theirs = {"rope_theta": None, "rope_scaling": None}
    config = preset("1b")
    phase = Phase("long", 0, 1, 1, 32, 1, {"web": 1}, "stable", {}, "error", **theirs)
    assert phase_rope(config, phase) == base_rope(config)
    own = replace(phase, rope_theta=2e6, rope_scaling={"kind": "yarn", "factor": 4, "original": 4096})
    assert phase_rope(config, own) == Rope(2e6, RopeScaling("yarn", 4.0, 4096))
    with pytest.raises(ConfigError, match="phase 'long': rope_scaling"):
        phase_rope(config, replace(phase, rope_scaling={"kind": "yarn", "factor": 4}))
    model = made(SMALL)
    tokens = torch.randint(0, 101, (1, 20), generator=torch.Generator().manual_seed(6))
    mask = document_mask(positions_of(20), torch.float32)
    before = model(tokens, mask)
    model.rope = Rope(50.0)
    assert not torch.allclose(before, model(tokens, mask), atol=1e-3)
    model.rope = base_rope(SMALL)
    assert torch.equal(before, model(tokens, mask))


def test_partial_rotation_passes_the_rest():
    g = torch.Generator().manual_seed(7)
    x = torch.randn(1, 9, 2, 16, generator=g)
    turned = rotate(x, *rotation(torch.arange(9)[None], 8, Rope(100.0)))
    assert torch.equal(turned[..., 8:], x[..., 8:])
    assert torch.allclose(turned[..., :8], rotate(x[..., :8], *rotation(torch.arange(9)[None], 8, Rope(100.0))))
    assert torch.allclose(turned.norm(dim=-1), x.norm(dim=-1), atol=1e-5)
    assert not torch.allclose(turned[:, 1:, :, :8], x[:, 1:, :, :8], atol=1e-2)


def test_init_is_a_function_of_seed_and_name():
    a, b, c = made(SMALL, seed=1), made(SMALL, seed=1), made(SMALL, seed=2)
    for (name, x), y, z in zip(a.named_parameters(), b.parameters(), c.parameters()):
        assert torch.equal(x, y)
        if x.ndim > 1:
            assert not torch.equal(x, z), name
    drawn = [p.flatten()[:8].tolist() for p in a.parameters() if p.ndim > 1]
    assert len({tuple(d) for d in drawn}) == len(drawn)              # no two parameters share their numbers
    # golden: the numbers of a checkpoint's start must not move between versions
    assert parameter_seed(1, "embed.weight") == 4974181350342645801
    value = full_value("embed.weight", torch.Size((2, 2)), SMALL, 1)
    assert value.flatten().tolist() == pytest.approx(GOLDEN, abs=1e-7)


GOLDEN = [0.0024139443, 0.0004001399, -0.0181488153, -0.0045165578]


def test_scale_of_the_initial_values():
    config = ModelConfig(layers=8, width=256, heads=4, kv_heads=4, ffn=512)
    model = made(config, 500)
    assert model.blocks[3].mlp.up.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert model.blocks[3].mlp.down.weight.std().item() == pytest.approx(0.02 / 4, rel=0.02)
    loss, nll, _ = model(torch.zeros(1, 8, dtype=torch.int64), document_mask(positions_of(8), torch.float32),
                         torch.full((1, 8), 7))
    assert nll.mean().item() == pytest.approx(6.2, abs=0.3)          # about ln 500: it knows nothing yet
    assert loss.item() == pytest.approx(nll.sum().item(), rel=1e-6)


def test_ignored_targets_give_no_gradient():
    model = made(SMALL)
    tokens = torch.randint(0, 101, (2, 16))
    objective, _, _ = model(tokens, document_mask(torch.arange(16).repeat(2, 1), torch.float32),
                            torch.full_like(tokens, IGNORE), z=1e-2)
    objective.backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())
