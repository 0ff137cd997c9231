"""Computes rotary positions (RoPE, arXiv 2104.09864), and their scaling for contexts longer than the trained ones.

RoPE rotates pairs of a head's dimensions. With R rotated dimensions, pair i turns by the angle position · θ^(-2i/R), in
which θ^(-2i/R) is the pair's frequency. There are two ways to lengthen the context: a higher `theta` (ABF, arXiv
2309.16039), and scaling methods, which change the frequencies themselves.

A phase (a stretch of the training) may have its own θ and scaling. Both are plain values on the model, not parameters,
and every forward computes the R/2 frequencies again. So a change of them neither rebuilds nor recompiles the model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.model.config import RopeScaling


@dataclass(frozen=True)
class Rope:
    """The settings of rotary positions (RoPE) that determine the angles: the base θ, and a scaling for longer contexts
    (None: unscaled)."""

    theta: float
    scaling: RopeScaling | None = None

    @property
    def magnitude(self) -> float:
        """The factor by which the cosines and sines of the rotation are multiplied, and thereby the rotated queries and
        keys. It is YaRN's attention factor, and 1 without YaRN."""
        if self.scaling is None or self.scaling.kind != "yarn":
            return 1.0
        return self.scaling.attention_factor or 0.1 * math.log(self.scaling.factor) + 1

    def frequencies(self, dim: int, device: torch.device) -> Tensor:
        """Return the frequency with which each pair of dimensions rotates, float32 [dim / 2], in radians per token. The
        values are computed on `device`, so nothing is copied to it."""
        base = self.theta ** (-torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim)
        scaling = self.scaling
        if scaling is None:
            return base
        if scaling.kind == "linear":
            return base / scaling.factor
        if scaling.kind == "llama3":
            turns = (scaling.original or 0) / (2 * math.pi) * base                     # within the original context
            unscaled = ((turns - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)
        else:
            first, last = (dim * math.log((scaling.original or 0) / (beta * 2 * math.pi)) / (2 * math.log(self.theta))
                           for beta in (scaling.beta_fast, scaling.beta_slow))
            first, last = max(math.floor(first), 0), min(math.ceil(last), dim - 1)
            ramp = torch.arange(dim // 2, device=device, dtype=torch.float32) - first
            unscaled = 1 - (ramp / max(last - first, 0.001)).clamp(0, 1)
        return base / scaling.factor * (1 - unscaled) + base * unscaled


def rotation(positions: Tensor, dim: int, rope: Rope) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of RoPE's rotation angles at `positions` [B, T], each float32 [B, T, 1, dim / 2]."""
    angle = positions[..., None, None].float() * rope.frequencies(dim, positions.device)
    return angle.cos() * rope.magnitude, angle.sin() * rope.magnitude


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first R dimensions of each head in x [B, T, H, D] by RoPE, in pairs (x[i], x[i + R/2]) as in Hugging
    Face's Llama. R is twice the last dimension of `cos`. The other D - R dimensions stay unchanged (partial RoPE,
    GPT-NeoX)."""
    half = cos.shape[-1]
    a, b, unrotated = x.float().split((half, half, x.shape[-1] - 2 * half), -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, unrotated), -1).to(x.dtype)
