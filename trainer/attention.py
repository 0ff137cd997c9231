"""Causal attention that stays inside documents, in two back ends with one meaning.

A window holds pieces of several documents. `positions` (restarting at 0 with every document) says where they begin; a
token attends to the tokens of its own document up to itself.

* CUDA, half precision: `torch.nn.attention.varlen.varlen_attn` over the flattened batch with cumulative lengths.
* everywhere else: `scaled_dot_product_attention` with a dense additive mask.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

try:  # torch >= 2.10 with CUDA
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    varlen_attn = None
_VARLEN_GQA = varlen_attn is not None and "enable_gqa" in inspect.signature(varlen_attn).parameters  # torch >= 2.13


@dataclass(frozen=True)
class DocMask:
    """Where documents begin in a micro-batch, made once and used by every layer.

    `positions` [B, T] int64; either `dense` [B, 1, T, T] additive (0 or -inf) or `starts` [D + 1] int32, the cumulative
    lengths of the documents of the flattened batch (padded with B·T, i.e. with empty documents); `longest` bounds a
    length.
    """

    positions: Tensor
    dense: Tensor | None
    starts: Tensor | None
    longest: int


def document_mask(positions: Tensor, dtype: torch.dtype) -> DocMask:
    """The mask for `positions` [B, T] int64 and activations of `dtype`, on the device of `positions`."""
    rows, length = positions.shape
    if positions.is_cuda and dtype in (torch.bfloat16, torch.float16) and varlen_attn is not None:
        return DocMask(positions, None, cumulative_lengths(positions), length)
    document = (positions == 0).cumsum(1)
    same = document[:, None, :, None] == document[:, None, None, :]
    causal = torch.ones(length, length, dtype=torch.bool, device=positions.device).tril()
    dense = torch.zeros(rows, 1, length, length, dtype=dtype, device=positions.device)
    return DocMask(positions, dense.masked_fill_(~(same & causal), float("-inf")), None, length)


def cumulative_lengths(positions: Tensor) -> Tensor:
    """[D + 1] int32: offsets of the documents in the flattened batch, padded to a power of two ≥ 64 with the end.

    Every row begins a document (positions[:, 0] == 0), so no document spans rows. The padding keeps the number of
    shapes a compiled model sees small.
    """
    flat = positions.reshape(-1)
    begins = (flat == 0).nonzero().squeeze(1)
    size = max(64, 1 << int(begins.numel()).bit_length())
    padded = torch.full((size,), flat.numel(), dtype=torch.int32, device=positions.device)
    padded[: begins.numel()] = begins.to(torch.int32)
    return padded


def attend(q: Tensor, k: Tensor, v: Tensor, mask: DocMask) -> Tensor:
    """Attention within documents. q [B, T, H, D], k and v [B, T, G, D] with G dividing H → [B, T, H, D]."""
    rows, length, heads, dim = q.shape
    groups = k.shape[2]
    if mask.starts is not None:
        q, k, v = (x.reshape(rows * length, -1, dim) for x in (q, k, v))
        if groups != heads and not _VARLEN_GQA:
            k, v = (x.repeat_interleave(heads // groups, 1) for x in (k, v))
        options = {"enable_gqa": True} if groups != heads and _VARLEN_GQA else {}
        out = varlen_attn(q, k, v, mask.starts, mask.starts, mask.longest, mask.longest, window_size=(-1, 0), **options)
        return out.view(rows, length, heads, dim)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if groups != heads:
        k, v = (x.repeat_interleave(heads // groups, 1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.dense).transpose(1, 2)
