"""Encodes texts into the tokens of a shard, in batches. Each document ends in EOS.

If a document has `loss_spans` (byte ranges of its text, for instance the answers in a dialogue), only the tokens inside
those spans count in the loss. The text is cut at the borders of the spans, and each piece is encoded on its own, so
that no token crosses a border. The question before an answer then has the same tokens as when a model gets the question
alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tokenizer.errors import TokenizerError
from tokenizer.load import Tokenizer
from tokenizer.shards.layout import token_dtype


def encode_documents(tokenizer: Tokenizer, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of all documents back to back, each document ended by EOS, and the documents' lengths.

    Tokens have the shard's dtype (u8, u16 or u32 by vocabulary size). Lengths are in tokens, EOS included, int64 (n,).
    Raises TokenizerError when the tokens of a text include EOS, because a reader that splits at EOS would see two
    documents."""
    return _with_eos(tokenizer, *tokenizer.encode_flat(texts))


Spans = Sequence[Mapping[str, int]]


def encode_masked(tokenizer: Tokenizer, texts: Sequence[str],
                  spans: Sequence[Spans | None]) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Encode documents of which only some byte ranges count in the loss.

    `spans` has an entry for each text: the byte ranges (UTF-8) that count, sorted and disjoint, or None if the whole
    text counts. EOS counts if the whole text counts, or if the last range ends where the text ends. With an empty list,
    nothing counts.

    Returns (tokens, lengths, flags). `tokens` are those of all documents back to back, each document ended by EOS.
    `lengths` are the documents' lengths in tokens. `flags` has a u8 per token: 1 if the token counts in the loss, else
    0. It is None if all entries of `spans` are None.

    Raises ValueError if a range is empty, overlaps another, is outside the text, cuts a character, or if the ranges are
    not sorted. Raises TokenizerError if the tokens of a text include EOS. Also raises it if the tokenizer cannot encode
    a text piece by piece, for instance because it puts a space in front of every piece."""
    if all(text_spans is None for text_spans in spans):
        return *encode_documents(tokenizer, texts), None
    if not _can_be_joined(tokenizer):
        raise TokenizerError(f"{tokenizer.path}: puts something in front of every text, or does not decode to what it "
                             f"encoded, so documents of which only spans count cannot be cut at their borders; take a "
                             f"byte-level tokenizer, or one without add_prefix_space and add_dummy_prefix")
    pieces: list[str] = []
    document_of_piece: list[int] = []
    flags: list[int] = []
    eos_flags: list[int] = []                                   # whether each document's EOS counts
    for number, (text, text_spans) in enumerate(zip(texts, spans)):
        text_pieces, eos_flag = _pieces_of(text, text_spans)
        pieces += [piece for piece, _ in text_pieces]
        flags += [flag for _, flag in text_pieces]
        document_of_piece += [number] * len(text_pieces)
        eos_flags.append(eos_flag)
    ids, lengths = tokenizer.encode_flat(pieces)
    document_lengths = np.zeros(len(texts), np.int64)
    np.add.at(document_lengths, document_of_piece, lengths)
    tokens, document_lengths = _with_eos(tokenizer, ids, document_lengths)
    counts = np.ones(len(tokens), np.uint8)
    eos_positions = np.cumsum(document_lengths) - 1
    inside = np.ones(len(tokens), bool)
    inside[eos_positions] = False
    counts[inside] = np.repeat(np.array(flags, np.uint8), lengths)
    counts[eos_positions] = eos_flags
    return tokens, document_lengths, counts


def _pieces_of(text: str, spans: Spans | None) -> tuple[list[tuple[str, int]], int]:
    """Cut a text at the borders of `spans`, the byte ranges that count in the loss. None means that the whole text
    counts. Returns (pieces of the text as (text, flag), flag of the EOS that ends the document). A flag is 1 if the
    piece or EOS counts in the loss, else 0."""
    if spans is None:
        return [(text, 1)], 1
    data, position = text.encode(), 0
    pieces: list[tuple[str, int]] = []
    for span in spans:
        if not position <= span["start"] < span["end"] <= len(data):
            raise ValueError(f"loss_spans: {dict(span)} is no span of {len(data)} bytes after byte {position}")
        if span["start"] > position:
            pieces.append((data[position:span["start"]].decode(), 0))
        pieces.append((data[span["start"]:span["end"]].decode(), 1))
        position = span["end"]
    if position < len(data):
        pieces.append((data[position:].decode(), 0))
    return pieces, int(bool(spans) and position == len(data))


def _can_be_joined(tokenizer: Tokenizer) -> bool:
    """Return whether texts may be encoded piece by piece with this tokenizer: whether the ids of several pieces, put
    together, decode to the whole text. Only one example is tried."""
    pieces = ("User: a b", "\n\nAssistant: ", "c", " d.\n")
    return tokenizer.decode(tokenizer.encode_flat(pieces)[0]) == "".join(pieces)


def _with_eos(tokenizer: Tokenizer, ids: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Put EOS after each document's ids. `ids` has the ids of all documents back to back, `lengths` how many each
    document has. Returns (tokens in the shard's dtype, lengths of the documents with EOS). Raises TokenizerError when
    the ids already include EOS."""
    if (ids == tokenizer.eos).any():
        raise TokenizerError(f"{tokenizer.path}: text encodes to its end-of-text token '{tokenizer.eos_token}': "
                             f"name another one with tokenizer.eos")
    ends = np.cumsum(lengths + 1)
    tokens = np.empty(int(ends[-1]) if len(ends) else 0, token_dtype(tokenizer.vocab_size))
    inside = np.ones(len(tokens), bool)
    inside[ends - 1] = False
    tokens[inside] = ids
    tokens[ends - 1] = tokenizer.eos
    return tokens, lengths + 1
