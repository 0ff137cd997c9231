"""From texts to tokens of a shard: in batches, each document ended by EOS."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tokenizer.load import Tokenizer, TokenizerError
from tokenizer.shards.layout import token_dtype


def encode_documents(tokenizer: Tokenizer, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Documents back to back, each ended by EOS, in the shard's dtype (u16 or u32 by vocabulary size), and their
    lengths in tokens, EOS included, int64 (n,). A document that encodes to EOS inside raises TokenizerError: boundaries
    would be ambiguous to every reader that goes by EOS."""
    ids, lengths = tokenizer.encode_flat(texts)
    if (ids == tokenizer.eos).any():
        raise TokenizerError(f"{tokenizer.path}: text encodes to its end-of-text token '{tokenizer.eos_token}': "
                             f"name another one with tokenizer.eos")
    ends = np.cumsum(lengths + 1)
    out = np.empty(int(ends[-1]) if len(ends) else 0, token_dtype(tokenizer.vocab_size))
    inside = np.ones(len(out), bool)
    inside[ends - 1] = False
    out[inside] = ids
    out[ends - 1] = tokenizer.eos
    return out, lengths + 1
