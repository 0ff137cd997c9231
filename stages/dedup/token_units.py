"""Turns texts into tokens for the step `substring` with `unit: tokens`, and numbers of tokens into numbers of bytes.

A tokenizer can be used if its tokens spell the bytes of every text, one after another. Equal runs of tokens are then
equal runs of bytes, and a cut between two tokens is a cut between two bytes. Byte-level BPE (GPT-2, Llama 3, tiktoken)
fulfils this condition. A tokenizer that normalises the text or replaces its spaces does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


class NotBytes(ValueError):
    """Raised when the tokens that a tokenizer makes of a text do not spell the bytes of the text."""


class TokenUnits:
    """Turns texts into tokens, with the tokenizer in the file `path`. The constructor raises NotBytes if the tokens of
    this tokenizer do not spell the bytes of a text."""

    def __init__(self, path: str) -> None:
        from tokenizer.load import PROBES, load_tokenizer

        self._tokenizer = load_tokenizer(path)
        spelled = self._tokenizer.spelled()
        self._sizes = np.array([len(token) for token in spelled], np.int64)
        for text in PROBES:
            if b"".join(spelled[token] for token in self._tokenizer.encode(text).tolist()) != text.encode():
                raise NotBytes(f"the tokens of {path} do not spell the bytes of a text such as {text[:20]!r}: give a "
                               "byte-level BPE tokenizer without a normaliser, or set unit: bytes")

    def tokens(self, data: bytes) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Return (the tokens of a UTF-8 text as numbers, the position of the first byte of each token, followed by the
        position after the last byte). Raises NotBytes if the tokens together have more or fewer bytes than the text."""
        tokens = self._tokenizer.encode(data.decode("utf-8", "surrogatepass"))
        places = np.zeros(len(tokens) + 1, np.int64)
        np.cumsum(self._sizes[tokens], out=places[1:])
        if places[-1] != len(data):
            raise NotBytes(f"the {len(tokens):,} tokens of a text spell {places[-1]:,} bytes, but it has {len(data):,}")
        return tokens, places
