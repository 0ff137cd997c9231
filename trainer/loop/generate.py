"""Generates a short text from the model for a person to read. For every new token the model runs over the whole text so
far, which is acceptable for a sample but too slow for serving."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from trainer.loop.config import SampleConfig
from trainer.model.attention import document_mask
from trainer.model.transformer import Transformer
from trainer.parallel.world import World, reshard, uncompiled


@torch.no_grad()
def generate(model: Transformer, prompt: list[int], config: SampleConfig, eos: int, seed: int, dtype: torch.dtype,
             world: World) -> list[int]:
    """Generate text that continues `prompt`, as token ids. Returns the new ids up to EOS, which is not included.
    `prompt` must not be empty. Every rank must call this, and all get the same ids."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.tensor([prompt], device=world.device)
    for _ in range(config.tokens):
        positions = torch.arange(tokens.shape[1], device=world.device)[None]
        with uncompiled(model):          # every token has another length, and compiling it is not worthwhile
            logits = model(tokens, document_mask(positions, dtype))[0, -1].float().cpu()
        if config.temperature == 0:
            token = int(logits.argmax())
        else:
            best = logits.topk(min(config.top_k, logits.numel()))
            share = (best.values / config.temperature).softmax(0)
            token = int(best.indices[torch.multinomial(share, 1, generator=generator)])
        # every rank takes the first rank's token, because logits may differ in the last bit and ranks would diverge
        token = int.from_bytes(world.broadcast(token.to_bytes(8, "little")), "little")
        if token == eos:
            break
        tokens = torch.cat((tokens, torch.tensor([[token]], device=world.device)), 1)
    reshard(model)
    return tokens[0, len(prompt):].tolist()


def load_tokenizer(path: Path) -> tuple[Any | None, str]:
    """Load the tokenizer at `path`, to encode a prompt and decode what the model generates. Returns (tokenizer, ""), or
    (None, the reason) if it cannot be loaded. Training itself needs no tokenizer.

    The tokenizer has the methods `encode(text) -> list[int]` and `decode(ids) -> str`.
    """
    if path.suffix == ".json":
        try:
            from tokenizers import Tokenizer
        except ImportError:
            return None, "no sample: the package `tokenizers` is not installed"
        try:
            return HuggingFaceTokenizer(Tokenizer.from_file(str(path))), ""
        except Exception as error:         # the library raises bare Exception for anything wrong with the file
            return None, f"no sample: {path.name}: {error}"
    if path.suffix == ".model":
        try:
            from sentencepiece import SentencePieceProcessor
        except ImportError:
            return None, "no sample: the package `sentencepiece` is not installed"
        try:
            return SentencePieceProcessor(model_file=str(path)), ""
        except (OSError, RuntimeError) as error:
            return None, f"no sample: {path.name}: {error}"
    return None, f"no sample: {path.name} is neither a tokenizer.json nor a SentencePiece .model"


class HuggingFaceTokenizer:
    """Wraps a `tokenizers.Tokenizer` in the two methods that `load_tokenizer` promises."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def encode(self, text: str) -> list[int]:
        return self.inner.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        return self.inner.decode(ids)
