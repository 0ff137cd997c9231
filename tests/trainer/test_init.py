"""Initial values depend on the name of the parameter. With muP, what is learnt neither grows nor shrinks with the
width."""

from __future__ import annotations

import math

import pytest
import torch

from trainer.model.attention import document_mask
from trainer.model.config import ModelConfig, role
from trainer.model.init import full_value, initialise
from trainer.model.transformer import Transformer
from trainer.optim import build as optim
from trainer.optim.adamw import AdamWConfig

WIDTHS = (32, 64, 128, 256)


def test_every_parameter_has_a_role():
    config = ModelConfig(layers=1, width=32, heads=4, qk_norm=True, qkv_bias=True, tie=False)
    roles = {name: role(name) for name, _ in Transformer(config, 11).named_parameters()}
    assert roles.pop("embed.weight") == "embedding"
    assert roles.pop("head.weight") == "output"
    matrices = {name for name, kind in roles.items() if kind == "matrix"}
    assert matrices == {f"blocks.0.{n}.weight" for n in ("attention.q", "attention.k", "attention.v", "attention.o",
                                                         "mlp.gate", "mlp.up", "mlp.down")}
    assert {kind for name, kind in roles.items() if name not in matrices} == {"vector"}


def test_biases_start_at_zero_and_gains_at_one():
    config = ModelConfig(layers=1, width=32, heads=4, qk_norm=True, qkv_bias=True)
    for name, size in (("blocks.0.attention.q.bias", 32), ("blocks.0.attention.q_norm.weight", 8), ("norm.weight", 32)):
        want = 0.0 if name.endswith("bias") else 1.0
        assert full_value(name, torch.Size((size,)), config, 0).tolist() == [want] * size


def test_initial_spread_under_mup():
    plain, wide = (ModelConfig(layers=2, width=256, heads=4, ffn=512, tie=False, mup=m) for m in (0, 64))
    for name, ratio in (("embed.weight", 1), ("head.weight", 1), ("blocks.0.mlp.up.weight", 2),
                        ("blocks.1.attention.o.weight", 2)):
        a, b = (full_value(name, torch.Size((256, 256)), c, 0) for c in (plain, wide))
        assert torch.allclose(a, b * ratio), name
    assert wide.rate("blocks.0.mlp.up.weight") == 1 / 4
    assert wide.rate("embed.weight") == wide.rate("head.weight") == wide.rate("norm.weight") == 1
    assert plain.rate("blocks.0.mlp.up.weight") == 1
    assert ModelConfig(layers=1, width=256, heads=4, mup=64).scale == pytest.approx(8 / 64)
    assert ModelConfig(layers=1, width=256, heads=2, mup=64).scale == pytest.approx(8 / 128)


def moved(width: int, mup: int, tie: bool, alone) -> dict[str, float]:
    """Return how far activations move in a few steps of Adam at one learning rate: {place in the model: root mean
    square of the change}."""
    config = ModelConfig(layers=2, width=width, heads=4, ffn=2 * width, tie=tie, mup=mup, init_std=0.1)
    model = Transformer(config, 64)
    initialise(model, config, 0)
    optimizer = optim.build(AdamWConfig(lr=0.02, weight_decay=0.0), model.named_parameters(), alone, config.rate)
    for group in optimizer.param_groups:
        group["lr"] = group["peak"]
    g = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 64, (8, 33), generator=g)
    mask = document_mask(torch.arange(32).repeat(8, 1), torch.float32)
    seen: dict[str, torch.Tensor] = {}
    places = {"attention": model.blocks[1].attention, "mlp": model.blocks[1].mlp, "stream": model.blocks[1]}
    for name, module in places.items():
        module.register_forward_hook(lambda _m, _i, out, name=name: seen.__setitem__(name, out.detach()))

    def look() -> dict[str, torch.Tensor]:
        with torch.no_grad():
            return {"logits": model(tokens[:, :-1], mask), **seen}

    before = look()
    for _ in range(4):
        objective, _, _ = model(tokens[:, :-1], mask, tokens[:, 1:], torch.tensor(1 / 256))
        objective.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: (x - before[name]).square().mean().sqrt().item() for name, x in look().items()}


def slopes(mup: int, tie: bool, alone) -> dict[str, float]:
    """Return for each place in the model the exponent with which this movement grows with the width (least squares of
    the logarithms)."""
    sizes = [moved(width, mup, tie, alone) for width in WIDTHS]
    x = [math.log2(w) for w in WIDTHS]
    mean = sum(x) / len(x)
    spread = sum((a - mean) ** 2 for a in x)
    return {name: sum((a - mean) * math.log2(s[name]) for a, s in zip(x, sizes)) / spread for name in sizes[0]}


@pytest.mark.parametrize("tie", [True, False])
def test_coordinate_check(alone, tie):
    """Tensor Programs V, appendix D.1: under muP the updates of activations keep their size as the model gets wider; in
    the usual parametrisation they grow with it."""
    with_mup, without = slopes(32, tie, alone), slopes(0, tie, alone)
    assert all(abs(v) < 0.25 for v in with_mup.values()), with_mup
    assert without["logits"] > 0.4, without
    assert without["mlp"] > 0.4, without
