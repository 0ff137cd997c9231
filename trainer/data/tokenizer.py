"""Loads a tokenizer for text that a training or an evaluation handles itself. Training on shards needs none."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol


class TextCoder(Protocol):
    """Turns text into token ids and back. No special tokens are added."""

    def encode(self, text: str) -> list[int]: ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...

    def decode(self, ids: list[int]) -> str: ...


def load_tokenizer(path: Path) -> tuple[TextCoder | None, str]:
    """Load the tokenizer at `path`. Returns (tokenizer, ""), or (None, the reason) if it cannot be loaded."""
    if path.suffix == ".json":
        try:
            from tokenizers import Tokenizer
        except ImportError:
            return None, "the package `tokenizers` is not installed: pip install tokenizers"
        try:
            return HuggingFaceTokenizer(Tokenizer.from_file(str(path))), ""
        except Exception as error:         # the library raises bare Exception for anything wrong with the file
            return None, f"{path.name}: {error}"
    if path.suffix == ".model":
        try:
            from sentencepiece import SentencePieceProcessor
        except ImportError:
            return None, "the package `sentencepiece` is not installed: pip install sentencepiece"
        try:
            return SentencePieceCoder(SentencePieceProcessor(model_file=str(path))), ""
        except (OSError, RuntimeError) as error:
            return None, f"{path.name}: {error}"
    return None, f"{path.name} is neither a tokenizer.json nor a SentencePiece .model"


class HuggingFaceTokenizer:
    """Wraps a `tokenizers.Tokenizer` as a `TextCoder`."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def encode(self, text: str) -> list[int]:
        return self.inner.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [coded.ids for coded in self.inner.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: list[int]) -> str:
        return self.inner.decode(ids)


class SentencePieceCoder:
    """Wraps a `sentencepiece.SentencePieceProcessor` as a `TextCoder`."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def encode(self, text: str) -> list[int]:
        return self.inner.encode(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self.inner.encode(list(texts))

    def decode(self, ids: list[int]) -> str:
        return self.inner.decode(ids)
