"""The model: one decoder of the Llama family. Grouped-query attention, RoPE, RMSNorm, SwiGLU, optional QK-norm, layers
without position (NoPE, arXiv 2501.18795; every 4th in SmolLM3), tied or untied output.

Shapes: B rows, T tokens, d width, H heads, G key/value heads, D head width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.attention import DocMask, attend
from trainer.loss import ChunkedCE


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the decoder. The vocabulary is not here: it comes with the shards.

    `kv_heads` 0 stands for as many as `heads`, `ffn` 0 for 8/3 of the width, rounded up to a multiple of 64 (Llama).
    `nope_every: k` leaves out RoPE in layers k, 2k, … (0: never). `init_std` is the standard deviation of every matrix;
    those that write into the residual stream have it divided by √(2 · layers) (GPT-2).
    """

    layers: int
    width: int
    heads: int
    kv_heads: int = 0
    ffn: int = 0
    head_dim: int | None = None
    tie: bool = True
    qk_norm: bool = False
    nope_every: int = 0
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    init_std: float = 0.02

    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "tiny": {"layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "ffn": 176},
        "demo": {"layers": 4, "width": 128, "heads": 4, "kv_heads": 2, "ffn": 384, "qk_norm": True},
        # SmolLM2-135M and -360M, Llama-3.2-1B, SmolLM3-3B, Llama-3-8B (their configs)
        "135m": {"layers": 30, "width": 576, "heads": 9, "kv_heads": 3, "ffn": 1536},
        "360m": {"layers": 32, "width": 960, "heads": 15, "kv_heads": 5, "ffn": 2560},
        "1b": {"layers": 16, "width": 2048, "heads": 32, "kv_heads": 8, "ffn": 8192, "rope_theta": 500_000.0},
        "3b": {"layers": 36, "width": 2048, "heads": 16, "kv_heads": 4, "ffn": 11008, "nope_every": 4,
               "rope_theta": 50_000.0, "norm_eps": 1e-6},
        "8b": {"layers": 32, "width": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "tie": False,
               "rope_theta": 500_000.0},
    }

    def __post_init__(self) -> None:
        if self.kv_heads == 0:
            object.__setattr__(self, "kv_heads", self.heads)
        if self.ffn == 0:
            object.__setattr__(self, "ffn", -(-8 * self.width // 3 // 64) * 64)

    def check(self) -> None:
        if min(self.layers, self.width, self.heads, self.kv_heads, self.ffn) < 1:
            raise ValueError("layers, width, heads, kv_heads and ffn must be at least 1")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        if self.head_dim is None and self.width % self.heads:
            raise ValueError(f"width ({self.width}) must be a multiple of heads ({self.heads}), or give head_dim")
        if self.dim % 2:
            raise ValueError(f"the head width is {self.dim}; RoPE turns pairs, so it must be even")

    @property
    def dim(self) -> int:
        """Width of one head."""
        return self.head_dim or self.width // self.heads

    def matmul_parameters(self, vocab: int) -> int:
        """Parameters that are multiplied with every token: all matrices and the output, not the embedding look-up."""
        attention = self.width * self.dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.width * self.ffn) + vocab * self.width

    def parameters(self, vocab: int) -> int:
        norms = self.width * (2 * self.layers + 1) + (2 * self.dim * self.layers if self.qk_norm else 0)
        return self.matmul_parameters(vocab) + norms + (0 if self.tie else vocab * self.width)


class RMSNorm(nn.Module):
    """x / rms(x) · weight, computed in float32 whatever the dtype of x (arXiv 1910.07467)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), self.eps).to(x.dtype)


def rotation(positions: Tensor, dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin [B, T, 1, D / 2] float32 of RoPE (arXiv 2104.09864) at `positions` [B, T]."""
    frequency = theta ** (-torch.arange(0, dim, 2, device=positions.device, dtype=torch.float32) / dim)
    angle = positions[..., None, None].float() * frequency
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (x[i], x[i + D/2]) of x [B, T, H, D], the layout of Hugging Face's Llama."""
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, rope: bool) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim, self.rope = config.heads, config.kv_heads, config.dim, rope
        self.q = nn.Linear(config.width, self.heads * self.dim, bias=False)
        self.k = nn.Linear(config.width, self.kv_heads * self.dim, bias=False)
        self.v = nn.Linear(config.width, self.kv_heads * self.dim, bias=False)
        self.o = nn.Linear(self.heads * self.dim, config.width, bias=False)
        self.q_norm = RMSNorm(self.dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(self.dim, config.norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, mask: DocMask, cos: Tensor, sin: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q = self.q(x).view(rows, length, self.heads, self.dim)
        k = self.k(x).view(rows, length, self.kv_heads, self.dim)
        v = self.v(x).view(rows, length, self.kv_heads, self.dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        return self.o(attend(q, k, v, mask).reshape(rows, length, -1))


class MLP(nn.Module):
    """SwiGLU (arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.ffn, bias=False)
        self.up = nn.Linear(config.width, config.ffn, bias=False)
        self.down = nn.Linear(config.ffn, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        rope = config.nope_every == 0 or (layer + 1) % config.nope_every != 0
        self.attention_norm = RMSNorm(config.width, config.norm_eps)
        self.attention = Attention(config, rope)
        self.mlp_norm = RMSNorm(config.width, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, mask: DocMask, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), mask, cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    """The decoder. `forward` is the only entry: FSDP gathers the root's parameters there; so the loss is inside."""

    def __init__(self, config: ModelConfig, vocab: int) -> None:
        super().__init__()
        self.config, self.vocab = config, vocab
        self.embed = nn.Embedding(vocab, config.width)
        self.blocks = nn.ModuleList(Block(config, i) for i in range(config.layers))
        self.norm = RMSNorm(config.width, config.norm_eps)
        self.head = None if config.tie else nn.Linear(config.width, vocab, bias=False)

    def forward(self, tokens: Tensor, mask: DocMask, target: Tensor | None = None, scale: Tensor | None = None,
                z: float = 0.0, chunk: int = 2048) -> Any:
        """tokens [B, T] int64. Without `target`: logits [B, T, V] in the compute dtype.
        With `target` [B, T] (IGNORE where it does not count): (objective, nll [B, T], Σ log²Z), see `ChunkedCE`."""
        cos, sin = rotation(mask.positions, self.config.dim, self.config.rope_theta)
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, mask, cos, sin)
        x = self.norm(x)
        weight = self.embed.weight if self.head is None else self.head.weight
        if target is None:
            return x @ weight.t()
        if scale is None:
            scale = torch.ones((), device=x.device)
        objective, nll, z_sum = ChunkedCE.apply(x.flatten(0, 1), weight, target.flatten(), scale, z, chunk)
        return objective, nll.view_as(target), z_sum
