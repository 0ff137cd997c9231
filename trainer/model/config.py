"""Defines the settings of the model, its initial values and its loss. Imports no torch.

Shapes: d width, H heads, G key/value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

from trainer.base.config import Count

#: kinds of parameters; they determine initial values, the optimiser's rule and muP's factors
Role = Literal["embedding", "output", "matrix", "vector"]


@dataclass(frozen=True)
class RopeScaling:
    """Settings that divide RoPE's frequencies by `factor`, so that the model can use a longer context. `original` is
    the context, in tokens, that the model was trained with before (`linear` does not need it).

    * `linear` divides all frequencies (position interpolation, arXiv 2306.15595).
    * `llama3` (Llama 3.1) divides frequencies with wavelengths above original / `low`, and leaves those with
      wavelengths below original / `high` unchanged. Between them is a smooth transition.
    * `yarn` (arXiv 2309.00071) divides the frequencies of pairs of dimensions that make fewer than `beta_slow` turns
      within `original` tokens, and leaves those that make more than `beta_fast` turns unchanged. Between them is a
      ramp. `yarn` also multiplies queries and keys by `attention_factor` (null: 0.1 · ln factor + 1).
    """

    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    original: Count | None = None
    low: float = 1.0
    high: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None

    def check(self) -> None:
        if self.factor < 1:
            raise ValueError(f"factor is how many times longer the context becomes, at least 1, not {self.factor}")
        if self.kind != "linear" and not self.original:
            raise ValueError(f"{self.kind} needs original: the tokens of context the model was trained on before")
        if not (0 < self.low < self.high and 0 < self.beta_slow < self.beta_fast):
            raise ValueError("low must be below high, beta_slow below beta_fast, and all above 0")
        if self.attention_factor is not None and (self.kind != "yarn" or self.attention_factor <= 0):
            raise ValueError("attention_factor belongs to yarn and must be above 0")


def depth(layers: int) -> dict[str, Any]:
    """Return the settings of a model with `layers` layers, scaled as in nanochat: width 64 · layers, heads of width
    128, multi-head attention with QK-norm, embedding and output not tied. The ffn width is the default, 8/3 of the
    width."""
    return {"layers": layers, "width": 64 * layers, "heads": layers // 2, "qk_norm": True, "tie": False}


@dataclass(frozen=True)
class ModelConfig:
    """The architecture of the model, a decoder: sizes and options. The vocabulary size is not among them, because it is
    that of the shards (the encoded data).

        kv_heads      number of heads of keys and values (0: as many as `heads`)
        ffn           hidden units (0: 8/3 of the width, rounded up to a multiple of 64, as in Llama; with `activation:
                      relu2` 4 times the width)
        head_dim      width of a head (null: width / heads)
        tie           whether the embedding is the output matrix, too
        qk_norm       whether the queries and keys of each head are normalised
        nope_every    k leaves out RoPE in layers k, 2k, … (0: never)
        rope_theta    determines RoPE's frequencies, as does `rope_scaling`. A phase of the training may override both
        norm_eps      is added inside all norms, so that none divides by 0
        init_std      standard deviation of the initial values of every matrix. For matrices that write into the
                      residual stream it is divided by √(2 · layers) (GPT-2)
        activation    `swiglu`, or `relu2` (arXiv 2109.08668), which has two matrices instead of three
        rotary        share of a head's dimensions that RoPE rotates
        qkv_bias      whether queries, keys and values have biases
        masking       `none` lets tokens attend to earlier documents in the same training sample
        softcap       c bounds logits to c · tanh(logit / c) (0: off)
        mup           width at which the hyperparameters were found (0: muP is off)

    muP makes hyperparameters that were found at another width valid for this one (Tensor Programs V, arXiv 2203.03466,
    table 8, for Adam). With m = width / mup, hidden matrices start with `init_std` / √m and learn at 1 / m of the rate,
    and the output is divided by m. Products of queries and keys are divided by D / 8 instead of √D (D is the width of a
    head; at D = 64 both are the same).
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

    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "tiny": {"layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "ffn": 176},
        "demo": {"layers": 4, "width": 128, "heads": 4, "kv_heads": 2, "ffn": 384, "qk_norm": True},
        # the published configurations of SmolLM2-135M, -360M and -1.7B, Llama-3.2-1B, SmolLM3-3B, Qwen3-0.6B and
        # Llama-3-8B. SmolLM3's θ is that of its pretraining; its long-context phases have 2 M and 5 M
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
        """Width of one attention head."""
        return self.head_dim or self.width // self.heads

    @property
    def rotated(self) -> int:
        """Number of dimensions of a head that RoPE rotates."""
        return int(self.dim * self.rotary)

    @property
    def scale(self) -> float:
        """The factor by which attention multiplies the products of queries and keys."""
        return 8 / self.dim if self.mup else self.dim ** -0.5

    @property
    def width_ratio(self) -> float:
        """Return the number m of muP: this model's width divided by the width at which the hyperparameters were found
        (1 without muP)."""
        return self.width / self.mup if self.mup else 1.0

    def rate(self, name: str) -> float:
        """Return the factor that muP applies to the learning rate of the parameter `name`. It is meant for optimisers
        that normalise their updates (Adam, Lion)."""
        return 1 / self.width_ratio if role(name) == "matrix" else 1.0

    def identity(self) -> dict[str, Any]:
        """Return all settings of the model as plain values, as a checkpoint stores them."""
        return asdict(self)

    def matmul_parameters(self, vocab: int) -> int:
        """Return how many parameters are multiplied with every token in a forward pass. All matrices and the output
        matrix count. The embedding does not, because it is only looked up."""
        attention = self.width * self.dim * (2 * self.heads + 2 * self.kv_heads)
        mlp = (2 if self.activation == "relu2" else 3) * self.width * self.ffn
        return self.layers * (attention + mlp) + vocab * self.width

    def parameters(self, vocab: int) -> int:
        norms = self.width * (2 * self.layers + 1) + (2 * self.dim * self.layers if self.qk_norm else 0)
        biases = self.layers * self.dim * (self.heads + 2 * self.kv_heads) if self.qkv_bias else 0
        return self.matmul_parameters(vocab) + norms + biases + (0 if self.tie else vocab * self.width)


def role(name: str) -> Role:
    """Return the role of the parameter `name` in the model: embedding, output, matrix or vector. Gains and biases are
    vectors."""
    if name.startswith("embed."):
        return "embedding"                        # also the output, when tied
    if name.startswith("head."):
        return "output"
    return "vector" if name.endswith("bias") or "norm" in name else "matrix"


@dataclass(frozen=True)
class RepeatsConfig:
    """Settings that leave repetitive text out of the loss. In a span in which a sequence of 1 to `ngram` tokens occurs
    at least `times` times in a row, tokens do not count as targets. The default numbers are OLMo 2's."""

    ngram: int = 13
    times: int = 32

    def check(self) -> None:
        if self.ngram < 1 or self.times < 2:
            raise ValueError("ngram must be at least 1, times at least 2")


#: largest number of logits in one chunk of the loss on CUDA: 1 GiB in bfloat16
LOGITS = 1 << 29


@dataclass(frozen=True)
class LossConfig:
    """Settings of the loss. `z` is the weight of the z-loss, log²Z per token, where Z is the denominator of the
    softmax. `repeats` says which targets inside repeated n-grams are left out of the loss (null: none).

    `chunk` is the number of tokens whose logits are computed at a time. 0 means 2048 on a CPU. On CUDA, 0 means the
    largest power of two that makes at most 2²⁹ logits, but at least 512.
    """

    z: float = 1e-5
    chunk: int = 0
    repeats: RepeatsConfig | None = None

    def check(self) -> None:
        if self.z < 0 or self.chunk < 0:
            raise ValueError("z and chunk must be ≥ 0")

    def tokens(self, vocab: int, cuda: bool) -> int:
        """Return how many tokens' logits are computed at a time (a chunk), for a vocabulary of `vocab` tokens. Chunks
        are larger on CUDA, because every chunk reads and writes the whole gradient of the output matrix: on an H100,
        8,192 tokens instead of 2,048 made a step of a model of 124 M parameters 4 % faster."""
        if self.chunk:
            return self.chunk
        return 1 << max(9, (LOGITS // vocab).bit_length() - 1) if cuda else 2048


@dataclass(frozen=True)
class InitConfig:
    """Settings of the weights with which a training begins. `from` is a folder in Hugging Face's layout (config.json,
    safetensors) with a pretrained model, whose training is to be continued (null: random weights). `train.model` must
    describe the same model; only `rope_theta`, `rope_scaling`, `init_std` and `masking` may differ."""

    from_: str | None = None
