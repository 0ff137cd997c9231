"""The model: one decoder of the Llama family. Grouped-query attention, RoPE, RMSNorm, SwiGLU; as options QK-norm,
layers without position (NoPE, arXiv 2501.18795; every 4th in SmolLM3), partial RoPE, ReLU², biases of q, k and v,
soft-capped logits, tied or untied output, and the rules of muP for widths.

Shapes: B rows, T tokens, d width, H heads, G key/value heads, D head width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Partial

from tokenizer.mixture.curriculum import Phase
from trainer.base.config import build
from trainer.model.attention import DocMask, attend
from trainer.model.loss import ChunkedCE, soft_cap
from trainer.model.rope import Rope, RopeScaling, rotate, rotation
from trainer.model.tensor import Embedding, Linear, enter, leave, local, share, together, whole


def depth(layers: int) -> dict[str, Any]:
    """nanochat's dial: the number of layers decides. Width 64 · layers, heads of width 128, multi-head attention with
    QK-norm, ffn 8/3 of the width, embedding and output apart."""
    return {"layers": layers, "width": 64 * layers, "heads": layers // 2, "qk_norm": True, "tie": False}


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the decoder. The vocabulary is not here: it comes with the shards.

    `kv_heads` 0 stands for as many as `heads`; `ffn` 0 for 8/3 of the width, rounded up to a multiple of 64 (Llama), or
    4 times the width with `activation: relu2` (arXiv 2109.08668), which has two matrices instead of three.
    `nope_every: k` leaves out RoPE in layers k, 2k, … (0: never); `rotary` is the share of a head that RoPE turns,
    `rope_theta` and `rope_scaling` how (a phase may have its own). `masking: none` lets tokens attend to the documents
    before theirs in the window. `softcap: c` bounds logits to c · tanh(logit / c) (0: not). `init_std` is the standard
    deviation of every matrix; those that write into the residual stream have it divided by √(2 · layers) (GPT-2).

    `mup: w` makes hyperparameters found at width w hold for this width (Tensor Programs V, arXiv 2203.03466, table 8,
    for Adam): with m = width / w, matrices start with `init_std` / √m and learn at 1 / m of the rate, the output is
    divided by m, and attention by D / 8 instead of √D (the same at D = 64). 0: not.
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
    activation: Literal["swiglu", "relu2"] = "swiglu"
    rotary: float = 1.0
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    masking: Literal["document", "none"] = "document"
    softcap: float = 0.0
    mup: int = 0

    #: fields that checkpoints of the first trainer do not know
    LATER: ClassVar[frozenset[str]] = frozenset({"activation", "rotary", "rope_scaling", "qkv_bias", "masking",
                                                 "softcap", "mup"})
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "tiny": {"layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "ffn": 176},
        "demo": {"layers": 4, "width": 128, "heads": 4, "kv_heads": 2, "ffn": 384, "qk_norm": True},
        # SmolLM2-135M, -360M and -1.7B, Llama-3.2-1B, SmolLM3-3B (θ of its pretraining; its long-context phases have
        # 2 M and 5 M), Qwen3-0.6B, Llama-3-8B: their published configurations
        "135m": {"layers": 30, "width": 576, "heads": 9, "kv_heads": 3, "ffn": 1536, "rope_theta": 100_000.0},
        "360m": {"layers": 32, "width": 960, "heads": 15, "kv_heads": 5, "ffn": 2560, "rope_theta": 100_000.0},
        "1.7b": {"layers": 24, "width": 2048, "heads": 32, "kv_heads": 32, "ffn": 8192, "rope_theta": 130_000.0},
        "1b": {"layers": 16, "width": 2048, "heads": 32, "kv_heads": 8, "ffn": 8192, "rope_theta": 500_000.0,
               "rope_scaling": {"kind": "llama3", "factor": 32.0, "low": 1.0, "high": 4.0, "original": 8192}},
        "3b": {"layers": 36, "width": 2048, "heads": 16, "kv_heads": 4, "ffn": 11008, "nope_every": 4,
               "rope_theta": 50_000.0, "norm_eps": 1e-6},
        "qwen3-0.6b": {"layers": 28, "width": 1024, "heads": 16, "kv_heads": 8, "head_dim": 128, "ffn": 3072,
                       "qk_norm": True, "rope_theta": 1_000_000.0, "norm_eps": 1e-6},
        "8b": {"layers": 32, "width": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "tie": False,
               "rope_theta": 500_000.0},
        **{f"d{layers}": depth(layers) for layers in (4, 8, 12, 16, 20, 24, 32)},
    }

    def __post_init__(self) -> None:
        if self.kv_heads == 0:
            object.__setattr__(self, "kv_heads", self.heads)
        if self.ffn == 0:
            object.__setattr__(self, "ffn", 4 * self.width if self.activation == "relu2"
                               else -(-8 * self.width // 3 // 64) * 64)

    def check(self) -> None:
        if min(self.layers, self.width, self.heads, self.kv_heads, self.ffn) < 1:
            raise ValueError("layers, width, heads, kv_heads and ffn must be at least 1")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        if self.head_dim is None and self.width % self.heads:
            raise ValueError(f"width ({self.width}) must be a multiple of heads ({self.heads}), or give head_dim")
        if self.dim % 2:
            raise ValueError(f"the head width is {self.dim}; RoPE turns pairs, so it must be even")
        if not 0 < self.rotary <= 1 or self.rotated < 2 or self.rotated % 2:
            raise ValueError(f"rotary ({self.rotary}) must be a share of the head width ({self.dim}) that is an even "
                             f"number of dimensions; nope_every: 1 is a model without positions")
        if min(self.softcap, self.mup, self.nope_every) < 0:
            raise ValueError("softcap, mup and nope_every must be ≥ 0")

    @property
    def dim(self) -> int:
        """Width of one head."""
        return self.head_dim or self.width // self.heads

    @property
    def rotated(self) -> int:
        """How many dimensions of a head RoPE turns."""
        return int(self.dim * self.rotary)

    @property
    def rope(self) -> Rope:
        """The positions of the whole training, unless a phase says otherwise."""
        return Rope(self.rope_theta, self.rope_scaling)

    @property
    def scale(self) -> float:
        """What products of queries and keys are multiplied with."""
        return 8 / self.dim if self.mup else self.dim ** -0.5

    @property
    def width_ratio(self) -> float:
        """m of muP: how many times wider than the model whose hyperparameters are used (1 without muP)."""
        return self.width / self.mup if self.mup else 1.0

    def rate(self, name: str) -> float:
        """muP's factor on the learning rate of the parameter `name`, for optimisers that normalise (Adam, Lion)."""
        return 1 / self.width_ratio if role(name) == "matrix" else 1.0

    def identity(self) -> dict[str, Any]:
        """All fields as plain values, without later ones that are not used: what a checkpoint keeps."""
        plain = asdict(self)
        return {f.name: plain[f.name] for f in fields(self)
                if f.name not in self.LATER or getattr(self, f.name) != f.default}

    def matmul_parameters(self, vocab: int) -> int:
        """Parameters that are multiplied with every token: all matrices and the output, not the embedding look-up."""
        attention = self.width * self.dim * (2 * self.heads + 2 * self.kv_heads)
        mlp = (2 if self.activation == "relu2" else 3) * self.width * self.ffn
        return self.layers * (attention + mlp) + vocab * self.width

    def parameters(self, vocab: int) -> int:
        norms = self.width * (2 * self.layers + 1) + (2 * self.dim * self.layers if self.qk_norm else 0)
        biases = self.layers * self.dim * (self.heads + 2 * self.kv_heads) if self.qkv_bias else 0
        return self.matmul_parameters(vocab) + norms + biases + (0 if self.tie else vocab * self.width)


