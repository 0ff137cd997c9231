"""Every optimiser: parameter groups and learning rates, its update compared with a plain one, skipped steps, several
ranks, and checkpoints."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from tests.trainer.optim_ranks import KINDS, configured, skips
from tests.trainer.processes import launch
from tests.trainer.synthetic import make_run, quiet
from tests.trainer.test_muon import same_as_one
from trainer.base.config import ConfigError
from trainer.loop import train as loop
from trainer.loop.run import open_run
from trainer.model.config import ModelConfig, role
from trainer.model.transformer import Transformer
from trainer.observe.metrics import read
from trainer.optim import adamw8bit
from trainer.optim import build as optim
from trainer.optim.config import kinds


def model(**keys):
    return Transformer(ModelConfig(**{"layers": 2, "width": 16, "heads": 2, **keys}), 50)


# -- groups --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tie", [True, False])
def test_groups(kind, tie, alone):
    made = model(qk_norm=True, tie=tie)
    config = configured(kind=kind, lr=0.001, embedding_lr=0.02, weight_decay=0.3)
    optimizer = optim.build(config, made.named_parameters(), alone)
    named = {id(p): name for name, p in made.named_parameters()}
    groups = {g["name"]: g for g in optimizer.param_groups}
    listed = {name: {named[id(p)] for p in g["params"]} for name, g in groups.items()}
    assert listed["embedding"] == {"embed.weight"}
    assert listed["norms and biases"] == {n for n, p in made.named_parameters() if p.ndim < 2}
    assert listed.get("output", set()) == (set() if tie else {"head.weight"})
    assert sum(map(len, listed.values())) == len(named)
    assert {n: (g["weight_decay"], g["peak"]) for n, g in groups.items()} == {
        "matrices": (0.3, 0.001), "embedding": (0.0, 0.02), "norms and biases": (0.0, 0.001),
        **({} if tie else {"output": (0.3, 0.001)})}
    table = optim.describe(optimizer)
    assert table.splitlines()[1].split()[0] == "matrices" and "0.02" in table
    assert kind.lower() in table.lower()


def test_without_a_rate_of_its_own_the_embedding_learns_like_the_rest(alone):
    assert {g["peak"] for g in optim.build(configured(lr=0.5), model().named_parameters(), alone).param_groups} == {0.5}


def test_every_optimiser_is_tested():
    assert KINDS.keys() == kinds().keys()


@pytest.mark.parametrize("kind", KINDS)
def test_decay_shrinks_matrices_alone(kind, alone):
    made = model()
    before = {n: p.detach().clone() for n, p in made.named_parameters()}
    optimizer = optim.build(configured(kind=kind, lr=0.1, weight_decay=0.5), made.named_parameters(), alone)
    for p in made.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for name, p in made.named_parameters():
        assert torch.allclose(p, before[name] * (0.95 if role(name) == "matrix" else 1.0)), name


def test_overrides_by_name(alone):
    config = configured(lr=0.01, weight_decay=0.1, groups=[
        {"match": r"blocks\.1\..*q\.weight", "lr": 0.5, "weight_decay": 0.0}, {"match": "norm", "lr": 2},
        {"match": "blocks.1", "weight_decay": 0.7}])
    made = model(qk_norm=True)
    optimizer = optim.build(config, made.named_parameters(), alone)
    named = {id(p): name for name, p in made.named_parameters()}
    got = {named[id(p)]: (g["peak"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]}
    assert got["blocks.1.attention.q.weight"] == (0.005, 0.0)          # the first that matches counts
    assert got["blocks.1.attention.k.weight"] == (0.01, 0.7)
    assert got["blocks.1.mlp_norm.weight"] == (0.02, 0.0)
    assert got["blocks.0.attention.q.weight"] == (0.01, 0.1)
    assert "/blocks.1/" in optim.describe(optimizer)
    with pytest.raises(ConfigError, match=r"groups: match: 'atention' matches no parameter; there are embed\.weight"):
        optim.build(configured(groups=[{"match": "atention"}]), made.named_parameters(), alone)
    with pytest.raises(ConfigError, match=r"groups\[0\]: match: '\(' is no regular expression"):
        configured(groups=[{"match": "("}])


def test_mup_divides_the_rate_of_matrices_by_the_growth_in_width(alone):
    wide = ModelConfig(layers=1, width=64, heads=2, tie=False, mup=16)
    named = list(Transformer(wide, 50).named_parameters())

    def peaks(**keys):
        made = optim.build(configured(lr=0.4, **keys), named, alone, wide.rate)
        return {g["name"]: g["peak"] for g in made.param_groups}
    assert peaks() == peaks(kind="muon") == {"matrices": 0.1, "output": 0.4, "embedding": 0.4, "norms and biases": 0.4}
    # an orthogonal update knows the width by itself
    assert peaks(kind="muon", scaling="mup", adamw_lr=0.2) == {"matrices": 0.4, "output": 0.2, "embedding": 0.2,
                                                               "norms and biases": 0.2}
    made = optim.build(configured(lr=0.4, weight_decay=0.1), named, alone, wide.rate)
    assert {g["name"]: g["peak"] * g["weight_decay"] for g in made.param_groups} == pytest.approx(
        {"matrices": 0.04, "output": 0.04, "embedding": 0.0, "norms and biases": 0.0})     # what a step shrinks
    with pytest.raises(ConfigError, match=r"train\.model\.mup.*adafactor"):
        peaks(kind="adafactor")


# -- configuration -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("keys", "message"), [
    ({"kind": "lion", "nesterov": True}, r"optimizer\.nesterov: belongs to kind: .*muon.*, not to lion; remove it, "
                                         r"or write kind: "),
    ({"kind": "adafactor", "betas": [0.9, 0.9]}, r"betas: belongs to kind: .*adamw.*, not to adafactor"),
    ({"nesterov": True}, r"nesterov: belongs to kind: .*muon.*, not to adamw"),
    ({"kind": "muonn"}, r"kind: 'muonn' is not one of .*adamw.*did you mean 'muon'"),
    ({"kind": "muon", "momentun": 0.9}, r"momentun: unknown key; did you mean 'momentum'"),
    ({"kind": "muon", "scaling": "kellerjordan"}, r"scaling: kellerjordan.*give adamw_lr"),
    ({"kind": "muon", "steps": 0}, r"steps ≥ 1"),
    ({"kind": "lion", "betas": [0.9, 1.0]}, r"betas must be in"),
    ({"kind": "adafactor", "beta2_decay": 0.8}, r"beta2_decay must be < 0"),
    ({"lr": 0}, r"lr and embedding_lr must be > 0"),
])
def test_errors_say_which_kind_has_the_key(keys, message):
    with pytest.raises(ConfigError, match=message):
        configured(**keys)


# -- rules ---------------------------------------------------------------------------------------------------------
def steps(optimizer, parameters, many=4):
    for number in range(many):
        for i, p in enumerate(parameters):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * number + i))
        optimizer.step()


def pairs(shapes=((7, 5), (5, 7), (6,))):
    torch.manual_seed(1)
    values = [torch.randn(s) for s in shapes]
    return [[nn.Parameter(v.clone()) for v in values] for _ in range(2)]


def named(parameters):
    return [(f"blocks.0.{'w' if p.ndim > 1 else 'norm'}{i}.weight", p) for i, p in enumerate(parameters)]


def test_adafactor_is_torchs(alone):
    ours, theirs = pairs()
    steps(optim.build(configured(kind="adafactor", lr=0.3, weight_decay=0.1), named(ours), alone), ours)
    steps(torch.optim.Adafactor([{"params": theirs[:2], "weight_decay": 0.1}, {"params": theirs[2:]}], lr=0.3), theirs)
    for a, b in zip(ours, theirs):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)


def test_lion_is_the_papers_rule(alone):
    ours, plain = pairs()
    steps(optim.build(configured(kind="lion", lr=0.01, weight_decay=0.5, betas=[0.9, 0.98]), named(ours), alone), ours)
    with torch.no_grad():
        for i, p in enumerate(plain):
            m = torch.zeros_like(p)
            for number in range(4):
                g = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * number + i))
                update = torch.sign(0.9 * m + 0.1 * g)
                p -= 0.01 * (update + (0.5 if p.ndim > 1 else 0) * p)
                m = 0.98 * m + 0.02 * g
    for a, b in zip(ours, plain):
        assert torch.allclose(a, b, atol=1e-6)


@pytest.mark.parametrize("signed", [True, False])
def test_levels_are_fine_near_zero_and_packing_takes_the_nearest(signed):
    table = adamw8bit.levels(signed)
    assert len(table) == 256 and table.unique().numel() == 256 and table[-1] == 1.0
    assert table[0] == (-0.99296875 if signed else 0.0) and 0.0 in table
    x = torch.randn(5, 700, generator=torch.Generator().manual_seed(1)) * torch.logspace(-6, 2, 700)
    x = x if signed else x.square()
    codes, scale = adamw8bit.pack(x, table)
    assert codes.dtype == torch.uint8 and codes.shape == x.shape and scale.shape == (5, 3)
    back = adamw8bit.unpack(codes, scale, table)
    block = adamw8bit.blocks(x)
    off = (block[..., None] / scale[..., None, None] - table).abs().amin(-1) * scale[..., None]
    assert torch.allclose((back - x).abs(), off.flatten(1)[:, :700], atol=1e-5 * float(scale.max()))
    zero = adamw8bit.pack(torch.zeros(2, 300), table)
    assert not adamw8bit.unpack(*zero, table).any()


def test_adamw8bit_is_adamw_but_for_its_rounding(alone):
    """Small tensors exactly; a matrix within a share of its steps, at a quarter of the memory."""
    shapes = ((64, 80), (7, 5), (6,))
    ours, theirs = pairs(shapes)
    before = [p.detach().clone() for p in ours]
    packed = optim.build(configured(kind="adamw8bit", lr=0.01, weight_decay=0.1), named(ours), alone)
    steps(packed, ours, 8)
    steps(optim.build(configured(lr=0.01, weight_decay=0.1), named(theirs), alone), theirs, 8)
    for a, b in zip(ours[1:], theirs[1:]):
        assert torch.allclose(a, b, atol=1e-6)
    wrong = (ours[0] - theirs[0]).square().mean().sqrt() / (theirs[0] - before[0]).square().mean().sqrt()
    assert 1e-4 < wrong < 0.05
    assert sum(x.numel() * x.element_size() for x in packed.state[ours[0]].values()) < 2.1 * ours[0].numel() + 600


def test_adamw_is_torchs(alone):
    ours, theirs = pairs()
    steps(optim.build(configured(lr=0.01, weight_decay=0.1), named(ours), alone), ours)
    steps(torch.optim.AdamW([{"params": theirs[:2], "weight_decay": 0.1}, {"params": theirs[2:], "weight_decay": 0}],
                            lr=0.01, betas=(0.9, 0.95)), theirs)
    for a, b in zip(ours, theirs):
        assert torch.allclose(a, b, atol=1e-6)


# -- steps that are not to be, ranks, checkpoints ------------------------------------------------------------------
@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """The results of two ranks that perform skipped steps, and that begin a training with every optimiser: (run, folder
    of the results)."""
    store = tmp_path_factory.mktemp("store")
    run, out = str(make_run(store, total=1600, documents=200)), store / "out"
    out.mkdir()
    launch("tests.trainer.optim_ranks", 2, "all", str(out), run)
    return run, out


@pytest.mark.parametrize("kind", KINDS)
def test_a_skipped_step_changes_nothing(kind, alone):
    assert all((found := skips(alone, kind)).values()), found


@pytest.mark.parametrize("kind", KINDS)
def test_a_skipped_step_changes_nothing_on_two_ranks_one_of_which_is_poisoned(kind, out):
    for rank in range(2):
        found = json.loads((out[1] / f"skips.{rank}.json").read_text())[kind]
        assert all(found.values()), (rank, found)


def test_muon_on_two_ranks_is_muon_on_one(out, alone):
    same_as_one(out[1], 2, alone)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_then_one_give_the_losses_of_one(kind, out, alone):
    """Updates on shards equal updates on whole tensors, and the state comes back from a checkpoint, resharded."""
    run, folder = out
    sets = ["optimizer={}", f"optimizer.kind={kind}", *(f"optimizer.{k}={v}" for k, v in KINDS[kind].items())]
    losses = []
    for name in (kind, f"{kind}-alone"):
        loop.train(open_run(run, None, str(folder / name), sets), alone, None, quiet)
        losses.append([x["loss"] for x in read(folder / name / "metrics.jsonl") if x["event"] == "step"])
    assert len(losses[0]) == len(losses[1]) == 9
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
    assert losses[0][-1] < losses[0][0] - 0.05
