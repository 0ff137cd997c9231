"""The back ends of attention compute the same, and no token attends to another document."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from trainer.data.batches import Batch
from trainer.model import attention
from trainer.model.attention import BackEnd, attend, best, cumulative_lengths, document_mask, flash
from trainer.model.config import ModelConfig
from trainer.model.init import initialise
from trainer.model.transformer import Transformer

LENGTHS = ((11, 1, 20), (32,), (16, 16), (1, 1, 30))


def positions_of(rows: tuple[tuple[int, ...], ...] = LENGTHS) -> torch.Tensor:
    return torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in rows])


def tensors(dim: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(len(LENGTHS), 32, heads, dim, generator=g).to(device, dtype).requires_grad_()
            for heads in (6, 2, 2)]


def apart(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Compute attention for each document by itself, from the formula."""
    k, v = (x.repeat_interleave(3, 2) for x in (k, v))
    rows = []
    for row, lengths in enumerate(LENGTHS):
        parts, at = [], 0
        for n in lengths:
            x, y, z = (t[row, at:at + n].transpose(0, 1) for t in (q, k, v))
            score = (x @ y.transpose(1, 2) * scale).masked_fill(torch.ones(n, n, device=q.device).triu(1) > 0,
                                                                float("-inf"))
            parts.append((score.softmax(-1) @ z).transpose(0, 1))
            at += n
        rows.append(torch.cat(parts))
    return torch.stack(rows)


@pytest.mark.parametrize("scale", [None, 0.5])
@pytest.mark.parametrize("backend", ["dense", "flex"])
def test_back_ends_on_the_cpu_equal_each_document_by_itself(backend, scale):
    q, k, v = (x.detach() for x in tensors(16))          # flex_attention has no backward there
    out = attend(q, k, v, document_mask(positions_of(), torch.float32, backend=backend), scale)
    assert torch.allclose(out, apart(q, k, v, scale or 0.25), atol=1e-6)


def test_without_masking_the_window_is_one_document():
    q, k, v = (x.detach() for x in tensors(16))
    mask = document_mask(positions_of(), torch.float32, "none")
    assert mask.positions.tolist() == [list(range(32))] * 4
    whole = document_mask(torch.arange(32).repeat(4, 1), torch.float32)
    assert torch.allclose(attend(q, k, v, mask, 0.3), attend(q, k, v, whole, 0.3), atol=1e-6)
    assert not torch.allclose(attend(q, k, v, mask), attend(q, k, v, document_mask(positions_of(), torch.float32)))


CONFIG = ModelConfig(layers=4, width=48, heads=6, kv_heads=2, ffn=80, qk_norm=True)


@pytest.mark.parametrize("config", [CONFIG, replace(CONFIG, nope_every=2), replace(CONFIG, nope_every=1, rotary=0.5),
                                    replace(CONFIG, rotary=0.5, qkv_bias=True, activation="relu2", softcap=5.0)])
def test_a_token_of_document_a_changes_no_logit_of_document_b(config):
    model, g = Transformer(config, 101), torch.Generator().manual_seed(1)
    initialise(model, config, 0)
    tokens = torch.randint(0, 101, (1, 40), generator=g)
    positions = positions_of(((13, 20, 7),))
    changed = tokens.clone()
    changed[0, [5, 20]] += 1
    changed %= 101

    def differs(config: ModelConfig) -> list[bool]:
        mask = document_mask(positions, torch.float32, config.masking)
        return (model(tokens, mask) != model(changed, mask)).any(-1)[0].tolist()

    assert differs(config) == [False] * 5 + [True] * 8 + [False] * 7 + [True] * 13 + [False] * 7
    assert differs(replace(config, masking="none")) == [False] * 5 + [True] * 35        # the control


def test_the_back_end_of_a_device(monkeypatch):
    assert best(torch.device("cpu"), torch.bfloat16) == "dense"
    asked = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: ((7, 5), (8, 9), (9, 0))[index])
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", asked.append, raising=False)
    flash.cache_clear()
    found = {(i, dtype): best(torch.device("cuda", i), dtype) for i in range(3)
             for dtype in (torch.bfloat16, torch.float32)}
    flash.cache_clear()
    there = "flex" if attention.varlen_attn is None else "varlen"
    assert [found[i, torch.bfloat16] for i in range(3)] == ["flex", there, there]
    assert {found[i, torch.float32] for i in range(3)} == {"flex"}
    assert asked == ["FA3"]                              # of the Hopper alone, and once


