"""The gradient noise scale, for a problem whose noise is known; and the gradient norms under FSDP, compared with plain
autograd."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tests.trainer.measure_ranks import MESHES, ROWS, STEPS, plain_norms
from tests.trainer.processes import launch
from tests.trainer.synthetic import make_run, quiet, steps
from trainer.loop.run import open_run
from trainer.loop.train import train
from trainer.observe import norms
from trainer.observe.noise import KEEP, MicroNorms, NoiseScale, estimate
from trainer.parallel.world import world

DIM, NOISE = 40, 3.0


def quadratic(sizes: list[int], distance: float, rng: np.random.Generator) -> tuple[float, float, float, int]:
    """Perform one step on ½|θ − x|² with x ~ N(0, NOISE²·I), at |θ| = `distance`: the gradient of n samples is θ minus
    their mean. Returns the arguments of `estimate`: mean |G_i|², mean 1/n_i, |G|², N."""
    theta = np.full(DIM, distance / math.sqrt(DIM))
    means = [theta - rng.normal(0, NOISE, (n, DIM)).mean(0) for n in sizes]
    total = sum(sizes)
    whole = sum(n * g for n, g in zip(sizes, means)) / total
    return (float(np.mean([g @ g for g in means])), float(np.mean([1 / n for n in sizes])), float(whole @ whole), total)


@pytest.mark.parametrize("sizes", [[8] * 8, [2] * 2, [1, 4, 7, 20], [64, 64]])
def test_both_estimators_are_unbiased_also_when_micro_batches_differ(sizes):
    rng = np.random.default_rng(0)
    found = np.array([estimate(*quadratic(sizes, 2.0, rng)) for _ in range(6000)])
    trace, signal = found.mean(0)
    error = found.std(0) / math.sqrt(len(found))
    assert abs(trace - DIM * NOISE ** 2) < 4 * error[0]
    assert abs(signal - 4.0) < 4 * error[1]
    assert error[0] < 0.03 * DIM * NOISE ** 2 and error[1] < 0.1 * 4.0            # so that the test says something


def test_the_ratio_of_means_finds_the_critical_batch():
    rng = np.random.default_rng(1)
    scale = NoiseScale()
    assert scale.tokens is None
    seen = []
    for _ in range(400):
        small, inverse, big, total = quadratic([8] * 8, 2.0, rng)
        line = scale.measure([8 * small, 8 * inverse, 8], math.sqrt(big), total)
        assert line["critical_batch_tokens"] == scale.tokens
        seen.append(scale.tokens)
    # B_simple = tr Σ / |G|² = 40·9/4 = 90
    assert np.median(seen[50:]) == pytest.approx(90, rel=0.15)


def test_what_cannot_be_measured_is_left_out():
    scale = NoiseScale()
    assert scale.measure([1.0, 1 / 64, 1], 1.0, 64) is None                       # one micro-batch: the whole step
    assert scale.measure([0.0, 0.0, 0], 1.0, 64) is None                          # nothing was measured
    assert scale.measure([2.0, 2 / 32, 2], math.nan, 64) is None
    assert scale.measure([math.inf, 2 / 32, 2], math.inf, 64) is None
    assert scale.measure([math.inf, 2 / 32, 2], None, 64) is None                 # as a metrics line has it
    assert scale.measure([math.inf, 2 / 32, 2], 1.0, 64) is None
    assert scale.measure([2.0, 2 / 32, 2], 1.0, 0) is None
    assert scale.tokens is None and scale.weight == 0


def test_a_restart_goes_on_from_the_lines_before():
    rng = np.random.default_rng(2)
    whole, lines = NoiseScale(), []
    for step in range(20):
        small, inverse, big, total = quadratic([8] * 8, 2.0, rng)
        lines.append({"step": step, "noise": whole.measure([8 * small, 8 * inverse, 8], math.sqrt(big), total)})
        lines.append({"step": step})
    again = NoiseScale(lines)
    assert (again.trace, again.signal, again.weight) == (whole.trace, whole.signal, whole.weight)
    assert whole.weight == pytest.approx(1 - KEEP ** 20)


# -- under FSDP --------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def out(tmp_path_factory):
    folder = tmp_path_factory.mktemp("noise")
    run = make_run(folder / "store", documents=300, total=3840, train={"log_every": 1, "micro_batch": 32},
                   phases=[{"name": "a", "until": "100%", "sequence": 32, "batch": 32 * 8, "mix": {"web": 1}}])
    launch("tests.trainer.measure_ranks", 2, str(run), str(folder))
    return run, folder


def test_norms_of_micro_batches_are_those_of_plain_autograd(out):
    """Before reduction and accumulation, whole, on each of two ranks; with FSDP's shards uneven."""
    run, folder = out
    for rank in (0, 1):
        found = json.loads((folder / f"norms.{rank}.json").read_text())
        want = plain_norms(open_run(str(run), None, None, []), rank, 2)
        assert found["micro"] == pytest.approx(want, rel=1e-4)
        assert len(want) == ROWS // 2 and len(set(want)) == len(want)
    assert found["off"] == [0.0, 0.0, 0.0]                                        # not asked for, not measured


