"""Muon on sharded matrices does the same as torch.optim.Muon on whole ones, for several numbers of ranks, layouts and
scalings."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from tests.trainer.optim_ranks import LAYOUTS, MUON, SHAPES, configured, moved, starts
from tests.trainer.processes import launch
from trainer.optim.muon import SCALINGS, newton_schulz


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    out = tmp_path_factory.mktemp("muon")
    launch("tests.trainer.optim_ranks", 4, "muon", str(out))
    return out


def reference(name, **keys):
    """Perform the steps with torch.optim.Muon on whole matrices. Returns (matrices before, matrices after)."""
    values, gradients = starts(*SHAPES[name])
    parameters = [nn.Parameter(v.clone()) for v in values]
    optimizer = torch.optim.Muon(parameters, lr=0.1, weight_decay=0.1, momentum=0.95, **keys)
    for step in gradients:
        for p, g in zip(parameters, step):
            p.grad = g.clone()
        optimizer.step()
    return values, [p.detach() for p in parameters]


def distance(a, b):
    return max((x - y).abs().max().item() for x, y in zip(a, b))


@pytest.mark.parametrize("name", SHAPES)
def test_one_process_is_torch_muon_within_the_noise_of_its_bfloat16(alone, name):
    before, after = reference(name)
    ours, calls = moved([nn.Parameter(v.clone()) for v in before], starts(*SHAPES[name])[1], alone)
    assert calls == 0
    assert distance(before, after) > 0.1
    assert distance(ours, after) < 0.06 * distance(before, after)


@pytest.mark.parametrize("keys", [{"nesterov": False}, {"momentum": 0.5}, {"weight_decay": 0.5}, {"steps": 2},
                                  {"scaling": "naive"}, {"lr": 0.12}])
def test_another_rule_is_told_from_torch_muon(alone, keys):
    """The tolerance above is tight enough to see each part of the rule."""
    before, after = reference("tall")
    ours, _ = moved([nn.Parameter(v.clone()) for v in before], starts(*SHAPES["tall"])[1], alone, **keys)
    assert distance(ours, after) > 0.1 * distance(before, after)


def same_as_one(out, ranks, alone):
    """Check that every layout gives what one process gives. Layouts that divide rows must take two all-to-alls per
    shape and step."""
    got = torch.load(out / "muon.pt", weights_only=True)
    for layout in LAYOUTS[ranks]:
        for name, shape in SHAPES.items():
            values, gradients = starts(*shape)
            one, _ = moved([nn.Parameter(v) for v in values], gradients, alone)
            assert distance(one, got[f"{layout} {name}"]) < 2e-5, (layout, name)
    calls = json.loads((out / "muon.json").read_text())
    assert {key: n for key, n in calls.items() if not key.startswith("rowwise")} == \
        {f"{layout} {name}": 6 for layout in LAYOUTS[ranks] if layout != "rowwise" for name in SHAPES}


@pytest.mark.slow
def test_ranks_and_layouts_change_nothing(out, alone):
    """Four ranks that share rows, two pairs of them (hybrid), and what tensor parallelism makes of rows. (Two ranks:
    test_optim.py.)"""
    same_as_one(out, 4, alone)


@pytest.mark.slow
def test_tensor_parallel_columns_and_rows_under_fsdp(out, alone):
    got = torch.load(out / "muon.pt", weights_only=True)["tensor parallel"]
    for shape, ours in zip(((13, 26, 1), (26, 13, 1)), got):
        values, gradients = starts(*shape)
        one, _ = moved([nn.Parameter(v) for v in values], gradients, alone)
        assert distance(one, [ours]) < 2e-5


def test_scalings():
    assert {name: f(400, 100) for name, f in SCALINGS.items()} == pytest.approx(
        {"naive": 1, "kellerjordan": 2, "mup": 2, "moonlight": 4})
    assert {name: f(100, 400) for name, f in SCALINGS.items()} == pytest.approx(
        {"naive": 1, "kellerjordan": 1, "mup": 0.5, "moonlight": 4})


def test_moonlight_moves_by_as_much_as_adamw(alone):
    """Root mean square 0.2 an entry, whatever the shape: what lets it share AdamW's rate."""
    for shape in ((64, 48, 1), (48, 64, 1), (128, 16, 1)):
        values, gradients = starts(*shape)
        after, _ = moved([nn.Parameter(v.clone()) for v in values], gradients[:1], alone, lr=1.0, weight_decay=0.0,
                         scaling="moonlight")
        assert (after[0] - values[0]).square().mean().sqrt().item() == pytest.approx(0.2, rel=0.25)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_newton_schulz_brings_singular_values_near_one(dtype):
    x = torch.randn(3, 40, 24, generator=torch.Generator().manual_seed(1))
    values = torch.linalg.svdvals(newton_schulz(x.to(dtype), 5).float())
    assert 0.6 < values.min() < values.max() < 1.3
    whole = newton_schulz(x, 5)
    assert torch.allclose(whole[1], newton_schulz(x[1:2], 5)[0], atol=1e-6)     # no matrix sees its neighbours
    assert torch.allclose(newton_schulz(x.mT, 5), whole.mT, atol=1e-5)


def test_other_parameters_learn_by_adamw_at_their_own_rate(alone):
    from trainer.model.config import ModelConfig
    from trainer.model.transformer import Transformer
    from trainer.optim import build as optim

    torch.manual_seed(0)
    model = Transformer(ModelConfig(layers=1, width=16, heads=2, tie=False), 50)
    twin = Transformer(ModelConfig(layers=1, width=16, heads=2, tie=False), 50)
    twin.load_state_dict(model.state_dict())
    ours = optim.build(configured(**{**MUON, "adamw_lr": 0.003}), model.named_parameters(), alone)
    adamw = optim.build(configured(lr=0.003, weight_decay=0.1), twin.named_parameters(), alone)
    for step in range(2):
        for i, (p, q) in enumerate(zip(model.parameters(), twin.parameters())):
            g = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * step + i))
            p.grad, q.grad = g.clone(), g.clone()
        ours.step()
        adamw.step()
    hidden = {n for n, p in model.named_parameters() if p.ndim == 2 and n.startswith("blocks.")}
    for (name, p), q in zip(model.named_parameters(), twin.parameters()):
        assert torch.equal(p, q) != (name in hidden), name
        assert set(ours.state[p]) == ({"momentum"} if name in hidden else {"step", "exp_avg", "exp_avg_sq"}), name
