"""Reads a `.tiktoken` file, the form in which OpenAI, Qwen and others publish the vocabulary of a byte-level BPE. The
file has a line for each token: its bytes in base64, a space, and its rank (id). Tokens with lower ranks are merged
first.

The file names neither special tokens nor the pattern that splits text before merging. The pattern is given by name or
as a regular expression. The file becomes a Hugging Face `tokenizer.json` in memory, with the same ids.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
from typing import Any

from tokenizer.byte_level import EOS, alphabet
from tokenizer.errors import TokenizerError

_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+\z|\s+(?!\S)|\s"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
#: patterns of tiktoken 0.14 (tiktoken_ext/openai_public.py) without its possessive quantifiers, which only make its
#: regex engine faster, and with `\z` for the end of the text, where the regex engine of `tokenizers` takes `$` for the
#: end of a line; and of Qwen, which splits numbers into single digits
PATTERNS = {
    "r50k": _GPT2,
    "p50k": _GPT2,
    "cl100k": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+\z|\s*[\r\n]"
              r"|\s+(?!\S)|\s",
    "o200k": rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SUFFIX}"
             r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
            r"|\s+(?!\S)|\s+"}
#: id of `<|endoftext|>` in OpenAI's vocabularies where it is not the number after the last rank
_EOS_IDS = {"p50k": 50256, "cl100k": 100257, "o200k": 199999}


def is_tiktoken(data: bytes, name: str) -> bool:
    """Return whether a file named `name` with contents `data` is a .tiktoken file."""
    return name.endswith(".tiktoken") or re.match(rb"[A-Za-z0-9+/]+=* \d+\r?\n", data) is not None


def pattern_of(path: str, pattern: str | None) -> str:
    """Return the pattern with which to split text for the .tiktoken file `path`: `pattern` if it is given, else the
    first name in PATTERNS that occurs in the file's name (as in cl100k.tiktoken). Raises TokenizerError when there is
    neither."""
    name = os.path.basename(path)
    if pattern := pattern or next((known for known in PATTERNS if known in name), None):
        return pattern
    raise TokenizerError(f"{path}: a .tiktoken file does not say how to split text: set tokenizer.pattern to one of "
                         f"{', '.join(PATTERNS)} or a regular expression, or give the file such a name "
                         f"(cl100k.tiktoken)")


def convert(data: bytes, path: object, pattern: str, eos: str | None) -> bytes:
    """Convert the contents `data` of a .tiktoken file to a tokenizer.json with the same tokens and ids. `pattern` says
    how text is split: a name in PATTERNS, or a regular expression. `path` is named in errors.

    `eos` is the end-of-text token, by default `<|endoftext|>`. OpenAI's vocabularies with this pattern have a certain
    id for it. The token gets that id if it fits the file: it is free, and at most two above the last rank. Otherwise
    the token gets the number after the last rank."""
    ranks = read_ranks(data, path)
    last = max(ranks.values())
    eos_id = _EOS_IDS.get(pattern, last + 1)
    if eos_id in ranks.values() or eos_id > last + 2:            # a vocabulary of another size with the same pattern
        eos_id = last + 1
    return to_tokenizer_json(ranks, PATTERNS.get(pattern, pattern), eos or EOS, eos_id).encode()


def read_ranks(data: bytes, path: object) -> dict[bytes, int]:
    """Return {bytes of a token: its rank} of a .tiktoken file with contents `data`. Raises TokenizerError when the file
    is damaged, or when one of the 256 bytes is no token."""
    ranks: dict[bytes, int] = {}
    seen: set[int] = set()
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        try:
            encoded, rank_text = line.split()
            token, rank = base64.b64decode(encoded, validate=True), int(rank_text)
        except (ValueError, binascii.Error):
            raise TokenizerError(f"{path}: line {number}: not a token in base64, a space and a number; fetch the file "
                                 f"again") from None
        if not token or token in ranks or rank in seen or not 0 <= rank < 1 << 32:
            raise TokenizerError(f"{path}: line {number}: the token is empty, or it or the number {rank} is there "
                                 f"twice; fetch the file again")
        ranks[token] = rank
        seen.add(rank)
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise TokenizerError(f"{path}: {len(missing)} of the 256 bytes are no tokens (first: 0x{missing[0]:02X}), so "
                             f"the file is cut short or of another kind; fetch it again")
    return ranks


def to_tokenizer_json(ranks: dict[bytes, int], pattern: str, eos: str, eos_id: int) -> str:
    """Return a tokenizer.json with the tokens and ids of `ranks`, and with the end-of-text token `eos`."""
    chars = alphabet()
    spelled = {token: "".join(chars[byte] for byte in token) for token in ranks}
    # Two parts may merge if together they are a token. tiktoken merges the pair whose token has the lowest rank first.
    # Of pairs with the same token, it merges the first one in the text. A list of merges has an order for such pairs,
    # too: the one with the longer first part comes first. Runs of one character then merge from left to right
    merges = [(rank, -cut, token) for token, rank in ranks.items() for cut in range(1, len(token))
              if token[:cut] in ranks and token[cut:] in ranks]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    special: dict[str, Any] = {"id": eos_id, "content": eos, "single_word": False, "lstrip": False,
                               "rstrip": False, "normalized": False, "special": True}
    vocab = {spelled[token]: rank for token, rank in ranks.items()}
    if eos_id != len(ranks):         # if it were only in added_tokens, `tokenizers` would give it the id len(ranks)
        vocab[eos] = eos_id
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
             "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": True,
             "vocab": vocab,
             "merges": [[spelled[token[:-cut]], spelled[token[-cut:]]] for _, cut, token in sorted(merges)]}
    return json.dumps({"version": "1.0", "truncation": None, "padding": None, "added_tokens": [special],
                       "normalizer": None, "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]},
                       "post_processor": None, "decoder": level, "model": model})
