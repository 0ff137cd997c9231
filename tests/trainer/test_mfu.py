"""The formula for FLOPs, compared with torch's own count for a real forward and backward. The peak of a device is found
only by its exact name."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from trainer.model.attention import document_mask
from trainer.model.config import ModelConfig
from trainer.model.transformer import Transformer
from trainer.observe import mfu

BASE = {"layers": 3, "width": 96, "heads": 6, "kv_heads": 2, "ffn": 160}
CONFIGS = {
    "grouped": {},
    "multi-head": {"kv_heads": 6},
    "multi-query": {"kv_heads": 1},
    "untied": {"tie": False},
    "wide heads, norms": {"head_dim": 32, "qk_norm": True},
    "nope": {"nope_every": 2},
    "relu2": {"activation": "relu2"},
    "partial rope": {"rotary": 0.5},
    "bias, soft cap": {"qkv_bias": True, "softcap": 30.0},
}


def in_place_product(_self, a, b, **_):
    """Return the FLOPs of `addmm_` with matrices [m, k] and [k, n]. The loss uses this operator, which torch's counter
    does not know."""
    return 2 * a[0] * a[1] * b[1]


def counted(config: ModelConfig, vocab: int, rows: int, length: int) -> int:
    """Return the FLOPs of forward and backward as torch counts them. Attention counts with the whole square of the
    length."""
    torch.manual_seed(0)
    model = Transformer(config, vocab)
    tokens = torch.randint(0, vocab, (rows, length))
    positions = torch.arange(length).repeat(rows, 1)
    more = {torch.ops.aten.addmm_: in_place_product}
    with FlopCounterMode(display=False, custom_mapping=more) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens, document_mask(positions, torch.float32), tokens)[0].backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("rows", "length"), [(2, 64), (1, 256)])
def test_formula_agrees_with_the_flops_torch_counts(name, rows, length):
    config = ModelConfig(**{**BASE, **CONFIGS[name]})
    config.check()
    formula = mfu.step_flops(config, 501, rows * length, rows * length ** 2)
    assert formula == pytest.approx(counted(config, 501, rows, length), rel=0.02)


def test_embedding_lookups_and_norms_are_no_matrix_products():
    tied, untied = (ModelConfig(**{**BASE, "tie": tie}) for tie in (True, False))
    assert tied.matmul_parameters(501) == untied.matmul_parameters(501)
    assert untied.parameters(501) - tied.parameters(501) == 501 * 96


@pytest.mark.parametrize(("name", "peak"), [
    ("NVIDIA H200", 989e12), ("NVIDIA H200 NVL", 835e12), ("NVIDIA H100 80GB HBM3", 989e12),
    ("NVIDIA H100 PCIe", 756e12), ("NVIDIA H100 NVL", 835e12), ("NVIDIA A100-SXM4-80GB", 312e12),
    ("NVIDIA A100 80GB PCIe", 312e12), ("NVIDIA B200", 2250e12), ("NVIDIA GB200", 2500e12),
    ("NVIDIA GH200 480GB", 989e12), ("NVIDIA L40S", 362e12), ("NVIDIA GeForce RTX 4090", 165e12),
    # never the number of something similar
    ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None), ("NVIDIA H200 Next", None),
    ("NVIDIA GeForce RTX 4090 Laptop GPU", None), ("Tesla V100-SXM2-16GB", None)])
def test_peaks_are_of_the_very_device(monkeypatch, name, peak):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: name)
    device = torch.device("cuda", 0)
    assert mfu.peak(device) == peak
    assert mfu.peak(device, fp8=True) is None
    assert name in mfu.why_unknown(device)
    assert "fp8" in mfu.why_unknown(device, fp8=True)
    assert mfu.peak(torch.device("cpu")) is None
