"""Generates a short text from the model for a person to read. For every new token the model runs over the whole text so
far, which is acceptable for a sample but too slow for serving."""

from __future__ import annotations

import torch

from trainer.loop.config import SampleConfig
from trainer.model.attention import document_mask
from trainer.model.transformer import Transformer
from trainer.parallel.world import World, reshard, uncompiled


@torch.no_grad()
def generate(model: Transformer, prompt: list[int], config: SampleConfig, eos: int, seed: int, dtype: torch.dtype,
             world: World) -> list[int]:
    """Generate text that continues `prompt`, as token ids. Returns the new ids: `config.tokens` of them, or those
    before the first EOS. `prompt` must not be empty. Every rank must call this, and all get the same ids."""
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
