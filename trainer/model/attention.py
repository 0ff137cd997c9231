"""Computes causal attention that stays inside documents, with three equivalent back ends.

A window (the consecutive tokens of one training sample) holds pieces of several documents. A token attends to itself
and to the earlier tokens of its own document. Its position counts from the beginning of its piece, so `positions`
restarts at 0 where a document begins. With `masking: none`, a token attends to all earlier tokens of the window, and
positions do not restart.

* `varlen` is for half precision on CUDA from Ampere on. It is `torch.nn.attention.varlen.varlen_attn` over the
  flattened batch with cumulative lengths (FlashAttention 2; version 3 on a Hopper where its package is installed).
* `flex` is for CUDA otherwise (float32, older devices or torch). It is compiled `flex_attention` with a block mask.
* `dense` is for other devices. It is `scaled_dot_product_attention` with a dense additive mask. It is not used on CUDA,
  because the flash kernels do not accept such a mask.

Attention is causal `scaled_dot_product_attention` where no mask is needed: with `masking: none`, and on CUDA also for
rows of a single document each.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

try:  # torch >= 2.10 with CUDA
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    varlen_attn = None  # type: ignore[assignment]
VARLEN_GQA = varlen_attn is not None and "enable_gqa" in inspect.signature(varlen_attn).parameters  # torch >= 2.13

BackEnd = Literal["varlen", "flex", "dense"]
Masking = Literal["document", "none"]


@dataclass(frozen=True)
class DocMask:
    """The attention mask of a micro-batch of B rows of T tokens, built once and used by every layer. The back end
    determines which of the fields `dense`, `block` and `starts` is set. If none is set, attention is causal over the
    whole row.

        positions  int64 [B, T], position of each token in its document
        dense      [B, 1, T, T], a mask that is added to the attention scores (0 or -inf)
        block      the mask as flex_attention takes it
        starts     [D + 1] int32, for variable-length attention over all rows put one after the other: the offsets at
                   which the D documents begin, and the end of the last one; padded with entries B·T (empty documents)
        longest    an upper bound of the documents' lengths
    """

    positions: Tensor
    dense: Tensor | None
    starts: Tensor | None
    longest: int
    block: BlockMask | None = None


class KeyValues:
    """The keys and values [B, T, G, D] that one layer has computed for the first `length` tokens of B rows. With them,
    text is generated token by token without reading the earlier tokens again. To forget the last tokens, set a smaller
    `length`."""

    #: number of tokens for which memory is kept ready, so that not every new token copies all earlier ones
    ROOM = 64

    def __init__(self) -> None:
        self.length = 0
        self.k: Tensor | None = None
        self.v: Tensor | None = None

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add the keys and values of new tokens. Returns the keys and the values of all tokens so far."""
        start, end = self.length, self.length + k.shape[1]
        if self.k is None or self.v is None or end > self.k.shape[1]:
            old = () if self.k is None or self.v is None else (self.k[:, :start], self.v[:, :start])
            self.k, self.v = (x.new_empty(len(x), end + self.ROOM, *x.shape[2:]) for x in (k, v))
            for new, earlier in zip((self.k, self.v), old):
                new[:, :start] = earlier
        self.k[:, start:end], self.v[:, start:end], self.length = k, v, end
        return self.k[:, :end], self.v[:, :end]

    def keep(self, rows: Tensor) -> None:
        """Drop all rows of the batch except those with the indices `rows`."""
        if self.k is not None and self.v is not None:
            self.k, self.v = self.k[rows], self.v[rows]


