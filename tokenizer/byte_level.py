"""The tokenizer whose tokens are the bytes of UTF-8. Ids 0 to 254 are bytes, and id 255 is the end-of-text token.

UTF-8 text never contains the byte 0xFF. So no text is encoded to id 255, and a file of tokens can be split into
documents at every 0xFF.

The tokenizer is stored as an ordinary Hugging Face `tokenizer.json`, so that other programs can load it, too.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

EOS = "<|endoftext|>"
EOS_ID = 0xFF


def alphabet() -> list[str]:
    """Return the 256 characters with which GPT-2's byte-level tokenizers write the bytes 0 to 255, in this order.

    A byte that is a visible Latin-1 character (neither white space nor the soft hyphen) is written as this character.
    The other 68 bytes are written as the characters from U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def byte_level_json() -> str:
    """Return the contents of the byte tokenizer's tokenizer.json. They are always the same."""
    special = {"id": EOS_ID, "content": EOS, "single_word": False, "lstrip": False, "rstrip": False,
               "normalized": False, "special": True}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model: dict[str, Any] = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
             "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
             "vocab": {char: byte for byte, char in enumerate(alphabet()[:EOS_ID])}, "merges": []}
    return json.dumps({"version": "1.0", "truncation": None, "padding": None, "added_tokens": [special],
                       "normalizer": None, "pre_tokenizer": level, "post_processor": None, "decoder": level,
                       "model": model}, indent=1, ensure_ascii=False) + "\n"


class ByteLevel:
    """The byte tokenizer's encoder and decoder (a `tokenizer.load.CodingLibrary`). It needs no library."""

    name = "bytes"
    vocab_size = 256

    def __init__(self) -> None:
        self._tokens = [*alphabet()[:EOS_ID], EOS]
        self._ids = {token: id for id, token in enumerate(self._tokens)}

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        parts = [text.encode() for text in texts]
        return (np.frombuffer(b"".join(parts), np.uint8).astype(np.uint32),
                np.fromiter(map(len, parts), np.int64, len(parts)))

    def decode(self, ids: Sequence[int]) -> str:
        return EOS.join(part.decode(errors="replace") for part in bytes(ids).split(b"\xff"))

    def token_id(self, token: str) -> int | None:
        return self._ids.get(token)

    def token(self, id: int) -> str | None:
        return self._tokens[id] if 0 <= id < len(self._tokens) else None

    def unknown_id(self) -> int | None:
        return None