def agree(one: list[dict], two: list[dict]) -> None:
    """Check that two equal trainings have measured the same noise scale and norms."""
    assert len(one) == len(two) == STEPS
    for a, b in zip(one, two):
        assert a["noise"]["trace"] == pytest.approx(b["noise"]["trace"], rel=1e-3)
        assert a["noise"]["signal"] == pytest.approx(b["noise"]["signal"], rel=1e-2, abs=1e-4)
        assert a["parameter_norm"] == pytest.approx(b["parameter_norm"], rel=1e-5)
        for name, group in a["updates"].items():
            assert group["ratio"] == pytest.approx(b["updates"][name]["ratio"], rel=1e-3), name


def alone_into(run: Path, out: Path) -> list[dict]:
    with world("cpu") as here:
        train(open_run(str(run), None, str(out), []), here, STEPS, quiet)
    return steps(out)


@pytest.mark.slow
def test_four_ranks_in_a_mesh_estimate_the_same(tmp_path):
    """Layers divided between two ranks, or two copies of everything: nothing counts twice, nothing is left out."""
    run = make_run(tmp_path / "store", documents=300, total=3840, train={"log_every": 1, "micro_batch": 32},
                   model={"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "ffn": 64, "qk_norm": True},
                   phases=[{"name": "a", "until": "100%", "sequence": 32, "batch": 32 * ROWS, "mix": {"web": 1}}])
    launch("tests.trainer.measure_ranks", 4, str(run), str(tmp_path), "meshes")
    one = alone_into(run, tmp_path / "one")
    for name in MESHES:
        agree(one, steps(tmp_path / name))


def test_one_rank_and_two_estimate_the_same(out):
    """The same training: two ranks with a micro-batch of a row, and one; each line's estimates agree."""
    run, folder = out
    one, two = alone_into(run, folder / "one"), steps(folder / "two")
    agree(one, two)
    assert two[-1]["straggler"]["ratio"] >= 1 and two[-1]["straggler"]["rank"] in (0, 1)
    assert "straggler" not in one[-1]
    assert Path(folder / "two" / "trainer.prom").exists()


# -- norms of updates --------------------------------------------------------------------------------------------------
def test_update_norms_are_what_the_parameters_moved_by(alone):
    torch.manual_seed(0)
    first, second = (nn.Parameter(torch.randn(50, 30)) for _ in range(2))
    optimizer = torch.optim.SGD([{"params": [first], "name": "a", "lr": 0.5},
                                 {"params": [second], "name": "b", "lr": 0.0}])
    first.grad, second.grad = torch.randn(50, 30), torch.randn(50, 30)
    norm = first.detach().norm().item()
    updates = norms.Updates(optimizer)
    optimizer.step()
    told = norms.metrics_fields(optimizer.param_groups, updates.sums().tolist())
    moved = told["updates"]["a"]
    assert moved["ratio"] == pytest.approx(0.5 * first.grad.norm().item() / norm, rel=1e-4)
    assert moved["parameter_norm"] == pytest.approx(first.detach().norm().item(), rel=1e-5)
    assert told["updates"]["b"]["ratio"] == 0
    assert told["parameter_norm"] == pytest.approx(math.hypot(first.detach().norm(), second.detach().norm()), rel=1e-5)


def test_large_models_are_sampled(alone):
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(n)) for n in (10_000, 20_000, 3)]
    optimizer = torch.optim.SGD([{"params": parameters, "name": "all"}], lr=1e-3)
    for p in parameters:
        p.grad = torch.randn_like(p)
    updates = norms.Updates(optimizer, sample=6000)
    copied = [t.numel() for t in updates.before[0]]
    assert copied == [2000, 4000, 1]
    optimizer.step()
    found = norms.metrics_fields(optimizer.param_groups, updates.sums().tolist())["updates"]["all"]
    assert found["ratio"] == pytest.approx(1e-3, rel=0.05)
    square = sum(p.detach().square().sum().item() for p in parameters)
    assert found["parameter_norm"] == pytest.approx(math.sqrt(square), rel=1e-5)


def test_hooks_leave_gradients_alone(alone):
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Linear(7, 5)
    x = torch.randn(3, 7)
    want = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    fully_shard(model, mesh=alone.mesh)
    micro = MicroNorms(model, alone.device)
    micro.start()
    model(x).square().sum().backward()
    micro.add(torch.tensor(3.0), torch.tensor(1.0))
    square = sum(g.square().sum() for g in want)
    assert micro.take()[0].item() == pytest.approx(square.item() / 9, rel=1e-5)
    for p, g in zip(model.parameters(), want):
        assert torch.allclose(p.grad.full_tensor(), g)
