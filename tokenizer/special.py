"""The special tokens that a trained tokenizer gets besides its end-of-text token: tokens for fill-in-the-middle, tokens
for dialogues, and reserved tokens, which get a meaning later. Text that spells a special token is encoded as ordinary
text, never as this token.
"""

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
    """Return the special tokens in the order of their ids, `eos` first. `special` may have these keys:

        fim       whether there are tokens for fill-in-the-middle
        chat      name of a template in CHAT, whose tokens are added
        tokens    names of further tokens
        reserved  number of tokens `<|reserved_0|>`, `<|reserved_1|>` …

    Raises TokenizerError if two tokens have the same name. A name must have at least three characters, all printable,
    and neither begin nor end with a space."""
    tokens = [eos, *(FIM if special.get("fim") else ()), *CHAT.get(special.get("chat") or "", ()),
              *(special.get("tokens") or ()), *(f"<|reserved_{n}|>" for n in range(special.get("reserved") or 0))]
    for token in tokens:
        if tokens.count(token) > 1:
            raise TokenizerError(f"tokenizer.train.special: two tokens are called '{token}'; give each another name")
        if len(token) < 3 or token != token.strip() or not token.isprintable():
            raise TokenizerError(f"tokenizer.train.special.tokens: {token!r} is no name of a special token: it needs "
                                 f"three printable characters or more, without spaces at its ends, such as '<|tool|>'")
    return tokens