def role(name: str) -> Literal["embedding", "output", "matrix", "vector"]:
    """What the parameter `name` is to initial values, optimisers and muP; gains and biases are vectors."""
    if name.startswith("embed."):
        return "embedding"                        # also the output, when tied
    if name.startswith("head."):
        return "output"
    return "vector" if name.endswith("bias") or "norm" in name else "matrix"


def phase_rope(config: ModelConfig, phase: Phase) -> Rope:
    """The positions in `phase`, which may have a θ and a scaling of its own."""
    scaling = config.rope_scaling
    if phase.rope_scaling is not None:
        scaling = build(RopeScaling, phase.rope_scaling, f"curriculum.json: phase {phase.name!r}: rope_scaling")
    return Rope(phase.rope_theta or config.rope_theta, scaling)


class RMSNorm(nn.Module):
    """x / rms(x) · weight, computed in float32 whatever the dtype of x (arXiv 1910.07467)."""

    def __init__(self, width: int, eps: float, over_heads: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps, self.over_heads = eps, over_heads

    def forward(self, x: Tensor) -> Tensor:
        # over heads: the ranks of a tensor group see different ones, so their gradients are summands
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

    def forward(self, x: Tensor, mask: DocMask, cos: Tensor, sin: Tensor) -> Tensor:
        rows, length, _ = x.shape
        x = enter(x, self.o.weight)
        # the number of heads is left open: under tensor parallelism a rank holds some of them
        q, k, v = (project(x).view(rows, length, -1, self.dim) for project in (self.q, self.k, self.v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        return leave(self.o(attend(q, k, v, mask, self.scale).reshape(rows, length, -1)), self.o.weight)


class MLP(nn.Module):
    """SwiGLU (arXiv 2002.05202), or without a gate the squares of ReLU."""

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

    def forward(self, x: Tensor, mask: DocMask, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), mask, cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    """The decoder. `forward` is the only entry: FSDP gathers the root's parameters there; so the loss is inside.

    `rope` is set at the beginning of a phase that has positions of its own; `compiled` says that the blocks are.
    """

    def __init__(self, config: ModelConfig, vocab: int) -> None:
        super().__init__()
        self.config, self.vocab, self.rope, self.compiled = config, vocab, config.rope, False
        self.embed = Embedding(vocab, config.width)
        self.blocks = nn.ModuleList(Block(config, i) for i in range(config.layers))
        self.norm = RMSNorm(config.width, config.norm_eps)
        self.head = None if config.tie else Linear(config.width, vocab, bias=False)

    def forward(self, tokens: Tensor, mask: DocMask, target: Tensor | None = None, scale: Tensor | None = None,
                z: float = 0.0, chunk: int = 2048) -> Any:
        """tokens [B, T] int64. Without `target`: logits [B, T, V] in the compute dtype.
        With `target` [B, T] (IGNORE where it does not count): (objective, nll [B, T], Σ log²Z), see `ChunkedCE`."""
        cos, sin = rotation(mask.positions, self.config.rotated, self.rope)
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, mask, cos, sin)
        x = self.norm(x)
        if self.config.mup:
            x = x / self.config.width_ratio
        output = self.embed.weight if self.head is None else self.head.weight
        if target is None:
            return soft_cap(x @ whole(output).t(), self.config.softcap)
        if scale is None:
            scale = torch.ones((), device=x.device)
        objective, nll, z_sum = ChunkedCE.apply(share(x.flatten(0, 1), output), whole(output),
                                                share(target.flatten(), output), scale, z, chunk, self.config.softcap,
                                                self.compiled and x.is_cuda)
        nll, z_sum = (together(values, target.numel(), output) for values in (nll, z_sum))
        return objective, nll.view_as(target), z_sum
