"""Defines the model, a decoder of the Llama family with grouped-query attention, RoPE, RMSNorm and SwiGLU. Options are
QK-norm, layers without position (NoPE, arXiv 2501.18795; every 4th layer in SmolLM3), partial RoPE, ReLU², biases of q,
k and v, soft-capped logits, tied or untied output, and muP's rules for widths.

Shapes: B rows, T tokens, d width, H heads, G key/value heads, D head width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Partial

from tokenizer.mixture.curriculum import Phase
from trainer.base.config import build
from trainer.model.attention import DocMask, KeyValues, attend
from trainer.model.config import ModelConfig, RopeScaling
from trainer.model.loss import ChunkedCE, soft_cap
from trainer.model.rope import Rope, rotate, rotation
from trainer.model.tensor import Embedding, Linear, enter, leave, local, replicated, share, together


def base_rope(config: ModelConfig) -> Rope:
    """Return the RoPE settings of `train.model`. They apply in every phase (stretch of the training) that has no RoPE
    settings of its own."""
    return Rope(config.rope_theta, config.rope_scaling)


def phase_rope(config: ModelConfig, phase: Phase) -> Rope:
    """Return the RoPE settings that apply in `phase`, a stretch of the training. They are those of `train.model`,
    unless the phase has its own θ or scaling."""
    scaling = config.rope_scaling
    if phase.rope_scaling is not None:
        scaling = build(RopeScaling, phase.rope_scaling, f"curriculum.json: phase {phase.name!r}: rope_scaling")
    return Rope(phase.rope_theta or config.rope_theta, scaling)


class RMSNorm(nn.Module):
    """Root-mean-square normalisation: x / rms(x) · weight, computed in float32 whatever the dtype of x (arXiv
    1910.07467)."""

    def __init__(self, width: int, eps: float, over_heads: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps, self.over_heads = eps, over_heads

    def forward(self, x: Tensor) -> Tensor:
        # over heads: the ranks of a tensor group have different heads, so the gradient is the sum over ranks
        weight = local(self.weight, Partial() if self.over_heads else None)
        return F.rms_norm(x.float(), (x.shape[-1],), weight.float(), self.eps).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, rope: bool) -> None:
        super().__init__()
        self.dim, self.rope, self.scale = config.dim, rope, config.scale
        self.q = Linear(config.width, config.heads * self.dim, bias=config.qkv_bias)
        self.k = Linear(config.width, config.kv_heads * self.dim, bias=config.qkv_bias)
        self.v = Linear(config.width, config.kv_heads * self.dim, bias=config.qkv_bias)
        self.o = Linear(config.heads * self.dim, config.width, bias=False)
        self.q_norm = RMSNorm(self.dim, config.norm_eps, True) if config.qk_norm else None
        self.k_norm = RMSNorm(self.dim, config.norm_eps, True) if config.qk_norm else None

    def forward(self, x: Tensor, mask: DocMask, cos: Tensor, sin: Tensor, seen: KeyValues | None = None) -> Tensor:
        rows, length, _ = x.shape
        x = enter(x, self.o.weight)
        # -1 heads: under tensor parallelism a rank holds only some of them
        q, k, v = (project(x).view(rows, length, -1, self.dim) for project in (self.q, self.k, self.v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if seen is not None:
            k, v = seen.append(k, v)
        return leave(self.o(attend(q, k, v, mask, self.scale).reshape(rows, length, -1)), self.o.weight)


class MLP(nn.Module):
    """The feed-forward part of a layer: SwiGLU (arXiv 2002.05202), or ReLU² without a gate."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = Linear(config.width, config.ffn, bias=False) if config.activation == "swiglu" else None
        self.up = Linear(config.width, config.ffn, bias=False)
        self.down = Linear(config.ffn, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = enter(x, self.down.weight)
        hidden = F.relu(self.up(x)).square() if self.gate is None else F.silu(self.gate(x)) * self.up(x)
        return leave(self.down(hidden), self.down.weight)


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        rope = config.nope_every == 0 or (layer + 1) % config.nope_every != 0
        self.attention_norm = RMSNorm(config.width, config.norm_eps)
        self.attention = Attention(config, rope)
        self.mlp_norm = RMSNorm(config.width, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, mask: DocMask, cos: Tensor, sin: Tensor, seen: KeyValues | None = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), mask, cos, sin, seen)
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    """The language model, a decoder. `forward` also computes the loss, because FSDP gathers the output matrix, a
    parameter of the root module, only during the root's forward.

    The training loop sets the attribute `rope` before every step, because a phase of the training may have its own RoPE
    settings. `compiled` is whether the blocks are compiled.
    """

    def __init__(self, config: ModelConfig, vocab: int) -> None:
        super().__init__()
        self.config, self.vocab, self.rope, self.compiled = config, vocab, base_rope(config), False
        self.embed = Embedding(vocab, config.width)
        self.blocks = nn.ModuleList(Block(config, i) for i in range(config.layers))
        self.norm = RMSNorm(config.width, config.norm_eps)
        self.head = None if config.tie else Linear(config.width, vocab, bias=False)

    def forward(self, tokens: Tensor, mask: DocMask, target: Tensor | None = None, scale: Tensor | None = None,
                z: float = 0.0, chunk: int = 2048) -> Any:
        """Compute logits or losses for `tokens` [B, T] int64. Without `target`, returns logits [B, T, V] in the compute
        dtype. With `target` [B, T] (IGNORE where a target does not count), returns (objective, negative log-likelihood
        of each target [B, T], Σ log²Z), as `ChunkedCE` defines them."""
        x = self.hidden(tokens, mask)
        if target is None:
            return self.logits(x)
        output = self.embed.weight if self.head is None else self.head.weight
        if scale is None:
            scale = torch.ones((), device=x.device)
        objective, nll, z_sum = ChunkedCE.apply(share(x.flatten(0, 1), output), replicated(output),
                                                share(target.flatten(), output), scale, z, chunk, self.config.softcap,
                                                self.compiled and x.is_cuda)
        nll, z_sum = (together(values, target.numel(), output) for values in (nll, z_sum))
        return objective, nll.view_as(target), z_sum

    def hidden(self, tokens: Tensor, mask: DocMask, seen: Sequence[KeyValues] = ()) -> Tensor:
        """Compute the vectors [B, T, d] from which `logits` are computed. With `seen`, which has an entry for each
        layer, `tokens` continue rows of which the model has already read the beginning."""
        cos, sin = rotation(mask.positions, self.config.rotated, self.rope)
        x = self.embed(tokens)
        for i, block in enumerate(self.blocks):
            x = block(x, mask, cos, sin, seen[i]) if seen else block(x, mask, cos, sin)
        x = self.norm(x)
        return x / self.config.width_ratio if self.config.mup else x

    def logits(self, x: Tensor, tokens: slice = slice(None)) -> Tensor:
        """Compute the logits [..., V] of vectors [..., d] that `hidden` has computed; with `tokens`, a slice of the
        vocabulary, only the logits of its tokens."""
        output = self.embed.weight if self.head is None else self.head.weight
        return soft_cap(x @ replicated(output)[tokens].t(), self.config.softcap)