def document_mask(positions: Tensor, dtype: torch.dtype, masking: Masking = "document",
                  backend: BackEnd | None = None, starts: Tensor | None = None) -> DocMask:
    """Build the attention mask for rows of documents, on the device of `positions`. `positions` [B, T] int64 has each
    token's position in its document, so it is 0 where a document begins. `dtype` is that of the activations. `backend`
    overrides the choice of the fastest back end. `starts` is the result of `cumulative_lengths(positions)`, if already
    computed. With `masking` none, the result has no mask, and its positions count from the beginning of the row."""
    rows, length = positions.shape
    backend = backend or best(positions.device, dtype)
    if masking == "none":
        row_positions = torch.arange(length, device=positions.device).expand(rows, length)
        return DocMask(row_positions, None, None, length)
    if backend == "varlen":
        return DocMask(positions, None, cumulative_lengths(positions) if starts is None else starts, length)
    document = (positions == 0).cumsum(1)
    if backend == "flex":
        def visible(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (document[row, query] == document[row, key]) & (query >= key)

        block = create_block_mask(visible, rows, None, length, length, device=positions.device,
                                  _compile=positions.is_cuda)
        return DocMask(positions, None, None, length, block)
    same = document[:, None, :, None] == document[:, None, None, :]
    causal = torch.ones(length, length, dtype=torch.bool, device=positions.device).tril()
    dense = torch.zeros(rows, 1, length, length, dtype=dtype, device=positions.device)
    return DocMask(positions, dense.masked_fill_(~(same & causal), float("-inf")), None, length)


def best(device: torch.device, dtype: torch.dtype) -> BackEnd:
    """Return the name of the fastest attention back end for `dtype` on `device`."""
    if device.type != "cuda":
        return "dense"
    half = dtype in (torch.bfloat16, torch.float16)
    return "varlen" if half and varlen_attn is not None and flash(device.index or 0) else "flex"


def describe(device: torch.device, dtype: torch.dtype, masking: Masking) -> str:
    """Return the name and version of the kernel that computes attention on `device`, as text for people."""
    backend = best(device, dtype)
    if masking == "none" or backend == "dense":
        return f"scaled_dot_product_attention of torch {torch.__version__}"
    if backend == "flex":
        return f"flex_attention of torch {torch.__version__}"
    return f"FlashAttention {3 if flash3(device.index or 0) else 2} (varlen_attn of torch {torch.__version__})"


@functools.cache
def flash(index: int) -> bool:
    """Return whether CUDA device `index` supports FlashAttention 2 (Ampere or later). Also makes torch use
    FlashAttention 3 where that is possible: a training step is then 9 % faster than with version 2 (measured in
    nanochat)."""
    flash3(index)
    return torch.cuda.get_device_capability(index) >= (8, 0)


@functools.cache
def flash3(index: int) -> bool:
    """Make torch use FlashAttention 3 if CUDA device `index` is a Hopper and the package with its kernels is installed.
    Returns whether it is used."""
    if torch.cuda.get_device_capability(index)[0] == 9:
        # available from torch 2.11 on, and only where the package with the kernels is installed
        with contextlib.suppress(AttributeError, ImportError, RuntimeError, ValueError):
            torch.nn.attention.activate_flash_attention_impl("FA3")
            return True
    return False


def cumulative_lengths(positions: Tensor) -> Tensor:
    """Return the offsets at which documents begin when all rows are put one after the other, int32. `positions` [B, T]
    has each token's position in its document. Every row must begin a document (positions[:, 0] == 0).

    The result is padded to a length of 64, 256, 1024, … with the number of all tokens, B·T. The padding keeps the
    number of shapes small, because a compiled model is compiled again for every new shape.
    """
    flat = positions.reshape(-1)
    begins = (flat == 0).nonzero().squeeze(1)
    size = 64
    while size <= begins.numel():
        size *= 4
    padded = torch.full((size,), flat.numel(), dtype=torch.int32, device=positions.device)
    padded[: begins.numel()] = begins.to(torch.int32)
    return padded


@functools.cache
def compiled_flex() -> Any:
    return torch.compile(flex_attention, dynamic=False)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: DocMask, scale: float | None = None) -> Tensor:
    """Compute attention under `mask`: q [B, T, H, D], k and v [B, T, G, D] → [B, T, H, D], for H heads of queries and G
    heads of keys and values; G divides H. `scale` multiplies the products of queries and keys; the default is 1/√D."""
    rows, length, heads, dim = q.shape
    groups = k.shape[2]
    if mask.starts is not None:
        q, k, v = (x.reshape(rows * length, -1, dim) for x in (q, k, v))
        if groups != heads and not VARLEN_GQA:
            k, v = (x.repeat_interleave(heads // groups, 1) for x in (k, v))
        options: dict[str, Any] = {"enable_gqa": True} if groups != heads and VARLEN_GQA else {}
        if dim % 8:                                      # the kernels refuse such widths; padding zeros add nothing
            q, k, v = (F.pad(x, (0, -dim % 8)) for x in (q, k, v))
            scale = dim ** -0.5 if scale is None else scale
        if scale is not None and scale != q.shape[2] ** -0.5:
            options["scale"] = scale
        out = varlen_attn(q, k, v, mask.starts, mask.starts, mask.longest, mask.longest, window_size=(-1, 0), **options)
        out = out if isinstance(out, Tensor) else out[0]
        return out[..., :dim].view(rows, length, heads, dim)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if mask.block is not None:
        flex = compiled_flex() if q.is_cuda else flex_attention
        return flex(q, k, v, block_mask=mask.block, scale=scale, enable_gqa=groups != heads).transpose(1, 2)
    if mask.dense is None and q.is_cuda:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale,
                                              enable_gqa=groups != heads).transpose(1, 2)
    if groups != heads:
        k, v = (x.repeat_interleave(heads // groups, 1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.dense, is_causal=mask.dense is None,
                                          scale=scale).transpose(1, 2)