@pytest.mark.parametrize("dim", [16, 20])
def test_varlen_is_called_with_what_it_needs(monkeypatch, dim):
    """The call on CUDA, computed here document by document."""
    def stand_in(q, k, v, starts_q, starts_k, most_q, most_k, *, window_size, scale=None, enable_gqa=False):
        assert window_size == (-1, 0)
        assert (most_q, most_k) == (32, 32)
        assert q.shape[2] % 8 == k.shape[2] % 8 == v.shape[2] % 8 == 0
        assert enable_gqa == (q.shape[1] != k.shape[1])
        assert starts_q.dtype == torch.int32
        assert torch.equal(starts_q, starts_k)
        out = torch.zeros_like(q)
        for a, b in pairwise(starts_q.tolist()):
            if b > a:
                x, y, z = (t[None, a:b] for t in (q, k, v))
                mask = document_mask(torch.arange(b - a)[None], torch.float32)
                out[a:b] = attend(x, y, z, mask, scale)[0]
        return out

    q, k, v = (x.detach() for x in tensors(dim))
    mask = document_mask(positions_of(), torch.float32, backend="varlen")
    monkeypatch.setattr(attention, "varlen_attn", stand_in)
    for gqa in (True, False):
        monkeypatch.setattr(attention, "VARLEN_GQA", gqa)
        for scale in (None, 0.5):
            assert torch.allclose(attend(q, k, v, mask, scale), apart(q, k, v, scale or dim ** -0.5), atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [None, 0.5])
@pytest.mark.parametrize(("backend", "dtype"), [("varlen", torch.bfloat16), ("flex", torch.bfloat16),
                                                ("flex", torch.float32), ("dense", torch.float32)])
def test_back_ends_on_a_gpu_equal_each_document_by_itself(backend: BackEnd, dtype, scale):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    q, k, v = tensors(64, dtype, "cuda")
    mask = document_mask(positions_of().cuda(), dtype, backend=backend)
    out = attend(q, k, v, mask, scale)
    grads = torch.autograd.grad(out.float().square().sum(), (q, k, v))
    full = [x.detach().float().requires_grad_() for x in (q, k, v)]
    want = apart(*full, scale or 0.125)
    wanted = torch.autograd.grad(want.square().sum(), full)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-4
    for got, expected in zip((out, *grads), (want, *wanted)):
        assert (got.float() - expected).norm() / expected.norm() < tolerance


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_causal_without_documents_on_a_gpu(dtype):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    q, k, v = tensors(64, dtype, "cuda")
    whole = document_mask(torch.arange(32, device="cuda").repeat(4, 1), dtype)
    plain = document_mask(positions_of().cuda(), dtype, "none")
    assert torch.allclose(attend(q, k, v, plain).float(), attend(q, k, v, whole).float(), atol=2e-2)


@pytest.mark.gpu
def test_windows_of_one_document_need_no_mask():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    for rows, whole in ((torch.arange(32).repeat(4, 1), True), (positions_of(), False)):
        zeros = torch.zeros_like(rows)
        batch = Batch(zeros, zeros, rows, torch.zeros(len(rows), dtype=torch.int64), 0)
        [part] = batch.micro(4, torch.device("cuda"))
        mask = part.mask(torch.bfloat16, "document")
        assert (mask.starts is None) == whole and mask.dense is None
        assert torch.equal(mask.positions.cpu(), rows)
        q, k, v = tensors(64, torch.bfloat16, "cuda")
        masked = document_mask(rows.cuda(), torch.bfloat16, backend="varlen")
        assert torch.allclose(attend(q, k, v, mask).float(), attend(q, k, v, masked).float(), atol=3e-2)


def test_rows_of_one_length_are_the_same_in_any_arrangement():
    """Flattened batches must not let documents of two rows meet."""
    q, k, v = (x.detach() for x in tensors(16))
    mask = document_mask(positions_of(), torch.float32)
    both = attend(q, k, v, mask)
    for row in range(len(LENGTHS)):
        at = slice(row, row + 1)
        alone = attend(q[at], k[at], v[at], document_mask(positions_of()[at], torch.float32))
        assert torch.allclose(both[at], alone, atol=1e-6)


def test_a_micro_batch_brings_its_mask():
    """On CUDA with the lengths of its documents, counted by the host; of a device that is not there, only the calls."""
    rows = positions_of()
    zeros = torch.zeros_like(rows)
    batch = Batch(zeros, zeros, rows, torch.zeros(len(rows), dtype=torch.int64), 0)
    parts = list(batch.micro(3, torch.device("cpu")))
    assert [p.starts for p in parts] == [None, None]
    mask = parts[0].mask(torch.float32, "document")
    assert torch.equal(mask.dense, document_mask(rows[:3], torch.float32).dense)
    counted = cumulative_lengths(rows)
    assert document_mask(rows, torch.bfloat16, backend="varlen", starts=counted).starts is counted
    assert torch.equal(document_mask(rows, torch.bfloat16, backend="varlen").starts, counted)
