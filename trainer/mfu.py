"""Model FLOPs utilisation, by a formula that has a name and a peak that is known, or not at all."""

from __future__ import annotations

import torch

from trainer.model import ModelConfig

#: Chowdhery et al. (PaLM, arXiv 2204.02311, appendix B): forward and backward of all matrices, and of attention over
#: the full square; here over the squares of the documents, since attention does not leave them
FORMULA = "6·N_matmul + 12·layers·heads·head_dim·(Σ len² / Σ len)"

#: dense bfloat16 FLOP/s by the name torch gives the device (vendors' data sheets, without sparsity)
PEAKS = {
    "NVIDIA A100": 312e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200 NVL": 835e12,
    "NVIDIA H200": 989e12,
    "NVIDIA GH200": 989e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA GeForce RTX 4090": 165e12,
}


def step_flops(config: ModelConfig, vocab: int, tokens: int, attended: int) -> int:
    """FLOPs of forward and backward over `tokens` tokens in documents with Σ length² = `attended`."""
    return 6 * config.matmul_parameters(vocab) * tokens + 12 * config.layers * config.heads * config.dim * attended


def peak(device: torch.device) -> float | None:
    """Dense bf16 FLOP/s of the device; None when its name is not in the table (never another device's number)."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    known = [k for k in PEAKS if name == k or name.startswith((k + " ", k + "-"))]
    return PEAKS[max(known, key=len)] if known else None
