"""Computes model FLOPs utilisation (MFU): the model's FLOPs, by a published formula, divided by the FLOPs that the
device could do at its peak. For a device whose peak is not known, no MFU is computed.

Step MFU covers only the time of steps, without evaluation, checkpoints and compilation. Wall MFU covers all the time
since the first start. Only FLOPs of the model count, not those of recomputation by activation checkpointing.
"""

from __future__ import annotations

import torch

from trainer.model.config import ModelConfig

#: The formula is that of Chowdhery et al. (PaLM, arXiv 2204.02311, appendix B): forward and backward of all matrices
#: and of attention. For attention, PaLM counts the square of a sample's length; this formula counts the squares of the
#: lengths of the documents in it, because attention stays within documents
FORMULA = "6·N_matmul + 12·layers·heads·head_dim·(Σ len² / Σ len)"

#: torch's exact name of a device → its dense bfloat16 FLOP/s with float32 sums, without sparsity (vendors' data
#: sheets). Names are compared as a whole, so that an unlisted variant (for instance a slice of a GPU) counts as unknown
#: and not as the larger device with a similar name
PEAKS = {
    "NVIDIA A100-SXM4-40GB": 312e12, "NVIDIA A100-SXM4-80GB": 312e12, "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12, "NVIDIA A800-SXM4-80GB": 312e12, "NVIDIA A800 80GB PCIe": 312e12,
    "NVIDIA A10": 125e12, "NVIDIA A30": 165e12, "NVIDIA A40": 149.7e12,
    "NVIDIA L4": 121e12, "NVIDIA L40": 181e12, "NVIDIA L40S": 362e12,
    "NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H100 PCIe": 756e12, "NVIDIA H100 NVL": 835e12, "NVIDIA H800": 989e12,
    "NVIDIA H20": 148e12,
    "NVIDIA H200": 989e12, "NVIDIA H200 NVL": 835e12,
    "NVIDIA GH200 120GB": 989e12, "NVIDIA GH200 480GB": 989e12, "NVIDIA GH200 144G HBM3e": 989e12,
    "NVIDIA B200": 2250e12, "NVIDIA GB200": 2500e12,
    "NVIDIA GeForce RTX 3090": 71e12, "NVIDIA GeForce RTX 4090": 165e12, "NVIDIA GeForce RTX 5090": 209e12,
    "NVIDIA RTX 6000 Ada Generation": 364e12,
    "AMD Instinct MI300X": 1307e12, "AMD Instinct MI325X": 1307e12,
}


def step_flops(config: ModelConfig, vocab: int, tokens: int, attended: int) -> int:
    """Return the FLOPs of forward and backward over `tokens` tokens. `attended` is the sum of length² over the
    documents in which these tokens are, because attention stays inside documents."""
    return 6 * config.matmul_parameters(vocab) * tokens + 12 * config.layers * config.heads * config.dim * attended


def peak(device: torch.device, fp8: bool = False) -> float | None:
    """Return the peak FLOP/s of the device with dense matrices in bf16, or None when the device's name is not in PEAKS.
    With `fp8` the result is also None: some products are still bf16, so there is no single peak. Without a peak, FLOP/s
    are reported but no MFU."""
    if device.type != "cuda" or fp8:
        return None
    return PEAKS.get(torch.cuda.get_device_name(device))


def why_unknown(device: torch.device, fp8: bool = False) -> str:
    """Return a line that says why `peak` is None for this device, to be printed."""
    if fp8:
        return "mfu unknown: fp8 has no single peak; FLOP/s are in metrics.jsonl"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "this CPU"
    return f"mfu unknown: no peak is known for {name}"
