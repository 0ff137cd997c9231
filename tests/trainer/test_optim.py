"""AdamW groups: what decays, and at which rate each group learns."""

from __future__ import annotations

import pytest
import torch

from trainer.model import ModelConfig, Transformer
from trainer.optim.adamw import AdamWConfig, build, describe


@pytest.mark.parametrize("tie", [True, False])
def test_groups(tie):
    model = Transformer(ModelConfig(layers=2, width=16, heads=2, qk_norm=True, tie=tie), 50)
    optimizer = build(AdamWConfig(lr=0.001, embedding_lr=0.02, weight_decay=0.3), model.named_parameters())
    named = {id(p): name for name, p in model.named_parameters()}
    groups = {g["name"]: g for g in optimizer.param_groups}
    listed = {name: {named[id(p)] for p in g["params"]} for name, g in groups.items()}
    assert listed["embeddings"] == {"embed.weight"}
    assert listed["norms and biases"] == {n for n, p in model.named_parameters() if p.ndim < 2}
    assert ("head.weight" in listed["matrices"]) != tie
    assert sum(map(len, listed.values())) == len(named)
    assert {n: (g["weight_decay"], g["peak"]) for n, g in groups.items()} == {
        "matrices": (0.3, 0.001), "embeddings": (0.0, 0.02), "norms and biases": (0.0, 0.001)}
    table = describe(optimizer)
    assert "embeddings" in table
    assert "0.02" in table


def test_without_a_rate_of_its_own_the_embedding_learns_like_the_rest():
    model = Transformer(ModelConfig(layers=1, width=16, heads=2), 50)
    assert {g["peak"] for g in build(AdamWConfig(lr=0.5), model.named_parameters()).param_groups} == {0.5}


def test_decay_shrinks_matrices_alone():
    model = Transformer(ModelConfig(layers=1, width=16, heads=2), 50)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = build(AdamWConfig(lr=0.1, weight_decay=0.5), model.named_parameters())
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for name, p in model.named_parameters():
        shrunk = p.ndim >= 2 and name != "embed.weight"
        assert torch.allclose(p, before[name] * (0.95 if shrunk else 1.0)), name
