"""Chunked cross entropy, compared with the plain formula."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from trainer.model.loss import IGNORE, ChunkedCE


def case(dtype: torch.dtype):
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(1000, 64, generator=g).to(dtype).requires_grad_()
    weight = (torch.randn(3001, 64, generator=g) / 8).to(dtype).requires_grad_()
    target = torch.randint(0, 3001, (1000,), generator=g)
    target[::7] = IGNORE
    return hidden, weight, target


def reference(hidden, weight, target, scale, z, cap=0.0):
    h, w = hidden.detach().float().requires_grad_(), weight.detach().float().requires_grad_()
    logits = h @ w.t()
    if cap:
        logits = cap * torch.tanh(logits / cap)
    ok = target != IGNORE
    nll = F.cross_entropy(logits, target, reduction="none", ignore_index=IGNORE)
    z_sum = logits.logsumexp(-1)[ok].square().sum()
    objective = scale * (nll.sum() + z * z_sum)
    return objective, nll.detach(), z_sum.detach(), *torch.autograd.grad(objective, (h, w))


def off(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.float() - want).norm() / want.norm()).item()


@pytest.mark.parametrize(("dtype", "chunk", "z", "cap"), [
    (torch.float32, 64, 0.0, 0.0), (torch.float32, 300, 1e-2, 0.0), (torch.float32, 5000, 1e-2, 0.7),
    (torch.float32, 64, 0.0, 3.0), (torch.bfloat16, 300, 0.0, 0.0), (torch.bfloat16, 5000, 1e-2, 0.0),
    (torch.bfloat16, 64, 1e-2, 0.7), (torch.bfloat16, 300, 0.0, 3.0)])
def test_equals_the_plain_formula(dtype, chunk, z, cap):
    """Each dtype with each chunk and each formula."""
    loss_tol, grad_tol = (1e-6, 1e-6) if dtype == torch.float32 else (1e-3, 6e-3)
    hidden, weight, target = case(dtype)
    scale = torch.tensor(1 / 857.0)
    objective, nll, z_sum = ChunkedCE.apply(hidden, weight, target, scale, z, chunk, cap)
    d_hidden, d_weight = torch.autograd.grad(objective, (hidden, weight))
    want = reference(hidden, weight, target, scale, z, cap)
    assert objective.dtype == nll.dtype == torch.float32
    assert d_hidden.dtype == dtype
    assert objective.item() == pytest.approx(want[0].item(), rel=loss_tol)
    assert off(nll, want[1]) < loss_tol
    assert z_sum.item() == pytest.approx(want[2].item(), rel=loss_tol)
    assert off(d_hidden, want[3]) < grad_tol
    assert off(d_weight, want[4]) < grad_tol


def test_ignored_targets_count_nothing():
    hidden, weight, target = case(torch.float32)
    objective, nll, z_sum = ChunkedCE.apply(hidden, weight, torch.full_like(target, IGNORE), torch.ones(()), 1e-2, 128)
    d_hidden, d_weight = torch.autograd.grad(objective, (hidden, weight))
    assert objective.item() == 0
    assert z_sum.item() == 0
    assert not nll.any()
    assert not d_hidden.any()
    assert not d_weight.any()
    _, nll, _ = ChunkedCE.apply(hidden, weight, target, torch.ones(()), 0.0, 128)
    assert torch.equal(nll == 0, target == IGNORE)


def test_gradient_follows_what_is_done_with_the_objective():
    hidden, weight, target = case(torch.float32)
    one = torch.autograd.grad(ChunkedCE.apply(hidden, weight, target, torch.ones(()), 1e-4, 256)[0], hidden)[0]
    three = torch.autograd.grad(3 * ChunkedCE.apply(hidden, weight, target, torch.ones(()), 1e-4, 256)[0], hidden)[0]
    assert torch.allclose(three, 3 * one)


def test_without_gradients_nothing_is_computed_for_them():
    hidden, weight, target = case(torch.float32)
    with torch.no_grad():
        objective, _, _ = ChunkedCE.apply(hidden, weight, target, torch.ones(()), 1e-4, 256)
    assert not objective.requires_grad
    assert objective.item() == pytest.approx(reference(hidden, weight, target, 1.0, 1e-4)[0].item(), rel=1e-6)


def test_logits_that_differ_by_hundreds_do_not_overflow():
    hidden, weight, target = case(torch.float32)
    far = (300 * hidden).detach().requires_grad_()
    objective, nll, z_sum = ChunkedCE.apply(far, weight, target, torch.tensor(1e-3), 1e-4, 256)
    want = reference(far, weight, target, 1e-3, 1e-4)
    assert want[1].max() > 500
    assert off(nll, want[1]) < 1e-6
    assert z_sum.item() == pytest.approx(want[2].item(), rel=1e-5)
    assert off(torch.autograd.grad(objective, far)[0], want[3]) < 1e-4


def test_the_soft_cap_bounds_the_loss():
    hidden, weight, target = case(torch.float32)
    for cap in (5.0, 1.0):
        _, nll, _ = ChunkedCE.apply(20 * hidden, weight, target, torch.tensor(1e-3), 0.0, 256, cap)
        assert nll.max() <= math.log(3001) + 2 * cap
    assert ChunkedCE.apply(20 * hidden, weight, target, torch.tensor(1e-3), 0.0, 256)[1].max() > math.log(3001) + 10


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "cap"), [(torch.float32, 0.0), (torch.bfloat16, 3.0)])
def test_the_fused_body_computes_the_same(dtype, cap):
    hidden, weight, target = case(dtype)
    scale = torch.tensor(1 / 857.0)
    plain, fused = ((*made, *torch.autograd.grad(made[0], (hidden, weight)))
                    for made in (ChunkedCE.apply(hidden, weight, target, scale, 1e-3, 500, cap, compiled)
                                 for compiled in (False, True)))
    assert fused[3].dtype == dtype
    for a, b in zip(plain, fused):
        assert off(b, a.float()) < (1e-6 if dtype == torch.float32 else 3e-3)


@pytest.mark.gpu
def test_the_fused_body_on_a_gpu():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    hidden, weight, target = (x.detach().cuda() for x in case(torch.bfloat16))
    hidden.requires_grad_(), weight.requires_grad_()
    scale = torch.tensor(1 / 857.0, device="cuda")
    objective, nll, _ = ChunkedCE.apply(hidden, weight, target, scale, 1e-3, 384, 0.0, True)
    want = reference(hidden, weight, target, scale, 1e-3)
    assert off(nll, want[1]) < 1e-3
    for got, expected in zip(torch.autograd.grad(objective, (hidden, weight)), want[3:]):
        assert off(got, expected) < 6e-3
