"""Encodes texts into the tokens of a shard, in batches; each document ends in EOS.

If a document has `loss_spans` (byte ranges of its text, for instance the answers in a dialogue), only the tokens inside
those spans count in the loss. Its text is cut at the borders of the spans, and each piece is encoded on its own, so
that no token crosses a border. The tokens of an answer are then the ones that a model generates after the tokens of its
prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tokenizer.load import Tokenizer, TokenizerError
from tokenizer.shards.layout import token_dtype


def encode_documents(tokenizer: Tokenizer, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of all documents back to back, each document ended by EOS, and the documents' lengths.

    Tokens have the shard's dtype (u16 or u32 by vocabulary size). Lengths are in tokens, EOS included, int64 (n,).
    Raises TokenizerError when the tokens of a text include EOS, because a reader that splits at EOS would see two
    documents."""
    return _ended(tokenizer, *tokenizer.encode_flat(texts))


Spans = Sequence[Mapping[str, int]]


def encode_masked(tokenizer: Tokenizer, texts: Sequence[str],
                  spans: Sequence[Spans | None]) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Like `encode_documents`, but also return which tokens count in the loss: u8 0 or 1 per token, or None if all do.

    `spans` holds for each text the byte ranges (UTF-8) that count, sorted and disjoint, or None when the whole text
    counts. EOS counts if the last span reaches to the end of the text. Raises ValueError for spans outside the text.
    Raises TokenizerError when the tokenizer prepends something to every text, because it would also prepend it to every
    piece of a document.
    """
    if all(own is None for own in spans):
        return *encode_documents(tokenizer, texts), None
    if not _joins(tokenizer):
        raise TokenizerError(f"{tokenizer.path}: puts something in front of every text, or does not decode to what it "
                             f"encoded, so documents of which only spans count cannot be cut at their borders; take a "
                             f"byte-level tokenizer, or one without add_prefix_space and add_dummy_prefix")
    pieces: list[str] = []
    of: list[int] = []                                          # index of each piece's document
    flags: list[int] = []
    ends: list[int] = []                                        # whether each document's EOS counts
    for i, (text, own) in enumerate(zip(texts, spans)):
        cut, ending = _cut(text, own)
        pieces += [piece for piece, _ in cut]
        flags += [counts for _, counts in cut]
        of += [i] * len(cut)
        ends.append(ending)
    ids, lengths = tokenizer.encode_flat(pieces)
    whole = np.zeros(len(texts), np.int64)
    np.add.at(whole, of, lengths)
    tokens, whole = _ended(tokenizer, ids, whole)
    counts = np.ones(len(tokens), np.uint8)
    last = np.cumsum(whole) - 1
    inside = np.ones(len(tokens), bool)
    inside[last] = False
    counts[inside] = np.repeat(np.array(flags, np.uint8), lengths)
    counts[last] = ends
    return tokens, whole, counts


def _cut(text: str, spans: Spans | None) -> tuple[list[tuple[str, int]], int]:
    """Cut a text at the borders of its spans. Returns ([(piece, flag), …], flag of the document's EOS). A flag is 1 if
    the piece or EOS counts in the loss, else 0."""
    if spans is None:
        return [(text, 1)], 1
    data, at = text.encode(), 0
    pieces: list[tuple[str, int]] = []
    for span in spans:
        if not at <= span["start"] < span["end"] <= len(data):
            raise ValueError(f"loss_spans: {dict(span)} is no span of {len(data)} bytes after byte {at}")
        if span["start"] > at:
            pieces.append((data[at:span["start"]].decode(), 0))
        pieces.append((data[span["start"]:span["end"]].decode(), 1))
        at = span["end"]
    if at < len(data):
        pieces.append((data[at:].decode(), 0))
    return pieces, int(bool(spans) and at == len(data))


def _joins(tokenizer: Tokenizer) -> bool:
    """Whether the ids of separately encoded pieces, concatenated, decode to the original text."""
    pieces = ("User: a b", "\n\nAssistant: ", "c", " d.\n")
    return tokenizer.decode(tokenizer.encode_flat(pieces)[0]) == "".join(pieces)


def _ended(tokenizer: Tokenizer, ids: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Put EOS after each document's ids. `ids` has the ids of all documents back to back, `lengths` how many each
    document has. Returns (tokens in the shard's dtype, lengths of the documents with EOS). Raises TokenizerError when
    the ids already include EOS."""
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
