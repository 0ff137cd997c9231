"""Special tokens that a trained tokenizer gets beside its end-of-text token: tokens for fill-in-the-middle, for
dialogues, and tokens without a meaning yet. Text that spells such a token is encoded as ordinary text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizer.errors import TokenizerError

#: order as in StarCoder and Qwen: the text before the gap, the text of the gap, the text behind it, filler
FIM = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>")
#: tokens of a dialogue's template, by its name
CHAT = {"chatml": ("<|im_start|>", "<|im_end|>"),
        "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")}


def special_tokens(special: Mapping[str, Any], eos: str) -> list[str]:
    """Return the special tokens in the order of their ids, `eos` first. `special` holds some of: `fim` (whether there
    are tokens for fill-in-the-middle), `chat` (the name of a template in CHAT), `tokens` (names of further tokens) and
    `reserved` (how many tokens `<|reserved_0|>` … there are). Raises TokenizerError for a name that is there twice, has
    fewer than three characters or one that cannot be printed, or begins or ends with a space."""
    tokens = [eos, *(FIM if special.get("fim") else ()), *CHAT.get(special.get("chat") or "", ()),
              *(special.get("tokens") or ()), *(f"<|reserved_{n}|>" for n in range(special.get("reserved") or 0))]
    for token in tokens:
        if tokens.count(token) > 1:
            raise TokenizerError(f"tokenizer.train.special: two tokens are called '{token}'; give each another name")
        if len(token) < 3 or token != token.strip() or not token.isprintable():
            raise TokenizerError(f"tokenizer.train.special.tokens: {token!r} is no name of a special token: it needs "
                                 f"three printable characters or more, without spaces at its ends, such as '<|tool|>'")
    return tokens
