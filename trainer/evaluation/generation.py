"""Generates greedy continuations of many prompts at once. Keys and values of earlier tokens are kept, so every new
token costs one pass over a single token per prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from trainer.data.tokenizer import TextCoder
from trainer.evaluation.scoring import batches
from trainer.evaluation.task_file import GenerateConfig
from trainer.model.attention import DocMask, KeyValues
from trainer.model.transformer import Transformer


@torch.no_grad()
def continuations(model: Transformer, prompts: Sequence[Sequence[int]], config: GenerateConfig, coder: TextCoder,
                  eos: int, most: int, progress: Callable[[int], None] = lambda _rows: None) -> list[str]:
    """Return the greedy continuation of each prompt (token ids), which ends before EOS, before a stop text, or after
    the largest number of tokens. A batch has at most `most` tokens, with those to be generated, or is a single prompt.
    `progress` is called with the number of prompts of every finished batch."""
    results = [""] * len(prompts)
    for batch in batches([len(p) + config.tokens for p in prompts], most):
        for number, text in zip(batch, _batch(model, [prompts[i] for i in batch], config, coder, eos)):
            results[number] = text
        progress(len(batch))
    return results


def _batch(model: Transformer, prompts: Sequence[Sequence[int]], config: GenerateConfig, coder: TextCoder,
           eos: int) -> list[str]:
    weight, longest = model.embed.weight, max(map(len, prompts))
    lengths = torch.tensor([len(p) for p in prompts], device=weight.device)
    tokens = torch.tensor([[*p, *[eos] * (longest - len(p))] for p in prompts], device=weight.device)
    seen = [KeyValues() for _ in model.blocks]
    positions = torch.arange(longest, device=weight.device).expand(len(prompts), longest)
    # padding follows the prompt, so causal attention hides it from the prompt
    hidden = model.hidden(tokens, DocMask(positions, None, None, longest), seen)
    last = hidden[torch.arange(len(prompts), device=weight.device), lengths - 1]
    # later tokens see the prompt without its padding, and all generated tokens
    hides = torch.zeros(len(prompts), 1, 1, longest + config.tokens, dtype=weight.dtype, device=weight.device)
    padding = torch.arange(longest, device=weight.device) >= lengths[:, None]
    hides[..., :longest].masked_fill_(padding[:, None, None], float("-inf"))
    ids: list[list[int]] = [[] for _ in prompts]
    texts: list[str | None] = [None] * len(prompts)
    for count in range(1, config.tokens + 1):
        best = model.logits(last).argmax(-1)
        for i, token in enumerate(best.tolist()):
            if texts[i] is None:
                texts[i] = _extended(ids[i], token, config, coder, eos)
        if all(text is not None for text in texts) or count == config.tokens:
            break
        at = (lengths + count - 1)[:, None]
        mask = DocMask(at, hides[..., :longest + count], None, 1)
        last = model.hidden(best[:, None], mask, seen)[:, 0]
    return [coder.decode(ids[i]) if text is None else text for i, text in enumerate(texts)]


def _extended(ids: list[int], token: int, config: GenerateConfig, coder: TextCoder, eos: int) -> str | None:
    """Append `token` to `ids`. Returns the text if it ends here, at EOS or before a stop text; else None."""
    if token == eos:
        return coder.decode(ids)
    ids.append(token)
    text = coder.decode(ids)
    ends = [text.index(stop) for stop in config.stop if stop in text]
    return text[:min(ends)] if ends else None
